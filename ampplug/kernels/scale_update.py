"""The end of a step, in one launch: scales of all slots, amaxes of all weights, step counts of all parameters.

For each slot with a usable recorded amax: it enters the window of the last H, and `scale = fp8_max / (max(window) * 2**margin)`. A slot
that recorded nothing (0), or Inf or NaN, keeps window and scale. Every record is cleared. A skipped step only clears.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampplug import formats
from ampplug.kernels.adam_step import skipped
from ampplug.kernels.numerics import LARGEST, scale_from_amax
from ampplug.kernels.tables import COLUMN, HYPER, HYPER_WIDTH, WIDTH
from ampplug.kernels.triton_runtime import jit, launch, tl

_W = tl.constexpr(WIDTH)
_H = tl.constexpr(HYPER_WIDTH)
_GRAD = tl.constexpr(COLUMN["grad"])
_GROUP = tl.constexpr(COLUMN["group"])
_LIMIT = tl.constexpr(HYPER.index("ratio_limit"))
_BLOCK = 128


def reference_scale_update(
    amax: Tensor, history: Tensor, position: Tensor, scale: Tensor, fp8_max: Tensor, margin: int, power_of_two: bool, skip: bool
) -> None:
    """Slots: amax, scale, fp8_max fp32 [slots]; history fp32 [slots, H]; position int32 [slots]."""
    usable = torch.isfinite(amax) & (amax > 0)
    if not skip and bool(usable.any()):
        which = usable.nonzero()[:, 0]
        history[which, (position[which] % history.shape[1]).long()] = amax[which]
        position[which] += 1
        scale[which] = formats.scale_from_amax(history[which].amax(1), scale[which], fp8_max[which], margin, power_of_two)
    amax.zero_()


def reference_weight_update(amax: Tensor, next_amax: Tensor, skip: bool) -> None:
    """Weights: the amax that the pass measured becomes the current one."""
    if not skip:
        amax.copy_(torch.where(next_amax != 0, next_amax, amax))
    next_amax.zero_()


def reference_count(table: Tensor, hyper: Tensor, steps: Tensor, limits: Tensor, skip: bool) -> None:
    """Parameters with a gradient: one step more, taken with the group's ratio limit."""
    if not skip:
        stepped = table[:, COLUMN["grad"]] != 0
        steps += stepped.to(steps.dtype)
        limits.copy_(torch.where(stepped, hyper[table[:, COLUMN["group"]], HYPER.index("ratio_limit")].float(), limits))


@jit
def scale_update_kernel(
    amax, history, position, scale, fp8_max, weight_amax, next_amax, table, hyper, steps, limits, found_inf, clip,
    n_slots, n_weights, n_tensors, fp8_factor,
    HISTORY: tl.constexpr, HISTORY_BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr, HAS_CLIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p does slots, weights and parameters p * BLOCK to p * BLOCK + BLOCK - 1."""
    skip = skipped(found_inf, clip, HAS_FOUND_INF, HAS_CLIP)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = i < n_slots
    # a skipped step counts as one that recorded nothing
    recorded = tl.where(skip != 0, 0.0, tl.load(amax + i, mask=slot, other=0.0))
    usable = slot & (recorded > 0.0) & (recorded <= LARGEST)
    at = tl.load(position + i, mask=usable, other=0)
    h = tl.arange(0, HISTORY_BLOCK)
    newest = h[None, :] == (at % HISTORY)[:, None]
    cell = i[:, None] * HISTORY + h[None, :]
    window = tl.load(history + cell, mask=usable[:, None] & (h[None, :] < HISTORY), other=0.0)
    window = tl.where(newest, recorded[:, None], window)
    tl.store(history + cell, window, mask=usable[:, None] & newest)
    tl.store(position + i, at + 1, mask=usable)
    old = tl.load(scale + i, mask=usable, other=1.0)
    top = tl.load(fp8_max + i, mask=usable, other=1.0) * fp8_factor
    tl.store(scale + i, scale_from_amax(tl.max(window, 1), old, top, POWER_OF_TWO), mask=usable)
    tl.store(amax + i, tl.zeros_like(recorded), mask=slot)

    weight = i < n_weights
    measured = tl.where(skip != 0, 0.0, tl.load(next_amax + i, mask=weight, other=0.0))
    tl.store(weight_amax + i, measured, mask=weight & (measured != 0.0))
    tl.store(next_amax + i, tl.zeros_like(measured), mask=weight)

    stepped = i < tl.where(skip != 0, 0, n_tensors)
    row = table + i.to(tl.int64) * _W
    stepped = stepped & (tl.load(row + _GRAD, mask=stepped, other=0) != 0)
    tl.store(steps + i, tl.load(steps + i, mask=stepped, other=0) + 1, mask=stepped)
    group = tl.load(row + _GROUP, mask=stepped, other=0)
    limit = tl.load(hyper + group * _H + _LIMIT, mask=stepped, other=0.0).to(tl.float32)
    tl.store(limits + i, limit, mask=stepped)


def triton_scale_update(
    amax: Tensor,
    history: Tensor,
    position: Tensor,
    scale: Tensor,
    fp8_max: Tensor,
    margin: int,
    power_of_two: bool,
    weight_amax: Tensor,
    next_amax: Tensor,
    counted: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    found_inf: Tensor | None = None,
    clip: Tensor | None = None,
) -> None:
    """All of the above. counted: (table, hyper, steps, limits) of the parameters whose steps count; none at O1."""
    n_slots, n_weights = amax.numel(), weight_amax.numel()
    table, hyper, steps, limits = counted if counted is not None else (position, amax, position, amax)
    n_tensors = table.shape[0] if counted is not None else 0
    n = max(n_slots, n_weights, n_tensors)
    if n == 0:
        return
    depth = history.shape[1]
    launch(
        scale_update_kernel, (-(-n // _BLOCK),), amax, history, position, scale, fp8_max, weight_amax, next_amax,
        table, hyper, steps, limits,
        found_inf if found_inf is not None else amax, clip if clip is not None else amax,
        n_slots, n_weights, n_tensors, 2.0**-margin,
        HISTORY=depth, HISTORY_BLOCK=1 << (depth - 1).bit_length(), POWER_OF_TWO=power_of_two,
        HAS_FOUND_INF=found_inf is not None, HAS_CLIP=clip is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
