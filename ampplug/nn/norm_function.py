"""RMSNorm as a producer: it casts what it makes for the FP8 layer that reads it, in the same launch.

Which layer that is shows as the model runs (`nn.linear_function.Producer`): one that had to cast a norm's output by itself is whom the norm casts for
from the next call on, and the cast lies where siblings look for one. So nothing is assumed of the model between the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampplug import formats
from ampplug.kernels.rms_norm import rms_norm, rms_norm_backward
from ampplug.kernels.swiglu import Fp8, Target
from ampplug.nn.linear_function import LinearState, Producer, leave_cast, quantize


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, early: bool, out_dtype: torch.dtype, order: _Order) -> Tensor:
        k = x.shape[-1]
        matrix = x.reshape(-1, k).contiguous()
        y, r, order.made = rms_norm(matrix, weight, eps, early, out_dtype, order.target, order.transpose, order.power_of_two)
        ctx.save_for_backward(x, weight, r)
        ctx.early = early
        return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, r = ctx.saved_tensors
        k = x.shape[-1]
        need_x, need_weight = ctx.needs_input_grad[:2]
        dx, dw = rms_norm_backward(dy.reshape(-1, k).contiguous(), x.reshape(-1, k).contiguous(), weight, r, ctx.early, need_x, need_weight)
        return None if dx is None else dx.reshape(x.shape), dw, None, None, None, None


class _Order:
    """A cast to be made within the norm, and what was made."""

    def __init__(self, state: LinearState | None, transpose: bool, record: bool):
        self.target: Target | None = None
        self.transpose, self.power_of_two = transpose, False
        self.made: Fp8 | None = None
        if state is not None:
            book, slot = state.book, state.x_slot
            assert book is not None
            self.target = Target(book.scale_views[slot], None, book.amax_views[slot] if record else None, book.scratch_views[state.own_slot])
            self.power_of_two = state.bank.power_of_two


def norm_by_kernel(x: Tensor, weight: Tensor, eps: float, early: bool, out_dtype: torch.dtype, producer: Producer) -> Tensor:
    """x [..., K] -> [..., K] in out_dtype by one kernel, cast for the layer that reads it if that has a scale."""
    state = producer.ready(x.device, x.shape[-1])
    order = _Order(state, producer.transpose, torch.is_grad_enabled())
    y = _RMSNorm.apply(x, weight, eps, early, out_dtype, order)
    leave_cast(y, producer, state, order.made)
    return y


def cast_after(y: Tensor, producer: Producer) -> Tensor:
    """y [..., K], made without the kernel, and cast for the layer that reads it."""
    state = producer.ready(y.device, y.shape[-1])
    made = None
    if state is not None and y.dtype != torch.float64:
        matrix = y.detach().reshape(-1, y.shape[-1])
        made = quantize(
            matrix, state.book, state.x_slot, state.bank.power_of_two, formats.E4M3, True, producer.transpose, True, torch.is_grad_enabled(), state.own_slot
        )
    leave_cast(y, producer, state, made)
    return y
