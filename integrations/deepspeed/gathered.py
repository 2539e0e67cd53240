"""FP8 layers under ZeRO 3: weights exist only while their layer runs, so they are cast inside the call, and nothing in FP8 is kept of them.

Forward and backward each see the weight gathered anew; both cast it with the scale of its own amax, which gives the same numbers. Between them a
layer keeps its FP8 input, as always, and one inverse scale.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ampplug import formats
from ampplug.config import Config
from ampplug.convert import share_slots
from ampplug.entry import warn_emulation
from ampplug.integrations.deepspeed.attachment import Attachment
from ampplug.kernels.triton_runtime import on_gpu
from ampplug.nn.linear import Linear, conv1d_class
from ampplug.nn.linear_function import LinearState, cast_weight
from ampplug.planning import Plan, is_conv1d, make_plan
from ampplug.scaling import ScaleBook
from ampplug.storage import Master, Weight, WeightBank


class GatheredOperand:
    """What `ampplug.nn.linear_function.Operand` is, for a weight that is not there between forward and backward."""

    def __init__(self, weight: Tensor, transposed: bool, power_of_two: bool):
        made = cast_weight(weight, transposed, power_of_two)
        self.scale_inv = made.scale_inv
        self._forward: Tensor | None = made.forward
        self._again = weight, transposed, power_of_two

    @property
    def forward(self) -> Tensor:
        """W8 [N16, K16]; handed out once, so that it is freed when the layer has used it."""
        made, self._forward = self._forward, None
        assert made is not None
        return made

    @property
    def backward(self) -> Tensor:
        """W8T [K16, N16], of the weight as it was gathered for the backward pass."""
        return cast_weight(*self._again).backward


class GatheredState(LinearState):
    """The state of a layer whose weight the engine gathers for it."""

    def operand(self, weight: Tensor, training: bool) -> Any:
        """W8 of `weight`, made now."""
        return GatheredOperand(weight, self.transposed, self.bank.power_of_two)


class Gathered(Attachment):
    """O1 under ZeRO 3."""

    count = elements = 0  # weights in FP8, and their elements

    def convert(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """As the base class. Parameters may be whole, or partitioned already by `deepspeed.zero.Init`."""
        config = replace(self.config, opt_level="O1", fuse=False)  # fused blocks keep their weights' operands for the backward pass
        plan = plan_by_shapes(module, config)
        if not plan.converted:
            reasons = sorted({layer.why for layer in plan.layers}) or ["it has no Linear layer"]
            warnings.warn(f"ampplug: no layer of the model computes in FP8: {'; '.join(reasons)}", stacklevel=2)
            return
        device = next(module.parameters()).device
        if not on_gpu(device):
            warn_emulation(device)
        self.bank = WeightBank([], device, config.power_of_two)
        if config.recipe == "delayed":
            names = [f"{name}.{slot}" if name else slot for name in plan.converted for slot in ("x", "dy")]
            limits = [formats.E4M3_MAX, formats.E5M2_MAX] * len(plan.converted)
            self.book = ScaleBook(names, limits, device, history=config.history, margin=config.margin, power_of_two=config.power_of_two)
        modules = dict(module.named_modules())
        for i, name in enumerate(plan.converted):
            layer = modules[name]
            transposed, nothing = is_conv1d(layer), torch.empty(0, device=device)
            weight = Weight(f"{name}.weight" if name else "weight", i, Master(layer.weight, None), *(nothing,) * 6)
            layer.__class__ = conv1d_class(type(layer)) if transposed else Linear
            layer._ampplug = GatheredState(self.book, 2 * i, 2 * i + 1, self.bank, weight, transposed)  # type: ignore[assignment]
            self.elements += shape_of(layer.weight).numel()
        share_slots(module, plan)
        self.count = len(plan.converted)

    def announcement(self, engine: Any) -> str:
        """As the base class."""
        total = sum(shape_of(p).numel() for p in engine.module.parameters())
        return (
            f"ampplug is active: opt_level {self.config.opt_level}, ZeRO stage 3, {self.count} weights with {self.elements:,} of {total:,} parameters in FP8, "
            f"recipe {self.config.recipe}"
        )


def shape_of(p: Tensor) -> torch.Size:
    """The shape of a parameter, gathered or not."""
    return torch.Size(getattr(p, "ds_shape", p.shape))


def plan_by_shapes(module: nn.Module, config: Config) -> Plan:
    """The plan of a model whose parameters may be partitioned: made on a twin whose parameters have their full shape, but no memory."""
    return make_plan(_hollow(module, {}, {}), None, config)


def _hollow(module: nn.Module, modules: dict[int, nn.Module], parameters: dict[int, nn.Parameter]) -> nn.Module:
    """A twin of `module` that shares everything with it but children and parameters; what is shared within it stays shared."""
    if id(module) in modules:
        return modules[id(module)]
    twin = modules[id(module)] = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for p in module._parameters.values():
        if p is not None and id(p) not in parameters:
            parameters[id(p)] = nn.Parameter(torch.empty(1, dtype=p.dtype, device=p.device).expand(shape_of(p)), requires_grad=p.requires_grad)
    twin._parameters = {name: None if p is None else parameters[id(p)] for name, p in module._parameters.items()}
    twin._modules = {name: None if child is None else _hollow(child, modules, parameters) for name, child in module._modules.items()}
    return twin
