"""The Trainer's precision plugin, whichever package the Trainer is of: conversion, autocast, clipping."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

import ampplug
from ampplug.integrations._lightning_settings import check_precision, convert, converted, restore, split_settings

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision as Base
else:
    Base = object


class PrecisionPart(Base):
    """Goes before the package's own `Precision` among the bases.

    plain: precision -> its plugin of the package, made for a device type. works_with: the strategies of the package whose life-cycle fits.
    """

    plain: ClassVar[dict[str, Callable[[str], Any]]]
    plain_types: ClassVar[tuple[type, ...]]
    works_with: ClassVar[tuple[type, ...]]

    def __init__(self, opt_level: str = "O2", *, precision: str = "32-true", **settings: Any) -> None:
        """Fields of `ampplug.Config`; precision: "32-true", "bf16-mixed" or "bf16-true", as the Trainer's argument, which Lightning wants left out
        beside a plugin.

        Raises:
            ValueError, TypeError: naming argument, value and legal values.
        """
        self.config, _ = split_settings(opt_level, settings, type(self).__name__)
        check_precision(precision, self.plain_types[0], self.plain_types)
        self.precision = precision  # type: ignore[assignment]
        self._inner = self.plain[precision]("cpu")

    # ---------------------------------------------------------------- the life of a module: convert_module, then (on its device) connect

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Before the optimizers are made. A module that was trained before becomes what it was; bf16-true casts it."""
        trainer = _trainer(module)
        if not isinstance(trainer.strategy, self.works_with):
            legal = ", ".join(t.__name__ for t in self.works_with)
            raise ValueError(
                f"strategy is a {type(trainer.strategy).__name__}; AmpPlugPrecision works with {legal} and 'ampplug'. This version takes no sharded "
                "parameters: neither FSDP and FSDP2 (ModelParallelStrategy) nor DeepSpeed"
            )
        if trainer.state.fn == "fit":
            restore(module)
        return self._inner.convert_module(module)

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[nn.Module, list[Any], list[Any]]:
        """Convert `model`, which may be wrapped in DDP already, with its optimizers; without any (validate, test, predict), its layers alone.

        Identities are kept: schedulers and callbacks hold the right objects.
        """
        module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        device = next((p.device.type for p in module.parameters()), "cpu")
        self._inner = self.plain[self.precision](device)
        if _trainer(module).state.fn == "fit":
            if module is not model:
                self._check_wrapped(module, optimizers)
            convert(module, optimizers, self.config)
        elif not converted(module) and self.config.opt_level != "O0":
            convert(module, [], replace(self.config, opt_level="O1"))
        return super().connect(model, optimizers, lr_schedulers)

    def _check_wrapped(self, module: nn.Module, optimizers: list[Any]) -> None:
        """DDP's buckets are made for the parameters' dtypes."""
        plan = ampplug.plan(module, optimizers, config=self.config)
        changed = [p.name for p in plan.parameters if p.after != p.before]
        if changed and self.config.opt_level == "O2":
            raise ValueError(
                f"strategy: it wrapped the model in DDP before O2 can turn {len(changed)} parameters ({changed[0]!r}, ...) into bf16; "
                "use Trainer(strategy='ampplug'), which converts first, or opt_level='O1', or precision='bf16-true'"
            )

    # ---------------------------------------------------------------- as the plain plugin of this precision

    def tensor_init_context(self) -> AbstractContextManager:
        """Dtype of tensors made by the user's code."""
        return self._inner.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager:
        """Dtype of parameters made in `configure_model`."""
        return self._inner.module_init_context()

    def forward_context(self) -> AbstractContextManager:
        """Autocast, or the default dtype."""
        return self._inner.forward_context()

    def convert_input(self, data: Any) -> Any:
        """A batch to the dtype of bf16-true."""
        return self._inner.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """Back from it."""
        return self._inner.convert_output(data)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """At O2 in one launch, taking effect inside the next step; `.grad` stays as it is."""
        ampplug.clip_grad_norm_(self.main_params(optimizer), clip_val)


def _trainer(module: nn.Module) -> Any:
    """The Trainer of a LightningModule. TypeError where there is none: Fabric would never hand the optimizers to this plugin."""
    try:
        trainer: Any = module.trainer
        return trainer if trainer.state is not None else None
    except (AttributeError, RuntimeError):
        raise TypeError("plugins: AmpPlugPrecision is for the Trainer; with Fabric use Fabric(strategy='ampplug')") from None
