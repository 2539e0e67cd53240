"""torch.compile of a converted model: no graph break, no recompilation, the same numbers as eager."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import ampplug


class Block(nn.Module):
    """Shapes that need padding, a bias and none, a residual, two users of one input."""

    def __init__(self, width: int = 40, hidden: int = 72):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(torch.relu(self.gate(h)) * self.up(h))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def make(level: str = "O2", layers: int = 2, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(layers)], nn.Linear(40, 17))
    return ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, select="all", **settings)


def train(model, optimizer, forward, steps: int = 4, autocast: bool = False) -> list[torch.Tensor]:
    """Everything a training run shows, with a changing lr and a jumping range; evaluation at the end."""
    seen = []
    for t in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 / (t + 1)
        x = (torch.randn(3, 7, 40, generator=torch.Generator().manual_seed(t)) * 10.0 ** (t % 3)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = forward(x)
        y.float().square().mean().backward()
        seen += [y.detach().clone(), x.grad.clone(), *[p.grad.clone() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        seen.append(forward(x).clone())
    model.train()
    book = model[0].up._ampplug.book
    if book is not None:
        seen.append(book.history.clone())
    return [*seen, *[p.detach().clone() for p in model.parameters()]]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_equals_eager(level: str, recipe: str, autocast: bool):
    runs = []
    for compiled in (False, True):
        model, optimizer = make(level, recipe=recipe)
        forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        runs.append(train(model, optimizer, forward, autocast=autocast))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]  # training and evaluation; nothing was compiled again


def test_inductor_trains_alike():
    """The compiler's own kernels round elementwise work differently; what FP8 makes of it stays close."""
    runs = []
    for compiled in (False, True):
        model, optimizer = make()
        runs.append(train(model, optimizer, torch.compile(model, fullgraph=True) if compiled else model))
    for a, b in zip(*runs, strict=True):
        assert (a.float() - b.float()).norm() <= 0.05 * a.float().norm() + 1e-6


def test_blocks_share_a_graph():
    """Compiled one by one, blocks of the same shapes need no graph of their own: nothing in a layer is a constant of it."""
    model, optimizer = make(layers=6)
    for block in model[:6]:
        block.compile(fullgraph=True, backend="aot_eager")
    train(model, optimizer, model, steps=2)
    assert counters["stats"]["unique_graphs"] <= 3  # with and without a gradient for the input, and evaluation


def test_weights_written_to_are_seen():
    """What the operator runs is ordinary Python: it looks whether W8 is of this weight as it is."""
    model, _ = make()
    forward = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 40)
    before = forward(x)
    other = copy.deepcopy(model.state_dict())
    for key in other:
        other[key] = other[key] * 2
    model.load_state_dict(other)
    assert torch.equal(forward(x), model(x)) and not torch.equal(forward(x), before)


def test_checkpointing_inside_records_once():
    """Recomputation casts again with the same scale, and the record is a maximum."""
    from torch.utils.checkpoint import checkpoint

    runs = []
    for compiled in (False, True):
        model, optimizer = make()

        def forward(x, model=model):
            for block in model[:2]:
                x = checkpoint(block, x, use_reentrant=False)
            return model[2](x)

        runs.append(train(model, optimizer, torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_updates_between_forward_and_backward(level: str):
    """Weights that are refreshed, and scales that are updated, between graphs compiled apart are no fault to autograd."""
    model, optimizer = make(level, layers=3)
    for block in model:
        block.compile(fullgraph=True, backend="aot_eager")
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})  # all stale: each block refreshes its own
    x = torch.randn(5, 40, requires_grad=True)
    model(x).sum().backward()
    first = model[0](x)
    model[2](x.detach()).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()  # its own weight was stepped: that is a fault
    model(x).sum().backward()


def test_models_come_and_go():
    """The tables by which operators find scales and weights forget a model with it, and never mix two up."""
    import gc

    from ampplug import scaling, storage

    gc.collect()
    before = len(scaling._books), len(storage._banks)
    x = torch.randn(5, 40)
    for seed in range(4):
        torch.manual_seed(seed)
        pair = [make(layers=1)[0] for _ in range(2)]
        with torch.no_grad():
            for p in pair[1].parameters():
                p.mul_(2.0)
        for model in pair:
            assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
        del pair, model, p
        torch._dynamo.reset()
        gc.collect()
    assert (len(scaling._books), len(storage._banks)) == before


def test_what_operators_do_not_take_breaks_the_graph_and_works():
    model, _ = make(layers=1)
    forward = torch.compile(model, backend="aot_eager")
    x = torch.randn(5, 40, dtype=torch.float64)
    with torch.no_grad():
        linear = torch.compile(model[1], backend="aot_eager")
        assert torch.equal(linear(x), model[1](x))
        assert forward(torch.randn(0, 40)).shape == (0, 17)


def test_fake_kernels_agree():
    """Shapes, dtypes and strides that the compiler is told are those that come."""
    from torch._subclasses import FakeTensorMode

    model, _ = make(layers=1)
    layer = model[0].up
    state = layer._ampplug
    ops = torch.ops.ampplug

    def agree(op, *arguments):
        real = op(*arguments)
        with FakeTensorMode() as mode:
            fake = op(*[mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments])
        pairs = [(real, fake)] if isinstance(real, torch.Tensor) else list(zip(real, fake, strict=True))
        for a, b in pairs:
            assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
        return real

    forward(layer)  # so that the operators are there
    x, g = torch.randn(7, 40), torch.randn(7, 72)
    for rows, transpose in ((True, True), (True, False), (False, True)):
        q, qt, inverse = agree(ops.cast, x, state.x_key, False, rows, transpose, False, False)
        dq, dqt, dinverse = agree(ops.cast, g, state.dy_key, True, rows, transpose, True, False)
        if rows:
            for backward, left, scale in ((False, q, inverse), (True, dq, dinverse)):
                agree(ops.weight_matmul, left, scale, layer.weight.detach(), state.key, False, backward, True, torch.bfloat16)
        if transpose:
            agree(ops.matmul, dqt, qt, dinverse, inverse, torch.bfloat16)


def forward(layer: nn.Module) -> torch.Tensor:
    return torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(3, layer.in_features))
