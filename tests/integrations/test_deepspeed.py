"""Training under the real DeepSpeed on CPUs, 1 and 2 processes on different data, against plain torch on the global batch.

Adam with eps = 1 makes steps proportional to gradients, so that a factor lost in averaging, accumulation or clipping shows.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("deepspeed")

from engines import (
    ADAM,
    CLIP,
    NO_COPY,
    agree,
    batch,
    check_w8,
    configuration,
    deepspeed_engine,
    everything,
    loss_of,
    make_engine,
    make_model,
    outputs,
    spawn,
    train,
)

STAGES, LEVELS, DTYPES, ACCUMULATION = (0, 1, 2), ("O1", "O2"), (torch.float32, torch.bfloat16), (1, 2)
STEPS = 5


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


def check_independence(rank: int, world: int, folder: str, stage: int, dtype: torch.dtype, more: dict) -> None:
    """On the same data, two ranks train as one does, bit for bit: weights, scales, moments. No cut goes through a group of 128 here."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False))
    settings = configuration(stage, "O2", dtype, 1, optimizer={"type": "AdamW", "params": {"lr": 0.01}}, **more)
    engine = deepspeed_engine(model, settings)
    train(engine, range(4), 0, dtype, 1)
    parts = [p.detach() for p in model.parameters()] + [engine.module[0]._ampplug.book.scale]
    for states in engine.basic_optimizer.state_dict()["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            everyone = [torch.empty_like(states[name]) for _ in range(world)]
            dist.all_gather(everyone, states[name])
            parts += everyone
    result = torch.cat([p.contiguous().flatten().view(torch.uint8) for p in parts])
    where = f"{folder}/independence{stage}{dtype}{len(str(more))}.pt"
    if world == 1:
        torch.save(result, where)
    else:
        assert torch.equal(result, torch.load(where)), (stage, dtype, more)


def check_world_size(rank: int, world: int, folder: str, stage: int) -> None:
    """A checkpoint of one rank, on two: goes on without ZeRO, is refused with it, and its weights alone can be had."""
    engine = make_engine(stage, "O2", torch.bfloat16, 1, seed=world)
    where = f"{folder}/of-one-rank-{stage}"
    if world == 1:
        train(engine, range(3), rank, torch.bfloat16, 1)
        engine.save_checkpoint(where, tag="t")
        torch.save([p.detach() for p in engine.module.parameters()], where + ".pt")
        return
    if stage:
        with pytest.raises(Exception, match="DP world size of 1 but the current world size is 2"):
            engine.load_checkpoint(where, tag="t")
    engine.load_checkpoint(where, tag="t", load_optimizer_states=stage == 0)
    assert all(torch.equal(p, q) for p, q in zip(engine.module.parameters(), torch.load(where + ".pt")))
    train(engine, range(3, 5), rank, torch.bfloat16, 1)
    check_w8(engine)
    assert agree(everything(engine))


def check_cells(rank: int, world: int, folder: str) -> None:
    for stage, dtype, more in ((1, torch.float32, {}), (2, torch.bfloat16, {}), (1, torch.bfloat16, NO_COPY)):
        check_independence(rank, world, folder, stage, dtype, more)
    for stage in (0, 2):
        check_world_size(rank, world, folder, stage)
    for cell in itertools.product(STAGES, LEVELS, DTYPES, ACCUMULATION):
        try:
            check_cell(rank, world, *cell)
            check_resume(rank, f"{folder}/{world}-{'-'.join(map(str, cell))}", *cell)
        except Exception as error:
            raise AssertionError(f"stage, level, dtype, accumulation: {cell}") from error


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_every_cell():
    """One spawn a world size for all cells. expect: no error."""
    spawn(check_cells, 1, 2)
