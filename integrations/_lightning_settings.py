"""What Lightning's Trainer and Fabric share: the settings of a strategy, legal precisions, and a module that is trained more than once."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

import ampplug
from ampplug.config import Config
from ampplug.convert import restore_layers
from ampplug.nn.linear import is_converted

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def split_settings(opt_level: str, given: dict[str, Any], owner: str, *others: Callable) -> tuple[Config, dict[str, Any]]:
    """(Config, what is left): `given` holds fields of `Config` and keyword arguments of the callables `others`.

    ValueError for a name that belongs to neither: as an argument of DistributedDataParallel it would pass unnoticed on one device.
    """
    own = {f.name for f in fields(Config)} - {"opt_level"}
    theirs = {name for other in others for name, p in inspect.signature(other).parameters.items() if p.kind is not p.VAR_KEYWORD} - {"self", "module"}
    for name in given:
        if name not in own | theirs:
            rest = f", or one of Lightning's: {', '.join(sorted(theirs))}" if theirs else ""
            raise ValueError(f"{owner}: unknown argument {name!r}; legal are opt_level, {', '.join(sorted(own))}{rest}")
    config = Config.from_dict({"opt_level": opt_level, **{k: v for k, v in given.items() if k in own}})
    return config, {k: v for k, v in given.items() if k not in own}


def check_precision(precision: str, kind: type, plain: tuple[type, ...]) -> None:
    """ValueError unless a plugin of class `kind` is one of Lightning's own, `plain`, and stands for a legal precision."""
    if kind in plain and precision in PRECISIONS:
        return
    legal = ", ".join(map(repr, PRECISIONS))
    raise ValueError(
        f"precision={precision!r} (a {kind.__name__}); with ampplug legal are {legal}: parameters as they are, with bf16 autocast, or in bf16, "
        "and FP8 Linears in each. fp16 and its loss scale have no use beside FP8: take 'bf16-mixed'"
    )


@dataclass(frozen=True)
class _Fitted:
    """What a module needs to be trained again: dtypes before the conversion, and the optimizers, which hold the low halves of split masters."""

    dtypes: dict[str, torch.dtype]
    optimizers: list[torch.optim.Optimizer]


_fitted: weakref.WeakKeyDictionary[nn.Module, _Fitted] = weakref.WeakKeyDictionary()


def converted(module: nn.Module) -> bool:
    """Whether any layer of the module computes in FP8."""
    return any(map(is_converted, module.modules()))


def convert(module: nn.Module, optimizers: list[torch.optim.Optimizer], config: Config) -> None:
    """`ampplug.initialize`, with a note of what the module was, for `restore`."""
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    ampplug.initialize(module, optimizers or None, **vars(config))
    if config.opt_level != "O0":
        _fitted[module] = _Fitted(dtypes, optimizers)


@torch.no_grad()
def restore(module: nn.Module) -> None:
    """Undo `convert`: the next fit comes with optimizers of its own. Split parameters get their exact fp32 values. Anything else is left alone."""
    fitted = _fitted.pop(module, None)
    if fitted is None:
        return
    values = ampplug.fp32_state_dict(module)
    for name, p in module.named_parameters():
        if p.dtype == torch.bfloat16 and fitted.dtypes.get(name) == torch.float32 and name in values:
            p.grad = None
            p.data = values[name].float()
    restore_layers(module)
