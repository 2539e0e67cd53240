"""nn.Linear turned into Transformer Engine's Linear, on the real one: `pytest -m gpu tests/gpu/test_transformer_engine_linear.py` where it is installed."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import ampplug
from ampplug.convert import restore_layers

te = pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
manager = pytest.importorskip("transformer_engine.pytorch.quantization", exc_type=ImportError).FP8GlobalStateManager

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def build(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512, bias), nn.GELU(), nn.Linear(512, 256, bias), nn.Linear(256, 40, bias)).to(DEVICE, dtype)


def start(model: nn.Module, level: str = "O2", lr: float = 1e-3, **settings):
    """A warning of ours (te.Linear casts by itself after all) is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ampplug")
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, capturable=level == "O1")
        return ampplug.initialize(model, optimizer, level, backend="te", select="all", **settings)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm()).item()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype,bias", [(torch.float32, True), (torch.bfloat16, False)])
def test_outputs_gradients_and_steps(dtype, bias, level, recipe):
    model, plain = build(dtype, bias), build(dtype, bias)
    model, optimizer = start(model, level, recipe=recipe)
    assert all(isinstance(model[i], te.Linear) == (i != 3) for i in (0, 2, 3)) and model[0]._ampplug is not None
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    for rows in (64, 50, 64):  # 50 are padded; delayed scales settle
        x = torch.randn(2, rows, 256, device=DEVICE, dtype=dtype)
        for m in (model, plain):
            m.zero_grad()
            y = m(x)
            assert y.dtype == dtype and y.shape == (2, rows, 40)
            y.float().square().mean().backward()
    assert not manager.is_fp8_enabled()
    assert relative(model(x), plain(x)) < 0.125
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert relative(p.grad, q[1].grad) < 0.2, name
    before = [p.detach().clone() for p in plain.parameters()]
    optimizer.step()
    reference.step()
    for p, q, b in zip(model.parameters(), plain.parameters(), before, strict=True):
        if level == "O2":  # Adam's first step is lr * sign(g)
            assert ((p.float() - b.float()).abs().mean() / (q.float() - b.float()).abs().mean()).item() == pytest.approx(1, abs=0.1)
    for m in (model[0], model[2]):
        w, entry = m._ampplug.weights["weight"], m._fp8_workspaces["weight"]
        assert (entry._data.data_ptr(), entry._transpose.data_ptr(), entry._scale_inv.data_ptr()) == (
            w.w8.data_ptr(), w.w8t.data_ptr(), w.scale_inv.data_ptr())  # fmt: skip
        assert relative(w.w8.float() * w.scale_inv, w.param) < 0.04


def kernels(step) -> list[str]:
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return [e.key for e in profile.key_averages() for _ in range(e.count) if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_no_weight_is_cast(recipe):
    model, _ = start(build(torch.bfloat16, False)[:3], recipe=recipe)
    assert all(model[i]._ampplug is not None for i in (0, 2))
    x = torch.randn(64, 256, device=DEVICE, dtype=torch.bfloat16)
    fed = kernels(lambda: model(x).float().sum().backward())
    states = [model[i]._ampplug for i in (0, 2)]
    for i, m in enumerate((model[0], model[2])):
        m._ampplug, m._fp8_workspaces = None, {}
    alone = kernels(lambda: model(x).float().sum().backward())
    assert len(fed) <= len(alone) - 2, (fed, alone)
    for m, state in zip((model[0], model[2]), states, strict=True):
        m._ampplug = state


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_captured_step_equals_eager(recipe):
    results, data = [], [torch.randn(64, 256, device=DEVICE) for _ in range(8)]
    for captured in (False, True):
        model, optimizer = start(build(), recipe=recipe)

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = ampplug.capture(step, model, optimizer) if captured else step
        results.append(([run(x).item() for x in data], [p.detach().clone() for p in model.parameters()]))
        assert not captured or run.graph is not None
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert all(relative(b, a) < 1e-3 for a, b in zip(results[0][1], results[1][1], strict=True))


def test_evaluation_checkpoints_copies_and_back():
    model, optimizer = start(build(), recipe="current")
    x = torch.randn(64, 256, device=DEVICE)
    model(x).square().mean().backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        expected = model(x)
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
            assert relative(other(x), expected) < 0.02
        plain = build()
        assert list(plain.state_dict()) == list(model.state_dict())
        plain.load_state_dict(model.state_dict())
        assert relative(plain(x), expected) < 0.125
        model[0].weight.data.mul_(0)
        model.load_state_dict(plain.state_dict())
        assert relative(model(x), expected) < 0.02
        restore_layers(model)
        assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()] and relative(model.float()(x), plain(x)) < 0.02


@pytest.mark.parametrize("recipe,function", [("current", torch.utils.checkpoint.checkpoint), ("current", te.checkpoint), ("delayed", te.checkpoint)])
def test_recomputation(recipe, function):
    class Recomputed(nn.Sequential):
        def forward(self, x, recompute):
            return function(super().forward, x, use_reentrant=False) if recompute else super().forward(x)

    x, grads = torch.randn(64, 256, device=DEVICE), []
    for recompute in (False, True):
        model, _ = start(Recomputed(*build()[:3]), recipe=recipe)
        model(x, recompute).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(relative(b, a) < 1e-3 for a, b in zip(*grads, strict=True))
