// What the FP8 Linear in C++ is made of: Python's objects, tensors, layers, casts and GEMMs.
#pragma once

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

#include <algorithm>

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
  int64_t slot = -1;
  std::vector<int64_t> taken;  // by whom: their own slots
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
  int64_t own;  // slot of x, were there no siblings
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

}  // namespace
}  // namespace ampplug
