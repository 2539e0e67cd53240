"""Strategies and precision plugin for `pytorch_lightning` and `lightning_fabric`. Importing this module registers the strategy "ampplug" in both."""

from __future__ import annotations

import lightning_fabric.plugins.precision as fabric_precision
from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
from pytorch_lightning.plugins.precision import HalfPrecision, MixedPrecision, Precision
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

from ampplug.integrations._lightning_fabric import FabricPart
from ampplug.integrations._lightning_precision import PrecisionPart
from ampplug.integrations._lightning_strategy import StrategyPart


class AmpPlugPrecision(PrecisionPart, Precision):
    """`Trainer(plugins=[AmpPlugPrecision(opt_level="O2", ...)])`: FP8 under a strategy of Lightning's own, on one device or with DDP."""

    plain = {
        "32-true": lambda device: Precision(),
        "bf16-mixed": lambda device: MixedPrecision("bf16-mixed", device),
        "bf16-true": lambda device: HalfPrecision("bf16-true"),
    }
    plain_types = (Precision, MixedPrecision, HalfPrecision)
    works_with = (SingleDeviceStrategy, DDPStrategy)


class AmpPlugStrategy(StrategyPart, DDPStrategy):
    """`Trainer(strategy=AmpPlugStrategy(opt_level="O2", ...))`, or `strategy="ampplug"`: FP8 on one device, with DDP on several."""

    precision_type = AmpPlugPrecision


class AmpPlugFabricStrategy(FabricPart, FabricDDPStrategy):
    """`Fabric(strategy=AmpPlugFabricStrategy(opt_level="O2", ...))`, or `strategy="ampplug"`: FP8 on one device, with DDP on several."""

    plain_types = (fabric_precision.Precision, fabric_precision.MixedPrecision, fabric_precision.HalfPrecision)


StrategyRegistry.register("ampplug", AmpPlugStrategy, description="FP8 by ampplug, on one device or with DDP", override=True)
STRATEGY_REGISTRY.register("ampplug", AmpPlugFabricStrategy, description="FP8 by ampplug, on one device or with DDP", override=True)
