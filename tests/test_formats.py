"""The number formats against brute force and against the figures that the project promises."""

import math

import pytest
import torch

from ampplug import formats


def words(*shape: int) -> torch.Tensor:
    """Uniform 32-bit words."""
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


@pytest.mark.parametrize("dtype,top", [(formats.E4M3, 448.0), (formats.E5M2, 57344.0)])
def test_casts_saturate_and_show_nan(dtype: torch.dtype, top: float):
    x = torch.tensor([1e30, -1e30, top * 1.01, 3.4e38, 0.0, -0.0, math.inf, -math.inf, math.nan])
    y = formats.cast_fp8(x, 10.0, dtype).float()
    assert y[:4].tolist() == [top, -top, top, top]
    assert (y[4:6] == 0).all() and torch.isnan(y[6:]).all()


@pytest.mark.parametrize("dtype", [formats.E4M3, formats.E5M2])
def test_every_code_as_float(dtype: torch.dtype):
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    assert torch.equal(formats.fp8_to_float(codes).nan_to_num(nan=-7), codes.float().nan_to_num(nan=-7))


def test_scale_formula():
    old = torch.full((7,), 3.0)
    amax = torch.tensor([1.0, 100.0, 0.0, math.inf, math.nan, 1e-44, 3e38])
    scale = formats.scale_from_amax(amax, old, 448.0)
    assert scale[:2].tolist() == [448.0, pytest.approx(4.48)]
    assert scale[2:5].tolist() == [3.0, 3.0, 3.0]
    assert scale[5] == formats.LARGEST_SCALE and torch.isfinite(1 / scale).all() and scale[6] > 0
    assert formats.scale_from_amax(amax[:1], old[:1], 448.0, margin=2).item() == 112.0


def test_power_of_two_is_ms_amps_formula():
    amax = torch.exp(torch.randn(10000) * 20)
    scale = formats.scale_from_amax(amax, torch.ones_like(amax), 448.0, 1, power_of_two=True)
    wanted = 2.0 ** (torch.floor(torch.log2(448.0 / amax.double())) - 1)
    assert torch.equal(scale, wanted.clamp(max=2.0**126).float())


def test_second_moment_precision():
    """sqrt(v) within 2**8 of the largest: median error at most 3 %, 99.9 % at most 12.5 %; unbiased in v."""
    depth = torch.empty(4000, 128).uniform_(-8, 0)
    depth[:, 0] = 0
    root = torch.exp2(depth) * 3.7
    code, top = formats.encode_v(root**2, words(4000, 128))
    v = formats.decode_v(code, top)
    error = (v.sqrt() / root - 1).abs().flatten()
    assert error.median() < 0.015 and error.kthvalue(int(0.999 * error.numel())).values < 0.125
    assert abs((v / root**2 - 1).mean()) < 1e-3


def test_twelve_decades_in_one_group():
    root = torch.logspace(0, -12, 128).repeat(500, 1)
    code, top = formats.encode_v((root * 1e-3) ** 2, words(500, 128))
    assert (code > 0).all()  # a live first moment never meets a vanished second
    error = (formats.decode_v(code, top).sqrt() / (root * 1e-3) - 1).abs()
    assert error[:, :-2].max() < 0.25


def test_second_moment_codes_are_fixed_points():
    """Decoding and encoding again without noise gives every code back."""
    codes = torch.arange(128, 256).to(torch.uint8).view(1, 128)
    for part in (codes, torch.cat([torch.arange(1, 128).to(torch.uint8), torch.tensor([255], dtype=torch.uint8)]).view(1, 128)):
        top = torch.tensor([120], dtype=torch.uint8)
        again, again_top = formats.encode_v(formats.decode_v(part, top), torch.zeros(1, 128, dtype=torch.int32))
        assert torch.equal(again, part) and torch.equal(again_top, top)


def test_zero_moments_stay_zero():
    zero = torch.zeros(3, 128)
    code, top = formats.encode_v(zero, words(3, 128))
    assert (formats.decode_v(code, top) == 0).all()
    assert (formats.decode_ratio(formats.encode_ratio(zero, 8.0, words(3, 128)), 8.0) == 0).all()


def test_ratio_code():
    limit = formats.ratio_limit(0.9, 0.999)
    ratio = torch.randn(1000, 128) * 0.23
    back = formats.decode_ratio(formats.encode_ratio(ratio, limit, words(1000, 128)), limit)
    assert ((back - ratio) ** 2).sum() / (ratio**2).sum() < 1e-3
    assert abs((back - ratio).mean()) < 2e-4 * ratio.abs().mean() * 10
    edge = torch.tensor([[100.0, -100.0, limit, -limit]])
    assert formats.decode_ratio(formats.encode_ratio(edge, limit, words(1, 4)), limit).abs().max() <= limit * 1.0001


@pytest.mark.parametrize("beta1,beta2", [(0.9, 0.999), (0.9, 0.95), (0.8, 0.99), (0.95, 0.98), (0.0, 0.9)])
def test_step_bound_holds_for_the_worst_gradients(beta1: float, beta2: float):
    """The gradients that maximize m / sqrt(v), after bias correction, at every step count."""
    bound = formats.step_bound(beta1, beta2)
    for t in (1, 2, 5, 20, 100, 1000):
        k = torch.arange(t, dtype=torch.float64)
        g = (beta1 / beta2) ** k  # newest first: equality in Cauchy-Schwarz
        m = ((1 - beta1) * beta1**k * g).sum() / (1 - beta1**t)
        v = ((1 - beta2) * beta2**k * g * g).sum() / (1 - beta2**t)
        assert m / v.sqrt() <= bound * (1 + 1e-9)
    assert formats.step_bound(0.99, 0.95) == formats.UNBOUNDED_STEP


def test_split_master_is_exact():
    x = torch.randn(100000) * torch.exp(torch.randn(100000) * 20)
    x = torch.cat([x, torch.tensor([0.0, -0.0, math.inf, -math.inf, 1.0, 2.0**-126])])
    high, low = formats.split_master(x)
    assert torch.equal(formats.join_master(high, low).view(torch.int32), x.view(torch.int32))
    normal = (x.abs() > 1e-30) & (x.abs() < 1e30)
    assert ((high.float() - x).abs() <= x.abs() * 2**-8)[normal].all()  # the model sees a rounded weight
    high, low = formats.split_master(torch.tensor([math.nan, -math.nan]))
    assert torch.isnan(high).all() and torch.isnan(formats.join_master(high, low)).all()


def test_rounding_bits():
    index = torch.arange(64 * 128).view(64, 128)
    step = torch.tensor(5, dtype=torch.int32)
    bits = formats.rounding_bits(1, step, 0, index)
    assert torch.equal(bits[10:20], formats.rounding_bits(1, step, 0, index[10:20]))  # whatever the tile
    for other in (formats.rounding_bits(2, step, 0, index), formats.rounding_bits(1, step + 1, 0, index), formats.rounding_bits(1, step, 1, index)):
        assert (other == bits).float().mean() < 0.01
    for half in (bits & 0xFFFF, (bits >> 16) & 0xFFFF):
        counts = torch.bincount(half.flatten() >> 12, minlength=16).float()
        assert ((counts - 512) ** 2 / 512).sum() < 45  # chi-square, 15 degrees of freedom
    far = formats.rounding_bits(1, step, 0, index + (1 << 33))
    assert (far == bits).float().mean() < 0.01
