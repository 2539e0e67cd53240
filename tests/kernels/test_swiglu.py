"""SwiGLU kernels against their torch reference, and the reference against autograd."""

from __future__ import annotations

import math

import pytest
import torch

from ampplug import formats
from ampplug.kernels import swiglu
from ampplug.kernels.swiglu import Target


def close(a, b) -> bool:
    """FP8 codes alike but for a few one step apart: exp differs in its last bits."""
    if a is None or b is None:
        return a is b
    a, b = a.float().cpu(), b.float().cpu()
    assert torch.equal(a.isnan(), b.isnan())
    a, b = a.nan_to_num(), b.nan_to_num()
    return bool(((a - b).abs() <= 0.26 * b.abs() + 1e-4).all()) and (a != b).float().mean() < 0.02


def inputs(m: int, k: int, device, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(m + k)
    return [(torch.randn(m, k, generator=generator) * s).to(dtype).to(device) for s in (3.0, 2.0, 0.01)]


def test_reference_is_the_derivative():
    a, b, dh = (x.double().requires_grad_() for x in inputs(9, 16, "cpu", torch.float32))
    h = torch.nn.functional.silu(a) * b
    (value,) = swiglu.reference_values(a.detach(), b.detach(), None)
    assert torch.allclose(value, h.float(), rtol=1e-5, atol=1e-7)
    da, db = torch.autograd.grad(h, (a, b), dh.detach())
    for mine, exact in zip(swiglu.reference_values(a.detach(), b.detach(), dh.detach()), (da, db), strict=True):
        assert torch.allclose(mine, exact.float(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("m,k", [(1, 16), (70, 48), (130, 272)])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", ["delayed", "just in time", "own", "outgrown"])
def test_equals_reference(m: int, k: int, backward: bool, kind: str, device):
    a, b, dh = inputs(m, k, device)
    gradient = dh if backward else None
    n = 2 if backward else 1
    found_partials = swiglu.triton_partial_amaxes(a, b, gradient)
    amaxes = [p.amax() for p in found_partials]
    for amax, value in zip(amaxes, swiglu.reference_values(a, b, gradient), strict=True):
        assert amax.item() == pytest.approx(value.abs().max().item(), rel=1e-5)
    top = 57344.0 if backward else 448.0
    factor = {"delayed": 0.4, "just in time": 0.0, "own": 1.0, "outgrown": 50.0}[kind]
    scales = [None if kind == "own" else (top / x * factor * (1.0 if i == 0 else 0.5)).reshape(1).float() for i, x in enumerate(amaxes)]
    partials = found_partials if kind in ("just in time", "own") else [None] * n
    results = []
    for kernels in (True, False):
        where = device if kernels else "cpu"
        records = [torch.zeros(1, device=where) for _ in range(n)]
        scratches = [torch.zeros(3, dtype=torch.int32, device=where) for _ in range(n)]
        move = lambda t: None if t is None else t.to(where)  # noqa: E731
        targets = tuple(Target(move(s), move(p), r, c) for s, p, r, c in zip(scales, partials, records, scratches, strict=True))
        dtype = formats.E5M2 if backward else formats.E4M3
        if kernels:
            found, _ = swiglu.triton_swiglu(a, b, gradient, targets, dtype, True, True, False)
            assert not any(c.any() for c in scratches)
        else:
            found = swiglu._reference(swiglu.reference_values(a.cpu(), b.cpu(), move(gradient)), targets, dtype, True, True, False)
        results.append((found, records))
    for (q, qt, inverse), (wanted, wanted_t, wanted_inverse) in zip(results[0][0], results[1][0], strict=True):
        assert inverse.item() == pytest.approx(wanted_inverse.item(), rel=1e-5)
        assert close(q, wanted) and close(qt, wanted_t) and qt.shape == (k, -(-m // 16) * 16)
    for record, wanted in zip(results[0][1], results[1][1], strict=True):
        assert record.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert len(results[0][0]) == n


def test_nan_shows(device):
    a, b, dh = inputs(20, 32, device)
    a[3, 4] = math.nan
    targets = (Target(torch.ones(1, device=device), None, torch.zeros(1, device=device), torch.zeros(3, dtype=torch.int32, device=device)),)
    ((q, qt, _),), _ = swiglu.triton_swiglu(a, b, None, targets, formats.E4M3, True, True, False)
    assert q.float().isnan().sum() == 1 and qt.float().isnan().sum() == 1 and not torch.isfinite(targets[0].record).any()


@pytest.mark.parametrize("rows,transpose", [(True, False), (False, True)])
def test_outputs_on_request(rows: bool, transpose: bool, device):
    a, b, dh = inputs(20, 32, device)
    partials = swiglu.triton_partial_amaxes(a, b, dh)
    found, _ = swiglu.triton_swiglu(a, b, dh, tuple(Target(None, p) for p in partials), formats.E5M2, rows, transpose, True)
    for q, qt, inverse in found:
        assert (q is not None) == rows and (qt is not None) == transpose
        assert math.log2(inverse.item()) == int(math.log2(inverse.item()))  # powers of two on request


@pytest.mark.parametrize("m,k", [(70, 48), (130, 272)])
def test_backward_makes_the_transpose_that_forward_left_out(m: int, k: int, device):
    a, b, dh = inputs(m, k, device)
    (partials,) = swiglu.triton_partial_amaxes(a, b)
    (((_, wanted, h_inv),), _) = swiglu.triton_swiglu(a, b, None, (Target(None, partials),), formats.E4M3, True, True, False)
    targets = tuple(Target(None, p) for p in swiglu.triton_partial_amaxes(a, b, dh))
    for rows, transpose in ((True, True), (True, False)):  # the last: gate and up are frozen
        _, h8t = swiglu.triton_swiglu(a, b, dh, targets, formats.E5M2, rows, transpose, False, h_inv)
        assert close(h8t, wanted) and close(h8t, swiglu.reference_transposed(a.cpu(), b.cpu(), h_inv.cpu()))
