"""Every way a weight can change reaches the next output."""

import copy

import pytest
import torch
from torch import nn

import ampplug


def start(level: str, cls=torch.optim.AdamW, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    return ampplug.initialize(model, cls(model.parameters(), **{"lr": 1e-2, **settings}), level)


X = torch.randn(16, 64, generator=torch.Generator().manual_seed(7))


def close(model: nn.Module) -> bool:
    """The output is that of the weight as it is now, within FP8 error, in this mode."""
    wanted = X @ model[0].weight.detach().float().t()
    return bool((model(X) - wanted).norm() / wanted.norm() < 0.06)


OPTIMIZERS = [
    (torch.optim.AdamW, dict(lr=0.1)),
    (torch.optim.AdamW, dict(lr=0.1, fused=True)),
    (torch.optim.Adam, dict(lr=0.1, foreach=True)),
    (torch.optim.SGD, dict(lr=1.0, momentum=0.9, nesterov=True)),
    (torch.optim.RMSprop, dict(lr=0.1)),
    (torch.optim.Adagrad, dict(lr=0.5)),
]


@pytest.mark.parametrize("cls,settings", OPTIMIZERS, ids=lambda v: getattr(v, "__name__", "-".join(map(str, v)) if isinstance(v, dict) else str(v)))
def test_any_optimizer_at_o1(cls, settings):
    model, optimizer = start("O1", cls, **settings)
    before = model(X).detach()
    for _ in range(2):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
    assert (model(X) - before).norm() / before.norm() > 0.1 and close(model)


def test_our_step():
    model, optimizer = start("O2", lr=0.1)
    before = model(X).detach()
    model(X).square().sum().backward()
    optimizer.step()
    assert (model(X) - before).norm() / before.norm() > 0.1 and close(model)


def load(model):
    model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()})


def load_assign(model):
    model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}, assign=True)


def in_place(model):
    with torch.no_grad():
        model[0].weight.mul_(2)


def replace_data(model):
    model[0].weight.data = model[0].weight.data * 2


def from_vector(model):
    nn.utils.vector_to_parameters(2 * nn.utils.parameters_to_vector(model.parameters()), model.parameters())


def flat_view(model):
    """The weight becomes a view of a flat buffer, as sharding wrappers make it."""
    flat = (2 * model[0].weight.data).flatten()
    model[0].weight.data = flat.view(64, 64)


def initializer(model):
    nn.init.normal_(model[0].weight, std=0.5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("change", [load, in_place, replace_data, from_vector, flat_view, initializer, load_assign])
def test_seen_at_once(change, level, training):
    model, optimizer = start(level)
    model(X).sum().backward()
    optimizer.step()
    model.train(training)
    before = model(X).detach()
    change(model)
    assert (model(X) - before).norm() / before.norm() > 0.4 and close(model)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_writes_through_data(level):
    """They leave no trace: evaluation sees them at once, training after `refresh`. Without it a step writes W8 anew, at O2 still with a scale for
    the old weight's amax, so that a larger weight is clipped until the step after."""
    model, optimizer = start(level)
    model(X).sum().backward()
    optimizer.step()
    model[0].weight.data.copy_(2 * model[0].weight.data)
    model.eval()
    assert close(model)
    model.train()
    ampplug.refresh(model)
    assert close(model)
    model[0].weight.data.copy_(2 * model[0].weight.data)
    for _ in range(1 if level == "O1" else 2):
        optimizer.step()
    assert close(model)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_swapping_an_average_in_and_out(level):
    model, optimizer = start(level, lr=0.1)
    average = copy.deepcopy([p.detach() for p in model.parameters()])
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
    kept = [p.detach().clone() for p in model.parameters()]
    for p, a in zip(model.parameters(), average):
        p.data.copy_(a)
    model.eval()
    swapped = model(X).detach()
    assert close(model)
    for p, k in zip(model.parameters(), kept):
        p.data.copy_(k)
    assert close(model) and (model(X) - swapped).norm() > 0.1 * swapped.norm()
    model.train()
    assert close(model)


def by_foreach(model):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 2.0)


def by_copy(model):
    with torch.no_grad():
        model[0].weight.copy_(2 * model[0].weight)


def one_row(model):
    with torch.no_grad():
        model[0].weight[3:40] *= -1


def partial_load(model):
    model[0].load_state_dict({"weight": 2 * model[0].weight.detach()}, strict=False)


def new_parameter(model):
    model[0].weight = nn.Parameter(2 * model[0].weight.detach())


def swapped_tensors(model):
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(2 * model[0].weight.detach()))


def set_storage(model):
    with torch.no_grad():
        model[0].weight.set_(2 * model[0].weight)


def cast_there_and_back(model):
    model.float()
    in_place(model)
    model.bfloat16().to(torch.float32)


def pruned(model):
    import torch.nn.utils.prune as prune

    prune.random_unstructured(model[0], "weight", 0.5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("change", [by_foreach, by_copy, one_row, partial_load, new_parameter, swapped_tensors, set_storage, cast_there_and_back, pruned])
def test_seen_at_once_too(change, level, training):
    model, optimizer = start(level)
    model(X).sum().backward()
    optimizer.step(), optimizer.zero_grad()
    model.train(training)
    before = model(X).detach()
    change(model)
    assert (model(X) - before).norm() / before.norm() > 0.4 and close(model)


def data_inplace(model):
    model[0].weight.data.mul_(2)


def through_numpy(model):
    model.float()
    model(X)  # W8 follows the cast first
    model[0].weight.detach().numpy()[:] *= 2


def flat_buffer(model):
    flat = model[0].weight.data.flatten()
    model[0].weight.data = flat.view(64, 64)
    model(X)
    flat.mul_(2)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("change", [data_inplace, through_numpy, flat_buffer])
def test_writes_without_a_trace(change, level):
    """No version counter moves: evaluation sees them at once all the same, training after refresh."""
    model, optimizer = start(level)
    model(X).sum().backward()
    optimizer.step(), optimizer.zero_grad()
    before = model(X).detach()
    change(model)
    model.eval()
    assert (model(X) - before).norm() / before.norm() > 0.4 and close(model)
    model.train()
    ampplug.refresh(model)
    assert (model(X) - before).norm() / before.norm() > 0.4 and close(model)


def test_edits_before_a_step_at_o2():
    """A weight that grew a thousandfold just before our step is neither clipped in W8 nor joined with the remainder of its old value."""
    model, optimizer = start("O2", weight_decay=0.0)
    for _ in range(3):
        model(X).sum().backward()
        optimizer.step(), optimizer.zero_grad()
    model(X).sum().backward()
    with torch.no_grad():
        model[0].weight.mul_(1000)
    edited = model[0].weight.detach().float().clone()
    assert torch.equal(ampplug.fp32_state_dict(model)["0.weight"], edited)
    optimizer.step()
    assert close(model) and (ampplug.fp32_state_dict(model)["0.weight"] - edited).abs().max() < 8 * 1e-2


def test_frozen_weights_and_biases():
    """A weight that no optimizer holds, and a bias."""
    for level in ("O1", "O2"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model[0].weight.requires_grad_(False)
        model, optimizer = ampplug.initialize(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), level)
        first = model[0](X).detach()
        with torch.no_grad():
            model[0].weight.mul_(3)
        second = model[0](X).detach()
        assert (second - first).norm() > first.norm()
        with torch.no_grad():
            model[0].bias.add_(1)
        assert torch.allclose(model[0](X), second + 1, atol=1e-5)


def test_an_embedding_moves_its_tied_head():
    """The gradient comes through the embedding alone; the head's FP8 copy follows."""
    for level in ("O1", "O2"):
        torch.manual_seed(0)
        model = nn.ModuleDict({"e": nn.Embedding(64, 64), "0": nn.Linear(64, 64, bias=False)})
        model["0"].weight = model["e"].weight
        model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.1), level, select="all")
        before = model["0"](X).detach()
        model["e"](torch.arange(64)).square().sum().backward()
        optimizer.step()
        after = model["0"](X)
        wanted = X @ model["e"].weight.detach().t()
        assert (after - before).norm() / before.norm() > 0.05 and 0.01 < (after - wanted).norm() / wanted.norm() < 0.06


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_average_by_load_state_dict(level):
    """EMA evaluation as many trainers do it: load the average, evaluate, load the weights back, train on."""
    model, optimizer = start(level, lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for _ in range(4):
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()
        average.update_parameters(model)
    kept, own = copy.deepcopy(model.state_dict()), model(X).detach()
    masters = ampplug.fp32_state_dict(model)
    model.load_state_dict(average.module.state_dict())
    assert close(model) and torch.equal(model(X), average.module(X)) and (model(X) - own).norm() / own.norm() > 0.02
    model.load_state_dict(kept if level == "O1" else masters)
    assert torch.equal(model[0].weight, kept["0.weight"]) and torch.equal(ampplug.fp32_state_dict(model)["0.weight"], masters["0.weight"])
    assert close(model)
