"""`ampplug demo`: a byte-level GPT learns real text twice, in BF16 with AdamW and in FP8 with ampplug, from the same start on the same batches."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampplug.demo.model import GPT

PRESETS = ("small", "124m", "1b")
SIZES = ("width", "layers", "heads", "ffn", "sequence", "batch", "eval-bytes")


class DemoError(Exception):
    """Something the user can put right. Its text is one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options. Imports neither torch nor anything else that is slow."""
    parser.add_argument("--preset", default="small", help="small (CPU), 124m or 1b (CUDA); default small")
    parser.add_argument("--data", metavar="PATH", help="a file or folder to learn from; default: the Python standard library's own sources")
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="where curves, results and checkpoint go; default runs/demo")
    parser.add_argument("--seed", type=int, default=0, help="of the start and the batches; default 0")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run; default: the preset's")
    parser.add_argument("--opt-level", default="O2", help="ampplug's level: O0, O1 or O2; default O2")
    parser.add_argument("--recipe", default="delayed", help="FP8 scaling: delayed or current; default delayed")
    select = "layers that go FP8: auto (where it pays), all (also the small ones and the head), or patterns of names with commas between"
    parser.add_argument("--select", help=f"{select}; default: the preset's, blocks.* of small and auto of the others")
    parser.add_argument("--way", help="how steps run on a GPU: eager, graph (captured in a CUDA graph), compile, or both; default eager")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, exactly")
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    every = "steps between checkpoints; 0: none on the way. Ctrl-C and the end of each of the two runs write one in any case. Default: a quarter of the steps"
    parser.add_argument("--checkpoint-every", type=int, metavar="N", help=every)
    # sizes other than the presets', for tests and experiments
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)


def build_preset(preset: str) -> GPT:
    """The model of a preset, on torch's current default device."""
    from ampplug.demo.model import build

    return build(preset)


def run(arguments: argparse.Namespace) -> int:
    """The command. Exit code: 0 done, 2 something is wrong with the request, 130 interrupted (a checkpoint was written)."""
    from ampplug.demo.compare import demo

    try:
        return demo(arguments)
    except DemoError as error:
        print(f"ampplug demo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # outside of training, where there is nothing to save
        print("\ninterrupted", file=sys.stderr)
        return 130
