"""O2 under the engine: 8-bit moments, in two ways.

Without ZeRO every rank steps the whole model, so ampplug's optimizer is the engine's own, with split masters, and it writes W8 itself. (DeepSpeed
would wrap it for a bf16 model, with an fp32 copy of all weights; that is left out.)

Under ZeRO 1 and 2 the optimizer steps one flat partition for each group. Its moments are kept in 8 bits; groups of 128 follow the partition, and so do
the keys of stochastic rounding, so a resumed run is the same bit for bit. The partition itself is the master: fp32 as DeepSpeed keeps it, or, with
`bf16.bf16_master_weights_and_grads` and `bf16.bf16_optimizer_states`, bf16 with a 16-bit remainder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampplug import formats
from ampplug.distributed.replicas import Replicas
from ampplug.entry import become_low_bit, initialize
from ampplug.integrations.deepspeed.attachment import Attachment
from ampplug.optim.base import LowBitOptimizer
from ampplug.storage import WeightBank


class Whole(Attachment):
    """O2 without ZeRO."""

    optimizer: LowBitOptimizer
    whole = True

    def convert(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """As the base class; the optimizer becomes ampplug's, in place."""
        initialize(module, optimizer, config=self.config, process_group=self.group)
        self.find_layers(module)
        assert isinstance(optimizer, LowBitOptimizer)
        self.optimizer = optimizer
        take_engine_states(optimizer)

    def settle(self, engine: Any) -> None:
        """Nothing has moved."""

    def before_step(self, engine: Any) -> None:
        """Clip, which DeepSpeed does for fp32 only and in place. In bf16 the norm is always taken: as with DeepSpeed's own optimizer, a step
        whose gradients are not finite changes nothing."""
        limit = float(engine.gradient_clipping())
        if limit > 0 or engine.bfloat16_enabled():
            engine._global_grad_norm = self.optimizer.clip_grad_norm_(limit if limit > 0 else torch.inf)

    def after_step(self, *, skipped: bool) -> None:
        """The optimizer has done it all."""

    def load_state_dict(self, state: dict[str, Any] | None, *, optimizer_states: bool) -> None:
        """With its states the optimizer has loaded the scales, too."""
        if not optimizer_states:
            super().load_state_dict(state, optimizer_states=False)


class Sharded(Attachment):
    """O2 under ZeRO 1 and 2."""

    optimizer: LowBitOptimizer

    def settle(self, engine: Any) -> None:
        """As the base class; the optimizer, whose parameters are now this rank's partitions, becomes ampplug's."""
        super().settle(engine)
        optimizer = engine.basic_optimizer
        device = optimizer.param_groups[0]["params"][0].device
        # elements of the same place in two partitions are to be rounded independently
        seed = (self.config.seed + dist.get_rank(self.group) * 0x9E3779B1) % 2**32
        become_low_bit(optimizer, WeightBank([], device), None, Replicas(False), {}, device, replace(self.config, seed=seed))
        self.optimizer = optimizer

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any] | None, *, optimizer_states: bool) -> None:
        """Without its states, remainders that belonged to other weights are cleared."""
        if not optimizer_states:
            for record in self.optimizer._low_bit.records.values():
                if record.master.low is not None:
                    record.master.low.zero_()
        super().load_state_dict(state, optimizer_states=optimizer_states)


def take_engine_states(optimizer: LowBitOptimizer) -> None:
    """Let `optimizer.load_state_dict` take what the engine gives that of its bf16 wrapper: a further argument, and the wrapper's own states."""
    load = optimizer.load_state_dict

    def load_state_dict(state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        masters = None
        if "fp32_groups" in state_dict:  # written without ampplug
            masters = [p for group in state_dict["fp32_groups"] for p in group]
            state_dict = state_dict["optimizer_state_dict"]
        if load_optimizer_states:
            load(state_dict)
        if masters is not None:
            _fill_masters(optimizer, masters)

    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


@torch.no_grad()
def _fill_masters(optimizer: LowBitOptimizer, values: list[Tensor]) -> None:
    """Set every trained parameter and its remainder to an fp32 value. ValueError if there are more or fewer values.

    The next forward pass notices that the parameters have changed, and makes W8 anew.
    """
    records = list(optimizer._low_bit.records.values())
    if [r.param.shape for r in records] != [v.shape for v in values]:
        raise ValueError("ampplug: the checkpoint's fp32 weights are not those of the parameters that this optimizer trains")
    for record, value in zip(records, values, strict=True):
        value = value.detach().to(record.param.device)
        if record.master.low is None:
            record.param.copy_(value)
        else:
            high, low = formats.split_master(value.contiguous())
            record.param.copy_(high)
            record.master.low.copy_(low)
        record.master.restored = False
        record.master.mark_seen()
