"""Everything private to Transformer Engine that ampplug relies on (read in 2.20.2); `te_fed` tests it on the installed one.

A Transformer Engine module keeps FP8 copies of its weights in `_fp8_workspaces` and, called with `is_first_microbatch=False`, takes a copy from
there as it is. Before each call the entry is made a `Float8Tensor` over W8, W8T and their inverse scale, which the optimizer's step wrote. With
a recipe that has no such tensor (block scaling), or while te's own graphs update the cache, the module casts by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampplug.nn.linear_function import cast_weight
from ampplug.nn.te import _weight_names
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
