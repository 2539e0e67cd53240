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
    if change is load_assign and level == "O2":
        pytest.skip("assign=True replaces the parameter objects that the optimizer holds, as in plain torch")
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
