"""Checkpoints: exact resume, plain formats, both directions."""

import copy
import io
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import ampplug


def net(seed: int = 0, dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)).to(dtype)


def start(model, level="O2"):
    return ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)


def train(model, optimizer, steps) -> list[float]:
    losses = []
    for t in steps:
        torch.manual_seed(t)
        x = torch.randn(16, 32, dtype=model[0].bias.dtype) * 2.0 ** (t % 4)
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def through_a_file(state):
    """Saved and loaded with weights_only=True."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resume_is_the_same_run(level, dtype, model_first):
    model, optimizer = start(net(dtype=dtype), level)
    train(model, optimizer, range(20))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    wanted = train(model, optimizer, range(20, 26))
    again, again_optimizer = start(net(5, dtype), level)
    steps = [lambda: again.load_state_dict(saved["model"]), lambda: again_optimizer.load_state_dict(saved["optimizer"])]
    for step in steps if model_first else steps[::-1]:
        step()
    assert train(again, again_optimizer, range(20, 26)) == wanted
    for a, b in zip(model.state_dict().values(), again.state_dict().values()):
        assert torch.equal(a, b)


def test_plain_checkpoints_both_ways():
    plain = net()
    model, optimizer = start(net(5))
    model.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(16, 32)
    assert (model(x) - plain(x)).norm() / plain(x).norm() < 0.10
    other = net(6)
    other.load_state_dict(ampplug.fp32_state_dict(model), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), plain.state_dict().values()))
    other.load_state_dict(model.state_dict(), strict=True)


def test_fp32_values_fill_both_halves():
    model, optimizer = start(net(dtype=torch.bfloat16))
    values = {k: torch.randn_like(v.float()) for k, v in model.state_dict().items()}
    model.load_state_dict(values)
    assert all(torch.equal(v, values[k]) for k, v in ampplug.fp32_state_dict(model).items())
    model[0].load_state_dict({k: 2 * values[f"0.{k}"] for k in ("weight", "bias")})  # a part of the model
    assert torch.equal(ampplug.fp32_state_dict(model)["0.weight"], 2 * values["0.weight"])
    train(model, optimizer, range(2))


def test_bf16_values_clear_the_remainder():
    model, optimizer = start(net())
    train(model, optimizer, range(3))
    values = {k: v.clone() for k, v in net(9).bfloat16().state_dict().items()}
    model.load_state_dict(values)
    assert torch.equal(ampplug.fp32_state_dict(model)["0.weight"], values["0.weight"].float())


def test_torch_adamw_states_in_and_out():
    plain = net()
    exact = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, exact, range(10))
    model, optimizer = start(copy.deepcopy(plain))
    optimizer.load_state_dict(copy.deepcopy(exact.state_dict()))
    back = ampplug.torch_state_dict(optimizer)
    for i, state in exact.state_dict()["state"].items():
        for name, slack in (("exp_avg", 0.06), ("exp_avg_sq", 0.12)):
            assert (back["state"][i][name] - state[name]).norm() / state[name].norm() < slack
        assert back["state"][i]["step"] == state["step"]
    a, b = train(model, optimizer, range(10, 16)), train(plain, exact, range(10, 16))
    assert a == pytest.approx(b, rel=0.05)
    fresh = net(3)
    fresh.load_state_dict(ampplug.fp32_state_dict(model))
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    fresh_optimizer.load_state_dict(ampplug.torch_state_dict(optimizer))
    train(fresh, fresh_optimizer, range(2))
    with pytest.raises(TypeError, match="AdamW"):
        ampplug.torch_state_dict(fresh_optimizer)


def test_a_trained_optimizer_goes_on():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(10))
    moment = optimizer.state[model[0].weight]["exp_avg"].clone()
    start_again = ampplug.initialize(model, optimizer)
    state = ampplug.torch_state_dict(start_again[1])["state"][0]
    assert state["step"] == 10 and (state["exp_avg"] - moment).norm() / moment.norm() < 0.06


def test_wrong_states_are_refused_whole():
    model, optimizer = start(net())
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict()["state"])
    other = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 16))
    o = torch.optim.AdamW(other.parameters())
    other(torch.randn(2, 32)).sum().backward()
    o.step()
    with pytest.raises(ValueError, match="shape"):
        optimizer.load_state_dict(o.state_dict())
    with pytest.raises(ValueError, match="groups"):
        optimizer.load_state_dict(torch.optim.AdamW([nn.Parameter(torch.zeros(2))]).state_dict())
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(v, after[i][k]) for i, s in before.items() for k, v in s.items())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_copies_pickles_and_averages(level):
    model, optimizer = start(net(), level)
    train(model, optimizer, range(3))
    x = torch.randn(16, 32)
    copied = copy.deepcopy(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    first = model[0].weight.detach().float().clone()
    y = copied(x).detach()
    assert torch.equal(y, model(x))
    train(model, optimizer, range(3, 6))
    average.update_parameters(model)
    assert torch.equal(copied(x), y) and not torch.equal(model(x), y)
    assert torch.allclose(average.module[0].weight.float(), (first + model[0].weight.float()) / 2, atol=1e-2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x), model(x)) and file.getbuffer().nbytes < 200_000
    assert torch.equal(pickle.loads(pickle.dumps(model[2]))(torch.ones(2, 64)), model[2](torch.ones(2, 64)))  # as multiprocessing does
    with pytest.raises(TypeError, match="deep-copied"):
        copy.deepcopy(start(net())[1])


@pytest.mark.parametrize("settings", [{"recipe": "current"}, {"history": 4, "margin": 1}, {"power_of_two": True, "seed": 7}], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resume_under_every_recipe(level, settings):
    def build(seed):
        model = net(seed)
        return ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, **settings)

    model, optimizer = build(0)
    train(model, optimizer, range(6))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    wanted = train(model, optimizer, range(6, 10))
    again, again_optimizer = build(5)
    again_optimizer.load_state_dict(saved["optimizer"])
    again.load_state_dict(saved["model"])
    assert train(again, again_optimizer, range(6, 10)) == wanted


def test_resume_with_schedule_scaler_groups_and_clip():
    """A whole training script's state, before the first step and after some."""

    def build(seed):
        model = net(seed)
        groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
        model, optimizer = ampplug.initialize(model, torch.optim.AdamW(groups, lr=1e-2))
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20), torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=3)

    def run(model, optimizer, schedule, scaler, steps):
        losses = []
        for t in steps:
            torch.manual_seed(t)
            loss = (model(torch.randn(16, 32)) * 4).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            ampplug.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer), scaler.update(), schedule.step(), optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    for stop in (0, 1, 7):
        run_one = build(0)
        run(*run_one, range(stop))
        saved = through_a_file([x.state_dict() for x in run_one])
        wanted = run(*run_one, range(stop, 12))
        other = build(9)
        for x, state in zip(other, saved):
            x.load_state_dict(state)
        assert run(*other, range(stop, 12)) == wanted and len(set(wanted)) == len(wanted)


@pytest.mark.parametrize("model_first", [True, False])
def test_o1_run_goes_on_at_o2(model_first):
    """Weights exactly, both halves; moments and scales as they were."""
    model, optimizer = start(net(), "O1")
    train(model, optimizer, range(10))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    again, again_optimizer = start(net(5))
    steps = [lambda: again.load_state_dict(saved["model"]), lambda: again_optimizer.load_state_dict(saved["optimizer"])]
    for step in steps if model_first else steps[::-1]:
        step()
    for name, value in ampplug.fp32_state_dict(again).items():
        assert torch.equal(value, saved["model"][name]), name
    assert torch.equal(again[0]._ampplug.book.scale, model[0]._ampplug.book.scale) and again_optimizer.state[again[0].weight]["step"].item() == 10
    assert train(again, again_optimizer, range(10, 16)) == pytest.approx(train(model, optimizer, range(10, 16)), rel=0.05)


def test_o2_run_goes_on_at_o1():
    """The 8-bit state is refused there, before anything is changed; torch_state_dict goes in."""
    model, optimizer = start(net())
    train(model, optimizer, range(10))
    for settings in ({}, {"recipe": "current"}):
        again = net(5)
        again, again_optimizer = ampplug.initialize(again, torch.optim.AdamW(again.parameters(), lr=3e-2), "O1", **settings)
        with pytest.raises(ValueError, match="torch_state_dict"):
            again_optimizer.load_state_dict(optimizer.state_dict())
        assert again_optimizer.param_groups[0]["lr"] == 3e-2 and not again_optimizer.state
        again.load_state_dict(ampplug.fp32_state_dict(model))
        again_optimizer.load_state_dict(through_a_file(ampplug.torch_state_dict(optimizer)))
        start_of_both = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        assert train(again, again_optimizer, range(10, 14)) == pytest.approx(train(model, optimizer, range(10, 14)), rel=0.05)
        model.load_state_dict(start_of_both[0])
        optimizer.load_state_dict(start_of_both[1])


def test_states_of_other_optimizers():
    """Adam's state into AdamW, as in torch, stays AdamW; SGD's is refused by name, whole."""
    plain = net()
    adam = torch.optim.Adam(plain.parameters(), lr=1e-3, weight_decay=0.1)
    train(plain, adam, range(2))
    exact = torch.optim.AdamW(net().parameters())
    exact.load_state_dict(copy.deepcopy(adam.state_dict()))
    model, optimizer = start(net())
    optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    for key in ("lr", "weight_decay", "decoupled_weight_decay", "betas"):
        assert optimizer.param_groups[0][key] == exact.param_groups[0][key], key
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    train(plain, sgd, range(2))
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(ValueError, match="'momentum_buffer'.*Adam"):
        optimizer.load_state_dict(sgd.state_dict())
    assert all(torch.equal(v, optimizer.state_dict()["state"][i][k]) for i, s in before.items() for k, v in s.items())
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_a_broken_state_is_refused_by_initialize():
    """An optimizer that was trained, and whose state is not Adam's: nothing is changed."""
    for broken, words in (({"step": torch.tensor(1.0)}, "'step'"), ({"step": torch.tensor(1.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}, "shape")):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.state[model[0].weight] = broken
        with pytest.raises(ValueError, match=f"'0.weight'.*{words}"):
            ampplug.initialize(model, optimizer)
        assert type(model[0]) is nn.Linear and type(optimizer) is torch.optim.AdamW and model[0].weight.dtype == torch.float32


def test_fp32_state_dict_is_exact():
    """It is the master to the last bit: bf16 half and remainder joined; what is not split comes as it is; the model goes on undisturbed."""
    model, optimizer = start(net())
    train(model, optimizer, range(5))
    values = ampplug.fp32_state_dict(model)
    assert list(values) == list(model.state_dict()) and all(v.dtype == torch.float32 for v in values.values())
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        if p.dtype == torch.bfloat16:
            joined = ((p.detach().view(torch.int16).int() << 16) + state["master_low"].int()).view(torch.float32)
            assert torch.equal(values[name], joined) and state["master_low"].any() and torch.equal(values[name].bfloat16(), p)
        else:
            assert torch.equal(values[name], p) and values[name].data_ptr() != p.data_ptr()
    again, _ = start(net(5))
    again.load_state_dict(values)
    assert all(torch.equal(v, values[k]) for k, v in ampplug.fp32_state_dict(again).items())
    # a model that was never converted gives its own values
    assert all(torch.equal(v, w) for v, w in zip(ampplug.fp32_state_dict(net()).values(), net().state_dict().values()))


def test_partial_and_wrong_model_states():
    """strict=False fills what is there; a wrong shape is torch's error and leaves no half-loaded remainder for later."""
    model, optimizer = start(net())
    train(model, optimizer, range(3))
    before = ampplug.fp32_state_dict(model)
    value = torch.randn(64, 32)
    model.load_state_dict({"0.weight": value}, strict=False)
    after = ampplug.fp32_state_dict(model)
    assert torch.equal(after["0.weight"], value) and torch.equal(after["2.weight"], before["2.weight"])
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**before, "2.weight": torch.zeros(3, 3)})
    assert torch.equal(ampplug.fp32_state_dict(model)["0.weight"], before["0.weight"])
    assert torch.equal(ampplug.fp32_state_dict(model)["2.weight"], before["2.weight"])


def test_a_frozen_parameter_and_a_late_group_resume():
    def build(seed):
        model, late = net(seed), nn.Parameter(torch.ones(7))
        model[2].weight.requires_grad_(False)
        model, optimizer = start(model)
        optimizer.add_param_group({"params": [late], "lr": 1e-3})
        return model, optimizer, late

    model, optimizer, late = build(0)
    late.grad = torch.ones(7)
    train(model, optimizer, range(3))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    again, again_optimizer, again_late = build(4)
    again_late.data.copy_(late.data)
    again.load_state_dict(saved["model"])
    again_optimizer.load_state_dict(saved["optimizer"])
    for m, o, p in ((model, optimizer, late), (again, again_optimizer, again_late)):
        m[2].weight.requires_grad_(True)
        p.grad = torch.ones(7)
        train(m, o, range(3, 6))
    assert torch.equal(late, again_late) and late[0] < 1
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_copy_trains_on_its_own(level):
    """With an optimizer of torch's, without one of ours, and without touching the original."""
    model, optimizer = start(net(), level)
    train(model, optimizer, range(3))
    kept = copy.deepcopy((model.state_dict(), model[0]._ampplug.book.scale, model[0]._ampplug.book.amax))
    copied = copy.deepcopy(model).float()
    x = torch.randn(16, 32)
    before = copied(x).detach()
    train(copied, torch.optim.SGD(copied.parameters(), lr=0.1), range(4))
    assert (copied(x) - before).norm() / before.norm() > 0.01
    exact = net().float()
    exact.load_state_dict(copied.state_dict())
    assert (copied(x) - exact(x)).norm() / exact(x).norm() < 0.10
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), kept[0].values()))
    assert torch.equal(model[0]._ampplug.book.scale, kept[1]) and torch.equal(model[0]._ampplug.book.amax, kept[2])


def test_a_pickled_model_loads_in_a_fresh_process(tmp_path):
    model, optimizer = start(net())
    train(model, optimizer, range(3))
    x = torch.randn(16, 32)
    torch.save({"model": model, "x": x, "y": model.eval()(x).detach()}, tmp_path / "model.pt")
    code = (
        "import sys, torch; c = torch.load(sys.argv[1], weights_only=False); m = c['model'];"
        "assert torch.equal(m(c['x']), c['y']); m.train(); m(c['x']).sum().backward(); assert m[0].weight.grad is not None; print('fine')"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], capture_output=True, text=True)
    assert run.stdout.strip() == "fine", run.stderr


def test_tied_weights_keep_their_keys():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.a, self.b = nn.Embedding(32, 32), nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
            self.b.weight = self.a.weight

        def forward(self, i):
            return self.b(self.a(self.e(i)))

    model = Tied()
    names = list(model.state_dict())
    model, optimizer = start(model)
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    values = ampplug.fp32_state_dict(model)
    assert list(model.state_dict()) == list(values) == names and torch.equal(values["a.weight"], values["b.weight"])
    plain = Tied()
    plain.load_state_dict(values)
    again, _ = start(Tied())
    again.load_state_dict(plain.state_dict())
    assert torch.equal(ampplug.fp32_state_dict(again)["b.weight"], values["a.weight"]) and again.a.weight is again.b.weight


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_run_changes_its_recipe(level):
    """From current to delayed scaling and back: the same weights and moments go on; slots without a scale scale just in time."""

    def build(recipe):
        model = net(5)
        return ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, recipe=recipe)

    for one, other in (("current", "delayed"), ("delayed", "current")):
        model, optimizer = build(one)
        train(model, optimizer, range(8))
        saved = through_a_file([ampplug.fp32_state_dict(model), optimizer.state_dict()])
        again, again_optimizer = build(other)
        again.load_state_dict(saved[0])
        again_optimizer.load_state_dict(saved[1])
        assert all(torch.equal(v, saved[0][k]) for k, v in ampplug.fp32_state_dict(again).items())
        assert train(again, again_optimizer, range(8, 12)) == pytest.approx(train(model, optimizer, range(8, 12)), rel=0.05)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_names_without_wrappers(level):
    """Scales saved from a compiled (or DDP) model fit the plain one, and back; a pattern selects the same layers."""
    states = []
    for wrap in (lambda m: m, torch.compile, lambda m: nn.Sequential(torch.compile(m[0]), *m[1:])):
        model = wrap(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plan = ampplug.plan(model, optimizer, level, select=["0"])
        assert plan.converted == ("0",) and not any("_orig_mod" in p.name for p in plan.parameters)
        ampplug.initialize(model, optimizer, level, select=["0", "*2"])
        states.append(optimizer.state_dict())
    assert all(s["ampplug"]["book"]["slots"] == states[0]["ampplug"]["book"]["slots"] for s in states)
    if level == "O2":
        assert all(s["ampplug"]["weights"]["names"] == states[0]["ampplug"]["weights"]["names"] for s in states)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scales_of_other_layers_are_told(level):
    """Resumed with another selection of layers. expect: one warning that names both kinds; with the same selection none."""
    model, optimizer = net(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ampplug.initialize(model, optimizer, level, select=["0"])
    other = net()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    ampplug.initialize(other, other_optimizer, level, select=["2"])
    with pytest.warns(UserWarning, match="no scales for 2 of 2 slots .'2.x'.*scales of 2 slots .'0.dy'"):
        other_optimizer.load_state_dict(optimizer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(optimizer.state_dict())
