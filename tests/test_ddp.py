"""Two processes with different data: scales, masters and moments stay the same on both."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import ampplug


def build(level: str, before: bool = False):
    """initialize, then DDP (or the other way round); ranks start from different weights, which DDP makes the same."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    if before:
        model = nn.parallel.DistributedDataParallel(model)
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
    return model if before else nn.parallel.DistributedDataParallel(model), optimizer


def everything(model, optimizer) -> torch.Tensor:
    """All that must agree, as one vector of bytes."""
    bank, book = model.module[0]._ampplug.bank, model.module[0]._ampplug.book
    parts = [p.detach() for p in model.parameters()] + [book.scale, book.history, book.position, bank.scale, bank.amax]
    parts += [w.w8 for w in bank.weights] + [w.w8t for w in bank.weights]
    parts += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return torch.cat([p.contiguous().reshape(-1).view(torch.uint8) for p in parts])


def agree(value: torch.Tensor) -> bool:
    gathered = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(gathered, value)
    return torch.equal(*gathered)


def check_same_everywhere(rank: int, level: str, before: bool) -> None:
    model, optimizer = build(level, before)
    for t in range(5):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * t + rank)) * 10.0**rank
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert agree(everything(model, optimizer)), (level, before, t)


def check_like_one_process(rank: int, level: str) -> None:
    """The update of both halves together is that of one process on the whole batch, within FP8 error."""
    model, optimizer = build(level)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    plain.load_state_dict({k: v.float() for k, v in model.module.state_dict().items()})
    exact = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    first = copy.deepcopy(plain[0].weight.detach())
    for t in range(8):
        halves = [torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * t + r)) for r in range(2)]
        model(halves[rank]).square().mean().backward()
        plain(torch.cat(halves)).square().mean().backward()
        for o in (optimizer, exact):
            o.step()
            o.zero_grad()
    moved, wanted = model.module[0].weight.float() - first, plain[0].weight - first
    assert (moved - wanted).norm() / wanted.norm() < 0.25, (moved - wanted).norm() / wanted.norm()


def check_nan_on_one_rank(rank: int) -> None:
    model, optimizer = build("O2")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for t in range(4):
        x = torch.randn(16, 32)
        if rank == 1 and t == 2:
            x[0, 0] = float("nan")
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert agree(everything(model, optimizer)) and scaler.get_scale() == 2.0 and all(torch.isfinite(p).all() for p in model.parameters())


def check_broadcast_is_seen(rank: int) -> None:
    """DDP's broadcast of rank 0's weights reaches rank 1's outputs."""
    model, _ = build("O2")
    y = model.module(torch.ones(1, 32)).detach()
    assert agree(y)


def check_unequal_models(rank: int) -> None:
    model = nn.Sequential(nn.Linear(32, 32 + 16 * rank))
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 32)).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        assert "process_group" in str(error)
    else:
        raise AssertionError("unequal models were not noticed")
    model = nn.Sequential(nn.Linear(32, 32 + 16 * rank))
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters()), process_group=False)
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()


def worker(rank: int, path: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for level, before in (("O1", False), ("O1", True), ("O2", False)):
        check_same_everywhere(rank, level, before)
    for level in ("O1", "O2"):
        check_like_one_process(rank, level)
    check_nan_on_one_rank(rank)
    check_broadcast_is_seen(rank)
    check_unequal_models(rank)
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_two_processes(tmp_path):
    """One spawn for all of the checks above; a failed assertion in a worker is raised here. expect: no error."""
    mp.spawn(worker, (str(tmp_path / "store"),), nprocs=2)
