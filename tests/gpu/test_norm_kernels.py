"""RMSNorms by the kernel on a GPU: mending by many programs at once, the same numbers as a norm and a cast apart, fewer launches, capture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampplug
from ampplug import formats
from ampplug.kernels import cast, rms_norm
from ampplug.kernels.swiglu import Target
from ampplug.kernels.triton_runtime import launches
from ampplug.nn import norm

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
WIDTH = 1024


@pytest.fixture(autouse=True)
def _by_kernel(monkeypatch):
    monkeypatch.setattr(norm, "by_kernel", True)


@pytest.mark.parametrize("m,k", [(1, 512), (300, 528), (4096, 2048), (20000, 4096), (5000, 8192)])
@pytest.mark.parametrize("early", [False, True])
def test_many_programs_mend_together(m: int, k: int, early: bool):
    """The cast is that of y by itself, bit for bit, again and again on one slot, with scales that fit and others that do not."""
    x, w = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16), torch.rand(k, device=DEVICE, dtype=torch.bfloat16) + 0.5
    scratch = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    wanted_y, wanted_r, _ = rms_norm.reference_rms_norm(x, w, 1e-6, early, torch.bfloat16, None, False, False)
    for value in (20.0, 1e4, 1e4, 20.0) * 3:
        scale, record = torch.full((1,), value, device=DEVICE), torch.zeros(1, device=DEVICE)
        y, r, fp8 = rms_norm.triton_rms_norm(x, w, 1e-6, early, torch.bfloat16, Target(scale, None, record, scratch), True, False)
        again = cast.reference_cast(y, formats.E4M3, scale, None, None, True, True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(fp8, again, strict=True))
        assert record.item() == y.abs().max().item() and not scratch.any()
        assert torch.allclose(r, wanted_r, rtol=1e-5) and torch.allclose(y.float(), wanted_y.float(), rtol=0.01) and (y != wanted_y).float().mean() < 0.01


@pytest.mark.parametrize("m,k", [(1, 512), (67, 1040), (4096, 2048), (3000, 4096), (900, 8192)])
def test_backward(m: int, k: int):
    x, dy = (torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    w = torch.rand(k, device=DEVICE, dtype=torch.bfloat16) + 0.5
    _, r, _ = rms_norm.triton_rms_norm(x, w, 1e-6, False, torch.bfloat16, None, False, False)
    leaves = [t.double().requires_grad_() for t in (x, w)]
    exact = torch.autograd.grad(nn.functional.rms_norm(leaves[0], (k,), leaves[1], 1e-6), leaves, dy.double())
    for found, wanted in zip(rms_norm.triton_rms_norm_backward(dy, x, w, r, False, True, True), exact, strict=True):
        assert (found.double() - wanted).norm() <= 0.004 * wanted.norm()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.RMSNorm(WIDTH), *(nn.Linear(*s, bias=False) for s in ((WIDTH, 2048), (WIDTH, 2048), (2048, WIDTH)))

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))


def make(fuse: bool = True):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(DEVICE, torch.bfloat16)
    return ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), select="all", fuse=fuse)


def batch(t: int) -> torch.Tensor:
    return (torch.randn(4, 100, WIDTH, generator=torch.Generator().manual_seed(t)) * 3.0 ** (t % 3)).to(DEVICE, torch.bfloat16)


def step(model, optimizer, x) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(model, optimizer, steps: int = 8, run=None) -> list[float]:
    losses = []
    for t in range(steps):
        losses.append((step(model, optimizer, batch(t)) if run is None else run(batch(t))).item())
        torch.cuda.synchronize()
    return losses


def test_trains_alike_with_fewer_launches():
    found, counts = [], []
    for fuse in (True, False):
        model, optimizer = make(fuse)
        found.append(train(model, optimizer))
        launches.clear()
        step(model, optimizer, batch(8))
        counts.append(dict(launches))
    assert found[0] == pytest.approx(found[1], rel=0.02)
    # two inputs and three output gradients a block, and the norms' two outputs are no longer among them
    assert counts[0]["rms_norm_kernel"] == counts[0]["rms_norm_backward_kernel"] == 2 and counts[1]["cast_kernel"] - counts[0]["cast_kernel"] == 2


def test_captured_steps_equal_eager_ones():
    eager = train(*make())
    model, optimizer = make()
    fast = ampplug.capture(lambda x: step(model, optimizer, x), model, optimizer)
    assert train(model, optimizer, run=fast) == eager


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_are_torchs(weight, dtype, autocast: bool):
    model, _ = make()
    plain, x = nn.RMSNorm(WIDTH).to(DEVICE, weight), batch(0).to(dtype)
    model[0].norm.weight.data = plain.weight.detach().clone()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y, wanted = model[0].norm(x), plain(x)
    assert y.dtype == wanted.dtype and torch.allclose(y.float(), wanted.float(), rtol=0.01, atol=1e-3)
