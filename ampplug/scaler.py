"""A GradScaler for bf16 gradients, which O2 makes of an fp32 model's weights.

torch.amp.GradScaler checks and unscales fp32 and fp16 gradients on CUDA; for bf16 ones its operator is missing in some versions (2.11: "not
implemented for 'BFloat16'").
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, the same arguments and behaviour, for gradients of any dtype. Does not wait for the device."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None and p.grad.dtype == torch.bfloat16]
        others = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None and p.grad.dtype != torch.bfloat16]
        found = super()._unscale_grads_(SimpleNamespace(param_groups=[{"params": others}]), inv_scale, found_inf, allow_fp16)  # type: ignore[arg-type]
        with torch.no_grad():
            for device in {g.device for g in grads}:
                here = [g for g in grads if g.device == device]
                largest = torch.stack(torch._foreach_norm(here, float("inf")))
                bad = (~torch.isfinite(largest)).any().float().reshape(1)
                found[device] = torch.maximum(found[device].reshape(1), bad) if device in found else bad
                if not allow_fp16:  # the check alone is made with allow_fp16, and a scale of one
                    torch._foreach_mul_(here, inv_scale.to(device))
        return found
