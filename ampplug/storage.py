"""Device storage behind many tensors: arenas, the bank of FP8 weights, and the rows that kernels read.

An `Arena` is one flat allocation; tensors are views of it. The `WeightBank` holds W8 (the FP8 weight [N16, K16]) and W8T (its transpose
[K16, N16]) of every converted weight, with amax, scale and inverse scale in contiguous arrays, one entry a weight.
N16 and K16 are N and K rounded up to a multiple of 16; the padding stays zero.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampplug import formats
from ampplug.kernels.cast import round_up
from ampplug.kernels.refresh import reference_refresh, triton_refresh
from ampplug.kernels.tables import BF16, COLUMN, KIND, SPLIT, WIDTH, chunk_table
from ampplug.kernels.transpose import TRANSPOSE_WIDTH, reference_transpose, transpose_tiles, triton_transpose
from ampplug.kernels.triton_runtime import on_gpu

_ALIGNMENT = 256

# Numbers of a weight are this far apart in the bank's arrays: cuBLASLt takes scales on 16-byte boundaries only.
SPACING = 4


class Arena:
    """One allocation, zeros at first, of which `views` are taken: one per (shape, dtype), in order."""

    def __init__(self, sizes: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device, dtype: torch.dtype = torch.uint8):
        """dtype: of the allocation itself."""
        self._sizes = [(tuple(shape), dtype) for shape, dtype in sizes]
        total = sum(self._room(shape, dtype) for shape, dtype in self._sizes)
        self.storage = torch.zeros(total // dtype.itemsize, dtype=dtype, device=device)
        self.views: list[Tensor] = []
        self._take_views()

    @staticmethod
    def _room(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return round_up(torch.Size(shape).numel() * dtype.itemsize, _ALIGNMENT)

    def _take_views(self) -> None:
        self.views, offset = [], 0
        for shape, dtype in self._sizes:
            size = torch.Size(shape).numel() * dtype.itemsize
            unit = self.storage.element_size()
            self.views.append(self.storage[offset // unit : (offset + size) // unit].view(dtype).view(shape))
            offset += self._room(shape, dtype)

    def to(self, device: torch.device) -> None:
        """Move the allocation; `views` are new tensors afterwards."""
        self.storage = self.storage.to(device)
        self._take_views()


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """How kernels see a tensor: (rows, cols), contiguous. Groups of 128 never cross a row of the last dimension.

    Where rows are whole groups, or there is only one row, the tensor is seen as rows of 128: any size stays far from 32-bit limits.
    """
    numel = shape.numel()
    cols = shape[-1] if len(shape) else 1
    if numel == cols or cols % formats.GROUP == 0:
        return -(-numel // formats.GROUP), formats.GROUP
    return numel // max(cols, 1), cols


@dataclass(eq=False)
class Master:
    """A parameter whose fp32 value is split: bf16 in the parameter, the 16-bit remainder here.

    The remainder belongs to the bf16 values it was made with. When those were replaced by anyone else it is cleared, unless it was itself
    just restored from a checkpoint and waits for the values that belong to it (either may be loaded first).
    """

    param: Tensor
    low: Tensor | None  # int16, the parameter's shape; None while the parameter is its own fp32 master
    seen: tuple[int, torch.dtype, int] = (0, torch.float32, -1)
    restored: bool = False

    def current(self) -> tuple[int, torch.dtype, int]:
        """(address, dtype, version) of the parameter as it is now."""
        p = self.param
        return p.data_ptr(), p.dtype, p._version

    def mark_seen(self) -> None:
        """The parameter as it is now is what the remainder belongs to."""
        self.seen = self.current()

    def reconcile(self) -> None:
        """Take note of a parameter that was written to, replaced or cast since `mark_seen`."""
        now = self.current()
        if now == self.seen:
            return
        if self.low is not None:
            p = self.param.detach()
            if p.dtype == torch.float32:
                if self.seen[1] == torch.bfloat16:  # .float(): the remainder goes back into the parameter
                    high = p.bfloat16()
                    p.copy_(torch.where(high.float() == p, formats.join_master(high, self.low), p))
                self.low.zero_()
            elif not self.restored and not (now[0] != self.seen[0] and now[2] == self.seen[2]):
                self.low.zero_()
        self.mark_seen()

    def value(self) -> Tensor:
        """The fp32 value, contiguous."""
        p = self.param.detach().contiguous()
        if self.low is None or p.dtype != torch.bfloat16:
            return p.float()
        return formats.join_master(p, self.low.to(p.device))  # a model that was moved since the last step


@dataclass(eq=False)
class Weight:
    """One converted weight in the bank: its FP8 copies and their scale."""

    name: str
    index: int
    master: Master
    w8: Tensor
    w8t: Tensor
    amax: Tensor  # fp32 [1], as the next three: views of the bank's arrays
    next_amax: Tensor
    scale: Tensor
    scale_inv: Tensor
    # what the FP8 copies were made of: a change of any of these means that they are stale
    seen: tuple[int, torch.dtype, int] = (0, torch.float32, -1)

    @property
    def param(self) -> Tensor:
        """The parameter [N, K]."""
        return self.master.param

    @property
    def own_w8(self) -> Tensor:
        """W8 without its padding: view [N, K]."""
        return self.w8[: self.param.shape[0], : self.param.shape[1]]

    def mark_fresh(self) -> None:
        """Declare W8 and W8T to be made of the parameter as it is now."""
        self.seen = self.master.current()

    @property
    def fresh(self) -> bool:
        """False where the parameter was replaced, moved, cast or written to since the FP8 copies were made."""
        p = self.master.param
        return self.seen == (p.data_ptr(), p.dtype, p._version)


class WeightBank:
    """FP8 copies of all converted weights, made by the optimizer's step (O2) or by `refresh`."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], device: torch.device, power_of_two: bool = False):
        """named: (name, weight [N, K]) of each distinct converted weight."""
        self.power_of_two = power_of_two
        self.device = device
        sizes: list[tuple[Sequence[int], torch.dtype]] = []
        for _, p in named:
            rows, cols = (round_up(s, 16) for s in p.shape)
            sizes += [((rows, cols), formats.E4M3), ((cols, rows), formats.E4M3)]
        self._arena = Arena(sizes, device)
        self._numbers = torch.zeros(4, SPACING * max(1, len(named)), dtype=torch.float32, device=device)
        self._shared: Any = None
        self.native: Any = None  # its counterpart in C++ (nn/native.py)
        nothing = torch.empty(0)
        self.weights = [Weight(name, i, Master(p, None), *(nothing,) * 6) for i, (name, p) in enumerate(named)]
        self._bind()

    def _bind(self) -> None:
        """Point the entries at the arena, and the tables at the entries."""
        self.amax, self.next_amax, self.scale, self.scale_inv = self._numbers
        for w, (w8, w8t) in zip(self.weights, zip(self._arena.views[::2], self._arena.views[1::2], strict=True), strict=True):
            w.w8, w.w8t = w8, w8t
            w.amax, w.next_amax, w.scale, w.scale_inv = (row[w.index * SPACING : w.index * SPACING + 1] for row in self._numbers)
        self.key = key_of(self._numbers[0, :1])  # by which compiled code finds the bank
        _banks[self._numbers.untyped_storage().data_ptr()] = self
        self._tables: dict[tuple, tuple[Tensor, Tensor]] = {}
        self._transpose_table = upload([[w.w8.data_ptr(), w.w8t.data_ptr(), *w.w8.shape] for w in self.weights], self.device, TRANSPOSE_WIDTH)
        self._transpose_tiles = transpose_tiles([(w.w8.shape[0], w.w8.shape[1]) for w in self.weights], self.device)

    @property
    def shared(self) -> Any:
        """The last cast of an input, for siblings of its layer (nn/linear_function.py)."""
        return self._shared.snapshot() if self._shared is not None and self._shared is self.native else self._shared

    @shared.setter
    def shared(self, cast: Any) -> None:
        self._shared = cast
        if self.native is not None:
            self.native.mark()

    def take_shared(self, layer: int) -> None:
        """Note that the layer whose own slot is `layer` has taken the shared cast."""
        (self.native.take if self._shared is self.native else self._shared.taken.add)(layer)

    def to(self, device: torch.device) -> None:
        """Move everything; the entries stay the same objects."""
        if device != self.device:
            self.device = device
            self._arena.to(device)
            self._numbers = self._numbers.to(device)
            self._bind()

    def refresh(self, weights: Sequence[Weight] | None = None, *, keep_scale: bool = False, settle: bool = True) -> None:
        """Make W8 and W8T of the given weights (default: all) from their present values: amax, cast and transpose, a launch each.

        keep_scale: a weight that still fits its scale keeps it. settle: make the measured amaxes the current ones at once; otherwise the
        scale update of this step does.
        """
        chosen = self.weights if weights is None else list(weights)
        if not chosen:
            return
        for w in chosen:
            w.master.reconcile()
        if on_gpu(self.device):
            table, chunks = self._table(chosen)
            triton_refresh(table, chunks, self.next_amax, self.scale, self.scale_inv, keep_scale, self.power_of_two)
            self.transpose()
        else:
            for w in chosen:
                reference_refresh(w.master.value(), w.own_w8, w.next_amax, w.scale, w.scale_inv, keep_scale, self.power_of_two)
                reference_transpose(w.w8, w.w8t)
        for w in chosen:
            w.mark_fresh()
        if settle:
            torch.where(self.next_amax != 0, self.next_amax, self.amax, out=self.amax)
            self.next_amax.zero_()

    def transpose(self) -> None:
        """Make W8T of every weight from its W8, in one launch."""
        if on_gpu(self.device):
            triton_transpose(self._transpose_table, self._transpose_tiles)
        else:
            for w in self.weights:
                reference_transpose(w.w8, w.w8t)

    def _table(self, chosen: Sequence[Weight]) -> tuple[Tensor, Tensor]:
        """Device tables for these weights, kept until an address changes."""
        parts: list[Any] = []
        for w in chosen:
            p, low = w.param, w.master.low
            if not p.is_contiguous():
                raise RuntimeError(f"ampplug: weight {w.name!r} is no longer contiguous (strides {p.stride()}); make it so")
            parts += (w.index, p.data_ptr(), p.dtype, None if low is None else low.data_ptr())
        key = tuple(parts)
        if key not in self._tables:
            rows = [table_row(w.param.detach(), w, low=w.master.low) for w in chosen]
            shapes = [(row[COLUMN["rows"]], row[COLUMN["cols"]]) for row in rows]
            if len(self._tables) >= 64:  # weights that keep moving must not pile tables up
                del self._tables[next(iter(self._tables))]
            self._tables[key] = upload(rows, self.device), chunk_table(shapes, self.device)
        return self._tables[key]


def held_weights(state: Any) -> list[Weight]:
    """The bank's weights of a layer's state: one of a Linear, two of a Transformer Engine MLP, none of a layer that has no state."""
    if state is None:
        return []
    several = getattr(state, "weights", None)
    return [state.weight] if several is None else list(several.values())


_banks: weakref.WeakValueDictionary[int, WeightBank] = weakref.WeakValueDictionary()


def key_of(view: Tensor) -> Tensor:
    """A view of a bank's or book's arrays by which the operators of compiled code find it (`find_bank`, `scaling.find_book`).

    `.data`, which has a version of its own: updates of the arrays between forward and backward are no fault to autograd.
    """
    return view.data


def find_bank(key: Tensor) -> WeightBank:
    """The bank in whose arrays `key` lies."""
    bank = _banks.get(key.untyped_storage().data_ptr())
    if bank is None or bank._numbers.untyped_storage().data_ptr() != key.untyped_storage().data_ptr():
        raise RuntimeError(
            "ampplug: compiled code of an FP8 layer does not find the layer's scales or FP8 weight: the model is gone, or its memory was moved or copied "
            "by something else than the module. A compiled or exported program works beside the living model only; to export a program of its own, give "
            "torch.export the unconverted model, filled by load_state_dict(ampplug.fp32_state_dict(model))"
        )
    return bank


def find_weight(key: Tensor) -> tuple[WeightBank, Weight]:
    """The bank and the weight in it whose `scale_inv` is `key`."""
    bank = find_bank(key)
    return bank, bank.weights[(int(key.storage_offset()) % bank._numbers.shape[1]) // SPACING]


def table_row(p: Tensor, weight: Weight | None, *, low: Tensor | None = None) -> list[int]:
    """Row of `kernels.tables.COLUMNS` for a contiguous parameter; what belongs to an optimizer is left 0."""
    rows, cols = matrix_shape(p.shape)
    row = [0] * WIDTH
    kind = KIND[p.dtype]
    if kind == BF16 and low is not None:
        kind = SPLIT
        row[COLUMN["low"]] = low.data_ptr()
    row[COLUMN["param"]] = p.data_ptr()
    row[COLUMN["rows"]], row[COLUMN["cols"]], row[COLUMN["numel"]] = rows, cols, p.numel()
    row[COLUMN["kind"]] = kind
    row[COLUMN["weight"]] = -1
    row[COLUMN["aligned"]] = int(cols % 16 == 0 and rows * cols == p.numel() and p.data_ptr() % 16 == 0)
    if weight is not None:
        row[COLUMN["w8"]] = weight.w8.data_ptr()
        # rows of whole groups have no padding, and a single row has no next: the flat view of 128 columns holds for W8, too
        row[COLUMN["w8_stride"]] = weight.w8.shape[1] if (rows, cols) == tuple(p.shape) else cols
        row[COLUMN["weight"]] = weight.index * SPACING
    return row


def upload(rows: list[list[int]] | Tensor, device: torch.device, width: int = WIDTH) -> Tensor:
    """Rows -> int64 table [rows, width] on the device, without waiting for it. Never changed afterwards: a captured graph may own it."""
    if not len(rows):
        return torch.zeros(0, width, dtype=torch.int64, device=device)
    host = torch.tensor(rows, dtype=torch.int64) if isinstance(rows, list) else rows
    if device.type == "cuda":
        host = host.pin_memory()
    table = host.to(device, non_blocking=True)
    table._source = host  # type: ignore[attr-defined]  # a graph that captured the copy reads this memory at every replay
    return table
