"""SwiGLU between FP8 layers, in FP8 at once: `h = silu(a) * b` on the way, its two gradients on the way back.

    forward   h  = a * s * b                          s = 1 / (1 + exp(-a))
    backward  da = dh * b * s * (1 + a * (1 - s))     db = dh * a * s

(Shazeer, "GLU Variants Improve Transformer".) What the activation makes is read by GEMMs only, so it is cast where it is made: one launch, and no
tensor in high precision. Scales, amax records and the mending of outgrown scales are those of `kernels/cast.py`.

The transpose of h, which the last layer's weight gradient reads, can be made by the backward launch: it has a and b at hand, and nothing of h need be
kept between the two.

Bytes an element: forward 4 in, 1 out (12 for an activation, then a cast); backward 6 in, 5 out (18).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ampplug import formats
from ampplug.kernels.cast import (
    MAX_PARTIALS,
    OUTGROWN,
    arrive,
    first_scale,
    grid_of,
    is_outgrown,
    leave,
    raise_amax,
    reference_cast,
    round_up,
    store_tile,
)
from ampplug.kernels.numerics import magnitude_bits, reciprocal, scale_from_amax
from ampplug.kernels.triton_runtime import jit, launch, multiprocessors, on_gpu, tl

# Tile, warps, registers, and the most tiles a program takes.
TILE_M, TILE_K, WARPS, REGISTERS, SPAN = 32, 128, 8, 64, 3

Fp8 = tuple[Tensor | None, Tensor | None, Tensor]  # as `kernels.cast.cast` returns it


class Target(NamedTuple):
    """Where a result's scale comes from and its amax goes: as the arguments of the same names of `kernels.cast.cast`."""

    scale: Tensor | None = None
    partials: Tensor | None = None
    record: Tensor | None = None
    scratch: Tensor | None = None


# ---------------------------------------------------------------- launchers


def partial_amaxes(a: Tensor, b: Tensor, dh: Tensor | None = None) -> tuple[Tensor, ...]:
    """Partial maxima, fp32 [P] each: of |h|, or with dh of |da| and of |db|. a, b, dh: [M, K] contiguous."""
    if not on_gpu(a.device):
        return tuple(value.abs().amax().reshape(1) for value in reference_values(a, b, dh))
    return triton_partial_amaxes(a, b, dh)


def swiglu(a: Tensor, b: Tensor, target: Target, transpose: bool, power_of_two: bool = False) -> Fp8:
    """h in E4M3. a, b: [M, K] contiguous, of one dtype (bf16, fp16, fp32), K a multiple of 16, not empty."""
    if not on_gpu(a.device):
        return _reference(reference_values(a, b, None), (target,), formats.E4M3, True, transpose, power_of_two)[0]
    return triton_swiglu(a, b, None, (target,), formats.E4M3, True, transpose, power_of_two)[0][0]


def swiglu_backward(
    dh: Tensor, a: Tensor, b: Tensor, targets: tuple[Target, Target], rows: bool, transpose: bool, power_of_two: bool = False, h_inv: Tensor | None = None
) -> tuple[Fp8, Fp8, Tensor | None]:
    """(da, db, h transposed): da and db in E5M2; dh, a, b as in `swiglu`. Without `rows` or `transpose` that half of da and db is None.

    h_inv: the inverse scale that `swiglu` returned, fp32 [1]: h transposed [K, M16], in E4M3, is made by it. None: it is not made.
    """
    if on_gpu(a.device):
        (da, db), h8t = triton_swiglu(a, b, dh, targets, formats.E5M2, rows, transpose, power_of_two, h_inv)
        return da, db, h8t
    da, db = _reference(reference_values(a, b, dh), targets, formats.E5M2, rows, transpose, power_of_two)
    return da, db, None if h_inv is None else reference_transposed(a, b, h_inv)


# ---------------------------------------------------------------- torch reference


def reference_values(a: Tensor, b: Tensor, dh: Tensor | None) -> tuple[Tensor, ...]:
    """(h,), or with dh (da, db), in fp32."""
    a, b = a.float(), b.float()
    s = 1.0 / (1.0 + torch.exp(-a))
    if dh is None:
        return (a * s * b,)
    dh = dh.float()
    return dh * b * (s * (1.0 + a * (1.0 - s))), dh * (a * s)


def _reference(
    values: tuple[Tensor, ...], targets: tuple[Target, ...], dtype: torch.dtype, rows: bool, transpose: bool, power_of_two: bool
) -> list[Fp8]:
    return [
        reference_cast(value, dtype, t.scale, t.partials, t.record, rows, transpose, power_of_two) for value, t in zip(values, targets, strict=True)
    ]


def reference_transposed(a: Tensor, b: Tensor, h_inv: Tensor) -> Tensor:
    """h transposed [K, M16] in E4M3, by a given inverse scale."""
    q = formats.cast_fp8(reference_values(a, b, None)[0], 1.0 / h_inv, formats.E4M3).view(torch.uint8)
    return torch.nn.functional.pad(q.t(), (0, -q.shape[0] % 16)).contiguous().view(formats.E4M3)


# ---------------------------------------------------------------- Triton


@jit
def _values(tile_m, tile_k, a, b, dh, M, K, BACKWARD: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """(m, k, h or da, h or db, h) of a tile; zeros beyond the matrix."""
    m = tile_m * BM + tl.arange(0, BM)
    k = tile_k * BK + tl.arange(0, BK)
    inside = (m[:, None] < M) & (k[None, :] < K)
    at = m[:, None].to(tl.int64) * K + k[None, :]
    x = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    s = reciprocal(1.0 + tl.exp(-x))
    if BACKWARD:
        g = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
        first = g * y * (s * (1.0 + x * (1.0 - s)))
        second = g * (x * s)
    else:
        first = x * s * y
        second = first
    return m, k, first, second, x * s * y


@jit
def partial_amaxes_kernel(a, b, dh, first, second, M, K, BACKWARD: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Program p takes tiles p, p + P, ... and writes one maximum of each result, as bits."""
    program = tl.program_id(0)
    tiles_k = tl.cdiv(K, BK)
    tiles = tl.cdiv(M, BM) * tiles_k
    largest = tl.zeros((BM, BK), tl.int32)
    largest_second = tl.zeros((BM, BK), tl.int32)
    for tile in range(program, tiles, tl.num_programs(0)):
        _, _, u, v, _ = _values(tile // tiles_k, tile % tiles_k, a, b, dh, M, K, BACKWARD, BM, BK)
        largest = tl.maximum(largest, magnitude_bits(u))
        if BACKWARD:
            largest_second = tl.maximum(largest_second, magnitude_bits(v))
    tl.store(first + program, tl.max(tl.max(largest, 1), 0))
    if BACKWARD:
        tl.store(second + program, tl.max(tl.max(largest_second, 1), 0))


@jit
def swiglu_kernel(
    a, b, dh, rows, columns, scale_inv, slot_scale, partials, record, scratch,
    rows_2, columns_2, scale_inv_2, slot_scale_2, partials_2, record_2, scratch_2,
    h_columns, h_inv, M, K, column_stride, n_partials, tiles_m, span, menders, zero,
    BACKWARD: tl.constexpr, H_COLUMNS: tl.constexpr, FP8_MAX: tl.constexpr, OUTGROWN_MAX: tl.constexpr, DELAYED: tl.constexpr, JUST_IN_TIME: tl.constexpr,
    RECORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, POWER_OF_TWO: tl.constexpr, FP8: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """As `cast_kernel`, with one or two results; both are mended where one of them must be. With H_COLUMNS, backward makes h transposed, too."""
    program = tl.program_id(0)
    tiles_k = tl.cdiv(K, BK)
    scale = first_scale(
        slot_scale, partials, record, scale_inv, n_partials, FP8_MAX, OUTGROWN_MAX, DELAYED, JUST_IN_TIME, RECORD, POWER_OF_TWO, PARTIALS
    )
    scale_2 = scale
    if BACKWARD:
        scale_2 = first_scale(
            slot_scale_2, partials_2, record_2, scale_inv_2, n_partials, FP8_MAX, OUTGROWN_MAX, DELAYED, JUST_IN_TIME, RECORD, POWER_OF_TWO, PARTIALS
        )
    h_scale = scale
    if H_COLUMNS:
        h_scale = tl.div_rn(1.0, tl.load(h_inv))
    bits = tl.zeros((BM, BK // 8), tl.int32)
    bits_2 = tl.zeros((BM, BK // 8), tl.int32)
    first = (program // tiles_k) * span
    for tile_m in range(first, tl.minimum(first + span, tiles_m)):
        m, k, u, v, h = _values(tile_m, program % tiles_k, a, b, dh, M, K, BACKWARD, BM, BK)
        found = store_tile(u, scale, rows, columns, m, k, M, K, column_stride, zero, FP8_MAX, ROWS, COLUMNS, FP8, BM, BK)
        bits = tl.maximum(bits, found)
        if BACKWARD:
            found = store_tile(v, scale_2, rows_2, columns_2, m, k, M, K, column_stride, zero, FP8_MAX, ROWS, COLUMNS, FP8, BM, BK)
            bits_2 = tl.maximum(bits_2, found)
        if H_COLUMNS:
            store_tile(h, h_scale, h_columns, h_columns, m, k, M, K, column_stride, zero, 448.0, False, True, tl.float8e4nv, BM, BK)
    if not JUST_IN_TIME:
        raise_amax(scratch, bits)
        if BACKWARD:
            raise_amax(scratch_2, bits_2)
        mender = arrive(scratch, menders)
        if mender >= 0:
            amax_bits = tl.atomic_max(scratch, 0, sem="acquire")
            amax = amax_bits.to(tl.float32, bitcast=True)
            outgrown = is_outgrown(scale, amax, OUTGROWN_MAX)
            if outgrown:
                scale = scale_from_amax(amax, 1.0, FP8_MAX, POWER_OF_TWO)
            amax_bits_2 = amax_bits
            if BACKWARD:
                amax_bits_2 = tl.atomic_max(scratch_2, 0, sem="acquire")
                amax_2 = amax_bits_2.to(tl.float32, bitcast=True)
                outgrown_2 = is_outgrown(scale_2, amax_2, OUTGROWN_MAX)
                if outgrown_2:
                    scale_2 = scale_from_amax(amax_2, 1.0, FP8_MAX, POWER_OF_TWO)
                outgrown = outgrown | outgrown_2
            if outgrown:
                for tile in range(mender, tiles_m * tiles_k, menders):
                    m, k, u, v, _ = _values(tile // tiles_k, tile % tiles_k, a, b, dh, M, K, BACKWARD, BM, BK)
                    store_tile(u, scale, rows, columns, m, k, M, K, column_stride, zero, FP8_MAX, ROWS, COLUMNS, FP8, BM, BK)
                    if BACKWARD:
                        store_tile(v, scale_2, rows_2, columns_2, m, k, M, K, column_stride, zero, FP8_MAX, ROWS, COLUMNS, FP8, BM, BK)
            if leave(scratch, menders):
                tl.store(scale_inv, tl.div_rn(1.0, scale))
                if RECORD:
                    tl.atomic_max(record, amax_bits, sem="relaxed")
                if BACKWARD:
                    tl.store(scratch_2, 0)
                    tl.store(scale_inv_2, tl.div_rn(1.0, scale_2))
                    if RECORD:
                        tl.atomic_max(record_2, amax_bits_2, sem="relaxed")


_FP8 = {torch.float8_e4m3fn: "float8e4nv", torch.float8_e5m2: "float8e5"}


def triton_partial_amaxes(a: Tensor, b: Tensor, dh: Tensor | None = None) -> tuple[Tensor, ...]:
    """`partial_amaxes` by Triton."""
    m, k = a.shape
    tiles = -(-m // 32) * -(-k // 128)
    programs = max(1, min(MAX_PARTIALS, tiles, 4 * multiprocessors(a.device)))
    found = [torch.empty(programs, dtype=torch.int32, device=a.device) for _ in range(1 if dh is None else 2)]
    launch(
        partial_amaxes_kernel, (programs,), a, b, a if dh is None else dh, found[0], found[-1], m, k, BACKWARD=dh is not None, BM=32, BK=128, num_warps=8
    )
    return tuple(f.view(torch.float32) for f in found)


def triton_swiglu(
    a: Tensor, b: Tensor, dh: Tensor | None, targets: tuple[Target, ...], dtype: torch.dtype, rows: bool, transpose: bool, power_of_two: bool,
    h_inv: Tensor | None = None,
) -> tuple[list[Fp8], Tensor | None]:  # fmt: skip
    """`swiglu`, or with dh `swiglu_backward`, by Triton."""
    m, k = a.shape
    m16 = round_up(m, 16)
    backward = dh is not None
    h8t = None if h_inv is None else torch.empty(k, m16, dtype=formats.E4M3, device=a.device)
    grid = grid_of(m if h8t is None and not transpose else m16, k, TILE_M, TILE_K, SPAN, a.device)
    results: list[Fp8] = []
    arguments: list[Tensor] = []
    for t in targets:
        scale_inv = torch.empty(1, dtype=torch.float32, device=a.device)
        q = torch.empty(m, k, dtype=dtype, device=a.device) if rows else None
        qt = torch.empty(k, m16, dtype=dtype, device=a.device) if transpose else None
        results.append((q, qt, scale_inv))
        arguments += [
            a if q is None else q, a if qt is None else qt, scale_inv, scale_inv if t.scale is None else t.scale,
            a if t.partials is None else t.partials.view(torch.int32), a if t.record is None else t.record.view(torch.int32),
            a if t.scratch is None else t.scratch,
        ]  # fmt: skip
    if not backward:
        arguments *= 2
    first = targets[0]
    fp8_max = formats.FP8_MAX[dtype]
    launch(
        swiglu_kernel, (grid.programs,), a, b, a if dh is None else dh, *arguments, a if h8t is None else h8t, a if h_inv is None else h_inv, m, k, m16,
        0 if first.partials is None else first.partials.numel(), grid.tiles_m, grid.span, grid.menders, 0.0,
        BACKWARD=backward, H_COLUMNS=h8t is not None,
        FP8_MAX=fp8_max, OUTGROWN_MAX=fp8_max * OUTGROWN, DELAYED=first.scale is not None, JUST_IN_TIME=first.partials is not None,
        RECORD=first.record is not None, ROWS=rows, COLUMNS=transpose, POWER_OF_TWO=power_of_two, FP8=getattr(tl, _FP8[dtype]),
        BM=TILE_M, BK=TILE_K, PARTIALS=MAX_PARTIALS, num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    return results, h8t
