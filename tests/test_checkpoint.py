"""Checkpoints: exact resume, plain formats, both directions."""

import copy
import io

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
    with pytest.raises(TypeError, match="deep-copied"):
        copy.deepcopy(start(net())[1])
