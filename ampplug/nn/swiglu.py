"""The feed-forward block of Llama and its kin, `down(silu(gate(x)) * up(x))`, with everything between its three FP8 layers in FP8.

A module is such a block if its own forward computes that, which is found by trying it out (`find_blocks`), not by its name. It keeps its parameters,
children and type (by a subclass made for it); where its children are not plain FP8 layers any more, or have hooks, its own forward runs.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampplug.nn.compiled import traced_swiglu
from ampplug.nn.linear import Linear
from ampplug.nn.swiglu_function import fp8_swiglu


class Names(NamedTuple):
    """Of a block's children."""

    gate: str
    up: str
    down: str


# ---------------------------------------------------------------- finding blocks


@torch.no_grad()
def find_blocks(model: nn.Module, converted: set[int]) -> dict[str, Names]:
    """Name of a module -> its children's roles, for the modules of `model` that compute `down(silu(gate(x)) * up(x))`.

    converted: ids of the Linears that become FP8 layers; all three must. A module with three fitting Linears and no other parameters or buffers is
    tried out with two rows of input, in evaluation and in training. One whose forward computes anything else, draws random numbers (dropout) or
    fails is none. Models on the meta device cannot be tried: none is found.
    """
    found = {}
    for name, module in model.named_modules():
        linears = [(n, m) for n, m in module.named_children() if isinstance(m, nn.Linear)]
        if len(linears) != 3 or any(id(m) not in converted or m.bias is not None or m.weight.is_meta for _, m in linears):
            continue
        if len(list(module.parameters())) != 3 or any(True for _ in module.buffers()) or any(_has_hooks(m) for _, m in linears):
            continue
        widths = {tuple(sorted(m.weight.shape)) for _, m in linears}
        # two take the block's input, one gives its output; rows of FP8 in between have no padding
        inputs = [m.in_features for _, m in linears]
        width = max(set(inputs), key=inputs.count)
        if len(widths) != 1 or linears[0][1].weight.numel() // width % 16:
            continue
        weight = linears[0][1].weight
        x = torch.sin(torch.arange(2 * width, device=weight.device).float()).view(2, -1).to(weight.dtype)
        y = _try(module, x)
        if y is None:
            continue
        for roles in permutations(linears):
            gate, up, down = (m for _, m in roles)
            if gate.weight.shape == up.weight.shape == down.weight.t().shape and _is_swiglu(x, y, gate, up, down):
                found[name] = Names(*(n for n, _ in roles))
                break
    return found


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def _try(module: nn.Module, x: Tensor) -> Tensor | None:
    """The module's output for x, if it is the same in evaluation and in training and needs no random numbers."""
    modes = [(m, m.training) for m in module.modules()]
    outputs = []
    cuda = x.device.type == "cuda"
    with torch.random.fork_rng([x.device] if cuda else []):
        try:
            for training in (False, True):
                before = torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if cuda else torch.empty(0)
                module.train(training)
                outputs.append(type(module).forward(module, x))
                after = torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if cuda else torch.empty(0)
                if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
                    return None
        except Exception:  # it wants other arguments
            return None
        finally:
            for m, mode in modes:
                m.training = mode
    first, second = outputs
    return first if isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second) else None


def _is_swiglu(x: Tensor, y: Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> bool:
    """Whether y is SwiGLU of x by these three, within the rounding of their dtype."""
    linear = nn.functional.linear
    wanted = linear(nn.functional.silu(linear(x, gate.weight)) * linear(x, up.weight), down.weight)
    tolerance = 1e-4 if x.dtype == torch.float32 else 3e-2
    return y.shape == wanted.shape and bool((y - wanted).float().norm() <= tolerance * wanted.float().norm())


# ---------------------------------------------------------------- the block


class _SwiGLU:
    """Mixed into the block's own class."""

    _ampplug_swiglu: Names

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        layers = [getattr(self, name) for name in self._ampplug_swiglu]
        if args or kwargs or not fusable(x, layers):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        gate, up, down = layers
        if torch.compiler.is_compiling() and gate._ampplug.sink is not None:  # layers one by one know what to do with fp32 gradients
            return super().forward(x)  # type: ignore[misc]
        weights, states = (gate.weight, up.weight, down.weight), (gate._ampplug, up._ampplug, down._ampplug)
        run = traced_swiglu if torch.compiler.is_compiling() else fp8_swiglu
        return run(x, weights, states, gate.training)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled and copied by way of the class it was made from."""
        return _remake, (type(self).__mro__[2],), self.__dict__


def fusable(x: Any, layers: list[nn.Module]) -> bool:
    """Whether the block can run as one: three FP8 layers of ampplug's without bias or hooks, of one book, and an input for them."""
    if not isinstance(x, Tensor) or x.is_nested or x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.numel() == 0:
        return False
    for layer in layers:
        if type(layer) is not Linear or layer.bias is not None or _has_hooks(layer):
            return False
        if layer.training != layers[0].training or layer._ampplug.book is not layers[0]._ampplug.book:  # type: ignore[union-attr]
            return False
    return x.shape[-1] == layers[0].in_features and not torch._C._are_functorch_transforms_active()


_classes: dict[type, type] = {}


def swiglu_class(base: type) -> type:
    """The subclass of `base` whose forward runs as one."""
    if base not in _classes:
        _classes[base] = type(base.__name__, (_SwiGLU, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    return _classes[base]


def _remake(base: type) -> nn.Module:
    return swiglu_class(base).__new__(swiglu_class(base))  # type: ignore[call-overload]


def fuse(module: nn.Module, names: Names) -> None:
    """Make a block run as one, in place."""
    module._ampplug_swiglu = names  # type: ignore[assignment]
    module.__class__ = swiglu_class(type(module))


def unfuse(module: nn.Module) -> None:
    """Inverse of `fuse`; any other module is left alone."""
    if isinstance(module, _SwiGLU):
        module.__class__ = type(module).__mro__[2]
        del module._ampplug_swiglu
