"""A whole training step of a 1.1 B Llama: BF16 against ampplug and against other libraries' FP8.

    python3 benchmarks/train_step.py [--micro-batch 1|8|1,8] [--modes bf16,o1,o2,te,torchao] [--ways eager,graph,compile,both] [--out DIR]
    python3 benchmarks/train_step.py --summary [--out DIR]

BF16, O1 and O2 run in one process, in interleaved rounds: every row once, then every row again. Each other library runs after them, alone with BF16,
which is measured again beside it. Calls for one micro-batch or a few modes each may be made one after the other: each writes a file of its own, and
--summary makes one table and one plot of all files in DIR. A mode is compiled once a call, in some 40 seconds.

A row's time is the median over rounds of the wall time of a step (a few steps, then one wait for the GPU), its host time what the same calls took before
that wait (with many steps queued, the host also waits for room in the queue), its GPU time that in which the GPU worked, by torch's profiler. All rows
have the same model code, attention, loss, tokens and order of batches; BF16 has bf16 parameters and torch's fused AdamW with bf16 states. Each row first
trains --learn steps from the same initial weights, and each round begins at those weights, so that nobody multiplies the zeros of a finished training.

A row counts only if it learns as BF16 does: the gradients of its first step have a cosine of at least 0.98 with eager BF16's, weight by weight; after
--learn steps its loss has fallen as far as BF16's, but for a twentieth; and no further from its own mode's in the first way than that: what
differs from way to way computes something else.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peers
import report
import torch
import torch.nn.functional as F
from llama import Llama, batches
from torch import Tensor
from torch.utils import _pytree as pytree

import ampplug

BATCHES = 16  # different ones, in a cycle
COSINE = 0.98
TOLERANCE = 0.05  # of BF16's fall
OWN = ("bf16", "o1", "o2")


class Mode:
    """One model and optimizer, and the ways to run a step of it."""

    def __init__(self, name: str, arguments: argparse.Namespace, data: list[tuple[Tensor, Tensor]], device: torch.device, pool: Any):
        self.name, self.data, self.device, self.pool = name, data, device, pool
        torch.manual_seed(0)
        with device:
            model = Llama(arguments.vocabulary, arguments.sequence, arguments.width, arguments.hidden, arguments.layers, arguments.heads, arguments.groups)
        self.model, self.context, self.optimizer = model.bfloat16(), nullcontext, None
        settings: dict[str, Any] = dict(lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
        graphs = device.type == "cuda" and any(way in arguments.ways.split(",") for way in ("graph", "both"))
        if name in peers.MAKE:
            self.model, self.optimizer, self.context = peers.MAKE[name](self.model, settings, graphs)
        else:
            cuda = dict(fused=True, capturable=graphs and name != "o2") if device.type == "cuda" else {}
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **settings, **cuda)
            if name != "bf16":
                self.model, self.optimizer = ampplug.initialize(self.model, self.optimizer, name.upper())
        self.compiled: Any = None
        self.books = list({id(m._ampplug.book): m._ampplug.book for m in self.model.modules() if hasattr(m, "_ampplug")}.values())
        self.start = [p.detach().to("cpu", copy=True) for p in self.model.parameters()]
        self.start_books = [pytree.tree_map_only(Tensor, lambda t: t.to("cpu", copy=True), book.state_dict()) for book in self.books]
        self.start_state: Any = None
        if name == "o2":
            self.start_state = pytree.tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), self.optimizer.state_dict())
            self.start_state["ampplug"]["book"] = None
        self.steps = 0
        self.losses: list[Tensor] = []

    @torch.no_grad()
    def restart(self, scales: bool) -> None:
        """The initial weights and an optimizer without memory, in place: captured steps go on. scales: those of activations are forgotten, too."""
        self.steps, self.losses = 0, []
        self.optimizer.zero_grad()
        for p, value in zip(self.model.parameters(), self.start, strict=True):
            p.copy_(value)
        if self.start_state is not None:
            self.optimizer.load_state_dict(self.start_state)
        else:
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()
            for group in self.optimizer.param_groups:  # Transformer Engine counts steps here
                if isinstance(group.get("step"), Tensor):
                    group["step"].zero_()
                elif "step" in group:
                    group["step"] = 0
            ampplug.refresh(self.model)
        if scales:
            for book, state in zip(self.books, self.start_books, strict=True):
                book.load_state_dict(state)

    def step_of(self, forward: Any) -> Any:
        """A training step as users write it."""

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            with self.context():
                loss = forward(tokens, targets)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        return step

    def way(self, way: str) -> Any:
        """The step, run this way."""
        if way in ("compile", "both") and self.compiled is None:
            self.compiled = torch.compile(self.model)
        step = self.step_of(self.compiled if way in ("compile", "both") else self.model)
        return ampplug.capture(step, self.model, self.optimizer, pool=self.pool) if way in ("graph", "both") else step

    def run(self, step: Any, keep: bool = True) -> None:
        """One step on the next batch."""
        loss = step(*self.data[self.steps % len(self.data)])
        self.steps += 1
        if keep:
            self.losses.append(loss)

    def gradients(self) -> list[Tensor]:
        """Of the last step."""
        return [p.grad.detach() for p in self.model.parameters()]  # type: ignore[union-attr]


def allocated(device: torch.device) -> int:
    """Bytes of live tensors on the GPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def wait(device: torch.device) -> None:
    """For the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def ways_of(name: str, arguments: argparse.Namespace) -> list[str]:
    """The ways in which a mode is asked for and can be run."""
    return [way for way in arguments.ways.split(",") if way in peers.WAYS.get(name, ("eager", "graph", "compile", "both"))]


def learn(mode: Mode, way: str, steps: int, reference: list[Tensor]) -> tuple[dict[str, Any], Any]:
    """Train from the initial weights in one way: (its row so far, the step to time). reference: eager BF16's first gradients."""
    if mode.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    mode.restart(scales=True)
    step = mode.way(way)
    began = time.perf_counter()
    mode.run(step)
    cosines = [F.cosine_similarity(a.flatten().float(), b.flatten().float(), 0) for a, b in zip(mode.gradients(), reference, strict=True)]
    for _ in range(steps - 1):
        mode.run(step)
    losses = torch.stack(mode.losses).float().cpu()
    last = min(BATCHES, max(1, steps // 2))
    row = dict(
        mode=mode.name, way=way, gradient_cosine=torch.stack(cosines).min().item(), learn_seconds=time.perf_counter() - began,
        learn_steps=steps, loss=[losses[0].item(), losses[-last:].mean().item()], losses=losses.tolist(), wall_ms=[], host_ms=[],
    )  # fmt: skip
    return row, step


def judge(rows: list[dict[str, Any]]) -> None:
    """Say of each row whether it counts, and if not, why."""
    bf16 = rows[0]
    fall = bf16["loss"][0] - bf16["loss"][1]
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        own = first.setdefault(row["mode"], row)
        reasons = []
        if not fall > 0.1:
            reasons.append(f"BF16's own loss fell by {fall:.3f} only: too few steps to tell")
        if not row["gradient_cosine"] >= COSINE:
            reasons.append(f"gradient cosine {row['gradient_cosine']:.3f} < {COSINE}")
        if not row["loss"][1] <= bf16["loss"][1] + TOLERANCE * fall:
            reasons.append(f"loss {row['loss'][1]:.3f} against BF16's {bf16['loss'][1]:.3f}")
        if not abs(row["loss"][1] - own["loss"][1]) <= TOLERANCE * fall:
            reasons.append(f"loss {row['loss'][1]:.3f} against {own['loss'][1]:.3f} in way {own['way']}")
        row["counts"], row["reason"] = not reasons, "; ".join(reasons)


def measure(names: list[str], micro_batch: int, arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The rows of these modes, BF16 first, in interleaved rounds."""
    data = batches(BATCHES, micro_batch, arguments.sequence, arguments.vocabulary, device)
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None  # captured steps run in turn and may share their memory
    modes: list[Mode] = []
    timed: list[tuple[dict[str, Any], Mode, Any]] = []
    reference: list[Tensor] = []
    for name in names:
        before = allocated(device)
        mode = Mode(name, arguments, data, device, pool)
        modes.append(mode)
        mode.run(mode.way("eager"))  # the optimizer makes its state
        if not reference:
            reference = [g.clone() for g in mode.gradients()]
            before += sum(g.nbytes for g in reference)
        mode.optimizer.zero_grad()
        own = allocated(device) - before
        for way in ways_of(name, arguments):
            gc.collect()
            others = allocated(device) - own  # other modes, and gradients of other ways' graphs
            row, step = learn(mode, way, arguments.learn, reference)
            row["peak_gib"] = (torch.cuda.max_memory_allocated() - others) / 2**30 if device.type == "cuda" else None
            row.update(micro_batch=micro_batch, beside=names[-1] if names[-1] in peers.MAKE else "")
            print(f"  ready: micro-batch {micro_batch}, {name} {way}, {row['learn_seconds']:.0f} s, loss {row['loss'][1]:.4f}", file=sys.stderr, flush=True)
            timed.append((row, mode, step))
    repeat = max(1, arguments.steps // micro_batch)
    for _ in range(arguments.rounds):
        for mode in modes:
            mode.restart(scales=False)
        for row, mode, step in timed:
            mode.run(step, keep=False)
            wait(device)
            began = time.perf_counter()
            for _ in range(repeat):
                mode.run(step, keep=False)
            issued = time.perf_counter()
            wait(device)
            row["wall_ms"].append(1e3 * (time.perf_counter() - began) / repeat)
            row["host_ms"].append(1e3 * (issued - began) / repeat)
    rows = [row for row, *_ in timed]
    judge(rows)
    for row, mode, step in timed:
        row["ms"], row["host"] = statistics.median(row["wall_ms"]), statistics.median(row["host_ms"])
        row["spread_ms"] = [min(row["wall_ms"]), max(row["wall_ms"])]
        row["gpu"], row["launches"] = profiled(step, data[0], device) if device.type == "cuda" and not arguments.no_profile else (None, None)
    best = min(row["ms"] for row in rows if row["mode"] == "bf16" and row["counts"] or row is rows[0])
    compiled = next((row for row in rows if row["mode"] == "bf16" and row["way"] == "compile"), rows[0])
    for row in rows:
        row["over_best_bf16"] = best / row["ms"]
        row["peak_over_bf16"] = None if row["peak_gib"] is None else row["peak_gib"] / compiled["peak_gib"]
        row["peak_against"] = compiled["way"]
    return rows


def profiled(step: Any, batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[float, float]:
    """(milliseconds in which the GPU works, kernels, copies and fills) of a step."""
    from ampplug.auditing import _profile

    gpu, kinds, _ = _profile(step, batch, 2, device)
    return gpu, kinds["total"]


def main() -> int:
    """Exit code: 0 if every row counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batch", default="1,8")
    parser.add_argument("--modes", default="bf16,o1,o2,te,torchao", help="bf16 first")
    parser.add_argument("--ways", default="eager,graph,compile,both", help="eager first, where it is among them")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=16, help="steps a round at micro-batch 1; at 8, an eighth of them")
    parser.add_argument("--learn", type=int, default=48, help="steps of training from the initial weights in each way, after which losses are compared")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--no-profile", action="store_true", help="leave out GPU time and launches")
    for name, value in (("vocabulary", 32768), ("sequence", 2048), ("width", 2048), ("hidden", 8192), ("layers", 16), ("heads", 32), ("groups", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--summary", action="store_true", help="only merge what earlier calls wrote to --out")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    if arguments.summary:
        return report.summary(out)
    modes = arguments.modes.split(",")
    legal = (*OWN, *peers.MAKE)
    if modes[0] != "bf16" or any(m not in legal for m in modes) or len(set(modes)) != len(modes):
        parser.error(f"--modes is {arguments.modes!r}; it must begin with bf16, which the others are compared with; legal are {', '.join(legal)}")
    if any(w not in ("eager", "graph", "compile", "both") for w in arguments.ways.split(",")):
        parser.error(f"--ways is {arguments.ways!r}; legal are eager, graph, compile, both")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    own = [m for m in modes if m in OWN]
    missing = {m: peers.why_not(m) for m in modes if m in peers.MAKE}
    groups = [own] if own != ["bf16"] or len(modes) == 1 else []
    groups += [["bf16", m] for m, why in missing.items() if why is None]
    notes = [why for why in missing.values() if why] + ([peers.MSAMP] if missing else [])
    rows: list[dict[str, Any]] = []
    for micro_batch in map(int, arguments.micro_batch.split(",")):
        for names in groups:
            try:
                rows += measure(names, micro_batch, arguments, device)
            except Exception as error:
                if names[-1] not in peers.MAKE:  # what another library cannot do must not cost the rows that are there
                    raise
                notes.append(f"{names[-1]}: failed at micro-batch {micro_batch}: {type(error).__name__}: {str(error)[:300]}")
            torch._dynamo.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    content = dict(
        command=" ".join(["python3", *sys.argv]), gpu=torch.cuda.get_device_name(0) if device.type == "cuda" else f"CPU ({platform.machine()})",
        torch=str(torch.__version__), python=platform.python_version(), sequence=arguments.sequence, notes=notes, rows=rows,
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    name = f"train_step-{arguments.micro_batch.replace(',', '+')}-{'+'.join(modes)}-{arguments.ways.replace(',', '+')}.json"
    (out / name).write_text(json.dumps(content, indent=1) + "\n")
    print(report.text([content]))
    report.plot([content], out / name.replace(".json", ".png"))
    return 0 if all(row["counts"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
