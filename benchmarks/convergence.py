"""Does FP8 learn as well as BF16? Paired runs of the demo's GPT: per seed, every mode has the same start and the same batches.

    python3 benchmarks/convergence.py --seeds 0,1,2 --modes bf16,o1,o2 --steps 2000 --out DIR --time-limit 500 --jobs 3
    python3 benchmarks/convergence.py --out DIR --summary

One JSON a run, written when it ends; a run whose JSON exists is skipped. At the time limit, on Ctrl-C and on SIGTERM every run under way writes a
checkpoint (DIR/checkpoints, about 1 GB of the 124m preset in BF16, gone when the run ends) and stops; the same command goes on from there. A run
that is killed loses what it did since its last one, a quarter of the steps at most. A single small GPU run is bound by the host: --jobs runs several
on the same GPU. Loss gaps do not depend on that; step times do, and are not reported.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from ampplug.demo import SIZES, DemoError, data, report  # noqa: E402
from ampplug.demo.checkpoint import NAME, load_checkpoint, same, save_checkpoint  # noqa: E402
from ampplug.demo.settings import MODES, Settings, make_settings  # noqa: E402
from ampplug.demo.train import Interrupted, Phase, check_config  # noqa: E402

EVALUATIONS = 5  # four on the way and one at the end
STOPPED = 3  # exit code of a run that left a checkpoint
GRACE = 30  # seconds that a run has to write it, before it is ended


class _Lines:
    """Progress as log lines."""

    def __init__(self, name: str, total: int):
        self.name, self.total, self.shown = name, total, 0

    def update(self, step: int, loss: float, rate: float) -> None:
        if step - self.shown >= self.total / 10 or step == self.total:
            self.shown = step
            print(f"{self.name}: step {step}/{self.total}, loss {loss:.4f}, {rate:.0f} tokens/s", flush=True)


def _settings(arguments: argparse.Namespace, seed: int) -> Settings:
    names = ("steps", "recipe", "select", "way", *(size.replace("-", "_") for size in SIZES))
    return make_settings(arguments.preset, arguments.device, seed=seed, evaluations=EVALUATIONS, **{name: getattr(arguments, name) for name in names})


def _corpus(arguments: argparse.Namespace) -> data.Corpus:
    corpus = data.load(arguments.data)
    if corpus.held_out.numel() < arguments.eval_bytes:
        raise DemoError(
            f"{corpus.name}: {corpus.held_out.numel()} bytes are held out, --eval-bytes wants {arguments.eval_bytes}; give a larger text with --data"
        )
    return corpus


def _file(out: Path, mode: str, seed: int) -> Path:
    return out / f"run-{mode}-seed{seed}.json"


def _folder(out: Path, mode: str, seed: int) -> Path:
    return out / "checkpoints" / f"{mode}-seed{seed}"


def _identity(settings: Settings, mode: str, fingerprint: str) -> dict[str, Any]:
    return {**settings.flat(), "mode": mode, "data": fingerprint}


def _stopper(deadline: float | None) -> Callable[[], bool]:
    """True from SIGTERM, SIGINT or the deadline (seconds since the epoch) on, and when the process that started this one is gone."""
    asked = False
    parent = os.getppid()

    def ask(*_: Any) -> None:
        nonlocal asked
        asked = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    return lambda: asked or os.getppid() != parent or (deadline is not None and time.time() > deadline)


def _one(arguments: argparse.Namespace, mode: str, seed: int) -> int:
    """Make one run in this process, or go on with it. Exit code."""
    stop = _stopper(arguments.deadline)
    began = time.perf_counter()
    out, name = Path(arguments.out), f"{mode} seed {seed}"
    corpus, settings = _corpus(arguments), _settings(arguments, seed)
    folder, identity, spent = _folder(out, mode, seed), _identity(settings, mode, corpus.fingerprint), 0.0
    phase = Phase(settings, mode)
    layers = sum(getattr(m, "_ampplug", None) is not None for m in phase.model.modules())
    if (folder / NAME).exists():
        saved = load_checkpoint(folder)
        same(folder / NAME, saved["settings"], identity)
        phase.load(saved["phase"])
        spent = saved["finished"]["seconds"]
        del saved
        print(f"{name}: goes on at step {phase.step}", flush=True)

    def save(state: dict[str, Any]) -> None:
        if state["step"]:  # of nothing a checkpoint is no use
            folder.mkdir(parents=True, exist_ok=True)
            done = {"seconds": spent + time.perf_counter() - began}
            save_checkpoint(folder, {"format": 1, "torch": str(torch.__version__), "settings": identity, "finished": done, "phase": state})

    try:
        result = phase.run(corpus, progress=_Lines(name, settings.steps), checkpoint=save, every=max(1, settings.steps // 4), stop=stop)  # type: ignore[arg-type]
    except Interrupted:
        print(f"{name}: stopped at step {phase.step}", flush=True)
        return STOPPED
    windows = data.evaluation_starts(corpus.held_out.numel(), settings.shape.sequence, settings.eval_bytes).numel()
    content = {
        "mode": mode,
        "seed": seed,
        "settings": asdict(settings),
        "corpus": {"name": corpus.name, "train_bytes": corpus.train.numel(), "held_out_bytes": corpus.held_out.numel(), "sha256": corpus.fingerprint},
        "evaluated_bytes": windows * settings.shape.sequence,
        "fp8_layers": layers,
        "environment": report.environment(settings.device),
        "seconds": spent + time.perf_counter() - began,
        "result": result,
    }
    report.write_json(_file(out, mode, seed), content)
    (folder / NAME).unlink(missing_ok=True)
    print(f"{name}: held-out loss {result['held_out_loss']:.5f} after {content['seconds']:.0f} s", flush=True)
    return 0


def _missing(arguments: argparse.Namespace, modes: list[str], seeds: list[int]) -> list[tuple[str, int]]:
    """Runs to make. Every error of the request is raised here, before there is a process, and files of other settings are no results of this one."""
    for mode in modes:
        if mode not in MODES:
            raise DemoError(f"mode {mode!r} is none of {', '.join(MODES)}")
        check_config(_settings(arguments, 0), mode)
    fingerprint = _corpus(arguments).fingerprint
    out, missing = Path(arguments.out), []
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"cannot write to {arguments.out!r}: {error.strerror}") from error
    for seed in seeds:
        for mode in modes:
            path, identity = _file(out, mode, seed), _identity(_settings(arguments, seed), mode, fingerprint)
            if path.exists():
                content = json.loads(path.read_text())
                sizes = content["settings"].pop("shape")
                same(path, {**sizes, **content["settings"], "mode": mode, "data": content["corpus"]["sha256"]}, identity)
            else:
                missing.append((mode, seed))
    return missing


def _environment(jobs: int) -> dict[str, str]:
    """Processes side by side share the cores, for torch's threads and for the compiler's."""
    share = str(max(1, (os.cpu_count() or 1) // jobs))
    return {"OMP_NUM_THREADS": share, "TORCHINDUCTOR_COMPILE_THREADS": share, **os.environ}


def _all(arguments: argparse.Namespace, argv: Sequence[str], began: float) -> int:
    """Make the missing runs, `jobs` at once, each in a process of its own, which sees to its own end. Exit code."""
    missing = _missing(arguments, arguments.modes.split(","), [int(seed) for seed in arguments.seeds.split(",")])
    print(f"{len(missing)} runs to make", flush=True)
    command = [sys.executable, __file__, *argv]
    limit = arguments.time_limit
    if limit is not None:
        command += ["--deadline", repr(began + limit)]
    running: list[tuple[subprocess.Popen[bytes], str, int]] = []
    left, failed = 0, 0
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the runs are told
    try:
        while missing or running:
            for entry in list(running):
                process, mode, seed = entry
                code = process.poll()
                if code is None:
                    continue
                running.remove(entry)
                if code == STOPPED:
                    left += 1
                elif code:
                    failed += 1
                    print(f"{mode} seed {seed} failed with exit code {code}", file=sys.stderr, flush=True)
            spent = time.time() - began
            if limit is not None and spent > limit + GRACE:
                for process, _, _ in running:  # in a compilation, say, that does not end
                    process.kill()
            if limit is not None and spent > 0.9 * limit:  # what would begin now would hardly come to its first step
                left += len(missing)
                missing = []
            while missing and len(running) < arguments.jobs:
                mode, seed = missing.pop(0)
                running.append((subprocess.Popen([*command, "--one", f"{mode}:{seed}"], env=_environment(arguments.jobs)), mode, seed))
            time.sleep(0.2)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on", file=sys.stderr, flush=True)
        return 130
    finally:  # Ctrl-C or an error here: no run is left behind, and each has time for its checkpoint
        for process, _, _ in running:
            process.terminate()
        for process, _, _ in running:
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        signal.signal(signal.SIGTERM, handler)
    if left:
        print(f"time limit: {left} runs are left; the same command goes on", flush=True)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done or stopped by the time limit, 1 a run failed, 2 something is wrong with the request, 130 interrupted."""
    began = time.time()
    argv = list(sys.argv[1:] if argv is None else argv)
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
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="at this time runs write a checkpoint and stop; none begins in the last tenth")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--summary", action="store_true", help="compare the runs that are there")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # mode:seed, in this process
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)  # of --one, in seconds since the epoch
    for name in SIZES:
        if name != "eval-bytes":
            parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        if arguments.summary:
            return _summary(Path(arguments.out))
        if arguments.jobs < 1:
            raise DemoError(f"jobs is {arguments.jobs}; it must be at least 1")
        if arguments.one:
            mode, _, seed = arguments.one.partition(":")
            return _one(arguments, mode, int(seed))
        return _all(arguments, argv, began)
    except DemoError as error:
        print(f"convergence: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
