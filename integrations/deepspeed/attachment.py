"""What ampplug holds for one engine: the FP8 weights and scales of its model, and when they follow the engine's steps.

Under ZeRO the optimizer never sees a weight of a layer: it steps flat partitions, which the engine then gathers into the model. So W8 is not
left to the optimizer, nor to a hook on it; it is made anew, in one batch for the whole model, when the engine's step is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ampplug.checkpoint import add_scales_to_state
from ampplug.config import Config
from ampplug.distributed.replicas import Replicas
from ampplug.entry import initialize
from ampplug.scaling import ScaleBook
from ampplug.storage import WeightBank


class Attachment:
    """The FP8 side of one engine at O1: the optimizer is the user's own."""

    whole = False  # the engine's optimizer is ampplug's, and steps the model's own parameters

    def __init__(self, engine: Any, config: Config):
        self.config = config
        # the ranks that hold the same weights and different data
        self.group = engine.seq_data_parallel_group
        self.replicas = Replicas(self.group)
        self.bank: WeightBank | None = None  # None where no layer converts
        self.book: ScaleBook | None = None

    def convert(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Turn the model's Linears into FP8 layers, in place. ValueError, TypeError or RuntimeError as from `ampplug.initialize`.

        optimizer: the one that the engine is going to wrap, at O2.
        """
        initialize(module, None, config=replace(self.config, opt_level="O1"), process_group=self.group)
        self.find_layers(module)

    def find_layers(self, module: nn.Module) -> None:
        """Take note of the bank and the book that the converted layers share."""
        for layer in module.modules():
            state = getattr(layer, "_ampplug", None)
            if state is not None:
                self.bank, self.book = state.bank, state.book
                return

    def settle(self, engine: Any) -> None:
        """The engine has wrapped its optimizer, and moved the weights into flat buffers with it."""
        self.refresh()
        if self.config.opt_level == "O1" and isinstance(engine.basic_optimizer, torch.optim.Optimizer):
            add_scales_to_state(engine.basic_optimizer, None)  # that is, only refuse the 8-bit moments of an O2 run

    @torch.no_grad()
    def refresh(self) -> None:
        """Make W8 and W8T of every weight as it is now."""
        if self.bank is not None:
            self.bank.refresh()

    def step(self, engine: Any, run: Callable[[], None]) -> None:
        """Run the engine's step: it clips, steps and gathers its weights. Then the FP8 weights and the scales follow."""
        run()
        self._follow(skipped=bool(getattr(engine.optimizer, "overflow", False)))

    @torch.no_grad()
    def _follow(self, *, skipped: bool) -> None:
        """skipped: the engine left the weights as they were, since a gradient was not finite."""
        bank, book = self.bank, self.book
        if bank is None:
            return
        self.replicas.agree(() if book is None else book.names, [])
        if not skipped:
            bank.refresh([w for w in bank.weights if w.param.requires_grad], settle=book is None)
        if book is not None:
            self.replicas.reduce_amax(book.amax)
            # the amaxes of a step that was skipped are dropped with it
            book.update(bank, found_inf=torch.ones(1, device=book.device) if skipped else None)

    def module_state(self, engine: Any, state: dict[str, Any]) -> dict[str, Any]:
        """The model's part of a checkpoint, of the `state` that the engine has made of it."""
        return state

    def state_dict(self) -> dict[str, Any]:
        """{"version", "opt_level", "book"}: level and scales; the same on all ranks."""
        return {"version": 1, "opt_level": self.config.opt_level, "book": None if self.book is None else self.book.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None, *, optimizer_states: bool) -> None:
        """Called when weights have been loaded, and the optimizer's states if `optimizer_states`.

        state: of a checkpoint, or None if it was written without ampplug.
        """
        if state is not None and state["book"] is not None and self.book is not None:
            self.book.load_state_dict(state["book"])
        self.refresh()

    def announcement(self, engine: Any) -> str:
        """The one line of the log that says that FP8 is on."""
        weights = [] if self.bank is None else [w.param.numel() for w in self.bank.weights]
        total = sum(p.numel() for p in engine.module.parameters())
        return (
            f"ampplug is active: opt_level {self.config.opt_level}, ZeRO stage {int(engine.zero_optimization_stage())}, "
            f"{len(weights)} weights with {sum(weights):,} of {total:,} parameters in FP8, recipe {self.config.recipe}"
        )
