"""Transformer Engine's own modules under ampplug: which of them take FP8 weights from the optimizer's step, and the classes that do.

Transformer Engine is loaded on first use only; what is private to it is named in `te_workspace`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor, nn

OLDEST = (2, 20)
UNFIT: dict[type, str] = {}  # classes that failed the test in te_workspace on the installed version, and how
_SUPPORTED = ("Linear", "LayerNormLinear", "LayerNormMLP")
_INSTEAD = "backend='auto' and 'native' need no Transformer Engine"


def is_te_module(module: nn.Module) -> bool:
    """True for a Transformer Engine module that multiplies by weights of its own. Nothing is imported: who holds one has imported it."""
    base = getattr(sys.modules.get("transformer_engine.pytorch.module.base"), "TransformerEngineBaseModule", None)
    return base is not None and isinstance(module, base) and any(p is not None and p.dim() > 1 for p in module._parameters.values())


def is_fed(module: nn.Module) -> bool:
    """True for a Transformer Engine module that takes its FP8 weights from ampplug."""
    return isinstance(module, _Fed)


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


def check_model(model: nn.Module, device: torch.device) -> None:
    """Every refusal of backend='te', before anything is changed."""
    te = load_te()
    check_device(device)
    found = [(name, m) for name, m in model.named_modules() if is_te_module(m)]
    if not found and "forward" in vars(model):  # the autocast is put around the class's
        raise ValueError(
            f"backend='te': the forward of this {type(model).__name__} was replaced on the object (torch.compile, accelerate, a profiler), which would leave "
            "its layers outside of Transformer Engine's autocast; call ampplug.initialize before that"
        )
    from ampplug.nn.te_workspace import why_unfit

    for name, module in found:
        if getattr(module, "primary_weights_in_fp8", False):
            raise ValueError(f"backend='te': {name!r} was built under te.quantized_model_init, its parameters are FP8 already; build it without")
        if getattr(module, "fuse_wgrad_accumulation", False):
            raise ValueError(f"backend='te': {name!r} has fuse_wgrad_accumulation=True, its gradients are not in .grad; build it without")
    bases = {type(module): None for _, module in found if not why_not_fed(module)} if found else {te.Linear: None}
    for base in bases:
        if differs := why_unfit(base, device):
            UNFIT[base] = differs


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


class _Fed:
    """What the fed classes share. A class and not a hook: it costs no more than the call, and modules with hooks cannot be graphed by te."""

    def forward(self, inp: Any, is_first_microbatch: bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the class below it; `is_first_microbatch` may be left out, given, or wrong: the weights in FP8 are always those of the last step."""
        from ampplug.nn.te_workspace import feed

        return super().forward(inp, feed(self, inp, is_first_microbatch), *args, **kwargs)  # type: ignore[misc, arg-type]

    def __getstate__(self) -> dict:
        """Copies and pickles carry no FP8 weights of ours: they cast their own, as Transformer Engine does."""
        state = dict(self.__dict__)
        state["_ampplug"], state["_fp8_workspaces"] = None, {}
        return state

    def __deepcopy__(self, memo: dict) -> Any:
        import copy

        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return new


_classes: dict[type, type] = {}


def fed_class(base: type) -> type:
    """The class of a fed module made of `base`, one of te.Linear, te.LayerNormLinear, te.LayerNormMLP."""
    if base not in _classes:
        about = {"__module__": __name__, "__doc__": f"A te.{base.__name__} whose FP8 weights come from ampplug's step."}
        _classes[base] = type(base.__name__, (_Fed, base), about)
    return _classes[base]


def __getattr__(name: str) -> type:
    """Unpickling a fed module in a fresh process asks for the class by name."""
    if name in _SUPPORTED:
        return fed_class(getattr(load_te(), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
