"""8-bit moments in the form that plain DeepSpeed and torch load: fp32, and beside them what makes the same codes of them again.

`m = ratio * sqrt(v)` loses nothing that matters: v's codes are numbers with few mantissa bits, so with the exponent that their group was coded with
the same codes come back; and the code of the ratio is far coarser than the rounding of fp32. So a checkpoint holds "exp_avg" and "exp_avg_sq" for
everyone, exponents (one byte for 128 elements) for us, and a resumed run is the same bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampplug import formats
from ampplug.optim.base import _grouped, _ungrouped

_SLICE = 1 << 17  # groups that are decoded at a time


def decode(ratio: Tensor, v: Tensor, top: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """(exp_avg, exp_avg_sq): fp32 of the codes' shape, on the CPU. Decoded slice by slice: the device may have no room for more."""
    if v.numel() == 0:
        return torch.zeros(v.shape), torch.zeros(v.shape)
    grouped = _grouped(v)
    ratios, vs, tops = _grouped(ratio).flatten(0, 1), grouped.flatten(0, 1), top.flatten()
    moments = torch.empty(2, *vs.shape)
    for i in range(0, vs.shape[0], _SLICE):
        part = slice(i, i + _SLICE)
        second = formats.decode_v(vs[part], tops[part])
        moments[0, part] = (formats.decode_ratio(ratios[part], limit) * second.sqrt()).cpu()
        moments[1, part] = second.cpu()
    exp_avg, exp_avg_sq = (_ungrouped(x.view(grouped.shape), v.shape).clone() for x in moments)
    return exp_avg, exp_avg_sq


def encode_again(exp_avg: Tensor, exp_avg_sq: Tensor, top: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """(ratio, v): the codes that `decode` was given. All on one device; top: uint8 [rows, groups]."""
    if exp_avg.numel() == 0:
        return exp_avg.to(torch.uint8), exp_avg.to(torch.uint8)
    v = _grouped(exp_avg_sq)
    above = v.view(torch.int32) - (top.to(torch.int32) - 15 << 23).unsqueeze(-1)
    codes = torch.where(v == 0, 0, 128 + torch.where(above >= 0, above >> 20, above >> 22))
    root = v.clamp(min=formats.SMALLEST_NORMAL).sqrt()
    half = torch.full_like(codes, -(1 << 31))  # in place of random bits: to nearest
    ratio = formats.encode_ratio(_grouped(exp_avg) / root, limit, half)
    return _ungrouped(ratio, exp_avg.shape), _ungrouped(codes.to(torch.uint8), exp_avg.shape)


# ---------------------------------------------------------------- state_dicts of `LowBitOptimizer`


def to_moments(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state with codes as torch's Adam would write it; under "ampplug", "moments" has what it takes to make the codes again."""
    state, moments = {}, {}
    for i, saved in state_dict["state"].items():
        exp_avg, exp_avg_sq = decode(saved["exp_avg"], saved["exp_avg_sq"], saved["exp_avg_sq_top"], saved["ratio_limit"])
        state[i] = {"step": saved["step"][0].float().cpu(), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        moments[i] = {name: saved[name].cpu() for name in ("exp_avg_sq_top", "ratio_limit", "master_low") if name in saved}
    return {"state": state, "param_groups": state_dict["param_groups"], "ampplug": {**state_dict["ampplug"], "moments": moments}}


def to_codes(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `to_moments`."""
    state = {}
    for i, more in state_dict["ampplug"]["moments"].items():
        saved = state_dict["state"][i]
        top, limit = more["exp_avg_sq_top"].to(saved["exp_avg"].device), more["ratio_limit"].to(saved["exp_avg"].device)
        ratio, v = encode_again(saved["exp_avg"], saved["exp_avg_sq"], top, limit)
        state[i] = {**more, "step": saved["step"], "exp_avg": ratio, "exp_avg_sq": v}
    return {"state": state, "param_groups": state_dict["param_groups"], "ampplug": state_dict["ampplug"]}
