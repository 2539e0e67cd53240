"""The O2 optimizer keeps torch's contract, and moves weights by the right amount."""

import copy
import math

import pytest
import torch
from torch import nn

import ampplug


def net(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(i, o) for i, o in zip(sizes, sizes[1:])])


def start(model: nn.Module, cls=torch.optim.AdamW, **settings):
    return ampplug.initialize(model, cls(model.parameters(), **{"lr": 1e-2, **settings}))


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("flags", [{}, {"weight_decay": 0.1}, {"maximize": True}, {"betas": (0.8, 0.95), "eps": 1e-4}, {"lr": torch.tensor(1e-2)}, {"foreach": True}])
def test_moves_like_fp32(cls, flags):
    """Fifty steps with the same gradients: the difference is below 5 % of the path."""
    torch.manual_seed(0)
    low, exact = (nn.ParameterList([nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(i))) for i in range(2)]) for _ in range(2))
    low[1].data = low[1].data.bfloat16()
    exact[1].data = low[1].data.float()
    start_values = [p.detach().float().clone() for p in exact]
    settings = {"lr": 1e-2, **flags}
    optimizers = [cls(x.parameters(), **{k: (v.clone() if isinstance(v, torch.Tensor) else v) for k, v in settings.items()}) for x in (low, exact)]
    with pytest.warns(UserWarning, match="no layer"):
        ampplug.initialize(low, optimizers[0])
    for _ in range(50):
        for p, q in zip(low, exact):
            q.grad = (torch.randn_like(q) + 0.5).bfloat16().float()
            p.grad = q.grad.to(p.dtype)
        for o in optimizers:
            o.step()
    masters = ampplug.fp32_state_dict(low)
    for i, (q, w) in enumerate(zip(exact, start_values)):
        assert (masters[str(i)] - q).norm() / (q - w).norm() < 0.05


def test_small_updates_are_not_lost():
    """Steps far below the last place of bf16 add up in the remainder."""
    p = nn.Parameter(torch.ones(64, 64).bfloat16())
    module = nn.ParameterList([p])
    with pytest.warns(UserWarning, match="no layer"):
        module, optimizer = ampplug.initialize(module, torch.optim.AdamW([p], lr=1e-5, weight_decay=0.0))
    for _ in range(500):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert ampplug.fp32_state_dict(module)["0"].mean().item() == pytest.approx(1 - 500e-5, abs=2e-4)


def test_groups_and_late_groups():
    model, new = net(32, 32), net(32, 32)
    model, optimizer = start(model, weight_decay=0.0)
    optimizer.add_param_group({"params": list(new.parameters()), "lr": 1e-3})
    before = [p.detach().float().clone() for p in (model[0].weight, new[0].weight)]
    new(model(torch.randn(16, 32))).square().mean().backward()
    optimizer.step()
    moved = [(p - b).abs().max().item() for p, b in zip((model[0].weight, new[0].weight), before)]
    assert moved[0] == pytest.approx(1e-2, rel=0.1) and moved[1] == pytest.approx(1e-3, rel=0.1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(ValueError, match="float16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2).half())]})
    assert len(optimizer.param_groups) == 2


def test_missing_gradients_and_unfreezing():
    model = net(32, 32, 32)
    model[1].weight.requires_grad_(False)
    model, optimizer = start(model, weight_decay=0.5)
    kept = model[1].weight.detach().clone(), model[0].bias.detach().clone()
    model(torch.randn(8, 32)).sum().backward()
    model[0].bias.grad = None
    optimizer.step()
    assert torch.equal(model[1].weight, kept[0]) and torch.equal(model[0].bias, kept[1])
    assert optimizer.state[model[0].bias]["step"].item() == 0 and optimizer.state[model[0].weight]["step"].item() == 1
    model[1].weight.requires_grad_(True)
    model(torch.randn(8, 32)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, kept[0])


def test_zero_grad():
    model, optimizer = start(net(32, 32))
    x = torch.randn(8, 32)
    model(x).sum().backward()
    addresses = [p.grad.data_ptr() for p in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    assert addresses == [p.grad.data_ptr() for p in model.parameters()] and not any(p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_closure_runs_once_with_gradients():
    model, optimizer = start(net(32, 32))
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(4, 32)).square().mean()
        loss.backward()
        return loss

    before = model[0].weight.detach().clone()
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [1] and loss.item() > 0 and not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ampplug.GradScaler])
def test_grad_scaler(scaler_class):
    """Scaled and unscaled training agree; an overflow skips bit for bit and does not count."""
    results = []
    for scaled in (False, True):
        model, optimizer = start(net(32, 32))
        scaler = scaler_class("cpu", init_scale=64.0, enabled=scaled)
        for t in range(3):
            torch.manual_seed(t)
            scaler.scale(model(torch.randn(16, 32)).square().mean()).backward()
            if t == 1:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(ampplug.fp32_state_dict(model)["0.weight"])
    assert (results[0] - results[1]).abs().max() < 2e-3
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    scaler.scale(model(torch.full((16, 32), math.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values()))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(v, after[i][k]) for i, s in before[1].items() for k, v in s.items())


def test_gradients_set_by_hand():
    model, optimizer = start(net(32, 64), weight_decay=0.0)
    for g in (torch.randn(64, 32), torch.randn(64, 32).bfloat16(), torch.randn(32, 64).bfloat16().t()):
        before = ampplug.fp32_state_dict(model)["0.weight"]
        optimizer.zero_grad()
        if g.dtype == torch.float32 and not hasattr(model[0].weight, "grad_dtype"):
            continue
        model[0].weight.grad = g
        for state in optimizer.state.values():  # first step each time: it moves by lr * sign(g)
            for t in ("step", "exp_avg", "exp_avg_sq"):
                state[t].zero_()
        optimizer.step()
        moved = ampplug.fp32_state_dict(model)["0.weight"] - before
        assert (moved.sign() == -g.float().sign()).float().mean() > 0.99


def test_clipping_equals_torchs():
    moved = []
    for clip in (torch.nn.utils.clip_grad_norm_, ampplug.clip_grad_norm_):
        model, optimizer = start(net(32, 32), betas=(0.0, 0.9), eps=1.0)  # eps makes the step depend on the gradient's size
        before = ampplug.fp32_state_dict(model)
        (model(torch.randn(16, 32, generator=torch.Generator().manual_seed(3))).square().sum() * 10).backward()
        norm = clip(model.parameters(), 0.5)
        optimizer.step()
        moved.append((norm, ampplug.fp32_state_dict(model)["0.weight"] - before["0.weight"]))
    assert moved[0][0].item() == pytest.approx(moved[1][0].item(), rel=1e-2)  # torch takes the norm in bf16
    assert (moved[0][1] - moved[1][1]).norm() / moved[0][1].norm() < 0.02


def test_clipping_is_dropped_composed_and_skips():
    model, optimizer = start(net(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    first = ampplug.clip_grad_norm_(model.parameters(), 1.0)
    again = ampplug.clip_grad_norm_(model.parameters(), 1.0)
    assert first > 1 and again.item() == pytest.approx(1.0, rel=1e-3)
    optimizer.zero_grad()
    assert not optimizer._low_bit.clipped
    model(torch.full((2, 8), math.nan)).sum().backward()
    before = ampplug.fp32_state_dict(model)
    assert not torch.isfinite(ampplug.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), ampplug.fp32_state_dict(model).values()))
    # a subset, and another norm, are torch's business
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    ampplug.clip_grad_norm_([model[0].weight], 1e-3)
    assert model[0].weight.grad.norm() < 2e-3


def test_two_optimizers_and_foreign_parameters():
    model, foreign = net(32, 32), nn.Parameter(torch.zeros(3))
    optimizers = [torch.optim.AdamW(model[0].parameters(), lr=1e-2), torch.optim.Adam([foreign], lr=1e-2)]
    model, returned = ampplug.initialize(model, optimizers)
    assert returned is optimizers
    before = model[0].weight.detach().clone()
    (model(torch.randn(4, 32)).sum() + foreign.sum()).backward()
    for o in optimizers:
        o.step()
    assert torch.allclose(foreign, torch.full((3,), -1e-2), atol=1e-4) and not torch.equal(model[0].weight, before)


def test_casts_after_initialize():
    """model.float() puts the remainder back; training goes on."""
    model, optimizer = start(net(32, 32))
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    masters = ampplug.fp32_state_dict(model)
    model.float()
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    moved = model[0].weight - masters["0.weight"]
    assert model[0].weight.dtype == torch.float32 and 1e-4 < moved.abs().max() < 2e-2
    model.half()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(RuntimeError, match="float16"):
        optimizer.step()


def test_hooks_fire():
    model, optimizer = start(net(8, 8))
    calls = []
    optimizer.register_step_pre_hook(lambda *a: calls.append("before"))
    optimizer.register_step_post_hook(lambda *a: calls.append("after"))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert calls == ["before", "after"]


def test_runs_do_not_share_state():
    def run(seed, scale):
        torch.manual_seed(seed)
        model, optimizer = start(nn.Sequential(nn.Linear(32, 32)))
        for t in range(5):
            torch.manual_seed(t)
            model(scale * torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model[0].weight.detach().clone()

    first = run(0, 1.0)
    run(1, 1e3)
    assert torch.equal(first, run(0, 1.0))
