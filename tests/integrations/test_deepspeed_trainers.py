"""accelerate's DeepSpeedPlugin and the Hugging Face Trainer hand the block on, train with it, and resume bit for bit."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from engines import spawn


def state_of(model: nn.Module) -> torch.Tensor:
    """All weights, gathered."""
    import deepspeed

    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
        return torch.cat([p.detach().float().flatten() for p in parameters])


def check_accelerate(folder: str, stage: int, level: str, bf16: bool) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage},
        "ampplug": {"enabled": True, "opt_level": level},
    }
    accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    assert type(model.module[0]).__module__ == "ampplug.nn.linear"
    x = torch.randn(4, 32).to(torch.bfloat16 if bf16 else torch.float32)

    def run(steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = (model(x) - x).float().square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses = run(8)
    assert losses[-1] < 0.2 * losses[0]
    accelerator.save_state(folder)
    run(2)
    wanted = state_of(model.module)
    accelerator.load_state(folder)
    run(2)
    assert torch.equal(state_of(model.module), wanted)


def check_trainer(folder: str, stage: int, level: str) -> None:
    import transformers
    from accelerate.state import AcceleratorState

    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "ampplug": {"enabled": True, "opt_level": level},
    }
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128)
    words = torch.randint(0, 16, (64, 32), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": line, "labels": line} for line in words]

    def run(resume: str | None) -> tuple[torch.Tensor, list[float]]:
        AcceleratorState._reset_state(True)
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=8, learning_rate=1e-3, lr_scheduler_type="constant",
            deepspeed=settings, logging_steps=4, save_steps=4, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        assert type(model.model.layers[0].self_attn.q_proj).__module__ == "ampplug.nn.linear"
        return state_of(trainer.model_wrapped.module), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    wanted, losses = run(None)
    assert losses[1] < losses[0] - 0.2
    assert torch.equal(run(f"{folder}/checkpoint-4")[0], wanted)


def check_all(rank: int, world: int, folder: str) -> None:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    for stage, level, bf16 in ((0, "O1", True), (0, "O2", False), (2, "O2", True)):
        check_accelerate(f"{folder}/accelerate{stage}{level}{bf16}", stage, level, bf16)
    for stage, level in ((2, "O2"), (3, "O1")):
        check_trainer(f"{folder}/trainer{stage}{level}", stage, level)


def test_trainers():
    """One spawn for all of the checks above. expect: no error."""
    spawn(check_all, 1)
