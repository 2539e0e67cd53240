"""The classes for one of the two packages that Lightning comes as: each has strategies and plugins of its own to derive from."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ampplug.integrations._lightning_fabric import FabricPart
from ampplug.integrations._lightning_precision import PrecisionPart
from ampplug.integrations._lightning_strategy import StrategyPart


def make_classes(trainer: str, fabric: str, module: str) -> tuple[type[Any], type[Any], type[Any]]:
    """(AmpPlugPrecision, AmpPlugStrategy, AmpPlugFabricStrategy), derived from classes of the packages `trainer` and `fabric`.

    `module` must hold them under these names: that is where they are pickled from. The strategies are registered as "ampplug" in both packages.
    """
    own: Any = import_module(f"{trainer}.plugins.precision")
    strategies: Any = import_module(f"{trainer}.strategies")
    fabric_own: Any = import_module(f"{fabric}.plugins.precision")
    fabric_strategies: Any = import_module(f"{fabric}.strategies")

    class AmpPlugPrecision(PrecisionPart, own.Precision):
        """`Trainer(plugins=[AmpPlugPrecision(opt_level="O2", ...)])`: FP8 under a strategy of Lightning's own, on one device or with DDP."""

        __module__, __qualname__ = module, "AmpPlugPrecision"
        plain = {
            "32-true": lambda device: own.Precision(),
            "bf16-mixed": lambda device: own.MixedPrecision("bf16-mixed", device),
            "bf16-true": lambda device: own.HalfPrecision("bf16-true"),
        }
        plain_types = (own.Precision, own.MixedPrecision, own.HalfPrecision)
        works_with = (strategies.SingleDeviceStrategy, strategies.DDPStrategy)

    class AmpPlugStrategy(StrategyPart, strategies.DDPStrategy):
        """`Trainer(strategy=AmpPlugStrategy(opt_level="O2", ...))`, or `strategy="ampplug"`: FP8 on one device, with DDP on several."""

        __module__, __qualname__ = module, "AmpPlugStrategy"
        precision_type = AmpPlugPrecision

    class AmpPlugFabricStrategy(FabricPart, fabric_strategies.DDPStrategy):
        """`Fabric(strategy=AmpPlugFabricStrategy(opt_level="O2", ...))`, or `strategy="ampplug"`: FP8 on one device, with DDP on several."""

        __module__, __qualname__ = module, "AmpPlugFabricStrategy"
        plain_types = (fabric_own.Precision, fabric_own.MixedPrecision, fabric_own.HalfPrecision)

    for registry, strategy in ((strategies.StrategyRegistry, AmpPlugStrategy), (fabric_strategies.STRATEGY_REGISTRY, AmpPlugFabricStrategy)):
        registry.register("ampplug", strategy, description="FP8 by ampplug, on one device or with DDP", override=True)
    return AmpPlugPrecision, AmpPlugStrategy, AmpPlugFabricStrategy
