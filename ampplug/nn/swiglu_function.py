"""SwiGLU between three FP8 layers as one function: everything between them in FP8.

Launches of a step with delayed scaling: cast, two GEMMs, SwiGLU with cast, GEMM; cast, two GEMMs, SwiGLU backward with casts, four GEMMs and a sum.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampplug import formats
from ampplug.kernels.swiglu import Fp8, Target, partial_amaxes, swiglu, swiglu_backward
from ampplug.nn.gemm import scaled_mm
from ampplug.nn.linear_function import Call, LinearState, cast_input, quantize_for, record_and_dtype, settle_device
from ampplug.scaling import ScaleBook


class Block(NamedTuple):
    """One forward call of a block: those of its layers."""

    gate: Call
    up: Call
    down: Call


class _Fp8SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, block: Block) -> Tensor:
        need_gate, need_up, need_down = ctx.needs_input_grad[1:4]
        matrix = x.reshape(-1, x.shape[-1])
        x8, x8t, x_inv = cast_input(matrix, block.gate, need_gate or need_up)
        a, b = (scaled_mm(x8, c.operand.forward, x_inv, c.operand.scale_inv, c.out_dtype, fast=True) for c in (block.gate, block.up))
        # the transpose of h is left to backward, which has a and b in its hands again, unless nothing before the last layer is trained
        h8, h8t, h_inv = _hidden(a, b, block.down, need_down and not any(ctx.needs_input_grad[:3]))
        assert h8 is not None
        y = scaled_mm(h8, block.down.operand.forward, h_inv, block.down.operand.scale_inv, block.down.out_dtype, fast=True)
        if y.shape[1] != block.down.n:
            y = y[:, : block.down.n].clone(memory_format=torch.contiguous_format)
        if x.dim() != 2:
            y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], block.down.n))
        ctx.save_for_backward(x8t, x_inv, a, b, h8t, h_inv, gate, up, down)  # weights so that autograd notices if they are changed
        ctx.block, ctx.x_dtype = block, x.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x8t, x_inv, a, b, h8t, h_inv, gate, up, down = ctx.saved_tensors
        block = ctx.block
        need_x, need_gate, need_up, need_down, _ = ctx.needs_input_grad
        before = need_x or need_gate or need_up
        matrix = dy.reshape(-1, dy.shape[-1])
        block.gate.state.bank.shared = None
        dy8, dy8t, dy_inv = quantize_for(matrix, block.down, block.down.state.dy_slot, formats.E5M2, before, need_down)
        dx = d_gate = d_up = d_down = None
        if before:
            dh = scaled_mm(dy8, block.down.operand.backward, dy_inv, block.down.operand.scale_inv, a.dtype, fast=False)
            da, db, made = _gradients(dh, a, b, block, need_x, need_gate or need_up, h_inv if need_down else None)
            h8t = made if h8t is None else h8t
            if need_gate:
                d_gate = _cut(scaled_mm(da[1], x8t, da[2], x_inv, block.gate.state.gradient_dtype(gate), fast=False), gate)  # type: ignore[arg-type]
            if need_up:
                d_up = _cut(scaled_mm(db[1], x8t, db[2], x_inv, block.up.state.gradient_dtype(up), fast=False), up)  # type: ignore[arg-type]
            if need_x:
                parts = [
                    scaled_mm(d[0], c.operand.backward, d[2], c.operand.scale_inv, ctx.x_dtype, fast=False)  # type: ignore[arg-type]
                    for d, c in ((da, block.gate), (db, block.up))
                ]
                k = gate.shape[1]
                dx = parts[0].add_(parts[1])[:, :k].reshape(*dy.shape[:-1], k)
        if need_down:
            d_down = _cut(scaled_mm(dy8t, h8t, dy_inv, h_inv, block.down.state.gradient_dtype(down), fast=False), down)
        return dx, d_gate, d_up, d_down, None


def _cut(gradient: Tensor, weight: Tensor) -> Tensor:
    """Without the padding."""
    return gradient if gradient.shape == weight.shape else gradient[: weight.shape[0], : weight.shape[1]].contiguous()


def target(book: ScaleBook | None, slot: int, partials: Tensor | None, delayed: bool, record: bool) -> Target:
    """Of a slot; without a book, or not in training, the partial maxima decide alone."""
    if book is None or not delayed:
        return Target(partials=partials)
    return Target(book.scale_views[slot], partials, book.amax_views[slot] if record else None, book.scratch_views[slot])


def unknown(book: ScaleBook | None, slots: tuple[int, ...], delayed: bool) -> bool:
    """Whether partial maxima are needed: for a slot that the host knows no scale of."""
    return book is None or not delayed or not all(book.known[s] for s in slots)


def _hidden(a: Tensor, b: Tensor, down: Call, transpose: bool) -> Fp8:
    """What the last layer reads, cast for its input slot."""
    state = down.state
    return hidden(a, b, state.book, state.x_slot, state.bank.power_of_two, transpose, down.training, down.record)


def hidden(a: Tensor, b: Tensor, book: ScaleBook | None, slot: int, power_of_two: bool, transpose: bool, delayed: bool, record: bool) -> Fp8:
    """SwiGLU of a and b [M, K], cast for a slot; as `nn.linear_function.quantize`."""
    partials = partial_amaxes(a, b)[0] if unknown(book, (slot,), delayed) else None
    return swiglu(a, b, target(book, slot, partials, delayed, record), transpose, power_of_two)


def _gradients(
    dh: Tensor, a: Tensor, b: Tensor, block: Block, rows: bool, transpose: bool, h_inv: Tensor | None
) -> tuple[Fp8, Fp8, Tensor | None]:
    """Output gradients of the first two layers, cast for their slots, and with h_inv what the last one read, transposed."""
    state, call = block.gate.state, block.gate
    slots = state.dy_slot, block.up.state.dy_slot
    return gradients(dh, a, b, state.book, slots, state.bank.power_of_two, rows, transpose, call.training, call.record, h_inv)


def gradients(
    dh: Tensor, a: Tensor, b: Tensor, book: ScaleBook | None, slots: tuple[int, int], power_of_two: bool,
    rows: bool, transpose: bool, delayed: bool, record: bool, h_inv: Tensor | None = None,
) -> tuple[Fp8, Fp8, Tensor | None]:  # fmt: skip
    """Gradients of a and b [M, K], cast for two slots, and with h_inv their SwiGLU, transposed."""
    partials: tuple[Tensor | None, ...] = partial_amaxes(a, b, dh) if unknown(book, slots, delayed) else (None, None)
    first, second = (target(book, slot, p, delayed, record) for slot, p in zip(slots, partials, strict=True))
    return swiglu_backward(dh, a, b, (first, second), rows, transpose, power_of_two, h_inv)


def fp8_swiglu(x: Tensor, weights: tuple[Tensor, Tensor, Tensor], states: tuple[LinearState, LinearState, LinearState], training: bool) -> Tensor:
    """x [..., K] -> [..., K] by weights (and states) of gate, up and down. Output dtype as the layers one by one would have it."""
    record, out_dtype = record_and_dtype(x, training)
    calls = []
    for state, weight in zip(states, weights, strict=True):
        settle_device(state, x.device)
        calls.append(Call(state, state.operand(weight, training), out_dtype, training, record, weight.shape[0], weakref.ref(x)))
    return _Fp8SwiGLU.apply(x, *weights, Block(*calls))
