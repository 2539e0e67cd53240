"""`audit`: why a training step takes as long as it does. Launches, waits for the GPU with the lines that cause them, host and GPU time, bytes.

The step is run a few times and trains the model like any other step.
"""

from __future__ import annotations

import linecache
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampplug.kernels.triton_runtime import launches, on_gpu
from ampplug.planning import SMALLEST_DIMENSION, SMALLEST_WEIGHT
from ampplug.storage import held_weights

# ampplug's kernels by what they are for; what else runs on the GPU is "other"
_KINDS = {
    "partial_amax_kernel": "casts",
    "cast_kernel": "casts",
    "adam_step_kernel": "optimizer",
    "transpose_kernel": "optimizer",
    "norm_kernel": "clip",
    "scale_update_kernel": "scales",
    "weight_amax_kernel": "weight refresh",
    "weight_cast_kernel": "weight refresh",
}
IDLE = 0.25  # a larger share of the time without work on the GPU is worth a word


@dataclass(frozen=True)
class Audit:
    """What `audit` found. `str()` is a report. Times are milliseconds a step; GPU figures are None without a GPU."""

    device: str
    layers: int  # FP8 layers
    small_layers: int  # of them, those too small to gain on a GPU
    wall_ms: float
    host_ms: float  # until the step's calls have returned
    gpu_ms: float | None  # during which the GPU did something
    launches: dict[str, float] | None  # kernels, copies and fills a step by kind, and "total"
    own_launches: float  # of ampplug's kernels, by its own count; 0 in a replayed graph, where the host launches nothing
    launches_per_layer: float | None  # FP8 casts and GEMMs of a layer's forward and backward; None where GEMMs are not visible (a replayed graph)
    syncs: tuple[tuple[str, int, str, int], ...]  # (file, line, source, times a step) that wait for the GPU
    bytes_per_parameter: dict[str, float]  # by kind, and "total"
    parameters: int
    peak_bytes: int | None  # largest memory of tensors during a step

    @property
    def idle(self) -> float | None:
        """Share of the step in which the GPU does nothing."""
        return None if self.gpu_ms is None else max(0.0, 1.0 - self.gpu_ms / self.wall_ms)

    @property
    def verdict(self) -> tuple[str, ...]:
        """What to do about it, the most worthwhile first."""
        found = []
        if self.gpu_ms is None:
            found.append(f"no GPU with FP8 units ({self.device}): FP8 is emulated, and times say nothing. ampplug.check_fp8_support() says what is needed.")
        if not self.layers:
            found.append("no layer computes in FP8: print(ampplug.plan(model)) says why.")
        for file, line, source, times in self.syncs:
            found.append(f"the host waits for the GPU {times} time{'s' if times > 1 else ''} a step at {file}:{line}: `{source}`. Read values less often.")
        if self.idle is not None and self.idle > IDLE:
            if self.host_ms > 0.8 * self.wall_ms and self.launches is not None and self.launches["total"] > 20:
                found.append(
                    f"host-bound: the GPU idles {100 * self.idle:.0f} % of the time while the host makes {self.launches['total']:.0f} launches a step. "
                    "ampplug.capture(step, model, optimizer) makes the step one launch; torch.compile makes fewer kernels; more tokens a step hide it."
                )
            else:
                found.append(f"the GPU idles {100 * self.idle:.0f} % of the time, and not for launches: look at data loading and other waiting.")
        if self.small_layers and self.gpu_ms is not None:
            found.append(
                f"{self.small_layers} of {self.layers} FP8 layers are small (below {SMALLEST_DIMENSION} in a dimension or {SMALLEST_WEIGHT} elements): "
                "their casts cost more than their GEMMs save; select='auto' leaves them out."
            )
        return tuple(found) or ("GPU-bound: the GPU is busy, and nothing on the host holds it up.",)

    def __str__(self) -> str:
        text = [f"ampplug audit: {self.device}, {self.layers} FP8 layers, {self.parameters} parameters"]
        gpu = "" if self.idle is None else f"; GPU busy {self.gpu_ms:.2f} ms, idle {100 * self.idle:.0f} %"
        text.append(f"time a step: {self.wall_ms:.2f} ms; host {self.host_ms:.2f} ms{gpu}")
        if self.launches is not None:
            parts = ", ".join(f"{kind} {n:g}" for kind, n in self.launches.items() if kind != "total")
            text.append(f"launches a step: {self.launches['total']:g} ({parts}); by ampplug's own count {self.own_launches:g}")
        if self.launches_per_layer is not None:
            text.append(f"launches of an FP8 layer, forward and backward: {self.launches_per_layer:.2f}")
        text.append(f"waits for the GPU: {sum(times for *_, times in self.syncs)} a step")
        parts = ", ".join(f"{kind} {n:.2f}" for kind, n in self.bytes_per_parameter.items() if kind != "total")
        text.append(f"bytes a parameter: {self.bytes_per_parameter['total']:.2f} ({parts})")
        if self.peak_bytes is not None:
            rest = self.peak_bytes - self.bytes_per_parameter["total"] * self.parameters
            text.append(f"peak memory: {self.peak_bytes / 2**30:.2f} GiB, of it activations, batches and temporaries {max(0.0, rest) / 2**30:.2f} GiB")
        return "\n".join([*text, "", *(f"- {line}" for line in self.verdict)])


def audit(step: Callable[..., Any], *batch: Any, model: nn.Module, optimizer: Any = None, steps: int = 5, warm_up: int = 4) -> Audit:
    """Run `step(*batch)` and report where its time and memory go.

    Args:
        step: a function that does a whole training step, captured or not; it is called `warm_up + 2 * steps + 1` times, and trains.
        batch: its arguments.
        model, optimizer: what it trains (the optimizer, or a list of them), for the accounting of memory.
        steps: steps that are measured, at least 1. warm_up: steps before that: compilation, capture, first scales.
    """
    if not callable(step):
        raise TypeError(f"step is a {type(step).__name__}; it must be a function of a batch that does one training step")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    for name, value, least in (("steps", steps, 1), ("warm_up", warm_up, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for o in optimizers:
        if not isinstance(o, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(o).__name__}; it must be a torch.optim.Optimizer, a list of them, or None")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    gpu = device.type == "cuda"
    for _ in range(warm_up):
        step(*batch)
    syncs = _find_syncs(step, batch) if gpu else ()
    _wait(device)
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    wall, host = [], []
    before = Counter(launches)
    for _ in range(steps):
        began = time.perf_counter()
        step(*batch)
        issued = time.perf_counter()
        _wait(device)
        wall.append(1e3 * (time.perf_counter() - began))
        host.append(1e3 * (issued - began))
    own = sum((launches - before).values()) / steps
    peak = torch.cuda.max_memory_allocated(device) if gpu else None
    gpu_ms, counts, per_layer = _profile(step, batch, steps, device) if gpu else (None, None, None)
    converted = [m for m in model.modules() if "_ampplug" in vars(m)]  # a layer's own: a compiled one's wrapper shows it, too
    weights: list[Any] = [w.param for m in converted for w in held_weights(m._ampplug)]
    return Audit(
        device=torch.cuda.get_device_name(device) if gpu else str(device),
        layers=len(converted),
        small_layers=sum(min(w.shape) < SMALLEST_DIMENSION or w.numel() < SMALLEST_WEIGHT for w in weights),
        wall_ms=statistics.median(wall),
        host_ms=statistics.median(host),
        gpu_ms=gpu_ms if gpu and on_gpu(device) else None,
        launches=counts,
        own_launches=own,
        launches_per_layer=None if per_layer is None or not converted else per_layer / len(converted),
        syncs=syncs,
        bytes_per_parameter=bytes_per_parameter(model, optimizers),
        parameters=sum(p.numel() for p in model.parameters()),
        peak_bytes=peak,
    )


def bytes_per_parameter(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, float]:
    """Bytes held for each parameter, by kind, from the allocations behind the tensors; each allocation once. "total" is the sum."""
    parameters = list(model.parameters())
    kinds: dict[str, list[Tensor]] = {
        "parameters": list(parameters),
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer state": [t for o in optimizers for state in o.state.values() for t in state.values() if isinstance(t, Tensor)],
        "FP8 copies": [],
    }
    for module in model.modules():
        converted = getattr(module, "_ampplug", None)
        if converted is not None:
            for weight in converted.bank.weights:
                kinds["FP8 copies"] += [weight.w8, weight.w8t, weight.scale]
    seen: set[int] = set()
    count = max(1, sum(p.numel() for p in parameters))
    result = {}
    for kind, tensors in kinds.items():
        size = 0
        for t in tensors:
            storage = t.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                size += storage.nbytes()
        result[kind] = size / count
    result["total"] = sum(result.values())
    return result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _find_syncs(step: Callable[..., Any], batch: tuple) -> tuple[tuple[str, int, str, int], ...]:
    """The lines of Python at which one step waits for the GPU, as torch's own check reports them."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step(*batch)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    lines = Counter((w.filename, w.lineno) for w in caught if "called a synchronizing" in str(w.message))
    return tuple((file, line, linecache.getline(file, line).strip(), times) for (file, line), times in lines.most_common())


def _profile(step: Callable[..., Any], batch: tuple, steps: int, device: torch.device) -> tuple[float, dict[str, float], float | None]:
    """(milliseconds a step in which the GPU works, launches a step by kind, casts and FP8 GEMMs a step if they can be seen)."""
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's remarks about itself
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            for _ in range(steps):
                step(*batch)
            _wait(device)
        events = recorded.events()
    spans, kinds, gemms = [], Counter({"casts": 0, "optimizer": 0, "scales": 0}), 0
    for e in events or ():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            if e.name.startswith(("Optimizer.", "ProfilerStep")):  # annotations, not work
                continue
            spans.append((e.time_range.start, e.time_range.end))
            kinds[_KINDS.get(e.name, "other")] += 1
        elif e.name == "aten::_scaled_mm":
            gemms += 1
    busy, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    counts = {kind: n / steps for kind, n in kinds.items()}
    counts["total"] = len(spans) / steps
    return busy / 1e3 / steps, counts, (kinds["casts"] + gemms) / steps if gemms else None
