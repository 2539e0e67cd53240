"""Hugging Face transformers: a `Trainer` that trains in FP8.

    from ampplug.integrations.transformers import Trainer  # instead of: from transformers import Trainer

Other trainers (Seq2SeqTrainer, those of TRL, your own) take the mixin: `class MyTrainer(AmpPlugMixin, SFTTrainer): pass`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import ampplug
from ampplug.config import Config

try:
    import transformers
    from accelerate.optimizer import AcceleratedOptimizer

    from ampplug.integrations.accelerate import check_accelerator, use_own_scaler
except ImportError as error:
    raise ImportError("ampplug.integrations.transformers needs transformers and accelerate: pip install 'ampplug[hf]'") from error


class AmpPlugMixin:
    """Put before a `transformers.Trainer` class: `ampplug.initialize` runs as soon as the optimizer is made, before DDP and torch.compile.

    Clipping, accumulation, activation checkpointing, `torch_compile`, evaluation and resuming are the Trainer's own. Checkpoints and
    `save_model` write plain weights under plain names in the dtypes that the model came with: exact fp32 masters for a model in fp32.
    """

    accelerator: Any
    args: Any
    model: Any
    optimizer: Any

    def __init__(self, *args: Any, ampplug: str | Mapping[str, Any] | Config = "O2", **kwargs: Any):
        """The Trainer's arguments, and one more.

        Args:
            ampplug: the level ("O0", "O1" or "O2"), or a dict of `ampplug.Config`'s fields, or a `Config`.

        Raises:
            ValueError, TypeError: for settings or ways of distribution that are not legal, naming those that are.
        """
        self._ampplug_config = _config(ampplug)
        self._ampplug_optimizer: Any = None  # the one that was initialized
        self._narrowed: dict[nn.Module, list[str]] = {}  # module -> names of its fp32 parameters that became bf16
        super().__init__(*args, **kwargs)
        check_accelerator(self.accelerator)
        if self.args.n_gpu > 1:
            raise ValueError(f"one process drives {self.args.n_gpu} GPUs (DataParallel), which ampplug does not take; start one a GPU, with torchrun")
        use_own_scaler(self.accelerator)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, and once for each optimizer `ampplug.initialize`."""
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        plain = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer  # wrapped since the first `train`
        if plain is not self._ampplug_optimizer:
            before = {id(p): p.dtype for p in self.model.parameters()}
            ampplug.initialize(self.model, plain, config=self._ampplug_config)
            self._ampplug_optimizer = plain
            self._narrowed = {}
            for module in self.model.modules():
                names = [n for n, p in module.named_parameters(recurse=False) if before[id(p)] == torch.float32 and p.dtype == torch.bfloat16]
                if names:
                    self._narrowed[module] = names
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """One launch, and no pass over the gradients. (The Trainer's own, torch's, is right too.)"""
        self.accelerator.unscale_gradients(self.optimizer)
        return ampplug.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """As the Trainer's; fp32 values for weights that came in fp32."""
        if state_dict is None and self.args.should_save:
            state_dict = self._state_dict_as_it_came()
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _state_dict_as_it_came(self) -> dict[str, Tensor]:
        """The model's state_dict, weights that were narrowed to bf16 replaced by their fp32 masters, on the CPU: one layer at a time."""
        state = self.model.state_dict()
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            if module in self._narrowed:
                masters = ampplug.fp32_state_dict(module)
                for name in self._narrowed[module]:
                    key = f"{prefix}.{name}" if prefix else name
                    if key in state:
                        state[key] = masters[name].cpu()
        return state


class Trainer(AmpPlugMixin, transformers.Trainer):
    """`transformers.Trainer` in FP8; `ampplug="O1"` or `ampplug={"recipe": "current"}` sets the level or more."""


def _config(value: Any) -> Config:
    """One Config of all the ways to give one."""
    if isinstance(value, Config):
        return value
    if isinstance(value, str):
        return Config(opt_level=value)
    if isinstance(value, Mapping):
        return Config.from_dict(dict(value))
    raise TypeError(f"ampplug is a {type(value).__name__}; legal are a level ('O0', 'O1', 'O2'), a dict of settings, or an ampplug.Config")
