"""Fabric's strategy, whichever package Fabric is of."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

import ampplug
from ampplug.integrations._lightning_settings import check_precision, split_settings

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as Base
else:
    Base = object


class _SyncControl:
    """`Fabric.no_backward_sync`: DDP's, and nothing where there is no wrapper."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        if enabled and isinstance(module, nn.parallel.DistributedDataParallel):
            return module.no_sync()
        return nullcontext()


class FabricPart(Base):
    """Goes before the package's own `DDPStrategy` among the bases. `Fabric.setup(model, optimizer)` converts, then wraps if there are more processes."""

    plain_types: ClassVar[tuple[type, ...]]

    def __init__(self, opt_level: str = "O2", **settings: Any) -> None:
        """Fields of `ampplug.Config`, and keyword arguments of Lightning's DDPStrategy and torch's DistributedDataParallel.

        Raises:
            ValueError, TypeError: naming argument, value and legal values.
        """
        self.config, others = split_settings(opt_level, settings, type(self).__name__, super().__init__, nn.parallel.DistributedDataParallel)
        super().__init__(**others)
        self._backward_sync_control = _SyncControl()  # type: ignore[assignment]

    @property
    def precision(self) -> Any:
        """Lightning's own plugin; '32-true', 'bf16-mixed' and 'bf16-true' are legal."""
        return super().precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        if precision is not None:
            check_precision(precision.precision, type(precision), self.plain_types)
        self._precision = precision

    def _configure_launcher(self) -> None:
        if self.world_size > 1:
            super()._configure_launcher()

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """None where there is one process: dataloaders keep their order."""
        return super().distributed_sampler_kwargs if self.world_size > 1 else None

    def setup_environment(self) -> None:
        """A process group, where there is anyone to talk to."""
        if self.world_size > 1:
            super().setup_environment()
            return
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)

    def setup_module(self, module: nn.Module) -> Any:
        """The module in DDP if there are more processes. Not converted: that takes the optimizers, too."""
        return super().setup_module(module) if self.world_size > 1 else module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """RuntimeError: by now the module would be wrapped."""
        raise RuntimeError("strategy='ampplug' converts a model together with its optimizers: call fabric.setup(model, optimizer)")

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None) -> tuple[Any, Any, Any]:
        """Convert in place, then wrap. Optimizers and scheduler stay the objects that they are."""
        ampplug.initialize(module, optimizers, **vars(self.config))
        return self.setup_module(module), optimizers, scheduler

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> Tensor:
        """At O2 in one launch, taking effect inside the next step. Returns the norm, fp32 [].

        Raises:
            RuntimeError: the norm is not finite and error_if_nonfinite; to look, the host waits for the device.
        """
        norm = ampplug.clip_grad_norm_(self.precision.main_params(optimizer), max_norm, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {norm.item()}; clip with error_if_nonfinite=False to skip such steps"
            )
        return norm
