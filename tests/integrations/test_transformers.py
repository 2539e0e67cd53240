"""The Trainer of transformers itself, on the CPU: one process and two."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from small_models import build, check_fp8_copies, converted, data, everything  # noqa: E402

import ampplug  # noqa: E402
from ampplug.integrations.transformers import AmpPlugMixin, Trainer  # noqa: E402

STEPS = 20
DATA = data(400)


class Recorder(Trainer):
    """Keeps the loss of every micro-batch."""

    def __init__(self, *args, **kwargs):
        self.losses: list[float] = []
        super().__init__(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss

    def bits(self) -> torch.Tensor:
        return everything(self.model, self.optimizer)


def arguments(path, **settings) -> transformers.TrainingArguments:
    defaults = dict(max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2, weight_decay=0.1,
                    max_grad_norm=0.5, train_sampling_strategy="sequential", save_strategy="no", report_to=[], use_cpu=True,
                    disable_tqdm=True, logging_steps=1000)  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(path), **{**defaults, **settings})


def trainer(kind: str, path, ampplug="O2", model=None, **settings) -> Recorder:
    return Recorder(model or build(kind), arguments(path, **settings), train_dataset=DATA, ampplug=ampplug)


@pytest.fixture(autouse=True)
def _leave_no_state(monkeypatch):
    """accelerate's shared state, and the environment through which transformers asks it for torch.compile."""
    before = dict(os.environ)
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    for name in set(os.environ) - set(before):
        del os.environ[name]


def plain_loop(kind: str, config, autocast: bool = False, steps: int = STEPS):
    """What the Trainer does, in plain torch."""
    model = build(kind)
    names = transformers.Trainer.get_decay_parameter_names(None, model)
    groups = [{"params": [p for n, p in model.named_parameters() if (n in names) == decayed], "weight_decay": 0.1 * decayed} for decayed in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, fused=True)
    ampplug.initialize(model, optimizer, config)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, STEPS)
    batches = [{k: torch.stack([d[k] for d in DATA[i : i + 4]]) for k in ("input_ids", "labels")} for i in range(0, 400, 4)]
    losses = []
    model.train()
    for t in range(steps):
        pair = batches[2 * t : 2 * t + 2]
        # the Trainer counts the labels that are predicted; for GPT-2, whose loss it does not know by name, all of them
        count = sum(b["labels"][:, int(kind == "llama") :].numel() for b in pair)
        for batch in pair:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**batch, num_items_in_batch=torch.tensor(count)).loss
            loss.backward()
            losses.append(loss.item())
        ampplug.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses, everything(model, optimizer), model


@pytest.mark.parametrize(("kind", "level", "bf16"), [("llama", "O1", True), ("llama", "O2", False), ("gpt2", "O1", False), ("gpt2", "O2", True)])
def test_same_as_without_trainer(kind, level, bf16, tmp_path):
    """Accumulation, clipping, weight decay, schedule, autocast. expect: every loss and every bit of the state as in a loop of plain torch."""
    run = trainer(kind, tmp_path, level, bf16=bf16)
    run.train()
    losses, bits, _ = plain_loop(kind, level, bf16)
    assert run.losses == losses and torch.equal(run.bits(), bits)
    assert losses[-1] < losses[0] and len(converted(run.model)) == (4 if kind == "gpt2" else 7)
    assert all("Conv1D" in type(m).__name__ for m in converted(run.model)) == (kind == "gpt2")
    check_fp8_copies(run.model)


@pytest.mark.parametrize(("kind", "level", "dtype"), [("gpt2", "O1", torch.float32), ("gpt2", "O2", torch.float32), ("llama", "O2", torch.bfloat16)])
def test_resume(kind, level, dtype, tmp_path):
    """20 steps, against a new Trainer that starts from the checkpoint of step 10; and against the first one, sent back to it. With dropout.

    expect: no difference at all.
    """
    model = build(kind, dropout=0.1, dtype=dtype)
    whole = trainer(kind, tmp_path, level, model, save_strategy="steps", save_steps=10)
    whole.train()
    again = trainer(kind, tmp_path, level, build(kind, dropout=0.1, dtype=dtype, seed=7))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert again.losses == whole.losses[20:] and torch.equal(again.bits(), whole.bits())
    assert max((a.float() - b.float()).abs().max().item() for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True)) == 0.0
    bits, whole.losses = whole.bits(), []
    whole.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert whole.losses == again.losses and torch.equal(whole.bits(), bits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, tmp_path):
    """expect: the same losses and state as without it."""
    run = trainer("llama", tmp_path, max_steps=6, lr_scheduler_type="constant", activation_checkpointing=True,
                  activation_checkpointing_kwargs={"use_reentrant": reentrant})  # fmt: skip
    run.train()
    assert run.model.is_activation_checkpointing
    other = trainer("llama", tmp_path, max_steps=6, lr_scheduler_type="constant")
    other.train()
    assert run.losses == other.losses and torch.equal(run.bits(), other.bits())


def test_torch_compile(tmp_path):
    """expect: one graph without breaks, the losses of the Trainer without it, plain names in checkpoints, exact resuming."""
    settings = dict(torch_compile=True, torch_compile_backend="aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    whole = trainer("llama", tmp_path, save_strategy="steps", save_steps=10, **settings)
    whole.train()
    assert isinstance(whole.model_wrapped, torch._dynamo.OptimizedModule)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    other = trainer("llama", tmp_path)
    other.train()
    assert whole.losses == pytest.approx(other.losses, abs=1e-4)
    assert set(load_file(tmp_path / "checkpoint-10/model.safetensors")) == set(build("llama").state_dict())
    again = trainer("llama", tmp_path, model=build("llama", seed=7), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert again.losses == whole.losses[20:] and torch.equal(again.bits(), whole.bits())


def test_torch_compile_of_gpt2(tmp_path):
    """Conv1D layers; transformers' own warning about the loss breaks the graph, once. expect: the losses of the Trainer without it."""
    whole = trainer("gpt2", tmp_path, "O1", max_steps=4, torch_compile=True, torch_compile_backend="aot_eager")
    whole.train()
    assert isinstance(whole.model_wrapped, torch._dynamo.OptimizedModule) and len(converted(whole.model)) == 4
    other = trainer("gpt2", tmp_path, "O1", max_steps=4)
    other.train()
    assert whole.losses == pytest.approx(other.losses, abs=1e-4)


class TestSaving:
    @pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.float32), ("gpt2", torch.float32), ("llama", torch.bfloat16)])
    def test_plain_weights_under_plain_names(self, kind, dtype, tmp_path):
        """expect: names, shapes and dtypes of the unconverted model, exact masters if it was of fp32; loaded by from_pretrained into plain layers."""
        run = trainer(kind, tmp_path, model=build(kind, dtype=dtype), max_steps=3)
        run.train()
        run.save_model()
        saved = load_file(tmp_path / "model.safetensors")
        plain = build(kind, dtype=dtype)
        tied = {"lm_head.weight"} if kind == "gpt2" else set()
        assert {k: (v.shape, v.dtype) for k, v in saved.items()} == {k: (v.shape, v.dtype) for k, v in plain.state_dict().items() if k not in tied}
        exact = ampplug.fp32_state_dict(run.model)
        assert all(torch.equal(v, exact[k].to(dtype)) for k, v in saved.items())
        loaded = type(plain).from_pretrained(tmp_path)
        assert loaded.dtype == dtype and not converted(loaded) and {type(m) for m in loaded.modules()} == {type(m) for m in plain.modules()}
        assert all(torch.equal(v, exact[k].to(dtype)) for k, v in loaded.state_dict().items())
        if kind == "gpt2":
            assert loaded.lm_head.weight is loaded.transformer.wte.weight
        batch = torch.stack([d["input_ids"] for d in DATA[:4]])
        run.model.eval()
        a, b = run.model(input_ids=batch).logits.float(), loaded.eval()(input_ids=batch).logits.float()
        assert 0 < (a - b).norm() / b.norm() < 0.1

    def test_save_pretrained(self, tmp_path):
        """The model's own, without the Trainer. expect: plain names; the values that it computes with; fp32 ones if asked."""
        run = trainer("gpt2", tmp_path, max_steps=2)
        run.train()
        run.model.save_pretrained(tmp_path / "a")
        run.model.save_pretrained(tmp_path / "b", state_dict=ampplug.fp32_state_dict(run.model))
        exact = ampplug.fp32_state_dict(run.model)
        for name, value in load_file(tmp_path / "a/model.safetensors").items():
            assert torch.equal(value, run.model.state_dict()[name])
        b = load_file(tmp_path / "b/model.safetensors")
        assert all(torch.equal(b[k], exact[k]) for k in b) and "transformer.h.0.mlp.c_fc.weight" in b

    def test_best_model_at_the_end(self, tmp_path):
        """expect: the weights of the best checkpoint, and the outputs that belong to them."""
        run = Recorder(build("llama"), arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
                                                 load_best_model_at_end=True, greater_is_better=True, metric_for_best_model="loss", learning_rate=3e-2),
                       train_dataset=DATA, eval_dataset=DATA[:16])  # fmt: skip
        run.train()
        best = run.state.best_model_checkpoint
        assert best.endswith("checkpoint-1") and abs(run.evaluate()["eval_loss"] - run.state.best_metric) < 1e-3
        exact = ampplug.fp32_state_dict(run.model)
        assert all(torch.equal(v, exact[k]) for k, v in load_file(best + "/model.safetensors").items())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping(level, tmp_path):
    """expect: the norm that is logged is that of the gradients; a limit of a thousandth changes nothing but the second moments, a millionfold."""
    norms, tops = [], []
    for limit in (1000.0, 1e-3):
        run = trainer("gpt2", tmp_path / str(limit), level, max_steps=1, max_grad_norm=limit, logging_steps=1)
        reference = []

        class Measure(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
                reference.append(torch.stack([p.grad.double().norm() for p in model.parameters()]).norm().item())

        run.add_callback(Measure())
        run.train()
        norms.append(next(e["grad_norm"] for e in run.state.log_history if "grad_norm" in e))
        states = run.optimizer.state_dict() if level == "O1" else ampplug.torch_state_dict(run.optimizer.optimizer)
        tops.append(torch.cat([s["exp_avg_sq"].flatten() for s in states["state"].values()]).double().sum().item())
        expected = norms[0] if limit > 1 or level == "O2" else limit  # at O2 the coefficient waits for the step, gradients stay as they are
        assert abs(reference[0] / expected - 1) < 1e-3
    assert abs(norms[0] / norms[1] - 1) < 1e-5
    assert abs(tops[1] / tops[0] * (norms[0] / 1e-3) ** 2 - 1) < 0.1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weights_move_and_outputs_follow(level, tmp_path):
    """expect: after each step another weight, another FP8 copy of it, and another output in training mode."""
    seen = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            layer = model.transformer.h[0].mlp
            assert model.training
            with torch.no_grad():
                seen.append((layer(torch.ones(1, 32)), layer.c_fc.weight.detach().clone(), layer.c_fc._ampplug.weight.w8.float()))
            check_fp8_copies(model)

    run = trainer("gpt2", tmp_path, level, max_steps=4)
    run.add_callback(Look())
    run.train()
    assert len(seen) == 4
    assert all(not torch.equal(a, b) for first, second in zip(seen, seen[1:], strict=False) for a, b in zip(first, second, strict=True))


def test_train_twice_and_model_init(tmp_path):
    """expect: a second train() goes on with the same optimizer; with model_init it starts anew and gives the same."""
    run = trainer("llama", tmp_path, max_steps=2)
    run.train()
    optimizer = run.optimizer.optimizer
    run.train()
    assert run.optimizer.optimizer is optimizer and optimizer.state[next(run.model.parameters())]["step"].item() == 4
    run = Recorder(model_init=lambda: build("llama"), args=arguments(tmp_path, max_steps=2), train_dataset=DATA)
    run.train()
    first = run.bits()
    run.train()
    assert torch.equal(run.bits(), first)


def test_optimizer_of_the_user(tmp_path):
    """Given to another Trainer class, which takes the mixin. expect: it is the one that trains, with the settings given."""

    class Mine(AmpPlugMixin, transformers.Seq2SeqTrainer):
        pass

    model = build("llama")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    args = transformers.Seq2SeqTrainingArguments(output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
    run = Mine(model, args, train_dataset=DATA, optimizers=(optimizer, None), ampplug={"recipe": "current", "select": ["*mlp*"]})
    run.train()
    assert run.optimizer.optimizer is optimizer and type(optimizer).__module__ == "ampplug.optim.adamw" and len(converted(model)) == 3


class TestRefusals:
    def check(self, error: str, path, kind: type[Exception] = ValueError, ampplug="O2", train: bool = False, **settings) -> None:
        """expect: the error, and nothing converted."""
        model = build("llama")
        with pytest.raises(kind, match=error):
            run = trainer("llama", path, ampplug, model, **settings)
            if train:
                run.train()
        assert not converted(model)

    def test_level_three(self, tmp_path):
        self.check("opt_level='O3'.*'O0', 'O1', 'O2'", tmp_path, ampplug="O3")

    def test_settings(self, tmp_path):
        self.check("recipee", tmp_path, ampplug={"recipee": "current"})
        self.check("ampplug is a bool; legal are", tmp_path, TypeError, ampplug=True)

    def test_optimizers_of_level_two(self, tmp_path):
        self.check("Adafactor.*opt_level='O1'", tmp_path, optim="adafactor", train=True)
        run = trainer("llama", tmp_path, "O1", optim="adafactor", max_steps=2)
        run.train()
        assert converted(run.model)

    @pytest.mark.parametrize("version", [1, 2])
    def test_fsdp(self, version, tmp_path, monkeypatch):
        from accelerate import Accelerator, DistributedType

        monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
        monkeypatch.setattr(Accelerator, "is_fsdp2", version == 2)
        self.check("runs FSDP2;.*NO, MULTI_CPU, MULTI_GPU" if version == 2 else "runs FSDP;", tmp_path)

    def test_data_parallel(self, tmp_path, monkeypatch):
        monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
        self.check("2 GPUs.*torchrun", tmp_path)

    def test_dry_run(self, tmp_path):
        run = trainer("llama", tmp_path, "O0", max_steps=2)
        run.train()
        assert not converted(run.model) and type(run.optimizer.optimizer) is torch.optim.AdamW


# ---------------------------------------------------------------- two processes


def agree(value: torch.Tensor) -> bool:
    gathered = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(gathered, value)
    return torch.equal(*gathered)


def check_two_processes(rank: int, kind: str, level: str, path: str) -> None:
    """Each rank has its own batches and its own loss; the state is the same on both; resuming makes no difference."""
    whole = trainer(kind, path, level, build(kind, seed=rank), save_strategy="steps", save_steps=10, gradient_accumulation_steps=1)
    whole.train()
    assert type(whole.model_wrapped) is torch.nn.parallel.DistributedDataParallel and len(whole.losses) == STEPS
    assert not agree(torch.tensor(whole.losses)) and agree(whole.bits())
    check_fp8_copies(whole.model)
    again = trainer(kind, path, level, build(kind, seed=rank + 5), gradient_accumulation_steps=1)
    again.train(resume_from_checkpoint=f"{path}/checkpoint-10")
    assert again.losses == whole.losses[10:] and torch.equal(again.bits(), whole.bits())


def worker(rank: int, path: str) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    check_two_processes(rank, "gpt2", "O2", f"{path}/gpt2")
    check_two_processes(rank, "llama", "O1", f"{path}/llama")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_two_processes(tmp_path):
    """expect: no error in either."""
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
