"""Which parts of which parameters a flat partition of ZeRO holds.

ZeRO cuts the parameters, laid end to end, into one partition a rank, wherever that falls. Moments are coded in groups of 128 of a parameter's rows,
and rounded with random bits of the parameter and the place in it. So a partition is taken apart into the pieces that it is made of, each of which
starts where a group of its parameter does. Only a group that lies on two ranks is cut: its halves have a scale each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ampplug.formats import GROUP
from ampplug.storage import matrix_shape


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of a partition, which are [first, first + numel) of a parameter."""

    start: int
    shape: tuple[int, ...]  # (n, cols): n whole rows; (n,): within a row, or of a parameter whose rows are whole groups
    ordinal: int  # of the parameter, among all that the engine trains
    first: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Part:
    """Elements [first, first + numel) of a parameter, at `start` of a partition."""

    start: int
    first: int
    numel: int
    shape: torch.Size  # the parameter's
    ordinal: int


def cut(part: Part) -> Iterator[Piece]:
    """The pieces of a part: at most the rest of a group, the rest of a row, whole rows, and the beginning of a row."""
    cols = matrix_shape(part.shape)[1]
    flat = cols % GROUP == 0  # groups follow each other without regard to rows
    row = part.shape.numel() if flat else cols
    begin, end = part.first, part.first + part.numel

    def piece(*shape: int) -> Piece:
        return Piece(part.start + begin - part.first, shape, part.ordinal, begin)

    in_row = begin % row
    if in_row:
        row_end = min(end, begin - in_row + row)
        for stop in (min(row_end, begin + -in_row % GROUP), row_end):
            if begin < stop:
                yield piece(stop - begin)
                begin = stop
    whole = 0 if flat else (end - begin) // cols
    if whole:
        yield piece(whole, cols)
        begin += whole * cols
    if begin < end:
        yield piece(end - begin)


def cut_all(parts: Iterable[Part]) -> tuple[Piece, ...]:
    """The pieces of all parts of one partition."""
    return tuple(piece for part in parts if part.numel for piece in cut(part))


# ---------------------------------------------------------------- what DeepSpeed's wrappers hold


def layout_of(engine: Any) -> list[tuple[Tensor, tuple[Piece, ...]]]:
    """(partition, its pieces) of all flat partitions that this rank's optimizer steps, under ZeRO 1, 2 or 3."""
    zero = engine.optimizer
    ordinals = {id(p): i for i, p in enumerate(engine.module.parameters())}
    if engine.zero_optimization_partition_weights():
        rank = dist.get_rank(zero.dp_process_group)
        return [
            (partition, cut_all(_parts_of_gathered(group, rank, ordinals)))
            for partition, group in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        ]
    in_16_bits = hasattr(zero, "bf16_groups")  # BF16_Optimizer
    groups = zero.bf16_groups if in_16_bits else zero.bit16_groups
    flats = zero.bf16_groups_flat if in_16_bits else zero.bit16_groups_flat
    partitions = zero.fp32_groups_flat_partition if in_16_bits else zero.single_partition_of_fp32_groups
    return [
        (partition, cut_all(_parts_of_flat(group, flat, partition.numel(), dist.get_rank(process_group), ordinals)))
        for partition, group, flat, process_group in zip(partitions, groups, flats, zero.real_dp_process_group, strict=True)
    ]


def _parts_of_flat(parameters: Iterable[Tensor], flat: Tensor, size: int, rank: int, ordinals: dict[int, int]) -> Iterator[Part]:
    """Of a buffer that all parameters are views of: where each is can be seen from its address, however it was ordered and padded."""
    begin, end = rank * size, (rank + 1) * size
    for p in parameters:
        at = (p.data_ptr() - flat.data_ptr()) // flat.element_size()
        first, last = max(begin, at), min(end, at + p.numel())
        if first < last:
            yield Part(first - begin, first - at, last - first, p.shape, ordinals[id(p)])


def _parts_of_gathered(parameters: Iterable[Tensor], rank: int, ordinals: dict[int, int]) -> Iterator[Part]:
    """Of parameters that are partitioned one by one, each padded to a multiple of the ranks."""
    start = 0
    for p in parameters:
        size = p.partition_numel()  # type: ignore[attr-defined]
        first = min(rank * size, p.ds_numel)  # type: ignore[attr-defined]
        yield Part(start, first, min(size, p.ds_numel - first), torch.Size(p.ds_shape), ordinals[id(p)])  # type: ignore[attr-defined]
        start += size
