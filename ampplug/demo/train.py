"""Training one phase ("bf16", "o0", "o1" or "o2") and the demo made of two: resumable at any step, to the bit."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import shlex
import shutil
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampplug
from ampplug.auditing import bytes_per_parameter
from ampplug.demo import DemoError, data, report
from ampplug.demo.model import SHAPES, Shape, build

WAYS = ("eager", "graph", "compile", "both")
MODES = ("bf16", "o0", "o1", "o2")


@dataclass(frozen=True)
class Settings:
    """Everything that the numbers of a run depend on, beside the text."""

    preset: str
    shape: Shape
    batch: int  # sequences a step
    steps: int
    learning_rate: float
    warmup: int  # steps
    eval_bytes: int  # of held-out text
    evaluations: int  # evenly spread, the last at the end
    device: str
    seed: int = 0
    recipe: str = "delayed"
    select: str = "auto"  # "auto", "all", or patterns with commas between
    weight_decay: float = 0.1
    clip: float = 1.0
    way: str = "eager"  # how a step runs: eager, graph, compile or both

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.shape.sequence

    def evaluation_steps(self) -> set[int]:
        """After how many steps the held-out loss is measured."""
        return {self.steps * (i + 1) // self.evaluations for i in range(self.evaluations)} - {0}

    def flat(self) -> dict[str, Any]:
        """Name -> value, sizes included."""
        fields = asdict(self)
        return {**fields.pop("shape"), **fields}


# The GPU presets leave the choice of layers to ampplug; small ones would get none on a GPU, where FP8 does not pay at such sizes.
_PRESETS: dict[str, dict[str, Any]] = {
    "small": dict(batch=8, steps=250, learning_rate=3e-3, warmup=25, eval_bytes=64 * 1024, evaluations=2, select="blocks.*"),
    "124m": dict(batch=16, steps=2000, learning_rate=6e-4, warmup=100, eval_bytes=1 << 20, evaluations=4, select="auto"),
    "1b": dict(batch=8, steps=1000, learning_rate=3e-4, warmup=100, eval_bytes=1 << 20, evaluations=4, select="auto"),
}
_NEEDS_CUDA = ("124m", "1b")


def make_settings(preset: str, device: str | None = None, **given: Any) -> Settings:
    """A preset with some values replaced; None leaves a value as it is. DemoError names what cannot be."""
    if preset not in SHAPES:
        near = difflib.get_close_matches(preset, SHAPES, n=1, cutoff=0.1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DemoError(f"preset {preset!r} is none of {', '.join(map(repr, SHAPES))}{hint}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise DemoError(f"device {device!r} is none that torch knows; legal are 'cpu' and 'cuda'") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise DemoError(f"device {device!r}: torch {torch.__version__} finds no CUDA device here")
    if kind not in ("cpu", "cuda"):
        raise DemoError(f"device {device!r}: legal are 'cpu' and 'cuda'")
    changed = {k: v for k, v in given.items() if v is not None}
    sizes = {k: changed.pop(k) for k in list(changed) if k in Shape.__dataclass_fields__}
    if kind != "cuda" and preset in _NEEDS_CUDA and not sizes:
        raise DemoError(f"preset {preset!r} needs a CUDA device, and the device is {device!r}; --preset small runs on a CPU")
    values = {**_PRESETS[preset], **changed}
    if "steps" in changed:  # a short run has a short warm-up
        values["warmup"] = min(values["warmup"], max(1, values["steps"] // 10))
    shape = Shape(**{**asdict(SHAPES[preset]), **sizes})
    settings = Settings(preset=preset, shape=shape, device=device, **values)
    for name in ("steps", "batch", "eval_bytes", "evaluations", *Shape.__dataclass_fields__):
        if settings.flat()[name] < 1:
            raise DemoError(f"{name.replace('_', '-')} is {settings.flat()[name]}; it must be at least 1")
    if settings.way not in WAYS:
        raise DemoError(f"way {settings.way!r} is none of {', '.join(map(repr, WAYS))}")
    if shape.width % (2 * shape.heads):
        raise DemoError(f"width is {shape.width}; it must be a multiple of twice the {shape.heads} heads")
    return settings


class Interrupted(Exception):
    """Ctrl-C between two steps, after the checkpoint was written."""


# ---------------------------------------------------------------- one phase


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
        s = self.settings
        select = s.select if s.select in ("auto", "all") else s.select.split(",")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                ampplug.initialize(self.model, self.optimizer, self.mode.upper(), recipe=s.recipe, select=select, seed=s.seed)
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


# ---------------------------------------------------------------- progress and interrupts


class Progress:
    """A tqdm bar where tqdm is installed and the output is a terminal, else a line now and then."""

    def __init__(self, title: str, done: int, total: int):
        self.title, self.total, self._printed = title, total, -math.inf
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            size = shutil.get_terminal_size()  # tqdm shows nothing on terminals that do not know their size
            self._bar = tqdm(total=total, initial=done, desc=title, unit="step", ncols=size.columns, nrows=size.lines)

    def update(self, step: int, loss: float, rate: float) -> None:
        """After `step` steps: the last loss, and tokens a second."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}, {_count(rate)} tokens/s", refresh=False)
            self._bar.update(step - self._bar.n)
        elif step - self._printed >= self.total / 20 or step == self.total:
            self._printed = step
            print(f"{self.title}: step {step}/{self.total}, loss {loss:.3f}, {_count(rate)} tokens/s", flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def _count(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e4 else f"{value:.0f}"


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only makes the yielded function true, so that no step is cut in half; the second interrupts as usual."""
    asked = False

    def handle(*_: Any) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():  # no signals there
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _threads(settings: Settings) -> Iterator[None]:
    """One thread for the small preset on a CPU, unless OMP_NUM_THREADS is set.

    Emulated FP8 is thousands of short parallel regions a step, and at the end of each the threads spin until the last arrives. Beside two busy
    processes on two cores a step took 16 s with two threads and 0.64 s with one; alone 0.28 s and 0.34 s.
    """
    before = torch.get_num_threads()
    if settings.device == "cpu" and settings.shape == SHAPES["small"] and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def audit_parts(preset: str, opt_level: str, way: str) -> tuple[Callable[..., Tensor], nn.Module, Any, Tensor, Tensor]:
    """(step, model, optimizer, x, y) of a preset, for `ampplug audit`. way: "eager", "graph", "compile" or "both"."""
    phase = Phase(make_settings(preset, way=way), "bf16" if opt_level == "O0" else opt_level.lower())
    s = phase.settings
    x, y = torch.randint(0, 256, (2, s.batch, s.shape.sequence), device=phase.device).unbind()
    return phase.way(way), phase.model, phase.optimizer, x, y


# ---------------------------------------------------------------- the demo


def demo(arguments: argparse.Namespace) -> int:
    """`ampplug demo`: both phases, the table and the files. Exit code."""
    mode = arguments.opt_level.lower()
    if mode not in MODES[1:]:
        raise DemoError(f"opt-level {arguments.opt_level!r} is none of 'O0', 'O1', 'O2'")
    names = ("batch", "steps", "seed", "recipe", "way", "width", "layers", "heads", "ffn", "sequence", "eval_bytes")
    given = {name: getattr(arguments, name) for name in names}
    if arguments.select != "auto":
        given["select"] = arguments.select
    settings = make_settings(arguments.preset, arguments.device, **given)
    try:
        # the seed too: initialize would refuse it only after the whole BF16 run
        ampplug.Config.from_dict({"opt_level": mode.upper(), "recipe": settings.recipe, "seed": settings.seed})
    except (TypeError, ValueError) as error:
        raise DemoError(str(error)) from error
    every = max(1, settings.steps // 4) if arguments.checkpoint_every is None else arguments.checkpoint_every
    if every < 0:
        raise DemoError(f"checkpoint-every is {every}; it must be at least 1, or 0 for none on the way")
    out = Path(arguments.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"cannot write to {arguments.out!r}: {error.strerror}") from error
    saved = load_checkpoint(out) if arguments.resume else None
    corpus = data.load(arguments.data)
    corpus.require(settings.shape.sequence)
    identity = {**settings.flat(), "opt_level": mode.upper(), "data": f"{corpus.name} ({corpus.fingerprint[:16]})"}
    finished: dict[str, Any] = {}
    current: dict[str, Any] | None = None
    if saved is not None:
        _same(saved["settings"], identity)
        if saved["torch"] != torch.__version__:
            print(f"note: the checkpoint is of torch {saved['torch']}, this is {torch.__version__}; the losses may differ in their last bits", file=sys.stderr)
        finished, current = saved["finished"], saved["phase"]
    elif (out / "checkpoint.pt").exists():
        print(f"note: starting anew; {out / 'checkpoint.pt'} will be replaced (--resume would go on from it)", file=sys.stderr)
    print(
        f"{settings.preset}: {settings.shape.layers} layers of width {settings.shape.width}, {settings.steps} steps of {settings.tokens} tokens on "
        f"{settings.device}; {corpus.train.numel() / 1e6:.1f} MB of {corpus.name} to learn, {corpus.held_out.numel() / 1e6:.1f} MB held out",
        flush=True,
    )

    def save(phase: dict[str, Any] | None) -> None:
        save_checkpoint(out, {"format": 1, "torch": str(torch.__version__), "settings": identity, "finished": finished, "phase": phase})

    try:
        with _ctrl_c() as stop, _threads(settings):
            for name, phase_mode in (("bf16", "bf16"), ("ampplug", mode)):
                if name in finished:
                    continue
                phase = Phase(settings, phase_mode)
                if current is not None:
                    phase.load(current)
                    current = None
                progress = Progress("BF16 AdamW" if name == "bf16" else f"ampplug {mode.upper()}", phase.step, settings.steps)
                try:
                    finished[name] = phase.run(corpus, progress=progress, checkpoint=save, every=every, stop=stop)
                finally:
                    progress.close()
                save(None)
    except Interrupted:
        print(f"\ninterrupted; the checkpoint is {out / 'checkpoint.pt'}. To go on:\n  {_command(arguments)} --resume", file=sys.stderr)
        return 130
    with _threads(settings):  # the report names them
        report.finish(out, identity, finished, _command(arguments))
    return 0


def save_checkpoint(out: Path, content: dict[str, Any]) -> None:
    """Write `checkpoint.pt` whole or not at all: an older one survives anything that happens meanwhile."""
    temporary = out / f"checkpoint.pt.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(out / "checkpoint.pt")
    except OSError as error:
        raise DemoError(f"cannot write the checkpoint to {str(out)!r}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(out: Path) -> dict[str, Any]:
    """The checkpoint of a folder, on the CPU."""
    path = out / "checkpoint.pt"
    if not path.exists():
        raise DemoError(f"nothing to resume: {str(path)!r} does not exist")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a dozen kinds for a damaged file
        raise DemoError(f"cannot read the checkpoint {str(path)!r}: {(str(error) or type(error).__name__).splitlines()[0]}") from error
    if not isinstance(content, dict) or content.get("format") != 1:
        raise DemoError(f"{str(path)!r} is no checkpoint of this demo")
    return content


def _same(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """DemoError naming every setting that differs."""
    differing = [f"{k} was {saved.get(k)!r} and is now {now.get(k)!r}" for k in {**saved, **now} if saved.get(k) != now.get(k)]
    if differing:
        raise DemoError(f"cannot resume with other settings: {'; '.join(differing)}")


def _command(arguments: argparse.Namespace) -> str:
    """The command line that these arguments came from, without --resume."""
    from ampplug.demo import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["ampplug", "demo"]
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(arguments, name)
        if name != "resume" and value != default:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
