// The Python module of the FP8 Linear in C++: its types, and what nn/native.py calls.
#include "linear.h"

namespace ampplug {
namespace {

// ---------------------------------------------------------------- the module

struct PyBank {
  PyObject_HEAD
  std::shared_ptr<BankData> data;
};

struct PyLayer {
  PyObject_HEAD
  vectorcallfunc call;
  Layer data;
};

PyObject* bank_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) new (&reinterpret_cast<PyBank*>(self)->data) std::shared_ptr<BankData>(std::make_shared<BankData>());
  return self;
}

void bank_free(PyObject* self) {
  auto* bank = reinterpret_cast<PyBank*>(self);
  PyTypeObject* type = Py_TYPE(self);
  Py_CLEAR(bank->data->cast.x);
  bank->data->forget();
  bank->data.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

// Called as the weak reference's callback: x is gone.
PyObject* bank_call(PyObject* self, PyObject* arguments, PyObject*) {
  BankData& data = *reinterpret_cast<PyBank*>(self)->data;
  PyObject* gone = nullptr;
  if (!PyArg_ParseTuple(arguments, "O", &gone)) return nullptr;
  if (gone == data.cast.x) data.forget();
  Py_RETURN_NONE;
}

PyObject* bank_snapshot(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  BankData& data = *reinterpret_cast<PyBank*>(self)->data;
  SharedCast c;
  {
    std::lock_guard<std::mutex> lock(data.mutex);
    c = data.cast;
  }
  if (!c.x8.defined() || c.x == nullptr) Py_RETURN_NONE;
  const Ref x = take(c.x), version(PyLong_FromLongLong(c.version)), stream(PyLong_FromVoidPtr(c.stream)), x8(wrap(c.x8)), x8t(wrap(c.x8t)), inverse(wrap(c.scale_inv)),
      slot(PyLong_FromLongLong(c.slot)), taken(PySet_New(nullptr));
  for (int64_t layer : c.taken) {
    const Ref number(PyLong_FromLongLong(layer));
    if (PySet_Add(taken.get(), number.get()) != 0) fail();
  }
  return PyObject_CallFunctionObjArgs(shared_type, x.get(), version.get(), stream.get(), x8.get(), x8t.get(), inverse.get(), slot.get(), taken.get(), nullptr);
  END_HANDLE_TH_ERRORS
}

PyObject* bank_mark(PyObject* self, PyObject*) {
  reinterpret_cast<PyBank*>(self)->data->foreign = true;
  Py_RETURN_NONE;
}

PyObject* bank_take(PyObject* self, PyObject* number) {
  const int64_t layer = PyLong_AsLongLong(number);
  if (PyErr_Occurred()) return nullptr;
  BankData& data = *reinterpret_cast<PyBank*>(self)->data;
  std::lock_guard<std::mutex> lock(data.mutex);
  data.cast.taken.push_back(layer);
  Py_RETURN_NONE;
}

PyMethodDef bank_methods[] = {
    {"take", bank_take, METH_O, "A layer, by its own slot, has taken the last cast."},
    {"snapshot", bank_snapshot, METH_NOARGS, "The last cast as Python keeps it, or None."},
    {"mark", bank_mark, METH_NOARGS, "Python has left a cast in the bank, which the next backward pass shall drop."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot bank_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(bank_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(bank_free)},
    {Py_tp_call, reinterpret_cast<void*>(bank_call)},
    {Py_tp_methods, bank_methods},
    {0, nullptr},
};
PyType_Spec bank_spec = {"ampplug.Bank", sizeof(PyBank), 0, Py_TPFLAGS_DEFAULT, bank_slots};
PyTypeObject* bank_type;

PyObject* layer_call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* keywords) {
  HANDLE_TH_ERRORS
  if (PyVectorcall_NARGS(flags) != 2 || keywords != nullptr) {
    PyErr_SetString(PyExc_TypeError, "a layer is called with its input and the module's parameters");
    return nullptr;
  }
  Tensor y = forward(reinterpret_cast<PyLayer*>(self)->data, arguments[0], arguments[1]);
  if (!y.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

Slot slot_of(PyObject* book, int64_t index) {
  const Ref scales = attribute(book, name::scale_views), amaxes = attribute(book, name::amax_views), scratches = attribute(book, name::scratch_views);
  for (PyObject* list : {scales.get(), amaxes.get(), scratches.get()})
    if (!PyList_CheckExact(list) || index < 0 || index >= PyList_GET_SIZE(list)) throw std::invalid_argument("ampplug: no such slot");
  return {index, tensor_of(PyList_GET_ITEM(scales.get(), index)), tensor_of(PyList_GET_ITEM(amaxes.get(), index)), tensor_of(PyList_GET_ITEM(scratches.get(), index))};
}

// (entry, bank, shared, book, x_slot, own_slot, dy_slot, power_of_two, multiprocessors, tile_m, tile_k, span)
PyObject* layer_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *entry, *bank, *shared, *book;
  long long x_slot, own_slot, dy_slot, multiprocessors, tile_m, tile_k, span;
  int power_of_two;
  if (!PyArg_ParseTuple(arguments, "OOO!OLLLpLLLL", &entry, &bank, bank_type, &shared, &book, &x_slot, &own_slot, &dy_slot, &power_of_two, &multiprocessors, &tile_m, &tile_k, &span))
    return nullptr;
  auto data = std::make_shared<LayerData>();
  data->param = data->views = data->w8 = nullptr;
  data->entry = Py_NewRef(entry), data->bank = Py_NewRef(bank), data->book = Py_NewRef(book), data->shared_object = Py_NewRef(shared);
  data->dtype = nullptr;
  data->shared = reinterpret_cast<PyBank*>(shared)->data;
  const Ref master = attribute(entry, name::master), w8t = attribute(entry, name::w8t), inverse = attribute(entry, name::scale_inv);
  data->param = PyObject_GetAttr(master.get(), name::param);
  data->w8 = PyObject_GetAttr(entry, name::w8);
  data->views = PyObject_GetAttr(book, name::scale_views);
  if (data->param == nullptr || data->w8 == nullptr || data->views == nullptr) fail();
  const Tensor weight = tensor_of(data->param);
  data->dtype = Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(weight.scalar_type())));
  data->forward = transposed(tensor_of(data->w8));
  data->backward = transposed(tensor_of(w8t.get()));
  data->scale_inv = tensor_of(inverse.get());
  data->n = weight.size(0), data->k = weight.size(1);
  data->x = slot_of(book, x_slot), data->dy = slot_of(book, dy_slot);
  data->own = own_slot;
  data->x.scratch = slot_of(book, own_slot).scratch;  // layers of one slot may cast on several streams at once
  data->power_of_two = power_of_two;
  data->multiprocessors = multiprocessors, data->tile_m = tile_m, data->tile_k = tile_k, data->span = span;
  data->device = weight.device();
  TORCH_CHECK(data->forward.sizes() == at::IntArrayRef({data->k, data->n}) && data->backward.sizes() == at::IntArrayRef({data->n, data->k}),
              "ampplug: FP8 copies [", data->forward.size(1), ", ", data->forward.size(0), "] are not of a weight [", data->n, ", ", data->k, "]");
  TORCH_CHECK(data->x.scale.device() == data->device && data->scale_inv.device() == data->device, "ampplug: scales and weight are on different devices");
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  reinterpret_cast<PyLayer*>(self)->call = layer_call;
  new (&reinterpret_cast<PyLayer*>(self)->data) Layer(std::move(data));
  return self;
  END_HANDLE_TH_ERRORS
}

void layer_free(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<PyLayer*>(self)->data.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef layer_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PyLayer, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot layer_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(layer_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(layer_free)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, layer_members},
    {0, nullptr},
};
PyType_Spec layer_spec = {"ampplug.Layer", sizeof(PyLayer), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, layer_slots};

PyObject* set_up(PyObject*, PyObject* arguments) {
  PyObject *r, *g, *s;
  if (!PyArg_ParseTuple(arguments, "OOO", &r, &g, &s)) return nullptr;
  resolve = Py_NewRef(r), gemm = Py_NewRef(g), shared_type = Py_NewRef(s);
  launcher.find();
  return PyBool_FromLong(launcher.launch_kernel != nullptr && launcher.current_stream != nullptr);
}

PyObject* set_driver(PyObject*, PyObject* address) {
  launcher.launch_kernel = reinterpret_cast<LaunchKernel>(PyLong_AsVoidPtr(address));
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyObject* add_kernel(PyObject*, PyObject* arguments) {
  unsigned long long key, function;
  unsigned threads, shared;
  if (!PyArg_ParseTuple(arguments, "KKII", &key, &function, &threads, &shared)) return nullptr;
  launcher.add(key, {reinterpret_cast<void*>(function), threads, shared});
  Py_RETURN_NONE;
}

PyObject* sizes_of(PyObject*, PyObject* number) {
  const uint64_t key = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred()) return nullptr;
  const std::vector<int> sizes = parameter_sizes(key);
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(sizes.size()));
  for (size_t i = 0; list != nullptr && i < sizes.size(); ++i) PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), PyLong_FromLong(sizes[i]));
  return list;
}

PyObject* clear_kernels(PyObject*, PyObject*) {
  launcher.clear();
  Py_RETURN_NONE;
}

PyObject* enable(PyObject*, PyObject* on) {
  enabled = PyObject_IsTrue(on) == 1;
  Py_RETURN_NONE;
}

PyObject* take_launches(PyObject*, PyObject*) { return PyLong_FromLongLong(launcher.launches.exchange(0)); }

PyMethodDef methods[] = {
    {"set_up", set_up, METH_VARARGS, "(resolve, gemm, shared type): give what is called back; returns whether kernels can be launched."},
    {"set_driver", set_driver, METH_O, "Address of a function to launch kernels with, instead of the driver's."},
    {"add_kernel", add_kernel, METH_VARARGS, "(key, function, threads a program, bytes of shared memory): the kernel of a kind of casts."},
    {"parameter_sizes", sizes_of, METH_O, "Bytes of each parameter of the kernel of a key."},
    {"clear_kernels", clear_kernels, METH_NOARGS, "Forget all kernels."},
    {"enable", enable, METH_O, "Whether layers run; where not, they leave all to Python."},
    {"take_launches", take_launches, METH_NOARGS, "Launches made since this was last called."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "ampplug_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace ampplug

PyMODINIT_FUNC PyInit_ampplug_native() {
  using namespace ampplug;
#define X(n) \
  name::n = PyUnicode_InternFromString(#n); \
  if (name::n == nullptr) return nullptr;
  AMPPLUG_NAMES(X)
#undef X
  PyObject* m = PyModule_Create(&ampplug::module);
  PyObject* bank = PyType_FromSpec(&bank_spec);
  PyObject* layer = PyType_FromSpec(&layer_spec);
  if (m == nullptr || bank == nullptr || layer == nullptr) return nullptr;
  bank_type = reinterpret_cast<PyTypeObject*>(bank);
  if (PyModule_AddObjectRef(m, "Bank", bank) != 0 || PyModule_AddObjectRef(m, "Layer", layer) != 0) return nullptr;
  return m;
}
