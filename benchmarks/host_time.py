"""Host time of eager FP8 against eager BF16: what the CPU spends to issue a training step, on a model so small that the GPU waits for it.

    python3 benchmarks/host_time.py [--rounds 20] [--steps 10] [--out DIR]

The same Llama (benchmarks/train_step.py) at width 256 and sequence 128, all layers converted: BF16 with torch's fused AdamW, O1 with the same
optimizer, O2; O1 and O2 also with the layers' C++ left out ("python"). Interleaved rounds in one process: every row some steps, then every row again.
Host time is what the calls of a step take before anything waits for the GPU; the table has medians over rounds, in all and by part, and the share of
the time in which the GPU idles, which must be above one half: else the host waits for it. Then one Linear, 256 by 256, forward and backward, and the
calls it is made of. Ratios compare with BF16 in the same round. Needs a GPU with FP8 units; takes about a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

os.environ["AMPPLUG_NATIVE"] = "1"  # before ampplug is imported

import torch
from llama import Llama, batches
from torch import Tensor, nn

import ampplug
from ampplug.kernels.cast import cast
from ampplug.nn import native

PARTS = ("forward", "backward", "optimizer")
ROWS = ("bf16", "o1", "o2", "o1 python", "o2 python")


def path_of(row: str) -> Any:
    """The context in which a row's layers run."""
    return native.left_out() if row.endswith("python") else contextlib.nullcontext()


class Run:
    """One row: a model, its optimizer, and the time of each part of its steps."""

    def __init__(self, name: str, arguments: argparse.Namespace, data: list[tuple[Tensor, Tensor]], device: torch.device):
        self.name, self.data, self.count = name, data, 0
        torch.manual_seed(0)
        with device:
            self.model: Any = Llama(1024, arguments.sequence, arguments.width, 4 * arguments.width, arguments.layers, 4, 2).bfloat16()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=name != "o2")
        if name != "bf16":
            self.model, self.optimizer = ampplug.initialize(self.model, self.optimizer, name.split()[0].upper(), select="all")
        self.host: list[dict[str, float]] = []
        self.wall: list[float] = []

    def step(self, *batch: Tensor) -> Tensor:
        """As users write it. Returns the loss; times its parts in `self.now`, seconds."""
        t0 = time.perf_counter()
        loss = self.model(*batch)
        t1 = time.perf_counter()
        loss.backward()
        t2 = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        t3 = time.perf_counter()
        self.now = t1 - t0, t2 - t1, t3 - t2
        return loss.detach()

    def round(self, steps: int, keep: bool) -> None:
        """Some steps, one by one; the queue is empty when each begins."""
        spent = []
        with path_of(self.name):
            began = time.perf_counter()
            for _ in range(steps):
                torch.cuda.synchronize()
                self.step(*self.data[self.count % len(self.data)])
                self.count += 1
                spent.append(self.now)
            torch.cuda.synchronize()
        if keep:
            self.wall.append(1e3 * (time.perf_counter() - began) / steps)
            self.host.append({part: 1e3 * statistics.median(times) for part, times in zip(PARTS, zip(*spent, strict=True), strict=True)})


def whole_step(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Rows of the model."""
    arguments.vocabulary = 1024
    data = batches(16, 1, arguments.sequence, 1024, device)
    runs = [Run(name, arguments, data, device) for name in arguments.modes.split(",")]
    for run in runs:
        run.round(8, keep=False)  # compiles, first scales
    for _ in range(arguments.rounds):
        for run in runs:
            run.round(arguments.steps, keep=True)
    rows = []
    for run in runs:
        with path_of(run.name):
            found = ampplug.audit(run.step, *data[0], model=run.model, optimizer=run.optimizer)
        totals = [sum(h.values()) for h in run.host]
        row = dict(mode=run.name, layers=found.layers, host_ms=statistics.median(totals), spread_ms=[min(totals), max(totals)], wall_ms=statistics.median(run.wall))
        row.update({f"{part}_ms": statistics.median(h[part] for h in run.host) for part in PARTS})
        row["ratio"] = statistics.median(sum(a.values()) / sum(b.values()) for a, b in zip(run.host, runs[0].host, strict=True))
        row["idle"] = None if found.gpu_ms is None else 1 - found.gpu_ms / row["wall_ms"]
        row["launches"] = None if found.launches is None else found.launches["total"]
        rows.append(row)
    return rows


def one_linear(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Microseconds of one Linear, forward and backward, in a stack of 16 that share nothing."""
    width, depth = arguments.width, 16
    stacks: dict[str, Any] = {}
    for name in ("bf16", "o2", "o2 python"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)]).to(device, torch.bfloat16)
        if name != "bf16":
            model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-5), select="all")
        x = torch.randn(arguments.sequence, width, device=device, dtype=torch.bfloat16)
        dy = torch.randn_like(x)
        stacks[name] = model, x, dy, []
        with path_of(name):
            for _ in range(4):
                model(x).backward(dy)
                if name != "bf16":
                    optimizer.step()
                model.zero_grad()
                torch.cuda.synchronize()
    for _ in range(arguments.rounds):
        for name, (model, x, dy, seen) in stacks.items():
            with path_of(name):
                for _ in range(arguments.steps):
                    for p in model.parameters():
                        p.grad = None
                    torch.cuda.synchronize()
                    t0 = time.perf_counter()
                    y = model(x)
                    t1 = time.perf_counter()
                    y.backward(dy)
                    seen.append((t1 - t0, time.perf_counter() - t1))
    rows = []
    for name, (*_, seen) in stacks.items():
        forward, backward = (1e6 * statistics.median(times) / depth for times in zip(*seen, strict=True))
        rows.append(dict(mode=name, forward_us=forward, backward_us=backward, us=forward + backward))
    for row in rows:
        row["ratio"] = row["us"] / rows[0]["us"]
    return rows


def calls(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Microseconds of what both sides are made of, called from Python: GEMMs, a cast, an allocation."""
    m, k = arguments.sequence, arguments.width
    a, b = torch.randn(m, k, device=device, dtype=torch.bfloat16), torch.randn(k, k, device=device, dtype=torch.bfloat16)
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t(), torch.ones(1, device=device)
    scratch = torch.zeros(3, dtype=torch.int32, device=device)
    ways = {
        "torch.mm, BF16": lambda: torch.mm(a, b),
        "torch._scaled_mm, FP8 to BF16": lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        "cast with transpose, by Triton's launcher": lambda: cast(a, torch.float8_e4m3fn, scale=one, scratch=scratch, transpose=True),
        "torch.empty": lambda: torch.empty(m, k, device=device, dtype=torch.bfloat16),
    }
    seen: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(arguments.rounds + 1):
            for name, way in ways.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(100):
                    way()
                seen[name].append((time.perf_counter() - began) * 1e4)
    return [dict(call=name, us=statistics.median(times[1:])) for name, times in seen.items()]


def table(steps: list[dict[str, Any]], linears: list[dict[str, Any]], made_of: list[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    lines = ["| step | host ms | spread | forward | backward | optimizer | against BF16 | GPU idle | launches |", "|" + "---|" * 9]
    for r in steps:
        idle = "" if r["idle"] is None else f"{100 * r['idle']:.0f} %{'' if r['idle'] > 0.5 else ' (too busy: does not count)'}"
        parts = " | ".join(f"{r[f'{part}_ms']:.2f}" for part in PARTS)
        lines.append(f"| {r['mode']} | {r['host_ms']:.2f} | {r['spread_ms'][0]:.2f}–{r['spread_ms'][1]:.2f} | {parts} | {r['ratio']:.3f} | {idle} | {r['launches'] or 0:.0f} |")
    lines += ["", "| one Linear | forward µs | backward µs | both | against BF16 |", "|" + "---|" * 5]
    lines += [f"| {r['mode']} | {r['forward_us']:.1f} | {r['backward_us']:.1f} | {r['us']:.1f} | {r['ratio']:.3f} |" for r in linears]
    lines += ["", "| one call | µs |", "|---|---|", *[f"| {r['call']} | {r['us']:.1f} |" for r in made_of]]
    return "\n".join(lines)


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(ROWS), help="bf16 first")
    for name, value in (("rounds", 20), ("steps", 10), ("width", 256), ("sequence", 128), ("layers", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    if arguments.modes.split(",")[0] != "bf16":
        parser.error("--modes must begin with bf16, which the others are compared with")
    try:
        ampplug.check_fp8_support()
    except RuntimeError as error:
        print(f"host_time.py measures a GPU's host and needs one: {error}", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    began = time.perf_counter()
    built = native.load() is not None
    seconds = time.perf_counter() - began
    steps, linears, made_of = whole_step(arguments, device), one_linear(arguments, device), calls(arguments, device)
    head = (
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; Llama of {arguments.layers} blocks, width {arguments.width}, sequence {arguments.sequence}; "
        f"layers in C++: {f'yes, loaded in {seconds:.0f} s' if built else 'NO, they could not be built'}"
    )
    parts = [head, "", table(steps, linears, made_of)]
    print("\n".join(parts))
    os.makedirs(arguments.out, exist_ok=True)
    content = dict(command=" ".join(["python3", *sys.argv]), gpu=torch.cuda.get_device_name(device), torch=str(torch.__version__), native=built, steps=steps, linears=linears, calls=made_of)
    (Path(arguments.out) / "host_time.json").write_text(json.dumps(content, indent=1) + "\n")
    (Path(arguments.out) / "host_time.md").write_text("\n".join(parts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
