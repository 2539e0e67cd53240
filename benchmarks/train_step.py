"""A whole training step of a 1.1 B Llama: BF16 against ampplug, each eager, captured, compiled, and both.

    python3 benchmarks/train_step.py [--micro-batches 1,8] [--modes bf16,o1,o2] [--ways eager,graph,compile,both] [--rounds 10] [--out DIR]

Everything runs in one process, in interleaved rounds: every row once, then every row again. A row's time is the median over rounds of the wall
time of a step (a few steps, then one wait for the GPU), its host time what the same calls took before that wait (with many steps queued, the
host also waits for room in the queue). Peak memory is that of the first steps, without other modes. All rows have the same model code, attention,
loss, tokens and order of batches; BF16 has bf16 parameters and torch's fused AdamW with bf16 states. The rows of a mode train the same weights in turn.

A row counts only if it learns: the gradients of the first step have a cosine of at least 0.98 with BF16's, weight by weight, and at the end the
mode's loss has fallen and lies within 5 % of BF16's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampplug

BATCHES = 16  # different ones, in a cycle


# ---------------------------------------------------------------- the model


class Attention(nn.Module):
    """Grouped heads, rotary positions, causal."""

    def __init__(self, width: int, heads: int, groups: int):
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.q, self.k, self.v = nn.Linear(width, width, bias=False), nn.Linear(width, groups * size, bias=False), nn.Linear(width, groups * size, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, n, -1).transpose(1, 2) for f, n in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups)))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves as pairs."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """RMSNorm, attention; RMSNorm, SwiGLU."""

    def __init__(self, width: int, hidden: int, heads: int, groups: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed_forward = Attention(width, heads, groups), FeedForward(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.feed_forward(self.norm_2(x))


class Llama(nn.Module):
    """Tokens and targets [B, T] -> mean loss, fp32 [].

    Initialised as torch does it. With normal(0, 0.02) at this width, the residual stream is all blocks and no embedding, and 16 layers of it amplify
    rounding: BF16's own gradients then have a cosine of 0.998 with fp32's, E4M3 and E5M2, 16 and 32 times as coarse, 0.84.
    """

    def __init__(self, vocabulary: int, sequence: int, width: int, hidden: int, layers: int, heads: int, groups: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, hidden, heads, groups) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angle = torch.arange(sequence)[:, None] / 10000.0 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def batches(arguments: argparse.Namespace, micro_batch: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Learnable tokens: each is a fixed function of the one before, except one in eight, which is random."""
    generator = torch.Generator().manual_seed(0)
    follow = torch.randperm(arguments.vocabulary, generator=generator)
    made = []
    for _ in range(BATCHES):
        shape = (micro_batch, arguments.sequence + 1)
        tokens = torch.randint(0, arguments.vocabulary, shape, generator=generator)
        new = torch.rand(shape, generator=generator) < 0.125
        for t in range(1, shape[1]):
            tokens[:, t] = torch.where(new[:, t], tokens[:, t], follow[tokens[:, t - 1]])
        made.append((tokens[:, :-1].to(device), tokens[:, 1:].to(device)))
    return made


# ---------------------------------------------------------------- rows


class Mode:
    """One model and optimizer, and the ways to run a step of it."""

    def __init__(self, name: str, arguments: argparse.Namespace, data: list[tuple[Tensor, Tensor]], device: torch.device):
        self.name, self.data, self.device = name, data, device
        torch.manual_seed(0)
        with device:
            self.model = Llama(
                arguments.vocabulary, arguments.sequence, arguments.width, arguments.hidden, arguments.layers, arguments.heads, arguments.groups
            ).bfloat16()
        graphs = device.type == "cuda" and name != "o2"
        options = dict(fused=device.type == "cuda", capturable=graphs)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1, **options)
        if name != "bf16":
            self.model, self.optimizer = ampplug.initialize(self.model, self.optimizer, name.upper())
        self.steps = 0
        self.losses: list[Tensor] = []
        self.compiled: Any = None

    def step_of(self, forward: Any) -> Any:
        """A training step as users write it."""

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            self.optimizer.zero_grad()
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
        return ampplug.capture(step, self.model, self.optimizer) if way in ("graph", "both") else step

    def run(self, step: Any) -> None:
        """One step on the next batch."""
        self.losses.append(step(*self.data[self.steps % len(self.data)]))
        self.steps += 1


def allocated(device: torch.device) -> int:
    """Bytes of live tensors on the GPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def wait(device: torch.device) -> None:
    """For the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(arguments: argparse.Namespace, micro_batch: int, device: torch.device) -> list[dict[str, Any]]:
    """All rows of one micro-batch size."""
    data = batches(arguments, micro_batch, device)
    rows: list[dict[str, Any]] = []
    modes: dict[str, Mode] = {}
    steps: list[tuple[dict[str, Any], Mode, Any]] = []
    reference: list[Tensor] = []
    for name in arguments.modes.split(","):
        before = allocated(device)
        mode = modes[name] = Mode(name, arguments, data, device)
        mode.model(*data[0]).backward()  # the gradients of the first step, before any update
        gradients = [p.grad for p in mode.model.parameters()]
        if name == "bf16":
            reference = [g.clone() for g in gradients]  # type: ignore[union-attr]
        cosines = [F.cosine_similarity(a.flatten().float(), b.flatten().float(), 0).item() for a, b in zip(gradients, reference, strict=True)]  # type: ignore[union-attr]
        del gradients
        mode.run(mode.way("eager"))  # the optimizer makes its state
        mode.optimizer.zero_grad()
        own = allocated(device) - before
        for way in arguments.ways.split(","):
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            others = allocated(device) - own  # other modes, and gradients of other ways' graphs
            began = time.perf_counter()
            step = mode.way(way)
            for _ in range(6):  # compiles, captures
                mode.run(step)
            wait(device)
            row = dict(
                micro_batch=micro_batch, mode=name, way=way, gradient_cosine=min(cosines), first_seconds=time.perf_counter() - began,
                peak_gib=(torch.cuda.max_memory_allocated() - others) / 2**30 if device.type == "cuda" else None, wall_ms=[], host_ms=[],
            )  # fmt: skip
            print(f"  ready: micro-batch {micro_batch}, {name} {way}, {row['first_seconds']:.0f} s", file=sys.stderr, flush=True)
            rows.append(row)
            steps.append((row, mode, step))
    repeat = max(1, arguments.steps // micro_batch)
    for _ in range(arguments.rounds):
        for row, mode, step in steps:
            wait(device)
            began = time.perf_counter()
            for _ in range(repeat):
                mode.run(step)
            issued = time.perf_counter()
            wait(device)
            row["wall_ms"].append(1e3 * (time.perf_counter() - began) / repeat)
            row["host_ms"].append(1e3 * (issued - began) / repeat)
    for row in rows:
        losses = torch.stack(modes[row["mode"]].losses).float().cpu()
        base = torch.stack(modes["bf16"].losses).float().cpu()
        n = min(len(losses), len(base))
        row["loss"] = [losses[0].item(), losses[n - BATCHES : n].mean().item()]
        row["loss_bf16"] = base[n - BATCHES : n].mean().item()
        row["counts"] = bool(row["gradient_cosine"] >= 0.98 and row["loss"][1] < row["loss"][0] and row["loss"][1] < 1.05 * row["loss_bf16"])
        row["ms"], row["host"] = statistics.median(row["wall_ms"]), statistics.median(row["host_ms"])
        row["spread_ms"] = [min(row["wall_ms"]), max(row["wall_ms"])]
    best = min(row["ms"] for row in rows if row["mode"] == "bf16")
    for row in rows:
        row["over_best_bf16"] = best / row["ms"]
    return rows


def table(rows: list[dict[str, Any]], sequence: int) -> str:
    """Rows as Markdown."""
    lines = ["| micro-batch | mode | way | ms a step | spread | host ms | tokens/s | against the best BF16 | peak GiB | loss | cosine | counts |", "|" + "---|" * 12]
    for r in rows:
        peak = "" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}"
        lines.append(
            f"| {r['micro_batch']} | {r['mode']} | {r['way']} | {r['ms']:.1f} | {r['spread_ms'][0]:.1f}–{r['spread_ms'][1]:.1f} | {r['host']:.1f} | "
            f"{1e3 * r['micro_batch'] * sequence / r['ms']:.0f} | {r['over_best_bf16']:.2f} | {peak} | {r['loss'][0]:.2f} → {r['loss'][1]:.3f} | "
            f"{r['gradient_cosine']:.4f} | {'yes' if r['counts'] else 'NO'} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", default="1,8")
    parser.add_argument("--modes", default="bf16,o1,o2", help="bf16 first")
    parser.add_argument("--ways", default="eager,graph,compile,both")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=16, help="steps a round at micro-batch 1; at 8, an eighth of them")
    parser.add_argument("--lr", type=float, default=3e-4)
    for name, value in (("vocabulary", 32768), ("sequence", 2048), ("width", 2048), ("hidden", 8192), ("layers", 16), ("heads", 32), ("groups", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    if arguments.modes.split(",")[0] != "bf16":
        parser.error("--modes must begin with bf16, which the others are compared with")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows: list[dict[str, Any]] = []
    for micro_batch in map(int, arguments.micro_batches.split(",")):
        rows += measure(arguments, micro_batch, device)
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    gpu = torch.cuda.get_device_name(0) if device.type == "cuda" else f"CPU ({platform.machine()})"
    parts = [f"{gpu}, torch {torch.__version__}; `{' '.join(['python3', *sys.argv])}`", "", table(rows, arguments.sequence)]
    print("\n".join(parts))
    os.makedirs(arguments.out, exist_ok=True)
    content = dict(command=" ".join(["python3", *sys.argv]), gpu=gpu, torch=str(torch.__version__), python=platform.python_version(), rows=rows)
    (Path(arguments.out) / "train_step.json").write_text(json.dumps(content, indent=1) + "\n")
    (Path(arguments.out) / "train_step.md").write_text("\n".join(parts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
