"""Norm of all gradients and the clip coefficient, in one launch.

`norm = sqrt(sum of g * g)`, `coefficient = min(1, max_norm / (norm + 1e-6))` as `torch.nn.utils.clip_grad_norm_`. A norm that is
not finite gives a NaN coefficient, which the step kernel takes as "skip". Sums are taken in a fixed order: the same bits every time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampplug.kernels.numerics import LARGEST, columns_of, load_value, tile_offsets
from ampplug.kernels.tables import BF16, CHUNK_COLS, CHUNK_ROWS, COLUMN, FP32, WIDTH
from ampplug.kernels.triton_runtime import jit, launch, multiprocessors, tl

_W = tl.constexpr(WIDTH)
_GRAD, _ROWS, _COLS, _NUMEL = (tl.constexpr(COLUMN[c]) for c in ("grad", "rows", "cols", "numel"))
_GRAD_KIND, _ALIGNED = (tl.constexpr(COLUMN[c]) for c in ("grad_kind", "aligned"))
_BF16, _FP32 = tl.constexpr(BF16), tl.constexpr(FP32)
MAX_PROGRAMS = 2048

# Rows that a program holds at a time, its warps, and programs per multiprocessor: what benchmarks/kernels.py --sweep found fastest.
TILE_ROWS, WARPS, PROGRAMS = 16, 4, 12


def reference_norm(grads: list[Tensor], max_norm: float, previous: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm, coefficient), fp32 [1] each. `previous`: coefficient already in force for these gradients, fp32 [1]."""
    total = torch.zeros(1, dtype=torch.float32, device=grads[0].device if grads else None)
    for g in grads:
        total += g.float().square().sum()
    norm = total.sqrt() if previous is None else total.sqrt() * previous
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if previous is not None:
        coefficient = coefficient * previous
    return norm, torch.where(torch.isfinite(norm), coefficient, torch.nan)


@jit
def _sum_of_squares(total, row, row0, col0, kind, FULL: tl.constexpr, CHUNK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """total [BR, BC / 8] plus the squares of one chunk. FULL: it lies within the matrix, and its rows start on 16-byte boundaries.

    All of a chunk is asked for before any of it is used: the loop is unrolled.
    """
    C = columns_of(row + _COLS, FULL)
    R = tl.load(row + _ROWS).to(tl.int32)
    grad = tl.load(row + _GRAD)
    offset = tile_offsets(C, FULL, BR, BC)
    for i in tl.static_range(0, CHUNK, BR):
        first = tl.multiple_of(row0 + i, 8)
        start = first.to(tl.int64) * C + col0
        address = grad + start * tl.where(kind == 0, 4, 2)
        mask = None
        if not FULL:
            mask = ((first + tl.arange(0, BR))[:, None] < R) & ((col0 + tl.arange(0, BC))[None, :] < C) & (start + offset < tl.load(row + _NUMEL))
        g = load_value(address, address, offset, mask, kind, FULL)
        total += tl.sum(tl.reshape(g * g, (BR, BC // 8, 8)), 2)
    return total


@jit
def norm_kernel(
    table, chunks, partials, counter, norm, clip, max_norm, n_chunks,
    HAS_PREVIOUS: tl.constexpr, PROGRAMS: tl.constexpr, CHUNK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Program p sums chunks p, p + P, ...; the last one to finish adds the partial sums up and resets the counter."""
    total = tl.zeros((BR, BC // 8), tl.float32)
    for chunk in range(tl.program_id(0), n_chunks, tl.num_programs(0)):
        row = table + tl.load(chunks + chunk).to(tl.int64) * _W
        row0 = tl.multiple_of(tl.load(chunks + n_chunks + chunk), 8)
        col0 = tl.multiple_of(tl.load(chunks + 2 * n_chunks + chunk), 128)
        if tl.load(row + _GRAD) != 0:
            kind = tl.load(row + _GRAD_KIND)
            full = (tl.load(row + _ALIGNED) != 0) & (tl.load(row + _COLS) - col0 >= BC) & (tl.load(row + _ROWS) - row0 >= CHUNK)
            case = tl.where(full, kind, -1)
            if case == _BF16:
                total = _sum_of_squares(total, row, row0, col0, _BF16, True, CHUNK, BR, BC)
            elif case == _FP32:
                total = _sum_of_squares(total, row, row0, col0, _FP32, True, CHUNK, BR, BC)
            else:
                total = _sum_of_squares(total, row, row0, col0, kind, False, CHUNK, BR, BC)
    tl.store(partials + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))
    tl.debug_barrier()
    done = tl.atomic_add(counter, 1)
    if done == tl.num_programs(0) - 1:
        p = tl.arange(0, PROGRAMS)
        # .cg: the partial sums of other multiprocessors, from L2
        parts = tl.load(partials + p, mask=p < tl.num_programs(0), other=0.0, cache_modifier=".cg")
        previous = 1.0
        if HAS_PREVIOUS:
            previous = tl.load(clip)
        result = tl.sqrt_rn(tl.sum(parts, 0)) * previous
        coefficient = tl.minimum(tl.div_rn(max_norm, result + 1e-6), 1.0) * previous
        tl.store(norm, result)
        tl.store(clip, tl.where(result <= LARGEST, coefficient, float("nan")))
        tl.store(counter, 0)


def triton_norm(
    table: Tensor, chunks: Tensor, partials: Tensor, counter: Tensor, norm: Tensor, clip: Tensor, max_norm: float, has_previous: bool = False
) -> None:
    """Writes norm and clip, fp32 [1] each; with `has_previous`, clip holds a coefficient in force. partials: fp32 [MAX_PROGRAMS]; counter:
    int32 [1], zero before and after."""
    n = chunks.shape[1]
    programs = max(1, min(MAX_PROGRAMS, n, PROGRAMS * multiprocessors(table.device)))
    launch(
        norm_kernel, (programs,), table, chunks, partials, counter, norm, clip, float(max_norm), n,
        HAS_PREVIOUS=has_previous, PROGRAMS=MAX_PROGRAMS, CHUNK=CHUNK_ROWS, BR=TILE_ROWS, BC=CHUNK_COLS, num_warps=WARPS,
    )  # fmt: skip
