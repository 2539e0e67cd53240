"""Layers that are given the same tensor cast it once, and nothing else changes."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import ampplug
from ampplug.nn import linear_function as linear
from ampplug.siblings import find_siblings

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


class Hinted(Siblings):
    """The same, but whoever reads `forward` sees who gets the same input."""

    def forward(self, x):
        return self.o(self.q(x) * torch.cat([self.k(x), self.v(x)], -1)) + x


def make(apart: bool = False, kind: type = Siblings, **settings):
    model = nn.Sequential(kind(apart), kind(apart))
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
    """expect: apart, found as they run and found by their calls are the same bit for bit."""
    runs = [train(*make(*how, recipe=recipe)) for how in ((True,), (False,), (False, Hinted))]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*runs, strict=True))


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


@pytest.mark.parametrize("grad", [True, False])
def test_a_new_pass_over_the_same_tensor_casts_anew(grad: bool, casts):
    """A buffer filled behind autograd's back has its old version. expect: no layer takes a cast of what was in it before."""
    model, _ = make()
    block = model[0]
    x = torch.randn(5, 48)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            wanted = [layer(x.clone()) for layer in (block.q, block.k, block.v)]
            casts.clear()
            found = [layer(x) for layer in (block.q, block.k, block.v)]
            assert len(casts) == 1 and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
            x.data.mul_(-3.0)
    assert x._version == 0


def test_a_frozen_sibling_first(casts):
    """It needs no transpose for its weight gradient; the next one does, and casts."""
    model, _ = make()
    block = model[0]
    block.q.weight.requires_grad_(False)
    x = torch.randn(5, 48, requires_grad=True)
    (block.q(x).sum() + block.k(x).sum() + block.v(x).sum()).backward()
    assert casts.count((5, 48)) == 2
    assert block.q.weight.grad is None and block.k.weight.grad.abs().sum() > 0 and block.v.weight.grad.abs().sum() > 0


def test_identity_shares_the_slot():
    """Seen once with the same tensor, they have one scale, and a capture does not wait for the idle slots."""
    model, optimizer = make()
    block, book = model[0], model[0].q._ampplug.book
    assert block.k._ampplug.x_slot != block.q._ampplug.x_slot  # their calls are not told apart from others in the source
    train(model, optimizer, 2)
    book.poll()
    assert block.k._ampplug.x_slot == block.v._ampplug.x_slot == block.q._ampplug.x_slot != block.o._ampplug.x_slot
    assert book.complete and not book.known[block.k._ampplug.own_slot]
    x = torch.randn(5, 48)
    block.k(x * 100).sum().backward()  # apart again: the larger input counts
    assert book.amax[block.q._ampplug.x_slot] == (x * 100).abs().max()


@pytest.mark.parametrize("hinted", [True, False])
@pytest.mark.parametrize("trip", ["deepcopy", "pickle"])
def test_copies_compute_the_same(trip: str, hinted: bool):
    model, optimizer = make(kind=Hinted if hinted else Siblings)
    train(model, optimizer)
    other = copy.deepcopy(model) if trip == "deepcopy" else pickle.loads(pickle.dumps(model))
    x = torch.randn(5, 48) / 50  # far below the window's largest: an input scaled by itself would show
    results = []
    for m in (model, other):
        m.zero_grad()
        y = m(x)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in m.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert other[0].k._ampplug.book is not model[0].k._ampplug.book and other[0].k._ampplug.x_key is other[0].q._ampplug.x_key
    assert torch.equal(copy.deepcopy(model[0].k)(x), model[0].k(x))  # a follower alone, too


@pytest.mark.parametrize("before", [False, True])
def test_checkpoints_between_groupings(before: bool):
    """One run found siblings by their calls, the other only as they ran, or not yet: each layer finds the scale of its input."""
    model, optimizer = make(kind=Siblings if before else Hinted)
    train(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    book = saved[1]["ampplug"]["book"]
    shared = [book["slots"].index(name) for name in ("0.q.x", "0.k.x", "0.v.x")]
    assert book["scale"][shared].unique().numel() == 1 and book["scale"].all() and book["history"][shared].any(dim=1).all()
    again, again_optimizer = make(kind=Hinted if before else Siblings)
    again.load_state_dict(saved[0])
    again_optimizer.load_state_dict(saved[1])
    runs = [train(*pair, 2) for pair in ((model, optimizer), (again, again_optimizer))]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_of_different_scales_the_larger_input_decides():
    """A checkpoint in which siblings of today had a slot each."""
    model, optimizer = make(kind=Hinted)
    train(model, optimizer)
    saved = optimizer.state_dict()
    book, row = saved["ampplug"]["book"], saved["ampplug"]["book"]["slots"].index
    book["scale"][row("0.q.x")], book["scale"][row("0.k.x")], book["scale"][row("0.v.x")] = 0.0, 3.0, 5.0  # 0: never cast by itself
    optimizer.load_state_dict(saved)
    state = model[0].v._ampplug
    assert state.book.scale[state.x_slot] == 3.0


class Shapes(nn.Module):
    """What the source tells of who gets the same input, and what it must not be taken to tell."""

    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "one", "two", "late", "cross", "chain", "again", "helped", "before", "loop", "after"):
            setattr(self, name, nn.Linear(32, 32))
        self.narrow = nn.Linear(16, 32)
        self.inner = nn.ModuleDict({"up": nn.Linear(32, 32)})

    def helper(self, h):
        return self.helped(h) + self.cross(input=h)

    def forward(self, x, context=None, cut=False):
        q, k = self.q(x), self.k(x).relu()
        v = self.v(x if not cut else x)
        h = self.chain(self.inner.up(x))
        x = self.one(q) + self.two(q)
        if cut:
            return self.narrow(x[:, :16])
        x = self.again(x)
        b = self.before(h)
        for _ in range(2):
            h = h + self.loop(h)
        return self.late(x) + self.helper(h) + k + v + self.after(h) + b


def test_what_the_source_tells():
    model = Shapes()
    names = {id(m): n for n, m in model.named_modules()}
    widths = {id(m): m.in_features for m in model.modules() if isinstance(m, nn.Linear)}
    found = [[names[id(m)] for m in group] for group in find_siblings(model, widths)]
    assert found == [["q", "k", "inner.up"], ["one", "two"], ["helped", "cross"]]
    del widths[id(model.q)], widths[id(model.one)]
    assert [[names[id(m)] for m in group] for group in find_siblings(model, widths)] == [["k", "inner.up"], ["helped", "cross"]]


def test_without_source_there_is_no_hint():
    namespace: dict = {}
    exec("def forward(self, x):\n    return self.a(x) + self.b(x)", namespace)
    model = type("Made", (nn.Module,), {"forward": namespace["forward"]})()
    model.a, model.b = nn.Linear(32, 32), nn.Linear(32, 32)
    assert list(find_siblings(model, {id(model.a): 32, id(model.b): 32})) == []


def test_layers_wrongly_taken_for_siblings_train_alike():
    """Sharing a scale with an input a hundred times larger costs nothing that matters: FP8 has exponents of its own."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(48, 48), nn.Linear(48, 48)

        def forward(self, x):
            small, outputs = x, []
            for layer in ("a", "b"):  # which the source does not show
                outputs.append(getattr(self, layer)(small))
                small = small * 0.01
            return torch.cat(outputs, -1)

    exact = Two()
    x = torch.randn(64, 48)
    model, _ = ampplug.initialize(copy.deepcopy(exact), None, "O1", select="all")
    model.b._ampplug.join(model.a._ampplug.x_slot)
    for _ in range(2):  # the second with the scale of the first
        y, wanted = model(x), exact(x)
        model.a._ampplug.book.update(model.a._ampplug.bank)
    for a, b in zip(y.chunk(2, -1), wanted.chunk(2, -1), strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


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
