"""ZeRO 3 under the real DeepSpeed: weights are gathered for each layer, cast within the call, and nothing in FP8 is kept of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from engines import ADAM, CLIP, NO_COPY, agree, batch, configuration, loss_of, make_model, optimizer_state, spawn, train


def build(dtype: torch.dtype, accumulation: int, seed: int = 0, partitioned: bool = False, level: str | None = "O1", wrap=lambda model: model, zero=None, **more):
    """partitioned: made so from the start, by `zero.Init`."""
    import deepspeed

    settings = configuration(3, level, dtype, accumulation, **more)
    settings["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0, **(zero or {})}
    settings["optimizer"] = {"type": "AdamW", "params": {**ADAM, "torch_adam": True}}
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=partitioned):
        model = wrap(make_model(seed))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]


def gathered(model: nn.Module) -> list[torch.Tensor]:
    import deepspeed

    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [p.detach().float().clone() for p in parameters]


def scales(engine) -> torch.Tensor:
    book = engine.module[0]._ampplug.book
    return torch.cat([book.scale, book.history.flatten(), book.position.float()])


def check_cell(rank: int, world: int, level: str, dtype: torch.dtype, accumulation: int, partitioned: bool, **more) -> None:
    engine = build(dtype, accumulation, partitioned=partitioned, level=level, **more)
    assert all(type(engine.module[i]).__module__.startswith("ampplug") for i in (0, 2, 4)) and engine.module[0].weight.numel() == 0
    plain, first = make_model(), gathered(engine.module)
    with torch.no_grad():
        for p, value in zip(plain.parameters(), first):
            p.copy_(value)
    exact = torch.optim.AdamW(plain.parameters(), **ADAM)
    x = batch(99, 0, 0)
    with torch.no_grad():
        before = engine(x.to(dtype)).float()
    for t in range(4):
        train(engine, [t], rank, dtype, accumulation)
        exact.zero_grad()
        for r, micro in itertools.product(range(world), range(accumulation)):
            (loss_of(plain, batch(t, r, micro).to(dtype).float()) / (world * accumulation)).backward()
        if accumulation > 1:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
            assert norm > 1.5 * CLIP and abs(float(engine.get_global_grad_norm()) / norm.item() - 1) < 0.1
        exact.step()
        assert agree(scales(engine)) and bool((scales(engine) > 0).any()), t
    now = gathered(engine.module)
    assert agree(torch.cat([p.flatten() for p in now]))
    moved = torch.cat([(p - q).flatten() for p, q in zip(now, first)])
    wanted = torch.cat([(p.detach() - q).flatten() for p, q in zip(plain.parameters(), first)])
    assert (moved - wanted).norm() < 0.06 * wanted.norm(), (moved - wanted).norm() / wanted.norm()
    with torch.no_grad():
        after = engine(x.to(dtype)).float()
        assert (after - before).norm() > 3 * (after - plain(x)).norm()
    engine.eval()
    with torch.no_grad():
        assert (engine(x.to(dtype)).float() - plain(x)).norm() < 0.1 * plain(x).norm()
    state = engine.module[0]._ampplug
    assert not state.bank.weights and state.bank._arena.storage.numel() == 0
    if level == "O2":
        elements = sum(p.ds_tensor.ds_numel for p in engine.module.parameters())
        records = list(engine.basic_optimizer._low_bit.records.values())
        assert sum(t.numel() for r in records for t in (r.ratio, r.v, r.top)) < 2.06 * elements and not any(p.grad is not None for p in engine.module.parameters())


def check_resume(rank: int, world: int, folder: str, level: str, dtype: torch.dtype, partitioned: bool, **more) -> None:
    engine = build(dtype, 2, partitioned=partitioned, level=level, **more)
    train(engine, range(3), rank, dtype, 2)
    engine.save_checkpoint(folder, tag="t")
    train(engine, range(3, 5), rank, dtype, 2)
    again = build(dtype, 2, seed=1, partitioned=partitioned, level=level, **more)
    again.load_checkpoint(folder, tag="t")
    train(again, range(3, 5), rank, dtype, 2)
    assert torch.equal(scales(engine), scales(again))
    assert all(torch.equal(p, q) for p, q in zip(optimizer_state(engine.basic_optimizer), optimizer_state(again.basic_optimizer)))
    assert all(torch.equal(p, q) for p, q in zip(gathered(engine.module), gathered(again.module)))


def check_recomputation(rank: int, world: int, dtype: torch.dtype) -> None:
    """Activation checkpointing gathers and casts once more, to the same bits."""
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    results = []
    for wrap in (lambda model: model, lambda model: Model(*model)):
        engine = build(dtype, 1, wrap=wrap)
        train(engine, range(3), rank, dtype, 1)
        results.append(torch.cat([p.flatten() for p in gathered(engine.module)] + [scales(engine)]))
    assert torch.equal(*results)


def check_forward_keeps_no_weight(rank: int, world: int) -> None:
    """Between forward and backward, of a weight there is an inverse scale and no more."""
    engine = build(torch.float32, 1)
    y = engine(batch(0, rank, 0))
    nodes, kept, seen = [y.grad_fn], [], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kept += [node.call.operand] if hasattr(node, "call") else []
        nodes += [edge for edge, _ in node.next_functions]
    assert len(kept) == 3 and all(operand._forward is None and operand.scale_inv.numel() == 1 for operand in kept)
    engine.backward(y.square().mean())
    engine.step()


def check_tied(rank: int, world: int) -> None:
    """The plan of a partitioned model is that of a whole one: a tied layer stays, and so does a head."""
    from ampplug.config import Config
    from ampplug.integrations.deepspeed.gathered import plan_by_shapes
    from ampplug.planning import make_plan

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.layer, self.tied, self.lm_head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(32, 64)
            self.tied.weight = self.embedding.weight

    config = Config(opt_level="O1", fuse=False)
    assert plan_by_shapes(Model(), config) == make_plan(Model(), None, config) and plan_by_shapes(Model(), config).converted == ("layer",)


def check_all(rank: int, world: int, folder: str) -> None:
    small = {"sub_group_size": 3000}  # several partitions, stepped one after the other
    for cell in ((torch.float32, 1, False), (torch.float32, 2, True), (torch.bfloat16, 2, False), (torch.bfloat16, 1, True)):
        check_cell(rank, world, "O1", *cell)
        check_cell(rank, world, "O2", *cell, zero=small if cell[1] == 2 else {})
    check_cell(rank, world, "O2", torch.bfloat16, 1, False, **NO_COPY)
    for i, (level, dtype, partitioned, more) in enumerate((
        ("O1", torch.float32, False, {}), ("O1", torch.bfloat16, True, {}), ("O2", torch.float32, True, {}), ("O2", torch.bfloat16, False, {"zero": small}),
        ("O2", torch.bfloat16, False, NO_COPY),
    )):  # fmt: skip
        check_resume(rank, world, f"{folder}/{world}-{i}", level, dtype, partitioned, **more)
    check_recomputation(rank, world, torch.bfloat16)
    check_forward_keeps_no_weight(rank, world)
    check_tied(rank, world)


@pytest.mark.parametrize("world", [1, 2])
def test_zero3(world):
    """One spawn for all of the checks above. expect: no error."""
    spawn(check_all, world)
