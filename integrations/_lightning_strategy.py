"""The Trainer's strategy, whichever package the Trainer is of: data parallelism around the precision plugin, which converts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from ampplug.integrations._lightning_precision import PrecisionPart
from ampplug.integrations._lightning_settings import check_precision, split_settings

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as Base
else:
    Base = object


class StrategyPart(Base):
    """Goes before the package's own `DDPStrategy` among the bases.

    With one process there is no process group, wrapper, launcher or distributed sampler. With more, the order of Lightning's DDP is changed: O2 changes dtypes,
    which the wrapper's buckets do not survive, so optimizers are made and the module is converted before it is wrapped.
    """

    precision_type: ClassVar[type[PrecisionPart]]
    _precision_plugin: Any

    def __init__(self, opt_level: str = "O2", **settings: Any) -> None:
        """Fields of `ampplug.Config`, and keyword arguments of Lightning's DDPStrategy and torch's DistributedDataParallel.

        Raises:
            ValueError, TypeError: naming argument, value and legal values.
        """
        self.config, others = split_settings(opt_level, settings, type(self).__name__, super().__init__, nn.parallel.DistributedDataParallel)
        self._connected = False
        super().__init__(**others)

    @property
    def precision_plugin(self) -> Any:
        """An `AmpPlugPrecision`; the Trainer sets the plain plugin of its `precision` argument."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is None or plugin is self._precision_plugin:
            self._precision_plugin = plugin
            return
        if isinstance(plugin, self.precision_type):
            raise ValueError("plugins: AmpPlugPrecision beside strategy='ampplug'; give its settings to AmpPlugStrategy(...)")
        check_precision(plugin.precision, type(plugin), self.precision_type.plain_types)
        self._precision_plugin = self.precision_type(precision=plugin.precision, **vars(self.config))

    # ---------------------------------------------------------------- one process

    def _configure_launcher(self) -> None:
        if self.world_size > 1:
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        """A process group, where there is anyone to talk to."""
        if self.world_size > 1:
            super().setup_distributed()

    def setup(self, trainer: Any) -> None:
        """Convert, move to the device, wrap; optimizers where there is training."""
        self._connected = False
        if self.world_size > 1:
            super().setup(trainer)
            return
        assert self.accelerator is not None and self.model is not None
        # Lightning shuffles the training data of every DDPStrategy, on one device too, whatever the user's loader does; it has no other switch
        trainer._accelerator_connector.use_distributed_sampler = False
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)  # in place
        self.model_to_device()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    # ---------------------------------------------------------------- more

    def configure_ddp(self) -> None:
        """Wrap, after everything that Lightning would do later."""
        assert self.lightning_module is not None
        self.setup_optimizers(self.lightning_module.trainer)
        self.setup_precision_plugin()
        self._connected = True
        super().configure_ddp()

    def setup_optimizers(self, trainer: Any) -> None:
        """Once a fit."""
        if not self._connected:
            super().setup_optimizers(trainer)

    def setup_precision_plugin(self) -> None:
        """Once a fit."""
        if not self._connected:
            super().setup_precision_plugin()
