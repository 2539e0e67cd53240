"""Adam and AdamW over the flat partitions that ZeRO gives its optimizer: 8-bit moments that belong to the model's parameters, not to the partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampplug import formats
from ampplug.distributed.replicas import Replicas
from ampplug.entry import _track_steps
from ampplug.integrations.deepspeed.moments import decode, encode_again
from ampplug.integrations.deepspeed.pieces import Piece
from ampplug.optim.adamw import Adam, AdamW
from ampplug.optim.base import LowBitOptimizer, check_group, check_moments, encode_moments
from ampplug.optim.state import Record
from ampplug.storage import WeightBank


@dataclass(eq=False)
class _Partition:
    """One flat partition, and the records of its pieces. Padding belongs to no piece, and stays as it is."""

    tensor: Tensor
    pieces: Sequence[Piece]
    records: list[Record]
    address: int

    def view(self, piece: Piece, of: Tensor) -> Tensor:
        """A piece of the partition, or of another tensor of its size."""
        return of.narrow(0, piece.start, piece.numel).view(piece.shape)

    def follow(self) -> None:
        """Views of the partition are made anew where it has been moved."""
        if self.tensor.data_ptr() != self.address:
            self.address = self.tensor.data_ptr()
            for piece, record in zip(self.pieces, self.records, strict=True):
                record.param.data = self.view(piece, self.tensor.detach())


class Partitioned(LowBitOptimizer):
    """`LowBitOptimizer` whose parameters are flat partitions. Groups of 128 and the keys of rounding are those of the model's parameters."""

    def adopt_partitions(self, layout: Sequence[tuple[Tensor, Sequence[Piece]]], seed: int, power_of_two: bool) -> None:
        """Build the state after the class was changed. layout: every partition that will ever be stepped, fp32 or bf16 [n], and what it holds."""
        self._layout = layout
        self._partitions: dict[int, _Partition] = {}
        device = layout[0][0].device
        self.adopt(WeightBank([], device), None, Replicas(False), {}, device, seed, power_of_two)

    def _make_state(self, remainders: dict[int, Tensor] | None = None) -> None:
        """All of it at once: ZeRO's partitions do not change."""
        if self._partitions:
            return
        beta1, beta2 = self.param_groups[0]["betas"]
        for tensor, pieces in self._layout:
            made = _Partition(tensor, pieces, [], tensor.data_ptr())
            views = [made.view(piece, tensor.detach()) for piece in pieces]
            made.records = self._low_bit.add([(view, None, None) for view in views], formats.ratio_limit(float(beta1), float(beta2)))
            for piece, record in zip(pieces, made.records, strict=True):
                record.key, record.first = piece.ordinal, piece.first
            self._partitions[id(tensor)] = made
        self._show_state()

    def _show_state(self) -> None:
        """`optimizer.state` has the step count only: there are no moments of the partition's shape."""
        for partition in self._partitions.values():
            self.state[partition.tensor] = {"step": partition.records[0].step} if partition.records else {}

    def _active(self) -> list[tuple[Record, Tensor | None, int]]:
        """As the base class, of the pieces of the partitions that are in the groups now: ZeRO steps one group or sub-group at a time."""
        self._make_state()
        active: list[tuple[Record, Tensor | None, int]] = []
        for group, g in enumerate(self.param_groups):
            for p in g["params"]:
                partition = self._partitions[id(p)]
                partition.follow()
                for piece, record in zip(partition.pieces, partition.records, strict=True):
                    self._low_bit.reconcile(record)
                    active.append((record, None if p.grad is None else partition.view(piece, p.grad), group))
        return active

    # ---------------------------------------------------------------- bf16 partitions with a remainder

    def partition_tensors(self) -> list[Tensor]:
        """The partitions, in ZeRO's order."""
        return [partition.tensor for partition in self._partitions.values()]

    def masters(self) -> list[Tensor | None]:
        """For each partition its fp32 value on the CPU, or None where it is fp32 itself."""
        values: list[Tensor | None] = []
        for partition in self._partitions.values():
            partition.follow()
            if partition.tensor.dtype == torch.float32:
                values.append(None)
                continue
            value = partition.tensor.detach().float().cpu()
            for piece, r in zip(partition.pieces, partition.records, strict=True):
                r.master.reconcile()
                partition.view(piece, value).copy_(r.master.value())
            values.append(value)
        return values

    @torch.no_grad()
    def set_masters(self, values: Sequence[Tensor]) -> None:
        """Set bf16 partitions and their remainders to fp32 values. A value may lack the padding at its end."""
        for partition, value in zip(self._partitions.values(), values, strict=True):
            partition.follow()
            if partition.tensor.dtype == torch.float32 or value.dtype != torch.float32:
                continue
            for piece, r in zip(partition.pieces, partition.records, strict=True):
                high, low = formats.split_master(partition.view(piece, value).to(r.param.device).contiguous())
                r.param.copy_(high)
                assert r.master.low is not None
                r.master.low.copy_(low)
            for r in partition.records:  # at the end: they share the partition's version
                r.master.mark_seen()

    @torch.no_grad()
    def clear_remainders(self) -> None:
        """Partitions are what their bf16 values say."""
        for r in self._low_bit.records.values():
            if r.master.low is not None:
                r.master.low.zero_()
            r.master.mark_seen()

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """That of torch's Adam over the partitions, with fp32 moments on the CPU, and under "ampplug" what makes the same codes of them again."""
        packed = torch.optim.Optimizer.state_dict(self)
        state, codes = {}, {}
        for i, p in enumerate(self._parameters()):
            partition = self._partitions[id(p)]
            exp_avg, exp_avg_sq = torch.zeros(p.numel()), torch.zeros(p.numel())
            for piece, r in zip(partition.pieces, partition.records, strict=True):
                for whole, part in zip((exp_avg, exp_avg_sq), decode(r.ratio, r.v, r.top, r.limit), strict=True):
                    partition.view(piece, whole).copy_(part)
            step = partition.records[0].step[0].float().cpu() if partition.records else torch.zeros(())
            state[i] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            codes[i] = {
                "pieces": [(piece.start, list(piece.shape), piece.ordinal, piece.first) for piece in partition.pieces],
                "tops": [r.top.cpu() for r in partition.records],
                "limits": [float(r.limit) for r in partition.records],
            }
        return {"state": state, "param_groups": packed["param_groups"], "ampplug": {"version": 1, "seed": self._low_bit.seed, "partitions": codes}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, to the same codes, or of a torch Adam or AdamW over the same partitions."""
        partitions = [[self._partitions[id(p)] for p in g["params"]] for g in self.param_groups]
        saved_groups = state_dict["param_groups"]
        sizes, saved_sizes = [len(p) for p in partitions], [len(g["params"]) for g in saved_groups]
        if sizes != saved_sizes:
            raise ValueError(f"state_dict: its parameter groups have {saved_sizes} partitions, this optimizer's have {sizes}")
        plan = []
        own = state_dict.get("ampplug") or {}
        for members, saved_group in zip(partitions, saved_groups, strict=True):
            check_group({**self.defaults, **saved_group}, "state_dict: " + type(self).__name__)
            for partition, i in zip(members, saved_group["params"], strict=True):
                saved = state_dict["state"].get(i, {})
                check_moments(saved, partition.tensor, f"state_dict: partition {i}")
                if saved and not saved["exp_avg"].is_floating_point():
                    raise ValueError(f"state_dict: partition {i} has moments in {saved['exp_avg'].dtype}; they must be floating-point numbers")
                plan.append((partition, saved, own.get("partitions", {}).get(i)))
        if own:
            self._low_bit.seed = own["seed"]
        for partition, saved, codes in plan:
            self._load(partition, saved, codes)
        for g, saved_group in zip(self.param_groups, saved_groups, strict=True):
            g.update({k: v for k, v in saved_group.items() if k != "params"})
            if isinstance(self, torch.optim.AdamW):  # as torch's own: Adam's state does not make it an Adam
                g["decoupled_weight_decay"] = True
        self._low_bit.clipped = False

    def _load(self, partition: _Partition, saved: dict[str, Any], codes: dict[str, Any] | None) -> None:
        partition.follow()
        same = codes is not None and codes["pieces"] == [(p.start, list(p.shape), p.ordinal, p.first) for p in partition.pieces]
        for i, (piece, r) in enumerate(zip(partition.pieces, partition.records, strict=True)):
            if not saved:
                for t in (r.ratio, r.v, r.top, r.step):
                    t.zero_()
                continue
            exp_avg, exp_avg_sq = (partition.view(piece, saved[name]).to(r.v.device).float() for name in ("exp_avg", "exp_avg_sq"))
            r.step.copy_(torch.as_tensor(saved["step"]).to(torch.int32).reshape(1))
            if same:
                assert codes is not None
                r.top.copy_(codes["tops"][i])
                r.limit.fill_(codes["limits"][i])
                ratio, v = encode_again(exp_avg, exp_avg_sq, r.top, r.limit)
                r.ratio.copy_(ratio)
                r.v.copy_(v)
            else:
                encode_moments(r, exp_avg, exp_avg_sq, self._low_bit.seed)


class PartitionedAdam(Partitioned, Adam):
    """Adam under ZeRO."""


class PartitionedAdamW(Partitioned, AdamW):
    """AdamW under ZeRO."""


_PARTITIONED: dict[type, type[Partitioned]] = {torch.optim.Adam: PartitionedAdam, torch.optim.AdamW: PartitionedAdamW}


def become_partitioned(optimizer: Any, layout: Sequence[tuple[Tensor, Sequence[Piece]]], seed: int, power_of_two: bool) -> None:
    """Change the class of a torch Adam or AdamW, whose parameters are ZeRO's partitions, in place."""
    scheduled = vars(optimizer).pop("step", None) is not None
    optimizer.state.clear()
    optimizer.__class__ = _PARTITIONED[type(optimizer)]
    optimizer.adopt_partitions(layout, seed, power_of_two)
    if scheduled:
        _track_steps(optimizer)
