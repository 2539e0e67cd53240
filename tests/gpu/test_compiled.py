"""Compiled models on the GPU: siblings cast once, torch's own capture, siblings on several streams."""

from __future__ import annotations

import pytest
import torch
from test_capture import DEVICE, batches, make, step_of
from test_gpu import profile_kernels
from torch import nn
from torch._dynamo.utils import counters

import ampplug

pytestmark = pytest.mark.gpu


class Attention(nn.Module):
    """As far as it matters: three layers over one input, one over another."""

    def __init__(self, width: int = 512):
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(width, width, bias=False))

    def forward(self, x):
        return self.o(self.q(x) * self.k(x) + self.v(x))


def attention():
    torch.manual_seed(0)
    model = Attention().to(DEVICE, torch.bfloat16)
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters()), select="all")
    return model, optimizer, torch.randn(256, 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)


def test_siblings_cast_once():
    """Forward 2 casts and 4 GEMMs, backward 4 and 8; the compiler's own kernels between them are not counted."""
    model, optimizer, x = attention()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)

    def run():
        optimizer.zero_grad()
        x.grad = None
        compiled(x).sum().backward()

    for _ in range(3):
        run()
        optimizer.step()
        torch.cuda.synchronize()
    names = [name for name in profile_kernels(run) if "triton_poi" not in name and "triton_red" not in name and "triton_per" not in name]
    assert sum("cast" in name for name in names) == 6, names
    assert len(names) <= 6 + 12 + 1, names  # and perhaps a fill for the sum's gradient


@pytest.mark.parametrize("eager_steps", [0, 2])
def test_torchs_own_capture(eager_steps: int):
    """mode="reduce-overhead": replays find scales and weights, record amaxes, and see the optimizer's steps."""
    (model, optimizer), (other, other_optimizer) = make(), make()
    torch._dynamo.reset()
    counters.clear()
    slow, first = step_of(other, other_optimizer), step_of(model, optimizer)
    fast = step_of(model, optimizer, torch.compile(model, fullgraph=True, mode="reduce-overhead"))
    for i, (x, y) in enumerate(batches(12)):
        x, y = x.to(DEVICE), y.to(DEVICE)
        torch.compiler.cudagraph_mark_step_begin()
        a, b = (first if i < eager_steps else fast)(x, y).clone(), slow(x, y)
        torch.cuda.synchronize()
        assert abs(a - b) < 0.05 * b, i
    assert not counters["inductor"]["cudagraph_skips"]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p.float() - q.float()).norm() < 0.05 * q.float().norm()
    mine, theirs = model.up._ampplug.book, other.up._ampplug.book
    assert torch.allclose(mine.history, theirs.history, rtol=0.2)  # every replay recorded


def test_siblings_on_several_streams():
    """They share a scale, but not the counters of casts under way. expect: the numbers of one stream, and no hang."""
    model, optimizer, x = attention()
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model._modules["q"]._ampplug.book.poll()
    large = torch.randn(8192, 512, device=DEVICE, dtype=torch.bfloat16)  # long enough for the casts to overlap
    large *= torch.linspace(1, 100, 8192, device=DEVICE, dtype=torch.bfloat16)[:, None]  # outgrows the scale: programs wait for each other
    layers = [model.q, model.k, model.v]
    with torch.no_grad():
        wanted = [layer(large.clone()) for layer in layers]
        torch.cuda.synchronize()
        for _ in range(20):
            streams, found = [torch.cuda.Stream() for _ in layers], []
            for layer, stream in zip(layers, streams, strict=True):
                with torch.cuda.stream(stream):
                    found.append(layer(large))
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
