"""The Plan: what every Linear and every parameter becomes, and why. Made once, without touching anything; printable.

Bytes per parameter are those of training state: parameter, remainder or master, moments, FP8 copies, gradient.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ampplug.config import Config
from ampplug.kernels.triton_runtime import on_gpu
from ampplug.nn import norm
from ampplug.nn.swiglu import Names, find_blocks
from ampplug.nn.te import fed_weights, is_te_module, why_not_fed
from ampplug.nn.te_linear import converted_is_fed, why_not_te

# On a GPU, "auto" leaves a Linear in high precision below these sizes: its casts cost more than its GEMM saves. See docs/levels.md.
SMALLEST_DIMENSION = 512
SMALLEST_WEIGHT = 1024 * 1024
HEAD_NAMES = ("lm_head", "embed_out", "output_projection", "head")


@dataclass(frozen=True)
class LayerPlan:
    """One Linear (or Conv1D)."""

    name: str
    kind: str  # class name
    shape: tuple[int, ...]  # of the weight
    converts: bool
    why: str
    te: bool = False  # a Linear that becomes Transformer Engine's


@dataclass(frozen=True)
class ParameterPlan:
    """One distinct parameter of the model or the optimizer."""

    name: str
    shape: tuple[int, ...]
    before: torch.dtype
    after: torch.dtype
    becomes: str  # "split master", "fp32 master", "as it is"
    why: str
    fp8: bool  # has W8 and W8T
    stepped: bool  # by ampplug's optimizer
    trainable: bool
    grad_dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()

    def bytes_after(self) -> dict[str, float]:
        """Bytes an element, by kind."""
        kinds = {"parameter": float(self.after.itemsize), "gradient": float(self.grad_dtype.itemsize)}
        if self.fp8:
            kinds["FP8 copies"] = 2.0
        if self.stepped:
            kinds["moments"] = 2.0 + 1 / 128
            if self.after == torch.bfloat16:
                kinds["remainder"] = 2.0
        return kinds

    def bytes_before(self) -> float:
        """Bytes an element of mixed-precision training with an fp32 master and fp32 moments (16 for fp32 parameters, 16 for 16-bit ones)."""
        size = self.before.itemsize
        return 2 * size + 8 + (0 if size == 4 else 4)


@dataclass(frozen=True)
class Plan:
    """All decisions. `str(plan)` is a table."""

    config: Config
    layers: tuple[LayerPlan, ...]
    parameters: tuple[ParameterPlan, ...]
    blocks: Mapping[str, Names] = field(default_factory=dict)  # modules that compute SwiGLU, and run as one
    device: str = "cpu"  # the type it was made for
    norms: Mapping[str, norm.NormNames] = field(default_factory=dict)  # RMSNorms, which cast for the FP8 layers that read them

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of the layers that compute in FP8 (at O0: that would at another level)."""
        return tuple(dict.fromkeys(layer.name for layer in self.layers if layer.converts))

    def bytes_per_parameter(self) -> dict[str, float]:
        """Mean bytes an element, by kind, after conversion; "before" and "total" beside them. Of O1, what ampplug knows: no optimizer state."""
        total = max(1, sum(p.numel for p in self.parameters))
        kinds: dict[str, float] = {}
        for p in self.parameters:
            for kind, size in p.bytes_after().items():
                kinds[kind] = kinds.get(kind, 0.0) + size * p.numel / total
        kinds["total"] = sum(kinds.values())
        kinds["before"] = sum(p.bytes_before() * p.numel for p in self.parameters) / total
        return kinds

    def __str__(self) -> str:
        dry = self.config.opt_level == "O0"
        rows: list[tuple[str, ...]] = [("layer", "kind", "weight", "would become" if dry else "becomes", "why")]
        rows += [(x.name or "(root)", x.kind, "x".join(map(str, x.shape)), "FP8" if x.converts else "as it is", x.why) for x in self.layers]
        count = f"{len(self.converted)} of {len(self.layers)} layers {'would be ' if dry else ''}in FP8"
        if self.norms:
            count += f", {len(self.norms)} norms cast for them"
        level = f"level {self.config.opt_level}{' (nothing is changed)' if dry else ''}"
        text = [f"ampplug plan: {level}, recipe {self.config.recipe}, for {self.device.upper()}: {count}"]
        text += _table(rows)
        rows = [("parameter", "shape", "dtype", "becomes", "why", "bytes/element")]
        for p in self.parameters:
            dtype = _short(p.before) + ("" if p.before == p.after else f" -> {_short(p.after)}")
            rows.append((p.name, "x".join(map(str, p.shape)), dtype, p.becomes, p.why, f"{sum(p.bytes_after().values()):.2f}"))
        text += ["", *_table(rows), ""]
        kinds = self.bytes_per_parameter()
        parts = ", ".join(f"{k} {v:.2f}" for k, v in kinds.items() if k not in ("total", "before"))
        text.append(f"bytes per parameter: {kinds['total']:.2f} ({parts}); mixed precision with fp32 AdamW: {kinds['before']:.2f}")
        return "\n".join(text)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype).removeprefix("torch."))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def is_conv1d(module: nn.Module) -> bool:
    """True for Hugging Face's Conv1D, whose weight is [K, N]; recognised without importing transformers."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def plain_modules(model: nn.Module) -> dict[str, Any]:
    """`model.named_modules()` by the names that they have without wrappers: DDP's "module." and torch.compile's "_orig_mod." are left out.

    Scales are saved by these names, so that a checkpoint fits the model wrapped or not.
    """
    names: dict[str, str] = {}
    modules: dict[str, Any] = {}
    for name, module in model.named_modules():
        above, _, last = name.rpartition(".")
        prefix = names.get(above, above)
        inner = name and modules and (last, type(modules.get(prefix)).__name__) in _WRAPPED
        names[name] = prefix if inner else f"{prefix}.{last}" if prefix else last
        modules[names[name]] = module  # what is wrapped in place of its wrapper
    return modules


_WRAPPED = {("module", "DistributedDataParallel"), ("_orig_mod", "OptimizedModule")}


def _users(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """id of a parameter -> (name, module) of the modules that hold it."""
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in plain_modules(model).items():
        for p in module._parameters.values():
            if p is not None:
                users.setdefault(id(p), []).append((name, module))
    return users


def _decide(name: str, module: nn.Module, config: Config, users: dict[int, list[tuple[str, nn.Module]]], gpu: bool) -> tuple[bool, str]:
    """Whether this layer converts, and why. gpu: for a GPU with FP8 units."""
    if type(module) is not nn.Linear and not is_conv1d(module):
        return False, f"a subclass of Linear ({type(module).__module__}.{type(module).__name__}) may not use its own forward"
    weight = module.weight
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.numel() == 0:
        return False, "its weight is not a non-empty matrix"
    if not weight.is_floating_point() or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False, f"its weight is {weight.dtype}"
    select = config.select
    if callable(select):
        return (True, "selected by the predicate") if select(name, module) else (False, "not selected by the predicate")
    if not isinstance(select, str):
        for pattern in select:
            if fnmatch.fnmatchcase(name, pattern):
                return True, f"selected by {pattern!r}"
        return False, "no pattern selects it"
    if select == "all":
        return True, "selected by 'all'"
    if name.rpartition(".")[2] in HEAD_NAMES:
        return False, "an output head: its logits want the precision (select='all' converts it)"
    if any(isinstance(user, nn.Embedding) for _, user in users.get(id(weight), ())):
        return False, "its weight is tied to an embedding (select='all' converts it)"
    if gpu and (min(weight.shape) < SMALLEST_DIMENSION or weight.numel() < SMALLEST_WEIGHT):
        return False, f"too small to gain: below {SMALLEST_DIMENSION} in a dimension or {SMALLEST_WEIGHT} elements (select='all' converts it)"
    return True, "large enough for FP8 to pay" if gpu else "eligible"


def _decide_te(module: nn.Module, config: Config) -> tuple[bool, str]:
    """Whether a Transformer Engine module takes its FP8 weights from ampplug, and why."""
    why = why_not_fed(module)
    if config.backend != "te":
        return False, "Transformer Engine's own, in the user's autocast; " + (why or "casts its weights itself (backend='te' feeds them)")
    return not why, why or "Transformer Engine's own, in the user's autocast; takes its FP8 weights from each step"


def _decide_backend(layer: LayerPlan, module: nn.Module, own: str | None) -> LayerPlan:
    """Of a Linear that converts with backend='te': whether it becomes Transformer Engine's. own: a module of it that the user built, whose autocast is his."""
    if own is not None:
        return replace(layer, why=f"{layer.why}; native, since the model has Transformer Engine's own modules ({own!r}) and so an autocast of its own")
    why_not = why_not_te(module)
    if why_not:
        return replace(layer, why=f"{layer.why}; native: {why_not}")
    return replace(layer, why=f"{layer.why}; computed by Transformer Engine{'' if converted_is_fed() else ', which casts the weight itself'}", te=True)


def _check_patterns(select: object, names: list[str]) -> None:
    """ValueError for a pattern that matches no layer: left alone, a typo would train unconverted."""
    if not names or callable(select) or isinstance(select, str):
        return
    for pattern in select:  # type: ignore[attr-defined]
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, 3, 0.3) or names[:3]
            raise ValueError(f"select: pattern {pattern!r} matches none of the model's {len(names)} layers, such as {', '.join(map(repr, near))}")


def make_plan(model: nn.Module, optimizer_parameters: Iterable[Tensor] | None, config: Config, device: torch.device | None = None) -> Plan:
    """Decide everything. optimizer_parameters: those that ampplug's optimizer will step (O2), else None. Nothing is changed.

    device: where the model will train; None: where its parameters are.

    Raises:
        ValueError: a pattern of `config.select` matches no layer.
    """
    users = _users(model)
    where = next((p.device for p in model.parameters()), torch.device("cpu")) if device is None else device
    elsewhere = device is not None and device.type == "cuda" and not torch.cuda.is_available()
    gpu = elsewhere or on_gpu(where)
    layers: list[LayerPlan] = []
    fp8_layers: set[int] = set()
    te_layers: set[int] = set()
    fed: set[int] = set()  # weights of Transformer Engine modules
    modules = plain_modules(model)
    own_te = next((n for n, m in modules.items() if is_te_module(m) and not isinstance(m, nn.Linear)), None)
    for name, module in modules.items():
        if isinstance(module, nn.Linear) or is_conv1d(module):
            converts, why = _decide(name, module, config, users, gpu)
            layer = LayerPlan(name, type(module).__name__, tuple(module.weight.shape), converts, why)
            if converts and config.backend == "te":
                layer = _decide_backend(layer, module, own_te)
            if converts and config.opt_level != "O0" and (not layer.te or converted_is_fed()):
                fp8_layers.add(id(module))
            if layer.te and config.opt_level != "O0":
                te_layers.add(id(module))
            layers.append(layer)
        elif is_te_module(module):
            feeds, why = _decide_te(module, config)
            if feeds and config.opt_level != "O0":
                fed.update(id(p) for _, p in fed_weights(module))
            for p in module._parameters.values():
                if p is not None and p.dim() > 1:
                    layers.append(LayerPlan(name, f"te.{type(module).__name__}", tuple(p.shape), feeds, why))
    _check_patterns(config.select, [layer.name for layer in layers if not layer.kind.startswith("te.")])
    blocks, norms = {}, {}
    if config.fuse and fp8_layers - te_layers:
        real, own_name = dict(model.named_modules()), {id(module): name for name, module in modules.items()}
        blocks = {own_name[id(real[name])]: children for name, children in find_blocks(model, fp8_layers - te_layers).items()}
        if norm.by_kernel or not gpu:
            norms = {own_name[id(real[name])]: names for name, names in norm.find_norms(model).items()}
    fused = {f"{block}.{child}" if block else child for block, names in blocks.items() for child in names[:3]}
    layers = [replace(layer, why=f"{layer.why}; one with SwiGLU") if layer.name in fused else layer for layer in layers]
    stepped = {id(p) for p in optimizer_parameters or ()}
    named: dict[int, tuple[str, Tensor]] = {}
    for name, module in modules.items():
        for own, p in module._parameters.items():
            if p is not None:
                named.setdefault(id(p), (f"{name}.{own}" if name else own, p))
    everything = [named[id(p)] for p in model.parameters()]
    everything += [("(not in the model)", p) for p in optimizer_parameters or () if id(p) not in named]
    parameters = []
    for name, p in everything:
        holders = users.get(id(p), [])
        fp8 = any(id(m) in fp8_layers and m._parameters.get("weight") is p for _, m in holders)
        others = [n or "(root)" for n, m in holders if not (id(m) in fp8_layers and m._parameters.get("weight") is p)]
        fp8 = fp8 or id(p) in fed
        # Transformer Engine wants weight and bias of one dtype
        biased = bool(holders) and all(id(m) in te_layers and id(m) in fp8_layers and m._parameters.get("bias") is p for _, m in holders)
        after, becomes, why = p.dtype, "as it is", "no FP8 layer uses it" if not fp8 else "the layer's own; W8 is refreshed after each step"
        # a frozen parameter in the optimizer is not touched; if it is unfrozen later, it is its own fp32 master
        is_stepped = id(p) in stepped and config.opt_level == "O2" and (p.requires_grad or p.grad is not None)
        if is_stepped and p.dtype in (torch.float32, torch.bfloat16):
            if p.dtype == torch.bfloat16:
                becomes, why = "split master", "bf16 plus a 16-bit remainder"
            elif fp8 and not others:
                after, becomes, why = torch.bfloat16, "split master", "only FP8 layers read it"
            elif biased:
                after, becomes, why = torch.bfloat16, "split master", "Transformer Engine wants it of its weight's dtype"
            else:
                becomes, why = "fp32 master", "its own master" + (f"; also read by {others[0]}" if fp8 else "")
        elif config.opt_level == "O2" and not is_stepped:
            why = "not in the optimizer" if p.requires_grad else "frozen or not in the optimizer"
        wide = config.grad_dtype == "fp32" and config.opt_level != "O0" and after in (torch.bfloat16, torch.float16)
        grad_dtype = torch.float32 if wide else after
        parameters.append(ParameterPlan(name, tuple(p.shape), p.dtype, after, becomes, why, fp8, is_stepped, p.requires_grad, grad_dtype))
    return Plan(config, tuple(layers), tuple(parameters), blocks, "cpu" if where.type == "meta" else where.type, norms)
