"""The layers that compute in FP8: `nn.Linear` and Hugging Face's `Conv1D`, eager or as the compiler sees them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ampplug.nn import native
from ampplug.nn.compiled import traced_linear
from ampplug.nn.linear_function import LinearState, fp8_linear


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, state: LinearState, training: bool) -> Tensor:
    """The layer's computation, eager or as the compiler shall see it."""
    if torch.compiler.is_compiling():
        return traced_linear(x, weight, bias, state, training)
    return fp8_linear(x, weight, bias, state, training)


class _Converted:
    """What both converted layers share."""

    _ampplug: LinearState

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.weight, self.bias, self._ampplug, self.training)  # type: ignore[attr-defined]

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        weight = self.__dict__["_parameters"].get("weight")
        if weight is not None and self._ampplug.weight.param is not weight:
            self._ampplug.rebind(weight)


class Linear(_Converted, nn.Linear):
    """An `nn.Linear` that computes in FP8. Made by `ampplug.initialize`, in place: the module and its parameters stay the same objects."""

    def forward(self, input: Tensor) -> Tensor:  # named as nn.Linear's
        if torch.compiler.is_compiling():
            return traced_linear(input, self.weight, self.bias, self._ampplug, self.training)
        state = self._ampplug
        if state.native is not None and self.training:
            y = state.native(input, self._parameters)
            if y is not None:
                return y
        y = fp8_linear(input, self.weight, self.bias, state, self.training)
        if self.training and native.wanted(input):
            native.attach(state)
        return y


def is_converted(module: nn.Module) -> bool:
    """True for an FP8 layer."""
    return isinstance(module, _Converted)


def conv1d_class(base: type) -> type:
    """The FP8 version of Hugging Face's `Conv1D` class (weight [K, N])."""
    if base not in _conv1d:
        _conv1d[base] = type("Conv1D", (_Converted, base), {"__module__": __name__, "__doc__": "A Conv1D that computes in FP8."})
    return _conv1d[base]


_conv1d: dict[type, type] = {}


def __getattr__(name: str) -> type:
    """Unpickling a converted Conv1D in a fresh process asks for the class by name."""
    if name == "Conv1D":
        from transformers.pytorch_utils import Conv1D

        return conv1d_class(Conv1D)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
