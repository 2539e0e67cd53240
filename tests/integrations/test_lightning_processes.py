"""Lightning's Trainer and Fabric in two processes with different data: ranks agree bit for bit, and resume exactly."""

import importlib
import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import ampplug

pytest.importorskip("lightning")

from lightning_helpers import (
    PACKAGES,
    Resumable,
    batches,
    everything,
    load,
    loader,
    loss_of,
    make_fabric,
    make_module,
    make_trainer,
    network,
    plain_optimizer,
    run_fabric,
)


def agree(value: torch.Tensor) -> bool:
    gathered = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(gathered, value)
    return torch.equal(*gathered)


def check_trainer(rank, package, level, path, accumulate=1, manual=False):
    """20 steps against 10 and 10 resumed, data ten times as large on one rank. Ranks agree bit for bit; they begin with different weights."""
    pl, own = load(*package)

    def run(ckpt=None):
        save = importlib.import_module(f"{pl.__name__}.callbacks").ModelCheckpoint(path, "{step}", save_top_k=-1, every_n_train_steps=10)
        settings = {} if manual else {"gradient_clip_val": 0.05, "accumulate_grad_batches": accumulate}
        trainer = make_trainer(
            pl, 20, own.AmpPlugStrategy(level), devices=2, enable_checkpointing=True, callbacks=[save], use_distributed_sampler=False, **settings
        )
        module = make_module(pl, manual=manual, clip=0.05, seed=rank)
        trainer.fit(module, Resumable(20 * accumulate, rank), ckpt_path=ckpt)
        return module, everything(module.net, plain_optimizer(trainer))

    straight, wanted = run()
    assert agree(wanted) and not agree(straight.losses[0].reshape(1))
    if rank == 0:
        os.remove(f"{path}/step=20.ckpt")
    dist.barrier()
    resumed, found = run(f"{path}/step=10.ckpt")
    assert torch.equal(found, wanted)
    assert (torch.stack(resumed.losses) - torch.stack(straight.losses[10 * accumulate :])).abs().max().item() == 0.0
    return wanted


def check_same_as_ddp_by_hand(rank, wanted):
    """The Trainer's 20 steps are those of initialize, DDP and a loop."""
    net = network(rank)
    o = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(o, 3, 0.8)
    ampplug.initialize(net, o)
    model = nn.parallel.DistributedDataParallel(net)
    for x in batches(20, rank):
        loss_of(model, x).backward()
        ampplug.clip_grad_norm_(net.parameters(), 0.05)
        o.step()
        schedule.step()
        o.zero_grad()
    assert torch.equal(everything(net, o), wanted)


def check_plugin(rank):
    """The plugin under Lightning's own DDP: O1 and bf16-true train; O2 with an fp32 model names the ways out, and changes nothing."""
    pl, own = load()
    for plugin in (own.AmpPlugPrecision("O1"), own.AmpPlugPrecision(precision="bf16-true")):
        trainer = make_trainer(pl, 3, "ddp", devices=2, plugins=[plugin], use_distributed_sampler=False)
        module = make_module(pl, seed=rank)
        trainer.fit(module, loader(3, rank))
        assert agree(everything(module.net, plain_optimizer(trainer)))
        assert module.net[0]._ampplug.book.names[0] == "net.0.x"  # as without DDP: checkpoints move between the two
    module = make_module(pl)
    with pytest.raises(ValueError, match="use Trainer.strategy='ampplug'"):
        make_trainer(pl, 1, "ddp", devices=2, plugins=[own.AmpPlugPrecision()]).fit(module, loader(1))
    assert type(module.net[0]) is nn.Linear and module.net[0].weight.dtype == torch.float32


def check_fit_twice(rank):
    """The wrapper of the first fit is gone when parameters change dtype for the second."""
    pl, own = load()
    module = make_module(pl, seed=rank)
    for _ in range(2):
        trainer = make_trainer(pl, 3, devices=2, use_distributed_sampler=False)
        trainer.fit(module, loader(3, rank))
        assert agree(everything(module.net, plain_optimizer(trainer))) and module.net[0].weight.dtype == torch.bfloat16


def check_evaluation(rank):
    """Without fit, and with more processes."""
    pl, own = load()
    trainer = make_trainer(pl, 1, devices=2, use_distributed_sampler=False)
    assert trainer.validate(make_module(pl, seed=rank), loader(2, rank), verbose=False)


def check_fabric(rank, path):
    """Accumulation without synchronization in between, clipping, resume."""
    fabric, net = make_fabric(devices=2), network()
    model, _ = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    for enabled in (True, False):
        with fabric.no_backward_sync(model, enabled=enabled):
            fabric.backward(loss_of(model, batches(1, rank)[0]))
        assert agree(net[0].weight.grad.view(torch.uint8)) is not enabled
    wanted, net, o = run_fabric(make_fabric(devices=2), range(20), clip={"max_norm": 0.05}, accumulate=2, seed=rank, rank=rank)
    assert agree(everything(net, o))
    run_fabric(make_fabric(devices=2), range(10), clip={"max_norm": 0.05}, accumulate=2, seed=rank, rank=rank, path=path)
    dist.barrier()
    fabric = make_fabric(devices=2)
    found, again, again_o = run_fabric(fabric, range(10, 20), clip={"max_norm": 0.05}, accumulate=2, seed=rank + 2, rank=rank, path=path)
    assert torch.equal(everything(again, again_o), everything(net, o)) and torch.equal(torch.stack(found), torch.stack(wanted[20:]))


def worker(rank: int, path: str) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    wanted = check_trainer(rank, PACKAGES[0], "O2", f"{path}/a")
    check_same_as_ddp_by_hand(rank, wanted)
    check_trainer(rank, PACKAGES[0], "O2", f"{path}/b", accumulate=2)
    check_trainer(rank, PACKAGES[0], "O1", f"{path}/c", manual=True)
    check_trainer(rank, PACKAGES[1], "O2", f"{path}/d", manual=True)
    check_plugin(rank)
    check_fit_twice(rank)
    check_evaluation(rank)
    check_fabric(rank, f"{path}/f")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_two_processes(tmp_path):
    """One spawn for all of the checks above; a failed assertion in a worker is raised here. expect: no error."""
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
