"""The FP8 Linear for `torch.compile`: custom operators where eager mode launches kernels, so that the compiler sees no graph break.

Eager mode does not come here: dispatching an operator costs more than a launch. An operator knows its slot or weight by a tensor that it is
given as a key (a one-element view of the ScaleBook's scales, of the WeightBank's inverse scales): the compiler then has nothing to guard but
ordinary tensors, and layers of the same shape share one graph. That a cast raises the slot's recorded amax is not declared to the compiler:
functionalization would copy the arrays around every cast, and the record is a maximum, to which neither order nor repetition matters. Casts with
the same arguments, those of siblings, are one to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampplug import formats
from ampplug.nn.gemm import scaled_mm
from ampplug.nn.linear_function import LinearState, Operand, cast_weight, fp8_linear, quantize
from ampplug.nn.swiglu_function import fp8_swiglu, gradients, hidden
from ampplug.scaling import ScaleBook, find_book
from ampplug.storage import find_bank, find_weight

_library = torch.library.Library("ampplug", "FRAGMENT")


class _Operator:
    """A function as the operator `torch.ops.ampplug.name`. It makes its outputs anew and changes no argument.

    As `torch.library.custom_op`, whose calls through several layers of Python cost the host four times as much.
    """

    def __init__(self, name: str, function: Callable[..., Any]):
        self._name = name
        _library.define(name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CompositeExplicitAutograd", "CPU", "CUDA"):  # the first for devices of all other kinds
            _library.impl(name, function, key)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What comes out, as the compiler is told: shapes, dtypes and strides."""
        return torch.library.register_fake(f"ampplug::{self._name}", function, lib=_library)


def operator(name: str) -> Callable[[Callable[..., Any]], _Operator]:
    """Decorator that makes an `_Operator`."""
    return lambda function: _Operator(name, function)


@operator("cast")
def cast_op(x: Tensor, key: Tensor, gradient: bool, rows: bool, transpose: bool, delayed: bool, record: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize` of x [M, K] for the slot (or, with current scaling, the bank) of `key`. What is not asked for comes back empty."""
    book, slot, power_of_two = _slot(key)
    dtype = formats.E5M2 if gradient else formats.E4M3
    q, qt, scale_inv = quantize(x, book, slot, power_of_two, dtype, rows, transpose, delayed, record)
    return x.new_empty(0, dtype=dtype) if q is None else q, x.new_empty(0, dtype=dtype) if qt is None else qt, scale_inv


@cast_op.register_fake
def _(x: Tensor, key: Tensor, gradient: bool, rows: bool, transpose: bool, delayed: bool, record: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(x, formats.E5M2 if gradient else formats.E4M3, rows, transpose)


@operator("weight_matmul")
def weight_matmul(
    q: Tensor, scale_inv: Tensor, weight: Tensor, key: Tensor, transposed: bool, backward: bool, training: bool, out_dtype: torch.dtype
) -> Tensor:
    """q [M, K16] times W8 transposed -> [M, N16], or with `backward` q [M, N16] times W8 -> [M, K16]. key: inverse scale of the weight in its bank."""
    operand = _operand(weight, key, transposed, training)
    return scaled_mm(q, operand.backward if backward else operand.forward, scale_inv, operand.scale_inv, out_dtype, fast=not backward)


@weight_matmul.register_fake
def _(
    q: Tensor, scale_inv: Tensor, weight: Tensor, key: Tensor, transposed: bool, backward: bool, training: bool, out_dtype: torch.dtype
) -> Tensor:
    columns = weight.shape[1 if backward != transposed else 0]
    return q.new_empty(q.shape[0], (columns + 15) // 16 * 16, dtype=out_dtype)


@operator("matmul")
def matmul(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`scaled_mm` with the accurate accumulator: the weight gradient."""
    return scaled_mm(a, b, a_scale_inv, b_scale_inv, out_dtype, fast=False)


@matmul.register_fake
def _(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _slot(key: Tensor) -> tuple[ScaleBook | None, int, bool]:
    """(book, slot, power_of_two) of a key; that of a bank has no book."""
    book, slot = find_book(key)
    if book is None:
        return None, -1, find_bank(key).power_of_two
    book.poll()
    return book, slot, book.power_of_two


@operator("swiglu")
def swiglu_op(a: Tensor, b: Tensor, key: Tensor, transpose: bool, delayed: bool, record: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`nn.swiglu_function.hidden` for the slot of `key`."""
    book, slot, power_of_two = _slot(key)
    q, qt, scale_inv = hidden(a.contiguous(), b.contiguous(), book, slot, power_of_two, transpose, delayed, record)
    assert q is not None
    return q, a.new_empty(0, dtype=formats.E4M3) if qt is None else qt, scale_inv


@swiglu_op.register_fake
def _(a: Tensor, b: Tensor, key: Tensor, transpose: bool, delayed: bool, record: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(a, formats.E4M3, True, transpose)


@operator("swiglu_backward")
def swiglu_backward_op(
    dh: Tensor, a: Tensor, b: Tensor, gate_key: Tensor, up_key: Tensor, rows: bool, transpose: bool, delayed: bool, record: bool, h_inv: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`nn.swiglu_function.gradients` for the slots of two keys."""
    book, slot, power_of_two = _slot(gate_key)
    slots = slot, find_book(up_key)[1]
    da, db, h8t = gradients(dh.contiguous(), a.contiguous(), b.contiguous(), book, slots, power_of_two, rows, transpose, delayed, record, h_inv)
    made = [a.new_empty(0, dtype=formats.E5M2) if t is None else t for t in (*da, *db)]
    return made[0], made[1], made[2], made[3], made[4], made[5], a.new_empty(0, dtype=formats.E4M3) if h8t is None else h8t


@swiglu_backward_op.register_fake
def _(
    dh: Tensor, a: Tensor, b: Tensor, gate_key: Tensor, up_key: Tensor, rows: bool, transpose: bool, delayed: bool, record: bool, h_inv: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    h8t = _empty(a, formats.E4M3, False, h_inv is not None)[1]
    return *_empty(a, formats.E5M2, rows, transpose), *_empty(a, formats.E5M2, rows, transpose), h8t


def _empty(x: Tensor, dtype: torch.dtype, rows: bool, transpose: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What a cast of x [M, K] returns, as the compiler is told."""
    m, k = x.shape
    m16, k16 = (m + 15) // 16 * 16, (k + 15) // 16 * 16
    q = x.new_empty(m, k16, dtype=dtype) if rows else x.new_empty(0, dtype=dtype)
    qt = x.new_empty(k16, m16, dtype=dtype) if transpose else x.new_empty(0, dtype=dtype)
    return q, qt, x.new_empty(1, dtype=torch.float32)


def _operand(weight: Tensor, key: Tensor, transposed: bool, training: bool) -> Operand:
    """As `LinearState.operand`, for a weight that may be another tensor object over the same memory."""
    bank, w = find_weight(key)
    p = w.param
    if not training or weight.data_ptr() != p.data_ptr() or weight.shape != p.shape or not weight.is_contiguous():
        return cast_weight(weight, transposed, bank.power_of_two)
    if not w.fresh:
        bank.refresh([w], keep_scale=w.master.restored)
    return Operand(*((w.w8t, w.w8) if transposed else (w.w8, w.w8t)), w.scale_inv)


class _TracedLinear(torch.autograd.Function):
    """x [M, K] -> [M, N]. dy's key is None with current scaling: x's serves. sink, where it is given, takes the weight's gradient, in fp32."""

    @staticmethod
    def forward(ctx, x, weight, bias, x_key, dy_key, key, transposed, need_x, need_weight, training, record, out_dtype, sink):  # type: ignore[no-untyped-def]
        x8, x8t, x_inv = torch.ops.ampplug.cast(x, x_key, False, True, need_weight, training, record)
        ctx.save_for_backward(x8t, x_inv, weight, key, x_key if dy_key is None else dy_key)
        ctx.transposed, ctx.need_x, ctx.need_weight, ctx.training, ctx.record = transposed, need_x, need_weight, training, record
        ctx.x_dtype, ctx.bias_dtype, ctx.sink = x.dtype, None if bias is None else bias.dtype, sink is not None
        y = torch.ops.ampplug.weight_matmul(x8, x_inv, weight, key, transposed, False, training, out_dtype)
        n = weight.shape[1 if transposed else 0]
        if y.shape[1] != n:
            y = y[:, :n]
        return y if bias is None else y + bias.to(y.dtype)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x8t, x_inv, weight, key, dy_key = ctx.saved_tensors
        dx = dw = db = None
        rows, columns = weight.shape
        if ctx.need_x or ctx.need_weight:
            dy8, dy8t, dy_inv = torch.ops.ampplug.cast(dy, dy_key, True, ctx.need_x, ctx.need_weight, ctx.training, ctx.record)
        if ctx.need_x:
            dx = torch.ops.ampplug.weight_matmul(dy8, dy_inv, weight, key, ctx.transposed, True, ctx.training, ctx.x_dtype)
            dx = _cut(dx, dx.shape[0], rows if ctx.transposed else columns)
        if ctx.need_weight:
            dtype = torch.float32 if ctx.sink else weight.dtype
            if ctx.transposed:
                dw = torch.ops.ampplug.matmul(x8t, dy8t, x_inv, dy_inv, dtype)
            else:
                dw = torch.ops.ampplug.matmul(dy8t, x8t, dy_inv, x_inv, dtype)
            dw = _cut(dw, rows, columns)
        dw, dw32 = (None, dw) if ctx.sink else (dw, None)
        if ctx.bias_dtype is not None:
            db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None, None, None, None, None, None, None, dw32


def _cut(padded: Tensor, rows: int, columns: int) -> Tensor:
    """Without the padding, if there is any."""
    return padded if padded.shape == (rows, columns) else padded[:rows, :columns]


class _TracedSwiGLU(torch.autograd.Function):
    """x [M, K] -> [M, K16]. keys: of x's slot, of h's, of the output gradients' of gate, up and down, or with current scaling None but x's;
    then of the three weights."""

    @staticmethod
    def forward(ctx, x, gate, up, down, x_key, h_key, gate_dy, up_dy, down_dy, gate_key, up_key, down_key, need, training, record, out_dtype):  # type: ignore[no-untyped-def]
        ops = torch.ops.ampplug
        need_x, need_gate, need_up, need_down = need
        x8, x8t, x_inv = ops.cast(x, x_key, False, True, need_gate or need_up, training, record)
        a = ops.weight_matmul(x8, x_inv, gate, gate_key, False, False, training, out_dtype)
        b = ops.weight_matmul(x8, x_inv, up, up_key, False, False, training, out_dtype)
        before = need_x or need_gate or need_up
        h8, h8t, h_inv = ops.swiglu(a, b, x_key if h_key is None else h_key, need_down and not before, training, record)
        slots = (x_key,) * 3 if h_key is None else (gate_dy, up_dy, down_dy)
        ctx.save_for_backward(x8t, x_inv, a, b, h8t, h_inv, gate, up, down, gate_key, up_key, down_key, *slots)
        ctx.need, ctx.training, ctx.record, ctx.x_dtype = need, training, record, x.dtype
        return ops.weight_matmul(h8, h_inv, down, down_key, False, False, training, out_dtype)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        ops = torch.ops.ampplug
        x8t, x_inv, a, b, h8t, h_inv, gate, up, down, gate_key, up_key, down_key, gate_dy, up_dy, down_dy = ctx.saved_tensors
        need_x, need_gate, need_up, need_down = ctx.need
        before = need_x or need_gate or need_up
        rows, columns = gate.shape
        dx = d_gate = d_up = d_down = None
        dy8, dy8t, dy_inv = ops.cast(dy, down_dy, True, before, need_down, ctx.training, ctx.record)
        if before:
            dh = ops.weight_matmul(dy8, dy_inv, down, down_key, False, True, ctx.training, a.dtype)
            a8, a8t, a_inv, b8, b8t, b_inv, h8t = ops.swiglu_backward(
                dh, a, b, gate_dy, up_dy, need_x, need_gate or need_up, ctx.training, ctx.record, h_inv if need_down else None
            )
            if need_gate:
                d_gate = ops.matmul(a8t, x8t, a_inv, x_inv, gate.dtype)[:rows, :columns]
            if need_up:
                d_up = ops.matmul(b8t, x8t, b_inv, x_inv, up.dtype)[:rows, :columns]
            if need_x:
                first = ops.weight_matmul(a8, a_inv, gate, gate_key, False, True, ctx.training, ctx.x_dtype)
                dx = (first + ops.weight_matmul(b8, b_inv, up, up_key, False, True, ctx.training, ctx.x_dtype))[:, :columns]
        if need_down:
            d_down = ops.matmul(dy8t, h8t, dy_inv, h_inv, down.dtype)[:columns, :rows]
        return dx, d_gate, d_up, d_down, None, None, None, None, None, None, None, None, None, None, None, None


def traced_swiglu(x, weights, states, training):  # type: ignore[no-untyped-def]
    """`nn.swiglu_function.fp8_swiglu` as the compiler traces it."""
    g, u, d = states
    if g.key.device != x.device:
        return _untraced_swiglu(x, weights, states, training)
    kind, grad = x.device.type, torch.is_grad_enabled()
    out_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    need = tuple(grad and t.requires_grad for t in (x, *weights))
    y = _TracedSwiGLU.apply(
        x.reshape(-1, x.shape[-1]), *weights, g.x_key, None if d.book is None else d.x_key, g.dy_key, u.dy_key, d.dy_key, g.key, u.key, d.key,
        need, training, training and grad, out_dtype,
    )  # fmt: skip
    n = weights[2].shape[0]
    return (y if y.shape[1] == n else y[:, :n]).reshape(*x.shape[:-1], n)


@torch.compiler.disable
def _untraced_swiglu(x, weights, states, training):  # type: ignore[no-untyped-def]
    y = fp8_swiglu(x, weights, states, training)
    for state in states:
        state.make_keys()
    return y


@torch.compiler.disable  # a graph break, for what is rare
def _untraced(x: Tensor, weight: Tensor, bias: Tensor | None, state: LinearState, training: bool) -> Tensor:
    y = fp8_linear(x, weight, bias, state, training)
    state.make_keys()  # had the model moved, its arrays are where it is now
    return y


def traced_linear(x, weight, bias, state, training):  # type: ignore[no-untyped-def]
    """`fp8_linear` as the compiler traces it."""
    k, n = (weight.shape[0], weight.shape[1]) if state.transposed else (weight.shape[1], weight.shape[0])
    odd = x.is_nested or x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.shape[-1] != k or x.numel() == 0 or n == 0
    if odd or state.key.device != x.device or torch._C._are_functorch_transforms_active():
        return _untraced(x, weight, bias, state, training)
    kind = x.device.type
    out_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    grad = torch.is_grad_enabled()
    y = _TracedLinear.apply(
        x.reshape(-1, k), weight, bias, state.x_key, state.dy_key, state.key, state.transposed, grad and x.requires_grad,
        grad and weight.requires_grad, training, training and grad, out_dtype, state.sink if grad and weight.requires_grad else None,
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], n)
