"""Transformer Engine's modules under ampplug, on the real one: `pytest -m gpu tests/gpu/test_transformer_engine.py` where it is installed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import ampplug
from ampplug.nn import te_fed

te = pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
recipes = pytest.importorskip("transformer_engine.common.recipe", exc_type=ImportError)

pytestmark = pytest.mark.gpu
DEVICE, BF16 = "cuda", torch.bfloat16
RECIPES = ("DelayedScaling", "Float8CurrentScaling")


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    settings = {"params_dtype": BF16, "device": DEVICE}
    return nn.Sequential(te.Linear(256, 512, **settings), te.LayerNormLinear(512, 256, **settings), te.LayerNormMLP(256, 512, **settings))


def fed(lr: float = 1e-3, level: str = "O2"):
    """The model under ampplug; a warning (a class that casts by itself after all) is an error."""
    model = build()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ampplug")
        return ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0), level, backend="te")


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm()).item()


def kernels(step) -> int:
    """Launches of a call on the GPU."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(e.count for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_and_gradients_are_those_of_te(recipe: str, level: str):
    """Both sides in FP8 with one input; TE's own cast is by another weight scale in delayed scaling's first steps. The tolerance is
    the relative one of Transformer Engine's test_quantized_tensor.py for E4M3, taken of norms."""
    model, optimizer = fed(level=level)
    alone = build()
    assert all(te_fed.is_fed(m) for m in model)
    recipe = getattr(recipes, recipe)()
    for _ in range(3):
        x = torch.randn(64, 256, device=DEVICE, dtype=BF16)
        for m in (model, alone):
            m.zero_grad()
            with te.autocast(enabled=True, recipe=recipe):
                y = m(x)
            y.float().square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert relative(p.grad, q.grad) < 0.125, name


def test_copies_follow_each_step_and_stay_in_the_bank():
    model, optimizer = fed(lr=1e-2)
    recipe, last = recipes.DelayedScaling(), None
    for _ in range(3):
        for _ in range(2):
            with te.autocast(enabled=True, recipe=recipe):
                y = model(torch.randn(64, 256, device=DEVICE, dtype=BF16))
            y.float().square().mean().backward()
        found = [(m._fp8_workspaces[k], w) for m in model for k, w in m._ampplug.weights.items()]
        assert len(found) == 4
        for entry, w in found:
            assert (entry._data.data_ptr(), entry._transpose.data_ptr(), entry._scale_inv.data_ptr()) == (
                w.w8.data_ptr(), w.w8t.data_ptr(), w.scale_inv.data_ptr())  # fmt: skip
            for matrix in (w.w8.float(), w.w8t.float().t()):
                assert relative(matrix * w.scale_inv, w.param) < 0.04
        now = [w.w8.view(torch.uint8).clone() for _, w in found]
        assert last is None or all(not torch.equal(a, b) for a, b in zip(last, now, strict=True))
        last = now
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        moved = [(p - b).abs().max().item() for p, b in zip(model.parameters(), before, strict=True)]
        assert all(0 < m < 0.1 for m in moved)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_weight_is_cast_in_forward_or_backward(recipe: str):
    model, _ = fed()
    alone = build()
    x, recipe = torch.randn(64, 256, device=DEVICE, dtype=BF16), getattr(recipes, recipe)()

    def step_of(m):
        def step():
            with te.autocast(enabled=True, recipe=recipe):
                y = m(x)
            y.sum().backward()

        return step

    assert kernels(step_of(model)) <= kernels(step_of(alone)) - 4  # four weights


def test_evaluation_and_checkpointing():
    model, _ = fed()
    recipe = recipes.DelayedScaling()
    x = torch.randn(64, 256, device=DEVICE, dtype=BF16, requires_grad=True)
    grads = []
    for recompute in (False, True):
        model.zero_grad()
        with te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling()):
            y = te.checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        y.float().square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    model.eval()
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        model[0].weight.data.mul_(2)
        a = model[0](x)
        model[0].weight.data.mul_(2)
        b = model[0](x)
    assert relative(b, 2 * a) < 0.02


@pytest.mark.parametrize("recipe", RECIPES)
def test_captured_step_equals_eager(recipe: str):
    results = []
    recipe = getattr(recipes, recipe)()
    batches = [torch.randn(64, 256, device=DEVICE, dtype=BF16) for _ in range(8)]
    for captured in (False, True):
        model, optimizer = fed()

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            with te.autocast(enabled=True, recipe=recipe):
                y = model(x)
            loss = y.float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = ampplug.capture(step, model, optimizer) if captured else step
        results.append([run(x).item() for x in batches] + [p.detach().clone() for p in model.parameters()])
        assert not captured or run.graph is not None
    losses = [r[: len(batches)] for r in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert all(relative(b, a) < 1e-3 for a, b in zip(results[0][len(batches) :], results[1][len(batches) :], strict=True))


def test_graphed_callables_with_our_optimizer():
    model, optimizer = fed(lr=1e-2)
    recipe = recipes.DelayedScaling()
    graphed = te.make_graphed_callables(model, (torch.randn(64, 256, device=DEVICE, dtype=BF16, requires_grad=True),), enabled=True, recipe=recipe)
    losses, x = [], torch.randn(64, 256, device=DEVICE, dtype=BF16, requires_grad=True)
    for _ in range(6):
        optimizer.zero_grad()
        with te.autocast(enabled=True, recipe=recipe):
            y = graphed(x)
        loss = y.float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]  # the replayed graph reads the W8 that each step wrote
    assert copy.deepcopy(model)[0]._ampplug is None
