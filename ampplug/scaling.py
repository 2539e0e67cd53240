"""ScaleBook: amax record, amax history and scale of every slot, in contiguous device arrays.

A slot is one FP8 quantity with a scale: a Linear's input `x` or its output gradient `dy`. (Weights' scales live in the `WeightBank`: they are
known before the weight is written.) Casts raise `amax`; once a step `update` turns all records into scales, in one launch. Layers that are given
the same input use the slot of one of them (`uses`); those of the others lie idle.

A slot that has had no update holds scale 0, which tells the cast kernel to scale just in time from the tensor's own amax. The host learns
asynchronously that a slot has its scale, and only then leaves the launch that computes that amax out; the numbers do not depend on when.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampplug.kernels.scale_update import reference_count, reference_scale_update, reference_weight_update, triton_scale_update
from ampplug.kernels.triton_runtime import on_gpu
from ampplug.storage import WeightBank, key_of


class ScaleBook:
    """Scales of the slots `names`, each with the largest value of its FP8 format in `fp8_max`."""

    def __init__(
        self,
        names: Sequence[str],
        fp8_max: Sequence[float],
        device: torch.device,
        *,
        history: int = 16,
        margin: int = 0,
        power_of_two: bool = False,
    ):
        n = len(names)
        self.names = tuple(names)
        self.uses = list(range(n))  # slot by name: the one that the layer uses
        self.device = device
        self.margin = margin
        self.power_of_two = power_of_two
        self.amax = torch.zeros(n, dtype=torch.float32, device=device)  # whatever the user's default dtype is
        self.history = torch.zeros(n, history, dtype=torch.float32, device=device)
        self.position = torch.zeros(n, dtype=torch.int32, device=device)
        self.scale = torch.zeros(n, dtype=torch.float32, device=device)
        self.scratch = torch.zeros(n, 3, dtype=torch.int32, device=device)  # of casts under way
        self.fp8_max = torch.tensor(list(fp8_max), dtype=torch.float32).to(device)
        self._make_views()
        self._pending: tuple[Tensor, Any] | None = None
        self.known = [False] * n  # what the host knows of scale != 0
        self._all_known = n == 0

    def _make_views(self) -> None:
        # one-element views, made once: indexing a tensor at every call would cost more than the launch
        self.amax_views = list(self.amax.split(1))
        self.scale_views = list(self.scale.split(1))
        self.scratch_views = list(self.scratch.unbind(0))
        self.keys = [key_of(view) for view in self.scale_views]  # by which compiled code finds a slot
        _books[self.scale.untyped_storage().data_ptr()] = self

    def __deepcopy__(self, memo: dict) -> ScaleBook:
        other = object.__new__(ScaleBook)
        memo[id(self)] = other
        other.__dict__.update(self.__getstate__())
        for name in _TENSORS:
            setattr(other, name, getattr(self, name).clone())
        other.known, other.uses = list(self.known), list(self.uses)
        other._make_views()
        return other

    def __getstate__(self) -> dict:
        state = {k: v for k, v in self.__dict__.items() if k not in ("amax_views", "scale_views", "scratch_views", "keys")}
        state["_pending"] = None
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._make_views()

    def to(self, device: torch.device) -> None:
        """Move all arrays, in place: the slots stay the same."""
        if device == self.device:
            return
        for name in _TENSORS:
            setattr(self, name, getattr(self, name).to(device))
        self.device = device
        self._pending = None
        self._make_views()

    @property
    def complete(self) -> bool:
        """Whether the host knows that every slot in use has a scale."""
        return self._all_known

    def poll(self) -> None:
        """Take note of the slots that have a scale by now, if that news has arrived; never waits for it."""
        if self._all_known or self._pending is None:
            return
        flags, event = self._pending
        if event is not None and (torch.cuda.is_current_stream_capturing() or not event.query()):  # a capture forbids the question
            return
        self.known = flags.tolist()
        self._count_known()
        self._pending = None

    def _count_known(self) -> None:
        self._all_known = all(self.known[slot] for slot in self.uses)

    def _ask(self) -> None:
        """Have the flags of `known` copied to the host, without waiting."""
        if self._all_known or self._pending is not None:
            return
        if not on_gpu(self.device):
            self._pending = (self.scale != 0, None)
        elif not torch.cuda.is_current_stream_capturing():
            flags = torch.empty(len(self.names), dtype=torch.bool, pin_memory=True)
            flags.copy_(self.scale != 0, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = (flags, event)

    def update(
        self,
        bank: WeightBank,
        *,
        found_inf: Tensor | None = None,
        clip: Tensor | None = None,
        counted: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        """Records -> scales, measured weight amaxes -> current ones, and step counts, in one launch.

        found_inf, clip: fp32 [1] or None; a step that they declare skipped only clears the records. counted: (table, hyper, steps, limits) of
        an optimizer whose parameters' steps are to be counted.
        """
        if on_gpu(self.device):
            triton_scale_update(
                self.amax, self.history, self.position, self.scale, self.fp8_max, self.margin, self.power_of_two,
                bank.amax, bank.next_amax, counted, found_inf, clip,
            )  # fmt: skip
        else:
            skip = bool(found_inf) if found_inf is not None else False
            skip = skip or (clip is not None and bool(torch.isnan(clip)))
            reference_scale_update(
                self.amax, self.history, self.position, self.scale, self.fp8_max, self.margin, self.power_of_two, skip
            )
            reference_weight_update(bank.amax, bank.next_amax, skip)
            if counted is not None:
                reference_count(*counted, skip)
        self._ask()

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, by name: {"slots": [...], "history", "position", "scale"}. Tensors on their device.

        A slot that several layers use is there under the name of each: the run that loads it may share slots otherwise.
        """
        used = torch.tensor(self.uses, dtype=torch.long, device=self.device)
        return {"slots": list(self.names), "history": self.history[used], "position": self.position[used], "scale": self.scale[used]}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore the slots that are in `state`; returns the names of those that are not (they scale just in time until their first update).

        Of layers that share a slot here and did not there, the one with the largest values decides.
        """
        where = {name: i for i, name in enumerate(state["slots"])}
        scales = [scale or math.inf for scale in state["scale"].tolist()]  # 0 is none
        found: dict[int, int] = {}
        for name, slot in zip(self.names, self.uses, strict=True):
            if name in where and (slot not in found or scales[where[name]] < scales[found[slot]]):
                found[slot] = where[name]
        missing = [name for name, slot in zip(self.names, self.uses, strict=True) if slot not in found]
        self.amax.zero_()
        if found:
            mine, theirs = torch.tensor(list(found)), torch.tensor(list(found.values()))
            depth = min(self.history.shape[1], state["history"].shape[1])
            self.history.zero_()
            self.history[mine.to(self.device), :depth] = state["history"][theirs, :depth].to(self.device)
            self.position[mine.to(self.device)] = state["position"][theirs].to(self.device)
            self.scale[mine.to(self.device)] = state["scale"][theirs].to(self.device)
        self._pending = None
        self.known = [False] * len(self.names)
        self._count_known()
        self._ask()
        return missing


def load_scales(book: ScaleBook, state: dict[str, Any]) -> None:
    """`book.load_state_dict`, and one warning where run and checkpoint do not have the same FP8 layers."""
    missing = book.load_state_dict(state)
    unused = sorted(set(state["slots"]) - set(book.names))
    parts = []
    if missing:
        parts.append(f"it has no scales for {len(missing)} of {len(book.names)} slots ({missing[0]!r}, ...), which scale just in time until their first update")
    if unused:
        parts.append(f"its scales of {len(unused)} slots ({unused[0]!r}, ...) have no FP8 layer here")
    if parts:
        warnings.warn(f"ampplug: state_dict: {'; '.join(parts)}", stacklevel=3)


_books: weakref.WeakValueDictionary[int, ScaleBook] = weakref.WeakValueDictionary()


def find_book(key: Tensor) -> tuple[ScaleBook | None, int]:
    """The book one of whose `scale_views` is `key`, and its slot; (None, -1) where there is none."""
    book = _books.get(key.untyped_storage().data_ptr())
    if book is None or book.scale.untyped_storage().data_ptr() != key.untyped_storage().data_ptr():
        return None, -1
    return book, int(key.storage_offset())


_TENSORS = ("amax", "history", "position", "scale", "scratch", "fp8_max")
