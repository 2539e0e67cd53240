"""RMSNorm and the cast of what it makes, for the FP8 layers that read it: `y = x * r * w`, `r = 1 / sqrt(mean(x**2) + eps)` of each row.

    backward  g = dy * w,  n = x * r:   dx = r * (g - n * mean(g * n))     dw = sum of dy * n over rows

(Zhang and Sennrich, "Root Mean Square Layer Normalization".) Two ways of rounding: once, at the end (torch's RMSNorm), or x * r to x's dtype first
(`early`: Llama's of Hugging Face). A row must be summed before its first element can be cast, so a program reads its rows twice, the second time
from the cache. The cast is of y as it was rounded: the codes are those of a cast by itself. Its scale, amax record and mending are those of `kernels/cast.py`.

Bytes an element of bf16: forward 2 in, 2 out, 2 more for FP8 and its transpose (8 for a norm, then a cast); backward 4 in, 2 out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampplug import formats
from ampplug.kernels.cast import OUTGROWN, arrive, cast_tile, is_outgrown, leave, raise_amax, reference_cast, round_up, store_tile
from ampplug.kernels.numerics import rounded, scale_from_amax
from ampplug.kernels.swiglu import Fp8, Target
from ampplug.kernels.triton_runtime import jit, launch, multiprocessors, on_gpu, tl

# Tile, warps and registers forward; fewer rows where the tiles would not fill the GPU. A program takes all columns of its rows.
TILE_M, SMALL_M, TILE_K, WARPS, REGISTERS = 32, 16, 128, 8, 64
MAX_WIDTH = 8192  # backward keeps a row in registers


# ---------------------------------------------------------------- launchers


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, early: bool, out_dtype: torch.dtype,
    target: Target | None = None, transpose: bool = False, power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Fp8 | None]:  # fmt: skip
    """(y [M, K] in out_dtype, r fp32 [M], y in E4M3 or None). x [M, K] contiguous, weight [K]: bf16, fp16 or fp32; K a multiple of 16, not empty.

    target: of the cast, with a scale that is not 0 and scratch, without partial maxima. Without it nothing is cast.
    """
    if not on_gpu(x.device):
        return reference_rms_norm(x, weight, eps, early, out_dtype, target, transpose, power_of_two)
    return triton_rms_norm(x, weight, eps, early, out_dtype, target, transpose, power_of_two)


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, r: Tensor, early: bool, need_x: bool = True, need_weight: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """(dx [M, K] of x's dtype, dw [K] of the weight's); None for what is not needed. dy, x [M, K] contiguous, r fp32 [M], K at most MAX_WIDTH."""
    if not on_gpu(x.device):
        return reference_rms_norm_backward(dy, x, weight, r, early, need_x, need_weight)
    return triton_rms_norm_backward(dy, x, weight, r, early, need_x, need_weight)


# ---------------------------------------------------------------- torch reference


def reference_rms_norm(
    x: Tensor, weight: Tensor, eps: float, early: bool, out_dtype: torch.dtype, target: Target | None, transpose: bool, power_of_two: bool
) -> tuple[Tensor, Tensor, Fp8 | None]:
    """`rms_norm` in plain torch."""
    value = x.float()
    r = torch.rsqrt(value.square().mean(1) + eps)
    normed = value * r[:, None]
    if early:
        normed = normed.to(x.dtype).float()
    y = (normed * weight.float()).to(out_dtype)
    fp8 = None if target is None else reference_cast(y, formats.E4M3, target.scale, None, target.record, True, transpose, power_of_two)
    return y, r, fp8


def reference_rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, r: Tensor, early: bool, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """`rms_norm_backward` in plain torch."""
    normed, g = x.float() * r[:, None], dy.float()
    dx = dw = None
    if need_x:
        gw = g * weight.float()
        dx = (r[:, None] * (gw - normed * (gw * normed).mean(1, keepdim=True))).to(x.dtype)
    if need_weight:
        dw = (g * (normed.to(x.dtype).float() if early else normed)).sum(0).to(weight.dtype)
    return dx, dw


# ---------------------------------------------------------------- Triton


@jit
def rms_norm_kernel(
    x, weight, y, r_out, rows, columns, scale_inv, slot_scale, record, scratch, M, K, column_stride, eps, tiles_m, menders, zero,
    EARLY: tl.constexpr, CAST: tl.constexpr, FP8_MAX: tl.constexpr, OUTGROWN_MAX: tl.constexpr, RECORD: tl.constexpr, COLUMNS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, FP8: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A program takes BM whole rows; mends as `cast_kernel` does, from y."""
    program = tl.program_id(0)
    m = program * BM + tl.arange(0, BM)
    offset = m[:, None].to(tl.int64) * K
    squares = tl.zeros((BM, BK), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        value = tl.load(x + offset + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0).to(tl.float32)
        squares += value * value
    r = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, 1) / K + eps))
    tl.store(r_out + m, r, mask=m < M)
    r = tl.where(m < M, r, 0.0)[:, None]  # rows of padding are zeros, with eps = 0, too
    scale = 1.0
    if CAST:
        scale = tl.load(slot_scale)
    bits = tl.zeros((BM, BK // 8), tl.int32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        inside = (m[:, None] < M) & (k[None, :] < K)
        value = tl.load(x + offset + k[None, :], mask=inside, other=0.0).to(tl.float32) * r
        w = tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        if EARLY:
            value = rounded(value, x.dtype.element_ty).to(tl.float32)
        made = rounded(value * w, y.dtype.element_ty)
        tl.store(y + offset + k[None, :], made, mask=inside)
        if CAST:
            found = store_tile(made.to(tl.float32), scale, rows, columns, m, k, M, K, column_stride, zero, FP8_MAX, True, COLUMNS, FP8, BM, BK)
            bits = tl.maximum(bits, found)
    if CAST:
        raise_amax(scratch, bits)
        mender = arrive(scratch, menders)
        if mender >= 0:
            amax_bits = tl.atomic_max(scratch, 0, sem="acquire")
            amax = amax_bits.to(tl.float32, bitcast=True)
            if is_outgrown(scale, amax, OUTGROWN_MAX):
                scale = scale_from_amax(amax, 1.0, FP8_MAX, POWER_OF_TWO)
                tiles_k = tl.cdiv(K, BK)
                for tile in range(mender, tiles_m * tiles_k, menders):
                    cast_tile(
                        tile // tiles_k, tile % tiles_k, scale, y, rows, columns, M, K, K, 1, K, column_stride, zero,
                        FP8_MAX, True, COLUMNS, FP8, BM, BK,
                    )  # fmt: skip
            if leave(scratch, menders):
                if RECORD:
                    tl.atomic_max(record, amax_bits, sem="relaxed")
                tl.store(scale_inv, tl.div_rn(1.0, scale))


@jit
def rms_norm_backward_kernel(
    dy, x, weight, r_in, dx, partials, M, K, EARLY: tl.constexpr, NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Program p takes rows p, p + P, ..., and writes the sum of its part of dw."""
    program = tl.program_id(0)
    k = tl.arange(0, BK)
    inside = k < K
    w = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BK,), tl.float32)
    at = program.to(tl.int64) * K + k
    for row in range(program, M, tl.num_programs(0)):
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(r_in + row)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * r
        if NEED_X:
            gw = g * w
            mean = tl.sum(gw * normed, 0) / K
            tl.store(dx + at, rounded(r * (gw - normed * mean), dx.dtype.element_ty), mask=inside)
        if NEED_WEIGHT:
            if EARLY:
                normed = rounded(normed, x.dtype.element_ty).to(tl.float32)
            total += g * normed
        at += tl.num_programs(0).to(tl.int64) * K
    if NEED_WEIGHT:
        tl.store(partials + program.to(tl.int64) * K + k, total, mask=inside)


def triton_rms_norm(
    x: Tensor, weight: Tensor, eps: float, early: bool, out_dtype: torch.dtype, target: Target | None, transpose: bool, power_of_two: bool
) -> tuple[Tensor, Tensor, Fp8 | None]:
    """`rms_norm` by Triton."""
    m, k = x.shape
    m16 = round_up(m, 16)
    device, cast = x.device, target is not None
    y = torch.empty(m, k, dtype=out_dtype, device=device)
    r = torch.empty(m, dtype=torch.float32, device=device)
    q = qt = scale_inv = None
    scale = record = scratch = None
    if target is not None:
        scale, _, record, scratch = target
        q, scale_inv = torch.empty(m, k, dtype=formats.E4M3, device=device), torch.empty(1, dtype=torch.float32, device=device)
        qt = torch.empty(k, m16, dtype=formats.E4M3, device=device) if transpose else None
    processors = multiprocessors(device)
    tile_m = TILE_M if m >= 2 * TILE_M * processors else SMALL_M
    tiles_m = -(-m // tile_m)
    menders = min(tiles_m, processors) if device.type == "cuda" else 1  # the interpreter runs one program after the other
    launch(
        rms_norm_kernel, (tiles_m,), x, weight, y, r, *(r if t is None else t for t in (q, qt, scale_inv, scale)),
        r if record is None else record.view(torch.int32), r if scratch is None else scratch, m, k, m16, eps, tiles_m, menders, 0.0,
        EARLY=early, CAST=cast, FP8_MAX=formats.E4M3_MAX, OUTGROWN_MAX=formats.E4M3_MAX * OUTGROWN, RECORD=record is not None, COLUMNS=qt is not None,
        POWER_OF_TWO=power_of_two, FP8=tl.float8e4nv, BM=tile_m, BK=TILE_K, num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    return y, r, None if q is None or scale_inv is None else (q, qt, scale_inv)


def triton_rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, r: Tensor, early: bool, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """`rms_norm_backward` by Triton, and a sum of the partial weight gradients."""
    m, k = x.shape
    block = 1 << (k - 1).bit_length()
    warps = max(1, min(16, block // 512))
    programs = max(1, min(m // 8, 4 * multiprocessors(x.device)))
    dx = torch.empty_like(x) if need_x else None
    partials = torch.empty(programs, k, dtype=torch.float32, device=x.device) if need_weight else None
    launch(
        rms_norm_backward_kernel, (programs,), dy, x, weight, r, x if dx is None else dx, r if partials is None else partials, m, k,
        EARLY=early, NEED_X=need_x, NEED_WEIGHT=need_weight, BK=block, num_warps=warps,
    )  # fmt: skip
    return dx, None if partials is None else partials.sum(0).to(weight.dtype)
