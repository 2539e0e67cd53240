"""The `ampplug` command: `demo`, `plan` and `audit`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ampplug
from ampplug import demo
from ampplug.config import LEVELS, RECIPES

# torch, and what trains, are imported by the command that needs them: `ampplug --help` answers at once
if TYPE_CHECKING:
    from torch import nn


class UsageError(Exception):
    """A mistake of the caller's, told in one line."""


def _first_line(error: BaseException) -> str:
    """The exception's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _plan(arguments: argparse.Namespace) -> int:
    if (arguments.model is None) == (arguments.preset is None):
        raise UsageError("give either a model as module:callable or --preset")
    if arguments.preset is not None and arguments.preset not in demo.PRESETS:
        raise UsageError(f"--preset {arguments.preset!r} is not legal; legal are {', '.join(map(repr, demo.PRESETS))}")
    select: str | list[str] = arguments.select or "auto"
    if len(select) == 1 and select[0] in ("auto", "all"):
        select = select[0]
    elif not isinstance(select, str) and (words := [s for s in select if s in ("auto", "all")]):
        raise UsageError(f"--select {words[0]} stands alone; it does not mix with other values")
    device = arguments.device or ("cpu" if arguments.preset == "small" else "cuda")
    model = _preset(arguments.preset) if arguments.preset else _load(arguments.model)
    try:
        plan = ampplug.plan(model, opt_level=arguments.opt_level, recipe=arguments.recipe, select=select, device=device)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"the model cannot be planned: {_first_line(error)}") from error
    print(plan)
    return 0


def _preset(name: str) -> nn.Module:
    """The demo's model, without memory for its parameters."""
    import torch

    with torch.device("meta"):
        return demo.build_preset(name)


def _import(path: str) -> tuple[str, str, Any]:
    """`module:callable` -> (module, name, the callable)."""
    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise UsageError(f"model {path!r} is not of the form module:callable")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"model {path!r}: cannot import {name!r}: {' '.join(str(error).split())}") from error
    except Exception as error:
        raise UsageError(f"model {path!r}: cannot import {name!r}: {_first_line(error)}") from error
    build = getattr(module, attribute, None)
    if not callable(build):
        raise UsageError(f"model {path!r}: {name!r} has no callable {attribute!r}")
    return name, attribute, build


def _load(path: str) -> nn.Module:
    """Call `module:callable`, which must return a module; on the meta device where it can be built there, since only shapes and types matter."""
    import torch

    _, attribute, build = _import(path)
    try:
        try:
            with torch.device("meta"):
                model = build()
        except Exception:  # it reads values, as `.item()` does: build it for real
            model = build()
    except Exception as error:
        raise UsageError(f"model {path!r}: {attribute}() raised {_first_line(error)}") from error
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model {path!r} returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


WAYS = ("eager", "graph", "compile", "both")


def _audit(arguments: argparse.Namespace) -> int:
    if (arguments.step is None) == (arguments.preset is None):
        raise UsageError("give either a step as module:callable or --preset")
    if arguments.preset is not None:
        if arguments.preset not in demo.PRESETS:
            raise UsageError(f"--preset {arguments.preset!r} is not legal; legal are {', '.join(map(repr, demo.PRESETS))}")
        from ampplug.demo.train import audit_parts

        step, model, optimizer, *batch = audit_parts(arguments.preset, arguments.opt_level, arguments.way)
    else:
        _, attribute, build = _import(arguments.step)
        try:
            parts = build()
        except Exception as error:
            raise UsageError(f"step {arguments.step!r}: {attribute}() raised {_first_line(error)}") from error
        if not isinstance(parts, tuple) or len(parts) < 3:
            raise UsageError(f"step {arguments.step!r} returned a {type(parts).__name__}; it must return (step, model, optimizer, *batch)")
        step, model, optimizer, *batch = parts
    try:
        print(ampplug.audit(step, *batch, model=model, optimizer=optimizer))
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ampplug", description="FP8 training for PyTorch")
    parser.add_argument("--version", action="version", version=f"ampplug {ampplug.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    p = commands.add_parser("demo", help="train a byte-level GPT on real text in BF16 and in FP8, and compare")
    demo.add_arguments(p)
    p.set_defaults(run=demo.run)
    p = commands.add_parser("plan", help="show what every layer and parameter of a model becomes, and why")
    p.add_argument("model", nargs="?", help="module:callable that returns the model; called without arguments, on the meta device where it can be")
    p.add_argument("--preset", help=f"a model of the demo instead: {', '.join(demo.PRESETS)}")
    p.add_argument("--opt-level", default="O2", choices=LEVELS, help="default O2")
    p.add_argument("--recipe", default="delayed", choices=RECIPES, help="default delayed")
    p.add_argument("--select", action="append", help="layers that go FP8: auto (default), all, or a name pattern; repeat it for more patterns")
    p.add_argument("--device", choices=("cuda", "cpu"), help="where it will train; on a GPU, small layers are left out (default cuda; of preset small, cpu)")
    p.set_defaults(run=_plan)
    p = commands.add_parser("audit", help="run a training step a few times and say where its time and memory go")
    p.add_argument("step", nargs="?", help="module:callable that returns (step, model, optimizer, *batch); called without arguments")
    p.add_argument("--preset", help=f"a model of the demo instead: {', '.join(demo.PRESETS)}")
    p.add_argument("--opt-level", default="O2", choices=LEVELS, help="of the preset; default O2")
    p.add_argument("--way", default="eager", choices=WAYS, help="how the preset's step runs: eager, captured in a CUDA graph, compiled, or both; default eager")
    p.set_defaults(run=_audit)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except (UsageError, demo.DemoError) as error:
        print(f"ampplug: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough, as in `ampplug plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
