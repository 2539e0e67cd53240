"""Cast kernel against its torch reference."""

import math

import pytest
import torch

from ampplug import formats
from ampplug.kernels import cast


def same(a, b) -> bool:
    """Equal bits, NaN codes alike."""
    if a is None or b is None:
        return a is b
    a, b = a.cpu(), b.cpu()
    if a.element_size() == 1:
        return torch.equal(a.float().nan_to_num(nan=-1e9), b.float().nan_to_num(nan=-1e9))
    return torch.equal(a, b)


def matrix(m: int, k: int, dtype: torch.dtype, transposed: bool, device: torch.device) -> torch.Tensor:
    x = torch.randn(k, m).t() if transposed else torch.randn(m, k)
    return (x * 50).to(dtype).to(device)


@pytest.mark.parametrize("fp8", [formats.E4M3, formats.E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m,k,transposed", [(1, 1, False), (7, 100, False), (64, 64, True), (130, 48, True), (33, 200, False)])
def test_equals_reference(fp8, dtype, m, k, transposed, device):
    x = matrix(m, k, dtype, transposed, device)
    partials = cast.triton_partial_amax(x)
    assert partials.max() == cast.reference_amax(x)[0]
    scales = [torch.tensor([value], device=device) for value in (3.7, 0.0, 1e-3, 500.0)]
    for scale, own in ((scales[0], False), (scales[1], True), (None, True), (scales[2], False), (scales[3], False), (scales[3], True)):
        record, expected_record = torch.zeros(1, device=device), torch.zeros(1)
        scratch = torch.zeros(3, dtype=torch.int32, device=device)
        found = cast.triton_cast(x, fp8, scale, partials if own else None, record, scratch, True, True)
        wanted = cast.reference_cast(
            x.cpu(), fp8, None if scale is None else scale.cpu(), cast.reference_amax(x.cpu()) if own else None, expected_record, True, True
        )
        assert all(same(a, b) for a, b in zip(found, wanted))
        assert same(record, expected_record) and not scratch.any()


def test_nan_and_inf_show(device):
    x = torch.randn(40, 70, device=device)
    x[3, 5], x[20, 60] = math.nan, math.inf
    record = torch.zeros(1, device=device)
    scratch = torch.zeros(3, dtype=torch.int32, device=device)
    q, qt, _ = cast.triton_cast(x, formats.E4M3, torch.ones(1, device=device), None, record, scratch, True, True)
    bad = torch.isnan(q.float())
    assert bad.sum() == 2 and bad[3, 5] and bad[20, 60] and torch.isnan(qt.float()).sum() == 2
    assert not torch.isfinite(record).any()  # such a record never enters the window


def test_outgrown_scale_is_replaced(device):
    """A range that jumped a thousandfold is cast with its own amax, not clipped."""
    x = torch.randn(70, 90, device=device) * 1e3
    scratch = torch.zeros(3, dtype=torch.int32, device=device)
    q, _, inverse = cast.triton_cast(x, formats.E4M3, torch.full((1,), 100.0, device=device), None, None, scratch, True, False)
    assert inverse.item() == pytest.approx(x.abs().max().item() / 448, rel=1e-6)
    back = q.float()[:, :90] * inverse
    assert (back - x).norm() / x.norm() < 0.04 and not scratch.any()


@pytest.mark.gpu
@pytest.mark.parametrize("m,k", [(16, 16), (300, 520), (16384, 2048), (5000, 8200)])
def test_many_programs_mend_together(m, k):
    """Waiting, mending and clearing up, again and again on one slot, with scales that fit and others that do not."""
    device = torch.device("cuda", 0)
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    scratch = torch.zeros(3, dtype=torch.int32, device=device)
    fits, outgrown = torch.full((1,), 20.0, device=device), torch.full((1,), 1e4, device=device)
    wanted = {id(s): cast.reference_cast(x, formats.E4M3, s, None, None, True, True) for s in (fits, outgrown)}
    for scale in (fits, outgrown, outgrown, fits) * 8:
        record = torch.zeros(1, device=device)
        found = cast.triton_cast(x, formats.E4M3, scale, None, record, scratch, True, True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, wanted[id(scale)], strict=True))
        assert record.item() == x.abs().max().item() and not scratch.any()


def test_power_of_two(device):
    x = torch.randn(20, 30, device=device)
    _, _, inverse = cast.triton_cast(x, formats.E4M3, None, cast.triton_partial_amax(x), None, None, True, False, power_of_two=True)
    assert math.log2(inverse.item()) == int(math.log2(inverse.item()))


@pytest.mark.parametrize("rows,transpose", [(True, False), (False, True)])
def test_outputs_on_request(rows, transpose, device):
    x = torch.randn(20, 30, device=device)
    q, qt, _ = cast.triton_cast(x, formats.E5M2, None, cast.triton_partial_amax(x), None, None, rows, transpose)
    assert (q is not None) == rows and (qt is not None) == transpose
    if qt is not None:
        assert qt.shape == (32, 32) and not qt.float()[30:].any() and not qt.float()[:, 20:].any()  # padding is zeros
