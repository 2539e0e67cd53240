"""RMSNorm kernels against their torch reference, and the reference against torch's own norm in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from ampplug import formats
from ampplug.kernels import rms_norm
from ampplug.kernels.swiglu import Target

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(m: int, k: int, device, dtype=torch.bfloat16, weight_dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(m + k)
    x, dy = (torch.randn(m, k, generator=generator).to(dtype) * s for s in (3.0, 0.1))
    return x.to(device), (1 + 0.1 * torch.randn(k, generator=generator)).to(weight_dtype).to(device), dy.to(device)


def alike(a, b, tolerance: float = 0.01) -> bool:
    """Equal but for a few that lie a rounding apart: sums in another order."""
    a, b = a.float().cpu(), b.float().cpu()
    close = (a - b).abs() <= 0.13 * b.abs() + 1e-3
    return torch.equal(a.isnan(), b.isnan()) and bool((close | b.isnan()).all()) and (a != b).float().mean() <= tolerance + b.isnan().float().mean()


@pytest.mark.parametrize("early", [False, True])
def test_reference_is_the_norm_and_its_derivative(early: bool):
    x, w, dy = (t.double().requires_grad_() for t in inputs(9, 48, "cpu", torch.float32, torch.float32))
    y = torch.nn.functional.rms_norm(x, (48,), w, 1e-5)
    mine, r, fp8 = rms_norm.reference_rms_norm(x.detach().float(), w.detach().float(), 1e-5, early, torch.float32, None, False, False)
    assert torch.allclose(mine.double(), y, rtol=1e-5) and fp8 is None
    exact = torch.autograd.grad(y, (x, w), dy.detach())
    found = rms_norm.reference_rms_norm_backward(dy.detach().float(), x.detach().float(), w.detach().float(), r, early, True, True)
    for a, b in zip(found, exact, strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-4, atol=1e-5)


def test_reference_rounds_as_its_models_do():
    """expect: torch's RMSNorm bit for bit where it rounds once, Hugging Face's formula where it rounds early."""
    x, w, _ = inputs(64, 256, "cpu")
    y, *_ = rms_norm.reference_rms_norm(x, w, 1e-6, False, torch.bfloat16, None, False, False)
    assert torch.equal(y, torch.nn.functional.rms_norm(x, (256,), w, 1e-6))
    for weight in (w, w.float()):
        h = x.float()
        wanted = weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        y, *_ = rms_norm.reference_rms_norm(x, weight, 1e-6, True, wanted.dtype, None, False, False)
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("m,k", [(1, 16), (50, 272), (130, 48)])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", ["fits", "outgrown", "no cast"])
def test_equals_reference(m: int, k: int, early: bool, kind: str, device):
    x, w, _ = inputs(m, k, device)
    results = []
    for kernel in (True, False):
        where = device if kernel else torch.device("cpu")
        scale = torch.tensor([40.0 if kind == "fits" else 4000.0], device=where)
        record, scratch = torch.zeros(1, device=where), torch.zeros(3, dtype=torch.int32, device=where)
        target = None if kind == "no cast" else Target(scale, None, record, scratch)
        run = rms_norm.triton_rms_norm if kernel else rms_norm.reference_rms_norm
        results.append((*run(x.to(where), w.to(where), 1e-6, early, torch.bfloat16, target, True, False), record))
        assert not scratch.any()
    (y, r, fp8, record), (y2, r2, fp82, record2) = results
    assert alike(y, y2) and torch.allclose(r.cpu(), r2, rtol=1e-6)
    if kind == "no cast":
        assert fp8 is None is fp82
        return
    # the cast is of y as it is: these codes are those of a cast by itself
    again = rms_norm.reference_cast(y.cpu(), formats.E4M3, torch.tensor([40.0 if kind == "fits" else 4000.0]), None, None, True, True)
    for a, b in zip(fp8, again, strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
    assert record.cpu() == y.abs().max().float().cpu() and (kind == "fits") == (fp8[2].item() == pytest.approx(1 / 40))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_dtypes(dtype, weight_dtype, device):
    x, w, dy = inputs(20, 48, device, dtype, weight_dtype)
    for early, out in ((False, dtype), (False, torch.float32), (True, torch.promote_types(dtype, weight_dtype))):
        y, r, _ = rms_norm.triton_rms_norm(x, w, 1e-6, early, out, None, False, False)
        wanted, *_ = rms_norm.reference_rms_norm(x.cpu(), w.cpu(), 1e-6, early, out, None, False, False)
        assert y.dtype == out and alike(y, wanted, 1.0 if out == torch.float32 else 0.01)
        found = rms_norm.triton_rms_norm_backward(dy, x, w, r, early, True, True)
        wanted = rms_norm.reference_rms_norm_backward(dy.cpu(), x.cpu(), w.cpu(), r.cpu(), early, True, True)
        for a, b, like in zip(found, wanted, (x, w), strict=True):
            assert a.dtype == like.dtype and torch.allclose(a.float().cpu(), b.float(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("m,k", [(1, 16), (67, 272), (40, 1040)])
def test_backward_equals_reference(m: int, k: int, device):
    x, w, dy = inputs(m, k, device, torch.float32, torch.float32)
    _, r, _ = rms_norm.triton_rms_norm(x, w, 1e-6, False, torch.float32, None, False, False)
    for need in ((True, True), (True, False), (False, True)):
        found = rms_norm.triton_rms_norm_backward(dy, x, w, r, False, *need)
        wanted = rms_norm.reference_rms_norm_backward(dy.cpu(), x.cpu(), w.cpu(), r.cpu(), False, *need)
        for a, b in zip(found, wanted, strict=True):
            assert a is b is None or torch.allclose(a.cpu(), b, rtol=1e-4, atol=1e-5)


def test_zero_rows_and_what_is_not_finite(device):
    """With eps = 0 a row of zeros is NaN, as in torch; rows of padding are zeros all the same. An amax that is not finite shows in the record."""
    x, w, _ = inputs(20, 32, device, torch.float32, torch.float32)
    x[3], x[5, 4] = 0.0, math.inf
    record, scratch = torch.zeros(1, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    y, _, (q, qt, _) = rms_norm.triton_rms_norm(x, w, 0.0, False, torch.float32, Target(torch.ones(1, device=device), None, record, scratch), True, False)
    nan = torch.zeros(20, 32, dtype=torch.bool, device=device)
    nan[3], nan[5, 4] = True, True
    assert torch.equal(y.isnan(), nan) and torch.equal(q.float().isnan(), nan) and torch.equal(qt.float()[:, :20].t().isnan(), nan)
    assert not qt.float()[:, 20:].any() and not torch.isfinite(record).any()
