"""Device functions shared by the kernels: the Triton side of `ampplug.formats`, function by function."""

from __future__ import annotations

from ampplug.kernels.tables import BF16, FP16, FP32, SPLIT
from ampplug.kernels.triton_runtime import INTERPRETED, jit, tl

_FP32 = tl.constexpr(FP32)
_BF16 = tl.constexpr(BF16)
_FP16 = tl.constexpr(FP16)
_SPLIT = tl.constexpr(SPLIT)
# The largest fp32 number, to the last digit: one digit less, rounded up, lies beyond fp32, and Triton compares all elements in fp64.
LARGEST = tl.constexpr(3.4028234663852886e38)
_LARGEST_SCALE = tl.constexpr(2.0**126)


@jit
def to_fp8(y, FP8: tl.constexpr):
    """fp32 from `saturate` -> FP8, to nearest even; what lies beyond the range becomes the largest value."""
    if INTERPRETED:
        KEPT: tl.constexpr = 20 if FP8 == tl.float8e4nv else 21  # fp32 mantissa bits that FP8 drops
        BIAS: tl.constexpr = 7 if FP8 == tl.float8e4nv else 15
        NAN: tl.constexpr = 0x7F
        bits = y.to(tl.int32, bitcast=True)
        rounded = (bits & 0x7FFFFFFF) + ((1 << (KEPT - 1)) - 1) + ((bits >> KEPT) & 1)
        normal = (rounded >> KEPT) - ((127 - BIAS) << (23 - KEPT))
        SUBNORMAL: tl.constexpr = 2.0 ** (BIAS - 1 + 23 - KEPT)  # one over the smallest value
        MAGIC: tl.constexpr = 2.0**23  # adding it rounds to an integer, to even
        subnormal = ((tl.abs(y) * SUBNORMAL + MAGIC) - MAGIC).to(tl.int32)
        code = tl.where(tl.abs(y) < 2.0 ** (1 - BIAS), subnormal, normal)
        code = tl.where(y != y, NAN, code) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8).to(FP8, bitcast=True)
    return y.to(FP8)


@jit
def saturate(y, x, zero, FP8_MAX: tl.constexpr):
    """For `to_fp8`: y, NaN where x is not finite. zero: 0.0.

    One instruction: zero times Inf is NaN, and the conversion itself saturates what is finite, or became Inf by scaling.
    """
    y += x * zero
    if INTERPRETED:
        y = tl.where(y != y, y, tl.minimum(tl.maximum(y, -FP8_MAX), FP8_MAX))
    return y


@jit
def rounded(x, DTYPE: tl.constexpr):
    """fp32 -> DTYPE (bf16, fp16 or fp32), to nearest even."""
    if INTERPRETED:
        if DTYPE == tl.bfloat16:  # the interpreter cuts
            bits = x.to(tl.int32, bitcast=True)
            bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
            x = tl.where(x != x, x, bits.to(tl.float32, bitcast=True))
    return x.to(DTYPE)


@jit
def magnitude_bits(x):
    """|x| as the int32 of its bits: ordered like the magnitudes, with Inf above every number and NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scale_from_amax(amax, old_scale, fp8_max, POWER_OF_TWO: tl.constexpr):
    """`formats.scale_from_amax`; fp8_max already holds the margin."""
    usable = (amax > 0) & (amax <= LARGEST)
    scale = tl.minimum(tl.div_rn(fp8_max + tl.zeros_like(amax), tl.where(usable, amax, 1.0)), _LARGEST_SCALE)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(usable, scale, old_scale)


@jit
def columns_of(pointer, ALIGNED: tl.constexpr):
    """Number of columns, int32 (at most 2**25, see `tables`); a multiple of 16 if ALIGNED."""
    C = tl.load(pointer).to(tl.int32)
    if ALIGNED:  # the hint goes on the last operation: the compiler does not carry it through a cast
        C = tl.multiple_of(C, 16)
    return C


@jit
def typed(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """int64 address -> pointer, on a 16-byte boundary if ALIGNED."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def tile_offsets(C, ALIGNED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """int32 offsets [BR, BC] of a tile in a row-major matrix with C columns.

    ALIGNED promises that rows start on 16-byte boundaries. Eight elements a thread are promised, not sixteen: 1-, 2- and 4-byte accesses
    then share one layout, and nothing is shuffled through shared memory between them.
    """
    offset = tl.arange(0, BR)[:, None] * C + tl.arange(0, BC)[None, :]
    if ALIGNED:
        offset = tl.max_contiguous(tl.multiple_of(offset, (1, 8)), (1, 8))
    return offset


@jit
def load(pointer, mask):
    """tl.load, zero where masked; mask may be None."""
    return tl.load(pointer) if mask is None else tl.load(pointer, mask=mask, other=0)


@jit
def load_value(address, low_address, offset, mask, kind, ALIGNED: tl.constexpr):
    """Elements of a parameter or gradient as fp32. address: int64; kind: FP32, BF16, FP16 or SPLIT, the same for the whole tile.

    A constant kind costs nothing; one known at run time makes every load wait in its branch.
    """
    value = tl.zeros(offset.shape, tl.float32)
    if kind == _FP32:
        value = load(typed(address, tl.float32, ALIGNED) + offset, mask)
    elif kind == _FP16:
        value = load(typed(address, tl.float16, ALIGNED) + offset, mask).to(tl.float32)
    else:
        high = load(typed(address, tl.int16, ALIGNED) + offset, mask).to(tl.int32) << 16
        if kind == _SPLIT:
            high += load(typed(low_address, tl.int16, ALIGNED) + offset, mask).to(tl.int32)
        value = high.to(tl.float32, bitcast=True)
    return value


@jit
def pack4(q0, q1, q2, q3):
    """Four tiles of FP8 codes (uint8) -> int32, the first in the lowest byte.

    A transpose of such words moves whole words through shared memory, not bytes.
    """
    low = q0.to(tl.uint32) | (q1.to(tl.uint32) << 8)
    return (low | (q2.to(tl.uint32) << 16) | (q3.to(tl.uint32) << 24)).to(tl.int32, bitcast=True)


@jit
def reciprocal(x):
    """1 / x to about one unit in the last place: one instruction where IEEE division takes ten."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def square_root(x):
    """sqrt(x) to about one unit in the last place, zero where x is below the smallest normal number."""
    if INTERPRETED:
        return tl.sqrt(x)
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def reciprocal_root(x):
    """1 / sqrt(x) to about one unit in the last place, for normal numbers."""
    if INTERPRETED:
        return tl.rsqrt(x)
    return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def mix(h):
    """`formats._mix` on uint32."""
    return mix_low(h ^ (h >> 16))


@jit
def mix_low(h):
    """`formats._mix_low` on uint32."""
    h = h * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@jit
def encode_v(v, random):
    """`formats.encode_v` on a tile [R, 128]; random: uint32.

    Returns codes (int32), top exponents [R] (int32), and what the codes stand for (fp32; some normal number for zero).
    """
    v = tl.minimum(v, 8.507059e37)  # NaN, too, becomes 2**126
    bits = v.to(tl.int32, bitcast=True)
    top = (tl.max(bits, 1) + ((1 << 20) - 1)) >> 23
    base = ((top - 15) << 23)[:, None]
    above = bits - base
    noise = (random & 0xFFFF).to(tl.int32)
    # the larger of the two is the one whose octaves `above` lies in; -128 is the code of zero
    code = tl.maximum((above + (noise << 4)) >> 20, (above + (noise << 6)) >> 22)
    code = tl.where(bits >= 0x800000, tl.maximum(code, -127), -128)
    stored = tl.minimum(base + (code << 20), base + (code << 22))
    return code + 128, top, tl.maximum(stored, 0x800000).to(tl.float32, bitcast=True)


@jit
def decode_v(code, top):
    """`formats.decode_v`: int32 codes [R, 128] and tops [R] -> fp32."""
    above = code - 128
    base = ((top - 15) << 23)[:, None]
    # the smaller of the two is the one whose octaves `above` lies in
    bits = tl.minimum(base + (above << 20), base + (above << 22))
    return tl.where(above == -128, 0, bits).to(tl.float32, bitcast=True)


@jit
def encode_ratio(ratio, to_code, random):
    """`formats.encode_ratio`; to_code: 247 / limit. Returns int32."""
    y = tl.minimum(tl.abs(ratio) * to_code + 1.0, 248.0)
    noise = (random >> 13).to(tl.int32)
    magnitude = (y.to(tl.int32, bitcast=True) + noise - 0x3F800000) >> 19  # 248 is the code 127 exactly, and the noise stays below the next
    return magnitude | ((ratio.to(tl.int32, bitcast=True) >> 24) & 0x80)


@jit
def decode_ratio(code, from_code):
    """`formats.decode_ratio` times something; from_code: limit / 247, times that, of any shape."""
    y = (((code & 0x7F) << 19) + 0x3F800000).to(tl.float32, bitcast=True) * from_code - from_code
    # the code's sign bit is fp32's, 24 places down
    return (y.to(tl.int32, bitcast=True) ^ ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@jit
def split_master(value):
    """`formats.split_master`: fp32 -> (upper half, remainder), both int32 that fit int16."""
    bits = value.to(tl.int32, bitcast=True)
    if INTERPRETED:
        bits = tl.where(value != value, 0x7FFF7FFF, bits)
    else:  # arithmetic on GPUs makes one NaN only, 0x7FFFFFFF: kept below what adding 0x8000 would carry into the sign
        bits = tl.minimum(bits, 0x7FFF7FFF)
    high = (bits + 0x8000) >> 16
    return high, bits - (high << 16)
