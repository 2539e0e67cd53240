"""The demo: one run in BF16 and one in FP8, and what they leave in a folder."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from ampplug.demo import DemoError, add_arguments, data, report
from ampplug.demo.checkpoint import NAME, load_checkpoint, same, save_checkpoint
from ampplug.demo.progress import Progress, ctrl_c, threads
from ampplug.demo.settings import MODES, Settings, make_settings
from ampplug.demo.train import Interrupted, Phase, check_config


def demo(arguments: argparse.Namespace) -> int:
    """`ampplug demo`: both phases, the table and the files. Exit code."""
    mode = arguments.opt_level.lower()
    if mode not in MODES[1:]:
        raise DemoError(f"opt-level {arguments.opt_level!r} is none of 'O0', 'O1', 'O2'")
    names = ("batch", "steps", "seed", "recipe", "select", "way", "width", "layers", "heads", "ffn", "sequence", "eval_bytes")
    settings = make_settings(arguments.preset, arguments.device, **{name: getattr(arguments, name) for name in names})
    check_config(settings, mode)  # initialize would refuse it only after the whole BF16 run
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
        same(out / NAME, saved["settings"], identity)
        if saved["torch"] != torch.__version__:
            print(f"note: the checkpoint is of torch {saved['torch']}, this is {torch.__version__}; the losses may differ in their last bits", file=sys.stderr)
        finished, current = saved["finished"], saved["phase"]
    elif (out / NAME).exists():
        print(f"note: starting anew; {out / NAME} will be replaced (--resume would go on from it)", file=sys.stderr)
    print(
        f"{settings.preset}: {settings.shape.layers} layers of width {settings.shape.width}, {settings.steps} steps of {settings.tokens} tokens on "
        f"{settings.device}; {corpus.train.numel() / 1e6:.1f} MB of {corpus.name} to learn, {corpus.held_out.numel() / 1e6:.1f} MB held out",
        flush=True,
    )

    def save(phase: dict[str, Any] | None) -> None:
        report.remove(out)  # an older run's, which this checkpoint would contradict
        save_checkpoint(out, {"format": 1, "torch": str(torch.__version__), "settings": identity, "finished": finished, "phase": phase})

    try:
        with ctrl_c() as stop, threads(settings):
            for name, phase_mode in (("bf16", "bf16"), ("ampplug", mode)):
                if name in finished:
                    continue
                phase = _begin(settings, phase_mode, current, out)
                current = None
                progress = Progress("BF16 AdamW" if name == "bf16" else f"ampplug {mode.upper()}", phase.step, settings.steps)
                try:
                    finished[name] = phase.run(corpus, progress=progress, checkpoint=save, every=every, stop=stop)
                finally:
                    progress.close()
                save(None)
    except Interrupted:
        print(f"\ninterrupted; the checkpoint is {out / NAME}. To go on:\n  {_command(arguments)} --resume", file=sys.stderr)
        return 130
    with threads(settings):  # the report names them
        report.finish(out, identity, finished, _command(arguments))
    return 0


def _begin(settings: Settings, mode: str, state: dict[str, Any] | None, out: Path) -> Phase:
    """A phase at its start, or where `state` left it."""
    phase = Phase(settings, mode)
    if state is not None:
        try:
            phase.load(state)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise DemoError(
                f"cannot resume from {str(out / NAME)!r}: its state does not fit this run ({(str(error) or type(error).__name__).splitlines()[0]}); "
                "delete it and start anew"
            ) from error
    return phase


def _command(arguments: argparse.Namespace) -> str:
    """The command line that these arguments came from, without --resume."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["ampplug", "demo"]
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(arguments, name)
        if name != "resume" and value != default:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
