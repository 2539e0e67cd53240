"""Two processes with different data: scales, masters and moments stay the same on both."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import ampplug


def build(level: str, before: bool = False, dtype: torch.dtype = torch.float32, ddp: dict | None = None, **settings):
    """initialize, then DDP (or the other way round); ranks start from different weights, which DDP makes the same."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype)
    if before:
        model = nn.parallel.DistributedDataParallel(model, **(ddp or {}))
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, **settings)
    return model if before else nn.parallel.DistributedDataParallel(model, **(ddp or {})), optimizer


def everything(model, optimizer) -> torch.Tensor:
    """All that must agree, as one vector of bytes."""
    bank, book = model.module[0]._ampplug.bank, model.module[0]._ampplug.book
    parts = [p.detach() for p in model.parameters()] + [bank.scale, bank.amax]
    parts += [] if book is None else [book.scale, book.history, book.position]
    parts += [w.w8 for w in bank.weights] + [w.w8t for w in bank.weights]
    parts += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return torch.cat([p.contiguous().reshape(-1).view(torch.uint8) for p in parts])


def agree(value: torch.Tensor) -> bool:
    gathered = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(gathered, value)
    return torch.equal(*gathered)


def batch(rank: int, t: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ten times larger on the second rank."""
    return (torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * t + rank)) * 10.0**rank).to(dtype)


def check_same_everywhere(rank: int, level: str, before: bool, dtype: torch.dtype = torch.float32, **settings) -> None:
    model, optimizer = build(level, before, dtype, **settings)
    first = everything(model, optimizer)
    for t in range(5):
        model(batch(rank, t, dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert agree(everything(model, optimizer)), (level, before, dtype, settings, t)
    assert not torch.equal(first[:1000], everything(model, optimizer)[:1000])
    book = model.module[0]._ampplug.book
    if book is not None:  # the larger rank decides: its inputs fit, the smaller one's follow
        largest = max(batch(1, t, dtype).abs().max().item() for t in range(5))
        assert abs(book.scale[0].item() * largest * 2**book.margin / 448 - 1) < 1e-5


def check_refused_order(rank: int) -> None:
    """Wrapped first, an fp32 model at O2: its buckets are of fp32. Nothing is changed, and the other order is named."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 32)))
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        ampplug.initialize(model, optimizer)
    except ValueError as error:
        assert "DistributedDataParallel" in str(error) and "initialize first" in str(error)
    else:
        raise AssertionError("accepted")
    assert type(model.module[0]) is nn.Linear and type(optimizer) is torch.optim.AdamW and model.module[0].weight.dtype == torch.float32
    ampplug.initialize(model.module, optimizer, "O1")


def check_accumulation_and_clip(rank: int, level: str) -> None:
    """Micro-batches under no_sync, then one clipped step. All amaxes of all micro-batches and ranks count."""
    model, optimizer = build(level, ddp={"gradient_as_bucket_view": True})
    for t in range(3):
        with model.no_sync():
            for i in range(3):
                model(batch(rank, 100 * t + i) * 10.0**-i).square().mean().backward()
        model(batch(rank, 100 * t + 3)).square().mean().backward()
        norm = ampplug.clip_grad_norm_(model.parameters(), 1.0)
        assert agree(norm.reshape(1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(t % 2))
        assert agree(everything(model, optimizer)), (level, t)
    largest = max(batch(1, 100 * t + i).abs().max().item() * 10.0 ** -(i % 3) for t in range(3) for i in range(4))
    assert abs(model.module[0]._ampplug.book.scale[0].item() * largest / 448 - 1) < 0.5


def check_clip_skips_everywhere(rank: int) -> None:
    """NaN on one rank and no scaler: the norm is not finite on any rank, no rank steps, no bit changes."""
    model, optimizer = build("O2")
    for t in range(4):
        x = batch(rank, t)
        if t == 2:
            before = everything(model, optimizer)
            x[0, 0] = float("nan") if rank == 1 else x[0, 0]
        model(x).square().mean().backward()
        assert bool(torch.isfinite(ampplug.clip_grad_norm_(model.parameters(), 1.0))) == (t != 2)
        optimizer.step()
        optimizer.zero_grad()
        if t == 2:
            assert torch.equal(before, everything(model, optimizer))
    assert agree(everything(model, optimizer)) and not torch.equal(before, everything(model, optimizer))


def check_unused_parameters(rank: int) -> None:
    """A branch that only one rank takes: DDP gives the other zero gradients or none, and scales still agree."""
    torch.manual_seed(rank)
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "never": nn.Linear(32, 32)})
    model.forward = lambda x, branch: model["b"](model["a"](x)) if branch else model["a"](x)
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    never = model["never"].weight.detach().clone()
    for t in range(3):
        wrapped(batch(rank, t), rank == 1 or t == 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        values = [p.detach().float().flatten() for p in model.parameters()] + [model["a"]._ampplug.book.scale, model["a"]._ampplug.book.history.flatten()]
        assert agree(torch.cat(values)), t
    assert torch.equal(model["never"].weight, never)


def check_resume_from_rank_zero(rank: int, level: str) -> None:
    """Both ranks resume from what rank 0 saved: the same run, bit for bit."""
    model, optimizer = build(level)

    def run(model, optimizer, steps):
        for t in steps:
            model(batch(rank, t)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)

    run(model, optimizer, range(4))
    saved = [copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})] if rank == 0 else [None]
    dist.broadcast_object_list(saved, 0)
    wanted = run(model, optimizer, range(4, 7))
    again, again_optimizer = build(level)
    again.load_state_dict(saved[0]["model"])
    again_optimizer.load_state_dict(saved[0]["optimizer"])
    assert torch.equal(run(again, again_optimizer, range(4, 7)), wanted) and agree(wanted)


def check_only_rank_zero_loads(rank: int) -> None:
    """A checkpoint that only rank 0 read: DDP hands the weights on, the first step all the rest; the run goes on as rank 0's would."""
    model, optimizer = build("O2")
    for t in range(4):
        model(batch(rank, t)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
    again = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    again, again_optimizer = ampplug.initialize(again, torch.optim.AdamW(again.parameters(), lr=1e-2))
    if rank == 0:
        again.load_state_dict(saved[0])
        again_optimizer.load_state_dict(saved[1])
    again = nn.parallel.DistributedDataParallel(again)
    for t in range(4, 7):
        again(batch(rank, t)).square().mean().backward()
        again_optimizer.step()
        again_optimizer.zero_grad()
        assert agree(everything(again, again_optimizer)), t
    assert again_optimizer.state[again.module[0].weight]["step"].item() == 7


def check_sharded_parameters_are_refused(rank: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Replicate()):
        for level in ("O1", "O2"):
            model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
            model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [placement]))
            try:
                ampplug.initialize(model, torch.optim.AdamW(model.parameters()), level)
            except ValueError as error:
                assert "'1.weight' is a DTensor" in str(error)
            else:
                raise AssertionError("accepted")
            assert type(model[0]) is nn.Linear and model[0].weight.dtype == torch.float32


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


def check_nan_on_one_rank(rank: int, level: str) -> None:
    model, optimizer = build(level)
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


def check_compiled(rank: int, level: str) -> None:
    """Inside DDP and around it, the compiler changes no bit of what eager DDP computes."""
    runs = []
    for how in ("eager", "outside", "inside"):
        torch._dynamo.reset()
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
        inner = torch.compile(model, fullgraph=True, backend="aot_eager") if how == "inside" else model
        wrapped = nn.parallel.DistributedDataParallel(inner)
        forward = torch.compile(wrapped, backend="aot_eager") if how == "outside" else wrapped
        losses = []
        for t in range(3):
            loss = forward(batch(rank, t)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().reshape(1))
        state = everything(wrapped if how != "inside" else nn.ModuleDict({"module": model}), optimizer)
        runs.append((torch.cat(losses), state))
        assert agree(state), (level, how)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True)), level


def check_compiled_adversaries(rank: int) -> None:
    """A discriminator that is stepped between the generator's forward and backward, each compiled in its own DDP: as in eager mode."""
    runs = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(rank)
        pair, wrapped, optimizers = [nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))], [], []
        for model in pair:
            model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            inner = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
            wrapped.append(nn.parallel.DistributedDataParallel(inner))
            optimizers.append(optimizer)
        (generator, discriminator), losses = wrapped, []
        for t in range(3):
            fake = generator(batch(rank, t))
            (discriminator(fake.detach()).square().mean() - discriminator(batch(rank, 50 + t)).mean()).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            loss = discriminator(fake).square().mean()
            loss.backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses.append(loss.detach().reshape(1))
        runs.append(torch.cat([*losses, *[p.detach().float().flatten() for model in pair for p in model.parameters()]]))
    assert torch.equal(*runs)


def worker(rank: int, path: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for level, before in (("O1", False), ("O1", True), ("O2", False)):
        check_same_everywhere(rank, level, before)
        check_same_everywhere(rank, level, before, recipe="current")
    for before in (False, True):
        check_same_everywhere(rank, "O2", before, torch.bfloat16)
    check_same_everywhere(rank, "O2", False, process_group=dist.new_group([0, 1]))
    check_same_everywhere(rank, "O2", False, ddp={"static_graph": True})
    check_refused_order(rank)
    for level in ("O1", "O2"):
        check_like_one_process(rank, level)
        check_accumulation_and_clip(rank, level)
        check_nan_on_one_rank(rank, level)
        check_resume_from_rank_zero(rank, level)
    check_clip_skips_everywhere(rank)
    check_only_rank_zero_loads(rank)
    check_unused_parameters(rank)
    check_sharded_parameters_are_refused(rank)
    check_broadcast_is_seen(rank)
    check_unequal_models(rank)
    check_compiled(rank, "O2")
    check_compiled_adversaries(rank)
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_two_processes(tmp_path):
    """One spawn for all of the checks above; a failed assertion in a worker is raised here. expect: no error."""
    mp.spawn(worker, (str(tmp_path / "store"),), nprocs=2)
