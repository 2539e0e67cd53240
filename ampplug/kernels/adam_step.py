"""One Adam or AdamW step of a whole model, in one launch: moments, master weights, W8, weight amaxes.

For every element, with g the gradient (times clip coefficient, over loss scale, negated to maximize), in fp32:

    g  += weight_decay * p                        (Adam)          p *= 1 - lr * weight_decay            (AdamW)
    m   = beta1 * m + (1 - beta1) * g             v  = beta2 * v + (1 - beta2) * g * g
    p  -= lr * clamp((m / c1) / (sqrt(v / c2) + eps), +-bound)        c1 = 1 - beta1**t, c2 = 1 - beta2**t

(Kingma and Ba, "Adam"; Loshchilov and Hutter, "Decoupled Weight Decay Regularization".) The clamp never acts on exact moments
where beta1**2 < beta2 (`formats.step_bound`); it makes `amax' <= amax + lr * bound` a theorem, so the scale of W8 is known before the pass,
and it keeps a rounded v from hurling a weight. m is stored as a code of m / sqrt(v) with the v that was just stored.

Bytes per element of a split weight with bf16 gradient and W8: 2 g + 4 p + 4 remainder + 2 + 2 moments + 1 W8 = 15. W8T is made by a second
launch (`kernels/transpose.py`). Written from here it cost more time than that launch: tile by tile, as stores of 8 bytes; and at the end of a
chunk of 128 x 128, read again from the L2 cache (5.9 ms against 4.7 for 1.04 B elements), since such chunks read and write in pieces of 128 and 256 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ampplug import formats
from ampplug.kernels.numerics import (
    LARGEST,
    columns_of,
    decode_ratio,
    decode_v,
    encode_ratio,
    encode_v,
    load,
    load_value,
    magnitude_bits,
    mix,
    mix_low,
    reciprocal,
    reciprocal_root,
    split_master,
    square_root,
    tile_offsets,
    to_fp8,
    typed,
)
from ampplug.kernels.tables import BF16, CHUNK_COLS, CHUNK_ROWS, COLUMN, FP32, HYPER, HYPER_WIDTH, SPLIT, WIDTH
from ampplug.kernels.triton_runtime import jit, launch, tl

_W = tl.constexpr(WIDTH)
_H = tl.constexpr(HYPER_WIDTH)
_GRAD, _PARAM, _LOW = (tl.constexpr(COLUMN[c]) for c in ("grad", "param", "low"))
_RATIO, _V, _TOP, _W8 = (tl.constexpr(COLUMN[c]) for c in ("ratio", "v", "top", "w8"))
_ROWS, _COLS, _NUMEL, _W8_STRIDE = (tl.constexpr(COLUMN[c]) for c in ("rows", "cols", "numel", "w8_stride"))
_KIND, _GRAD_KIND, _ALIGNED = (tl.constexpr(COLUMN[c]) for c in ("kind", "grad_kind", "aligned"))
_GROUP, _WEIGHT, _ORDINAL, _FIRST = (tl.constexpr(COLUMN[c]) for c in ("group", "weight", "ordinal", "first"))
_LR, _LOG_BETA1, _LOG_BETA2 = (tl.constexpr(HYPER.index(h)) for h in ("lr", "log_beta1", "log_beta2"))
_EPS, _WEIGHT_DECAY, _BOUND = (tl.constexpr(HYPER.index(h)) for h in ("eps", "weight_decay", "bound"))
_LIMIT, _DECOUPLED, _MAXIMIZE = (tl.constexpr(HYPER.index(h)) for h in ("ratio_limit", "decoupled", "maximize"))
_BETA1, _BETA2 = (tl.constexpr(HYPER.index(h)) for h in ("beta1", "beta2"))
_SPLIT, _BF16, _FP32 = tl.constexpr(SPLIT), tl.constexpr(BF16), tl.constexpr(FP32)

# Rows that a program holds at a time, and its warps: what benchmarks/kernels.py --sweep found fastest.
TILE_ROWS, WARPS = 2, 1
MAX_REGISTERS: int | None = 80

# The predicted amax is rounded up so that fp32 rounding of the step cannot pass it.
_SLACK = 1.0 + 2.0**-20


# ---------------------------------------------------------------- torch reference (and CPU path)


@dataclass
class AdamTensor:
    """One parameter with its state, for the reference. Codes have the parameter's shape [rows, cols]; tops [rows, ceil(cols / 128)]."""

    param: Tensor  # [rows, cols], fp32 or bf16; updated in place
    grad: Tensor  # [rows, cols]
    low: Tensor | None  # int16 remainder; None where the parameter is its own fp32 master
    ratio: Tensor
    v: Tensor
    top: Tensor
    step: Tensor  # int32 [1]: steps taken before this one
    ratio_limit: Tensor  # fp32 [1]: limit that the stored ratio codes were made with
    ordinal: int
    w8: Tensor | None = None  # [rows, cols] view
    amax: Tensor | None = None  # fp32 [1]: true amax of the weight before this step
    next_amax: Tensor | None = None  # fp32 [1], raised to the amax after it
    scale: Tensor | None = None  # fp32 [1], written
    scale_inv: Tensor | None = None
    first: int = 0  # index in its parameter of the first element, where `param` is a part of one


def predicted_scale(amax: Tensor, lr: float, weight_decay: float, decoupled: bool, bound: float, power_of_two: bool) -> Tensor:
    """Scale of W8 after a step, from the amax before it: the bound on the amax after it maps to 448."""
    growth = max(1.0, abs(1.0 - lr * weight_decay)) if decoupled else 1.0
    amax = torch.where(torch.isfinite(amax), amax, 0.0)
    reach = (amax.double() * growth + lr * bound) * _SLACK
    return formats.scale_from_amax(reach.float(), torch.ones_like(amax), formats.E4M3_MAX, 0, power_of_two)


def reference_adam_step(t: AdamTensor, hyper: Tensor, gradient_factor: Tensor | None, seed: int, power_of_two: bool = False) -> None:
    """The step of one tensor in plain torch. hyper: fp64 row of `tables.HYPER`; gradient_factor: fp32 scalar tensor or None."""
    h = dict(zip(HYPER, hyper.tolist(), strict=True))
    rows, cols = t.param.shape
    if rows * cols == 0:
        return
    lr, beta1, beta2, wd = h["lr"], h["beta1"], h["beta2"], h["weight_decay"]
    count = float(t.step) + 1.0
    c1 = 1.0 - beta1**count
    c2 = 1.0 - beta2**count

    def grouped(x: Tensor) -> Tensor:
        """[rows, cols] -> [rows, groups, 128], zeros beyond the last column."""
        x = torch.nn.functional.pad(x, (0, -cols % formats.GROUP))
        return x.view(rows, -1, formats.GROUP)

    def flat(x: Tensor) -> Tensor:
        return x.view(rows, -1)[:, :cols]

    g = t.grad.float()
    if gradient_factor is not None:
        g = g * gradient_factor
    if h["maximize"]:
        g = -g
    p = t.param if t.low is None else formats.join_master(t.param, t.low)
    if h["decoupled"]:
        p = p * (1.0 - lr * wd)
    elif wd:
        g = g + wd * p
    m_old = grouped(t.ratio)
    v_old = formats.decode_v(grouped(t.v), t.top)
    m_old = formats.decode_ratio(m_old, t.ratio_limit) * v_old.sqrt()
    g = grouped(g)
    m = beta1 * m_old + (1.0 - beta1) * g
    v = beta2 * v_old + (1.0 - beta2) * (g * g)
    update = (m * (1.0 / c1)) / (v.sqrt() * (1.0 / c2**0.5) + h["eps"]).clamp(min=formats.SMALLEST_NORMAL)
    p = p - lr * flat(update).clamp(-h["bound"], h["bound"])

    index = torch.arange(0, rows * cols, cols, device=p.device).view(rows, 1, 1) + torch.arange(v[0].numel(), device=p.device).view(v[0].shape)
    random = formats.rounding_bits(seed, t.step[0], t.ordinal, index + t.first)
    v_code, top = formats.encode_v(v, random)
    v_stored = formats.decode_v(v_code, top)
    ratio = m * v_stored.clamp(min=formats.SMALLEST_NORMAL).rsqrt()
    ratio_code = formats.encode_ratio(ratio, h["ratio_limit"], random)
    t.ratio.copy_(flat(ratio_code))
    t.v.copy_(flat(v_code))
    t.top.copy_(top)
    if t.low is None:
        t.param.copy_(p)
    else:
        high, low = formats.split_master(p)
        t.param.copy_(high)
        t.low.copy_(low)
    if t.w8 is not None:
        assert t.amax is not None and t.next_amax is not None
        assert t.scale is not None and t.scale_inv is not None
        t.scale.copy_(predicted_scale(t.amax, lr, wd, bool(h["decoupled"]), h["bound"], power_of_two))
        t.scale_inv.copy_(1.0 / t.scale)
        t.w8.copy_(formats.cast_fp8(p, t.scale, formats.E4M3))
        t.next_amax.copy_(torch.maximum(t.next_amax, p.abs().amax()))


# ---------------------------------------------------------------- Triton


@jit
def skipped(found_inf, clip, HAS_FOUND_INF: tl.constexpr, HAS_CLIP: tl.constexpr):
    """1 where this step must change nothing: GradScaler found Inf or NaN, or the gradients' norm is not finite (clip is NaN)."""
    skip = tl.full((), 0, tl.int32)
    if HAS_FOUND_INF:
        skip = tl.where(tl.load(found_inf) != 0.0, 1, skip)
    if HAS_CLIP:
        c = tl.load(clip)
        skip = tl.where(c != c, 1, skip)
    return skip


@jit
def _step_chunk(
    row, hyper, tensor, row0, col0, factor, steps, limits, amaxes, next_amaxes, scales, scale_invs, seed, kind, grad_kind,
    POWER_OF_TWO: tl.constexpr, FULL: tl.constexpr, CHUNK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor, tile by tile. FULL: every tile lies within the matrix, and its rows start on 16-byte boundaries.

    kind and grad_kind are constants in the usual cases.
    """
    R = tl.load(row + _ROWS).to(tl.int32)
    C = columns_of(row + _COLS, FULL)
    h = hyper + tl.load(row + _GROUP) * _H
    lr = tl.load(h + _LR)
    count = (tl.load(steps + tensor) + 1).to(tl.float64)
    c1 = 1.0 - tl.exp(count * tl.load(h + _LOG_BETA1))
    c2 = 1.0 - tl.exp(count * tl.load(h + _LOG_BETA2))
    weight_decay = tl.load(h + _WEIGHT_DECAY)
    decoupled = tl.load(h + _DECOUPLED) != 0.0
    bound = tl.load(h + _BOUND)
    if tl.load(h + _MAXIMIZE) != 0.0:
        factor = -factor
    keep = tl.where(decoupled, 1.0 - lr * weight_decay, 1.0).to(tl.float32)
    l2 = tl.where(decoupled, 0.0, weight_decay).to(tl.float32)
    beta1 = tl.load(h + _BETA1).to(tl.float32)
    beta2 = tl.load(h + _BETA2).to(tl.float32)
    one_minus_beta1 = (1.0 - tl.load(h + _BETA1)).to(tl.float32)
    one_minus_beta2 = (1.0 - tl.load(h + _BETA2)).to(tl.float32)
    m_factor = (lr / c1).to(tl.float32)
    v_factor = (1.0 / tl.sqrt(c2)).to(tl.float32)
    eps = tl.maximum(tl.load(h + _EPS).to(tl.float32), 1.1754944e-38)  # where it is 0, 0 / 0 shall be 0
    limit_old = tl.load(limits + tensor)
    limit_new = tl.load(h + _LIMIT).to(tl.float32)

    param = tl.load(row + _PARAM)
    low = tl.load(row + _LOW)
    grad = tl.load(row + _GRAD)
    ratio_codes = tl.load(row + _RATIO)
    v_codes = tl.load(row + _V)
    tops = typed(tl.load(row + _TOP), tl.uint8, False)
    numel = tl.load(row + _NUMEL)
    ordinal = tl.load(row + _ORDINAL)
    first_index = tl.load(row + _FIRST)
    # rounding bits: `formats.rounding_bits`
    key = mix(tl.full((), seed, tl.int32).to(tl.uint32) ^ tl.load(steps + tensor).to(tl.uint32)) + 0x9E3779B9
    key = mix(key ^ ordinal.to(tl.uint32)) + 0x9E3779B9

    w8 = tl.load(row + _W8)
    w8_stride = tl.multiple_of(tl.load(row + _W8_STRIDE).to(tl.int32), 16)
    has_fp8 = w8 != 0
    weight = tl.load(row + _WEIGHT)
    scale = 1.0
    if has_fp8:
        growth = tl.where(decoupled, tl.maximum(tl.abs(1.0 - lr * weight_decay), 1.0), 1.0)
        amax = tl.load(amaxes + weight)
        amax = tl.where(amax <= LARGEST, amax, 0.0)
        reach = ((amax.to(tl.float64) * growth + lr * bound) * (1.0 + 1.0 / 1048576)).to(tl.float32)
        scale = tl.minimum(tl.div_rn(448.0, tl.where(reach > 0.0, reach, 448.0)), 8.507059e37)
        if POWER_OF_TWO:
            scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        if row0 + col0 == 0:
            tl.store(scales + weight, scale)
            tl.store(scale_invs + weight, tl.div_rn(1.0, scale))

    reach32 = tl.abs(lr * bound).to(tl.float32)
    from_code = limit_old * beta1 * (1 / 247.0)
    to_code = 247.0 / limit_new
    r = tl.arange(0, BR)
    c = tl.arange(0, BC)
    offset = tile_offsets(C, FULL, BR, BC)
    groups = tl.cdiv(C, BC)
    largest = tl.zeros((BR, BC // 8), tl.int32)
    for i in range(0, tl.minimum(CHUNK, R - row0), BR):
        first = tl.multiple_of(row0 + i, 8)
        start = first.to(tl.int64) * C + col0
        mask = None
        group_mask = None
        if not FULL:  # a vector seen as rows of 128 may end within a row
            mask = ((first + r)[:, None] < R) & ((col0 + c)[None, :] < C) & (start + offset < numel)
            group_mask = (first + r) < R
        group = (first + r).to(tl.int64) * groups + col0 // BC
        # 2 or 4 bytes an element
        param_at = param + start * tl.where(kind == 0, 4, 2)
        low_at = low + start * 2
        grad_at = grad + start * tl.where(grad_kind == 0, 4, 2)
        ratio_at = typed(ratio_codes + start, tl.uint8, FULL) + offset
        v_at = typed(v_codes + start, tl.uint8, FULL) + offset

        g = load_value(grad_at, grad_at, offset, mask, grad_kind, FULL) * factor
        p = load_value(param_at, low_at, offset, mask, kind, FULL)
        ratio_code = load(ratio_at, mask).to(tl.int32)
        v_code = load(v_at, mask).to(tl.int32)
        v = decode_v(v_code, load(tops + group, group_mask).to(tl.int32))
        beta1_m = decode_ratio(ratio_code, from_code * square_root(v))

        g += l2 * p
        m = beta1_m + one_minus_beta1 * g
        v = beta2 * v + one_minus_beta2 * (g * g)
        update = (m * m_factor) * reciprocal(square_root(v) * v_factor + eps)
        p = p * keep - tl.clamp(update, -reach32, reach32, propagate_nan=tl.PropagateNan.ALL)

        group_start = first_index + start + r.to(tl.int64) * C
        high = mix(key ^ (group_start >> 32).to(tl.uint32))
        first_word = group_start.to(tl.uint32) + high
        word = first_word[:, None, None] + 8 * tl.arange(0, BC // 8).to(tl.uint32)[None, :, None] + tl.arange(0, 8).to(tl.uint32)[None, None, :]
        random = mix_low(tl.reshape(word, (BR, BC)))
        v_code, top, v_stored = encode_v(v, random)
        ratio = m * reciprocal_root(v_stored)
        ratio_code = encode_ratio(ratio, to_code, random)
        tl.store(v_at, v_code.to(tl.uint8), mask=mask)
        tl.store(ratio_at, ratio_code.to(tl.uint8), mask=mask)
        tl.store(tops + group, top.to(tl.uint8), mask=group_mask)
        if kind == _SPLIT:
            upper, lower = split_master(p)
            tl.store(typed(param_at, tl.int16, FULL) + offset, upper.to(tl.int16), mask=mask)
            tl.store(typed(low_at, tl.int16, FULL) + offset, lower.to(tl.int16), mask=mask)
        else:
            tl.store(typed(param_at, tl.float32, FULL) + offset, p, mask=mask)
        if has_fp8:
            bits = magnitude_bits(p)
            if not FULL:
                bits = tl.where(mask, bits, 0)
            # a thread holds eight neighbours; the rest of the maximum can wait for the end of the chunk
            largest = tl.maximum(largest, tl.max(tl.reshape(bits, (BR, BC // 8, 8)), 2))
            # within +-448 by the clamp above; the cast itself saturates what a weight edited by hand may exceed
            q = to_fp8(p * scale, tl.float8e4nv)
            w8_at = typed(w8 + first.to(tl.int64) * w8_stride + col0, tl.float8e4nv, FULL)
            tl.store(w8_at + tile_offsets(w8_stride, FULL, BR, BC), q, mask=mask)
    if has_fp8:
        amax_bits = tl.max(tl.max(largest, 1), 0)
        if amax_bits > tl.load(next_amaxes + weight):
            tl.atomic_max(next_amaxes + weight, amax_bits, sem="relaxed")


@jit
def adam_step_kernel(
    table, chunks, hyper, steps, limits, amaxes, next_amaxes, scales, scale_invs, found_inf, loss_scale, clip, seed, n_chunks,
    HAS_FOUND_INF: tl.constexpr, HAS_LOSS_SCALE: tl.constexpr, HAS_CLIP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, CHUNK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Program p does chunk p. A tensor without gradient, and every tensor of a skipped step, is left as it is."""
    if skipped(found_inf, clip, HAS_FOUND_INF, HAS_CLIP) != 0:
        return
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + chunk)
    row0 = tl.multiple_of(tl.load(chunks + n_chunks + chunk), 8)
    col0 = tl.multiple_of(tl.load(chunks + 2 * n_chunks + chunk), 128)
    row = table + tensor.to(tl.int64) * _W
    if tl.load(row + _GRAD) == 0:
        return
    factor = 1.0
    if HAS_LOSS_SCALE:
        factor = tl.div_rn(1.0, tl.load(loss_scale))
    if HAS_CLIP:
        factor = factor * tl.load(clip)
    kind = tl.load(row + _KIND)
    grad_kind = tl.load(row + _GRAD_KIND)
    # the usual cases with constant kinds and without masks; anything else, and the edges of matrices that do not fill their last tile, take the
    # general tile, smaller so that its addresses fit the registers, too
    rows_left = tl.load(row + _ROWS) - row0
    full = (tl.load(row + _ALIGNED) != 0) & (tl.load(row + _COLS) - col0 >= BC) & ((rows_left >= CHUNK) | (rows_left % BR == 0))
    case = tl.where(full, kind * 4 + grad_kind, -1)
    if case == _SPLIT * 4 + _BF16:
        _step_chunk(
            row, hyper, tensor, row0, col0, factor, steps, limits, amaxes, next_amaxes, scales, scale_invs, seed, _SPLIT, _BF16,
            POWER_OF_TWO, True, CHUNK, BR, BC,
        )  # fmt: skip
    elif case == _FP32 * 4 + _FP32:
        _step_chunk(
            row, hyper, tensor, row0, col0, factor, steps, limits, amaxes, next_amaxes, scales, scale_invs, seed, _FP32, _FP32,
            POWER_OF_TWO, True, CHUNK, BR, BC,
        )  # fmt: skip
    else:
        _step_chunk(
            row, hyper, tensor, row0, col0, factor, steps, limits, amaxes, next_amaxes, scales, scale_invs, seed, kind, grad_kind,
            POWER_OF_TWO, False, CHUNK, BR // 2, BC,
        )  # fmt: skip


def triton_adam_step(
    table: Tensor,
    chunks: Tensor,
    hyper: Tensor,
    steps: Tensor,
    limits: Tensor,
    amaxes: Tensor,
    next_amaxes: Tensor,
    scales: Tensor,
    scale_invs: Tensor,
    found_inf: Tensor | None,
    loss_scale: Tensor | None,
    clip: Tensor | None,
    seed: int,
    power_of_two: bool = False,
) -> None:
    """Step every tensor of `table` (int64 [tensors, WIDTH]) over `chunks` (int32 [3, n]).

    hyper: fp64 [groups, HYPER_WIDTH]; steps int32 and limits fp32, one a tensor; the four weight arrays fp32, one a weight of the bank;
    found_inf, loss_scale, clip: fp32 [1] or None.
    """
    n = chunks.shape[1]
    if n == 0:
        return
    launch(
        adam_step_kernel, (n,), table, chunks, hyper, steps, limits, amaxes, next_amaxes.view(torch.int32), scales, scale_invs,
        found_inf if found_inf is not None else limits,
        loss_scale if loss_scale is not None else limits,
        clip if clip is not None else limits,
        formats._signed32(seed), n,
        HAS_FOUND_INF=found_inf is not None, HAS_LOSS_SCALE=loss_scale is not None, HAS_CLIP=clip is not None,
        POWER_OF_TWO=power_of_two, CHUNK=CHUNK_ROWS, BR=TILE_ROWS, BC=CHUNK_COLS, num_warps=WARPS,
        **({} if MAX_REGISTERS is None else {"maxnreg": MAX_REGISTERS}),
    )  # fmt: skip
