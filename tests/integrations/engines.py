"""Engines and data for the tests of ampplug under DeepSpeed, and what is compared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

BATCH, CLIP = 16, 0.3

# bf16 partitions: at O2 they are the model's own weights, with a 16-bit remainder
NO_COPY = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


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


def deepspeed_engine(model: nn.Module, settings: dict, optimizer=None):
    """An engine with an optimizer of its configuration, or this one."""
    import deepspeed

    if optimizer is None:
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


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
        parts += optimizer_state(optimizer)
    return torch.cat([p.contiguous().reshape(-1).view(torch.uint8) for p in parts])


def optimizer_state(optimizer) -> list[torch.Tensor]:
    """Codes, remainders, step counts and limits at O2; any other optimizer's tensors."""
    if hasattr(optimizer, "_low_bit"):
        return [*optimizer._low_bit.arenas, optimizer._low_bit.steps, optimizer._low_bit.limits]
    return [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]


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


def spawn(check: Callable[[int, int, str], None], *worlds: int) -> None:
    """Run check(rank, world, folder) in `world` processes, for one number of them after the other; what fails there is raised here.

    `check.without()`, if there is one, runs before ampplug.integrations.deepspeed is imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds:
            mp.spawn(_worker, (check, world, folder), nprocs=world)


def _worker(rank: int, check: Callable[[int, int, str], None], world: int, folder: str) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes longer than all of these tests
    deepspeed.runtime.bf16_optimizer.see_memory_usage = lambda *_, **__: None  # a second an engine
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    if hasattr(check, "without"):
        check.without()
    import ampplug.integrations.deepspeed  # noqa: F401

    check(rank, world, folder)
    dist.destroy_process_group()
