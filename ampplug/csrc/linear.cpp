// The FP8 Linear of nn/linear_function.py in C++: the common case of a training step, from one call of a layer to the end of its backward pass.
//
// Numbers, launches and saved tensors are those of the Python path, which takes every call that is not common (`forward` returns None).
// The Python side owns all state; it is read at every call and nothing is pushed: a layer that moved or was rebuilt is noticed by the objects that it
// was made of being others. Backward needs no interpreter, except for the first launch of a kind and to drop a cast that Python left for siblings.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_ops.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <structmember.h>

#include "launcher.h"

namespace ampplug {
namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

Launcher launcher;
bool enabled = true;              // read and written with the interpreter
PyObject* resolve = nullptr;      // launches a cast of a kind that has no kernel yet: nn/native.py
PyObject* gemm = nullptr;         // of tensors on a CPU, in tests
PyObject* shared_type = nullptr;  // linear_function._Shared

// ---------------------------------------------------------------- Python's objects

// Pass Python's error on, kept in the exception: this may be a thread that forgets all of Python when it lets go of the interpreter.
[[noreturn]] void fail() {
  python_error error;
  error.persist();
  throw error;
}

// A strong reference.
class Ref {
 public:
  explicit Ref(PyObject* object) : object_(object) {
    if (object == nullptr) fail();
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

Ref attribute(PyObject* object, PyObject* name) { return Ref(PyObject_GetAttr(object, name)); }

Ref take(PyObject* borrowed) {
  Py_INCREF(borrowed);
  return Ref(borrowed);
}

#define AMPPLUG_NAMES(X) X(weight) X(bias) X(_all_known) X(known) X(scale_views) X(amax_views) X(scratch_views) X(w8) X(w8t) X(scale_inv) X(seen) X(master) X(param) X(_shared) X(shared)
namespace name {
#define X(n) PyObject* n;
AMPPLUG_NAMES(X)
#undef X
}  // namespace name

class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

Tensor tensor_of(PyObject* object) {
  if (!THPVariable_CheckExact(object)) throw std::invalid_argument("ampplug: expected a tensor");
  return THPVariable_Unpack(object);
}

PyObject* wrap(const Tensor& t) {
  if (t.defined()) return THPVariable_Wrap(t);
  Py_RETURN_NONE;
}

// ---------------------------------------------------------------- tensors

Tensor allocate(at::IntArrayRef sizes, at::ScalarType type, c10::Device device) {
  // straight to the device's own function: the dispatcher has nothing to add
  c10::DispatchKeySet keys(device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  return at::_ops::empty_memory_format::redispatch(keys, c10::fromIntArrayRefSlow(sizes), type, at::kStrided, device, std::nullopt, std::nullopt);
}

Tensor part(const Tensor& whole, at::ScalarType type, int64_t byte, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(whole.storage()), whole.key_set(), c10::scalarTypeToTypeMeta(type));
  t.unsafeGetTensorImpl()->set_storage_offset(byte / static_cast<int64_t>(c10::elementSize(type)));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return t;
}

Tensor transposed(const Tensor& matrix) {
  return part(matrix, matrix.scalar_type(), matrix.storage_offset() * static_cast<int64_t>(matrix.element_size()), {matrix.size(1), matrix.size(0)},
              {matrix.stride(1), matrix.stride(0)});
}

int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// [..., K] as a matrix of M rows.
struct Matrix {
  Tensor tensor;
  int64_t rows, columns, row_stride, column_stride;

  explicit Matrix(const Tensor& t) : tensor(t), columns(t.size(-1)) {
    rows = t.numel() / columns;
    if (t.is_contiguous()) {
      row_stride = columns, column_stride = 1;
      return;
    }
    if (t.dim() != 2) tensor = t.reshape({rows, columns});
    row_stride = tensor.stride(0), column_stride = tensor.stride(1);
  }
};

// ---------------------------------------------------------------- what layers are made of

// The last cast of an input, for the layers beside: as `linear_function._Shared`, of which Python sees one.
struct SharedCast {
  PyObject* x = nullptr;  // weak reference
  int64_t version = 0;
  void* stream = nullptr;
  Tensor x8, x8t, scale_inv;
};

struct BankData {
  std::mutex mutex;
  SharedCast cast;                 // guarded by mutex; `x` by the interpreter
  std::atomic<bool> foreign{true};  // Python may have left a cast in the bank

  void forget() {
    Tensor x8, x8t, scale_inv;  // freed after the lock
    std::lock_guard<std::mutex> lock(mutex);
    x8 = std::move(cast.x8), x8t = std::move(cast.x8t), scale_inv = std::move(cast.scale_inv);
  }
};

struct Slot {
  int64_t index;
  Tensor scale, amax, scratch;
};

struct LayerData {
  // strong references, to be compared with what Python holds at a call
  PyObject *param, *entry, *bank, *book, *views, *w8, *dtype;
  std::shared_ptr<BankData> shared;
  PyObject* shared_object;
  Slot x, dy;
  Tensor forward, backward, scale_inv;  // W8 [K, N] and W8T [N, K], as the second operand of a GEMM
  int64_t n, k;
  bool power_of_two;
  int64_t multiprocessors, tile_m, tile_k, span;
  c10::Device device{c10::kCPU};

  LayerData() = default;
  LayerData(const LayerData&) = delete;
  LayerData& operator=(const LayerData&) = delete;
  ~LayerData() {
    if (!Py_IsInitialized()) return;
    PyGILState_STATE state = PyGILState_Ensure();
    for (PyObject* object : {param, entry, bank, book, views, w8, dtype, shared_object}) Py_XDECREF(object);
    PyGILState_Release(state);
  }
};
using Layer = std::shared_ptr<LayerData>;

// ---------------------------------------------------------------- launches

struct Fp8 {
  Tensor rows, columns, scale_inv;
};

void first_launch(uint64_t key, const LayerData& layer, const Matrix& m, const Slot& slot, const Fp8& out, bool record) {
  pybind11::gil_scoped_acquire interpreter;
  Tensor x = part(m.tensor, m.tensor.scalar_type(), m.tensor.storage_offset() * static_cast<int64_t>(m.tensor.element_size()), {m.rows, m.columns},
                  {m.row_stride, m.column_stride});
  Ref number(PyLong_FromUnsignedLongLong(key)), px(wrap(x)), rows(wrap(out.rows)), columns(wrap(out.columns)), inverse(wrap(out.scale_inv));
  Ref scale(wrap(slot.scale)), amax(wrap(record ? slot.amax : Tensor())), scratch(wrap(slot.scratch));
  Ref done(PyObject_CallFunctionObjArgs(resolve, number.get(), px.get(), rows.get(), columns.get(), inverse.get(), scale.get(), amax.get(), scratch.get(),
                                        layer.power_of_two ? Py_True : Py_False, nullptr));
}

// `together`: both results are done with at the same time and share an allocation; else the rows may go before the columns.
Fp8 cast(const LayerData& layer, const Matrix& m, const Slot& slot, at::ScalarType type, bool rows, bool columns, bool record, bool together) {
  const int64_t m16 = up(m.rows, 16), k = m.columns;
  Fp8 out;
  const int64_t first = rows && together ? up(m.rows * k, 256) : 0, second = columns ? up(k * m16, 256) : 0;
  Tensor storage = allocate({first + second + 4}, at::kByte, layer.device);
  if (rows) out.rows = together ? part(storage, type, 0, {m.rows, k}, {k, 1}) : allocate({m.rows, k}, type, layer.device);
  if (columns) out.columns = part(storage, type, first, {k, m16}, {m16, 1});
  out.scale_inv = part(storage, at::kFloat, first + second, {1}, {1});

  const int64_t tiles_m = ((columns ? m16 : m.rows) + layer.tile_m - 1) / layer.tile_m, tiles_k = (k + layer.tile_k - 1) / layer.tile_k;
  const int64_t span = std::min(layer.span, std::max<int64_t>(1, tiles_m * tiles_k / (8 * layer.multiprocessors)));
  Cast c;
  c.x = m.tensor.const_data_ptr();
  c.rows = rows ? out.rows.const_data_ptr() : c.x;
  c.columns = columns ? out.columns.const_data_ptr() : c.x;
  c.scale_inv = out.scale_inv.const_data_ptr();
  c.slot_scale = slot.scale.const_data_ptr();
  c.partials = c.x;
  c.record = record ? slot.amax.const_data_ptr() : c.x;
  c.scratch = slot.scratch.const_data_ptr();
  c.programs = static_cast<unsigned>((tiles_m + span - 1) / span * tiles_k);
  const int64_t menders = std::min<int64_t>(c.programs, layer.multiprocessors);
  const int64_t integers[] = {m.rows, k, m.row_stride, m.column_stride, k, m16, 0, tiles_m, span, menders};
  for (int i = 0; i < Cast::INTEGERS; ++i) c.integers[i] = static_cast<int32_t>(integers[i]);
  c.device = static_cast<uint8_t>(layer.device.is_cuda() ? layer.device.index() : 255);
  const at::ScalarType from = m.tensor.scalar_type();
  c.x_type = from == at::kBFloat16 ? 0 : from == at::kHalf ? 1 : 2;
  c.fp8_type = type == at::kFloat8_e5m2;
  c.has_rows = rows, c.has_columns = columns, c.has_record = record, c.power_of_two = layer.power_of_two;

  Kernel kernel;
  const uint64_t key = c.key();
  const int device = layer.device.is_cuda() ? layer.device.index() : -1;
  if (launcher.find(key, kernel))
    launcher.launch(kernel, c, device, launcher.stream(device));
  else
    first_launch(key, layer, m, slot, out, record);
  return out;
}

// a [M, K] times b [K, N], the latter column-major.
Tensor multiply(const Tensor& a, const Tensor& b, const Tensor& a_inv, const Tensor& b_inv, at::ScalarType type, bool fast) {
  if (a.is_cuda()) return at::_scaled_mm(a, b, a_inv, b_inv, std::nullopt, std::nullopt, type, fast);
  pybind11::gil_scoped_acquire interpreter;
  Ref pa(wrap(a)), pb(wrap(transposed(b))), sa(wrap(a_inv)), sb(wrap(b_inv));
  PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(type));
  Ref y(PyObject_CallFunctionObjArgs(gemm, pa.get(), pb.get(), sa.get(), sb.get(), dtype, fast ? Py_True : Py_False, nullptr));
  return tensor_of(y.get());
}

// ---------------------------------------------------------------- backward

struct LinearBackward : public Node {
  Layer layer;
  SavedVariable x8t, x_inv, weight;  // the weight only so that autograd notices if it is changed before backward
  at::ScalarType x_type, weight_type, bias_type;

  std::string name() const override { return "_Fp8LinearBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    x8t.reset_data();
    x_inv.reset_data();
    weight.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    Tensor dy = std::move(grads[0]);
    variable_list out(num_outputs());
    {
      c10::AutoGradMode off(false);
      if (!dy.defined()) dy = input_metadata(0).zeros_like();
      const Tensor columns = x8t.unpack(), inverse = x_inv.unpack();
      weight.unpack();
      compute(dy, columns, inverse, out);
    }
    if (c10::GradMode::is_enabled() && dy.requires_grad()) return twice(std::move(out));
    return out;
  }

 private:
  void compute(const Tensor& dy, const Tensor& columns, const Tensor& x_inverse, variable_list& out) {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::OptionalDeviceGuard device(layer->device);
    const bool need_x = task_should_compute_output(0), need_weight = task_should_compute_output(1);
    const bool need_bias = num_outputs() > 2 && task_should_compute_output(2);
    layer->shared->forget();
    if (layer->shared->foreign.exchange(false)) {
      pybind11::gil_scoped_acquire interpreter;
      if (PyObject_SetAttr(layer->bank, name::shared, Py_None) != 0) fail();
      layer->shared->foreign = false;
    }
    const Matrix m(dy);
    if (need_x || need_weight) {
      const Fp8 dy8 = cast(*layer, m, layer->dy, at::kFloat8_e5m2, need_x, need_weight, true, true);
      if (need_x) {
        Tensor dx = multiply(dy8.rows, layer->backward, dy8.scale_inv, layer->scale_inv, x_type, false);
        if (dy.dim() != 2) {
          c10::SmallVector<int64_t, 5> sizes(dy.sizes().begin(), dy.sizes().end());
          sizes.back() = layer->k;
          dx.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
        }
        out[0] = std::move(dx);
      }
      if (need_weight) out[1] = multiply(dy8.columns, transposed(columns), dy8.scale_inv, x_inverse, weight_type, false);
    }
    if (need_bias) {
      const Tensor rows = m.tensor.dim() == 2 ? m.tensor : m.tensor.reshape({m.rows, m.columns});
      out[2] = at::sum(rows, at::IntArrayRef{0}, false, at::kFloat).to(bias_type);
    }
  }

  // As @once_differentiable: gradients whose own gradient is an error.
  static variable_list twice(variable_list&& out);
};

// torch holds nodes by std::shared_ptr, later by c10::intrusive_ptr.
template <class Pointer>
struct Make;
template <class T>
struct Make<std::shared_ptr<T>> {
  template <class N, class... A>
  static std::shared_ptr<N> make(A&&... a) {
    return std::shared_ptr<N>(new N(std::forward<A>(a)...), [](N* node) { deleteNode(node); });
  }
};
template <class T, class D>
struct Make<c10::intrusive_ptr<T, D>> {
  template <class N, class... A>
  static c10::intrusive_ptr<N> make(A&&... a) {
    return c10::make_intrusive<N>(std::forward<A>(a)...);
  }
};
using MakeNode = Make<decltype(torch::autograd::Edge::function)>;

variable_list LinearBackward::twice(variable_list&& out) {
  for (Tensor& t : out)
    if (t.defined()) t = t.detach().set_requires_grad(true);
  auto error = MakeNode::make<torch::autograd::DelayedError>(
      "trying to differentiate twice a function that was marked with @once_differentiable", static_cast<int64_t>(out.size()));
  return (*error)(std::move(out));
}

// ---------------------------------------------------------------- forward

bool modes_active() {
  using K = c10::DispatchKey;
  constexpr c10::DispatchKeySet special{K::FuncTorchDynamicLayerFrontMode, K::FuncTorchVmapMode, K::Functionalize, K::Python, K::PythonTLSSnapshot, K::Tracer};
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(special) || at::impl::torch_function_mode_enabled() || c10::InferenceMode::is_enabled();
}

bool plain(const Tensor& t) {
  using K = c10::DispatchKey;
  constexpr c10::DispatchKeySet special{K::Python, K::Functionalize, K::FuncTorchGradWrapper, K::FuncTorchBatched, K::Conjugate, K::Negative, K::ZeroTensor};
  return !t.key_set().has_any(special) && t.layout() == at::kStrided && !t.is_nested() && !t.is_inference();
}

bool float_type(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf || type == at::kFloat; }

// Whether W8 is of the weight as it is, and the layer as it was when `LayerData` was made. Needs the interpreter.
bool current(const LayerData& layer, const Tensor& weight) {
  if (attribute(layer.book, name::_all_known).get() != Py_True || attribute(layer.book, name::scale_views).get() != layer.views) return false;
  if (attribute(layer.entry, name::w8).get() != layer.w8) return false;
  const Ref master = attribute(layer.entry, name::master), param = attribute(master.get(), name::param), seen = attribute(layer.entry, name::seen);
  if (param.get() != layer.param || !PyTuple_CheckExact(seen.get()) || PyTuple_GET_SIZE(seen.get()) != 3) return false;
  const void* address = PyLong_AsVoidPtr(PyTuple_GET_ITEM(seen.get(), 0));
  const int64_t version = PyLong_AsLongLong(PyTuple_GET_ITEM(seen.get(), 2));
  if (PyErr_Occurred()) fail();
  return address == weight.const_data_ptr() && PyTuple_GET_ITEM(seen.get(), 1) == layer.dtype && version == static_cast<int64_t>(weight._version());
}

// A sibling's cast of x, if there is one that serves. Needs the interpreter.
bool sibling(const LayerData& layer, PyObject* x, int64_t version, void* stream, bool columns, Fp8& out) {
  const Ref shared = attribute(layer.bank, name::_shared);
  if (shared.get() == layer.shared_object) {
    std::lock_guard<std::mutex> lock(layer.shared->mutex);
    const SharedCast& c = layer.shared->cast;
    if (!c.x8.defined() || c.x == nullptr || PyWeakref_GetObject(c.x) != x || c.version != version || c.stream != stream) return false;
    if (columns && !c.x8t.defined()) return false;
    out = {c.x8, columns ? c.x8t : Tensor(), c.scale_inv};
    return true;
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(shared.get())) != shared_type || PyTuple_GET_SIZE(shared.get()) != 6) return false;
  PyObject* const* field = reinterpret_cast<PyTupleObject*>(shared.get())->ob_item;  // x, version, stream, x8, x8t, scale_inv
  if (!PyWeakref_Check(field[0]) || PyWeakref_GetObject(field[0]) != x || PyLong_AsLongLong(field[1]) != version || PyLong_AsVoidPtr(field[2]) != stream) {
    if (PyErr_Occurred()) fail();
    return false;
  }
  if (columns && field[4] == Py_None) return false;
  out = {tensor_of(field[3]), columns ? tensor_of(field[4]) : Tensor(), tensor_of(field[5])};
  return true;
}

// Leave a cast for siblings. Needs the interpreter.
void leave(const LayerData& layer, PyObject* x, int64_t version, void* stream, const Fp8& made) {
  PyObject* reference = PyWeakref_NewRef(x, layer.shared_object);
  if (reference == nullptr) fail();
  SharedCast fresh{reference, version, stream, made.rows, made.columns, made.scale_inv};
  {
    std::lock_guard<std::mutex> lock(layer.shared->mutex);
    std::swap(layer.shared->cast, fresh);
  }
  Py_XDECREF(fresh.x);
  const Ref shared = attribute(layer.bank, name::_shared);
  if (shared.get() != layer.shared_object && PyObject_SetAttr(layer.bank, name::_shared, layer.shared_object) != 0) fail();
}

// y, or an undefined tensor where Python must do it.
Tensor forward(const Layer& layer, PyObject* px, PyObject* parameters) {
  const LayerData& l = *layer;
  if (!enabled || !THPVariable_CheckExact(px) || !PyDict_CheckExact(parameters)) return {};
  PyObject* pw = PyDict_GetItemWithError(parameters, name::weight);
  PyObject* pb = PyDict_GetItemWithError(parameters, name::bias);
  if (pw != l.param || pb == nullptr || (pb != Py_None && !THPVariable_CheckExact(pb)) || modes_active()) return {};
  const Tensor &x = THPVariable_Unpack(px), &weight = THPVariable_Unpack(pw);
  const Tensor bias = pb == Py_None ? Tensor() : THPVariable_Unpack(pb);
  if (!plain(x) || !plain(weight) || !float_type(x.scalar_type()) || x.dim() == 0 || x.size(-1) != l.k || x.numel() == 0) return {};
  if (x.device() != l.device || weight.device() != l.device || !weight.is_contiguous() || (bias.defined() && (!plain(bias) || bias.device() != l.device))) return {};
  if (x.numel() > INT32_MAX || x.numel() / l.k * l.n > INT32_MAX || torch::autograd::isFwGradDefined(x) || torch::autograd::isFwGradDefined(weight)) return {};
  const auto kind = l.device.type();
  const at::ScalarType type = at::autocast::is_autocast_enabled(kind) ? at::autocast::get_autocast_dtype(kind) : x.scalar_type();
  if (!float_type(type) || !current(l, weight)) return {};

  const bool grad = c10::GradMode::is_enabled(), need_weight = weight.requires_grad();
  const int64_t version = x._version();
  c10::OptionalDeviceGuard device(l.device);
  void* stream = launcher.stream(l.device.is_cuda() ? l.device.index() : -1);
  Fp8 x8;
  const bool known = sibling(l, px, version, stream, need_weight, x8);
  if (!known) {
    const Ref slots = attribute(l.book, name::known);
    if (!PyList_CheckExact(slots.get()) || l.x.index >= PyList_GET_SIZE(slots.get()) || PyList_GET_ITEM(slots.get(), l.x.index) != Py_True) return {};
  }
  Tensor y;
  {
    WithoutInterpreter released;
    at::AutoDispatchBelowADInplaceOrView below;
    const Matrix m(x);
    if (m.row_stride > INT32_MAX || m.column_stride > INT32_MAX) return {};
    if (!known) x8 = cast(l, m, l.x, at::kFloat8_e4m3fn, true, need_weight, grad, false);
    y = multiply(x8.rows, l.forward, x8.scale_inv, l.scale_inv, type, true);
    if (bias.defined()) y.add_(bias.to(type));
    if (x.dim() != 2) {
      c10::SmallVector<int64_t, 5> sizes(x.sizes().begin(), x.sizes().end());
      sizes.back() = l.n;
      y.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    }
  }
  if (!known) leave(l, px, version, stream, x8);
  if (grad && (need_weight || x.requires_grad() || (bias.defined() && bias.requires_grad()))) {
    auto node = MakeNode::make<LinearBackward>();
    node->set_next_edges(bias.defined() ? torch::autograd::collect_next_edges(x, weight, bias) : torch::autograd::collect_next_edges(x, weight));
    node->layer = layer;
    node->x8t = SavedVariable(x8.columns, false);
    node->x_inv = SavedVariable(x8.scale_inv, false);
    node->weight = SavedVariable(weight, false);
    node->x_type = x.scalar_type(), node->weight_type = weight.scalar_type();
    node->bias_type = bias.defined() ? bias.scalar_type() : at::kFloat;
    torch::autograd::set_history(y, node);
  }
  return y;
}

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
  const Ref x = take(c.x), version(PyLong_FromLongLong(c.version)), stream(PyLong_FromVoidPtr(c.stream)), x8(wrap(c.x8)), x8t(wrap(c.x8t)), inverse(wrap(c.scale_inv));
  return PyObject_CallFunctionObjArgs(shared_type, x.get(), version.get(), stream.get(), x8.get(), x8t.get(), inverse.get(), nullptr);
  END_HANDLE_TH_ERRORS
}

PyObject* bank_mark(PyObject* self, PyObject*) {
  reinterpret_cast<PyBank*>(self)->data->foreign = true;
  Py_RETURN_NONE;
}

PyMethodDef bank_methods[] = {
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

// (entry, bank, shared, book, x_slot, dy_slot, power_of_two, multiprocessors, tile_m, tile_k, span)
PyObject* layer_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *entry, *bank, *shared, *book;
  long long x_slot, dy_slot, multiprocessors, tile_m, tile_k, span;
  int power_of_two;
  if (!PyArg_ParseTuple(arguments, "OOO!OLLpLLLL", &entry, &bank, bank_type, &shared, &book, &x_slot, &dy_slot, &power_of_two, &multiprocessors, &tile_m, &tile_k, &span))
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
