"""The feed-forward block of Llama and its kin, `down(silu(gate(x)) * up(x))`, with everything between its three FP8 layers in FP8.

A module is such a block if its own forward provably computes that (`nn/symbolic.py`), whatever its name. It keeps its parameters, children and
type (by a subclass made for it); where its children are not plain FP8 layers any more, or have hooks, its own forward runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from ampplug.nn.compiled import traced_swiglu
from ampplug.nn.fused import Fused, can_be_fused
from ampplug.nn.linear import Linear
from ampplug.nn.swiglu_function import fp8_swiglu
from ampplug.nn.symbolic import evaluate, has_hooks


class Names(NamedTuple):
    """Of a block's children. activation: None where the forward calls the function."""

    gate: str
    up: str
    down: str
    activation: str | None = None


# ---------------------------------------------------------------- finding blocks


def find_blocks(model: nn.Module, converted: set[int]) -> dict[str, Names]:
    """Name of a module -> its children's roles, for the modules of `model` that compute `down(silu(gate(x)) * up(x))`.

    converted: ids of the Linears that become FP8 layers; all three must, and have no bias. Nothing is run: models on the meta device will do.
    """
    found = {}
    for name, module in model.named_modules():
        if sum(id(m) in converted for m in module._modules.values()) >= 3:
            names = names_of(module)
            if names is not None and _fits([module._modules[n] for n in names[:3]], converted):
                found[name] = names
    return found


def names_of(module: nn.Module) -> Names | None:
    """Of a block's children; None for a module that is none."""
    found = evaluate(module, (nn.Linear, Linear))
    if found is None or found[1] != 5 or not can_be_fused(type(module)):
        return None
    match found[0]:
        case ("linear", down, ("mul", *parts)):
            for one, two in (parts, parts[::-1]):
                match (one, two):
                    case (("linear", up, ("input",)), ("silu", ("linear", gate, ("input",)))):
                        return Names(gate, up, down, _activation(module, {gate, up, down}))
    return None


def _activation(module: nn.Module, layers: set[str]) -> str | None:
    """Name of the child that the forward calls beside its layers."""
    called = [n for n in type(module).forward.__code__.co_names if n in module._modules and n not in layers]
    for name in called:
        kind = type(module.get_submodule(name))
        _silu[kind] = kind.forward
    return called[0] if called else None


_silu: dict[type, Any] = {}  # class of an activation -> the forward of it that is proved to be SiLU


def _fits(layers: list[Any], converted: set[int]) -> bool:
    gate, up, down = layers
    if len({id(m) for m in layers}) != 3 or any(id(m) not in converted or m.bias is not None or has_hooks(m) for m in layers):
        return False
    # rows of FP8 in between have no padding
    return gate.weight.shape == up.weight.shape == down.weight.t().shape and gate.weight.shape[0] % 16 == 0


# ---------------------------------------------------------------- the block


class SwiGLU(Fused):
    """Mixed into the block's own class."""

    _ampplug_names: Names
    _ampplug_find = staticmethod(names_of)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = self._ampplug_input(args, kwargs)
        layers = fusable(self, x)
        if layers is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        gate, up, down = layers
        if torch.compiler.is_compiling() and gate._ampplug.sink is not None:  # layers one by one know what to do with fp32 gradients
            return super().forward(x)  # type: ignore[misc]
        weights = gate._parameters["weight"], up._parameters["weight"], down._parameters["weight"]
        states = gate._ampplug, up._ampplug, down._ampplug
        run = traced_swiglu if torch.compiler.is_compiling() else fp8_swiglu
        return run(x, weights, states, gate.training)


def fusable(block: Any, x: Any) -> tuple[Any, Any, Any] | None:
    """The layers of a block, if it can run as one: three FP8 layers of ampplug's without bias or hooks, of one book, and an input for them.

    Asked at every call, since anything may have changed since the block was found: a child, its class, its hooks, a forward set on an object.
    """
    cls = type(block)
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES or cls._ampplug_base.forward is not cls._ampplug_forward:
        return None
    if _global_forward_hooks or _global_forward_pre_hooks or _global_backward_hooks or _global_backward_pre_hooks:
        return None
    children, (g, u, d, a) = block._modules, cls._ampplug_names
    layers = gate, up, down = children.get(g), children.get(u), children.get(d)
    for layer in layers if a is None else (*layers, children.get(a)):
        if layer is None:
            return None
        kind, own = type(layer), layer.__dict__  # attributes of a module cost more
        if kind is not Linear and _silu.get(kind, layer) is not kind.forward or "forward" in own:
            return None
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return None
    if not (type(gate) is type(up) is type(down) is Linear and gate.training is up.training is down.training):
        return None
    if gate._parameters["bias"] is not None or up._parameters["bias"] is not None or down._parameters["bias"] is not None:
        return None
    book = gate._ampplug.book
    if up._ampplug.book is not book or down._ampplug.book is not book or x.is_nested or x.shape[-1] != gate.in_features or x.numel() == 0:
        return None
    return None if torch._C._are_functorch_transforms_active() else layers


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_global_forward_hooks, _global_forward_pre_hooks = hooks_of_all._global_forward_hooks, hooks_of_all._global_forward_pre_hooks
_global_backward_hooks, _global_backward_pre_hooks = hooks_of_all._global_backward_hooks, hooks_of_all._global_backward_pre_hooks
