"""The O2 optimizer keeps torch's contract, and moves weights by the right amount."""

import copy
import math
import pickle
import warnings

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
    frozen = model[1].weight.detach().clone()
    model, optimizer = start(model, weight_decay=0.5)
    assert torch.equal(model[1].weight, frozen)  # not even rounded
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


@pytest.mark.parametrize(
    "flags", [{"fused": True}, {"capturable": True}, {"foreach": False}, {"lr": torch.tensor(1e-2), "capturable": True}, {"eps": 1e-3, "betas": (0.0, 0.99)}], ids=str
)
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_flags_about_the_implementation_change_nothing(cls, flags):
    moved = []
    for extra in ({}, flags):
        same = {k: v for k, v in flags.items() if k in ("eps", "betas")}
        model, optimizer = start(net(32, 32), cls, **{**same, **extra})
        for t in range(3):
            torch.manual_seed(t)
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
        moved.append(ampplug.fp32_state_dict(model)["0.weight"])
    assert torch.allclose(*moved, rtol=0, atol=1e-7) and not torch.equal(moved[0], net(32, 32)[0].weight)


@pytest.mark.parametrize("flag", ["amsgrad", "differentiable"])
def test_flags_without_a_low_bit_form(flag):
    """Refused by name with the way out, before anything changed: at initialize, in a late group, in a loaded state, and at the step."""
    model = net(8, 8)
    made = torch.optim.AdamW(model.parameters(), **{flag: True})
    with pytest.raises(ValueError, match=f"{flag}=True.*O1"):
        ampplug.initialize(model, made)
    assert type(made) is torch.optim.AdamW and model[0].weight.dtype == torch.float32
    model, optimizer = start(net(8, 8))
    with pytest.raises(ValueError, match=f"{flag}=True.*O1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], flag: True})
    assert len(optimizer.param_groups) == 1
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][flag] = True
    with pytest.raises(ValueError, match=f"{flag}=True.*O1"):
        optimizer.load_state_dict(state)
    assert not optimizer.param_groups[0][flag]
    optimizer.param_groups[0][flag] = True
    with pytest.raises(ValueError, match=f"{flag}=True.*O1"):
        optimizer.step()


def test_decay_is_decoupled_or_l2():
    for cls, flags, wanted in (
        (torch.optim.AdamW, {}, 0.85),
        (torch.optim.Adam, {}, 0.90),
        (torch.optim.Adam, {"decoupled_weight_decay": True}, 0.85),
        (torch.optim.AdamW, {"maximize": True}, 1.05),
    ):
        decayed, kept = (nn.Parameter(torch.ones(64)) for _ in range(2))
        optimizer = cls([{"params": [decayed], "weight_decay": 0.5}, {"params": [kept], "weight_decay": 0.0}], lr=0.1, **flags)
        with pytest.warns(UserWarning, match="no layer"):
            ampplug.initialize(nn.ParameterList([decayed, kept]), optimizer)
        for p in (decayed, kept):
            p.grad = torch.ones(64)
        optimizer.step()
        rest = 1.1 if flags.get("maximize") else 0.9
        assert (decayed - wanted).abs().max() < 1e-3 and (kept - rest).abs().max() < 1e-3, (cls, flags)


def test_zero_gradients_move_nothing():
    """No eps is lost: 0 / (0 + eps) stays zero, moments too, and only decay acts."""
    for decay in (0.0, 0.1):
        model, optimizer = start(net(32, 32), weight_decay=decay)
        before = ampplug.fp32_state_dict(model)
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
        for k, v in ampplug.fp32_state_dict(model).items():
            assert torch.allclose(v, before[k] * (1 - 1e-2 * decay) ** 3, rtol=1e-5, atol=0)
        for state in ampplug.torch_state_dict(optimizer)["state"].values():
            assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", ["OneCycleLR", "LambdaLR", "CosineAnnealingLR", "StepLR", "ReduceLROnPlateau"])
def test_schedules_act_as_on_torchs_own(kind, before):
    """lr, and beta1 where it cycles: the path is that of fp32 AdamW under the same schedule, within 6 % of its length."""
    make = {
        "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=40),
        "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / 10)),
        "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30),
        "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 5),
        "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=3),
    }[kind]
    paths = []
    for low in (True, False):
        p = nn.Parameter(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)))
        first, module = p.detach().clone(), nn.ParameterList([p])
        optimizer = torch.optim.AdamW([p], lr=1e-2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message="ampplug")
            schedule = make(optimizer) if before else None
            if low:
                ampplug.initialize(module, optimizer)
            schedule = schedule or make(optimizer)
            generator = torch.Generator().manual_seed(2)
            rates = []
            for _ in range(30):
                p.grad = torch.randn(32, 64, generator=generator) + 0.5
                optimizer.step()
                schedule.step(1.0) if kind == "ReduceLROnPlateau" else schedule.step()
                rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        paths.append((p.detach() - first, rates))
    assert paths[0][1] == paths[1][1] and len(set(paths[0][1])) > 2
    assert (paths[0][0] - paths[1][0]).norm() / paths[1][0].norm() < 0.06


def test_skipped_steps_change_nothing_whatever_skips_them():
    """Overflow seen by a scaler, or by a norm that is not finite: no bit changes, scales and their windows included, and no step is counted."""
    for how in ("scaler", "unscaled", "norm"):
        model, optimizer = start(net(32, 32))
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=how != "norm")
        for t in range(3):
            scaler.scale(model(torch.randn(8, 32)).square().mean()).backward()
            scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
        book, bank = model[0]._ampplug.book, model[0]._ampplug.bank
        everything = lambda: [  # noqa: E731
            *(p.detach().clone() for p in model.parameters()),
            *(v.clone() for s in optimizer.state.values() for v in s.values()),
            *(t.clone() for t in (book.scale, book.history, book.position, bank.amax, bank.weights[0].w8.view(torch.uint8))),
        ]
        before = everything()
        x = torch.randn(8, 32)
        x[0, 0] = math.inf
        scaler.scale(model(x).square().mean()).backward()
        if how == "unscaled":
            scaler.unscale_(optimizer)
        if how == "norm":
            ampplug.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(before, everything())), how
        assert not book.amax.any()  # what the skipped step recorded is discarded
        scaler.scale(model(torch.randn(8, 32)).square().mean()).backward()
        scaler.step(optimizer)
        assert optimizer.state[model[0].weight]["step"].item() == 4 and not torch.equal(before[0], model[0].weight)


@pytest.mark.parametrize("drop", ["optimizer", "model", "by hand", "model in place"])
def test_a_clip_goes_with_its_gradients(drop):
    """A step given up after clipping leaves nothing behind, whoever dropped its gradients."""
    ways = {
        "optimizer": lambda m, o: o.zero_grad(),
        "model": lambda m, o: m.zero_grad(),
        "by hand": lambda m, o: [setattr(p, "grad", None) for p in m.parameters()],
        "model in place": lambda m, o: m.zero_grad(set_to_none=False),
    }
    for again in (True, False) if drop != "model in place" else (True,):
        results = []
        for give_up in (False, True):
            model, optimizer = start(net(32, 32), betas=(0.0, 0.9), eps=1.0)
            if give_up:
                model(torch.full((4, 32), math.nan)).sum().backward()
                assert not torch.isfinite(ampplug.clip_grad_norm_(model.parameters(), 1.0))
                ways[drop](model, optimizer)
            (10 * model(torch.ones(4, 32))).sum().backward()
            if again:
                ampplug.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            results.append(ampplug.fp32_state_dict(model)["0.bias"])
        assert torch.equal(*results) and not torch.equal(results[0], net(32, 32)[0].bias)


def test_gradients_replaced_by_hand_stay_clipped():
    """As in torch, where the clip was done in place: masking them afterwards does not undo it."""
    moved = []
    for clip in (ampplug.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        model, optimizer = start(net(32, 32), betas=(0.0, 0.9), eps=1.0, weight_decay=0.0)
        before = ampplug.fp32_state_dict(model)
        (10 * model(torch.ones(4, 32))).sum().backward()
        clip(model.parameters(), 0.5)
        for p in model.parameters():
            p.grad = p.grad * (torch.arange(32) % 2)
        optimizer.step()
        moved.append(ampplug.fp32_state_dict(model)["0.weight"] - before["0.weight"])
    assert (moved[0] - moved[1]).norm() / moved[1].norm() < 0.02 and moved[1].any()


def test_other_clips_are_torchs():
    """Another norm, one tensor, no tensor, an error asked for, clipping by value."""
    model, optimizer = start(net(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    exact = [p.grad.float().clone() for p in model.parameters()]
    norm = ampplug.clip_grad_norm_(model.parameters(), 0.5, norm_type=math.inf)
    assert norm.item() == pytest.approx(max(g.abs().max().item() for g in exact), rel=1e-2)
    assert max(p.grad.abs().max().item() for p in model.parameters()) == pytest.approx(0.5, rel=1e-2)
    assert ampplug.clip_grad_norm_([], 1.0).item() == 0.0
    assert ampplug.clip_grad_norm_(model[0].weight, 1e-3).item() > 1e-3 and model[0].weight.grad.norm() < 2e-3
    model[0].bias.grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        ampplug.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    assert model[0].weight.grad.abs().max() <= 0.1


def test_clip_and_unscale_together():
    """unscale_, clip, step: the norm is that of the unscaled gradients and the loss scale is not applied twice."""
    results = []
    for scale in (1.0, 1024.0):
        model, optimizer = start(net(32, 32), betas=(0.0, 0.9), eps=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(10 * model(torch.ones(4, 32)).square().sum()).backward()
        scaler.unscale_(optimizer)
        norm = ampplug.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        results.append((norm.item(), ampplug.fp32_state_dict(model)["0.weight"]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-3) and (results[0][1] - results[1][1]).abs().max() < 1e-5


def test_odd_shapes():
    """Scalars, empty and many-dimensional parameters move as any other."""
    shapes = [(), (0,), (0, 5), (1,), (3, 2, 2), (2, 3, 1, 129)]
    model = nn.ParameterList([nn.Parameter(torch.ones(s, dtype=d)) for s in shapes for d in (torch.float32, torch.bfloat16)])
    with pytest.warns(UserWarning, match="no layer"):
        model, optimizer = start(model, weight_decay=0.0)
    for _ in range(2):
        for p in model:
            p.grad = torch.ones_like(p)
        ampplug.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for v in ampplug.fp32_state_dict(model).values():
        assert torch.allclose(v, torch.full_like(v, 0.98), atol=1e-3)
    assert ampplug.torch_state_dict(optimizer)["state"][0]["exp_avg"].shape == ()


@pytest.mark.parametrize("cast", ["float", "bfloat16", "float and back", "to cpu"])
def test_module_casts_keep_training_attached(cast):
    """After any cast the optimizer still moves the very parameters that the model computes with, by the right amount."""
    model, optimizer = start(net(32, 32), weight_decay=0.0)
    x = torch.randn(16, 32)
    model(x).square().mean().backward()
    optimizer.step(), optimizer.zero_grad()
    masters = ampplug.fp32_state_dict(model)
    if cast in ("float", "float and back"):
        model.float()
        assert torch.equal(model[0].bias, masters["0.bias"])
    if cast in ("bfloat16", "float and back"):
        model.bfloat16()
    if cast == "to cpu":
        model.to("cpu")
    inputs = x.to(model[0].bias.dtype)
    y = model(inputs)
    y.float().square().mean().backward()
    optimizer.step()
    moved = ampplug.fp32_state_dict(model)["0.weight"] - masters["0.weight"]
    assert 5e-3 < moved.abs().max() < 1.2e-2, moved.abs().max()  # one step of about lr, and roundings of a cast to bf16 below it
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    wanted = x @ model[0].weight.float().t() + model[0].bias.float()
    assert (model(inputs).float() - wanted).norm() / wanted.norm() < 0.06


def test_sparse_gradients_are_refused_with_the_way_out():
    model = nn.ModuleDict({"e": nn.Embedding(8, 4, sparse=True), "l": nn.Linear(4, 4)})
    model, optimizer = start(model)
    before = ampplug.fp32_state_dict(model)
    model["l"](model["e"](torch.tensor([1]))).sum().backward()
    with pytest.raises(RuntimeError, match="SparseAdam at O1"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), ampplug.fp32_state_dict(model).values()))


def test_late_groups_are_refused_whole():
    model, optimizer = start(net(8, 8))
    for group, error in (({"params": [model[0].weight]}, "more than one"), ({"params": [nn.Parameter(torch.zeros(2).double())]}, "float64"), ({"params": [nn.Parameter(torch.zeros(2))], "lr": -1.0}, "negative")):
        with pytest.raises(ValueError, match=error):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def test_named_parameters():
    model = net(8, 8)
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.named_parameters(), lr=1e-2))
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.zeros(2)))]})
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    assert state["param_groups"][0]["param_names"] == ["0.weight", "0.bias"] and state["param_groups"][1]["param_names"] == ["late"]
    optimizer.load_state_dict(state)


def test_betas_without_a_bound():
    """beta1**2 >= beta2 bounds no step; ours is clamped, and W8 still never clips."""
    model, optimizer = start(net(32, 32), betas=(0.99, 0.95), lr=0.05)
    x = torch.randn(16, 32)
    for t in range(40):
        (model(x * (-1) ** (t // 7)) * 10.0 ** (t % 3)).sum().backward()
        optimizer.step(), optimizer.zero_grad()
        w = model[0]._ampplug.weight
        assert (w.own_w8.float() * w.scale_inv - model[0].weight.float()).abs().max() <= model[0].weight.abs().max() / 16 + 1e-6


@pytest.mark.parametrize("cls,settings", [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.RMSprop, {}), (torch.optim.AdamW, {"fused": True}), (torch.optim.NAdam, {}), (torch.optim.Adam, {"amsgrad": True})], ids=str)
def test_o1_is_the_users_optimizer_untouched(cls, settings):
    """Given the same gradients, O1 moves weights bit for bit as the optimizer alone does; its class and state are torch's."""
    results = []
    for level in ("O1", None):
        model = net(32, 32)
        optimizer = cls(model.parameters(), lr=1e-2, **settings)
        if level:
            ampplug.initialize(model, optimizer, level)
        for t in range(5):
            torch.manual_seed(t)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        results.append((model.state_dict(), optimizer.state_dict()["state"], type(optimizer)))
    assert results[0][2] is results[1][2] is cls
    assert all(torch.equal(a, b) for a, b in zip(results[0][0].values(), results[1][0].values()))
    assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(results[1][1][i][k])) for i, s in results[0][1].items() for k, v in s.items())


def test_lbfgs_at_o1():
    """An optimizer that evaluates its closure many times, moving weights in between."""
    model = net(32, 32)
    model, optimizer = ampplug.initialize(model, torch.optim.LBFGS(model.parameters(), lr=0.5), "O1")
    x, t = torch.randn(16, 32), torch.randn(16, 32)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - t).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    assert closure().item() < 0.3 * first


def test_pickling_and_copying_say_what_to_do():
    _, optimizer = start(net(8, 8))
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(optimizer)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
