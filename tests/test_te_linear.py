"""nn.Linear turned into Transformer Engine's Linear, on a double of its Python part (tests/te_double); the real one: tests/gpu/test_transformer_engine_linear.py."""

from __future__ import annotations

import copy
import inspect
import io
import re

import pytest
import torch
import torch.utils.checkpoint
from test_te import adamw, te  # noqa: F401
from torch import nn

import ampplug
from ampplug.auditing import bytes_per_parameter
from ampplug.convert import restore_layers
from ampplug.nn import te_fed, te_linear


@pytest.fixture(autouse=True)
def forget():
    yield
    te_linear._recipe.cache_clear()


@pytest.fixture
def entered(te, monkeypatch):  # noqa: F811
    """The recipes of each autocast that was entered."""
    import transformer_engine.pytorch as package

    seen = []

    class counted(te.autocast):
        def __enter__(self):
            seen.append(self.now[1])
            super().__enter__()

    monkeypatch.setattr(package, "autocast", counted)
    for name in ("DelayedScaling", "Float8CurrentScaling", "Format"):  # the real ones take settings
        cls = getattr(te.recipe, name, object)
        monkeypatch.setattr(te.recipe, name, type(name, (cls,), {"HYBRID": "HYBRID", "__init__": lambda self, **settings: vars(self).update(settings)}), raising=False)  # fmt: skip
    return seen


def start(te, model, level="O2", **settings):  # noqa: F811
    model, optimizer = ampplug.initialize(model, adamw(model), level, backend="te", select="all", **settings)
    te.casts.clear()
    return model, optimizer


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_plan(te):  # noqa: F811
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 40), nn.Linear(16, 16, dtype=torch.float16), nn.Linear(16, 32).bfloat16())
    model[3].bias.data = model[3].bias.data.float()
    plan = ampplug.plan(model, None, "O1", backend="te", select="all")
    assert [layer.te for layer in plan.layers] == [True, False, False, False] and plan.converted == ("0", "1", "2", "3")
    for layer, why in zip(plan.layers, ("computed by Transformer Engine$", "native: .* multiples of 16", "native: .*both in fp32", "native: .*both in fp32"), strict=True):
        assert re.search(why, layer.why)
    assert "computed by Transformer Engine" in str(plan) and not any(x.te for x in ampplug.plan(model, None, "O1", select="all").layers)
    own = nn.Sequential(te.Linear(32, 32), nn.Linear(32, 32))  # the autocast is the user's
    layers = {layer.name: layer for layer in ampplug.plan(own, backend="te", select="all").layers}
    assert not layers["1"].te and layers["1"].converts and "native, since the model has Transformer Engine's own modules ('0')" in layers["1"].why
    entries = {p.name: p for p in ampplug.plan(model[:1], backend="te", select="all").parameters}
    assert entries["0.weight"].fp8 and entries["0.weight"].after == entries["0.bias"].after == torch.bfloat16 and not entries["0.bias"].fp8


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("bias", [True, False])
def test_conversion(te, entered, level, recipe, bias):  # noqa: F811
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=bias), nn.GELU(), nn.Linear(64, 32, bias=bias), nn.Linear(32, 40, bias=bias))
    plain = copy.deepcopy(model)
    identities, keys = [id(p) for p in model.parameters()], list(model.state_dict())
    random = torch.get_rng_state()
    model, optimizer = start(te, model, level, recipe=recipe, margin=2, history=7)
    assert torch.equal(random, torch.get_rng_state())
    assert [id(p) for p in model.parameters()] == identities and list(model.state_dict()) == keys
    assert isinstance(model[0], te.Linear) and isinstance(model[0], nn.Linear) and not isinstance(model[3], te.Linear)
    entered.clear()
    x = torch.randn(3, 5, 32)  # 15 rows
    for _ in range(2):
        y = model(x)
        y.square().mean().backward()
        assert y.dtype == torch.float32 and y.shape == (3, 5, 40)
    z = plain(x)
    (2 * z.square().mean()).backward()
    assert relative(y, z) < 0.12
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert relative(p.grad.float(), q.grad) < 0.15
    w = model[0]._ampplug.weights["weight"]
    before = w.w8.view(torch.uint8).clone()
    optimizer.step()
    assert not torch.equal(w.w8.view(torch.uint8), before) and model[0]._fp8_workspaces["weight"]._data.data_ptr() == w.w8.data_ptr()
    assert not torch.equal(model(x), y) and te.casts == []
    assert len(entered) == 3 and all(r is entered[0] for r in entered)
    assert entered[0].delayed() == (recipe == "delayed") and (recipe == "current" or (entered[0].margin, entered[0].amax_history_len) == (2, 7))
    with te.autocast(recipe=te.recipe.Float8CurrentScaling()):  # the caller's own is enough
        model(x)
    assert len(entered) == 3
    model[0](x), model[2](torch.randn(0, 64))  # by itself; no rows

    restore_layers(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()] and [id(p) for p in model.parameters()] == identities
    assert all(set(vars(m)) == set(vars(n)) for m, n in zip(model.modules(), plain.modules(), strict=True))


def test_autocast_is_left_whatever_happens(te, entered):  # noqa: F811
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as manager

    class Fails(nn.Sequential):
        def forward(self, x, fail):
            y = super().forward(x)
            if fail:
                raise KeyboardInterrupt
            return y

    model, _ = start(te, Fails(nn.Linear(32, 32)))
    entered.clear()
    assert list(inspect.signature(model.forward).parameters) == ["x", "fail"] and isinstance(model, Fails)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(16, 32), True)
    assert len(entered) == 1 and not manager.is_fp8_enabled()
    model(torch.randn(16, 32), fail=False)


def test_copies_and_checkpoints(te, entered):  # noqa: F811
    model, _ = start(te, nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)))
    x = torch.randn(16, 32)
    expected = model(x)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        assert type(other) is type(model) and relative(other(x), expected) < 0.02 and te.casts.pop() and te.casts.pop()
        with torch.no_grad():
            other[0].weight.zero_()
            other[0].weight[0] = 1.0
        assert relative(other(x), expected) > 0.1 and torch.equal(model(x), expected)
        te.casts.clear()
    plain = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    plain.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    saved = plain.state_dict()
    with torch.no_grad():
        model[0].weight.zero_()
    model.load_state_dict({**saved, "0._extra_state": torch.zeros(3, dtype=torch.uint8), "1._extra_state": None})  # of a model of te.Linear
    assert relative(model(x), expected) < 0.02
    with pytest.raises(RuntimeError, match="Unexpected"):
        model.load_state_dict({**saved, "2._extra_state": None})
    with pytest.raises(RuntimeError, match="already converted"):
        ampplug.initialize(model, adamw(model), backend="te")


@pytest.mark.parametrize("level,dtype", [("O1", torch.float32), ("O2", torch.float32)])
def test_a_te_that_differs_casts_the_weights_itself(te, entered, level, dtype):  # noqa: F811
    te.base.Linear.forward = lambda self, inp, is_first_microbatch=None: self.multiply(inp, "weight", 0, None, 1)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 40))
    with pytest.warns(UserWarning, match="te.Linear of this Transformer Engine casts its weights itself"):
        model, optimizer = start(te, model, level)
    assert isinstance(model[0], te.Linear) and [w.name for w in model[1]._ampplug.bank.weights] == ["1.weight"]
    assert "which casts the weight itself" in ampplug.plan(nn.Sequential(nn.Linear(32, 32)), backend="te", select="all").layers[0].why
    x = torch.randn(16, 32)
    first = model(x)
    first.square().mean().backward()
    optimizer.step()
    assert not torch.equal(model(x), first) and te.casts == [(32, 32)] * 2 and model[0].weight.dtype == dtype
    with pytest.raises(RuntimeError, match="already converted"):
        ampplug.initialize(model[0], torch.optim.AdamW(model[0].parameters()), backend="te")


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_recomputation(te, entered, recipe):  # noqa: F811
    class Recomputed(nn.Sequential):
        def forward(self, x, recompute):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False) if recompute else super().forward(x)

    model, _ = start(te, Recomputed(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), recipe=recipe)
    x, grads = torch.randn(16, 32), []
    for recompute in (False, True):
        model.zero_grad()
        loss = model(x, recompute).square().mean()
        if recompute and recipe == "delayed":
            with pytest.raises(RuntimeError, match="recipe='current'.*pytorch.checkpoint"):
                loss.backward()
            return
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)) and te.casts == []


def test_refresh_and_audit(te, entered):  # noqa: F811
    """What the rest of ampplug asks of a converted layer."""
    model, optimizer = start(te, nn.Sequential(nn.Linear(32, 32, bias=False)))
    x = torch.randn(16, 32)
    first = model(x)
    model[0].weight.data.copy_(model[0].weight.data * 2)
    ampplug.refresh(model)
    assert relative(model(x), 2 * first) < 0.02
    assert not te_fed.is_fed(model[0])
    kinds = bytes_per_parameter(model, [optimizer])
    assert kinds["FP8 copies"] > 2


def test_layers_side_by_side(te, entered):  # noqa: F811
    """Fused blocks and shared casts of inputs are for native layers alone."""

    class Block(nn.Module):
        def __init__(self, odd):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(32, odd, bias=False), nn.Linear(32, odd, bias=False), nn.Linear(odd, 32, bias=False)

        def forward(self, x):
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    model = nn.Sequential(Block(64), Block(72))  # the second is native: 72 is no multiple of 16
    plain = copy.deepcopy(model)
    plan = ampplug.plan(model, backend="te", select="all", fuse=True)
    assert not plan.blocks and [layer.te for layer in plan.layers] == [True] * 3 + [False] * 3
    model, optimizer = start(te, model, fuse=True)
    x = torch.randn(16, 32)
    assert relative(y := model(x), plain(x)) < 0.12
    y.square().mean().backward()
    optimizer.step()
    assert not torch.equal(model(x), y) and te.casts == []


def test_a_replaced_forward_is_refused(te, entered):  # noqa: F811
    model = nn.Sequential(nn.Linear(32, 32))
    for wrapped in (torch.compile(model), copy.deepcopy(model)):
        if type(wrapped) is nn.Sequential:
            wrapped.forward = wrapped.forward
        with pytest.raises(ValueError, match="forward of this .* was replaced.*before that"):
            ampplug.initialize(wrapped, adamw(wrapped), backend="te")
    assert type(model[0]) is nn.Linear
