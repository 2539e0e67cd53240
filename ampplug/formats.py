"""Number formats: FP8 casts and scales, 8-bit Adam moments, the split fp32 master weight.

Everything here is plain torch and is the reference that every kernel in `ampplug.kernels` must equal.

* FP8: E4M3 (`torch.float8_e4m3fn`, largest value 448) forward, E5M2 (57344) for output gradients. A tensor `x` is stored
  as `q = cast(x * scale)` and read as `q * (1 / scale)`.
* Second moment `v`: 8-bit floating-point code of `v` itself below the largest value of its group of 128 (see `encode_v`).
* First moment `m`: 8-bit code of the ratio `m / sqrt(v)`, which Adam bounds (see `encode_ratio`).
* Master weight: `fp32 = (bf16 bits << 16) + signed int16`, the bf16 being the rounded half (see `split_master`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
E4M3_MAX = 448.0
E5M2_MAX = 57344.0
FP8_MAX = {E4M3: E4M3_MAX, E5M2: E5M2_MAX}

# Scales stay within the normal range of fp32, and so do their inverses.
LARGEST_SCALE = 2.0**126

# Elements that share one scale of the second moment; groups never cross a row of a matrix.
GROUP = 128

# Smallest normal fp32: a smaller second moment counts as zero, on every device alike.
SMALLEST_NORMAL = 2.0**-126
_LARGEST_V = 2.0**126
_ONE_BITS = 0x3F800000
_RATIO_TOP = 247.0  # largest value of the ratio's code: 2**7 * (1 + 15/16) - 1

# Adam elements move at most `lr * bound`; without a finite bound (beta1**2 >= beta2) this one is enforced.
UNBOUNDED_STEP = 64.0


# ---------------------------------------------------------------- FP8 scales and casts


def scale_from_amax(
    amax: Tensor, old_scale: Tensor, fp8_max: float | Tensor, margin: int = 0, power_of_two: bool = False
) -> Tensor:
    """Scale for the largest magnitude `amax`: `fp8_max / (amax * 2**margin)`.

    `amax` and `old_scale` are fp32 of one shape. An amax of zero, Inf or NaN keeps the old scale; a tiny one is clamped so
    that the scale stays finite. `power_of_two` rounds the scale down to a power of two, which is MS-AMP's formula
    `2**(floor(log2(fp8_max / amax)) - margin)`.
    """
    usable = (amax > 0) & torch.isfinite(amax)
    target = torch.as_tensor(fp8_max, dtype=torch.float32, device=amax.device) * 2.0**-margin
    scale = (target / torch.where(usable, amax, 1.0)).clamp(max=LARGEST_SCALE)
    if power_of_two:
        scale = floor_to_power_of_two(scale)
    return torch.where(usable, scale, old_scale)


def floor_to_power_of_two(x: Tensor) -> Tensor:
    """Largest power of two not above the positive normal fp32 `x`, by clearing its mantissa."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def cast_fp8(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """`x * scale` in FP8, to nearest even. Finite overflow saturates; NaN and Inf of `x` become NaN, so that they stay visible.

    The framework's own cast is not relied upon for either: what it does with overflow differs by version and device.
    """
    fp8_max = FP8_MAX[dtype]
    x = x.float()
    y = (x * scale).clamp(-fp8_max, fp8_max)
    if not torch.isfinite(x.sum()):  # rare: one reduction instead of a mask over every element
        y = torch.where(torch.isfinite(x), y, math.nan)
    return y.to(dtype)


def dequantize(q: Tensor, scale_inv: Tensor | float) -> Tensor:
    """FP8 values as fp32: `q * scale_inv`. Exact up to the rounding of the product."""
    return fp8_to_float(q) * scale_inv


def fp8_to_float(q: Tensor) -> Tensor:
    """FP8 as fp32, exactly. Torch's own conversion is ten times slower on a CPU, so go through fp16's layout there."""
    if q.device.type != "cpu":
        return q.float()
    code = q.view(torch.uint8).to(torch.int16)
    if q.dtype == E5M2:  # E5M2 is the upper byte of fp16
        return (code << 8).view(torch.float16).float()
    magnitude = code & 0x7F
    # exponent bias 7 against fp16's 15: the same bits read as fp16 are 2**-8 of the value
    y = (((code & 0x80) << 8) | (magnitude << 7)).view(torch.float16).float() * 256.0
    return torch.where(magnitude == 0x7F, math.nan, y) if bool((magnitude == 0x7F).any()) else y


# ---------------------------------------------------------------- counter-based random bits


def _mix(h: Tensor) -> Tensor:
    """32-bit finaliser "lowbias32" (Chris Wellons, "Prospecting for Hash Functions"), on int32 with logical shifts."""
    return _mix_low(h ^ ((h >> 16) & 0xFFFF))


def _mix_low(h: Tensor) -> Tensor:
    """`_mix` without its first shift: enough where the key was mixed already and the lower bits count."""
    h = h * 0x7FEB352D
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * (0x846CA68B - (1 << 32))
    return h ^ ((h >> 16) & 0xFFFF)


def rounding_bits(seed: int, step: Tensor, ordinal: int, index: Tensor) -> Tensor:
    """A 32-bit random word an element, as int32: the upper half rounds m, the lower v.

    They depend on the seed, the parameter's step count (int32 scalar tensor), its ordinal in the optimizer and the element's
    index in the parameter (int64 [..., 128], groups last), and on nothing else: the same on every device, for any launch geometry, after a
    resume. Beyond 2**32 elements the upper half of the index is that of the group's first element.
    """
    key = torch.full((), _signed32(seed), dtype=torch.int32, device=index.device)
    for word in (step.to(torch.int32), ordinal):
        key = _mix(key ^ word) + (0x9E3779B9 - (1 << 32))
    low = index & 0xFFFFFFFF
    low = torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)
    high = (index[..., :1] >> 32).to(torch.int32)
    return _mix_low(low + _mix(key ^ high))


def _signed32(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >= 1 << 31 else x


# ---------------------------------------------------------------- second moment


def encode_v(v: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit codes of non-negative `v` [..., 128], one exponent a group. Returns (codes uint8, top exponents uint8 [...]).

    The code is a floating-point number without sign whose exponent counts down from the group's largest element: three
    mantissa bits in the top 16 octaves of v (steps of at most 6 % in sqrt(v)), one below (at most 23 %), 79 octaves in all,
    twelve decades of sqrt(v). Rounding is stochastic and unbiased in v: random bits below the kept mantissa are added to
    the fp32 bit pattern, then cut. (Unbiased in sqrt(v) would drift: a rounded square has the mean v + variance, and at
    beta2 = 0.999 that growth exceeds the decay.) Zero has a code of its own; a non-zero v never becomes zero, so a live first moment
    never meets a vanished v. A v that is not finite counts
    as 2**126: the weight itself shows the NaN. `random`: int32 of v's shape, the lower 16 bits are used.
    """
    v = torch.where(torch.isnan(v), _LARGEST_V, v.clamp(max=_LARGEST_V))
    bits = v.view(torch.int32)
    top = (bits.amax(-1) + ((1 << 20) - 1)) >> 23  # rounding up must not leave the window
    base = (top - 15 << 23).unsqueeze(-1)
    fine = bits >= base
    # 16 random bits below a 3-bit mantissa (20 bits) or a 1-bit one (22 bits)
    random = random & 0xFFFF
    noise = torch.where(fine, random << 4, random << 6)
    above = bits + noise - base
    code = 128 + torch.where(fine, above >> 20, above >> 22)
    code = torch.where(v >= SMALLEST_NORMAL, code.clamp(min=1), 0)
    return code.to(torch.uint8), top.to(torch.uint8)


def decode_v(code: Tensor, top: Tensor) -> Tensor:
    """Inverse of `encode_v`: fp32 of code's shape."""
    base = ((top.to(torch.int32) - 15) << 23).unsqueeze(-1)
    c = code.to(torch.int32)
    above = c - 128
    bits = base + torch.where(above >= 0, above << 20, above << 22)
    return torch.where(c == 0, 0, bits).view(torch.float32)


# ---------------------------------------------------------------- first moment


def step_bound(beta1: float, beta2: float) -> float:
    """Largest |m| / sqrt(v) that Adam can reach, which bounds an element's move to `lr * bound`.

    By Cauchy-Schwarz, `C = (1 - b1) / sqrt((1 - b2) * (1 - b1**2 / b2))`; 7.27 for (0.9, 0.999). Where b1**2 >= b2 there is
    no bound, and `UNBOUNDED_STEP` is enforced instead.
    """
    if beta2 <= 0.0 or beta1 * beta1 >= beta2:
        # without memory (beta2 = 0) v is the gradient's own square, and the ratio is at most one if beta1 is zero, too
        return 1.0 if beta1 == 0.0 else UNBOUNDED_STEP
    bound = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2))
    return min(max(bound, 1.0), UNBOUNDED_STEP)


def ratio_limit(beta1: float, beta2: float) -> float:
    """Largest ratio that the code of the first moment holds: the bound, and room for a v that was rounded down."""
    return 1.125 * step_bound(beta1, beta2)


def encode_ratio(ratio: Tensor, limit: float | Tensor, random: Tensor) -> Tensor:
    """8-bit code (uint8) of m / sqrt(v) within +-limit: sign, then the top bits of the floating-point number `1 + |y|`.

    `y = ratio * 247 / limit`. Adding one makes the code linear near zero and logarithmic (1/16) further out, with no subnormals.
    Stochastic rounding, unbiased; exact zero stays zero. `random`: int32, the upper 19 bits are used.
    """
    y = torch.where(torch.isnan(ratio), _RATIO_TOP, ratio.abs() * (_RATIO_TOP / limit))
    noise = (random >> 13) & 0x7FFFF
    magnitude = ((y.clamp(max=_RATIO_TOP) + 1.0).view(torch.int32) + noise - _ONE_BITS) >> 19
    magnitude = magnitude.clamp(max=127)
    return torch.where(torch.signbit(ratio), magnitude | 0x80, magnitude).to(torch.uint8)


def decode_ratio(code: Tensor, limit: float | Tensor) -> Tensor:
    """Inverse of `encode_ratio`: fp32 of code's shape."""
    c = code.to(torch.int32)
    y = (((c & 0x7F) << 19) + _ONE_BITS).view(torch.float32) - 1.0
    return torch.where(c > 127, -y, y) * (limit * (1 / _RATIO_TOP))


# ---------------------------------------------------------------- split master weight


def split_master(value: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> (bf16, rounded to nearest; int16 remainder); `join_master` restores the fp32 exactly. NaN stays NaN, Inf stays Inf.

    Halves round away from zero; a value that rounds past the largest bf16 becomes Inf, as torch's own cast makes it.
    """
    bits = torch.where(torch.isnan(value), 0x7FFF7FFF, value.view(torch.int32))
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join_master(high: Tensor, low: Tensor) -> Tensor:
    """bf16 and int16 halves -> fp32."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)
