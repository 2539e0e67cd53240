"""Hugging Face accelerate: `prepare` in place of `accelerator.prepare`.

    from ampplug.integrations.accelerate import prepare
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)

Everything else of accelerate stays as it is: `accumulate`, `backward`, `clip_grad_norm_`, `save_state`, `load_state`, `unwrap_model`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import ampplug

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ImportError("ampplug.integrations.accelerate needs accelerate: pip install 'ampplug[hf]'") from error

_LEGAL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def prepare(accelerator: Accelerator, *objects: Any, opt_level: str = "O2", **settings: Any) -> Any:
    """`ampplug.initialize` the model and its optimizers, then `accelerator.prepare` all `objects`, and return them in the order given.

    Args:
        accelerator: of one process or of DDP, without FP8 of its own (`mixed_precision` "no", "bf16" or "fp16").
        objects: what `accelerator.prepare` takes: one model, its optimizers, data loaders, schedulers. None of them prepared before.
        opt_level, settings: as those of `ampplug.initialize`.

    Raises:
        ValueError, TypeError, RuntimeError: what was found and what is legal, before anything is converted.
    """
    check_accelerator(accelerator)
    models = [o for o in objects if isinstance(o, nn.Module) and next(o.parameters(), None) is not None]
    optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
    if len(models) != 1:
        raise ValueError(
            f"{len(models)} models were given; prepare takes one model with its optimizers. For several, call ampplug.initialize for each, "
            "then accelerator.prepare for all"
        )
    for o in (*models, *optimizers):
        if isinstance(o, AcceleratedOptimizer) or getattr(o, "_is_accelerate_prepared", False):
            raise ValueError(f"the {type(o).__name__} is already prepared; FP8 must come before: leave accelerator.prepare to this function")
    if accelerator.device_placement:  # before the plan is made, which depends on the device
        models[0].to(accelerator.device)
    ampplug.initialize(models[0], optimizers, opt_level, **settings)
    use_own_scaler(accelerator)
    # An optimizer's state is where it belongs. Placing it once more would load it anew, and a remainder that was just loaded waits for the
    # bf16 values it belongs to: those of another checkpoint, loaded before the first step, would get it.
    placement = [False if isinstance(o, torch.optim.Optimizer) else None for o in objects]
    return accelerator.prepare(*objects, device_placement=placement)


def check_accelerator(accelerator: Accelerator) -> None:
    """ValueError, naming what is legal, where the accelerator shards the model or brings FP8 of its own."""
    kind = accelerator.distributed_type
    if kind not in _LEGAL:
        name = "FSDP2" if accelerator.is_fsdp2 else kind.value
        raise ValueError(f"the accelerator runs {name}; this version of ampplug takes one process or DDP ({', '.join(k.value for k in _LEGAL)})")
    parallelism = accelerator.parallelism_config
    if parallelism is not None:
        for name in ("tp", "cp", "sp", "dp_shard"):
            if getattr(parallelism, f"{name}_enabled", False):
                raise ValueError(f"the accelerator's parallelism_config has {name}_size > 1; this version of ampplug takes one process or DDP")
    if accelerator.mixed_precision == "fp8":
        raise ValueError(
            f"the accelerator has mixed_precision='fp8' (backend {accelerator.fp8_backend.value}), which converts the model itself; "
            "ampplug does it instead: use mixed_precision='bf16', 'fp16' or 'no'"
        )


def use_own_scaler(accelerator: Accelerator) -> None:
    """In fp16, make the accelerator's GradScaler take bf16 gradients too. It stays the same object with the same state."""
    if type(accelerator.scaler) is torch.amp.GradScaler:
        accelerator.scaler.__class__ = ampplug.GradScaler
