"""Gradient clipping without a pass over the gradients and without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ampplug.optim.base import owner_of


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` with the same arguments and result.

    Where the gradients are all those of one O2 optimizer, their 2-norm is taken in one launch and the clip coefficient is applied inside its next
    `step`: `.grad` itself stays as it is, and a norm that is not finite makes that step change nothing. `zero_grad` drops the coefficient.
    Anything else is done by torch's own function.
    """
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with_gradient = [p for p in chosen if p.grad is not None]
    owners = {id(owner): owner for owner in map(owner_of, with_gradient)}
    if len(owners) == 1 and float(norm_type) == 2.0 and not error_if_nonfinite:
        owner = next(iter(owners.values()))
        if owner is not None and {id(p) for p in owner._parameters() if p.grad is not None} == {id(p) for p in with_gradient}:
            return owner.clip_grad_norm_(max_norm)
    return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite, foreach)
