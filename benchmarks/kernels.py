"""Optimizer step and cast-transpose against the copy bandwidth of the same run.

    python3 benchmarks/kernels.py [--sweep] [--out DIR]

Step: about 1 B elements in 113 tensors of a 1.1 B Llama, split bf16 masters, bf16 gradients, stochastic rounding, W8 and W8T;
bytes are those that must move (16 an element and one exponent per 128), time is that of all launches of the step. The same again in 10
and in 1,000 tensors, with the launches counted. Cast: [16384, 2048] and [16384, 8192] bf16 -> E4M3, its transpose and the amax, 4 bytes an
element, inputs rotated through more memory than the L2 holds. Medians of event-timed repetitions. --sweep tries other tile shapes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import triton

from ampplug import formats
from ampplug.kernels import adam_step, cast, norm, scale_update, tables
from ampplug.kernels.triton_runtime import launches
from ampplug.storage import Arena, WeightBank, table_row, upload

DEVICE = torch.device("cuda", 0)
LLAMA = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]


def median_ms(run, repeat: int = 30, warm: int = 5) -> float:
    """Median of event-timed runs, in milliseconds."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Device-to-device copy, bytes read + written a second, TB/s."""
    a = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.numel() / median_ms(lambda: b.copy_(a)) / 1e9


class Step:
    """All that one optimizer step over matrices of these shapes needs."""

    def __init__(self, shapes: list[tuple[int, int]], with_fp8: bool = True):
        torch.manual_seed(0)
        self.params = [torch.randn(s, device=DEVICE, dtype=torch.bfloat16).mul_(0.02) for s in shapes]
        self.grads = [torch.randn(s, device=DEVICE, dtype=torch.bfloat16) for s in shapes]
        self.bank = WeightBank([(str(i), p) for i, p in enumerate(self.params)] if with_fp8 else [], DEVICE)
        sizes: list = []
        for r, c in shapes:
            sizes += [((r, c), torch.int16), ((r, c), torch.uint8), ((r, c), torch.uint8), ((r, c // 128), torch.uint8)]
        self.arena = Arena(sizes, DEVICE)
        rows = []
        for i, (p, g) in enumerate(zip(self.params, self.grads, strict=True)):
            low, ratio, v, top = self.arena.views[4 * i : 4 * i + 4]
            row = table_row(p, self.bank.weights[i] if with_fp8 else None, low=low)
            for name, value in (("grad", g), ("ratio", ratio), ("v", v), ("top", top)):
                row[tables.COLUMN[name]] = value.data_ptr()
            row[tables.COLUMN["grad_kind"]] = tables.KIND[g.dtype]
            row[tables.COLUMN["ordinal"]] = i
            rows.append(row)
        self.shapes = [(row[tables.COLUMN["rows"]], row[tables.COLUMN["cols"]]) for row in rows]
        self.table = upload(rows, DEVICE)
        b1, b2 = 0.9, 0.999
        values = dict(
            lr=1e-4, log_beta1=math.log(b1), log_beta2=math.log(b2), eps=1e-8, weight_decay=0.1, bound=formats.step_bound(b1, b2),
            ratio_limit=formats.ratio_limit(b1, b2), decoupled=1.0, maximize=0.0, beta1=b1, beta2=b2,
        )  # fmt: skip
        self.hyper = torch.tensor([[values[h] for h in tables.HYPER]], dtype=torch.float64, device=DEVICE)
        n = len(shapes)
        self.steps = torch.zeros(n, dtype=torch.int32, device=DEVICE)
        self.limits = torch.full((n,), formats.ratio_limit(b1, b2), device=DEVICE)
        self.elements = sum(r * c for r, c in shapes)
        self.slots = [torch.zeros(0, device=DEVICE), torch.zeros(0, 16, device=DEVICE), torch.zeros(0, dtype=torch.int32, device=DEVICE)]
        self.norm, self.clip = torch.zeros(1, device=DEVICE), torch.ones(1, device=DEVICE)
        self.partials = torch.zeros(norm.MAX_PROGRAMS, device=DEVICE)
        self.counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.bytes = self.elements * (16 if with_fp8 else 14) + 2 * self.elements // 128
        self.chunks = tables.chunk_table(self.shapes, DEVICE)

    def run(self) -> None:
        b = self.bank
        adam_step.triton_adam_step(
            self.table, self.chunks, self.hyper, self.steps, self.limits, b.amax, b.next_amax, b.scale, b.scale_inv, None, None, None, 1
        )
        b.transpose()

    def run_norm(self) -> None:
        norm.triton_norm(self.table, self.chunks, self.partials, self.counter, self.norm, self.clip, 1.0)

    def run_update(self) -> None:
        s = self.slots
        scale_update.triton_scale_update(
            s[0], s[1], s[2], s[0], s[0], 0, False, self.bank.amax, self.bank.next_amax, (self.table, self.hyper, self.steps, self.limits)
        )


def step_rows(bandwidth: float, sweep: bool) -> list[dict]:
    """Measurements of the optimizer step."""
    rows = []
    many = LLAMA * 16 + [(32768, 2048)]
    cases = {
        "113 tensors": many,
        "10 tensors": [(8192, 12800)] * 10,
        "1000 tensors": [(512, 2048)] * 1000,
    }
    for name, shapes in cases.items():
        step = Step(shapes)
        step.run_norm()
        launches.clear()
        step.run()
        count = sum(launches.values())
        ms = median_ms(step.run)
        rows.append(dict(what=f"step, {name}", ms=ms, launches=count, fraction=step.bytes / ms / 1e9 / bandwidth, bytes=step.bytes))
        ms = median_ms(step.run_norm)
        rows.append(dict(what=f"norm, {name}", ms=ms, launches=1, fraction=2 * step.elements / ms / 1e9 / bandwidth))
        ms = median_ms(step.run_update)
        rows.append(dict(what=f"scale update, {name}", ms=ms, launches=1, fraction=None))
        if sweep and name == "113 tensors":
            rows += sweep_step(step, bandwidth)
            plain = Step(shapes, with_fp8=False)
            ms = median_ms(plain.run, 10, 2)
            rows.append(dict(what="step without FP8 copies", ms=ms, launches=1, fraction=plain.bytes / ms / 1e9 / bandwidth))
            del plain
        del step
        torch.cuda.empty_cache()
    return rows


def sweep_step(step: Step, bandwidth: float) -> list[dict]:
    """Other tiles and register limits for the step, each checked to leave W8T the transpose of W8."""
    rows = [dict(what="transpose alone", ms=median_ms(step.bank.transpose), launches=1, fraction=None)]
    default = adam_step.TILE_ROWS, adam_step.WARPS, adam_step.MAX_REGISTERS
    for variant in [(2, 1, 72), (2, 1, 80), (2, 1, 96), (2, 1, 128), (4, 1, 128), (4, 1, 160), (4, 2, 80), (4, 2, 96), (8, 4, 80)]:
        adam_step.TILE_ROWS, adam_step.WARPS, adam_step.MAX_REGISTERS = variant
        ms = median_ms(step.run, 8, 2)
        right = all(torch.equal(w.w8.view(torch.uint8).t(), w.w8t.view(torch.uint8)) for w in step.bank.weights[:8])
        what = f"step rows, warps, registers {variant}{'' if right else ': WRONG'}"
        rows.append(dict(what=what, ms=ms, launches=1, fraction=step.bytes / ms / 1e9 / bandwidth))
    adam_step.TILE_ROWS, adam_step.WARPS, adam_step.MAX_REGISTERS = default
    default = norm.TILE_ROWS, norm.WARPS, norm.PROGRAMS
    for variant in [(32, 4, 8), (32, 4, 12), (32, 4, 15), (64, 4, 8), (16, 4, 12), (64, 8, 8), (32, 8, 8), (16, 2, 15)]:
        norm.TILE_ROWS, norm.WARPS, norm.PROGRAMS = variant
        ms = median_ms(step.run_norm, 8, 2)
        rows.append(dict(what=f"norm rows, warps, programs {variant}", ms=ms, launches=1, fraction=2 * step.elements / ms / 1e9 / bandwidth))
    norm.TILE_ROWS, norm.WARPS, norm.PROGRAMS = default
    return rows


def cast_rows(bandwidth: float, sweep: bool) -> list[dict]:
    """Measurements of the cast-transpose with a cold L2."""
    rows = []
    for shape in ((16384, 2048), (16384, 8192)):
        elements = shape[0] * shape[1]
        inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(max(2, (512 << 20) // (2 * elements)))]
        scale = torch.full((1,), 60.0, device=DEVICE)
        record = torch.zeros(1, device=DEVICE)
        scratch = torch.zeros(3, dtype=torch.int32, device=DEVICE)

        outgrown = torch.full((1,), 1e3, device=DEVICE)
        once = median_ms(lambda x=inputs[0], record=record, scratch=scratch, outgrown=outgrown: cast.triton_cast(x, formats.E4M3, outgrown, None, record, scratch, True, True))
        rows.append(dict(what=f"cast-transpose {list(shape)}, outgrown scale, warm L2", ms=once, launches=1, fraction=4 * elements / once / 1e9 / bandwidth))

        def many(inputs=inputs, scale=scale, record=record, scratch=scratch):
            record.zero_()
            for x in inputs:
                cast.triton_cast(x, formats.E4M3, scale, None, record, scratch, True, True)

        variants = [(cast.TILE_M, cast.TILE_K, cast.WARPS, cast.REGISTERS, cast.SPAN)]
        if sweep:
            variants += [(64, 128, 8, 64, 1), (64, 128, 8, 64, 3), (64, 128, 8, 64, 4), (32, 128, 4, 64, 2), (128, 128, 16, 64, 1), (128, 128, 16, 64, 2), (128, 64, 8, 64, 2)]
        default = variants[0]
        for variant in variants:
            cast.TILE_M, cast.TILE_K, cast.WARPS, cast.REGISTERS, cast.SPAN = variant
            many()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                many()
            ms = median_ms(graph.replay) / len(inputs)
            rows.append(dict(what=f"cast-transpose {list(shape)} tile {variant}", ms=ms, launches=1, fraction=4 * elements / ms / 1e9 / bandwidth))
            del graph
        cast.TILE_M, cast.TILE_K, cast.WARPS, cast.REGISTERS, cast.SPAN = default
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    rows = cast_rows(bandwidth, arguments.sweep) + step_rows(bandwidth, arguments.sweep)
    result = dict(
        command=" ".join(["python3", *sys.argv]), gpu=torch.cuda.get_device_name(0), torch=torch.__version__, triton=triton.__version__,
        python=platform.python_version(), copy_tb_s=bandwidth, rows=rows,
    )  # fmt: skip
    print(f"{result['gpu']}, torch {torch.__version__}, triton {triton.__version__}: copy {bandwidth:.2f} TB/s")
    for row in rows:
        share = "" if row["fraction"] is None else f"{row['fraction']:.2f} of copy"
        print(f"{row['what']:48s} {row['ms']:8.4f} ms  {row['launches']} launch  {share}")
    os.makedirs(arguments.out, exist_ok=True)
    with open(os.path.join(arguments.out, "kernels.json"), "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
