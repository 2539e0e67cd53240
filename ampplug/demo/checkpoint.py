"""One file holds all that a resumed run needs: `checkpoint.pt`, whole or absent, and refused with a reason where it cannot be used."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from ampplug.demo import DemoError
from ampplug.demo.model import Shape

NAME = "checkpoint.pt"
_KEYS = {"format", "torch", "settings", "finished", "phase"}
_DERIVED = {*Shape.__dataclass_fields__, "batch", "steps", "learning_rate", "warmup", "eval_bytes", "evaluations", "select"}  # a preset's own


def save_checkpoint(out: Path, content: dict[str, Any]) -> None:
    """Write `checkpoint.pt` whole or not at all: an older one survives anything that happens meanwhile."""
    temporary = out / f"{NAME}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(out / NAME)
    except OSError as error:
        raise DemoError(f"cannot write the checkpoint to {str(out)!r}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(out: Path) -> dict[str, Any]:
    """The checkpoint of a folder, on the CPU. DemoError says which file, what is wrong with it, and what to do."""
    path = out / NAME
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(4)
    except FileNotFoundError as error:
        raise DemoError(f"nothing to resume: {str(path)!r} does not exist; start without --resume") from error
    except OSError as error:
        raise DemoError(f"cannot read the checkpoint {str(path)!r}: {error.strerror or error}") from error
    if not size:
        raise _unusable(path, "it is empty")
    if start != b"PK\x03\x04":
        raise _unusable(path, "it is no file of torch.save")
    if not zipfile.is_zipfile(path):
        raise _unusable(path, f"it is cut off, {size} bytes are left of it")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a dozen kinds for a damaged file, some with pages of advice
        raise _unusable(path, f"it is damaged ({(str(error) or type(error).__name__).splitlines()[0]})") from error
    if not isinstance(content, dict) or content.get("format") != 1 or not _KEYS <= content.keys():
        raise _unusable(path, "it was not written by this demo")
    return content


def _unusable(path: Path, why: str) -> DemoError:
    return DemoError(f"cannot resume from {str(path)!r}: {why}; delete it and start anew")


def same(path: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """DemoError naming every setting that differs; of another preset, not what follows from it."""
    names = [k for k in {**saved, **now} if saved.get(k) != now.get(k)]
    if "preset" in names:
        names = [k for k in names if k not in _DERIVED]
    if names:
        differing = "; ".join(f"{k} was {saved.get(k)!r} and is now {now.get(k)!r}" for k in names)
        raise DemoError(f"cannot go on with {str(path)!r}, it has other settings: {differing}; give those it was made with, or another --out")
