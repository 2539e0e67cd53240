"""Everything private to Transformer Engine that ampplug relies on (read in 2.20.2), and a test of it on the installed one.

A Transformer Engine module keeps FP8 copies of its weights in `_fp8_workspaces` and, called with `is_first_microbatch=False`, takes a copy from
there as it is. Before each call the entry is made a `Float8Tensor` over W8, W8T and their inverse scale, which the optimizer's step wrote. With
a recipe that has no such tensor (block scaling), or while te's own graphs update the cache, the module casts by itself.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ampplug.nn.linear_function import cast_weight
from ampplug.nn.te import _weight_names, fed_class, load_te
from ampplug.storage import Weight, WeightBank


@dataclass(eq=False)
class TEState:
    """What a fed module holds beyond its own. Nothing of it is in `state_dict`."""

    bank: WeightBank
    weights: dict[str, Weight]  # by name in Transformer Engine's cache, in order of the module's GEMMs
    made: dict[str, Any] = field(default_factory=dict)  # the cache's entries over W8 and W8T
    recipe: Any = None  # the one that the module's quantizers were made for


def feed(module: Any, inp: Any, given: bool | None) -> bool | None:
    """Put the FP8 weights where the module will look for them. Returns what to pass as `is_first_microbatch`: False, or `given` where it casts."""
    state: TEState | None = module._ampplug
    if state is None or torch.compiler.is_compiling():
        return given if state is None else None  # compiled calls take nothing from the cache
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as manager

    if not manager.is_fp8_enabled():
        return given
    recipe = manager.get_fp8_recipe()
    per_tensor = (recipe.delayed() or recipe.float8_current_scaling()) and getattr(recipe, "backward_override", None) is None
    updates_cache = manager.quantization_state.skip_fp8_weight_update_tensor is not None and manager.fp8_graph_capturing()
    if not per_tensor or updates_cache:
        _withdraw(module, state)
        return given
    if state.recipe is not recipe:  # as the forward does at its beginning: makes the quantizers, empties the cache of another kind of recipe
        module.init_fp8_metadata(num_gemms=len(state.weights))
        state.recipe = recipe
        state.made.clear()
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else inp.dtype
    names = _weight_names(module)
    for (key, w), quantizer in zip(state.weights.items(), module._get_weight_quantizers(), strict=True):
        weight = getattr(module, names[key])
        if module.training and weight is w.param and weight.device == state.bank.device and weight.is_contiguous():
            if not w.fresh:
                state.bank.refresh([w], keep_scale=w.master.restored)
            entry = state.made.get(key)
            if entry is None or entry.dtype != dtype or not _is_over(entry, w):
                entry = state.made[key] = _entry(w.w8, w.w8t, w.scale_inv, dtype, quantizer)
        else:  # evaluation, functional_call: of the values as they are now, whoever wrote them
            entry = _entry(*cast_weight(weight, False, state.bank.power_of_two), dtype, quantizer)
        module._fp8_workspaces[key] = entry
    return False


def _entry(w8: Tensor, w8t: Tensor, scale_inv: Tensor, dtype: torch.dtype, quantizer: Any) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    return Float8Tensor(
        shape=w8.shape, dtype=dtype, data=w8.view(torch.uint8), fp8_scale_inv=scale_inv, fp8_dtype=quantizer.dtype,
        data_transpose=w8t.view(torch.uint8), quantizer=quantizer, requires_grad=False, device=w8.device,
    )  # fmt: skip


def _is_over(entry: Any, w: Weight) -> bool:
    """True while the entry shows this weight's FP8 copies: Transformer Engine may drop one of them, the bank may move."""
    tensors = entry._data, entry._transpose, entry._scale_inv
    return not entry._transpose_invalid and all(
        mine is not None and mine.data_ptr() == ours.data_ptr() for mine, ours in zip(tensors, (w.w8, w.w8t, w.scale_inv), strict=True)
    )


def _withdraw(module: Any, state: TEState) -> None:
    """Leave nothing of ours in the cache: the module would write its own casts over W8."""
    for key, entry in state.made.items():
        if module._fp8_workspaces.get(key) is entry:
            del module._fp8_workspaces[key]
    state.made.clear()
    state.recipe = None


def feed_from(module: nn.Module, bank: WeightBank, weights: list[Weight]) -> None:
    """Make `module` take its FP8 weights from the bank; its class changes in place."""
    module.__class__ = fed_class(type(module))
    module._ampplug = TEState(  # type: ignore[assignment]
        bank, dict(zip(_weight_names(module), weights, strict=True))
    )


# ---------------------------------------------------------------- the test of it all

_tested: dict[tuple[type, torch.device], str] = {}


def why_unfit(base: type, device: torch.device) -> str:
    """"" where modules of this class use fed weights as expected, else what differs; warned about once. Draws no random number."""
    if (base, device) not in _tested:
        try:
            with torch.enable_grad(), _no_autocast(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
                differs = _try(base, device)
        except Exception as error:  # any private name may be gone
            differs = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        _tested[base, device] = differs
        if differs:
            warnings.warn(f"ampplug: te.{base.__name__} of this Transformer Engine casts its weights itself, in every call ({differs})", stacklevel=2)
    return _tested[base, device]


@contextlib.contextmanager
def _no_autocast(device: torch.device) -> Any:
    with torch.autocast(device.type, enabled=False):
        yield


def _try(base: type, device: torch.device) -> str:
    """Zero weights in a small module, others in the bank: what comes out, and the gradient, must be those of the bank's.

    Inputs are +1, -1, +1, ...; fed weights 0.5 in even columns and 0 in odd ones; a sum over 64 columns is 16. All numbers are powers of two.
    """
    from transformer_engine.common.recipe import Float8CurrentScaling

    te, mlp = load_te(), base.__name__ == "LayerNormMLP"
    module = base(64, 64, bias=False, params_dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        fed = [module._parameters[name] for name in _weight_names(module).values()]
        bank = WeightBank([(str(i), p) for i, p in enumerate(fed)], device)
        for p in fed:
            p.zero_()
            p[:, ::2] = 0.5
        bank.refresh()
        for p in fed:
            p.zero_()
        for w in bank.weights:
            w.mark_fresh()
    feed_from(module, bank, bank.weights)
    copies = [t.view(torch.uint8).clone() for w in bank.weights for t in (w.w8, w.w8t)]
    x = torch.ones(32, 64, device=device, dtype=torch.bfloat16)
    x[:, 1::2] = -1
    x.requires_grad_()
    for _ in range(2):
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            y = module(x)
        y.sum().backward()
    expected = 256.0 if mlp else 16.0
    if not bool(((y.float() - expected).abs() < 0.05 * expected).all()):
        return f"the output is {float(y.detach().float().mean()):g} for {expected:g}: the cached weight was not used"
    grad, expected = (x.grad, 2 * 32.0) if base.__name__ == "Linear" else (module.layer_norm_weight.grad, 2 * 32 * (512.0 if mlp else 32.0))
    assert grad is not None
    row = grad.float().reshape(-1, 64)[0]
    if not bool(((row[::2] - expected).abs() < 0.05 * expected).all() and (row[1::2].abs() < 0.05 * expected).all()):
        return f"the gradient is {float(row[0]):g} for {expected:g}: the cached transpose was not used"
    if not all(torch.equal(a, t.view(torch.uint8)) for a, t in zip(copies, (t for w in bank.weights for t in (w.w8, w.w8t)), strict=True)):
        return "the cached weight was written to"
    if not all(module._fp8_workspaces[k] is e and _is_over(e, w) for (k, e), w in zip(module._ampplug.made.items(), bank.weights, strict=True)):
        return "the cached weight was replaced"
    return ""
