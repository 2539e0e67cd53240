"""Does FP8 learn as well as BF16? Paired runs of the demo's GPT: per seed, every mode has the same start and the same batches.

    python3 benchmarks/convergence.py --seeds 0,1,2 --modes bf16,o1,o2 --steps 2000 --out DIR --time-limit 500 --jobs 3
    python3 benchmarks/convergence.py --out DIR --summary

One JSON a run. A run whose JSON exists is skipped, so that the whole can be made in several goes. A single small GPU run is bound by the host:
--jobs runs several on the same GPU. Loss gaps do not depend on that; step times do, and are not reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ampplug.demo import DemoError, data, report  # noqa: E402
from ampplug.demo.train import MODES, Phase, Settings, make_settings  # noqa: E402

EVALUATIONS = 5  # four on the way and one at the end


class _Lines:
    """Progress as log lines."""

    def __init__(self, name: str, total: int):
        self.name, self.total, self.shown = name, total, 0

    def update(self, step: int, loss: float, rate: float) -> None:
        if step - self.shown >= self.total / 10 or step == self.total:
            self.shown = step
            print(f"{self.name}: step {step}/{self.total}, loss {loss:.4f}, {rate:.0f} tokens/s", flush=True)


def _settings(arguments: argparse.Namespace, seed: int) -> Settings:
    sizes = {"eval_bytes": arguments.eval_bytes, "steps": arguments.steps, "recipe": arguments.recipe, "select": arguments.select, "way": arguments.way}
    return make_settings(arguments.preset, arguments.device, seed=seed, evaluations=EVALUATIONS, **sizes)


def _corpus(arguments: argparse.Namespace) -> data.Corpus:
    corpus = data.load(arguments.data)
    if corpus.held_out.numel() < arguments.eval_bytes:
        raise DemoError(
            f"{corpus.name}: {corpus.held_out.numel()} bytes are held out, --eval-bytes wants {arguments.eval_bytes}; give a larger text with --data"
        )
    return corpus


def _file(out: Path, mode: str, seed: int) -> Path:
    return out / f"run-{mode}-seed{seed}.json"


def _one(arguments: argparse.Namespace, mode: str, seed: int) -> None:
    """Make one run in this process."""
    began = time.perf_counter()
    corpus, settings = _corpus(arguments), _settings(arguments, seed)
    phase = Phase(settings, mode)
    layers = sum(getattr(m, "_ampplug", None) is not None for m in phase.model.modules())
    result = phase.run(corpus, progress=_Lines(f"{mode} seed {seed}", settings.steps))  # type: ignore[arg-type]
    windows = data.evaluation_starts(corpus.held_out.numel(), settings.shape.sequence, settings.eval_bytes).numel()
    content = {
        "mode": mode,
        "seed": seed,
        "settings": asdict(settings),
        "corpus": {"name": corpus.name, "train_bytes": corpus.train.numel(), "held_out_bytes": corpus.held_out.numel(), "sha256": corpus.fingerprint},
        "evaluated_bytes": windows * settings.shape.sequence,
        "fp8_layers": layers,
        "environment": report.environment(settings.device),
        "seconds": time.perf_counter() - began,
        "result": result,
    }
    report.write_json(_file(Path(arguments.out), mode, seed), content)
    print(f"{mode} seed {seed}: held-out loss {result['held_out_loss']:.5f} after {content['seconds']:.0f} s", flush=True)


def _all(arguments: argparse.Namespace, modes: list[str], seeds: list[int]) -> int:
    """Make the missing runs, `jobs` at once, each in a process of its own."""
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    missing = [(mode, seed) for seed in seeds for mode in modes if not _file(out, mode, seed).exists()]
    print(f"{len(missing)} of {len(seeds) * len(modes)} runs to make", flush=True)
    began = time.monotonic()
    running: list[tuple[subprocess.Popen[bytes], str, int]] = []
    failed = 0
    try:
        while missing or running:
            for entry in list(running):
                code = entry[0].poll()
                if code is not None:
                    running.remove(entry)
                    if code:
                        failed += 1
                        print(f"{entry[1]} seed {entry[2]} failed with exit code {code}", file=sys.stderr)
            late = arguments.time_limit is not None and time.monotonic() - began > arguments.time_limit
            if late and missing:
                print(f"time limit: {len(missing)} runs are left for another go", flush=True)
                missing = []
            while missing and len(running) < arguments.jobs:
                mode, seed = missing.pop(0)
                command = [sys.executable, __file__, *sys.argv[1:], "--one", f"{mode}:{seed}"]
                running.append((subprocess.Popen(command), mode, seed))
            time.sleep(0.2)
    finally:  # Ctrl-C or an error here: no run is left behind
        for process, _, _ in running:
            process.terminate()
            process.wait()
    return 1 if failed else 0


def _load(out: Path) -> dict[int, dict[str, Any]]:
    """Seed -> mode -> content of the run's JSON. DemoError where runs that are compared differ in more than the mode."""
    runs: dict[int, dict[str, Any]] = {}
    for path in sorted(out.glob("run-*.json")):
        content = json.loads(path.read_text())
        runs.setdefault(content["seed"], {})[content["mode"]] = content
    if not runs:
        raise DemoError(f"no run-*.json in {str(out)!r}")
    alike = {json.dumps([{**r["settings"], "seed": 0}, r["corpus"]["sha256"]], sort_keys=True) for by_mode in runs.values() for r in by_mode.values()}
    if len(alike) > 1:
        raise DemoError(f"the runs in {str(out)!r} have {len(alike)} different settings or texts; compare like with like")
    return dict(sorted(runs.items()))


def _summary(out: Path) -> int:
    """Print the table; write summary.json, summary.md and convergence.png."""
    runs = _load(out)
    rows, gaps = [], {mode: [] for mode in MODES if mode != "bf16"}  # type: dict[str, list[float]]
    for seed, by_mode in runs.items():
        base = by_mode.get("bf16")
        for mode in MODES:
            if mode not in by_mode:
                continue
            r = by_mode[mode]["result"]
            gap = None
            if mode != "bf16" and base is not None:
                gap = report.relative_gap(r["held_out_loss"], base["result"]["held_out_loss"])
                gaps[mode].append(gap)
            rows.append({"seed": seed, "mode": mode, "held_out_loss": r["held_out_loss"], "train_loss": r["train_loss"], "relative_gap_percent": gap})
    every = [g for per_mode in gaps.values() for g in per_mode]
    first = next(iter(next(iter(runs.values())).values()))
    summary = {
        "runs": rows,
        "mean_gap_percent": {mode: statistics.fmean(g) for mode, g in gaps.items() if g},
        "mean_gap_percent_all": statistics.fmean(every) if every else None,
        "largest_gap_percent": max(every, key=abs) if every else None,
        "settings": {**first["settings"], "seed": None},
        "corpus": first["corpus"],
        "evaluated_bytes": first["evaluated_bytes"],
        "fp8_layers": {mode: r["fp8_layers"] for by_mode in runs.values() for mode, r in by_mode.items()},
        "environment": first["environment"],
    }
    s = first["settings"]
    tokens = s["batch"] * s["shape"]["sequence"]
    lines = [
        f"# Convergence: preset {s['preset']}, {s['steps']} steps of {tokens} tokens",
        "",
        f"Byte-level GPT on {first['corpus']['name']}; held-out loss (nats a byte) on {first['evaluated_bytes']} bytes of files that are not trained on. "
        f"FP8 layers: {', '.join(f'{n} at {m.upper()}' for m, n in summary['fp8_layers'].items() if m != 'bf16')}; recipe {s['recipe']}, "
        f"select {s['select']}. {first['environment']['device']}, torch {first['environment']['torch']}.",
        "",
        "| seed | mode | held-out loss | gap to BF16 | train loss, last 20 steps |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        gap = "" if row["relative_gap_percent"] is None else f"{row['relative_gap_percent']:+.3f} %"
        lines.append(f"| {row['seed']} | {row['mode']} | {row['held_out_loss']:.5f} | {gap} | {row['train_loss']:.5f} |")
    lines.append("")
    lines += [f"Mean gap {mode.upper()}: {gap:+.3f} %" for mode, gap in summary["mean_gap_percent"].items()]
    if every:
        lines.append(f"Mean gap of all: {summary['mean_gap_percent_all']:+.3f} %, largest {summary['largest_gap_percent']:+.3f} %")
    text = "\n".join(lines)
    print(text)
    (out / "summary.md").write_text(text + "\n")
    report.write_json(out / "summary.json", summary)
    curves = {f"{mode} seed {seed}": r["result"] for seed, by_mode in runs.items() for mode, r in by_mode.items()}
    report.plot(out / "convergence.png", curves, f"preset {s['preset']}: training and held-out loss")
    return 0


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--modes", default="bf16,o1,o2", help="of bf16, o0, o1, o2")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--data", metavar="PATH", help="default: the Python standard library's sources")
    parser.add_argument("--eval-bytes", type=int, default=1 << 20, help="held-out bytes of each evaluation; default 1 MiB")
    parser.add_argument("--recipe", default="delayed")
    parser.add_argument("--select", default="blocks.*", help="which layers go FP8; auto leaves 768 x 768 ones out; auto, all, or patterns with commas between, as blocks.*")
    parser.add_argument("--way", default="eager", help="how steps run: eager, graph, compile or both")
    parser.add_argument("--device")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="no new run starts later than this")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--summary", action="store_true", help="compare the runs that are there")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # mode:seed, in this process
    arguments = parser.parse_args()
    try:
        if arguments.summary:
            return _summary(Path(arguments.out))
        if arguments.one:
            mode, _, seed = arguments.one.partition(":")
            _one(arguments, mode, int(seed))
            return 0
        modes = arguments.modes.split(",")
        for mode in modes:
            if mode not in MODES:
                raise DemoError(f"mode {mode!r} is none of {', '.join(MODES)}")
        _settings(arguments, 0)  # errors come before processes do
        _corpus(arguments)
        return _all(arguments, modes, [int(seed) for seed in arguments.seeds.split(",")])
    except DemoError as error:
        print(f"convergence: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
