"""accelerate itself, on the CPU: one process and two."""

import contextlib
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from small_models import build, check_fp8_copies, converted, data, everything  # noqa: E402

import ampplug  # noqa: E402
from ampplug.integrations.accelerate import check_accelerator, prepare  # noqa: E402

STEPS, ACCUMULATE, BATCH = 20, 2, 4


def fresh_accelerator(**settings) -> accelerate.Accelerator:
    """accelerate keeps its state in shared dictionaries; each run starts with empty ones. The process group, if there is one, stays."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **{"gradient_accumulation_steps": ACCUMULATE, **settings})


@pytest.fixture(autouse=True)
def _leave_no_state():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Run:
    """A model, optimizer, schedule and loader under accelerate. form: "prepare" (the helper) or "initialize" (by hand, before accelerate's own)."""

    def __init__(self, kind: str, level: str, form: str = "prepare", dtype: torch.dtype = torch.float32, **settings):
        self.accelerator = fresh_accelerator(**settings)
        model = build(kind, dtype=dtype, seed=self.accelerator.process_index)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t / 10 / self.accelerator.num_processes))
        objects = model, optimizer, torch.utils.data.DataLoader(data(400), batch_size=BATCH), schedule
        if form == "initialize":
            ampplug.initialize(model, optimizer, level)
            objects = self.accelerator.prepare(*objects)
        else:
            objects = prepare(self.accelerator, *objects, opt_level=level)
        self.model, self.optimizer, self.loader, self.schedule = objects
        self.plain = model
        self.losses: list[float] = []

    def train(self, first: int = 0, last: int = STEPS, clip: str = "ampplug") -> "Run":
        loader = self.accelerator.skip_first_batches(self.loader, first * ACCUMULATE)
        for i, batch in enumerate(loader):
            if i == (last - first) * ACCUMULATE:
                break
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    (ampplug if clip == "ampplug" else self.accelerator).clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self

    def bits(self) -> torch.Tensor:
        return everything(self.plain, self.optimizer)


def plain_loop(kind: str, level: str, autocast: bool = False, wrap=lambda model: model, rank: int = 0, ranks: int = 1):
    """The same without accelerate. Rank r of n takes batches r, r + n, ... as accelerate deals them out."""
    model = build(kind, seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t / 10))
    ampplug.initialize(model, optimizer, level)
    wrapped = wrap(model)
    batches = list(torch.utils.data.DataLoader(data(400), batch_size=BATCH))[rank::ranks]
    losses = []
    for i in range(STEPS * ACCUMULATE):
        last = i % ACCUMULATE == ACCUMULATE - 1
        with contextlib.nullcontext() if last or wrapped is model else wrapped.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = wrapped(**batches[i]).loss
            (loss / ACCUMULATE).backward()
        losses.append(loss.item())
        if last:
            ampplug.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses, everything(model, optimizer)


@pytest.mark.parametrize(("kind", "level", "precision"), [("llama", "O1", "no"), ("llama", "O2", "bf16"), ("gpt2", "O1", "bf16"), ("gpt2", "O2", "no")])
def test_same_as_without_accelerate(kind, level, precision):
    """Accumulation, clipping, a schedule and autocast. expect: every loss and every bit of the state as in a loop of plain torch."""
    run = Run(kind, level, mixed_precision=precision).train()
    losses, bits = plain_loop(kind, level, autocast=precision == "bf16")
    assert run.losses == losses and torch.equal(run.bits(), bits)
    assert losses[-1] < losses[0] and len(converted(run.plain)) == (4 if kind == "gpt2" else 7)
    check_fp8_copies(run.plain)


@pytest.mark.parametrize(("kind", "level", "dtype", "form"), [
    ("llama", "O1", torch.float32, "prepare"), ("llama", "O2", torch.bfloat16, "prepare"), ("gpt2", "O2", torch.float32, "prepare"),
    ("llama", "O2", torch.float32, "initialize"),
])  # fmt: skip
def test_resume(kind, level, dtype, form, tmp_path):
    """20 steps, saved by save_state after 10; loaded into new objects by load_state, and 10 more. expect: no difference at all."""
    whole = Run(kind, level, form, dtype).train(0, 10)
    whole.accelerator.save_state(str(tmp_path))
    whole.train(10, 20)
    again = Run(kind, level, form, dtype)
    again.accelerator.load_state(str(tmp_path))
    again.train(10, 20)
    assert again.losses == whole.losses[10 * ACCUMULATE :] and torch.equal(again.bits(), whole.bits())
    assert max((a.float() - b.float()).abs().max().item() for a, b in zip(again.plain.parameters(), whole.plain.parameters(), strict=True)) == 0.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping(level):
    """expect: both clips find the norm of the gradients; after accelerate's the norm is the limit; both lead to the same weights, within rounding."""
    runs = [Run("gpt2", level, gradient_accumulation_steps=1) for _ in range(2)]
    for run, clip in zip(runs, (runs[0].accelerator.clip_grad_norm_, ampplug.clip_grad_norm_), strict=True):
        run.accelerator.backward(run.model(**next(iter(run.loader))).loss)
        wanted = torch.stack([p.grad.double().norm() for p in run.plain.parameters()]).norm().item()
        assert wanted > 0.2
        assert abs(clip(run.model.parameters(), 0.1).item() / wanted - 1) < (0.01 if level == "O2" else 1e-5)  # torch's norms of bf16 are in bf16
        left = torch.stack([p.grad.double().norm() for p in run.plain.parameters()]).norm().item()
        assert abs(left / (wanted if clip is ampplug.clip_grad_norm_ and level == "O2" else 0.1) - 1) < 0.01
        run.optimizer.step()
    first, second = (torch.cat([s["exp_avg_sq" if level == "O1" else "exp_avg_sq_top"].flatten().float() for s in run.optimizer.state.values()]) for run in runs)
    assert torch.allclose(first, second, rtol=0.02, atol=1 if level == "O2" else 0)  # at O2 the exponents of the second moments, at most one off


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weights_move_and_outputs_follow(level):
    """expect: after each step another weight, another FP8 copy of it, and another output in training mode."""
    run = Run("llama", level)
    batch = next(iter(run.loader))
    layer = run.plain.model.layers[0].mlp.up_proj
    seen = []
    for t in range(3):
        with torch.no_grad():
            seen.append((run.plain.model.layers[0].mlp(torch.ones(1, 32)), layer.weight.detach().clone(), layer._ampplug.weight.w8.float()))
        run.train(2 * t, 2 * t + 2)
        check_fp8_copies(run.plain)
    assert all(not torch.equal(a, b) for first, second in zip(seen, seen[1:], strict=False) for a, b in zip(first, second, strict=True))
    assert run.plain.training and batch["input_ids"].shape == (BATCH, 16)


def test_several_models():
    """Each initialized by hand, all prepared together. expect: both train, each with its own optimizer and its own FP8 copies."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=1)
    models = [build("llama"), build("gpt2")]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    before = [everything(*ampplug.initialize(m, o)) for m, o in zip(models, optimizers, strict=True)]
    *prepared, first, second = accelerator.prepare(*models, *optimizers)
    batch = next(iter(torch.utils.data.DataLoader(data(), batch_size=BATCH)))
    accelerator.backward(sum(m(**batch).loss for m in prepared))
    for o in (first, second):
        o.step()
        o.zero_grad()
    for m, o, bits in zip(models, optimizers, before, strict=True):
        check_fp8_copies(m)
        assert not torch.equal(everything(m, o), bits)


def test_loading_bf16_weights_before_the_first_step():
    """expect: the values loaded, and nothing left of the weights from before, which had a remainder."""
    run = Run("llama", "O2")
    other = build("llama", seed=5).state_dict()
    run.plain.load_state_dict({k: v.bfloat16() for k, v in other.items()})
    for name, value in ampplug.fp32_state_dict(run.plain).items():
        assert torch.equal(value, other[name].bfloat16().float()), name


def test_save_model_writes_plain_weights(tmp_path):
    from safetensors.torch import load_file

    run = Run("llama", "O2").train(0, 2)
    run.accelerator.save_model(run.model, str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    plain = build("llama")
    assert {k: v.shape for k, v in saved.items()} == {k: v.shape for k, v in plain.state_dict().items()}
    plain.load_state_dict(saved)
    assert all(torch.equal(a, b.float()) for a, b in zip(plain.parameters(), run.plain.parameters(), strict=True))


def test_gradient_scaler_skips():
    """A GradScaler as accelerate makes it in fp16. expect: it takes bf16 gradients, and NaN skips the step: no bit of the state changes."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=1)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = build("llama")
    model, optimizer = prepare(accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert type(accelerator.scaler) is ampplug.GradScaler
    batch = next(iter(torch.utils.data.DataLoader(data(), batch_size=BATCH)))
    before = everything(model, optimizer)
    for factor, scale in ((float("nan"), 2.0), (1.0, 2.0)):
        accelerator.backward(model(**batch).loss * factor)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(everything(model, optimizer), before) == (factor != 1.0) and accelerator.scaler.get_scale() == scale


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_missing_package(name, monkeypatch):
    """expect: the error says what to install."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'ampplug\[hf\]'"):
        runpy.run_path(str(Path(ampplug.integrations.accelerate.__file__).with_name(f"{name}.py")))


class TestRefusals:
    def check(self, error: str, *objects, kind: type[Exception] = ValueError, accelerator=None, **settings) -> None:
        """expect: the error, and nothing converted."""
        model = build("llama")
        objects = objects or (model, torch.optim.AdamW(model.parameters()))
        with pytest.raises(kind, match=error):
            prepare(accelerator or fresh_accelerator(), *objects, **settings)
        assert not any(converted(o) for o in objects if isinstance(o, torch.nn.Module))

    def test_level_three(self):
        self.check("opt_level='O3'.*'O0', 'O1', 'O2'", opt_level="O3")

    def test_unknown_setting(self):
        self.check("recipee", recipee="current")

    def test_models(self):
        optimizer = torch.optim.AdamW(build("llama").parameters())
        self.check("0 models", optimizer)
        self.check("2 models", build("llama"), build("gpt2"), optimizer)

    def test_no_optimizer(self):
        self.check("optimizer is None", build("llama"))
        run = prepare(fresh_accelerator(), build("llama"), opt_level="O1")
        assert converted(run)

    def test_prepared_before(self):
        accelerator = fresh_accelerator()
        model = build("llama")
        optimizer = torch.optim.AdamW(model.parameters())
        self.check("AcceleratedOptimizer is already prepared", model, accelerator.prepare(optimizer), accelerator=accelerator, opt_level="O1")
        self.check("LlamaForCausalLM is already prepared", accelerator.prepare(model), optimizer, accelerator=accelerator)

    def test_fp8_of_its_own(self, monkeypatch):
        accelerator = fresh_accelerator()
        monkeypatch.setattr(type(accelerator), "mixed_precision", "fp8")
        self.check("mixed_precision='fp8'.*'bf16'", accelerator=accelerator)

    @pytest.mark.parametrize("version", [1, 2])
    def test_fsdp(self, version):
        accelerator = fresh_accelerator()
        accelerator.state.distributed_type = accelerate.DistributedType.FSDP
        accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=version)
        self.check("runs FSDP2;.*NO, MULTI_CPU, MULTI_GPU" if version == 2 else "runs FSDP;", accelerator=accelerator)

    def test_tensor_parallel(self, monkeypatch):
        accelerator = fresh_accelerator()
        monkeypatch.setattr(type(accelerator), "parallelism_config", accelerate.ParallelismConfig(tp_size=2))
        with pytest.raises(ValueError, match="tp_size > 1"):
            check_accelerator(accelerator)


# ---------------------------------------------------------------- two processes


def agree(value: torch.Tensor) -> bool:
    gathered = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(gathered, value)
    return torch.equal(*gathered)


def check_two_processes(rank: int, kind: str, level: str, form: str, path: str) -> None:
    """Each rank has its own batches and its own loss; the state is the same on both, and as with plain DDP; resuming makes no difference."""
    whole = Run(kind, level, form)
    assert whole.accelerator.num_processes == 2 and type(whole.model) is torch.nn.parallel.DistributedDataParallel
    whole.train(0, 10)
    whole.accelerator.save_state(path)
    whole.train(10, 20)
    losses = torch.tensor(whole.losses)
    assert not agree(losses) and len(losses) == STEPS * ACCUMULATE
    assert agree(whole.bits())
    check_fp8_copies(whole.plain)
    dist.barrier()
    again = Run(kind, level, form)
    again.accelerator.load_state(path)
    again.train(10, 20)
    assert again.losses == whole.losses[10 * ACCUMULATE :] and torch.equal(again.bits(), whole.bits())
    if form == "initialize":  # the time that it takes: once is enough
        return
    plain_losses, bits = plain_loop(kind, level, wrap=torch.nn.parallel.DistributedDataParallel, rank=rank, ranks=2)
    assert whole.losses == plain_losses and torch.equal(whole.bits(), bits)


def worker(rank: int, path: str) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    check_two_processes(rank, "llama", "O2", "prepare", f"{path}/llama")
    check_two_processes(rank, "gpt2", "O1", "initialize", f"{path}/gpt2")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_two_processes(tmp_path):
    """expect: no error in either."""
    assert not PartialState._shared_state or PartialState().num_processes == 1
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
