"""Cast to FP8, with or without the transpose and the amax: `q = saturate(x * scale)`.

The scale comes from one of two places. Delayed: the slot's scale, from past steps; one launch, which also finds the amax. Just in time: the tensor's
own amax; a launch for partial maxima, and the cast, which reduces them itself. A slot that never had a scale update holds scale 0; a cast
that is given partial maxima, too, then scales just in time: decided on the device, so it does not depend on what the host knows yet.

A delayed scale never clips: where the tensor outgrew it (a range that jumped), the last programs to finish cast the tensor again with its own
amax, in the same launch. One program alone was tried: 2 ms for 12 M elements, and with a scale that leaves no headroom one cast in 17 is outgrown.

Bytes: one read of x, one write of q and one of its transpose: 4 per bf16 element.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampplug import formats
from ampplug.kernels.numerics import LARGEST, magnitude_bits, saturate, scale_from_amax, to_fp8
from ampplug.kernels.triton_runtime import jit, launch, multiprocessors, on_gpu, tl

MAX_PARTIALS = 1024

# Tile of the cast, its warps, its registers, and the most tiles a program takes: what benchmarks/kernels.py --sweep found fastest.
TILE_M, TILE_K, WARPS, REGISTERS, SPAN = 64, 128, 8, 64, 3

# A product this far above the largest FP8 value still rounds to it, so it does not count as outgrown.
OUTGROWN = 1.03


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below n."""
    return -(-n // multiple) * multiple


# ---------------------------------------------------------------- launchers


def partial_amax(x: Tensor) -> Tensor:
    """Partial maxima of |x| over a matrix x [M, K] of any strides: fp32 [P]. Their maximum is the amax; NaN and Inf in x show there."""
    if not on_gpu(x.device):
        return reference_amax(x)
    return triton_partial_amax(x)


def cast(
    x: Tensor,
    dtype: torch.dtype,
    *,
    scale: Tensor | None = None,
    partials: Tensor | None = None,
    record: Tensor | None = None,
    scratch: Tensor | None = None,
    rows: bool = True,
    transpose: bool = False,
    power_of_two: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Cast x [M, K] (bf16, fp16 or fp32, any strides, not empty) to FP8.

    scale: fp32 [1], the slot's scale; 0 means "none yet" and needs `partials`. partials: fp32 [P] from `partial_amax`; without `scale` they
    decide alone. record: fp32 [1], raised to the amax of x if given. scratch: int32 [3], zeros before and after, the slot's own; needed with
    `scale`. Returns (q [M, K16], q transposed [K16, M16], inverse of the scale used [1]); K16 and M16 are K and M rounded up to a multiple of 16,
    the rest is zeros, as FP8 GEMMs want it. The first is None without `rows`, the second without `transpose`.
    """
    if not on_gpu(x.device):
        return reference_cast(x, dtype, scale, partials, record, rows, transpose, power_of_two)
    return triton_cast(x, dtype, scale, partials, record, scratch, rows, transpose, power_of_two)


# ---------------------------------------------------------------- torch reference


def reference_amax(x: Tensor) -> Tensor:
    """`partial_amax` in plain torch; NaN counts as the largest value of all."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float().reshape(1)


def reference_cast(
    x: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    partials: Tensor | None,
    record: Tensor | None,
    rows: bool,
    transpose: bool,
    power_of_two: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`cast` in plain torch."""
    m, k = x.shape
    amax = partials.amax().reshape(1) if partials is not None else reference_amax(x)
    fp8_max = formats.FP8_MAX[dtype]
    # one tensor's own amax; an unusable one (zero, Inf, NaN) scales by one
    own = formats.scale_from_amax(amax, torch.ones_like(amax), fp8_max, 0, power_of_two)
    if scale is None:
        scale = own
    else:
        outgrown = (scale * amax > fp8_max * OUTGROWN) & torch.isfinite(amax)
        scale = torch.where((scale == 0) | outgrown, own, scale)
    if record is not None:
        record.copy_(torch.maximum(record, amax))
    m16, k16 = round_up(m, 16), round_up(k, 16)
    q = formats.cast_fp8(x, scale, dtype).view(torch.uint8)
    rowwise = columnwise = None
    if rows:
        rowwise = (q if k16 == k else torch.nn.functional.pad(q, (0, k16 - k))).contiguous().view(dtype)
    if transpose:
        columnwise = torch.nn.functional.pad(q.t(), (0, m16 - m, 0, k16 - k)).contiguous().view(dtype)
    return rowwise, columnwise, 1.0 / scale


# ---------------------------------------------------------------- Triton


@jit
def partial_amax_kernel(x, partials, M, K, stride_m, stride_k, BM: tl.constexpr, BK: tl.constexpr):
    """Program p takes tiles p, p + P, ... and writes one maximum, as bits."""
    program = tl.program_id(0)
    tiles_k = tl.cdiv(K, BK)
    tiles = tl.cdiv(M, BM) * tiles_k
    largest = tl.zeros((BM, BK), tl.int32)
    for tile in range(program, tiles, tl.num_programs(0)):
        m = (tile // tiles_k) * BM + tl.arange(0, BM)
        k = (tile % tiles_k) * BK + tl.arange(0, BK)
        offset = m[:, None].to(tl.int64) * stride_m + k[None, :].to(tl.int64) * stride_k
        value = tl.load(x + offset, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude_bits(value))
    tl.store(partials + program, tl.max(tl.max(largest, 1), 0))


@jit
def store_tile(
    value, scale, rows, columns, m, k, M, row_stride, column_stride, zero,
    FP8_MAX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FP8: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Cast one tile (fp32) and store it both ways, up to the padded edges: the padding's zeros come from here, too.

    Returns maxima over eight neighbours each of |value|, as bits.

    zero: 0.0, as an argument so that the compiler does not know it. The assembler (ptxas 12.9) corrupts FP8 codes that are stored both
    packed and through shared memory (triton-lang/triton issue 11111); two casts of values that it cannot prove equal keep them apart.
    """
    y = value * scale
    if ROWS:
        edge = (m[:, None] < M) & (k[None, :] < row_stride)
        tl.store(rows + m[:, None].to(tl.int64) * row_stride + k[None, :], to_fp8(saturate(y, value, 0.0, FP8_MAX), FP8), mask=edge)
    if COLUMNS:
        edge = (k[:, None] < row_stride) & (m[None, :] < column_stride)
        q = to_fp8(saturate(y, value, zero, FP8_MAX), FP8)
        tl.store(columns + k[:, None].to(tl.int64) * column_stride + m[None, :], tl.trans(q), mask=edge)
    # a thread holds eight neighbours: their maximum, for an eighth of the registers
    return tl.max(tl.reshape(magnitude_bits(value), (BM, BK // 8, 8)), 2)


@jit
def is_outgrown(scale, amax, OUTGROWN_MAX: tl.constexpr):
    """Whether values up to amax are clipped by this scale; an amax that is not finite says nothing."""
    return (scale * amax > OUTGROWN_MAX) & (amax <= LARGEST)


@jit
def first_scale(
    slot_scale, partials, record, scale_inv, n_partials,
    FP8_MAX: tl.constexpr, OUTGROWN_MAX: tl.constexpr, DELAYED: tl.constexpr, JUST_IN_TIME: tl.constexpr, RECORD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """The scale to begin with; with partial maxima it is final, and what depends on it is written."""
    scale = 0.0
    if DELAYED:
        scale = tl.load(slot_scale)
    if JUST_IN_TIME:
        p = tl.arange(0, PARTIALS)
        bits = tl.max(tl.load(partials + p, mask=p < n_partials, other=0), 0)
        amax = bits.to(tl.float32, bitcast=True)
        own = scale_from_amax(amax, 1.0, FP8_MAX, POWER_OF_TWO)
        scale = tl.where((scale == 0.0) | is_outgrown(scale, amax, OUTGROWN_MAX), own, scale)
        if tl.program_id(0) == 0:
            tl.store(scale_inv, tl.div_rn(1.0, scale))
            if RECORD:
                tl.atomic_max(record, bits, sem="relaxed")
    return scale


@jit
def raise_amax(scratch, bits):
    """Raise the amax of this call to the largest of bits [BM, BK / 8]."""
    largest = tl.max(tl.max(bits, 1), 0)
    # most programs are below the maximum so far: a plain read spares the atomic
    if largest > tl.load(scratch):
        tl.atomic_max(scratch, largest, sem="relaxed")


@jit
def arrive(scratch, menders):
    """This program has cast its tiles. Returns its number among the last `menders` to arrive, after all have arrived; below 0 for the others.

    scratch: [amax of this call, programs arrived, menders done]. Nobody waits for a program that cannot start: fewer wait than fit on the GPU at
    once.
    """
    tl.debug_barrier()
    # released only: acquiring would empty the L1 of every multiprocessor for every program
    programs = tl.num_programs(0)
    mender = tl.atomic_add(scratch + 1, 1, sem="release") - (programs - menders)
    if mender >= 0:
        while tl.atomic_add(scratch + 1, 0, sem="acquire") < programs:
            pass
    return mender


@jit
def leave(scratch, menders):
    """Whether this is the last mender to be done. It leaves scratch as it was found."""
    last = tl.atomic_add(scratch + 2, 1, sem="acq_rel") == menders - 1
    if last:
        tl.store(scratch, 0)
        tl.store(scratch + 1, 0)
        tl.store(scratch + 2, 0)
    return last


@jit
def cast_tile(
    tile_m, tile_k, scale, x, rows, columns, M, K, stride_m, stride_k, row_stride, column_stride, zero,
    FP8_MAX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FP8: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tile_m * BM + tl.arange(0, BM)
    k = tile_k * BK + tl.arange(0, BK)
    inside = (m[:, None] < M) & (k[None, :] < K)
    value = tl.load(x + m[:, None].to(tl.int64) * stride_m + k[None, :].to(tl.int64) * stride_k, mask=inside, other=0.0).to(tl.float32)
    return store_tile(value, scale, rows, columns, m, k, M, row_stride, column_stride, zero, FP8_MAX, ROWS, COLUMNS, FP8, BM, BK)


@jit
def cast_kernel(
    x, rows, columns, scale_inv, slot_scale, partials, record, scratch, M, K, stride_m, stride_k, row_stride, column_stride, n_partials,
    tiles_m, span, menders, zero,
    FP8_MAX: tl.constexpr, OUTGROWN_MAX: tl.constexpr, DELAYED: tl.constexpr, JUST_IN_TIME: tl.constexpr, RECORD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, POWER_OF_TWO: tl.constexpr, FP8: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    PARTIALS: tl.constexpr,
):  # fmt: skip
    """A program casts `span` tiles, one below the other.

    Mending an outgrown scale: the `menders` programs that finish casting last wait until all have, which is when the amax is known, and where
    it is too large cast the whole tensor again between them.
    """
    program = tl.program_id(0)
    tiles_k = tl.cdiv(row_stride, BK)
    scale = first_scale(
        slot_scale, partials, record, scale_inv, n_partials, FP8_MAX, OUTGROWN_MAX, DELAYED, JUST_IN_TIME, RECORD, POWER_OF_TWO, PARTIALS
    )
    bits = tl.zeros((BM, BK // 8), tl.int32)
    first = (program // tiles_k) * span
    for tile_m in range(first, tl.minimum(first + span, tiles_m)):
        found = cast_tile(
            tile_m, program % tiles_k, scale, x, rows, columns, M, K, stride_m, stride_k, row_stride, column_stride, zero,
            FP8_MAX, ROWS, COLUMNS, FP8, BM, BK,
        )  # fmt: skip
        bits = tl.maximum(bits, found)
    if not JUST_IN_TIME:
        raise_amax(scratch, bits)
        mender = arrive(scratch, menders)
        if mender >= 0:
            amax_bits = tl.atomic_max(scratch, 0, sem="acquire")
            amax = amax_bits.to(tl.float32, bitcast=True)
            if is_outgrown(scale, amax, OUTGROWN_MAX):
                scale = scale_from_amax(amax, 1.0, FP8_MAX, POWER_OF_TWO)
                for tile in range(mender, tiles_m * tiles_k, menders):
                    cast_tile(
                        tile // tiles_k, tile % tiles_k, scale, x, rows, columns, M, K, stride_m, stride_k, row_stride, column_stride, zero,
                        FP8_MAX, ROWS, COLUMNS, FP8, BM, BK,
                    )  # fmt: skip
            if leave(scratch, menders):
                if RECORD:
                    tl.atomic_max(record, amax_bits, sem="relaxed")
                tl.store(scale_inv, tl.div_rn(1.0, scale))


def triton_partial_amax(x: Tensor) -> Tensor:
    """`partial_amax` by Triton."""
    m, k = x.shape
    tiles = -(-m // 32) * -(-k // 128)
    programs = max(1, min(MAX_PARTIALS, tiles, 4 * multiprocessors(x.device)))
    partials = torch.empty(programs, dtype=torch.int32, device=x.device)
    launch(partial_amax_kernel, (programs,), x, partials, m, k, x.stride(0), x.stride(1), BM=32, BK=128)
    return partials.view(torch.float32)


_FP8 = {torch.float8_e4m3fn: "float8e4nv", torch.float8_e5m2: "float8e5"}


class Grid(NamedTuple):
    """How a matrix [M, K] is cut up: tiles above each other, tiles a program takes, programs, and those of them that wait to mend."""

    tiles_m: int
    span: int
    programs: int
    menders: int


def grid_of(m: int, k: int, tile_m: int, tile_k: int, longest: int, device: torch.device) -> Grid:
    """Several tiles a program, up to `longest`, once there are enough to fill the GPU."""
    tiles_m, tiles_k = -(-m // tile_m), -(-k // tile_k)
    processors = multiprocessors(device)
    span = min(longest, max(1, tiles_m * tiles_k // (8 * processors)))
    programs = -(-tiles_m // span) * tiles_k
    # the interpreter runs one program after the other: none may wait for others
    return Grid(tiles_m, span, programs, min(programs, processors) if device.type == "cuda" else 1)


def triton_cast(
    x: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    partials: Tensor | None,
    record: Tensor | None,
    scratch: Tensor | None,
    rows: bool,
    transpose: bool,
    power_of_two: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`cast` by Triton."""
    m, k = x.shape
    m16, k16 = round_up(m, 16), round_up(k, 16)
    scale_inv = torch.empty(1, dtype=torch.float32, device=x.device)
    rowwise = torch.empty(m, k16, dtype=dtype, device=x.device) if rows else None
    columnwise = torch.empty(k16, m16, dtype=dtype, device=x.device) if transpose else None
    launch_cast(x, dtype, rowwise, columnwise, scale_inv, scale, partials, record, scratch, power_of_two)
    return rowwise, columnwise, scale_inv


def launch_cast(
    x: Tensor,
    dtype: torch.dtype,
    rows: Tensor | None,
    columns: Tensor | None,
    scale_inv: Tensor,
    scale: Tensor | None,
    partials: Tensor | None,
    record: Tensor | None,
    scratch: Tensor | None,
    power_of_two: bool,
) -> Any:
    """`triton_cast` into given results, those of `cast`. Returns what Triton compiled."""
    m, k = x.shape
    m16, k16 = round_up(m, 16), round_up(k, 16)
    grid = grid_of(m16 if columns is not None else m, k16, TILE_M, TILE_K, SPAN, x.device)
    fp8_max = formats.FP8_MAX[dtype]
    return launch(
        cast_kernel, (grid.programs,), x,
        x if rows is None else rows, x if columns is None else columns, scale_inv,
        scale if scale is not None else scale_inv,
        partials.view(torch.int32) if partials is not None else x,
        record.view(torch.int32) if record is not None else x,
        scratch if scratch is not None else x,
        m, k, x.stride(0), x.stride(1), k16, m16, partials.numel() if partials is not None else 0, grid.tiles_m, grid.span, grid.menders, 0.0,
        FP8_MAX=fp8_max, OUTGROWN_MAX=fp8_max * OUTGROWN, DELAYED=scale is not None, JUST_IN_TIME=partials is not None,
        RECORD=record is not None, ROWS=rows is not None, COLUMNS=columns is not None, POWER_OF_TWO=power_of_two, FP8=getattr(tl, _FP8[dtype]),
        BM=TILE_M, BK=TILE_K, PARTIALS=MAX_PARTIALS, num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
