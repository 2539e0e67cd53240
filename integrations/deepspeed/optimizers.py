"""The optimizer that O2 starts from: torch's Adam or AdamW, whichever way the engine was given one."""

from __future__ import annotations

from typing import Any

import torch

from ampplug.optim.adamw import LOW_BIT
from ampplug.optim.base import check_group


def adam_of(engine: Any, client_optimizer: Any, model_parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of the configuration, of the caller, or of the caller's function, as exactly torch.optim.Adam or AdamW.

    ValueError for any other optimizer, and for settings that have no 8-bit counterpart.
    """
    if client_optimizer is None:
        optimizer = engine._configure_basic_optimizer(model_parameters)
    elif isinstance(client_optimizer, torch.optim.Optimizer):
        optimizer = client_optimizer
    else:
        optimizer = client_optimizer(model_parameters)
    if type(optimizer).__name__ == "FusedAdam":
        optimizer = from_fused_adam(optimizer)
    if type(optimizer) not in LOW_BIT:
        raise ValueError(
            f"ampplug: the optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}; opt_level 'O2' takes Adam and AdamW (of the "
            "configuration, torch.optim, or DeepSpeed's FusedAdam). Use opt_level 'O1', which keeps any optimizer"
        )
    for group in optimizer.param_groups:
        check_group(group, f"ampplug: {type(optimizer).__name__}")
    return optimizer


def from_fused_adam(fused: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """torch's form of DeepSpeed's or Apex's FusedAdam. The two share their groups, so that a scheduler of the first sets the rates of the second."""
    groups = []
    for group in fused.param_groups:
        if not group.get("bias_correction", True):
            raise ValueError("ampplug: FusedAdam(bias_correction=False) is not available at opt_level 'O2'; use 'O1'")
        groups.append({k: v for k, v in group.items() if k not in ("bias_correction", "step")})
    kind = torch.optim.AdamW if fused.adam_w_mode else torch.optim.Adam  # type: ignore[attr-defined]
    optimizer = kind(groups)
    fused.param_groups = optimizer.param_groups
    # a scheduler warns when the optimizer that it knows has not stepped
    optimizer.register_step_post_hook(lambda *_: setattr(fused, "_opt_called", True))
    return optimizer


def adam_configuration(parameters: dict[str, Any], adam_w_mode: bool) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """(class, further arguments) for an "Adam" or "AdamW" of the configuration, in place of FusedAdam, which O2 would only throw away.

    parameters: those of the configuration; FusedAdam's own are taken out of it. Defaults are FusedAdam's.
    """
    if not parameters.pop("bias_correction", True):
        raise ValueError("ampplug: bias_correction=false is not available at opt_level 'O2'; use 'O1'")
    for name in ("set_grad_none", "fp32_optimizer_states"):
        parameters.pop(name, None)
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam), {"weight_decay": parameters.pop("weight_decay", 0.0)}
