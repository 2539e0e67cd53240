"""Layers that are given the same tensor cast it once, and nothing else changes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import ampplug
from ampplug.nn import linear_function as linear

pytestmark = pytest.mark.filterwarnings("ignore:ampplug")


class Siblings(nn.Module):
    """Three layers over one input, one over another."""

    def __init__(self, apart: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = nn.Linear(48, 64), nn.Linear(48, 32, bias=False), nn.Linear(48, 32), nn.Linear(64, 48)
        self.apart = apart

    def forward(self, x):
        same = (lambda t: t.view_as(t)) if self.apart else (lambda t: t)  # another tensor object over the same memory
        return self.o(self.q(same(x)) * torch.cat([self.k(same(x)), self.v(same(x))], -1)) + x


def make(apart: bool = False, **settings):
    model = nn.Sequential(Siblings(apart), Siblings(apart))
    return ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), select="all", **settings)


@pytest.fixture
def casts(monkeypatch):
    """Shapes of what was cast."""
    made = []
    real = linear.cast
    monkeypatch.setattr(linear, "cast", lambda x, *a, **k: made.append(tuple(x.shape)) or real(x, *a, **k))
    return made


def train(model, optimizer, steps: int = 4, parameters: list | None = None) -> list[torch.Tensor]:
    parameters = list(model.parameters()) if parameters is None else parameters
    seen = []
    for t in range(steps):
        x = (torch.randn(5, 48, generator=torch.Generator().manual_seed(t)) * 10.0 ** (t % 3)).requires_grad_()
        y = model(x)
        y.square().mean().backward()
        seen += [y.detach().clone(), x.grad.clone(), *[p.grad.clone() for p in parameters]]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *[p.detach().clone() for p in parameters]]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_sharing_changes_no_number(recipe: str):
    runs = [train(*make(apart, recipe=recipe)) for apart in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_one_cast_for_three_layers(casts):
    model, _ = make()
    x = torch.randn(5, 48)
    y = model(x)
    assert len(casts) == 4  # two blocks: the shared input and the last layer's, each
    casts.clear()
    y.sum().backward()
    assert len(casts) == 8  # every layer's own output gradient
    casts.clear()
    model(x)
    assert len(casts) == 4  # a new pass casts anew
    model.eval()
    casts.clear()
    with torch.no_grad():
        model(x)
    assert sum(shape == (5, 48) for shape in casts) == 6  # evaluation keeps nothing


def test_what_changed_is_cast_again(casts):
    model, _ = make()
    block = model[0]
    x = torch.randn(5, 48)
    first = block.q(x)
    with torch.no_grad():
        x.mul_(100.0)
    second = block.q(x)
    assert casts.count((5, 48)) == 2 and torch.allclose(second - block.q.bias, (first - block.q.bias) * 100.0, rtol=0.05, atol=1.0)
    block.k(x.clone())
    assert casts.count((5, 48)) == 3


def test_a_frozen_sibling_first(casts):
    """It needs no transpose for its weight gradient; the next one does, and casts."""
    model, _ = make()
    block = model[0]
    block.q.weight.requires_grad_(False)
    x = torch.randn(5, 48, requires_grad=True)
    (block.q(x).sum() + block.k(x).sum() + block.v(x).sum()).backward()
    assert casts.count((5, 48)) == 2
    assert block.q.weight.grad is None and block.k.weight.grad.abs().sum() > 0 and block.v.weight.grad.abs().sum() > 0


def test_followers_count_as_settled():
    model, optimizer = make()
    train(model, optimizer, 2)
    book = model[0].q._ampplug.book
    book.poll()
    assert book.complete and not book.known[model[0].k._ampplug.x_slot]
    # one that casts by itself one day gets its scale then
    for _ in range(2):
        model[0].k(torch.randn(5, 48)).sum().backward()
        optimizer.step()
        book.poll()
    assert book.complete and book.known[model[0].k._ampplug.x_slot]


def test_nothing_outlives_its_input():
    model, _ = make()
    bank = model[0].q._ampplug.bank
    x = torch.randn(5, 48)
    y = model[0].q(x)
    assert bank.shared is not None
    del x
    gc.collect()
    assert bank.shared is None
    x = torch.randn(5, 48)
    model[0].q(x).sum().backward()
    assert bank.shared is None and y is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_shares_alike(reentrant: bool):
    """The first pass of reentrant checkpointing runs without gradients, and must see the scales that the second sees."""
    from torch.utils.checkpoint import checkpoint

    runs = []
    for recompute in (False, True):
        model, optimizer = make()

        def forward(x, model=model, recompute=recompute):
            for block in model:
                x = checkpoint(block, x, use_reentrant=reentrant) if recompute else block(x)
            return x

        runs.append(train(forward, optimizer, parameters=list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
