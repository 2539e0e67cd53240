"""What the low-bit optimizers share: the torch.optim.Optimizer contract on top of `AdamState`.

An optimizer becomes one of these by changing its class in place (`adopt`): the object that schedulers, scalers and trainers hold stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampplug import formats
from ampplug.distributed.replicas import Replicas
from ampplug.optim.state import AdamState, Record
from ampplug.scaling import ScaleBook, load_scales
from ampplug.storage import SPACING, Weight, WeightBank, matrix_shape


class LowBitOptimizer(torch.optim.Optimizer):
    """Mixin over a torch optimizer class. Step counts, lr, clip coefficient, loss scale and the decision to skip stay on the device."""

    # GradScaler then leaves unscaling and skipping to `step`, without waiting for the device
    _step_supports_amp_scaling = True

    _low_bit: AdamState
    _bank: WeightBank
    _book: ScaleBook | None
    _replicas: Replicas

    # ---------------------------------------------------------------- becoming one

    def adopt(
        self,
        bank: WeightBank,
        book: ScaleBook | None,
        replicas: Replicas,
        remainders: dict[int, Tensor],
        device: torch.device,
        seed: int,
        power_of_two: bool,
    ) -> None:
        """Build the state after the class was changed. remainders: id of a parameter -> int16 remainder of its fp32 value."""
        self._bank, self._book, self._replicas = bank, book, replicas
        self._low_bit = AdamState(device, seed, power_of_two)
        self._weights: dict[int, Weight] = {id(w.param): w for w in bank.weights}
        self._watched: tuple[Any, Tensor, int] | None = None  # (hook, gradient, version) of one that waits to be clipped
        self._patch_step_function()
        self._make_state(remainders)

    def _parameters(self) -> Iterable[Tensor]:
        return chain.from_iterable(g["params"] for g in self.param_groups)

    def _make_state(self, remainders: dict[int, Tensor] | None = None) -> None:
        """State for every parameter that has none yet: new groups, unfrozen parameters."""
        new = [p for p in self._parameters() if id(p) not in self._low_bit.records and (p.requires_grad or p.grad is not None)]
        if not new:
            return
        for p in new:
            check_parameter(p)
            if not p.is_contiguous():
                p.data = p.data.contiguous()
        remainders = remainders or {}
        beta1, beta2 = self.param_groups[0]["betas"]
        for r in self._low_bit.add(
            [(p, remainders.get(id(p)), self._weights.get(id(p))) for p in new], formats.ratio_limit(float(beta1), float(beta2))
        ):
            _owners[id(r.param)] = self
        self._show_state()

    def _show_state(self) -> None:
        """`optimizer.state` shows views of the real storage."""
        for r in self._low_bit.records.values():
            state = self.state[r.param]
            state.clear()
            state.update(step=r.step, exp_avg=r.ratio, exp_avg_sq=r.v, exp_avg_sq_top=r.top, ratio_limit=r.limit)
            if r.master.low is not None:
                state["master_low"] = r.master.low

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; parameters must be bf16 or fp32."""
        if "_low_bit" in self.__dict__:
            params = param_group["params"]
            params = [params] if isinstance(params, Tensor) else list(params)
            param_group = {**param_group, "params": params}
            for p in params:
                check_parameter(p[1] if isinstance(p, tuple) else p)
            check_group({**self.defaults, **param_group}, type(self).__name__)
            super().add_param_group(param_group)
            self._make_state()
        else:
            super().add_param_group(param_group)

    # ---------------------------------------------------------------- stepping

    def _active(self) -> list[tuple[Record, Tensor | None, int]]:
        """(record, gradient, group) of all parameters; contiguous gradients of the parameter's shape."""
        self._make_state()
        low_bit = self._low_bit
        active: list[tuple[Record, Tensor | None, int]] = []
        for group, g in enumerate(self.param_groups):
            for p in g["params"]:
                record = low_bit.records.get(id(p))
                if record is None:
                    continue
                grad = p.grad
                if p.device != low_bit.device:
                    low_bit.to(p.device)
                    self._bank.to(p.device)
                    if self._book is not None:
                        self._book.to(p.device)
                    self._show_state()
                if grad is not None:
                    if grad.is_sparse:
                        raise RuntimeError("ampplug: Adam at O2 takes no sparse gradients (torch.optim.SparseAdam at O1 does)")
                    if grad.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                        grad = grad.float()
                    if not grad.is_contiguous():
                        grad = grad.contiguous()
                low_bit.reconcile(record)
                active.append((record, grad, group))
        return active

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. closure: re-evaluates the model with gradients enabled and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for g in self.param_groups:
            check_group(g, type(self).__name__)
        active = self._active()
        scales = () if self._book is None else (self._book.scale, self._book.history, self._book.position)
        if self._replicas.agree(self._fingerprint(), [*self._low_bit.arenas, self._low_bit.steps, self._low_bit.limits, self._bank._numbers, *scales]):
            self._bank.refresh(keep_scale=True)
        if not active:
            return loss
        stale = [r.weight for r, _, _ in active if r.weight is not None and not r.weight.fresh]
        if stale:  # written to since the last forward: their amaxes must be true before the pass relies on them
            self._bank.refresh(stale, keep_scale=any(w.master.restored for w in stale))
        found_inf = getattr(self, "found_inf", None)
        loss_scale = getattr(self, "grad_scale", None)
        clip = self._low_bit.clip if self._low_bit.clipped else None
        b = self._bank
        counted = self._low_bit.step(active, self.param_groups, (b.amax, b.next_amax, b.scale, b.scale_inv), found_inf, loss_scale)
        if b.weights:
            b.transpose()
        if self._book is not None:
            self._replicas.reduce_amax(self._book.amax)
            self._book.update(b, found_inf=found_inf, clip=clip, counted=counted)
        else:
            _empty_book(self._low_bit.device).update(b, found_inf=found_inf, clip=clip, counted=counted)
        self._low_bit.clipped = False
        self._watch(None)
        moved = [r for r, g, _ in active if g is not None]
        torch.autograd.graph.increment_version([r.param for r in moved])
        for r in moved:
            r.master.restored = False
            r.master.mark_seen()
            if r.weight is not None:
                r.weight.mark_fresh()
        return loss

    @torch.no_grad()
    def prepare_replay(self) -> None:
        """Before a captured step is replayed: hyperparameters to the device, and what was loaded or edited since taken note of."""
        for g in self.param_groups:
            check_group(g, type(self).__name__)
        self._low_bit.set_hyper(self.param_groups)
        for r in self._low_bit.records.values():
            self._low_bit.reconcile(r)

    def _fingerprint(self) -> Any:
        book = () if self._book is None else self._book.names
        return book, [(tuple(r.param.shape), str(r.param.dtype)) for r in self._low_bit.records.values()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; a clip coefficient that waits for the step is dropped with the gradients it was for."""
        self._low_bit.clipped = False
        self._watch(None)
        super().zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the norm of all gradients in the next step, without touching them: one launch. Returns the norm, fp32 [].

        A norm that is not finite makes the next step change nothing.
        """
        active = self._active()
        if self._watched is not None and self._watched[1]._version != self._watched[2]:
            self._low_bit.clipped = False  # edited since the last clip, or zeroed and computed anew: the new norm says all
        norm = self._low_bit.measure_norm(active, float(max_norm))
        self._watch(next((r.param for r, g, _ in active if g is not None and r.param.requires_grad), None))
        return norm

    def _watch(self, p: Tensor | None) -> None:
        """Forget the clip coefficient as soon as a backward pass gives `p`, one of those clipped, a new gradient: the old ones were given up,
        by `model.zero_grad()` or `p.grad = None`. Gradients that are edited or replaced by hand stay clipped."""
        if self._watched is not None:
            self._watched[0].remove()
        self._watched = None
        if p is None or p.grad is None:
            return
        clipped = p.grad

        def accumulated(p: Tensor) -> None:
            if p.grad is not clipped:
                self._low_bit.clipped = False

        self._watched = p.register_post_accumulate_grad_hook(accumulated), clipped, clipped._version

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """torch's form, with codes instead of fp32 moments, and the scales of the model's FP8 layers under "ampplug"."""
        self._show_state()
        state = super().state_dict()
        state["ampplug"] = {
            "version": 1,
            "seed": self._low_bit.seed,
            "book": None if self._book is None else self._book.state_dict(),
            "weights": {
                "names": [w.name for w in self._bank.weights],
                "amax": self._bank.amax[::SPACING].clone(),
                "scale": self._bank.scale[::SPACING].clone(),
            },
        }
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of a torch Adam or AdamW with fp32 moments. Checked as a whole before anything is changed."""
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        saved_groups = state_dict["param_groups"]
        sizes, saved_sizes = [len(g["params"]) for g in self.param_groups], [len(g["params"]) for g in saved_groups]
        if sizes != saved_sizes:
            raise ValueError(f"state_dict: its parameter groups have {saved_sizes} parameters, this optimizer's have {sizes}")
        for saved_group in saved_groups:
            check_group({**self.defaults, **saved_group}, "state_dict: " + type(self).__name__)
        self._make_state()
        params = list(self._parameters())
        saved_ids = list(chain.from_iterable(g["params"] for g in saved_groups))
        plan: list[tuple[Record, dict[str, Any]]] = []
        for p, i in zip(params, saved_ids, strict=True):
            saved = state_dict["state"].get(i, {})
            record = self._low_bit.records.get(id(p))
            if record is None:  # frozen here, whatever it was there
                continue
            check_moments(saved, p, f"state_dict: parameter {i}")
            plan.append((record, saved))
        # a state that shows this optimizer's own tensors (a wrapper that loads what it has just read) restores nothing
        own_lows = {id(r) for r, saved in plan if _is_same(r.master.low, saved.get("master_low"))}
        for record, saved in plan:
            _load_record(record, saved, self._low_bit.seed)
        for g, saved_group in zip(self.param_groups, saved_groups, strict=True):
            params_here = g["params"]
            g.update({k: v for k, v in saved_group.items() if k != "params"})
            g["params"] = params_here
            if isinstance(self, torch.optim.AdamW):  # as torch's own: Adam's state does not make it an Adam
                g["decoupled_weight_decay"] = True
        own = state_dict.get("ampplug")
        if own is not None and self._book is not None and own["book"] is not None:
            load_scales(self._book, own["book"])
        from_o2 = own is not None and "weights" in own  # O1's has the scales of inputs and output gradients alone
        if own is not None and from_o2:
            self._low_bit.seed = own["seed"]
            where = {name: i for i, name in enumerate(own["weights"]["names"])}
            for w in self._bank.weights:
                if w.name in where:
                    w.amax.copy_(own["weights"]["amax"][where[w.name]])
                    w.scale.copy_(own["weights"]["scale"][where[w.name]])
        for record, _ in plan:
            if id(record) not in own_lows:
                record.master.restored = from_o2
        self._bank.refresh(keep_scale=from_o2)
        self._low_bit.clipped = False
        self._show_state()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __deepcopy__(self, memo: dict) -> Any:
        raise TypeError(
            "ampplug: an optimizer at O2 cannot be deep-copied (it is bound to the model's FP8 weights); build a second one and load the state_dict"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("ampplug: an optimizer at O2 cannot be pickled (it is bound to the model's FP8 weights); save its state_dict")


def _is_same(a: Tensor | None, b: Any) -> bool:
    return a is not None and isinstance(b, Tensor) and a.data_ptr() == b.data_ptr() and a.numel() > 0


def _load_record(record: Record, saved: dict[str, Any], seed: int) -> None:
    """Codes as they are; fp32 moments by encoding them; nothing by zeros."""
    if not saved:
        for t in (record.ratio, record.v, record.top, record.step):
            t.zero_()
        return
    record.step.copy_(torch.as_tensor(saved["step"]).to(torch.int32).reshape(1))
    if saved["exp_avg"].dtype == torch.uint8:
        record.ratio.copy_(saved["exp_avg"])
        record.v.copy_(saved["exp_avg_sq"])
        record.top.copy_(saved["exp_avg_sq_top"].reshape(record.top.shape))
        record.limit.copy_(torch.as_tensor(saved["ratio_limit"]).reshape(1))
        if record.master.low is not None:
            low = saved.get("master_low")
            if low is None:
                record.master.low.zero_()
            else:
                record.master.low.copy_(low)
        return
    encode_moments(record, saved["exp_avg"].float().to(record.v.device), saved["exp_avg_sq"].float().to(record.v.device), seed)


def _grouped(x: Tensor) -> Tensor:
    """The parameter's shape -> [rows, groups, 128] as kernels see it, with zeros beyond the ends."""
    rows, cols = matrix_shape(x.shape)
    x = torch.nn.functional.pad(x.reshape(-1), (0, rows * cols - x.numel())).view(rows, cols)
    return torch.nn.functional.pad(x, (0, -cols % formats.GROUP)).view(rows, -1, formats.GROUP)


def _ungrouped(x: Tensor, shape: torch.Size) -> Tensor:
    """Inverse of `_grouped`."""
    rows, cols = matrix_shape(shape)
    return x.reshape(rows, -1)[:, :cols].reshape(-1)[: shape.numel()].reshape(shape)


def encode_moments(record: Record, exp_avg: Tensor, exp_avg_sq: Tensor, seed: int) -> None:
    """Store fp32 moments of the parameter's shape as codes, with the stochastic rounding of a step."""
    v = _grouped(exp_avg_sq)
    rows, cols = matrix_shape(exp_avg_sq.shape)
    index = torch.arange(0, rows * cols, max(cols, 1), device=v.device).view(rows, 1, 1) + torch.arange(v[0].numel(), device=v.device).view(v[0].shape)
    random = formats.rounding_bits(seed ^ 0x5EED, record.step[0], record.key, index + record.first)
    code, top = formats.encode_v(v, random)
    root = formats.decode_v(code, top).clamp(min=formats.SMALLEST_NORMAL).sqrt()
    ratio = formats.encode_ratio(_grouped(exp_avg) / root, record.limit, random)
    record.v.copy_(_ungrouped(code, record.param.shape))
    record.top.copy_(top)
    record.ratio.copy_(_ungrouped(ratio, record.param.shape))


def decode_moments(record: Record) -> tuple[Tensor, Tensor]:
    """(exp_avg, exp_avg_sq) in fp32, of the parameter's shape."""
    v = formats.decode_v(_grouped(record.v), record.top)
    m = formats.decode_ratio(_grouped(record.ratio), record.limit) * v.sqrt()
    return _ungrouped(m, record.param.shape), _ungrouped(v, record.param.shape)


def check_parameter(p: Tensor, name: str = "") -> None:
    """ValueError unless the parameter can have low-bit state."""
    if p.dtype not in (torch.float32, torch.bfloat16):
        what = f"parameter {name!r}" if name else f"a parameter of shape {list(p.shape)}"
        raise ValueError(f"{what} is {p.dtype}; O2 takes torch.float32 and torch.bfloat16 (O1 takes any, with any optimizer)")


def check_moments(saved: dict[str, Any], p: Tensor, what: str) -> None:
    """ValueError unless `saved` is nothing, or the state of an Adam or AdamW for this parameter."""
    if not saved:
        return
    if not {"step", "exp_avg", "exp_avg_sq"} <= set(saved):
        raise ValueError(f"{what} has {', '.join(map(repr, saved))}, which is not the state of an Adam or AdamW")
    for name in ("exp_avg", "exp_avg_sq"):
        if saved[name].shape != p.shape:
            raise ValueError(f"{what} has {name} of shape {list(saved[name].shape)}, the model's has {list(p.shape)}")


def check_group(group: dict[str, Any], what: str) -> None:
    """ValueError for settings that have no low-bit counterpart."""
    for flag in ("amsgrad", "differentiable"):
        if group.get(flag):
            raise ValueError(f"{what}({flag}=True) is not available at O2; use O1, which keeps any optimizer as it is")
    lr = group["lr"]
    if not isinstance(lr, Tensor) and lr < 0:
        raise ValueError(f"{what}: lr is {lr}; it must not be negative")


# Which low-bit optimizer steps a parameter. Parameters are held by their optimizer's records, so their ids are not reused meanwhile.
_owners: weakref.WeakValueDictionary[int, LowBitOptimizer] = weakref.WeakValueDictionary()


def _empty_book(device: torch.device) -> ScaleBook:
    """A book without slots, for counting steps where the recipe keeps no history."""
    if device not in _empty_books:
        _empty_books[device] = ScaleBook((), (), device)
    return _empty_books[device]


_empty_books: dict[torch.device, ScaleBook] = {}


def owner_of(p: Tensor) -> LowBitOptimizer | None:
    """The low-bit optimizer that steps this parameter, if there is one."""
    optimizer = _owners.get(id(p))
    if optimizer is None:
        return None
    record = optimizer._low_bit.records.get(id(p))
    return optimizer if record is not None and record.param is p else None

