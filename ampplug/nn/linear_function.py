"""The FP8 Linear as a function, on native kernels: `y = x W^T + b` with x and W in E4M3 and the output gradient in E5M2.

Launches of a step with delayed scaling: forward cast and GEMM, backward cast and two GEMMs (and a sum for the bias). The weight is not cast
here: W8 and its transpose come from the optimizer's step. Saved for backward is the transposed FP8 input, one byte an element.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampplug import formats
from ampplug.kernels.cast import cast, partial_amax
from ampplug.nn.fp32_gradient import HALF, stand_in
from ampplug.nn.gemm import scaled_mm
from ampplug.scaling import ScaleBook
from ampplug.storage import Weight, WeightBank, key_of


class Operand(NamedTuple):
    """A weight in FP8, both ways: `forward` [N16, K16], `backward` [K16, N16], and the inverse of its scale, fp32 [1]."""

    forward: Tensor
    backward: Tensor
    scale_inv: Tensor


@dataclass(eq=False)
class LinearState:
    """What a converted layer holds beyond its parameters. Not a module, parameter or buffer: nothing of it is in `state_dict`."""

    book: ScaleBook | None  # None for the current-scaling recipe
    x_slot: int
    dy_slot: int
    bank: WeightBank
    weight: Weight
    transposed: bool  # the parameter is [K, N] (Hugging Face's Conv1D)
    fp32_gradient: bool = False  # gradients of weight and bias are fp32, whatever they are themselves
    native: Any = None  # the layer in C++, and what it was made of (nn/native.py)
    native_of: tuple = ()

    def __post_init__(self) -> None:
        self.own_slot = self.x_slot  # of x, were there no siblings
        self.make_keys()

    def make_keys(self) -> None:
        """Tensors by which the operators of compiled models find weight and slots; again after a move to another device.

        Plain attributes: what the compiler would compute here, it would make a constant of the graph, one for each layer. Siblings hold the same
        object, by which the compiler sees that it is one cast. Without a book it is the bank's for all, and none for dy: no autograd function may
        be given the same tensor twice.
        """
        self.key = key_of(self.weight.scale_inv)
        self.sink = stand_in(self.weight) if self.fp32_gradient and self.weight.param.dtype in HALF else None
        self.x_key = self.bank.key if self.book is None else self.book.keys[self.x_slot]
        self.dy_key = None if self.book is None else self.book.keys[self.dy_slot]

    def join(self, slot: int) -> None:
        """Scale the input by another layer's slot from now on, and record there: a sibling, which is given the same input."""
        if self.book is not None and slot != self.x_slot:
            self.x_slot = self.book.uses[self.own_slot] = slot
            self.x_key = self.book.keys[slot]

    def gradient_dtype(self, p: Tensor) -> torch.dtype:
        """Of the gradient of a weight or bias `p`."""
        return torch.float32 if self.fp32_gradient else p.dtype

    def __deepcopy__(self, memo: dict) -> LinearState:
        """A copy computes the same and is independent of the original: its own bank with this weight alone, its own scales."""
        w = self.weight
        param = memo.get(id(w.param), w.param)  # the layer's parameters are copied before this
        bank = memo.get((id(self.bank), w.index))
        if bank is None:
            bank = WeightBank([(w.name, param)], self.bank.device, self.bank.power_of_two)
            mine = bank.weights[0]
            for name in ("w8", "w8t"):
                getattr(mine, name).view(torch.uint8).copy_(getattr(w, name).view(torch.uint8))
            for name in ("amax", "scale", "scale_inv"):
                getattr(mine, name).copy_(getattr(w, name))
            if w.fresh:
                mine.mark_fresh()
            memo[(id(self.bank), w.index)] = bank
        book = copy.deepcopy(self.book, memo)
        other = LinearState(book, self.own_slot, self.dy_slot, bank, bank.weights[0], self.transposed, self.fp32_gradient)
        other.join(self.x_slot)
        return other

    def __reduce__(self) -> tuple:
        """Pickled as a copy of its own, not with the arenas of the whole model; `__setstate__` of the layer rebinds the weight."""
        w = self.weight
        # as bytes: pickle outside torch.save cannot read FP8 tensors back
        tensors = {name: getattr(w, name).clone().view(torch.uint8) for name in ("w8", "w8t", "amax", "scale", "scale_inv")}
        slots, flags = (self.own_slot, self.x_slot, self.dy_slot), (self.bank.power_of_two, self.transposed, self.fp32_gradient)
        return _rebuild, (self.book, slots, w.name, tuple(w.param.shape), tensors, *flags)

    def rebind(self, param: Tensor) -> None:
        """Attach an unpickled state to its layer's weight."""
        self.weight.master.param = param
        self.weight.mark_fresh()

    def operand(self, weight: Tensor, training: bool) -> Operand:
        """W8 of `weight`, made now if the bank's is not of this very tensor as it is.

        In evaluation the bank's own copies are always renewed: writes through `p.data` leave no trace that could be seen, and a swapped-in
        average must not be evaluated with the weights that it replaced.
        """
        w = self.weight
        if weight is not w.param:  # a parametrization, functional_call, a gathered shard
            return self._cast_now(weight)
        if self.bank.device != weight.device:
            self.bank.to(weight.device)
            w.seen = (0, weight.dtype, -1)
        if not weight.is_contiguous():
            return self._cast_now(weight)
        if not training:
            return self._cast_now(weight)
        if not w.fresh:
            self.bank.refresh([w], keep_scale=w.master.restored)
        pair = (w.w8t, w.w8) if self.transposed else (w.w8, w.w8t)
        return Operand(*pair, w.scale_inv)

    def _cast_now(self, weight: Tensor) -> Operand:
        return cast_weight(weight, self.transposed, self.bank.power_of_two)


def cast_weight(weight: Tensor, transposed: bool, power_of_two: bool) -> Operand:
    """A weight in FP8 by its own amax, made now."""
    matrix = weight.detach().t() if transposed else weight.detach()
    rows, columns, scale_inv = cast(matrix, formats.E4M3, partials=partial_amax(matrix), transpose=True, power_of_two=power_of_two)
    assert rows is not None and columns is not None
    n16 = columns.shape[1]
    if rows.shape[0] != n16:  # the GEMM wants padded rows, too
        rows = torch.nn.functional.pad(rows.view(torch.uint8), (0, 0, 0, n16 - rows.shape[0])).view(rows.dtype)
    return Operand(rows, columns, scale_inv)


def _rebuild(
    book: ScaleBook | None,
    slots: tuple[int, int, int],
    name: str,
    shape: tuple[int, int],
    tensors: dict[str, Tensor],
    power_of_two: bool,
    transposed: bool,
    fp32_gradient: bool = False,
) -> LinearState:
    bank = WeightBank([(name, torch.empty(shape, device=tensors["w8"].device))], tensors["w8"].device, power_of_two)
    w = bank.weights[0]
    for key, value in tensors.items():
        target = getattr(w, key)
        target.view(torch.uint8).copy_(value)
    state = LinearState(book, slots[0], slots[2], bank, w, transposed, fp32_gradient)
    state.join(slots[1])
    return state


class _Shared(NamedTuple):
    """An input in FP8, for the layers beside: query, key and value, or gate and up, are given the same tensor, and it need be cast once only.

    They are found by identity: the tensor object itself, unchanged (its version), in the same forward pass (forgotten with the first backward
    cast) and on the same stream. A layer takes a cast once: one that asks again begins another pass, for which the tensor may have been filled anew
    in a way that leaves no trace in its version (`.data`, memory shared with numpy, kernels of others).
    """

    x: weakref.ref[Tensor]
    version: int
    stream: int
    x8: Tensor
    x8t: Tensor | None
    scale_inv: Tensor
    slot: int
    taken: set[int]  # by whom: their own slots


class Call(NamedTuple):
    """One forward call's constants."""

    state: LinearState
    operand: Operand
    out_dtype: torch.dtype
    training: bool
    record: bool
    n: int
    origin: weakref.ref[Tensor]  # of the tensor that the layer was given


def quantize(
    x: Tensor, book: ScaleBook | None, slot: int, power_of_two: bool, dtype: torch.dtype, rows: bool, transpose: bool, delayed: bool, record: bool,
    scratch: int | None = None,
) -> tuple[Any, Any, Tensor]:  # fmt: skip
    """FP8 of an activation or output gradient [M, *]: by the slot's scale if `delayed` (in training) and there is a book, else by its own amax.

    scratch: the slot whose counters the kernel uses, if not `slot`: layers that share a slot may cast on several streams at once.
    """
    if book is None or not delayed:
        return cast(x, dtype, partials=partial_amax(x), rows=rows, transpose=transpose, power_of_two=power_of_two)
    return cast(
        x,
        dtype,
        scale=book.scale_views[slot],
        partials=None if book.known[slot] else partial_amax(x),
        record=book.amax_views[slot] if record else None,
        scratch=book.scratch_views[slot if scratch is None else scratch],
        rows=rows,
        transpose=transpose,
        power_of_two=power_of_two,
    )


def quantize_for(
    x: Tensor, call: Call, slot: int, dtype: torch.dtype, rows: bool, transpose: bool, scratch: int | None = None
) -> tuple[Any, Any, Tensor]:
    """`quantize` in a slot of the call's layer."""
    state = call.state
    return quantize(x, state.book, slot, state.bank.power_of_two, dtype, rows, transpose, call.training, call.record, scratch)


def cast_input(matrix: Tensor, call: Call, transpose: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """The input in FP8: a sibling's cast of it, if there is one, else its own, which is left for siblings."""
    state = call.state
    if not call.training:
        return quantize_for(matrix, call, state.x_slot, formats.E4M3, True, transpose)
    shared, x = state.bank.shared, call.origin()
    if x is not None and x.is_inference():  # it has no version
        x = None
    stream = torch._C._cuda_getCurrentRawStream(matrix.device.index) if matrix.is_cuda else 0
    same = shared is not None and x is not None and shared.x() is x and (shared.version, shared.stream) == (x._version, stream)
    if same and state.own_slot not in shared.taken:
        state.join(shared.slot)
        if shared.x8t is not None or not transpose:
            state.bank.take_shared(state.own_slot)
            return shared.x8, shared.x8t if transpose else None, shared.scale_inv
    x8, x8t, x_inv = quantize_for(matrix, call, state.x_slot, formats.E4M3, True, transpose, state.own_slot)
    if x is not None:
        _share(x, state, stream, (x8, x8t, x_inv), {state.own_slot})
        if _produced is not None and _produced[0]() is x:  # a norm's output
            _produced[1].learn(state, transpose)
    return x8, x8t, x_inv


def _share(x: Tensor, state: LinearState, stream: int, made: tuple[Any, Any, Tensor], taken: set[int]) -> None:
    """Leave a cast of x for the layers beside `state`'s, for as long as x lives."""
    bank = state.bank

    def forget(gone: weakref.ref) -> None:
        if bank.shared is not None and bank.shared.x is gone:
            bank.shared = None

    bank.shared = _Shared(weakref.ref(x, forget), x._version, stream, *made, state.x_slot, taken)


class Producer:
    """What a norm knows of the FP8 layer that reads its output: the last that had to cast it by itself. A copy knows nothing yet."""

    def __init__(self) -> None:
        self.target: LinearState | None = None
        self.transpose = False  # whether it wanted the transpose, too
        self.taken: set[int] | None = None  # who took the last cast

    def __deepcopy__(self, memo: dict) -> Producer:
        return Producer()

    def __reduce__(self) -> tuple:
        return Producer, ()

    def learn(self, state: LinearState, transpose: bool) -> None:
        """A layer had to cast the last output by itself."""
        self.target, self.transpose, self.taken = state, transpose, None

    def ready(self, device: torch.device, k: int) -> LinearState | None:
        """The layer to cast an output [..., k] for: one with a scale that the host knows of. A layer that left the last cast lying is forgotten."""
        if self.taken is not None and not self.taken:
            self.target = None
        self.taken = None
        state = self.target
        book = None if state is None else state.book
        if state is None or book is None or book.device != device or state.weight.param.device != device:
            return None
        book.poll()
        return state if book.known[state.x_slot] and k == state.weight.param.shape[0 if state.transposed else 1] else None


_produced: tuple[weakref.ref[Tensor], Producer] | None = None  # the last output of a norm, and whose it is


def leave_cast(y: Tensor, producer: Producer, state: LinearState | None, made: tuple[Any, Any, Tensor] | None) -> None:
    """Note that `producer` made y, and leave its cast for the layers that read it."""
    global _produced
    if y.is_inference():
        return
    _produced = weakref.ref(y), producer
    if state is not None and made is not None:
        stream = torch._C._cuda_getCurrentRawStream(y.device.index) if y.is_cuda else 0
        producer.taken = set()
        _share(y, state, stream, made, producer.taken)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        matrix = x.reshape(-1, x.shape[-1])
        need_weight = ctx.needs_input_grad[1]
        x8, x8t, x_inv = cast_input(matrix, call, need_weight)
        y = scaled_mm(x8, call.operand.forward, x_inv, call.operand.scale_inv, call.out_dtype, fast=True)
        # no view may be returned: in-place operations may follow, which autograd forbids on views made in here
        if y.shape[1] != call.n:
            y = y[:, : call.n] if bias is not None else y[:, : call.n].clone(memory_format=torch.contiguous_format)
        if bias is not None:
            y = y + bias.to(y.dtype)
        if x.dim() != 2:
            y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], call.n))
        # the weight itself is saved only so that autograd notices if it is changed before backward
        ctx.save_for_backward(x8t, x_inv, weight)
        ctx.call = call
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else call.state.gradient_dtype(bias)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x8t, x_inv, weight = ctx.saved_tensors
        call = ctx.call
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        matrix = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        call.state.bank.shared = None
        if need_x or need_weight:
            dy8, dy8t, dy_inv = quantize_for(matrix, call, call.state.dy_slot, formats.E5M2, need_x, need_weight)
        if need_x:
            dx = scaled_mm(dy8, call.operand.backward, dy_inv, call.operand.scale_inv, ctx.x_dtype, fast=False)
            k = weight.shape[0] if call.state.transposed else weight.shape[1]
            dx = (dx if dx.shape[1] == k else dx[:, :k]).reshape(*dy.shape[:-1], k)
        if need_weight:
            dtype = call.state.gradient_dtype(weight)
            if call.state.transposed:  # [K, N]; the GEMM takes at most one E5M2 operand, on either side
                dw = scaled_mm(x8t, dy8t, x_inv, dy_inv, dtype, fast=False)
            else:
                dw = scaled_mm(dy8t, x8t, dy_inv, x_inv, dtype, fast=False)
            if dw.shape != weight.shape:
                dw = dw[: weight.shape[0], : weight.shape[1]].contiguous()
        if need_bias:
            db = matrix.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, state: LinearState, training: bool) -> Tensor:
    """x [..., K] -> [..., N]. Output dtype as nn.Linear's: autocast's inside autocast, else x's."""
    if x.is_nested or not x.is_floating_point() or torch._C._are_functorch_transforms_active():
        return _without_kernels(x, weight, bias, state)
    record, out_dtype = record_and_dtype(x, training)
    k, n = (weight.shape[0], weight.shape[1]) if state.transposed else (weight.shape[1], weight.shape[0])
    if x.shape[-1] != k:
        raise RuntimeError(f"ampplug: the layer {state.weight.name!r} takes inputs [..., {k}], got {list(x.shape)}")
    if x.numel() == 0 or n == 0:  # nothing to multiply, nothing to record; autograd gives zeros of the right shapes
        matrix = weight if state.transposed else weight.t()
        with torch.autocast(x.device.type, enabled=False):
            y = x.to(weight.dtype) @ matrix
        return (y if bias is None else y + bias.to(y.dtype)).to(out_dtype)
    if x.dtype == torch.float64:
        return fp8_linear(x.float(), weight, bias, state, training).to(out_dtype)
    settle_device(state, x.device)
    call = Call(state, state.operand(weight, training), out_dtype, training, record, n, weakref.ref(x))
    return _Fp8Linear.apply(x, weight, bias, call)


def record_and_dtype(x: Tensor, training: bool) -> tuple[bool, torch.dtype]:
    """(whether amaxes are recorded, the output's dtype) of a forward call."""
    kind = x.device.type
    return training and torch.is_grad_enabled(), torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def settle_device(state: LinearState, device: torch.device) -> None:
    """Move the layer's scales to where its input is, and take note of news of them."""
    book = state.book
    if book is not None:
        if book.device != device:
            book.to(device)
        book.poll()


def _without_kernels(x: Tensor, weight: Tensor, bias: Tensor | None, state: LinearState) -> Tensor:
    """What kernels cannot take. Nested tensors stay in high precision; within torch.func's transforms, FP8 rounding in plain torch, whose gradient
    passes through; integers get torch's own error."""
    matrix = weight.t() if state.transposed else weight
    if not x.is_floating_point():
        return nn.functional.linear(x, matrix, bias)
    bias = None if bias is None else bias.to(x.dtype)
    if x.is_nested:
        return nn.functional.linear(x, matrix.to(x.dtype), bias)

    def rounded(t: Tensor) -> Tensor:
        value = t.detach().float()
        scale = formats.scale_from_amax(value.abs().amax(), torch.ones((), dtype=torch.float32, device=t.device), formats.E4M3_MAX, 0, state.bank.power_of_two)
        return t + ((value * scale).clamp(-formats.E4M3_MAX, formats.E4M3_MAX).to(formats.E4M3).float() / scale - value).to(t.dtype)

    return nn.functional.linear(rounded(x), rounded(matrix).to(x.dtype), bias)
