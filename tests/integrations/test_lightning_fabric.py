"""Lightning's Fabric, the real packages on CPU: the same numbers as a loop by hand, exact resume, clear refusals."""

import pytest
import torch
from torch import nn

import ampplug

pytest.importorskip("lightning")

from lightning_helpers import PACKAGES, batches, by_hand, everything, load, loader, loss_of, make_fabric, network, run_fabric


@pytest.fixture(params=PACKAGES, ids=lambda p: p[0])
def package(request):
    """(the Trainer's package, ampplug's classes for it)."""
    pytest.importorskip(request.param[0])
    return load(*request.param)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fabric_same_as_by_hand(package, level, precision):
    """expect: every loss and the final state bit for bit."""
    pl, own = package
    name = next(p for p in PACKAGES if p[0] == pl.__name__)
    losses, net, o = run_fabric(make_fabric(name, own.AmpPlugFabricStrategy(level), precision=precision), range(10), accumulate=2)
    wanted, plain, plain_o = by_hand(10, level, precision=precision, accumulate=2, fabric=True)
    assert torch.equal(torch.stack(losses), torch.stack(wanted))
    assert torch.equal(everything(net, o), everything(plain, plain_o))
    assert losses[-1] < losses[0] and type(net[0]) is not nn.Linear and net[0].weight.dtype == plain[0].weight.dtype


def test_fabric_keeps_the_order_of_data():
    """One process. expect: the loader's own order, not a distributed sampler's."""
    data = make_fabric().setup_dataloaders(loader(5))
    assert torch.equal(torch.cat(list(data)), torch.cat(batches(5)))


def test_fabric_clips():
    for arguments, reference in (
        ({"max_norm": 0.05}, lambda p: ampplug.clip_grad_norm_(p, 0.05)),
        ({"max_norm": 0.05, "error_if_nonfinite": False}, lambda p: ampplug.clip_grad_norm_(p, 0.05)),
        ({"clip_val": 1e-3}, lambda p: torch.nn.utils.clip_grad_value_(p, 1e-3)),
    ):
        _, net, o = run_fabric(make_fabric(), range(6), clip=arguments)
        assert torch.equal(everything(net, o), everything(*by_hand(6, "O2", clip=reference)[1:]))


def test_fabric_norm_that_is_not_finite():
    """expect: an error, or on request a step that changes nothing."""
    fabric = make_fabric()
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    fabric.backward(loss_of(model, batches(1)[0]) * float("nan"))
    with pytest.raises(RuntimeError, match="norm of order 2.0 of the gradients is nan"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    before = net[0].weight.clone()
    assert not fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).isfinite()
    optimizer.step()
    assert torch.equal(before, net[0].weight)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fabric_resume_is_exact(package, level, tmp_path):
    pl, own = package
    name = next(p for p in PACKAGES if p[0] == pl.__name__)
    wanted, net, o = run_fabric(make_fabric(name, own.AmpPlugFabricStrategy(level)), range(20))
    run_fabric(make_fabric(name, own.AmpPlugFabricStrategy(level)), range(10), path=tmp_path / "c")
    found, again, again_o = run_fabric(make_fabric(name, own.AmpPlugFabricStrategy(level)), range(10, 20), path=tmp_path / "c", seed=1)
    assert (torch.stack(found) - torch.stack(wanted[10:])).abs().max().item() == 0.0
    assert torch.equal(everything(again, again_o), everything(net, o))


def test_fabric_refusals():
    fabric = make_fabric()
    with pytest.raises(RuntimeError, match="call fabric.setup.model, optimizer."):
        fabric.setup_optimizers(torch.optim.AdamW(fabric.setup_module(network()).parameters()))
    with pytest.raises(ValueError, match="precision='64-true' .a DoublePrecision.; with ampplug legal are"):
        make_fabric(precision="64-true")
    with pytest.raises(TypeError, match="AmpPlugPrecision is for the Trainer"):
        make_fabric(strategy="auto", plugins=[load()[1].AmpPlugPrecision()]).setup(network())
