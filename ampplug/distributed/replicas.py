"""Keeping data-parallel replicas the same: amaxes by a MAX reduction each step, masters and moments once, from rank 0.

Amaxes differ from rank to rank because data does; scales must not, or weights would drift apart and a checkpoint of rank 0 would not resume
exactly. A wrapper such as DDP broadcasts the parameters, but not the 16-bit remainders of split masters: the first step does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Replicas:
    """The data-parallel group of one `initialize` call.

    group: None for the default group if one is initialised when the first step comes, False for no communication at all, or a process group.
    """

    def __init__(self, group: Any = None):
        self.group = group
        self._agreed = False

    def __deepcopy__(self, memo: dict) -> Replicas:
        return Replicas(self.group)

    @property
    def active(self) -> bool:
        """True where there is more than one rank to agree with."""
        if self.group is False or not (dist.is_available() and dist.is_initialized()):
            return False
        return dist.get_world_size(self.group) > 1

    def agree(self, fingerprint: Any, state: list[Tensor]) -> bool:
        """Once, at the first step: check that all ranks train the same thing, and take `state` from the group's first rank.

        fingerprint: any picklable description (slot names, shapes). Returns True if anything was received.
        """
        if self._agreed or not self.active:
            return False
        world = dist.get_world_size(self.group)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, fingerprint, group=self.group)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise RuntimeError(
                    f"ampplug: ranks 0 and {rank} of the process group hold different FP8 layers or parameters, so their scales cannot be shared. "
                    "Pass initialize(process_group=...) the data-parallel group, or process_group=False if ranks train different models."
                )
        source = dist.get_global_rank(self.group, 0) if self.group is not None else 0
        for tensor in state:
            dist.broadcast(tensor.view(torch.uint8), source, group=self.group)
        self._agreed = True
        return bool(state)

    def reduce_amax(self, amax: Tensor) -> None:
        """MAX over the ranks, in place: fp32 [slots]. NaN and Inf on one rank make that slot's record unusable on all."""
        if self.active and amax.numel():
            # as integers the bits of magnitudes are ordered, with NaN above Inf: a float MAX may drop NaN
            dist.all_reduce(amax.view(torch.int32), dist.ReduceOp.MAX, group=self.group)
