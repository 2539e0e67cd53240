"""Checkpoints: scales beside any optimizer's state (O1), fp32 values into split parameters, and torch's own form of a low-bit state."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ampplug import formats
from ampplug.optim.base import LowBitOptimizer, decode_moments, owner_of
from ampplug.scaling import ScaleBook, load_scales
from ampplug.storage import WeightBank


def add_scales_to_state(optimizer: torch.optim.Optimizer, book: ScaleBook | None) -> None:
    """O1: the optimizer's state_dict carries the model's scales under "ampplug", and takes them from there. Other optimizers ignore the key."""

    def refuse(_: Any, state_dict: dict[str, Any]) -> None:
        if any("ratio_limit" in saved for saved in state_dict["state"].values()):
            raise ValueError("state_dict: it is that of an O2 run, with 8-bit moments; save ampplug.torch_state_dict(optimizer) there to go on at O1")

    optimizer.register_load_state_dict_pre_hook(refuse)
    if book is None:
        return

    def save(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "ampplug": {"version": 1, "book": book.state_dict()}}

    def load(_: Any, state_dict: dict[str, Any]) -> None:
        own = state_dict.get("ampplug")
        if own is not None and own["book"] is not None:
            load_scales(book, own["book"])

    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)


def fill_remainders_on_load(module: nn.Module) -> None:
    """Loading fp32 values into a split parameter fills both halves; bf16 values leave the remainder to the optimizer's state."""
    module.register_load_state_dict_pre_hook(_remember_fp32)
    module.register_load_state_dict_post_hook(_fill)


# Values between the pre-hook and the post-hook of one load, by module. Module functions and no bound state: a copied or pickled module
# must not carry the optimizer along.
_pending: weakref.WeakKeyDictionary[nn.Module, list[tuple[Tensor, Tensor]]] = weakref.WeakKeyDictionary()


def _remember_fp32(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, p in module._parameters.items():
        value = state_dict.get(prefix + name)
        if p is None or not isinstance(value, Tensor) or value.dtype != torch.float32 or p.dtype != torch.bfloat16 or value.shape != p.shape:
            continue
        if owner_of(p) is not None:
            _pending.setdefault(module, []).append((p, value))


def _fill(module: nn.Module, _: Any) -> None:
    for p, value in _pending.pop(module, ()):
        owner = owner_of(p)
        if owner is None:
            continue
        master = owner._low_bit.records[id(p)].master
        if master.low is None:
            continue
        with torch.no_grad():
            high, low = formats.split_master(value.to(p.device).contiguous())
            p.copy_(high)
            master.low.copy_(low)
        master.restored = False
        master.mark_seen()


@torch.no_grad()
def fp32_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's state_dict with the exact fp32 master of every split parameter, for export or for going on with another optimizer."""
    state = model.state_dict()
    for name, p in model.named_parameters(remove_duplicate=False):
        owner = owner_of(p)
        if owner is not None and name in state:
            record = owner._low_bit.records[id(p)]
            record.master.reconcile()
            state[name] = record.master.value().reshape(p.shape).clone()
    return state


@torch.no_grad()
def torch_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of a low-bit optimizer in the form of torch's Adam or AdamW: fp32 moments, loadable there and back.

    TypeError for any other optimizer.
    """
    if not isinstance(optimizer, LowBitOptimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; torch_state_dict takes the optimizer of an O2 run")
    packed = torch.optim.Optimizer.state_dict(optimizer)
    parameters = list(optimizer._parameters())
    state = {}
    for i, p in enumerate(parameters):
        record = optimizer._low_bit.records.get(id(p))
        if record is not None and int(record.step) > 0:
            exp_avg, exp_avg_sq = decode_moments(record)
            state[i] = {"step": record.step[0].float().cpu(), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return {"state": state, "param_groups": packed["param_groups"]}


def refresh(model: nn.Module) -> None:
    """Make the FP8 copies of all weights of `model` anew from the weights as they are.

    Needed after writes that leave no trace while training goes on: `p.data.copy_(...)`, raw pointers. Anything else is noticed.
    """
    banks: dict[int, WeightBank] = {}
    for module in model.modules():
        state = getattr(module, "_ampplug", None)
        if state is not None:
            banks[id(state.bank)] = state.bank
    for bank in banks.values():
        for w in bank.weights:
            w.master.seen = (0, w.param.dtype, -1)  # whatever was written, the remainder no longer belongs to it
        bank.refresh()
