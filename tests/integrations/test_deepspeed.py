"""Training under the real DeepSpeed on CPUs, 1 and 2 processes on different data, against plain torch on the global batch.

Adam with eps = 1 makes steps proportional to gradients, so that a factor lost in averaging, accumulation or clipping shows.
"""

from __future__ import annotations

import itertools
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

pytest.importorskip("deepspeed")

STAGES, LEVELS, DTYPES, ACCUMULATION = (0, 1, 2), ("O1", "O2"), (torch.float32, torch.bfloat16), (1, 2)
STEPS, BATCH, CLIP = 5, 16, 0.3


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 32))


def batch(t: int, rank: int, micro: int) -> torch.Tensor:
    """Larger on the second rank."""
    return torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(1000 * t + 10 * micro + rank)) * (1 + 2 * rank)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - x.float()).square().mean()


def configuration(stage: int, level: str | None, dtype: torch.dtype, accumulation: int, **more) -> dict:
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": CLIP if accumulation > 1 else 0.0,
        **more,
    }
    return settings if level is None else {**settings, "ampplug": {"enabled": True, "opt_level": level}}


ADAM = {"lr": 0.5, "eps": 1.0, "weight_decay": 0.1}


def make_engine(stage: int, level: str | None, dtype: torch.dtype, accumulation: int, seed: int = 0, **more):
    """Optimizer and scheduler of the configuration without accumulation; the caller's own (a callable in bf16) with it."""
    import deepspeed

    model = make_model(seed)
    settings = configuration(stage, level, dtype, accumulation, **more)
    if accumulation == 1:
        settings["optimizer"] = {"type": "AdamW", "params": {**ADAM, "torch_adam": level != "O2"}}
        settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.2, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}}
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    if dtype == torch.float32:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)[0]
    return deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, **ADAM),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        config=settings,
    )[0]


def train(engine, steps, rank: int, dtype: torch.dtype, accumulation: int) -> None:
    for t in steps:
        for micro in range(accumulation):
            engine.backward(loss_of(engine, batch(t, rank, micro).to(dtype)))
            engine.step()


def weights_of(engine) -> list:
    return engine.module[0]._ampplug.bank.weights


def everything(engine, own: bool = False) -> torch.Tensor:
    """All that ranks must agree on, as bytes; own: with the optimizer's state, which ZeRO spreads over the ranks."""
    state = engine.module[0]._ampplug
    parts = [p.detach() for p in engine.module.parameters()] + [state.bank.amax, state.bank.scale]
    parts += [state.book.scale, state.book.history, state.book.position]
    parts += [t for w in state.bank.weights for t in (w.w8, w.w8t)]
    if own:
        optimizer = engine.basic_optimizer
        parts += [p.detach() for g in optimizer.param_groups for p in g["params"]]
        parts += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return torch.cat([p.contiguous().reshape(-1).view(torch.uint8) for p in parts])


def agree(value: torch.Tensor) -> bool:
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value)
    return all(torch.equal(value, other) for other in gathered)


def check_w8(engine) -> None:
    """W8 is the weight as it is now, within half a unit of E4M3, and W8T is W8."""
    for w in weights_of(engine):
        value = w.param.detach().float()
        error = (w.own_w8.float() * w.scale_inv - value).abs()
        assert bool((error <= value.abs() / 15 + 2**-9 * w.scale_inv).all()), w.name
        assert torch.equal(w.w8.view(torch.uint8).t(), w.w8t.view(torch.uint8))


def outputs(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """With the FP8 weights of training: evaluation would make its own."""
    with torch.no_grad():
        return model(x).float()


def check_cell(rank: int, world: int, stage: int, level: str, dtype: torch.dtype, accumulation: int) -> None:
    engine = make_engine(stage, level, dtype, accumulation)
    plain = make_model()
    for p in plain.parameters():
        p.data = p.data.to(dtype).float()
    exact = torch.optim.AdamW(plain.parameters(), **ADAM)
    if stage == 0 and dtype == torch.bfloat16 and level == "O1":  # DeepSpeed's wrapper begins with a step of zero gradients
        for p in plain.parameters():
            p.grad = torch.zeros_like(p)
        exact.step()
    first = [p.detach().clone() for p in plain.parameters()]
    x = batch(99, 0, 0)
    before, rates = outputs(engine.module, x.to(dtype)), []
    for t in range(STEPS):
        rates.append(engine.get_lr()[0])
        train(engine, [t], rank, dtype, accumulation)
        for g in exact.param_groups:
            g["lr"] = rates[-1]
        exact.zero_grad()
        for r, micro in itertools.product(range(world), range(accumulation)):
            (loss_of(plain, batch(t, r, micro).to(dtype).float()) / (world * accumulation)).backward()
        if accumulation > 1:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
            assert norm > 1.5 * CLIP, norm
            reported = engine.get_global_grad_norm()
            if reported is not None:  # DeepSpeed tells it with a wrapped optimizer only
                assert abs(float(reported) / norm.item() - 1) < 0.1, (float(reported), norm.item())
        exact.step()
        check_w8(engine)
        assert agree(everything(engine)), t
    assert len(set(rates)) > 1
    moved = torch.cat([(p.detach().float() - q).flatten() for p, q in zip(engine.module.parameters(), first)])
    wanted = torch.cat([(p.detach() - q).flatten() for p, q in zip(plain.parameters(), first)])
    error = ((moved - wanted).norm() / wanted.norm()).item()
    assert error < 0.06, error
    change = (outputs(engine.module, x.to(dtype)) - before).norm()
    wrong = (outputs(engine.module, x.to(dtype)) - outputs(plain, x)).norm()
    assert change > 3 * wrong, (change.item(), wrong.item())


def check_resume(rank: int, folder: str, stage: int, level: str, dtype: torch.dtype, accumulation: int) -> None:
    """Saved after 3 steps; the 2 that follow, in this engine and in one that was made anew of other weights, are the same bit for bit."""
    engine = make_engine(stage, level, dtype, accumulation)
    train(engine, range(3), rank, dtype, accumulation)
    engine.save_checkpoint(folder, tag="t", client_state={"mine": 7})
    saved = everything(engine, own=True)
    train(engine, range(3, 5), rank, dtype, accumulation)
    wanted = everything(engine, own=True)
    assert not torch.equal(saved, wanted)
    again = make_engine(stage, level, dtype, accumulation, seed=1)
    path, client_state = again.load_checkpoint(folder, tag="t")
    assert path is not None and client_state["mine"] == 7 and "ampplug" not in client_state
    check_w8(again)
    assert torch.equal(everything(again, own=True), saved)
    train(again, range(3, 5), rank, dtype, accumulation)
    assert torch.equal(everything(again, own=True), wanted) and again.get_lr() == engine.get_lr()


def worker(rank: int, world: int, folder: str) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    import deepspeed

    import ampplug.integrations.deepspeed  # noqa: F401

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes longer than all of these tests
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for cell in itertools.product(STAGES, LEVELS, DTYPES, ACCUMULATION):
        try:
            check_cell(rank, world, *cell)
            check_resume(rank, f"{folder}/{'-'.join(map(str, cell))}", *cell)
        except Exception as error:
            raise AssertionError(f"stage, level, dtype, accumulation: {cell}") from error
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("world", [1, 2])
def test_every_cell(world):
    """One spawn for all cells; a failed assertion in a worker is raised here. expect: no error."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (world, folder), nprocs=world)
