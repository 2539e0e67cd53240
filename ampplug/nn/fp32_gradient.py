"""Gradients in fp32 of 16-bit parameters (`grad_dtype="fp32"`): a bf16 sum of ones stops at 256.

torch's `Tensor.grad_dtype` lets them be; two things it leaves to do. The compiler traces a backward pass with gradients of the parameters' own dtype,
so a compiled layer hands its weight gradient to a stand-in of the weight, in fp32. And torch's optimizers take gradients of the parameter's dtype
only, so that the sum is rounded once, for the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def supported() -> bool:
    """Whether this torch lets a gradient have another dtype than its parameter."""
    return hasattr(Tensor, "grad_dtype")


def widen(parameters: Iterable[Tensor]) -> None:
    """Let the gradients of 16-bit parameters be fp32, those that are there included."""
    for p in parameters:
        if p.dtype in HALF:
            _set_gradient(p, None if p.grad is None else p.grad.float(), torch.float32)


def _set_gradient(p: Tensor, grad: Tensor | None, dtype: torch.dtype) -> None:
    p.grad = None  # torch wants none while the dtype changes
    p.grad_dtype = dtype  # type: ignore[attr-defined]
    p.grad = grad


def stand_in(weight: Any) -> Tensor:
    """A tensor [N, K] of one fp32 element whose gradient becomes that of `weight.param`, as if autograd had put it there. Its post-accumulate hooks
    are called then; autograd calls them, too, when it finds that the compiled graph gives the weight itself no gradient.

    weight: a `storage.Weight`, whose parameter may be another tensor later on.
    """
    sink = torch.zeros((), dtype=torch.float32, device=weight.param.device).expand(weight.param.shape).requires_grad_()

    @torch.no_grad()
    def hand_over(sink: Tensor) -> None:
        p, grad = weight.param, sink.grad
        sink.grad = None
        assert grad is not None
        if p.grad is None:
            p.grad = grad.to(p.grad_dtype or grad.dtype)  # type: ignore[attr-defined]
        else:
            p.grad += grad
        for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(p)

    sink.register_post_accumulate_grad_hook(hand_over)
    return sink


def round_for_step(optimizer: torch.optim.Optimizer) -> None:
    """Give `optimizer`'s steps gradients of the parameters' dtype; before and after they are fp32."""
    kept: list[tuple[Tensor, Tensor]] = []

    def narrow() -> None:
        for g in optimizer.param_groups:
            for p in g["params"]:
                if p.dtype in HALF and p.grad is not None and p.grad.dtype == torch.float32:
                    kept.append((p, p.grad))
                    _set_gradient(p, p.grad.to(p.dtype), p.dtype)

    def restore() -> None:
        for p, grad in kept:
            _set_gradient(p, grad, torch.float32)
        kept.clear()

    def before(_: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        restore()  # after a step that failed
        closure: Callable | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            narrow()
            return None

        def narrowed() -> Any:
            restore()
            loss = closure()
            narrow()
            return loss

        return ((args[0], narrowed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": narrowed})

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: restore())
