"""Carry a Plan out on a model: layers change their class in place, parameters keep their identity."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ampplug import formats
from ampplug.nn.fused import fuse, unfuse
from ampplug.nn.linear import Linear, LinearState, conv1d_class, is_converted
from ampplug.nn.norm import fuse_norm
from ampplug.nn.swiglu import SwiGLU
from ampplug.nn.te import fed_weights, is_te_module
from ampplug.nn.te_fed import feed_from, is_fed
from ampplug.nn.te_linear import become_te, converted_is_fed, drop_te, unwrap_root, wrap_root
from ampplug.nn.te_workspace import TEState
from ampplug.planning import Plan, is_conv1d, plain_modules
from ampplug.scaling import ScaleBook
from ampplug.siblings import find_siblings
from ampplug.storage import WeightBank


def split_parameters(model: nn.Module, extra: list[Tensor], plan: Plan) -> dict[int, Tensor]:
    """Give every parameter the dtype of the plan, in place. Returns id -> int16 remainder of those that were fp32 and are split now."""
    remainders: dict[int, Tensor] = {}
    everything = [*model.parameters(), *extra]
    for p, entry in zip(everything, plan.parameters, strict=True):
        if entry.after != entry.before:
            grad = p.grad
            high, low = formats.split_master(p.detach().contiguous())
            p.grad = None
            p.data = high
            if hasattr(p, "grad_dtype"):  # the user may still assign an fp32 gradient
                p.grad_dtype = None
            if grad is not None:
                p.grad = grad.to(entry.after)
            remainders[id(p)] = low
        elif entry.stepped and not p.is_contiguous():
            p.data = p.data.contiguous()
    return remainders


def convert_layers(model: nn.Module, plan: Plan, device: torch.device) -> tuple[WeightBank, ScaleBook | None]:
    """Turn the plan's layers into FP8 layers. W8 is made by the caller, once masters are in place."""
    config = plan.config
    modules = plain_modules(model)
    chosen = [(name, modules[name]) for name in plan.converted if not is_te_module(modules[name])]
    fed = [(name, modules[name]) for name in plan.converted if is_te_module(modules[name])]
    by_te = [(name, module) for name, module in chosen if name in {layer.name for layer in plan.layers if layer.te}]
    chosen = [pair for pair in chosen if pair not in by_te]
    weights: dict[int, tuple[str, Tensor]] = {}
    for name, module in [*chosen, *(by_te if converted_is_fed() else ())]:
        weight = module._parameters.get("weight")
        # weight_norm and the like compute the weight anew at each call: it is cast inside the call, and the bank's entry stays unused
        key = module.weight if weight is None else weight
        weights.setdefault(id(key), (f"{name}.weight" if name else "weight", key))
    for name, module in fed:
        for key, p in fed_weights(module):
            weights.setdefault(id(p), (f"{name}.{key}" if name else key, p))
    for _, p in weights.values():
        if not p.is_contiguous():
            p.data = p.data.contiguous()
    bank = WeightBank(list(weights.values()), device, config.power_of_two)
    index = {id(p): i for i, (_, p) in enumerate(weights.values())}
    book = None
    if config.recipe == "delayed":
        names = [f"{name}.{slot}" if name else slot for name, _ in chosen for slot in ("x", "dy")]
        book = ScaleBook(
            names,
            [formats.E4M3_MAX, formats.E5M2_MAX] * len(chosen),
            device,
            history=config.history,
            margin=config.margin,
            power_of_two=config.power_of_two,
        )
    for i, (_, module) in enumerate(chosen):
        transposed = is_conv1d(module)
        weight = module._parameters.get("weight")
        entry = bank.weights[index[id(module.weight if weight is None else weight)]]
        module.__class__ = conv1d_class(type(module)) if transposed else Linear
        module._ampplug = LinearState(book, 2 * i, 2 * i + 1, bank, entry, transposed, config.grad_dtype == "fp32")
    share_slots(model, plan)
    for _, module in fed:
        feed_from(module, bank, [bank.weights[index[id(p)]] for _, p in fed_weights(module)])
    for _, module in by_te:
        become_te(module, (config.recipe, config.margin, config.history))
        if converted_is_fed():
            module._ampplug = TEState(bank, {"weight": bank.weights[index[id(module.weight)]]})
    for name, children in plan.blocks.items():
        fuse(modules[name], SwiGLU, children)
    for name, norm in plan.norms.items():
        fuse_norm(modules[name], norm)
    for module in model.modules():
        # torch's fused inference path would use the FP8 layers' parameters behind their back; this is its documented off switch
        if isinstance(module, nn.TransformerEncoderLayer) and any(isinstance(m, Linear) for m in module.children()):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, Linear) for m in module.modules()):
            module.use_nested_tensor = False  # made for that path alone
    if by_te:
        wrap_root(model, config.recipe, config.margin, config.history)
    return bank, book


def share_slots(model: nn.Module, plan: Plan) -> None:
    """Give converted layers that are called with the same input one slot for it: one scale, and one cast where the input is really the same."""
    modules = plain_modules(model)
    layers = [(modules[layer.name], layer) for layer in plan.layers if layer.converts and not layer.te and not is_te_module(modules[layer.name])]
    widths = {id(module): layer.shape[0 if layer.kind == "Conv1D" else 1] for module, layer in layers}
    blocks = ([getattr(modules[name], child) for child in (children.gate, children.up)] for name, children in plan.blocks.items())
    for first, *others in (*find_siblings(model, widths), *blocks):
        for other in others:
            other._ampplug.join(first._ampplug.x_slot)


def restore_layers(model: nn.Module) -> None:
    """Inverse of `convert_layers`, in place: FP8 layers become the Linears that they were. Parameters keep their present values and dtypes."""
    unwrap_root(model)
    for module in model.modules():
        unfuse(module)
        drop_te(module)
        if is_converted(module):
            module.__class__ = type(module).__bases__[-1]  # FP8 layers derive from (..., the class that they were made of)
            del module._ampplug
        elif is_fed(module):
            module.__class__ = type(module).__bases__[-1]
            module._fp8_workspaces.clear()  # type: ignore[union-attr, operator]
            del module._ampplug
