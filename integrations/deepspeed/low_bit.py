"""O2 under the engine: 8-bit moments, in two ways.

Without ZeRO every rank steps the whole model, so ampplug's optimizer is the engine's own, with split masters, and it writes W8 itself. (DeepSpeed
would wrap it for a bf16 model, with an fp32 copy of all weights; that is left out.)

Under ZeRO the optimizer steps flat partitions. Moments are kept in 8 bits (`partitioned.py`); the partition itself is the master: fp32 as DeepSpeed
keeps it, or, with `bf16.bf16_master_weights_and_grads` and `bf16.bf16_optimizer_states`, the bf16 weights themselves with a 16-bit remainder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampplug import formats
from ampplug.checkpoint import fp32_state_dict
from ampplug.entry import initialize
from ampplug.integrations.deepspeed.attachment import Attachment
from ampplug.integrations.deepspeed.gathered import Gathered
from ampplug.integrations.deepspeed.moments import to_codes, to_moments
from ampplug.integrations.deepspeed.partitioned import Partitioned, become_partitioned
from ampplug.integrations.deepspeed.pieces import layout_of
from ampplug.optim.base import LowBitOptimizer


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

    def settle(self, engine: Any) -> None:
        """As the base class; checkpoints of the optimizer are in the form of the engine's own."""
        super().settle(engine)
        speak_as_engine(self.optimizer, wrapped=engine.bfloat16_enabled())

    def step(self, engine: Any, run: Callable[[], None]) -> None:
        """Clip, which DeepSpeed does for fp32 only and in place; the optimizer does the rest. In bf16 the norm is always taken: as with
        DeepSpeed's own optimizer, a step whose gradients are not finite changes nothing."""
        limit = float(engine.gradient_clipping())
        if limit > 0 or engine.bfloat16_enabled():
            engine._global_grad_norm = self.optimizer.clip_grad_norm_(limit if limit > 0 else torch.inf)
        run()

    def module_state(self, engine: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Exact fp32 values for an engine that trains in fp32."""
        if engine.bfloat16_enabled():
            return state
        exact = fp32_state_dict(engine.module)
        return {name: exact.get(name, value) for name, value in state.items()}

    def load_state_dict(self, state: dict[str, Any] | None, *, optimizer_states: bool) -> None:
        """With its states the optimizer has loaded the scales, too."""
        if not optimizer_states:
            super().load_state_dict(state, optimizer_states=False)


class Sharded(Attachment):
    """O2 under ZeRO 1 and 2."""

    optimizer: Partitioned

    def settle(self, engine: Any) -> None:
        """As the base class; the optimizer, whose parameters are now this rank's partitions, becomes ampplug's."""
        super().settle(engine)
        self.optimizer = shard(engine, self.config.seed, self.config.power_of_two)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any] | None, *, optimizer_states: bool) -> None:
        """Without its states, remainders that belonged to other weights are cleared."""
        if not optimizer_states:
            self.optimizer.clear_remainders()
        super().load_state_dict(state, optimizer_states=optimizer_states)


class ShardedGathered(Gathered):
    """O2 under ZeRO 3."""

    optimizer: Partitioned

    def settle(self, engine: Any) -> None:
        """As `Sharded`."""
        super().settle(engine)
        self.optimizer = shard(engine, self.config.seed, self.config.power_of_two)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any] | None, *, optimizer_states: bool) -> None:
        """As `Sharded`."""
        if not optimizer_states:
            self.optimizer.clear_remainders()
        super().load_state_dict(state, optimizer_states=optimizer_states)


def shard(engine: Any, seed: int, power_of_two: bool) -> Partitioned:
    """Make the optimizer that steps this rank's partitions ampplug's, in place."""
    optimizer = engine.basic_optimizer
    keep_one_copy(engine)
    become_partitioned(optimizer, layout_of(engine), seed, power_of_two)
    save_exact_masters(engine.optimizer, optimizer)
    return optimizer


# ---------------------------------------------------------------- partitions and masters


def keep_one_copy(engine: Any) -> None:
    """Let partitions of the model's own dtype be the model's own memory: DeepSpeed makes a copy, and copies it back after each step.

    That copy then copies onto itself. So an fp32 engine has no second set of fp32 weights, and bf16 partitions need no more than their remainders.
    """
    zero = engine.optimizer
    if engine.zero_optimization_partition_weights():
        pairs = zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True)
    elif hasattr(zero, "bf16_groups"):  # BF16_Optimizer, whose partitions are fp32 and whose model is not
        return
    else:
        own = (flat[dist.get_rank(group)] for flat, group in zip(zero.parallel_partitioned_bit16_groups, zero.real_dp_process_group, strict=True))
        pairs = zip(zero.single_partition_of_fp32_groups, own, strict=True)
    for partition, memory in pairs:
        if partition.dtype == memory.dtype:
            partition.data = memory
    if hasattr(zero, "_link_all_hp_params"):
        zero._link_all_hp_params()


def save_exact_masters(zero: Any, optimizer: Partitioned) -> None:
    """Let ZeRO's checkpoints hold the fp32 values of bf16 partitions with a remainder, so that `zero_to_fp32` and plain DeepSpeed get them."""
    save, load = zero.state_dict, zero.load_state_dict

    def find(state: dict[str, Any]) -> str:
        return next(key for key in ("single_partition_of_fp32_groups", "fp32_flat_groups") if key in state)

    def state_dict() -> dict[str, Any]:
        state = save()
        key = find(state)
        masters = optimizer.masters()
        state[key] = [value if master is None else master[: value.numel()] for value, master in zip(state[key], masters, strict=True)]
        return state

    def load_state_dict(state_dict_list: list[dict[str, Any]], *args: Any, **kwargs: Any) -> None:
        load(state_dict_list, *args, **kwargs)
        optimizer.clear_remainders()
        if kwargs.get("load_from_fp32_weights", True):
            state = state_dict_list[dist.get_rank(zero.dp_process_group)]
            optimizer.set_masters(state[find(state)])

    if any(partition.dtype == torch.bfloat16 for partition in optimizer.partition_tensors()):
        zero.state_dict, zero.load_state_dict = state_dict, load_state_dict


# ---------------------------------------------------------------- checkpoints without ZeRO


def speak_as_engine(optimizer: LowBitOptimizer, *, wrapped: bool) -> None:
    """Let the optimizer save and load what DeepSpeed does without ZeRO: fp32 moments, and of a bf16 engine (`wrapped`) the fp32 weights beside them."""
    save, load = optimizer.state_dict, optimizer.load_state_dict

    def state_dict() -> dict[str, Any]:
        state = to_moments(save())
        if not wrapped:
            return state
        masters = [[_master(optimizer, p) for p in g["params"] if p.requires_grad and p.numel()] for g in optimizer.param_groups]
        return {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 0, "optimizer_state_dict": state, "fp32_groups": masters}

    def load_state_dict(state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        masters = None
        if "fp32_groups" in state_dict:
            masters = [p for group in state_dict["fp32_groups"] for p in group]
            state_dict = state_dict["optimizer_state_dict"]
        own = "moments" in (state_dict.get("ampplug") or {})
        if load_optimizer_states:
            load(to_codes(state_dict) if own else state_dict)
        if masters is not None and not (own and load_optimizer_states):
            _fill_masters(optimizer, masters)

    optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict  # type: ignore[method-assign]


def _master(optimizer: LowBitOptimizer, p: Tensor) -> Tensor:
    """The fp32 value of a parameter, on the CPU."""
    record = optimizer._low_bit.records[id(p)]
    record.master.reconcile()
    return record.master.value().cpu()


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
