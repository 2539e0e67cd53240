"""A whole training step of a 1.1 B Llama under DeepSpeed's engine on one GPU: BF16 against ampplug O1 and O2.

    python3 benchmarks/deepspeed_step.py [--stage 1] [--micro-batch 4] [--modes bf16,o1,o2] [--rounds 10] [--out DIR]

Everything runs in one process, in interleaved rounds: every engine once, then every engine again. A row's time is the median over rounds of the wall
time of a step (a few steps, then one wait for the GPU); its memory is what the engine holds between steps, and the peak of its steps without the
other engines. All have the same model code, loss, tokens and order of batches, and torch's fused AdamW (O2 turns it into its own): DeepSpeed's
FusedAdam would have to be compiled, and under ZeRO steps the same flat fp32 partition. Needs ampplug and DeepSpeed to be installed.

A row counts only if it learns: its loss has fallen, and lies within 5 % of BF16's at the end.
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

import deepspeed
import torch
from llama import Llama, batches
from torch import Tensor
from train_step import BATCHES, allocated, wait

import ampplug.integrations.deepspeed  # noqa: F401

GIB = 2**30


class Mode:
    """One engine on one model."""

    def __init__(self, name: str, arguments: argparse.Namespace, data: list[tuple[Tensor, Tensor]], device: torch.device):
        self.name, self.data, self.device = name, data, device
        torch.manual_seed(0)
        with device:
            model = Llama(arguments.vocabulary, arguments.sequence, arguments.width, arguments.hidden, arguments.layers, arguments.heads, arguments.groups)
        optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda")
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": arguments.micro_batch,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": arguments.stage},
            "ampplug": {"enabled": name != "bf16", "opt_level": "O1" if name == "bf16" else name.upper()},
        }
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.parameters = sum(p.numel() for p in model.parameters())
        self.losses: list[Tensor] = []

    def run(self) -> None:
        """One step on the next batch."""
        loss = self.engine(*self.data[len(self.losses) % len(self.data)])
        self.engine.backward(loss)
        self.engine.step()
        self.losses.append(loss.detach())


def measure(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """A row a mode."""
    data = batches(BATCHES, arguments.micro_batch, arguments.sequence, arguments.vocabulary, device)
    modes, rows = [], []
    for name in arguments.modes.split(","):
        before = allocated(device)
        mode = Mode(name, arguments, data, device)
        for _ in range(2):  # the optimizer makes its state; FP8 scales settle
            mode.run()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            mode.run()
        wait(device)
        peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
        row = dict(
            mode=name, stage=arguments.stage, micro_batch=arguments.micro_batch, parameters=mode.parameters, held_gib=(allocated(device) - before) / GIB,
            held_bytes_per_parameter=(allocated(device) - before) / mode.parameters, peak_gib=peak / GIB, wall_ms=[], host_ms=[],
        )  # fmt: skip
        print(f"  ready: {name}", file=sys.stderr, flush=True)
        modes.append(mode)
        rows.append(row)
    for _ in range(arguments.rounds):
        for mode, row in zip(modes, rows):
            wait(device)
            began = time.perf_counter()
            for _ in range(arguments.steps):
                mode.run()
            issued = time.perf_counter()
            wait(device)
            row["wall_ms"].append(1e3 * (time.perf_counter() - began) / arguments.steps)
            row["host_ms"].append(1e3 * (issued - began) / arguments.steps)
    base = torch.stack(modes[0].losses).float().cpu()
    for mode, row in zip(modes, rows):
        losses = torch.stack(mode.losses).float().cpu()
        row["loss"] = [losses[0].item(), losses[-BATCHES:].mean().item()]
        row["counts"] = bool(row["loss"][1] < row["loss"][0] and row["loss"][1] < 1.05 * base[-BATCHES:].mean().item())
        row["ms"], row["host"] = statistics.median(row["wall_ms"]), statistics.median(row["host_ms"])
        row["spread_ms"] = [min(row["wall_ms"]), max(row["wall_ms"])]
        row["tokens_per_second"] = 1e3 * arguments.micro_batch * arguments.sequence / row["ms"]
        row["over_bf16"] = rows[0]["ms"] / row["ms"]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    lines = ["| engine | ms a step | spread | host ms | tokens/s | against BF16 | held GiB | bytes a parameter | peak GiB | loss | counts |", "|" + "---|" * 11]
    for r in rows:
        lines.append(
            f"| {r['mode']} | {r['ms']:.1f} | {r['spread_ms'][0]:.1f}–{r['spread_ms'][1]:.1f} | {r['host']:.1f} | {r['tokens_per_second']:.0f} | "
            f"{r['over_bf16']:.2f} | {r['held_gib']:.1f} | {r['held_bytes_per_parameter']:.1f} | {r['peak_gib']:.1f} | {r['loss'][0]:.2f} → {r['loss'][1]:.3f} | "
            f"{'yes' if r['counts'] else 'NO'} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="bf16,o1,o2", help="bf16 first")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="steps a round")
    parser.add_argument("--lr", type=float, default=3e-4)
    for name, value in (("vocabulary", 32768), ("sequence", 2048), ("width", 2048), ("hidden", 8192), ("layers", 16), ("heads", 32), ("groups", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    if arguments.modes.split(",")[0] != "bf16":
        parser.error("--modes must begin with bf16, which the others are compared with")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, which takes minutes
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29533")):
        os.environ.setdefault(name, value)
    deepspeed.init_distributed()
    rows = measure(arguments, device)
    gpu = torch.cuda.get_device_name(0) if device.type == "cuda" else f"CPU ({platform.machine()})"
    command = " ".join(["python3", *sys.argv])
    parts = [f"{gpu}, torch {torch.__version__}, DeepSpeed {deepspeed.__version__}; `{command}`", "", table(rows)]
    print("\n".join(parts))
    os.makedirs(arguments.out, exist_ok=True)
    content = dict(command=command, gpu=gpu, torch=str(torch.__version__), deepspeed=deepspeed.__version__, python=platform.python_version(), rows=rows)
    (Path(arguments.out) / "deepspeed_step.json").write_text(json.dumps(content, indent=1) + "\n")
    (Path(arguments.out) / "deepspeed_step.md").write_text("\n".join(parts) + "\n")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
