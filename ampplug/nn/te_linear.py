"""`nn.Linear` turned into Transformer Engine's Linear, in place, and its autocast around the root of a model that was converted.

A converted layer is both an `nn.Linear` and a `te.Linear`. It has the attributes of a `te.Linear` of its size, made on the meta device (no memory, no random
numbers), and keeps parameters, hooks and names of its own. Weights in FP8 come from the step, as in a user's own modules (`te_workspace.feed`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ampplug.nn.linear import _Converted
from ampplug.nn.te import UNFIT, load_te
from ampplug.nn.te_workspace import feed

MULTIPLE = 16  # Transformer Engine's own demand is 8 and 16 by direction; rows are an inner dimension of the weight's gradient


def why_not_te(module: nn.Module) -> str:
    """Why this Linear cannot be Transformer Engine's; "" if it can."""
    if type(module) is not nn.Linear:
        return f"Transformer Engine has no {type(module).__name__}"
    weight, bias = module._parameters.get("weight"), module.bias
    if weight is None:
        return "its weight is computed anew in each call"
    if any(size % MULTIPLE for size in weight.shape):
        return f"Transformer Engine wants multiples of {MULTIPLE}"
    if weight.dtype not in (torch.float32, torch.bfloat16) or (bias is not None and bias.dtype != weight.dtype):
        return "Transformer Engine wants weight and bias both in fp32, or both in bf16"
    return ""


def converted_is_fed() -> bool:
    """Whether te.Linear as installed takes weights from its cache as expected (`te.check_model` has tried)."""
    return not any(base.__name__ == "Linear" for base in UNFIT)


class _Computed(_Converted):
    """What is ours in a layer that Transformer Engine computes."""

    _te_attributes: frozenset[str]

    # Transformer Engine's is a pickle of its scales; a converted model's state_dict is that of the plain model
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state
    reset_parameters = nn.Linear.reset_parameters
    extra_repr = nn.Linear.extra_repr

    def forward(self: Any, input: Tensor) -> Tensor:
        """x [..., K] -> [..., N], of x's dtype (under torch.autocast, of its). Any number of rows."""
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as manager

        rows = input.numel() // max(input.shape[-1], 1)
        if rows and not manager.is_fp8_enabled() and torch._C._current_graph_task_id() != -1:  # recomputation in a backward pass, which the root does not see
            return _recompute(self, input)
        if not rows or not manager.is_fp8_enabled():  # called by itself, not through the root: as the plain layer
            return nn.functional.linear(input, self.weight.to(input.dtype), None if self.bias is None else self.bias.to(input.dtype))
        weight, shape, dtype, missing = self.weight, input.shape, input.dtype, -rows % MULTIPLE
        amp = torch.is_autocast_enabled("cuda")
        x = input if amp or dtype == weight.dtype else input.to(weight.dtype)
        if missing:
            x = nn.functional.pad(x.reshape(rows, shape[-1]), (0, 0, 0, missing))
        y = super(_Converted, self).forward(x, feed(self, x, None))  # type: ignore[misc]
        if missing:
            y = y[:rows].reshape(*shape[:-1], y.shape[-1])
        return y if amp else y.to(dtype)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        state_dict.pop(prefix + "_extra_state", None)  # of a model that was built of te.Linear
        nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)  # type: ignore[arg-type]

    def __getstate__(self) -> dict:
        """Without Transformer Engine's attributes, which hold closures and places in its global buffers, and without our FP8 weights: a copy begins anew."""
        return {**{k: v for k, v in self.__dict__.items() if k not in self._te_attributes}, "_ampplug": None}

    def __setstate__(self, state: dict) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[arg-type]
        _take_attributes(self)  # type: ignore[arg-type]


@functools.cache
def te_linear_class(base: Any) -> type:
    """The class of layers that `base`, te.Linear, computes."""
    about = {"__module__": __name__, "__qualname__": "TELinear", "__doc__": "An nn.Linear that Transformer Engine computes."}
    return type("TELinear", (_Computed, base, nn.Linear), about)


def _take_attributes(module: nn.Module) -> None:
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    made = load_te().Linear(weight.shape[1], weight.shape[0], bias=bias is not None, params_dtype=weight.dtype, device="meta")
    new = {k: v for k, v in vars(made).items() if k not in vars(module) and k not in ("weight", "bias")}
    vars(module).update(new)
    module._te_attributes = frozenset(new)  # type: ignore[assignment]


def _recompute(module: Any, input: Tensor) -> Tensor:
    """A layer's forward for torch.utils.checkpoint. With delayed scaling each autocast that ends moves the histories of all layers on, so none is opened."""
    if module._te_recipe[0] == "delayed":
        raise RuntimeError(
            "ampplug: torch.utils.checkpoint recomputes a layer of Transformer Engine outside of its autocast, with other scales than the first pass; "
            "use recipe='current', or transformer_engine.pytorch.checkpoint, which restores both"
        )
    from transformer_engine.pytorch import autocast

    with autocast(enabled=True, recipe=_recipe(*module._te_recipe)):
        return module.forward(input)


def become_te(module: nn.Module, recipe: tuple[str, int, int]) -> None:
    """Turn an `nn.Linear` into Transformer Engine's, in place; the caller says where its FP8 weight comes from (`_ampplug`: a TEState or None).

    recipe: name, margin and history.
    """
    _take_attributes(module)
    module._te_recipe = recipe  # type: ignore[assignment]
    module.__class__ = te_linear_class(load_te().Linear)
    module._ampplug = None  # type: ignore[assignment]


def drop_te(module: nn.Module) -> None:
    """Take Transformer Engine's attributes away before the layer is an `nn.Linear` again; nothing for others."""
    vars(module).pop("_te_recipe", None)
    for name in vars(module).pop("_te_attributes", ()):
        vars(module).pop(name, None)


# ---------------------------------------------------------------- autocast around the root


class _Root:
    """A root whose forward runs in Transformer Engine's autocast, unless the caller has opened one."""

    _te_recipe: tuple[str, int, int]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        state = getattr(self, "__getstate__", lambda: self.__dict__)()  # object has one from Python 3.11 on
        return _new_root, (type(self).__bases__[-1],), dict(state)


def _new_root(base: type) -> Any:
    return object.__new__(root_class(base))


@functools.cache
def root_class(base: Any) -> type:
    """`base` with its forward in Transformer Engine's autocast. A class and no hook: those do not leave the autocast on KeyboardInterrupt."""

    @functools.wraps(base.forward)  # trainers read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from transformer_engine.pytorch import autocast
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as manager

        if manager.is_fp8_enabled():
            return base.forward(self, *args, **kwargs)
        with autocast(enabled=True, recipe=_recipe(*self._te_recipe)):
            return base.forward(self, *args, **kwargs)

    about = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__, "forward": forward}
    return type(base.__name__, (_Root, base), about)


@functools.cache
def _recipe(name: str, margin: int, history: int) -> Any:
    """Transformer Engine's recipe of ours, one object: E4M3 forward, E5M2 for output gradients."""
    from transformer_engine.common import recipe as recipes

    if name == "delayed":
        return recipes.DelayedScaling(margin=margin, fp8_format=recipes.Format.HYBRID, amax_history_len=history, amax_compute_algo="max")
    return recipes.Float8CurrentScaling(fp8_format=recipes.Format.HYBRID)


def wrap_root(model: nn.Module, recipe: str, margin: int, history: int) -> None:
    """Open Transformer Engine's autocast around each forward of `model`, in place."""
    model._te_recipe = (recipe, margin, history)  # type: ignore[assignment]
    model.__class__ = root_class(type(model))  # type: ignore[arg-type]


def unwrap_root(model: nn.Module) -> None:
    """Inverse of `wrap_root`; nothing for others."""
    if isinstance(model, _Root):
        model.__class__ = type(model).__bases__[-1]
        del model._te_recipe


def __getattr__(name: str) -> type:
    """Unpickling a converted layer in a fresh process asks for the class by name."""
    if name == "TELinear":
        return te_linear_class(load_te().Linear)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
