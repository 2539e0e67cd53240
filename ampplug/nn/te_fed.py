"""Transformer Engine's modules that take their FP8 weights from ampplug: their classes, and a test of all that on the installed version."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import torch
from torch import nn

from ampplug.nn.te import _SUPPORTED, UNFIT, _weight_names, check_device, is_te_module, load_te, why_not_fed
from ampplug.nn.te_workspace import TEState, _is_over, feed
from ampplug.storage import Weight, WeightBank


def is_fed(module: nn.Module) -> bool:
    """True for a Transformer Engine module that takes its FP8 weights from ampplug."""
    return isinstance(module, _Fed)


def check_model(model: nn.Module, device: torch.device) -> None:
    """Every refusal of backend='te', before anything is changed."""
    te = load_te()
    check_device(device)
    found = [(name, m) for name, m in model.named_modules() if is_te_module(m)]
    if not found and "forward" in vars(model):  # the autocast is put around the class's
        raise ValueError(
            f"backend='te': the forward of this {type(model).__name__} was replaced on the object (torch.compile, accelerate, a profiler), which would leave "
            "its layers outside of Transformer Engine's autocast; call ampplug.initialize before that"
        )
    for name, module in found:
        if getattr(module, "primary_weights_in_fp8", False):
            raise ValueError(f"backend='te': {name!r} was built under te.quantized_model_init, its parameters are FP8 already; build it without")
        if getattr(module, "fuse_wgrad_accumulation", False):
            raise ValueError(f"backend='te': {name!r} has fuse_wgrad_accumulation=True, its gradients are not in .grad; build it without")
    bases = {type(module): None for _, module in found if not why_not_fed(module)} if found else {te.Linear: None}
    for base in bases:
        if differs := why_unfit(base, device):
            UNFIT[base] = differs


class _Fed:
    """What the fed classes share. A class and not a hook: it costs no more than the call, and modules with hooks cannot be graphed by te."""

    def forward(self, inp: Any, is_first_microbatch: bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the class below it; `is_first_microbatch` may be left out, given, or wrong: the weights in FP8 are always those of the last step."""
        return super().forward(inp, feed(self, inp, is_first_microbatch), *args, **kwargs)  # type: ignore[misc, arg-type]

    def __getstate__(self) -> dict:
        """Copies and pickles carry no FP8 weights of ours: they cast their own, as Transformer Engine does."""
        state = dict(self.__dict__)
        state["_ampplug"], state["_fp8_workspaces"] = None, {}
        return state

    def __deepcopy__(self, memo: dict) -> Any:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return new


_classes: dict[type, type] = {}


def fed_class(base: type) -> type:
    """The class of a fed module made of `base`, one of te.Linear, te.LayerNormLinear, te.LayerNormMLP."""
    if base not in _classes:
        about = {"__module__": __name__, "__doc__": f"A te.{base.__name__} whose FP8 weights come from ampplug's step."}
        _classes[base] = type(base.__name__, (_Fed, base), about)
    return _classes[base]


def feed_from(module: nn.Module, bank: WeightBank, weights: list[Weight]) -> None:
    """Make `module` take its FP8 weights from the bank; its class changes in place."""
    module.__class__ = fed_class(type(module))
    module._ampplug = TEState(  # type: ignore[assignment]
        bank, dict(zip(_weight_names(module), weights, strict=True))
    )


def __getattr__(name: str) -> type:
    """Unpickling a fed module in a fresh process asks for the class by name."""
    if name in _SUPPORTED:
        return fed_class(getattr(load_te(), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---------------------------------------------------------------- the test of it all

_tested: dict[tuple[type, torch.device], str] = {}


def why_unfit(base: type, device: torch.device) -> str:
    """"" where modules of this class use fed weights as expected, else what differs; warned about once. Draws no random number."""
    if (base, device) not in _tested:
        try:
            with torch.enable_grad(), _no_autocast(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
                differs = _try(base, device)
        except Exception as error:  # any private name may be gone
            differs = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        _tested[base, device] = differs
        if differs:
            warnings.warn(f"ampplug: te.{base.__name__} of this Transformer Engine casts its weights itself, in every call ({differs})", stacklevel=2)
    return _tested[base, device]


@contextlib.contextmanager
def _no_autocast(device: torch.device) -> Any:
    with torch.autocast(device.type, enabled=False):
        yield


def _try(base: type, device: torch.device) -> str:
    """Zero weights in a small module, others in the bank: what comes out, and the gradient, must be those of the bank's.

    Inputs are +1, -1, +1, ...; fed weights 0.5 in even columns and 0 in odd ones; a sum over 64 columns is 16. All numbers are powers of two.
    """
    from transformer_engine.common.recipe import Float8CurrentScaling

    te, mlp = load_te(), base.__name__ == "LayerNormMLP"
    module = base(64, 64, bias=False, params_dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        fed = [module._parameters[name] for name in _weight_names(module).values()]
        bank = WeightBank([(str(i), p) for i, p in enumerate(fed)], device)
        for p in fed:
            p.zero_()
            p[:, ::2] = 0.5
        bank.refresh()
        for p in fed:
            p.zero_()
        for w in bank.weights:
            w.mark_fresh()
    feed_from(module, bank, bank.weights)
    copies = [t.view(torch.uint8).clone() for w in bank.weights for t in (w.w8, w.w8t)]
    x = torch.ones(32, 64, device=device, dtype=torch.bfloat16)
    x[:, 1::2] = -1
    x.requires_grad_()
    for _ in range(2):
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            y = module(x)
        y.sum().backward()
    expected = 256.0 if mlp else 16.0
    if not bool(((y.float() - expected).abs() < 0.05 * expected).all()):
        return f"the output is {float(y.detach().float().mean()):g} for {expected:g}: the cached weight was not used"
    grad, expected = (x.grad, 2 * 32.0) if base.__name__ == "Linear" else (module.layer_norm_weight.grad, 2 * 32 * (512.0 if mlp else 32.0))
    assert grad is not None
    row = grad.float().reshape(-1, 64)[0]
    if not bool(((row[::2] - expected).abs() < 0.05 * expected).all() and (row[1::2].abs() < 0.05 * expected).all()):
        return f"the gradient is {float(row[0]):g} for {expected:g}: the cached transpose was not used"
    if not all(torch.equal(a, t.view(torch.uint8)) for a, t in zip(copies, (t for w in bank.weights for t in (w.w8, w.w8t)), strict=True)):
        return "the cached weight was written to"
    if not all(module._fp8_workspaces[k] is e and _is_over(e, w) for (k, e), w in zip(module._ampplug.made.items(), bank.weights, strict=True)):
        return "the cached weight was replaced"
    return ""
