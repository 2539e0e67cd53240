"""Strategies and precision plugin for `pytorch_lightning` and `lightning_fabric`. Importing this module registers the strategy "ampplug" in both."""

from ampplug.integrations._lightning_classes import make_classes

AmpPlugPrecision, AmpPlugStrategy, AmpPlugFabricStrategy = make_classes("pytorch_lightning", "lightning_fabric", __name__)
