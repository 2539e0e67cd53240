"""What a run is made of: presets, and the settings that its numbers depend on."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ampplug.demo import DemoError
from ampplug.demo.model import SHAPES, Shape

WAYS = ("eager", "graph", "compile", "both")
MODES = ("bf16", "o0", "o1", "o2")


@dataclass(frozen=True)
class Settings:
    """Everything that the numbers of a run depend on, beside the text."""

    preset: str
    shape: Shape
    batch: int  # sequences a step
    steps: int
    learning_rate: float
    warmup: int  # steps
    eval_bytes: int  # of held-out text
    evaluations: int  # evenly spread, the last at the end
    device: str
    seed: int = 0
    recipe: str = "delayed"
    select: str = "auto"  # "auto", "all", or patterns with commas between
    weight_decay: float = 0.1
    clip: float = 1.0
    way: str = "eager"  # how a step runs: eager, graph, compile or both

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.shape.sequence

    def evaluation_steps(self) -> set[int]:
        """After how many steps the held-out loss is measured."""
        return {self.steps * (i + 1) // self.evaluations for i in range(self.evaluations)} - {0}

    def flat(self) -> dict[str, Any]:
        """Name -> value, sizes included."""
        fields = asdict(self)
        return {**fields.pop("shape"), **fields}


# The GPU presets leave the choice of layers to ampplug; small ones would get none on a GPU, where FP8 does not pay at such sizes.
_PRESETS: dict[str, dict[str, Any]] = {
    "small": dict(batch=8, steps=250, learning_rate=3e-3, warmup=25, eval_bytes=64 * 1024, evaluations=2, select="blocks.*"),
    "124m": dict(batch=16, steps=2000, learning_rate=6e-4, warmup=100, eval_bytes=1 << 20, evaluations=4, select="auto"),
    "1b": dict(batch=8, steps=1000, learning_rate=3e-4, warmup=100, eval_bytes=1 << 20, evaluations=4, select="auto"),
}
_NEEDS_CUDA = ("124m", "1b")


def make_settings(preset: str, device: str | None = None, **given: Any) -> Settings:
    """A preset with some values replaced; None leaves a value as it is. DemoError names what cannot be."""
    if preset not in SHAPES:
        near = difflib.get_close_matches(preset, SHAPES, n=1, cutoff=0.1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DemoError(f"preset {preset!r} is none of {', '.join(map(repr, SHAPES))}{hint}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise DemoError(f"device {device!r} is none that torch knows; legal are 'cpu' and 'cuda'") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise DemoError(f"device {device!r}: torch {torch.__version__} finds no CUDA device here")
    if kind not in ("cpu", "cuda"):
        raise DemoError(f"device {device!r}: legal are 'cpu' and 'cuda'")
    changed = {k: v for k, v in given.items() if v is not None}
    sizes = {k: changed.pop(k) for k in list(changed) if k in Shape.__dataclass_fields__}
    if kind != "cuda" and preset in _NEEDS_CUDA and not sizes:
        raise DemoError(f"preset {preset!r} needs a CUDA device, and the device is {device!r}; --preset small runs on a CPU")
    values = {**_PRESETS[preset], **changed}
    if "steps" in changed:  # a short run has a short warm-up
        values["warmup"] = min(values["warmup"], max(1, values["steps"] // 10))
    shape = Shape(**{**asdict(SHAPES[preset]), **sizes})
    settings = Settings(preset=preset, shape=shape, device=device, **values)
    for name in ("steps", "batch", "eval_bytes", "evaluations", *Shape.__dataclass_fields__):
        if settings.flat()[name] < 1:
            raise DemoError(f"{name.replace('_', '-')} is {settings.flat()[name]}; it must be at least 1")
    if settings.way not in WAYS:
        raise DemoError(f"way {settings.way!r} is none of {', '.join(map(repr, WAYS))}")
    if shape.width % (2 * shape.heads):
        raise DemoError(f"width is {shape.width}; it must be a multiple of twice the {shape.heads} heads")
    return settings
