"""Device state of a low-bit optimizer: codes, masters, step counts, and the tables that the step kernel reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampplug import formats
from ampplug.kernels.adam_step import AdamTensor, reference_adam_step, triton_adam_step
from ampplug.kernels.norm import MAX_PROGRAMS, reference_norm, triton_norm
from ampplug.kernels.tables import COLUMN, HYPER, KIND, WIDTH, chunk_table
from ampplug.kernels.triton_runtime import on_gpu
from ampplug.storage import Arena, Master, Weight, matrix_shape, table_row, upload


@dataclass(eq=False)
class Record:
    """One parameter with its state. `ordinal` is its row in every array."""

    param: Tensor
    ordinal: int
    master: Master
    weight: Weight | None
    ratio: Tensor  # uint8, the parameter's shape: codes of m / sqrt(v)
    v: Tensor  # uint8, the parameter's shape
    top: Tensor  # uint8 [rows, groups]: exponents of v's groups
    step: Tensor  # int32 [1], view
    limit: Tensor  # fp32 [1], view: ratio limit that `ratio` was coded with
    key: int  # of the rounding bits: `ordinal`, or that of the model's parameter of which `param` is a part
    first: int = 0  # index in that parameter of the first element


@dataclass(eq=False)
class _Segment:
    """Parameters that came together, and their storage."""

    lows: Arena
    codes: Arena
    records: list[Record]


class AdamState:
    """State of all parameters of one optimizer, on one device."""

    def __init__(self, device: torch.device, seed: int, power_of_two: bool):
        self.device = device
        self.seed = seed
        self.power_of_two = power_of_two
        self.records: dict[int, Record] = {}  # by id of the parameter, which the record keeps alive
        self._segments: list[_Segment] = []
        self.steps = torch.zeros(0, dtype=torch.int32, device=device)
        self.limits = torch.zeros(0, dtype=torch.float32, device=device)
        self._hyper: Tensor | None = None
        self._hyper_values: Any = None
        self._table_key: Any = None
        self._grads: Any = None
        self._rows: Tensor | None = None  # the table without gradients, on the host
        self._table: Tensor | None = None
        self._chunks: Tensor | None = None
        self._owned_by_graphs: list[Any] = []
        self.clip = torch.ones(1, dtype=torch.float32, device=device)
        self.clipped = False  # a coefficient waits in `clip`
        self._partials = torch.zeros(MAX_PROGRAMS, dtype=torch.float32, device=device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)

    def add(self, parameters: Sequence[tuple[Tensor, Tensor | None, Weight | None]], limit: float) -> list[Record]:
        """Make zero state for parameters (param, remainder to start with or None, bank entry or None), in one arena."""
        lows: list[tuple[Sequence[int], torch.dtype]] = []
        codes: list[tuple[Sequence[int], torch.dtype]] = []
        for p, _, _ in parameters:
            rows, cols = matrix_shape(p.shape)
            lows.append((p.shape if p.dtype == torch.bfloat16 else (0,), torch.int16))
            codes += [(p.shape, torch.uint8), (p.shape, torch.uint8), ((rows, -(-cols // formats.GROUP)), torch.uint8)]
        # apart, since torch.save wants one dtype a storage
        segment = _Segment(Arena(lows, self.device, torch.int16), Arena(codes, self.device), [])
        first = len(self.records)
        added = segment.records
        for i, (p, remainder, weight) in enumerate(parameters):
            master = weight.master if weight is not None else Master(p, None)
            nothing = torch.empty(0)
            record = Record(p, first + i, master, weight, *(nothing,) * 5, first + i)
            self.records[id(p)] = record
            added.append(record)
            if p.dtype == torch.bfloat16:
                master.low = segment.lows.views[i]
                if remainder is not None:
                    master.low.copy_(remainder)
            master.mark_seen()
        self._segments.append(segment)
        n = len(self.records)
        steps, limits = self.steps, self.limits
        self.steps = torch.zeros(n, dtype=torch.int32, device=self.device)
        self.limits = torch.full((n,), limit, dtype=torch.float32, device=self.device)
        self.steps[:first], self.limits[:first] = steps, limits
        self._bind()
        return added

    def _bind(self) -> None:
        """Point the records at arenas and arrays."""
        for segment in self._segments:
            for i, r in enumerate(segment.records):
                low = segment.lows.views[i]
                r.ratio, r.v, r.top = segment.codes.views[3 * i : 3 * i + 3]
                if r.master.low is not None and low.numel() == r.param.numel():
                    r.master.low = low
        for r in self.records.values():
            r.step = self.steps[r.ordinal : r.ordinal + 1]
            r.limit = self.limits[r.ordinal : r.ordinal + 1]
        self._table_key = None

    def to(self, device: torch.device) -> None:
        """Move everything."""
        if device == self.device:
            return
        self.device = device
        for segment in self._segments:
            segment.lows.to(device)
            segment.codes.to(device)
        for name in ("steps", "limits", "clip", "_partials", "_counter"):
            setattr(self, name, getattr(self, name).to(device))
        self._hyper = self._hyper_values = None
        self._bind()

    @property
    def arenas(self) -> list[Tensor]:
        """The flat storages, for broadcasting."""
        return [arena.storage for segment in self._segments for arena in (segment.lows, segment.codes)]

    def reconcile(self, record: Record) -> None:
        """Take note of what was done to a parameter since the last step; fp16 and fp64 are refused."""
        p = record.param
        if p.dtype not in (torch.float32, torch.bfloat16):
            raise RuntimeError(f"ampplug: a parameter of shape {list(p.shape)} is {p.dtype} now; at O2 it must be torch.float32 or torch.bfloat16")
        if not p.is_contiguous():
            p.data = p.data.contiguous()
        if p.dtype == torch.bfloat16 and record.master.low is None:  # cast after initialize
            record.master.low = torch.zeros(p.shape, dtype=torch.int16, device=p.device)
        record.master.reconcile()

    # ---------------------------------------------------------------- tables

    def set_hyper(self, groups: Sequence[dict[str, Any]]) -> Tensor:
        """fp64 [groups, HYPER_WIDTH] on the device, uploaded when a value changed. A tensor lr is copied on the device at every call."""
        import math

        values, tensors = [], []
        for i, g in enumerate(groups):
            beta1, beta2 = (float(b) for b in g["betas"])
            lr = g["lr"]
            if isinstance(lr, Tensor):
                tensors.append((i, lr))
            row = dict(
                lr=0.0 if isinstance(lr, Tensor) else float(lr),
                log_beta1=math.log(beta1) if beta1 > 0 else -math.inf,
                log_beta2=math.log(beta2) if beta2 > 0 else -math.inf,
                eps=float(g["eps"]),
                weight_decay=float(g["weight_decay"]),
                bound=formats.step_bound(beta1, beta2),
                ratio_limit=formats.ratio_limit(beta1, beta2),
                decoupled=float(bool(g["decoupled_weight_decay"])),
                maximize=float(bool(g["maximize"])),
                beta1=beta1,
                beta2=beta2,
            )
            values.append([row[name] for name in HYPER])
        if values != self._hyper_values or self._hyper is None:
            host = torch.tensor(values, dtype=torch.float64, pin_memory=on_gpu(self.device))
            if self._hyper is None or self._hyper.shape != host.shape:
                self._hyper = host.to(self.device, non_blocking=True)
            else:
                self._hyper.copy_(host, non_blocking=True)
            self._keep_for_graph(host)
            self._hyper_values = values
        for i, lr in tensors:
            self._hyper[i, HYPER.index("lr")].copy_(lr)
        return self._hyper

    def _keep_for_graph(self, thing: Any) -> None:
        """What a captured graph reads must outlive it."""
        if on_gpu(self.device) and torch.cuda.is_current_stream_capturing():
            self._owned_by_graphs.append(thing)

    def set_table(self, active: Sequence[tuple[Record, Tensor | None, int]]) -> tuple[Tensor, Tensor]:
        """(table, chunks) for (record, gradient or None, group), uploaded when an address changed."""
        key = [(r.ordinal, r.param.data_ptr(), r.param.dtype, group) for r, _, group in active]
        grads = [(0, 0) if g is None or not g.numel() else (g.data_ptr(), KIND[g.dtype]) for _, g, _ in active]
        if key != self._table_key or self._rows is None:
            rows: list[list[int]] = [[]] * len(self.records)
            shapes = [(0, 0)] * len(self.records)
            for r in self.records.values():  # those in no group keep a row without gradient
                row = table_row(r.param.detach(), r.weight, low=r.master.low if r.param.dtype == torch.bfloat16 else None)
                row[COLUMN["ratio"]], row[COLUMN["v"]], row[COLUMN["top"]] = r.ratio.data_ptr(), r.v.data_ptr(), r.top.data_ptr()
                row[COLUMN["ordinal"]], row[COLUMN["first"]] = r.key, r.first
                rows[r.ordinal] = row
                shapes[r.ordinal] = row[COLUMN["rows"]], row[COLUMN["cols"]]
            for r, _, group in active:
                rows[r.ordinal][COLUMN["group"]] = group
            self._rows = torch.tensor(rows, dtype=torch.int64).view(-1, WIDTH)
            self._ordinals = torch.tensor([r.ordinal for r, _, _ in active], dtype=torch.int64)
            if self._chunks is None or self._table_key is None:
                self._chunks = chunk_table(shapes, self.device)
            self._table, self._table_key = None, key
        if self._table is None or grads != self._grads:  # gradients move often, all else seldom
            table, found = self._rows.clone(), torch.tensor(grads, dtype=torch.int64).view(-1, 2)
            table[self._ordinals, COLUMN["grad"]] = found[:, 0]
            table[self._ordinals, COLUMN["grad_kind"]] = found[:, 1]
            table[self._ordinals, COLUMN["aligned"]] &= (found[:, 0] % 16 == 0).long()
            self._table, self._grads = upload(table, self.device), grads
        assert self._chunks is not None
        self._keep_for_graph((self._table, self._chunks))
        return self._table, self._chunks

    # ---------------------------------------------------------------- work

    def measure_norm(self, active: Sequence[tuple[Record, Tensor | None, int]], max_norm: float) -> Tensor:
        """Norm of the gradients, fp32 []; the clip coefficient waits in `clip` for the step."""
        norm = torch.empty(1, dtype=torch.float32, device=self.device)  # the caller's to keep
        if on_gpu(self.device):
            table, chunks = self.set_table(active)
            triton_norm(table, chunks, self._partials, self._counter, norm, self.clip, max_norm, self.clipped)
        else:
            grads = [g for _, g, _ in active if g is not None]
            norm, clip = reference_norm(grads, max_norm, self.clip if self.clipped else None)
            self.clip.copy_(clip)
        self.clipped = True
        return norm[0]

    def step(
        self,
        active: Sequence[tuple[Record, Tensor | None, int]],
        groups: Sequence[dict[str, Any]],
        bank_arrays: tuple[Tensor, Tensor, Tensor, Tensor],
        found_inf: Tensor | None,
        loss_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One step of every (record, gradient, group). Returns (table, hyper, steps, limits), for the count at its end."""
        hyper = self.set_hyper(groups)
        table, chunks = self.set_table(active)
        clip = self.clip if self.clipped else None
        if on_gpu(self.device):
            triton_adam_step(
                table, chunks, hyper, self.steps, self.limits, *bank_arrays, found_inf, loss_scale, clip, self.seed, self.power_of_two
            )
            return table, hyper, self.steps, self.limits
        skip = (found_inf is not None and bool(found_inf)) or (clip is not None and bool(torch.isnan(clip)))
        if not skip:
            factor = None if loss_scale is None else 1.0 / loss_scale
            if clip is not None:
                factor = clip if factor is None else factor * clip
            for r, g, group in active:
                if g is not None and g.numel():
                    reference_adam_step(self._reference_view(r, g), hyper[group], factor, self.seed, self.power_of_two)
        return table, hyper, self.steps, self.limits

    def _reference_view(self, r: Record, g: Tensor) -> AdamTensor:
        """The record as matrices for the reference, views all."""
        rows, cols = matrix_shape(r.param.shape)
        low = r.master.low if r.param.dtype == torch.bfloat16 else None
        p = r.param.detach()
        w = r.weight
        # a vector that does not fill its last row of 128 is one long row
        shape, top = ((rows, cols), r.top) if rows * cols == p.numel() else ((1, p.numel()), r.top.view(1, -1))
        fp8 = (None,) * 5 if w is None else (w.own_w8 if w.own_w8.shape == shape else w.own_w8.view(shape), w.amax, w.next_amax, w.scale, w.scale_inv)
        tensor = AdamTensor(p.view(shape), g.view(shape), None if low is None else low.view(shape), r.ratio.view(shape), r.v.view(shape),
                            top, r.step, r.limit, r.key, *fp8)  # fmt: skip
        tensor.first = r.first
        return tensor
