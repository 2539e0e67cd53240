"""Feed-forward blocks that run as one: proved to be such, close to their layers one by one, and the same eager, compiled, copied, resumed."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampplug
from ampplug.nn import fused as fused_module
from ampplug.nn import swiglu

pytestmark = pytest.mark.filterwarnings("ignore:ampplug")


class Plain(nn.Module):
    """The layers in an order of their own, the activation a function."""

    def __init__(self, width: int = 40, hidden: int = 64):
        super().__init__()
        self.last, self.one, self.two = nn.Linear(hidden, width, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.dropout, self.act, self.factor = nn.Dropout(0.5), nn.SiLU(), 1.0

    def forward(self, x):
        return self.last(F.silu(self.two(x)) * self.one(x))


class Swapped(Plain):
    def forward(self, hidden_states):
        up, gate = self.two(hidden_states), self.one(hidden_states)
        return self.last(up * nn.functional.silu(gate))


class Activation(Plain):
    def forward(self, x):
        return self.last(self.act(self.two(x)) * self.one(x))


def wrong(forward, **methods):
    """A block with another forward."""
    return type("Wrong", (Plain,), {"forward": forward, **methods})


def _dropout(self, x):
    return self.last(self.dropout(F.silu(self.two(x)) * self.one(x)))


def _two_inputs(self, x, y):
    return self.last(F.silu(self.two(x)) * self.one(y))


def _branch(self, x):
    return self.last(F.silu(self.two(x)) * self.one(x) if self.training else F.silu(self.two(x)))


def _random(self, x):
    if random.random() < 1e-9:
        x = x * 2
    return self.last(F.silu(self.two(x)) * self.one(x))


def _index(self, x):
    return [self.last(F.silu(self.two(x)) * self.one(x)), x][self.training]


def _in_place(self, x):
    gate = self.two(x)
    y = F.silu(gate)
    y *= self.one(x)
    return self.last(y)


def _counting(self, x):
    self.calls = 1
    return self.last(F.silu(self.two(x)) * self.one(x))


def _printing(self, x):
    print(end="")
    return self.last(F.silu(self.two(x)) * self.one(x))


def _trying(self, x):
    try:
        return self.last(F.silu(self.two(x)) * self.one(x))
    except RuntimeError:
        return x


def _twice(self, x):
    gate = self.two(x)
    F.silu(gate, inplace=True)
    return self.last(F.silu(gate) * self.one(x))


def _wrapped(function):
    @functools.wraps(function)
    def forward(*args, **kwargs):
        return function(*args, **kwargs)

    return forward


OTHER = {
    "gelu": wrong(lambda self, x: self.last(F.gelu(self.two(x)) * self.one(x))),
    "no activation": wrong(lambda self, x: self.last(self.two(x) * self.one(x))),
    "both activated": wrong(lambda self, x: self.last(F.silu(self.two(x)) * F.silu(self.one(x)))),
    "one layer twice": wrong(lambda self, x: self.last(F.silu(self.two(x)) * self.two(x))),
    "layers in turn": wrong(lambda self, x: self.last(F.silu(self.two(x)) * self.one(self.last(self.two(x))))),
    "clamp": wrong(lambda self, x: self.last(F.silu(self.two(x)).clamp(max=1e9) * self.one(x))),
    "times a factor": wrong(lambda self, x: self.last(F.silu(self.two(x)) * self.one(x)) * self.factor),
    "times one": wrong(lambda self, x: self.last(F.silu(self.two(x)) * self.one(x)) * 1.0),
    "detached": wrong(lambda self, x: self.last(F.silu(self.two(x)) * self.one(x.detach()))),
    "float": wrong(lambda self, x: self.last(F.silu(self.two(x)) * self.one(x)).float()),
    "3-D": wrong(lambda self, x: self.last(F.silu(self.two(x)) * self.one(x.flatten(0, -2)))),
    "grad mode": wrong(lambda self, x: self.last(F.silu(self.two(x)) * self.one(x)) * torch.is_grad_enabled()),
    "dropout": wrong(_dropout), "two inputs": wrong(_two_inputs), "branch": wrong(_branch), "random": wrong(_random), "index": wrong(_index),
    "in place": wrong(_in_place), "counting": wrong(_counting), "printing": wrong(_printing), "trying": wrong(_trying), "twice": wrong(_twice),
    "a closure": wrong(_wrapped(Plain.forward)),
    "default argument": wrong(lambda self, x=None: self.last(F.silu(self.two(x)) * self.one(x))),
    "more arguments": wrong(lambda self, x, *more: self.last(F.silu(self.two(x)) * self.one(x))),
    "own call": wrong(Plain.forward, __call__=lambda self, x: x),
    "own attributes": wrong(Plain.forward, __getattr__=lambda self, name: nn.Module.__getattr__(self, name)),
    "property for a layer": wrong(Plain.forward, one=property(lambda self: self.two)),
    "own copies": wrong(Plain.forward, __deepcopy__=lambda self, memo: self),
}  # fmt: skip


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
    return ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, select="all", **settings)


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


@pytest.fixture
def fused(monkeypatch):
    """One entry for every call that ran as one."""
    calls = []
    real = swiglu.fp8_swiglu
    monkeypatch.setattr(swiglu, "fp8_swiglu", lambda *a: calls.append(1) or real(*a))
    return calls


def test_blocks_are_found():
    for block, names in ((Plain, ("two", "one", "last", None)), (Swapped, ("one", "two", "last", None)), (Activation, ("two", "one", "last", "act"))):
        assert ampplug.plan(Model(block), select="all").blocks == {f"blocks.{i}": names for i in range(2)}
    assert not ampplug.plan(Model(), select=["*.one", "*.two"]).blocks  # all three must convert
    assert not ampplug.plan(Model(), select="all", fuse=False).blocks
    with torch.device("meta"):
        assert len(ampplug.plan(Model(), select="all").blocks) == 2  # nothing runs
    assert str(ampplug.plan(Model(), select="all")).count("one with SwiGLU") == 6


@pytest.mark.parametrize("name", list(OTHER))
def test_what_does_more_or_less_is_none(name: str):
    assert not ampplug.plan(Model(OTHER[name]), select="all").blocks


def test_objects_that_differ_from_their_class_are_none():
    model = Model(Activation)
    a, b = model.blocks
    a.forward = lambda x: x
    b.act = nn.GELU()
    assert not ampplug.plan(model, select="all").blocks
    model = Model(Activation)
    a, b = model.blocks
    a.act.forward = lambda x: x
    b.one.register_forward_pre_hook(lambda *_: None)
    assert not ampplug.plan(model, select="all").blocks
    model = Model()
    a, b = model.blocks
    a.one = a.two
    torch.nn.utils.parametrizations.weight_norm(b.one)
    assert not ampplug.plan(model, select="all").blocks


def test_huggingface():
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=64, intermediate_size=96)
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma"):
        module = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
        block = getattr(module, f"{family}MLP")(getattr(transformers, f"{family}Config")(**sizes))
        found = ampplug.plan(nn.Sequential(block), select="all").blocks
        assert found == ({} if family == "Gemma" else {"0": ("gate_proj", "up_proj", "down_proj", "act_fn")}), family  # Gemma has gelu
    biased = transformers.LlamaConfig(**sizes, mlp_bias=True)
    from transformers.models.llama.modeling_llama import LlamaMLP

    assert not ampplug.plan(nn.Sequential(LlamaMLP(biased)), select="all").blocks


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_close_to_layer_by_layer(level: str, recipe: str, fused):
    runs = [train(*make(level=level, recipe=recipe, fuse=fuse)) for fuse in (True, False)]
    assert len(fused) == 8
    reference = Model()
    exact = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), steps=1)
    shown = 2 + len(list(reference.parameters()))  # of the first step
    for a, b, c in zip(runs[0][:shown], runs[1][:shown], exact[:shown], strict=True):
        difference, size = (a.float() - b.float()).norm(), b.float().norm()
        assert difference <= 0.08 * size
        assert (a.float() - c.float()).norm() <= 1.1 * (b.float() - c.float()).norm() + 0.02 * size  # no further from fp32 than they are
    for a, b in zip(runs[0][-6:], runs[1][-6:], strict=True):  # the weights
        assert (a.float() - b.float()).norm() <= 0.05 * b.float().norm()


def test_runs_as_one(fused):
    """Scales and records are those of the layers' slots."""
    model, optimizer = make()
    train(model, optimizer, steps=2)
    block = model.blocks[0]
    assert len(fused) == 4
    assert isinstance(block, Plain) and type(block).__name__ == "Plain" and "_ampplug_names" not in vars(block)
    book = block.one._ampplug.book
    recorded = {name for name, h in zip(book.names, book.history, strict=True) if h.any()}
    assert recorded == {f"blocks.{i}.{slot}" for i in range(2) for slot in ("two.x", "last.x", "two.dy", "one.dy", "last.dy")}
    book.poll()
    assert book.complete


def test_the_arguments_own_name(fused):
    for block, name in ((Plain, "x"), (Swapped, "hidden_states")):
        model, _ = make(block)
        x = torch.randn(5, 40)
        assert torch.equal(model.blocks[0](x), model.blocks[0](**{name: x}))
        for arguments in ((), (x, x)):
            with pytest.raises(TypeError, match="forward"):
                model.blocks[0](*arguments)
        with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
            model.blocks[0](y=x)
    assert len(fused) == 4


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_compiled_equals_eager(recipe: str, autocast: bool):
    torch._dynamo.reset()
    runs = []
    for compiled in (False, True):
        model, optimizer = make(recipe=recipe)
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


def _changes():
    """Name -> (what changes a block, what changes it back)."""
    double = lambda module, args, y: y * 2  # noqa: E731
    handles: list = []

    def hook(register):
        return lambda b: handles.append(register(b)), lambda b: handles.pop().remove()

    def attribute(owner, name, value):
        return lambda b: setattr(owner(b), name, value(b)), lambda b: delattr(owner(b), name)

    def child(name, value):
        kept: list = []
        return lambda b: (kept.append(getattr(b, name)), setattr(b, name, value(b))), lambda b: setattr(b, name, kept.pop())

    everywhere = nn.modules.module
    own = Activation.forward
    return {
        "forward hook": hook(lambda b: b.one.register_forward_hook(double)),
        "pre-hook": hook(lambda b: b.last.register_forward_pre_hook(lambda m, args: (args[0] * 2,))),
        "hook on the activation": hook(lambda b: b.act.register_forward_hook(double)),
        "backward hook": hook(lambda b: b.two.register_full_backward_hook(lambda m, i, o: None)),
        "backward pre-hook": hook(lambda b: b.two.register_full_backward_pre_hook(lambda m, o: None)),
        "global hook": hook(lambda b: everywhere.register_module_forward_hook(lambda m, a, y: y * 2 if m is b.one else None)),
        "global backward hook": hook(lambda b: everywhere.register_module_full_backward_hook(lambda m, i, o: None)),
        "adapter": child("two", lambda b: nn.Sequential(b.two)),
        "another activation": child("act", lambda b: nn.Tanh()),
        "forward of a layer": attribute(lambda b: b.one, "forward", lambda b: lambda x: nn.functional.linear(x, b.one.weight.float()) * 2),
        "forward of the activation": attribute(lambda b: b.act, "forward", lambda b: torch.tanh),
        "forward of the block": attribute(lambda b: b, "forward", lambda b: lambda x: b.last(torch.tanh(b.two(x)) * b.one(x))),
        "forward of the class": (lambda b: setattr(Activation, "forward", lambda s, x: own(s, x) * 2), lambda b: setattr(Activation, "forward", own)),
        "bias": (lambda b: setattr(b.one, "bias", nn.Parameter(torch.ones(64))), lambda b: setattr(b.one, "bias", None)),
    }


@pytest.mark.parametrize("name", list(_changes()))
def test_changes_are_respected_at_the_next_call(name: str, fused):
    """expect: the block's own forward, and as one again when the change is gone."""
    model, _ = make(Activation)
    block = model.blocks[0]
    x = torch.randn(5, 40)
    y = block(x)
    change, back = _changes()[name]
    change(block)
    try:
        changed = block(x)
        assert len(fused) == 1
        harmless = name in ("backward hook", "backward pre-hook", "global backward hook", "adapter")
        assert torch.allclose(changed, y, rtol=0.1, atol=0.05) == harmless
    finally:
        back(block)
    assert torch.equal(block(x), y) and len(fused) == 2
    assert block(torch.zeros(0, 40)).shape == (0, 40)


def test_parametrized_weight(fused):
    model, _ = make()
    block = model.blocks[0]
    y = block(torch.ones(5, 40))
    torch.nn.utils.parametrize.register_parametrization(block.one, "weight", nn.Tanh())
    assert not torch.allclose(block(torch.ones(5, 40)), y, rtol=1e-3) and len(fused) == 1


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


def test_copies_and_pickles(fused):
    model, optimizer = make(Activation)
    train(model, optimizer, steps=2)
    x = torch.randn(5, 40)
    wanted = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    handle = model.blocks[0].one.register_forward_pre_hook(lambda *_: None)
    copied = copy.deepcopy(model)  # while something else kept it from running as one
    for layer in (model.blocks[0].one, copied.blocks[0].one):
        layer._forward_pre_hooks.clear()
    for other in (copied, pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        fused.clear()
        assert torch.equal(other(x), wanted) and len(fused) == 2
        assert type(other.blocks[0]) is type(model.blocks[0]) and other.blocks[0].one is not model.blocks[0].one
        other(x).sum().backward()
        assert other.blocks[0].one.weight.grad is not None and model.blocks[0].one.weight.grad is None
    assert list(model.state_dict()) == list(Model().state_dict()) and handle


class Stateful(Plain):
    """With a state of its own, and a say in its subclasses."""

    subclasses = 0

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Stateful.subclasses += 1

    def __getstate__(self):
        return {**self.__dict__, "note": "kept"}


def test_a_class_keeps_its_own_ways():
    model, _ = make(Stateful)
    x = torch.randn(5, 40)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model.blocks[0])):
        block = other.blocks[0] if isinstance(other, Model) else other
        assert block.note == "kept" and torch.equal(block(x), model.blocks[0](x)) and type(block) is type(model.blocks[0])
    assert Stateful.subclasses == 0


def test_a_pickle_is_proved_anew(monkeypatch, fused):
    """The class may compute something else where a pickle is read."""
    model, _ = make(Activation)
    stored = pickle.dumps(model)
    monkeypatch.setattr(Activation, "forward", Plain.forward)
    fused_module.classes.clear()
    monkeypatch.setattr(Activation, "forward", lambda self, x: self.last(F.silu(self.two(x)) + self.one(x)))
    other = pickle.loads(stored)
    assert type(other.blocks[0]) is Activation and other(torch.randn(5, 40)).shape == (5, 40) and not fused


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
