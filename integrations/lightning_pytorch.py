"""Strategies and precision plugin for `lightning.pytorch` and `lightning.fabric`. Importing this module registers the strategy "ampplug" in both."""

from ampplug.integrations._lightning_classes import make_classes

AmpPlugPrecision, AmpPlugStrategy, AmpPlugFabricStrategy = make_classes("lightning.pytorch", "lightning.fabric", __name__)
