"""Transformer Engine: loading it, the GPUs it serves, and which of its own modules in a model can take FP8 weights from the optimizer's step.

It is loaded on first use only. How weights are handed over is `te_workspace`'s; the modules that take them are `te_fed`'s.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor, nn

OLDEST = (2, 20)
UNFIT: dict[type, str] = {}  # classes that failed the test in te_fed on the installed version, and how
_SUPPORTED = ("Linear", "LayerNormLinear", "LayerNormMLP")
_INSTEAD = "backend='auto' and 'native' need no Transformer Engine"


def is_te_module(module: nn.Module) -> bool:
    """True for a Transformer Engine module that multiplies by weights of its own. Nothing is imported: who holds one has imported it."""
    base = getattr(sys.modules.get("transformer_engine.pytorch.module.base"), "TransformerEngineBaseModule", None)
    return base is not None and isinstance(module, base) and any(p is not None and p.dim() > 1 for p in module._parameters.values())


def load_te() -> Any:
    """`transformer_engine.pytorch`. RuntimeError where it is missing, does not load, or is older than 2.20."""
    if "transformer_engine" not in sys.modules and importlib.util.find_spec("transformer_engine") is None:
        raise RuntimeError(f"backend='te': Transformer Engine is not installed (pip install transformer_engine[pytorch]); {_INSTEAD}")
    try:
        te = importlib.import_module("transformer_engine.pytorch")
        version = str(sys.modules["transformer_engine"].__version__)
    except Exception as error:  # a library of another torch or CUDA raises OSError, ImportError, RuntimeError, by its version
        said = (str(error).splitlines() or [""])[0]
        raise RuntimeError(
            f"backend='te': Transformer Engine is installed and does not load; it is probably built for another torch than {torch.__version__} or "
            f"another CUDA than {torch.version.cuda} ({type(error).__name__}: {said}); {_INSTEAD}"
        ) from error
    found = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:2])
    if found < OLDEST:
        raise RuntimeError(f"backend='te': Transformer Engine {version} is too old; {'.'.join(map(str, OLDEST))} or later is needed; {_INSTEAD}")
    return te


def check_device(device: torch.device) -> None:
    """RuntimeError unless `device` is a GPU whose FP8 GEMMs want both operands K-major (compute capability 8.9, 9.0), as W8 and W8T are."""
    if device.type != "cuda":
        raise RuntimeError(f"backend='te': the model is on {device.type!r}; Transformer Engine needs a CUDA GPU of compute capability 8.9 or 9.0")
    found = torch.cuda.get_device_capability(device)
    if found not in ((8, 9), (9, 0)):
        raise RuntimeError(
            f"backend='te': {torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}; 8.9 or 9.0 (Ada, Hopper) is needed"
        )


def why_not_fed(module: nn.Module) -> str:
    """Why this Transformer Engine module casts its weights itself; "" where it takes them from ampplug."""
    module_names = _weight_names(module)
    if type(module).__name__ not in _SUPPORTED or not type(module).__module__.startswith("transformer_engine."):
        return f"casts its weights itself: {type(module).__name__} is not one of {', '.join(_SUPPORTED)}"
    if not module_names or any(n not in module._parameters for n in module_names.values()):
        return "casts its weights itself: a parametrized weight, or one split into several parameters"
    if getattr(module, "tp_size", 1) > 1 or getattr(module, "fsdp_group", None) is not None or getattr(module, "is_fsdp2", False):
        return "casts its weights itself: sharded (tensor parallel or FSDP)"
    if type(module) in UNFIT:
        return f"casts its weights itself: te.{type(module).__name__} as installed does otherwise than expected ({UNFIT[type(module)]})"
    for name in module_names.values():
        weight = module._parameters[name]
        if weight is None or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return "casts its weights itself: not an fp32, bf16 or fp16 matrix"
        if weight.dim() != 2 or weight.shape[0] % 16 or weight.shape[1] % 16 or not weight.numel():
            return f"casts its weights itself: {'x'.join(map(str, weight.shape))} is not in multiples of 16"
    return ""


def _weight_names(module: nn.Module) -> dict[str, str]:
    """Name in Transformer Engine's cache -> name of the parameter, of the module's weights in order of its GEMMs; empty where a weight is split."""
    if "fc1_weight" in module._parameters:
        return {"fc1_weight": "fc1_weight", "fc2_weight": "fc2_weight"}
    names = getattr(module, "weight_names", None) or []
    return {"weight": names[0]} if len(names) == 1 else {}


def fed_weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    """(name in the module, parameter) of the weights that it takes from ampplug; none where it casts them itself."""
    if why_not_fed(module):
        return []
    return [(name, module._parameters[name]) for name in _weight_names(module).values()]  # type: ignore[misc]
