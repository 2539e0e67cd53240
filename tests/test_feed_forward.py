"""Feed-forward blocks that run as one: found by what they compute, close to their layers one by one, and the same eager, compiled, copied, resumed."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampplug
from ampplug.nn import swiglu

pytestmark = pytest.mark.filterwarnings("ignore:ampplug")


class Plain(nn.Module):
    """The layers in an order of their own, the activation a function."""

    def __init__(self, width: int = 40, hidden: int = 64):
        super().__init__()
        self.last, self.one, self.two = nn.Linear(hidden, width, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.last(F.silu(self.two(x)) * self.one(x))


class Gelu(Plain):
    def forward(self, x):
        return self.last(F.gelu(self.two(x)) * self.one(x))


class WithDropout(Plain):
    """Not SwiGLU alone: dropout acts in training, and is tried out in evaluation."""

    def forward(self, x):
        return self.last(self.dropout(F.silu(self.two(x)) * self.one(x)))


class TwoInputs(Plain):
    def forward(self, x, y):
        return self.last(F.silu(self.two(x)) * self.one(y))


class Swapped(Plain):
    def forward(self, x):
        return self.last(self.two(x) * F.silu(self.one(x)))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Plain, n: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block() for _ in range(n)])
        self.norm = nn.LayerNorm(40)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(self.norm(x))
        return x


def make(block: type[nn.Module] = Plain, level: str = "O2", **settings):
    model = Model(block)
    return ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, select="all", **{"fuse": True, **settings})


def train(model, optimizer, forward=None, steps: int = 4, first: int = 0, autocast: bool = False) -> list[torch.Tensor]:
    forward = model if forward is None else forward
    seen = []
    for t in range(first, first + steps):
        x = (torch.randn(3, 7, 40, generator=torch.Generator().manual_seed(t)) * 10.0 ** (t % 3)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = forward(x)
        y.float().square().mean().backward()
        seen += [y.detach().clone(), x.grad.clone(), *[p.grad.clone() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *[p.detach().clone() for p in model.parameters()]]


def test_blocks_are_found_by_what_they_compute():
    for block, names in ((Plain, ("two", "one", "last")), (Swapped, ("one", "two", "last"))):
        model = Model(block)
        assert ampplug.plan(model, select="all", fuse=True).blocks == {f"blocks.{i}": names for i in range(2)}
        assert all(b.training and not hasattr(b, "_ampplug_swiglu") for b in model.blocks)  # only tried out
    for block in (Gelu, TwoInputs):
        assert not ampplug.plan(Model(block), select="all", fuse=True).blocks
    assert not ampplug.plan(Model(), select=["*.one", "*.two"], fuse=True).blocks  # all three must convert
    assert not ampplug.plan(Model(), select="all").blocks  # on request only
    with torch.device("meta"):
        assert not ampplug.plan(Model(), select="all", fuse=True).blocks
    text = str(ampplug.plan(Model(), select="all", fuse=True))
    assert text.count("one with SwiGLU") == 6


def test_what_acts_in_training_only_is_not_taken_for_it():
    """Dropout between the layers would be left out: it must be noticed though evaluation has none."""
    assert not ampplug.plan(Model(WithDropout), select="all", fuse=True).blocks


def test_huggingface_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    blocks = ampplug.plan(transformers.LlamaForCausalLM(config), select="all", fuse=True).blocks
    assert blocks == {f"model.layers.{i}.mlp": ("gate_proj", "up_proj", "down_proj") for i in range(2)}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_close_to_layer_by_layer(level: str, recipe: str):
    runs = [train(*make(level=level, recipe=recipe, fuse=fuse)) for fuse in (True, False)]
    reference = Model()
    exact = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), steps=1)
    shown = 2 + len(list(reference.parameters()))  # of the first step
    for a, b, c in zip(runs[0][:shown], runs[1][:shown], exact[:shown], strict=True):
        difference, size = (a.float() - b.float()).norm(), b.float().norm()
        assert difference <= 0.08 * size
        assert (a.float() - c.float()).norm() <= 1.1 * (b.float() - c.float()).norm() + 0.02 * size  # no further from fp32 than they are
    for a, b in zip(runs[0][-6:], runs[1][-6:], strict=True):  # the weights
        assert (a.float() - b.float()).norm() <= 0.05 * b.float().norm()


def test_runs_as_one():
    """Neither the layers' own forward nor the block's runs; scales and records are those of the layers' slots."""
    model, optimizer = make()
    calls = []
    handles = [m.register_forward_hook(lambda *_: calls.append(1)) for m in (model.norm,)]
    train(model, optimizer, steps=2)
    block = model.blocks[0]
    assert block.calls == 2  # tried out, by initialize
    assert isinstance(block, Plain) and type(block).__name__ == "Plain" and len(calls) == 4 and handles
    book = block.one._ampplug.book
    recorded = {name for name, h in zip(book.names, book.history, strict=True) if h.any()}
    assert recorded == {f"blocks.{i}.{slot}" for i in range(2) for slot in ("two.x", "last.x", "two.dy", "one.dy", "last.dy")}
    book.poll()
    assert book.complete


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_compiled_equals_eager(recipe: str, autocast: bool):
    torch._dynamo.reset()
    runs = []
    for compiled in (False, True):
        model, optimizer = make(recipe=recipe)
        for block in model.blocks:
            del block.calls  # counting calls is nothing for a compiler
        forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else None
        runs.append(train(model, optimizer, forward, autocast=autocast))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_frozen_parts():
    model, _ = make()
    block = model.blocks[0]
    reference = copy.deepcopy(block)
    for frozen in ("one", "two", "last"):
        for p in block.parameters():
            p.grad = None
            p.requires_grad_(True)
        getattr(block, frozen).weight.requires_grad_(False)
        x = torch.randn(5, 40)  # no gradient for the input either
        block(x).square().sum().backward()
        reference.zero_grad()
        reference(x).square().sum().backward()
        for (name, p), q in zip(block.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (name == f"{frozen}.weight")
            assert p.grad is None or torch.allclose(p.grad.float(), q.grad.float(), rtol=0.1, atol=1e-2 * q.grad.float().abs().max())


def test_hooks_and_changes_fall_back_to_the_blocks_own_forward():
    model, _ = make()
    block = model.blocks[0]
    x = torch.randn(5, 40)
    before, calls = block(x), block.calls
    handle = block.one.register_forward_hook(lambda module, args, y: y * 2)
    assert torch.allclose(block(x), before * 2, rtol=0.1, atol=0.05) and block.calls == calls + 1
    handle.remove()
    block(x)
    assert block.calls == calls + 1
    block.two = nn.Sequential(block.two)  # as an adapter would wrap it
    assert torch.allclose(block(x), before, rtol=0.1, atol=0.05) and block.calls == calls + 2
    assert block(torch.zeros(0, 40)).shape == (0, 40)


def test_evaluation_leaves_no_trace_and_sees_the_weights():
    model, optimizer = make()
    train(model, optimizer, steps=2)
    book = model.blocks[0].one._ampplug.book
    before = [t.clone() for t in (book.amax, book.scale, book.history)]
    model.eval()
    x = torch.randn(5, 40) * 100
    with torch.no_grad():
        y = model(x)
        model.blocks[0].last.weight.data.mul_(-1.0)
        assert not torch.equal(model(x), y)
    assert all(torch.equal(a, b) for a, b in zip(before, (book.amax, book.scale, book.history), strict=True))


def test_copies_and_pickles():
    model, optimizer = make()
    train(model, optimizer, steps=2)
    x = torch.randn(5, 40)
    wanted = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), wanted)
        assert type(other.blocks[0]) is type(model.blocks[0]) and other.blocks[0].one is not model.blocks[0].one
        calls = other.blocks[0].calls
        other(x).sum().backward()
        assert other.blocks[0].calls == calls and other.blocks[0].one.weight.grad is not None and model.blocks[0].one.weight.grad is None
    assert list(model.state_dict()) == list(Model().state_dict())


def test_resume_is_exact():
    model, optimizer = make()
    train(model, optimizer, steps=3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    on = train(model, optimizer, steps=3, first=3)
    other, other_optimizer = make()
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    assert all(torch.equal(a, b) for a, b in zip(on, train(other, other_optimizer, steps=3, first=3), strict=True))


def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    runs = []
    for recompute in (False, True):
        model, optimizer = make()

        def forward(x, model=model, recompute=recompute):
            for block in model.blocks:
                x = x + (checkpoint(block, model.norm(x), use_reentrant=False) if recompute else block(model.norm(x)))
            return x

        runs.append(train(model, optimizer, forward))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_finding_leaves_randomness_alone():
    torch.manual_seed(3)
    wanted = torch.rand(1)
    model = Model(WithDropout)
    torch.manual_seed(3)
    swiglu.find_blocks(model, {id(m) for m in model.modules()})
    assert torch.equal(torch.rand(1), wanted)


def test_what_the_last_layer_read_is_not_kept():
    """Saved for backward: the input in FP8, and gate's and up's outputs. expect: of their product, nothing, unless backward does not come to it."""
    model, _ = make()
    block = model.blocks[0]

    def kept() -> int:
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
            block(torch.randn(16, 40)).sum().backward()
        return sum(t.numel() for t in saved if t.dtype == torch.float8_e4m3fn)

    assert kept() == 48 * 16  # 40 columns, padded
    block.one.weight.requires_grad_(False)
    block.two.weight.requires_grad_(False)
    assert kept() == 64 * 16
    assert block.last.weight.grad.abs().sum() > 0
