"""Lightning: `import ampplug.integrations.lightning`, then `Trainer(strategy="ampplug")` or `Fabric(strategy="ampplug")`.

`lightning` and `pytorch_lightning` are two packages with classes of their own, and installing the first brings the second. The names here are for
the one that was imported before; if neither was, for `lightning` where it is installed. `ampplug.integrations.pytorch_lightning` is always for
`pytorch_lightning`. Where both were imported, "ampplug" is registered in both.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

# the module of ampplug for each package, in order of preference
_MODULES = {"lightning": "ampplug.integrations.lightning_pytorch", "pytorch_lightning": "ampplug.integrations.pytorch_lightning"}


def _used() -> list[Any]:
    """The modules for the packages in use, the preferred one first. ImportError if none is installed."""
    imported = [module for package, module in _MODULES.items() if sys.modules.get(package) is not None]
    installed = [module for package, module in _MODULES.items() if find_spec(package) is not None]
    if not installed:
        raise ImportError("ampplug.integrations.lightning needs lightning or pytorch-lightning: pip install 'ampplug[lightning]'")
    return [import_module(module) for module in imported or installed[:1]]


if TYPE_CHECKING:
    # what the classes have of their own; they are made when the package is known
    from ampplug.integrations._lightning_fabric import FabricPart as AmpPlugFabricStrategy
    from ampplug.integrations._lightning_precision import PrecisionPart as AmpPlugPrecision
    from ampplug.integrations._lightning_strategy import StrategyPart as AmpPlugStrategy
else:
    _module = _used()[0]
    AmpPlugFabricStrategy, AmpPlugPrecision, AmpPlugStrategy = _module.AmpPlugFabricStrategy, _module.AmpPlugPrecision, _module.AmpPlugStrategy

__all__ = ["AmpPlugFabricStrategy", "AmpPlugPrecision", "AmpPlugStrategy"]
