// The FP8 Linear of nn/linear_function.py in C++: the common case of a training step, from one call of a layer to the end of its backward pass.
//
// Numbers, launches and saved tensors are those of the Python path, which takes every call that is not common (`forward` returns None).
// The Python side owns all state; it is read at every call and nothing is pushed: a layer that moved or was rebuilt is noticed by the objects that it
// was made of being others. Backward needs no interpreter, except for the first launch of a kind and to drop a cast that Python left for siblings.
#pragma once

#include "parts.h"

namespace ampplug {
namespace {

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

enum class Sibling { none, serves, to_be_joined };

// A sibling's cast of x, if there is one that serves. One of another slot is Python's: the layer joins that slot, and is made anew. Needs the interpreter.
Sibling sibling(const LayerData& layer, PyObject* x, int64_t version, void* stream, bool columns, Fp8& out) {
  const Ref shared = attribute(layer.bank, name::_shared);
  if (shared.get() == layer.shared_object) {
    std::lock_guard<std::mutex> lock(layer.shared->mutex);
    SharedCast& c = layer.shared->cast;
    if (!c.x8.defined() || c.x == nullptr || PyWeakref_GetObject(c.x) != x || c.version != version || c.stream != stream) return Sibling::none;
    if (std::find(c.taken.begin(), c.taken.end(), layer.own) != c.taken.end()) return Sibling::none;
    if (c.slot != layer.x.index) return Sibling::to_be_joined;
    if (columns && !c.x8t.defined()) return Sibling::none;
    c.taken.push_back(layer.own);
    out = {c.x8, columns ? c.x8t : Tensor(), c.scale_inv};
    return Sibling::serves;
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(shared.get())) != shared_type || PyTuple_GET_SIZE(shared.get()) != 8) return Sibling::none;
  PyObject* const* field = reinterpret_cast<PyTupleObject*>(shared.get())->ob_item;  // x, version, stream, x8, x8t, scale_inv, slot, taken
  if (!PyWeakref_Check(field[0]) || PyWeakref_GetObject(field[0]) != x || PyLong_AsLongLong(field[1]) != version || PyLong_AsVoidPtr(field[2]) != stream) {
    if (PyErr_Occurred()) fail();
    return Sibling::none;
  }
  const Ref own(PyLong_FromLongLong(layer.own));
  const int before = PySet_Contains(field[7], own.get());
  if (before < 0) fail();
  if (before) return Sibling::none;
  if (PyLong_AsLongLong(field[6]) != layer.x.index) return Sibling::to_be_joined;
  if (columns && field[4] == Py_None) return Sibling::none;
  if (PySet_Add(field[7], own.get()) != 0) fail();
  out = {tensor_of(field[3]), columns ? tensor_of(field[4]) : Tensor(), tensor_of(field[5])};
  return Sibling::serves;
}

// Leave a cast for siblings. Needs the interpreter.
void leave(const LayerData& layer, PyObject* x, int64_t version, void* stream, const Fp8& made) {
  PyObject* reference = PyWeakref_NewRef(x, layer.shared_object);
  if (reference == nullptr) fail();
  SharedCast fresh{reference, version, stream, made.rows, made.columns, made.scale_inv, layer.x.index, {layer.own}};
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
  const Sibling found = sibling(l, px, version, stream, need_weight, x8);
  if (found == Sibling::to_be_joined) return {};
  const bool known = found == Sibling::serves;
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

}  // namespace
}  // namespace ampplug
