"""All settings of ampplug in one dataclass, from keyword arguments or from a plain dict (a JSON key)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

LEVELS = ("O0", "O1", "O2")
BACKENDS = ("auto", "native", "te")
RECIPES = ("delayed", "current")
GRAD_DTYPES = (None, "fp32")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one `initialize` call. Unknown keys and illegal values raise ValueError or TypeError, naming what is legal."""

    opt_level: str = "O2"
    """O0: dry run, only the plan. O1: FP8 GEMMs, any optimizer. O2: also 8-bit moments and split masters (Adam, AdamW)."""

    backend: str = "auto"
    """Whose FP8 layers: "native" is ampplug's own; "te": Transformer Engine's, with FP8 weights from ampplug's step: modules of it in the model
    as they are, or, where there are none, nn.Linear turned into te.Linear. "auto" is "native"."""

    recipe: str = "delayed"
    """Scaling of activations and output gradients: "delayed" (from the amaxes of past steps) or "current" (from the tensor's own amax)."""

    select: str | Sequence[str] | Callable[[str, Any], bool] = "auto"
    """Which Linears convert: "auto" (where FP8 pays; not the lm_head), "all", shell patterns of module names, or a predicate(name, module)."""

    history: int = 16
    """Steps in the amax window of delayed scaling."""

    margin: int = 1
    """Headroom of delayed scaling, in powers of two: `scale = fp8_max / (amax * 2**margin)`. FP8 is a floating-point format, so headroom costs no
    precision, only the smallest of 17 (E4M3) or 32 (E5M2) octaves; without any, one cast in 17 outgrows its scale and has to be done twice."""

    power_of_two: bool = False
    """Round scales down to powers of two, as MS-AMP does."""

    fuse: bool = True
    """Run feed-forward blocks `down(silu(gate(x)) * up(x))` as one, the activation in FP8 from where it is made. A block is a module whose forward
    provably computes that and nothing else; where hooks or adapters come to it later, its own forward runs. See docs/speed.md."""

    grad_dtype: str | None = None
    """Dtype of gradients: None, the parameter's; "fp32" for all, for long accumulation: a bf16 sum of ones stops at 256. Weight gradients then leave
    their FP8 product in fp32. Where parameters are 16-bit it needs torch 2.10 or later, takes 2 bytes a parameter more, and DDP does not take it."""

    seed: int = 0
    """Seed of the stochastic rounding of the moments. Must be the same on all ranks."""

    def __post_init__(self) -> None:
        _one_of("opt_level", self.opt_level, LEVELS)
        _one_of("backend", self.backend, BACKENDS)
        _one_of("recipe", self.recipe, RECIPES)
        _one_of("grad_dtype", self.grad_dtype, GRAD_DTYPES)
        if isinstance(self.select, str):
            if self.select not in ("auto", "all"):
                raise ValueError(
                    f"select={self.select!r} is not legal{_nearest(self.select, ('auto', 'all'))}; legal are 'auto', 'all', a list of name patterns "
                    f"such as [{self.select!r}], or a predicate(name, module)"
                )
        elif isinstance(self.select, Sequence):
            if not self.select or not all(isinstance(s, str) for s in self.select):
                raise TypeError(f"select={self.select!r} is not legal; a list must hold at least one name pattern, and only strings")
        elif not callable(self.select):
            raise TypeError(f"select={self.select!r} is a {type(self.select).__name__}; legal are 'auto', 'all', a list of name patterns, or a predicate")
        _integer("history", self.history, 1, 1024)
        _integer("margin", self.margin, -16, 16)
        _integer("seed", self.seed, 0, 2**32 - 1)
        for key in ("power_of_two", "fuse"):
            value = getattr(self, key)
            if not isinstance(value, bool):
                raise TypeError(f"{key}={value!r} is a {type(value).__name__}; legal are True and False")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Config:
        """Config from a plain dict; the same object as from keyword arguments."""
        if not isinstance(settings, Mapping):
            raise TypeError(f"config is a {type(settings).__name__}; it must be a dict of settings or a Config")
        legal = [f.name for f in fields(cls)]
        for key in settings:
            if key not in legal:
                raise ValueError(f"config: unknown key {key!r}{_nearest(str(key), legal)}; legal keys are {', '.join(legal)}")
        return cls(**settings)


def _nearest(found: str, legal: Sequence[str | None]) -> str:
    lower = {name.lower(): name for name in legal if name is not None}
    match = difflib.get_close_matches(found.lower(), list(lower), 1, 0.5)
    return f" (did you mean {lower[match[0]]!r}?)" if match else ""


def _one_of(key: str, value: Any, legal: Sequence[str | None]) -> None:
    if value not in legal:
        hint = _nearest(value, legal) if isinstance(value, str) else f" (a {type(value).__name__})"
        raise ValueError(f"{key}={value!r} is not legal{hint}; legal values are {', '.join(map(repr, legal))}")


def _integer(key: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{key}={value!r} is a {type(value).__name__}; it must be an integer from {low} to {high}")
    if not low <= value <= high:
        raise ValueError(f"{key}={value!r} is out of range; it must be an integer from {low} to {high}")
