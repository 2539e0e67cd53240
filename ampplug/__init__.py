"""FP8 training for PyTorch: weights, gradients' scales and optimizer states in FP8 at the lowest host cost.

    model, optimizer = ampplug.initialize(model, optimizer)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ampplug.auditing import Audit as Audit
    from ampplug.auditing import audit as audit
    from ampplug.checkpoint import fp32_state_dict as fp32_state_dict
    from ampplug.checkpoint import refresh as refresh
    from ampplug.checkpoint import torch_state_dict as torch_state_dict
    from ampplug.clip import clip_grad_norm_ as clip_grad_norm_
    from ampplug.config import Config as Config
    from ampplug.entry import initialize as initialize
    from ampplug.entry import plan as plan
    from ampplug.graph import capture as capture
    from ampplug.kernels.triton_runtime import check_fp8_support as check_fp8_support
    from ampplug.planning import Plan as Plan
    from ampplug.scaler import GradScaler as GradScaler

# Names load on first use, so that importing the package imports torch and nothing optional. No module is named like a public function: importing
# it would hide the function.
_PUBLIC = {
    "Audit": "auditing",
    "Config": "config",
    "GradScaler": "scaler",
    "Plan": "planning",
    "audit": "auditing",
    "capture": "graph",
    "check_fp8_support": "kernels.triton_runtime",
    "clip_grad_norm_": "clip",
    "fp32_state_dict": "checkpoint",
    "initialize": "entry",
    "plan": "entry",
    "refresh": "checkpoint",
    "torch_state_dict": "checkpoint",
}
__all__ = [*sorted(_PUBLIC), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ampplug' has no attribute {name!r}")
    value = getattr(import_module(f"ampplug.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
