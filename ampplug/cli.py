"""The `ampplug` command: `demo` and `plan`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import torch

from ampplug import demo
from ampplug.config import LEVELS, RECIPES


class UsageError(Exception):
    """A mistake of the caller's, told in one line."""


def _plan(arguments: argparse.Namespace) -> int:
    import ampplug
    from ampplug.demo.model import SHAPES, build

    if arguments.preset is not None and arguments.preset not in SHAPES:
        raise UsageError(f"--preset {arguments.preset!r} is not legal; legal are {', '.join(map(repr, SHAPES))}")
    if (arguments.model is None) == (arguments.preset is None):
        raise UsageError("give either a model as module:callable or --preset")
    with torch.device("meta"):
        model = build(arguments.preset) if arguments.preset else _load(arguments.model)
    print(ampplug.plan(model, opt_level=arguments.opt_level, recipe=arguments.recipe, select=arguments.select or "auto"))
    return 0


def _load(path: str) -> torch.nn.Module:
    """Call `module:callable`, which must return a module."""
    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise UsageError(f"model {path!r} is not of the form module:callable")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"model {path!r}: cannot import {name!r}: {error}") from error
    build = getattr(module, attribute, None)
    if not callable(build):
        raise UsageError(f"model {path!r}: {name!r} has no callable {attribute!r}")
    model = build()
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model {path!r} returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="ampplug", description="FP8 training for PyTorch")
    commands = parser.add_subparsers(required=True, metavar="command")
    p = commands.add_parser("demo", help="train a byte-level GPT on real text in BF16 and in FP8, and compare")
    demo.add_arguments(p)
    p.set_defaults(run=demo.run)
    p = commands.add_parser("plan", help="show what every layer and parameter of a model becomes, and why")
    p.add_argument("model", nargs="?", help="module:callable that returns the model; it is called on the meta device")
    p.add_argument("--preset", help="a model of the demo instead")
    p.add_argument("--opt-level", default="O2", choices=LEVELS)
    p.add_argument("--recipe", default="delayed", choices=RECIPES)
    p.add_argument("--select", nargs="*", help="name patterns of the layers to convert; default: where FP8 pays")
    p.set_defaults(run=_plan)
    arguments = parser.parse_args(argv)
    if getattr(arguments, "select", None) == ["all"]:
        arguments.select = "all"
    try:
        return arguments.run(arguments)
    except (UsageError, demo.DemoError) as error:
        print(f"ampplug: error: {error}", file=sys.stderr)
        return 2
