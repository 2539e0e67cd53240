"""W8 of all weights from the weights themselves, in two launches: amax, cast. For O1, and after loads at O2.

`amax = max |w|`, `scale = 448 / amax`, `W8 = cast(w * scale)`. With `keep_scale` a weight whose amax still fits its present scale keeps it:
a checkpoint's FP8 codes come back bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampplug import formats
from ampplug.kernels.numerics import LARGEST, columns_of, load_value, magnitude_bits, saturate, tile_offsets, to_fp8, typed
from ampplug.kernels.tables import CHUNK_COLS, CHUNK_ROWS, COLUMN, WIDTH
from ampplug.kernels.triton_runtime import jit, launch, tl

_W = tl.constexpr(WIDTH)
_PARAM, _LOW, _W8, _W8_STRIDE = (tl.constexpr(COLUMN[c]) for c in ("param", "low", "w8", "w8_stride"))
_ROWS, _COLS, _NUMEL = (tl.constexpr(COLUMN[c]) for c in ("rows", "cols", "numel"))
_KIND, _ALIGNED, _WEIGHT = (tl.constexpr(COLUMN[c]) for c in ("kind", "aligned", "weight"))
TILE_ROWS = 16


def reference_refresh(
    value: Tensor, w8: Tensor, next_amax: Tensor, scale: Tensor, scale_inv: Tensor, keep_scale: bool, power_of_two: bool
) -> None:
    """One weight: value fp32 [rows, cols] (the master where there is one); w8 [rows, cols] view; the rest fp32 [1]."""
    amax = value.abs().amax().reshape(1) if value.numel() else torch.zeros(1, dtype=torch.float32)
    new = formats.scale_from_amax(amax, torch.ones_like(amax), formats.E4M3_MAX, 0, power_of_two)
    if keep_scale:
        new = torch.where((scale > 0) & (amax * scale <= formats.E4M3_MAX), scale, new)
    scale.copy_(new)
    scale_inv.copy_(1.0 / new)
    next_amax.copy_(amax)
    w8.copy_(formats.cast_fp8(value, new, formats.E4M3))


@jit
def _tile(row, first, col0, ALIGNED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    C = columns_of(row + _COLS, ALIGNED)
    start = first.to(tl.int64) * C + col0
    offset = tile_offsets(C, ALIGNED, BR, BC)
    kind = tl.load(row + _KIND)
    address = tl.load(row + _PARAM) + start * tl.where(kind == 0, 4, 2)
    low = tl.load(row + _LOW) + start * 2
    mask = ((first + tl.arange(0, BR))[:, None] < tl.load(row + _ROWS).to(tl.int32)) & ((col0 + tl.arange(0, BC))[None, :] < C)
    if not ALIGNED:  # a weight of one row, seen as rows of 128, may end within one
        mask = mask & (start + offset < tl.load(row + _NUMEL))
    return load_value(address, low, offset, mask, kind, ALIGNED), mask


@jit
def _write(row, first, col0, value, mask, scale, ALIGNED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    q = to_fp8(saturate(value * scale, value, 0.0, 448.0), tl.float8e4nv)
    stride = tl.multiple_of(tl.load(row + _W8_STRIDE).to(tl.int32), 16)
    w8 = typed(tl.load(row + _W8) + first.to(tl.int64) * stride + col0, tl.float8e4nv, ALIGNED)
    tl.store(w8 + tile_offsets(stride, ALIGNED, BR, BC), q, mask=mask)


@jit
def weight_amax_kernel(table, chunks, next_amaxes, n_chunks, CHUNK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """First launch: raises next_amaxes (as bits), which must be zero before."""
    chunk = tl.program_id(0)
    row = table + tl.load(chunks + chunk).to(tl.int64) * _W
    row0 = tl.multiple_of(tl.load(chunks + n_chunks + chunk), 8)
    col0 = tl.multiple_of(tl.load(chunks + 2 * n_chunks + chunk), 128)
    weight = tl.load(row + _WEIGHT)
    aligned = tl.load(row + _ALIGNED) != 0
    largest = tl.zeros((BR,), tl.int32)
    for i in range(0, tl.minimum(CHUNK, tl.load(row + _ROWS).to(tl.int32) - row0), BR):
        first = tl.multiple_of(row0 + i, 8)
        if aligned:
            value, _ = _tile(row, first, col0, True, BR, BC)
            largest = tl.maximum(largest, tl.max(magnitude_bits(value), 1))
        else:
            value, _ = _tile(row, first, col0, False, BR, BC)
            largest = tl.maximum(largest, tl.max(magnitude_bits(value), 1))
    bits = tl.max(largest, 0)
    if bits > tl.load(next_amaxes + weight):
        tl.atomic_max(next_amaxes + weight, bits, sem="relaxed")


@jit
def weight_cast_kernel(
    table, chunks, next_amaxes, old_scales, scales, scale_invs, n_chunks,
    KEEP_SCALE: tl.constexpr, POWER_OF_TWO: tl.constexpr, CHUNK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Second launch. old_scales is a copy where scales are kept: programs of one weight must not read what another has written."""
    chunk = tl.program_id(0)
    row = table + tl.load(chunks + chunk).to(tl.int64) * _W
    row0 = tl.multiple_of(tl.load(chunks + n_chunks + chunk), 8)
    col0 = tl.multiple_of(tl.load(chunks + 2 * n_chunks + chunk), 128)
    weight = tl.load(row + _WEIGHT)
    amax = tl.load(next_amaxes + weight)
    usable = (amax > 0.0) & (amax <= LARGEST)
    scale = tl.minimum(tl.div_rn(448.0, tl.where(usable, amax, 448.0)), 8.507059e37)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    if KEEP_SCALE:
        old = tl.load(old_scales + weight)
        scale = tl.where((old > 0.0) & (amax * old <= 448.0), old, scale)
    if row0 + col0 == 0:
        tl.store(scales + weight, scale)
        tl.store(scale_invs + weight, tl.div_rn(1.0, scale))
    aligned = tl.load(row + _ALIGNED) != 0
    for i in range(0, tl.minimum(CHUNK, tl.load(row + _ROWS).to(tl.int32) - row0), BR):
        first = tl.multiple_of(row0 + i, 8)
        if aligned:
            value, mask = _tile(row, first, col0, True, BR, BC)
            _write(row, first, col0, value, mask, scale, True, BR, BC)
        else:
            value, mask = _tile(row, first, col0, False, BR, BC)
            _write(row, first, col0, value, mask, scale, False, BR, BC)


def triton_refresh(
    table: Tensor, chunks: Tensor, next_amaxes: Tensor, scales: Tensor, scale_invs: Tensor, keep_scale: bool, power_of_two: bool
) -> None:
    """All weights of `table`. next_amaxes, scales, scale_invs: fp32, one a weight of the bank; next_amaxes of these weights must be zero."""
    n = chunks.shape[1]
    if n == 0:
        return
    launch(weight_amax_kernel, (n,), table, chunks, next_amaxes.view(torch.int32), n, CHUNK=CHUNK_ROWS, BR=TILE_ROWS, BC=CHUNK_COLS, num_warps=8)
    launch(
        weight_cast_kernel, (n,), table, chunks, next_amaxes, scales.clone() if keep_scale else scales, scales, scale_invs, n,
        KEEP_SCALE=keep_scale, POWER_OF_TWO=power_of_two, CHUNK=CHUNK_ROWS, BR=TILE_ROWS, BC=CHUNK_COLS, num_warps=8,
    )  # fmt: skip
