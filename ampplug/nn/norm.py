"""RMSNorms that cast what they make for the FP8 layers that read it (`nn/norm_function.py`): torch's own, and those of Llama's kind by proof.

In training, eager, on a GPU with FP8 units, norm, cast and transpose are one launch, and the backward pass is a kernel and a sum: with AMPPLUG_NORMS=1 in
the environment. Anywhere else the module's own forward runs; where FP8 is emulated the cast follows it, with the same numbers.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampplug.kernels.rms_norm import MAX_WIDTH
from ampplug.kernels.triton_runtime import on_gpu
from ampplug.nn.fused import Fused, can_be_fused
from ampplug.nn.fused import fuse as make_fused
from ampplug.nn.linear_function import Producer
from ampplug.nn.norm_function import cast_after, norm_by_kernel
from ampplug.nn.symbolic import Tree, Value, evaluate

# The one switch: without AMPPLUG_NORMS in the environment, whether norms on a GPU run by the kernel. Off until tests/gpu/test_norm_kernels.py has run on one.
DEFAULT = False
by_kernel = os.environ.get("AMPPLUG_NORMS", "1" if DEFAULT else "0") != "0"

# Below, a row is too short for the backward kernel to be worth more than torch's.
MIN_WIDTH = 512

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FORWARD = nn.RMSNorm.forward  # as it is now
_EPS = torch.finfo(torch.float32).eps  # of torch's norm without one, whatever the dtype: it computes in fp32


class NormNames(NamedTuple):
    """Of what a norm's forward reads."""

    weight: str
    eps: str
    early: bool  # x * r is rounded to x's dtype before the weight comes to it
    of_torch: bool  # nn.RMSNorm itself


def find_norms(model: nn.Module) -> dict[str, NormNames]:
    """Name of a module -> what its forward reads, for the RMSNorms over the last dimension with a weight in `model`. Nothing is run."""
    found = {}
    for name, module in model.named_modules():
        if not module._modules and module._parameters and (names := names_of(module)) is not None:
            found[name] = names
    return found


def names_of(module: nn.Module) -> NormNames | None:
    """None for a module that is not such a norm."""
    cls = type(module)
    if not can_be_fused(cls):
        return None
    names = None
    if cls is nn.RMSNorm:
        names = NormNames("weight", "eps", False, True) if cls.forward is _FORWARD else None
    elif (found := evaluate(module)) is not None and found[1] == 8:
        parts = dict(_leaves(found[0]))
        if set(parts) == {"parameter", "attribute"}:
            for early in (False, True):
                if found[0] == _expected(parts["parameter"], parts["attribute"], early):
                    names = NormNames(parts["parameter"], parts["attribute"], early, False)
    weight = None if names is None else module._parameters.get(names.weight)
    return None if weight is None or weight.dim() != 1 or weight.numel() % 16 or weight.dtype not in _DTYPES else names


def _leaves(tree: Tree) -> list[tuple[str, str]]:
    """(kind, name) of the parameters and attributes in an expression."""
    if tree[0] in ("parameter", "attribute"):
        return [tree]  # type: ignore[list-item]
    return [leaf for part in tree[1:] if isinstance(part, tuple) for leaf in _leaves(part)]


def _expected(weight: str, eps: str, early: bool) -> Tree:
    tape: list = []
    x, w, e = (Value(tree, tape) for tree in (("input",), ("parameter", weight), ("attribute", eps)))
    value = x.to(torch.float32)
    normed = value * (value.pow(2).mean(-1, keepdim=True) + e).rsqrt()
    return (w * normed.to(x.dtype) if early else (w * normed).to(x.dtype)).tree


class RMSNorm(Fused):
    """Mixed into the norm's own class."""

    _ampplug_names: NormNames
    _ampplug_find = staticmethod(names_of)
    _ampplug_producer: Producer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cls: Any = type(self)
        own = self.__dict__
        x = self._ampplug_input(args, kwargs)
        weight = own["_parameters"].get(cls._ampplug_names.weight)
        odd = type(x) is not Tensor or not own["training"] or torch.compiler.is_compiling() or type(weight) is not nn.Parameter
        if odd or cls._ampplug_base.forward is not cls._ampplug_forward or torch._C._are_functorch_transforms_active():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if x.is_nested or not x.numel() or (x.is_cuda and not by_kernel):
            return super().forward(x)  # type: ignore[misc]
        if not _suits(x, weight):
            return cast_after(super().forward(x), own["_ampplug_producer"])  # type: ignore[misc]
        _, eps, early, of_torch = cls._ampplug_names
        kind, out_dtype = x.device.type, torch.promote_types(x.dtype, weight.dtype) if early else x.dtype
        if of_torch and torch.is_autocast_enabled(kind):
            out_dtype = torch.float32
        eps = own[eps]
        return norm_by_kernel(x, weight, _EPS if eps is None else float(eps), early, out_dtype, own["_ampplug_producer"])


def _suits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes them. By nothing that may change from a pass to its recomputation: what is saved for backward must be the same."""
    k = weight.shape[0]
    if not on_gpu(x.device) or x.device != weight.device or x.shape[-1] != k:
        return False
    return MIN_WIDTH <= k <= MAX_WIDTH and x.dtype in _DTYPES and weight.dtype in _DTYPES and weight.is_contiguous()


def fuse_norm(module: nn.Module, names: NormNames) -> None:
    """Make a norm cast for the layers that read it, in place."""
    make_fused(module, RMSNorm, names)
    module._ampplug_producer = Producer()  # type: ignore[assignment]
