"""Training one phase ("bf16", "o0", "o1" or "o2"): resumable at any step, to the bit."""

from __future__ import annotations

import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampplug
from ampplug.auditing import bytes_per_parameter
from ampplug.demo import DemoError, data
from ampplug.demo.model import build
from ampplug.demo.progress import Progress
from ampplug.demo.settings import Settings, make_settings


class Interrupted(Exception):
    """Ctrl-C between two steps, after the checkpoint was written."""


class Phase:
    """One training run: model, optimizer, schedule, and the curves so far."""

    def __init__(self, settings: Settings, mode: str):
        self.settings, self.mode = settings, mode
        self.device = torch.device(settings.device)
        s = settings
        with torch.random.fork_rng(devices=[]):  # made on the CPU: the same start on every device and in every mode
            torch.manual_seed(s.seed)
            self.model: nn.Module = build(s.shape).to(self.device)
        options: dict[str, Any] = dict(lr=s.learning_rate, betas=(0.9, 0.95), weight_decay=s.weight_decay, fused=self.device.type == "cuda")
        if self.device.type == "cuda" and s.way in ("graph", "both") and mode != "o2":  # what torch's own optimizers need in a graph
            options.update(capturable=True, lr=torch.tensor(s.learning_rate, device=self.device))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), **options)
        if mode != "bf16":
            self._convert()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _Schedule(s.warmup, s.steps))
        self._step: Callable[[Tensor, Tensor], Tensor] | None = None
        self.step = 0
        self.losses: list[float] = []
        self.held_out: list[tuple[int, float]] = []  # (steps done, loss)
        self.times: list[float] = []  # seconds a step, one for each fetch of losses
        self.bytes: dict[str, float] = {}
        self._since = 0.0  # when the steps under way began
        self._saved_at = 0

    def _convert(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                ampplug.initialize(self.model, self.optimizer, config=_config(self.settings, self.mode))
            except ValueError as error:
                raise DemoError(str(error)) from error
        for warning in caught:
            print(f"note: {warning.message}", file=sys.stderr)

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs: tensors and plain values only, so that `weights_only` loading takes it."""
        return {
            "mode": self.mode,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "losses": list(self.losses),
            "held_out": [list(pair) for pair in self.held_out],
            "times": list(self.times),
            "bytes": dict(self.bytes),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        # the model first: at O2 the optimizer holds the other half of the weights, and the halves belong together
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)
        self.step = self._saved_at = state["step"]
        self.losses, self.times = list(state["losses"]), list(state["times"])
        self.held_out = [(step, loss) for step, loss in state["held_out"]]
        self.bytes = dict(state["bytes"])

    def run(
        self,
        corpus: data.Corpus,
        *,
        progress: Progress | None = None,
        checkpoint: Callable[[dict[str, Any]], None] | None = None,
        every: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Train from the present step to the end, and return the result.

        checkpoint: called with `state` every `every` steps, and when `stop` says so; then Interrupted is raised.
        """
        s, device = self.settings, self.device
        corpus.require(s.shape.sequence)
        text = corpus.train.to(device)
        starts = data.offsets(s.seed, range(s.steps), s.batch, text.numel(), s.shape.sequence).to(device)  # at once: no upload in a step
        fetch_every = 50 if device.type == "cuda" else 1  # to read a loss is to wait for the GPU
        waiting: list[Tensor] = []
        self.model.train()
        self._mark()
        while True:
            last = self.step == s.steps
            measure = self.step in self._to_evaluate()
            save = checkpoint is not None and every > 0 and self.step % every == 0 and self.step != self._saved_at and not last
            stopping = stop()
            if waiting and (len(waiting) >= fetch_every or last or measure or save or stopping):
                new = torch.stack(waiting).tolist()
                waiting.clear()
                self.times.append((time.perf_counter() - self._since) / len(new))
                self.losses += new
                if progress is not None:
                    progress.update(self.step, self.losses[-1], s.tokens / self.times[-1])
                self._mark()
                stopping = stopping or stop()
            if (stopping or save) and checkpoint is not None:
                checkpoint(self.state())
                self._saved_at = self.step
                if stopping:
                    raise Interrupted
                self._mark()
            if measure:
                self.held_out.append((self.step, evaluate(self.model, corpus.held_out, s.shape.sequence, s.batch, s.eval_bytes, device)))
                self._mark()
                if stop():
                    continue  # to the checkpoint
            if last:
                break
            waiting.append(self._train_step(*data.windows(text, starts[self.step], s.shape.sequence)))
            self.step += 1
            if not self.bytes:
                self.bytes = bytes_per_parameter(self.model, [self.optimizer])
        return self._result()

    def _mark(self) -> None:
        """Time runs from here: evaluation and checkpoints are not steps."""
        self._since = time.perf_counter()

    def _to_evaluate(self) -> set[int]:
        return self.settings.evaluation_steps() - {step for step, _ in self.held_out}

    def way(self, way: str) -> Callable[[Tensor, Tensor], Tensor]:
        """The training step, to be run eagerly, captured in a CUDA graph ("graph"), compiled, or both."""
        forward = torch.compile(self.model) if way in ("compile", "both") else self.model

        def step(x: Tensor, y: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(forward(x).flatten(0, 1), y.flatten())
            loss.backward()
            clip = torch.nn.utils.clip_grad_norm_ if self.mode == "bf16" else ampplug.clip_grad_norm_
            clip(self.model.parameters(), self.settings.clip)
            self.optimizer.step()
            return loss.detach()

        return ampplug.capture(step, self.model, self.optimizer) if way in ("graph", "both") else step

    def _train_step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step on x, y int64 [batch, sequence] -> its loss, fp32 [], still on the device. Gradients stay until the next step."""
        if self._step is None:
            self._step = self.way(self.settings.way)
        loss = self._step(x, y)
        self.scheduler.step()
        return loss

    def _result(self) -> dict[str, Any]:
        steady = self.times[len(self.times) // 5 :]  # without what the first steps compile
        seconds = statistics.median(steady)
        tail = self.losses[-20:]
        return {
            "mode": self.mode,
            "train_loss": sum(tail) / len(tail),
            "held_out_loss": self.held_out[-1][1],
            "step_seconds": seconds,
            "tokens_per_second": self.settings.tokens / seconds,
            "bytes_per_parameter": self.bytes,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "curve": self.losses,
            "held_out_curve": [list(pair) for pair in self.held_out],
        }


def _config(settings: Settings, mode: str) -> dict[str, Any]:
    """What `ampplug.initialize` is given at "o0", "o1" or "o2"."""
    s = settings
    return {"opt_level": mode.upper(), "recipe": s.recipe, "select": s.select if s.select in ("auto", "all") else s.select.split(","), "seed": s.seed}


def check_config(settings: Settings, mode: str) -> None:
    """DemoError for whatever `ampplug.initialize` would refuse in this mode. Takes no memory: the model is made on the meta device."""
    if mode == "bf16":
        return
    with torch.device("meta"):
        model = build(settings.shape)
    try:
        ampplug.plan(model, config=_config(settings, mode))
    except (TypeError, ValueError) as error:
        raise DemoError(str(error)) from error


class _Schedule:
    """Linear warm-up, then a cosine down to a tenth."""

    def __init__(self, warmup: int, steps: int):
        self.warmup, self.steps = warmup, steps

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, sequence: int, batch: int, limit: int, device: torch.device) -> float:
    """Mean loss, nats a byte, on about `limit` bytes of text (uint8), in windows that do not overlap. The model is left in training mode."""
    model.eval()
    text = text.to(device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    starts = data.evaluation_starts(text.numel(), sequence, limit).to(device)
    for chunk in starts.split(batch):
        x, y = data.windows(text, chunk, sequence)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(x)
        total += F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum")
    model.train()
    return total.item() / (starts.numel() * sequence)


def audit_parts(preset: str, opt_level: str, way: str) -> tuple[Callable[..., Tensor], nn.Module, Any, Tensor, Tensor]:
    """(step, model, optimizer, x, y) of a preset, for `ampplug audit`. way: "eager", "graph", "compile" or "both"."""
    phase = Phase(make_settings(preset, way=way), "bf16" if opt_level == "O0" else opt_level.lower())
    s = phase.settings
    x, y = torch.randint(0, 256, (2, s.batch, s.shape.sequence), device=phase.device).unbind()
    return phase.way(way), phase.model, phase.optimizer, x, y
