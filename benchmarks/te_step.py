"""A whole training step of a 1.1 B Llama computed by Transformer Engine: alone with its FusedAdam, and under ampplug at O2.

    python3 benchmarks/te_step.py --micro-batch 8 [--rounds 10] [--steps 10] [--ways eager,graph] [--out DIR]

Rows: "te-fp32" and "te-fp8", Transformer Engine and its FusedAdam with fp32 masters and fp32 or FP8 moments (FP8 eager alone: FusedAdam refuses to be
captured with it); "ampplug", the same model with backend="te". All have the same te.Linear modules in bf16, delayed scaling with a history of 16, tokens and
initial weights, and enter one autocast of their own around the forward pass. Times are medians over interleaved rounds in one process: every row some steps, then every row
again. Peak memory is that of the row's own training before the rounds, less what other rows hold. GPU time is split by kernels: casts of weights, the optimizer's, products,
the rest. A row counts if its loss falls, and ends within 5 % of the first row's. Needs a Hopper GPU with Transformer Engine 2.20 or later.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import peers
import torch
from llama import Llama, batches
from torch import Tensor

import ampplug

BATCHES = 16
ROWS = ("te-fp32", "te-fp8", "ampplug")
SIZES = dict(vocabulary=32768, sequence=2048, width=2048, hidden=8192, layers=16, heads=32, groups=8)  # train_step.py's
OURS = ("adam_step_kernel", "transpose_kernel", "scale_update_kernel", "norm_kernel", "weight_amax_kernel", "weight_cast_kernel")  # all of the step
# Parts of the GPU's time by what names of kernels hold, the first that fits. Casts of activations are "casts", too: rows differ by those of weights.
PARTS = (
    ("optimizer", ("adam", "l2norm", "multi_tensor", "foreach")),
    ("products", ("gemm", "cutlass", "nvjet", "xmma", "cublas", "attention", "flash", "fmha")),
    ("casts", ("cast", "transpose", "amax", "quantize", "scale")),
)


class Run:
    """One row: model, optimizer and its steps in each way."""

    def __init__(self, name: str, arguments: argparse.Namespace, data: list[tuple[Tensor, Tensor]], device: torch.device):
        import transformer_engine.common.recipe as recipes
        import transformer_engine.pytorch as te

        self.name, self.data, self.device, self.count = name, data, device, 0
        torch.manual_seed(0)
        with device:
            self.model: Any = Llama(*(getattr(arguments, size) for size in SIZES)).bfloat16()
        settings: dict[str, Any] = dict(lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.context: Any = contextlib.nullcontext
        if name == "ampplug":
            inner = lambda n, m: n != "lm_head"  # noqa: E731
            self.model, self.optimizer = ampplug.initialize(
                self.model, torch.optim.AdamW(self.model.parameters(), **settings), backend="te", select=inner, history=16, margin=0
            )
        else:
            recipe = recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
            for parent, attribute, layer in peers._inner_linears(self.model):
                other = te.Linear(layer.in_features, layer.out_features, bias=False, params_dtype=layer.weight.dtype, device=device)
                with torch.no_grad():
                    other.weight.copy_(layer.weight)
                setattr(parent, attribute, other)
            moments = torch.uint8 if name == "te-fp8" else torch.float32
            self.optimizer = te.optimizers.FusedAdam(
                self.model.parameters(), adam_w_mode=True, master_weights=True, exp_avg_dtype=moments, exp_avg_sq_dtype=moments,
                capturable=name == "te-fp32" and "graph" in arguments.ways, **settings,
            )  # fmt: skip
            self.context = lambda: te.autocast(enabled=True, recipe=recipe)
        self.losses: list[Tensor] = []

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As users write it."""
        self.optimizer.zero_grad()
        with self.context():
            loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, step: Any, steps: int) -> None:
        """Some steps on the next batches."""
        for _ in range(steps):
            self.losses.append(step(*self.data[self.count % len(self.data)]))
            self.count += 1


def wait(device: torch.device) -> None:
    """For the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def part_of(kernel: str) -> str:
    """Of PARTS, or "rest"."""
    if kernel in OURS:
        return "optimizer"
    return next((part for part, names in PARTS if any(n in kernel.lower() for n in names)), "rest")


def itemise(run: Run, step: Any) -> dict[str, Any]:
    """GPU milliseconds and launches of one step, by part and by kernel; nothing without a GPU."""
    if run.device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run.run(step, 2)
        wait(run.device)
    kernels = [(e.key, e.self_device_time_total / 2e3, e.count / 2) for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    parts: dict[str, list[float]] = {}
    for key, ms, count in kernels:
        part = parts.setdefault(part_of(key), [0.0, 0.0])
        part[0], part[1] = part[0] + ms, part[1] + count
    kernels.sort(key=lambda k: -k[1])
    return {"parts": {k: {"ms": ms, "launches": n} for k, (ms, n) in parts.items()}, "kernels": [[key[:120], ms, n] for key, ms, n in kernels[:40]]}


def measure(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """All rows."""
    data = batches(BATCHES, arguments.micro_batch, arguments.sequence, arguments.vocabulary, device)
    rows: list[dict[str, Any]] = []
    running: list[tuple[dict[str, Any], Run, Any]] = []
    gpu = device.type == "cuda"
    for name in arguments.rows:
        for way in arguments.ways:
            if (name, way) == ("te-fp8", "graph"):
                continue
            before = torch.cuda.memory_allocated() if gpu else 0
            if gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            run = Run(name, arguments, data, device)
            step = ampplug.capture(run.step, run.model, run.optimizer) if way == "graph" else run.step
            run.run(step, arguments.learn)
            wait(device)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if gpu else None
            losses = torch.stack(run.losses).float().cpu()
            rows.append(dict(row=name, way=way, peak_gib=peak, loss=[losses[0].item(), losses[-4:].mean().item()], wall_ms=[], host_ms=[]))
            rows[-1]["gpu"] = itemise(run, step)
            running.append((rows[-1], run, step))
            print(f"  ready: {name} {way}, loss {losses[0]:.2f} to {losses[-4:].mean():.3f}", file=sys.stderr, flush=True)
    for _ in range(arguments.rounds):
        for row, run, step in running:
            wait(device)
            began = time.perf_counter()
            run.run(step, arguments.steps)
            issued = time.perf_counter()
            wait(device)
            row["wall_ms"].append(1e3 * (time.perf_counter() - began) / arguments.steps)
            row["host_ms"].append(1e3 * (issued - began) / arguments.steps)
    for row in rows:
        row["ms"], row["host"] = statistics.median(row["wall_ms"]), statistics.median(row["host_ms"])
        row["counts"] = bool(row["loss"][1] < row["loss"][0] and row["loss"][1] < 1.05 * rows[0]["loss"][1])
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown; the last columns are GPU milliseconds of a step."""
    parts = [part for part, _ in PARTS] + ["rest"]
    lines = [f"| row | way | ms a step | spread | host ms | peak GiB | loss | counts | {' | '.join(parts)} |", "|" + "---|" * (8 + len(parts))]
    for r in rows:
        spent = r["gpu"].get("parts", {})
        cells = [f"{spent[p]['ms']:.2f} ({spent[p]['launches']:.0f})" if p in spent else "" for p in parts]
        peak = "" if r["peak_gib"] is None else f"{r['peak_gib']:.2f}"
        lines.append(
            f"| {r['row']} | {r['way']} | {r['ms']:.2f} | {min(r['wall_ms']):.2f}–{max(r['wall_ms']):.2f} | {r['host']:.2f} | {peak} | "
            f"{r['loss'][0]:.2f} → {r['loss'][1]:.3f} | {'yes' if r['counts'] else 'NO'} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def main() -> int:
    """1 if Transformer Engine cannot be run here, or a row does not count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--rows", type=lambda s: s.split(","), default=list(ROWS))
    parser.add_argument("--ways", type=lambda s: s.split(","), default=["eager", "graph"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="a round")
    parser.add_argument("--learn", type=int, default=24, help="steps before the rounds; captured rows record within them")
    parser.add_argument("--lr", type=float, default=3e-4)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    for given, legal in ((arguments.rows, ROWS), (arguments.ways, ("eager", "graph"))):
        if not set(given) <= set(legal):
            parser.error(f"{','.join(given)} is not legal; legal are {', '.join(legal)}")
    why = peers.why_not("te")
    if why:
        print(why, file=sys.stderr)
        return 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = measure(arguments, device)
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    versions = {"torch": torch.__version__, "transformer_engine": str(sys.modules["transformer_engine"].__version__)}
    (out / f"te_step-{arguments.micro_batch}.json").write_text(json.dumps({"gpu": gpu, **versions, "settings": vars(arguments), "rows": rows}, indent=1))
    print(table(rows))
    return 0 if all(row["counts"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
