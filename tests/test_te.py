"""Transformer Engine's modules under ampplug, on a double of its Python part (tests/te_double); the real one: tests/gpu/test_transformer_engine.py."""

from __future__ import annotations

import copy
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import ampplug
from ampplug.nn import te as adapter
from ampplug.nn import te_fed

RECIPES = ("DelayedScaling", "Float8CurrentScaling")


@pytest.fixture
def te(monkeypatch):
    """The double, as if it ran on a Hopper GPU; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "te_double"))
    monkeypatch.setattr(te_fed, "check_device", lambda device: None)
    import transformer_engine.common.recipe as recipes
    import transformer_engine.pytorch as package
    from transformer_engine.pytorch.module import base

    base.casts.clear()
    names = {n: getattr(package, n) for n in ("Linear", "LayerNormLinear", "LayerNormMLP", "autocast")}
    yield types.SimpleNamespace(**names, recipe=recipes, casts=base.casts, base=base)
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    for known in (te_fed._classes, adapter.UNFIT, te_fed._tested):
        known.clear()


def build(te, dtype=torch.bfloat16) -> nn.Sequential:
    """One module of each kind, and a plain Linear."""
    torch.manual_seed(0)
    settings = {"params_dtype": dtype}
    return nn.Sequential(te.Linear(32, 64, **settings), te.LayerNormLinear(64, 32, **settings), te.LayerNormMLP(32, 64, **settings),
                         nn.Linear(32, 16, dtype=dtype))  # fmt: skip


def adamw(model, lr=0.01):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


def fed(te, level="O2", dtype=torch.bfloat16, **settings):
    model = build(te, dtype)
    model, optimizer = ampplug.initialize(model, adamw(model), level, **{"backend": "te", **settings})
    te.casts.clear()
    return model, optimizer


def codes(entry) -> tuple[torch.Tensor, torch.Tensor]:
    return entry.rowwise(), entry.columnwise().t()


def entries(model):
    """(parameter, entry of the cache) of every weight that is fed."""
    return [(w.param, m._fp8_workspaces[k]) for m in model.modules() if te_fed.is_fed(m) for k, w in m._ampplug.weights.items()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_modules_take_the_weights_of_each_step(te, recipe, level, dtype):
    model, optimizer = fed(te, level, dtype)
    identities, recipe = [id(p) for p in model.parameters()], getattr(te.recipe, recipe)()
    last = None
    for _ in range(3):
        for first in (None, True, False):  # whatever the caller says of micro-batches
            with te.autocast(recipe=recipe):
                x = torch.randn(8, 32, dtype=dtype)
                for module in model:
                    x = module(x) if first is None or isinstance(module, nn.Linear) else module(x, first)
            x.float().square().mean().backward()
        found = entries(model)
        assert len(found) == 4 and all(e._data.data_ptr() == w.w8.data_ptr() and e._scale_inv.data_ptr() == w.scale_inv.data_ptr()
                                       for (_, e), w in zip(found, model[0]._ampplug.bank.weights[:0] + [w for m in model[:3] for w in m._ampplug.weights.values()]))  # fmt: skip
        for p, entry in found:  # E4M3 holds 3 bits of mantissa, down to 2^-9 of 448ths of the amax
            for matrix in codes(entry):
                assert ((matrix - p.float()).abs() <= p.float().abs() / 15 + p.float().abs().amax() * 2**-16).all()
        now = [entry._data.clone() for _, entry in found]
        assert last is None or all(not torch.equal(a, b) for a, b in zip(last, now, strict=True))
        last = now
        optimizer.step()
        optimizer.zero_grad()
    assert te.casts == [] and identities == [id(p) for p in model.parameters()]


def test_weights_move_as_under_torch(te):
    model, optimizer = fed(te, dtype=torch.float32)
    plain = build(te, torch.float32)
    reference = adamw(plain)
    for step in range(5):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            g = torch.randn(q.shape, generator=torch.Generator().manual_seed(step)) * 0.1
            q.grad, p.grad = g, g.to(p.dtype)
        optimizer.step()
        reference.step()
    start = build(te, torch.float32)
    for p, q, s in zip(model.parameters(), plain.parameters(), start.parameters(), strict=True):
        moved, expected = p.detach().float() - s, q.detach() - s
        assert (moved - expected).norm() < 0.15 * expected.norm()  # 8-bit moments; a bf16 parameter shows the high half


def test_training_equals_te_alone(te):
    """Same module, same data: beside Transformer Engine's own cast the outputs differ by nothing but the rounding of a scale."""
    model, optimizer = fed(te)
    alone = build(te)
    recipe = te.recipe.Float8CurrentScaling()
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    with te.autocast(recipe=recipe):
        a, b = model[:3](x), alone[:3](x)
    assert (a - b).float().norm() < 0.01 * b.float().norm() and te.casts


@pytest.mark.parametrize("write", ["in place", "load", "evaluation", "swap"])
def test_no_write_is_missed(te, write):
    model, _ = fed(te)
    recipe, x = te.recipe.DelayedScaling(), torch.randn(8, 32, dtype=torch.bfloat16)
    with te.autocast(recipe=recipe):
        before = model[0](x)
    if write == "in place":
        with torch.no_grad():
            model[0].weight.mul_(2)
    elif write == "load":
        model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    elif write == "evaluation":  # as averages are swapped in
        model.eval()
        model[0].weight.data.copy_(model[0].weight.data * 2)
    with te.autocast(recipe=recipe):
        after = torch.func.functional_call(model[0], {"weight": model[0].weight * 2}, (x,)) if write == "swap" else model[0](x)
    torch.testing.assert_close(after, before * 2)
    assert te.casts == []


def test_where_te_casts_itself_nothing_of_ours_is_written(te):
    """Block scaling; graphs of te that update the cache; copies of the model."""
    model, _ = fed(te)
    x = torch.randn(8, 32, dtype=torch.bfloat16)
    layer = model[0]
    with te.autocast(recipe=te.recipe.DelayedScaling()):
        y = layer(x)
    w = layer._ampplug.weights["weight"]
    before = w.w8.view(torch.uint8).clone(), w.scale_inv.clone()
    with torch.no_grad():
        layer.weight.data.mul_(4)
    with te.autocast(recipe=te.recipe.Float8BlockScaling()):
        layer(x, True)
    assert te.casts == [(64, 32)]
    with te.autocast(recipe=te.recipe.DelayedScaling()):
        layer(x)
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as manager

    manager.quantization_state.skip_fp8_weight_update_tensor, manager.quantization_state.capturing = torch.zeros(1), True
    with te.autocast(recipe=te.recipe.DelayedScaling()):
        layer(x)
    assert len(te.casts) == 2
    twin = copy.deepcopy(model)
    assert twin[0]._ampplug is None and twin[0].weight is not layer.weight
    assert torch.equal(w.w8.view(torch.uint8), before[0]) and torch.equal(w.scale_inv, before[1])
    assert y.shape == twin[0](x).shape


def test_fp8_off_and_dropped_copies(te):
    model, _ = fed(te)
    x, recipe = torch.randn(8, 32, dtype=torch.bfloat16), te.recipe.DelayedScaling()
    exact = nn.functional.linear(x.float(), model[0].weight.float()).bfloat16()
    torch.testing.assert_close(model[0](x), exact)  # outside of the user's autocast
    with te.autocast(recipe=recipe):
        first = model[0](x)
        model[0]._fp8_workspaces["weight"]._transpose = None  # as update_usage may
        again = model[0](x)
    assert torch.equal(first, again) and model[0]._fp8_workspaces["weight"]._transpose is not None and te.casts == []


def test_plan_and_state(te):
    model = build(te)
    model.append(te.Linear(16, 24, params_dtype=torch.bfloat16))
    split = te.Linear(32, 32, params_dtype=torch.bfloat16)
    split.weight_names = ["query_weight", "key_weight"]
    model.append(split)
    keys = list(model.state_dict())
    why = {layer.name: (layer.converts, layer.kind, layer.why) for layer in ampplug.plan(model, backend="te", select="all").layers}
    assert why["1"][:2] == (True, "te.LayerNormLinear") and why["3"][1] == "Linear" and why["3"][0]
    assert not why["4"][0] and "24x16 is not in multiples of 16" in why["4"][2]
    assert not why["5"][0] and "split" in why["5"][2]
    native = ampplug.plan(model, select="all")
    assert native.converted == ("3",) and "backend='te' feeds" in str(native)
    optimizer = adamw(model)
    ampplug.initialize(model, optimizer, use_te=True, select="all")
    assert list(model.state_dict()) == keys and isinstance(model[2], te.LayerNormMLP)
    assert [type(m).__name__ for m in model] == ["Linear", "LayerNormLinear", "LayerNormMLP", "Linear", "Linear", "Linear"]
    with pytest.raises(RuntimeError, match="already"):
        ampplug.initialize(model, adamw(model), use_te=True)
    ampplug.refresh(model)
    assert ampplug.plan(build(te, torch.float32), backend="te").parameters[0].after == torch.float32  # te wants the activations' dtype


def unused(te):  # a version that does not look into the cache
    te.base.Linear.forward = lambda self, inp, is_first_microbatch=None: self.multiply(inp, "weight", 0, None, 1)


def rewritten(te):  # one that renews the cache in every call
    te.base.Linear.forward = lambda self, inp, is_first_microbatch=None: self.multiply(inp, "weight", 0, True, 1)


def renamed(te):
    te.base.TransformerEngineBaseModule._get_weight_quantizers = property(lambda self: self._quantizers_of_weights)


def wrong_transpose(te):
    te.base.Float8Tensor.columnwise = lambda self: self.rowwise().t() * 0 + 1


@pytest.mark.parametrize("change,said", [(unused, "was not used"), (rewritten, "not used"), (renamed, "AttributeError"), (wrong_transpose, "transpose")])
def test_another_te_casts_by_itself(te, change, said, monkeypatch):
    change(te)
    torch.manual_seed(3)
    model = nn.Sequential(te.Linear(32, 32, params_dtype=torch.bfloat16))
    random = torch.get_rng_state()
    with pytest.warns(UserWarning, match=f"casts its weights itself.*{said}"):
        model, optimizer = ampplug.initialize(model, adamw(model), backend="te")
    assert torch.equal(random, torch.get_rng_state()) and not te_fed.is_fed(model[0])
    assert said in ampplug.plan(model, backend="te").layers[0].why


def broken(tmp_path, monkeypatch, text):
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
    (tmp_path / "transformer_engine" / "__init__.py").write_text(text)
    (tmp_path / "transformer_engine" / "pytorch" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("text,said", [
    ("raise OSError('x.so: undefined symbol: _ZN3c10')", "does not load.*another torch than.*OSError.*undefined symbol"),
    ("raise ImportError('libcudart.so.12')", "does not load.*ImportError"),
    ("__version__ = '1.13.0'", "1.13.0 is too old; 2.20 or later"),
    ("__version__ = '2.20.2'", "on 'cpu'.*needs a CUDA GPU"),
    (None, "not installed"),
])  # fmt: skip
def test_refused_before_anything_changes(tmp_path, monkeypatch, text, said):
    if text is not None:
        broken(tmp_path, monkeypatch, text)
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    model = nn.Sequential(nn.Linear(32, 32))
    optimizer = adamw(model)
    with pytest.raises(RuntimeError, match=said):
        ampplug.initialize(model, optimizer, backend="te")
    assert type(model[0]) is nn.Linear and type(optimizer) is torch.optim.AdamW and model[0].weight.dtype == torch.float32
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


@pytest.mark.parametrize("found", [(8, 0), (10, 0)])
def test_wrong_gpu(monkeypatch, found):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    with pytest.raises(RuntimeError, match=f"A card has compute capability {found[0]}.{found[1]}; 8.9 or 9.0"):
        adapter.check_device(torch.device("cuda", 0))


@pytest.mark.parametrize("attribute,said", [("primary_weights_in_fp8", "'0'.*quantized_model_init"), ("fuse_wgrad_accumulation", "'0'.*not in .grad")])
def test_modules_that_are_refused(te, attribute, said):
    model = build(te)
    setattr(model[0], attribute, True)
    with pytest.raises(ValueError, match=said):
        ampplug.initialize(model, adamw(model), backend="te")


def test_contradictions(te):
    plain = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="use_te=True.*'native'"):
        ampplug.initialize(plain, adamw(plain), backend="native", use_te=True)
    with pytest.raises(TypeError, match="use_te='yes'"):
        ampplug.initialize(plain, adamw(plain), use_te="yes")
