"""Other libraries' FP8 for train_step.py: how each makes its model and optimizer, and why one cannot be run here.

Each gets the same model object, layers and hyperparameters as ampplug does, and its own optimizer in its leanest comparable form.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn


class Peer(NamedTuple):
    """What runs: `context()` is entered around each forward pass."""

    model: nn.Module
    optimizer: Any
    context: Callable[[], Any]


# In which ways a peer runs: Transformer Engine's delayed scaling does not compile; torchao's eager mode (78 launches a layer) is nobody's choice
WAYS = {"te": ("eager", "graph"), "torchao": ("compile",)}

MSAMP = (
    "MS-AMP: not run. `import msamp` raises unless /usr/local/lib/libmsamp_dist.so exists, which its own build of NCCL for one release of torch makes; "
    "it pins Transformer Engine 1.1 and deepspeed 0.13.1, and relies on modules that today's torch no longer has."
)


def why_not(name: str) -> str | None:
    """Why a peer cannot be run here; None where it can."""
    if not torch.cuda.is_available():
        return f"{name}: skipped, it needs a GPU"
    if name == "te":
        if importlib.util.find_spec("transformer_engine") is None:
            return "Transformer Engine: skipped, transformer_engine is not installed"
        try:
            import transformer_engine.pytorch  # noqa: F401
        except Exception as error:  # a build for another torch
            return f"Transformer Engine: skipped, its import fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return None
    if importlib.util.find_spec("torchao") is None:
        return "torchao: skipped, torchao is not installed"
    try:
        import torchao.float8  # noqa: F401
        from torchao.optim import AdamWFp8  # noqa: F401
    except Exception as error:
        return f"torchao: skipped, its import fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _inner_linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """(parent, attribute, layer) of all Linears but the head."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, attribute = name.rpartition(".")
            found.append((model.get_submodule(parent), attribute, module))
    return found


def transformer_engine(model: nn.Module, settings: dict[str, Any], capturable: bool) -> Peer:
    """te.Linear with delayed scaling (history 16) for nn.Linear; FusedAdam with bf16 states, like BF16's own."""
    import transformer_engine.common.recipe as recipes
    import transformer_engine.pytorch as te

    recipe = recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    for parent, attribute, layer in _inner_linears(model):
        weight = layer.weight
        other = te.Linear(layer.in_features, layer.out_features, bias=False, params_dtype=weight.dtype, device=weight.device)
        with torch.no_grad():
            other.weight.copy_(weight)
        setattr(parent, attribute, other)
    options = dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
    optimizer = te.optimizers.FusedAdam(model.parameters(), adam_w_mode=True, capturable=capturable, **options, **settings)
    if hasattr(te, "autocast"):
        return Peer(model, optimizer, lambda: te.autocast(enabled=True, recipe=recipe))
    return Peer(model, optimizer, lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe))


def torchao(model: nn.Module, settings: dict[str, Any], capturable: bool) -> Peer:
    """Tensorwise dynamic scaling, and AdamWFp8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.optim import AdamWFp8

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head")
    return Peer(model, AdamWFp8(model.parameters(), **settings), nullcontext)


MAKE = {"te": transformer_engine, "torchao": torchao}
