"""`initialize`: check everything, plan, convert, wire. The one way through."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampplug.checkpoint import add_scales_to_state, fill_remainders_on_load
from ampplug.config import Config
from ampplug.convert import convert_layers, split_parameters
from ampplug.distributed.replicas import Replicas
from ampplug.kernels.triton_runtime import on_gpu
from ampplug.nn.fp32_gradient import round_for_step, supported, widen
from ampplug.nn.linear import is_converted
from ampplug.nn.te_fed import check_model
from ampplug.optim.adamw import LOW_BIT
from ampplug.optim.base import LowBitOptimizer, check_group, check_moments, check_parameter
from ampplug.planning import Plan, make_plan
from ampplug.scaling import ScaleBook
from ampplug.storage import WeightBank

logger = logging.getLogger("ampplug")

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class _Default(str):
    """A default value that can be told from the same value given by the caller."""


_LEVEL, _BACKEND, _RECIPE, _SELECT = _Default("O2"), _Default("auto"), _Default("delayed"), _Default("auto")


def initialize(
    model: nn.Module,
    optimizer: Any = None,
    opt_level: str = _LEVEL,
    *,
    backend: str = _BACKEND,
    recipe: str = _RECIPE,
    select: str | Sequence[str] | Callable[[str, Any], bool] = _SELECT,
    use_te: bool | None = None,
    process_group: Any = None,
    config: Config | dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[nn.Module, Any]:
    """Make `model` train in FP8 under `optimizer`. Returns both; they are the same objects, converted in place.

    Args:
        model: any module. Its Linears become FP8 layers where the plan says so; parameters keep their identity and names.
        optimizer: a torch optimizer, a list of them, or None (O0, O1). O2 takes exactly torch.optim.Adam and AdamW, O1 any.
        opt_level: "O0" (nothing is changed, the plan is logged), "O1" (FP8 GEMMs) or "O2" (also 8-bit moments and split masters).
        backend, recipe, select: see `Config`.
        use_te: True is MS-AMP's spelling of backend="te".
        process_group: the data-parallel group whose ranks share scales. None: the default group, if there is one at the first step; False: none.
        config: a `Config` or a dict of its fields, in place of keyword arguments or beside them; a setting given in both must be the same.
        settings: further fields of `Config`: history, margin, power_of_two, fuse, grad_dtype, seed.

    Raises:
        ValueError, TypeError, RuntimeError: naming the argument, what was found and what is legal, before anything is changed.
    """
    resolved = _resolve(opt_level, backend, recipe, select, use_te, config, settings)
    optimizers = _as_list(optimizer)
    _check(model, optimizers, resolved)
    _check_device(model, optimizers)
    plan = _plan(model, optimizers, resolved)
    _check_wrapper(model, plan)
    _check_gradients(model, plan)
    if resolved.opt_level == "O0":
        logger.info("%s", plan)
        return model, optimizer
    if not plan.converted:
        reasons = sorted({layer.why for layer in plan.layers}) or ["it has no Linear layer"]
        warnings.warn(f"ampplug: no layer of the model computes in FP8: {'; '.join(reasons)}", stacklevel=2)
    device = next((p.device for p in _all_parameters(model, optimizers)), torch.device("cpu"))
    if not on_gpu(device) and plan.converted:
        warn_emulation(device)
    with torch.no_grad():
        _convert(model, optimizers, plan, device, Replicas(process_group))
    logger.info("level %s, recipe %s: %d of %d layers in FP8", resolved.opt_level, resolved.recipe, len(plan.converted), len(plan.layers))
    idle = [p.name for p in plan.parameters if p.trainable and not p.stepped] if resolved.opt_level == "O2" else []
    if idle:
        logger.warning("%d trainable parameters (%r, ...) are in no optimizer given here: nothing of ampplug will step them", len(idle), idle[0])
    return model, optimizer


def plan(
    model: nn.Module,
    optimizer: Any = None,
    opt_level: str = _LEVEL,
    *,
    device: torch.device | str | None = None,
    config: Config | dict[str, Any] | None = None,
    **settings: Any,
) -> Plan:
    """What `initialize` with the same arguments would do, as a printable `Plan`. Nothing is changed; meta-device models are welcome.

    Without an optimizer, O2 is planned as if every parameter were optimized. device: where the model will train; by default where it is (a CPU, if
    it is on the meta device). It matters to select="auto", which leaves layers out that are too small to gain on a GPU.

    Raises:
        ValueError, TypeError, RuntimeError: where `initialize` would refuse.
    """
    defaults: dict[str, Any] = {"backend": _BACKEND, "recipe": _RECIPE, "select": _SELECT, "use_te": None}
    given = {**defaults, **settings}
    backend, recipe, select, use_te = (given.pop(k) for k in ("backend", "recipe", "select", "use_te"))
    resolved = _resolve(opt_level, backend, recipe, select, use_te, config, given)
    optimizers = _as_list(optimizer)
    _check(model, optimizers, resolved, planning=True)
    found = _plan(model, optimizers, resolved, None if device is None else torch.device(device))
    _check_wrapper(model, found)
    return found


# ---------------------------------------------------------------- before anything is changed


def _resolve(
    opt_level: str, backend: str, recipe: str, select: Any, use_te: bool | None, config: Config | dict[str, Any] | None, settings: dict[str, Any]
) -> Config:
    """One Config of all the ways to give one."""
    if use_te is not None and not isinstance(use_te, bool):
        raise TypeError(f"use_te={use_te!r} is a {type(use_te).__name__}; legal are None, True and False")
    if use_te:
        if backend not in ("auto", "te"):
            raise ValueError(f"use_te=True means backend='te', and backend={backend!r} is given too; give one of them")
        backend = "te"
    arguments = {"opt_level": opt_level, "backend": backend, "recipe": recipe, "select": select, **settings}
    given = {k: v for k, v in arguments.items() if not isinstance(v, _Default)}
    if config is None:
        return Config.from_dict(given)
    if not isinstance(config, Config):
        Config.from_dict(config)
    there = vars(config) if isinstance(config, Config) else dict(config)
    for key, value in given.items():
        if key in there and there[key] != value:
            raise ValueError(f"{key}={value!r} is given, and config has {key}={there[key]!r}; give each setting once")
    return Config.from_dict({**there, **given})


def _as_list(optimizer: Any) -> list[Any]:
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def _all_parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """Distinct parameters: the model's, then those that only an optimizer holds."""
    seen = {id(p): p for p in model.parameters()}
    for o in optimizers:
        for g in o.param_groups:
            for p in g["params"]:
                seen.setdefault(id(p), p)
    return list(seen.values())


def _plan(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: Config, device: torch.device | None = None) -> Plan:
    if config.opt_level != "O2":
        return make_plan(model, None, config, device)
    if not optimizers:
        return make_plan(model, list(model.parameters()), config, device)
    return make_plan(model, [p for o in optimizers for g in o.param_groups for p in g["params"]], config, device)


def _check(model: Any, optimizers: list[Any], config: Config, planning: bool = False) -> None:
    """Every refusal, before anything is changed; for a plan, without those that only concern parameters' memory."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    for o in optimizers:
        if not isinstance(o, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(o).__name__}; it must be a torch.optim.Optimizer (unwrap it first), a list of them, or None")
        if "_optimizer_step_post_hooks" not in vars(o):  # a wrapper that only claims to be one
            raise TypeError(f"optimizer is a {type(o).__module__}.{type(o).__name__}, a wrapper of another; initialize the optimizer before it is wrapped")
        if isinstance(o, LowBitOptimizer) or getattr(o, "_ampplug_attached", False):
            raise RuntimeError("optimizer: ampplug.initialize was already called with it; call it once for a model and its optimizer")
    for name, module in model.named_modules():
        if getattr(module, "_ampplug", None) is not None or is_converted(module):
            raise RuntimeError(f"model: its layer {name!r} was already converted; call ampplug.initialize once for a model and its optimizer")
    names = {id(p): n for n, p in model.named_parameters()}
    parameters = _all_parameters(model, optimizers)
    from torch.distributed.tensor import DTensor

    for p in parameters:
        name = names.get(id(p), "(not in the model)")
        if isinstance(p, DTensor):
            raise ValueError(f"parameter {name!r} is a DTensor (FSDP2 or tensor parallel); this version takes plain parameters, with DDP")
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} is not initialized (a lazy module); run a forward pass first")
        if p.is_meta and not planning:
            raise ValueError(f"parameter {name!r} is on the meta device; materialize the model first (ampplug.plan takes it as it is)")
    held = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
    trainable = sum(p.requires_grad for p in model.parameters())
    if held and trainable and held.isdisjoint(names):
        raise ValueError(
            f"optimizer holds {len(held)} parameters, none of them the model's ({trainable} to be trained): it was made for another model, or before the "
            "model's parameters were replaced. Make it of model.parameters()"
        )
    if config.backend == "te" and not planning:
        check_model(model, next((p.device for p in parameters), torch.device("cpu")))
    if config.opt_level != "O2":
        return
    if not optimizers and not planning:
        raise ValueError("optimizer is None; opt_level='O2' keeps masters and moments in the optimizer: pass a torch.optim.Adam or AdamW, or use 'O1'")
    if not optimizers:
        for p in model.parameters():
            if p.requires_grad:
                check_parameter(p, names[id(p)])
    listed: set[int] = set()
    for o in optimizers:
        if type(o) not in LOW_BIT:
            legal = ", ".join(sorted(f"torch.optim.{c.__name__}" for c in LOW_BIT))
            raise ValueError(f"optimizer is a {type(o).__module__}.{type(o).__name__}; O2 takes exactly {legal}; use opt_level='O1', which keeps any optimizer")
        step = vars(o).get("step")
        if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
            raise ValueError("optimizer: its step method was replaced on the object, by a wrapper or a profiler; initialize before that, or use opt_level='O1'")
        for g in o.param_groups:
            check_group(g, f"torch.optim.{type(o).__name__}")
            for p in g["params"]:
                if p.requires_grad or p.grad is not None:
                    check_parameter(p, names.get(id(p), "(not in the model)"))
                if id(p) in listed:
                    raise ValueError(f"parameter {names.get(id(p), '(not in the model)')!r} is in more than one optimizer; O2 keeps one state for it")
                listed.add(id(p))
                check_moments(o.state.get(p) or {}, p, f"optimizer: the state of {names.get(id(p), '(not in the model)')!r}")


def _check_device(model: nn.Module, optimizers: list[Any]) -> None:
    devices = sorted({str(p.device) for p in _all_parameters(model, optimizers)})
    if len(devices) > 1:
        raise ValueError(f"model and optimizer hold parameters on {', '.join(devices)}; ampplug takes one device a process")


def _check_wrapper(model: nn.Module, plan: Plan) -> None:
    """DDP's buckets are made for the parameters' dtypes: what changes dtype must do so before."""
    changed = [p.name for p in plan.parameters if p.after != p.before]
    if changed and plan.config.opt_level == "O2":
        for module in model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                raise ValueError(
                    f"model is wrapped in DistributedDataParallel, and O2 turns {len(changed)} parameters ({changed[0]!r}, ...) into bf16, which its "
                    "buckets do not survive; call ampplug.initialize first and wrap the result"
                )


def _check_gradients(model: nn.Module, plan: Plan) -> None:
    """Whether torch, and what wraps the model, take gradients of another dtype than the parameter's."""
    wide = [p for p in plan.parameters if p.grad_dtype != p.after]
    if not wide:
        return
    what = f"grad_dtype='fp32': parameter {wide[0].name!r} is {wide[0].after} at {plan.config.opt_level}"
    if not supported():
        raise ValueError(f"{what}; that needs Tensor.grad_dtype, which torch {torch.__version__} lacks (2.10 or later); O1 with fp32 parameters needs none")
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        raise ValueError(f"{what}; the buckets of DistributedDataParallel take gradients of the parameter's dtype only; use O1 with fp32 parameters")


_warned: set[str] = set()


def warn_emulation(device: torch.device) -> None:
    """Say once for each type of device that it has no FP8 units."""
    if device.type not in _warned:
        _warned.add(device.type)
        warnings.warn(
            f"ampplug: no FP8 units on {device.type!r}; FP8 is emulated (the same numbers, slower than full precision). "
            "ampplug.check_fp8_support() says what is needed",
            stacklevel=3,
        )


# ---------------------------------------------------------------- the change itself


def _convert(model: nn.Module, optimizers: list[Any], plan: Plan, device: torch.device, replicas: Replicas) -> None:
    config = plan.config
    in_model = {id(p) for p in model.parameters()}
    extra = [p for p in _all_parameters(model, optimizers) if id(p) not in in_model]
    if config.opt_level == "O1":
        bank, book = convert_layers(model, plan, device)
        if config.grad_dtype == "fp32":
            widen([*model.parameters(), *extra])
        bank.refresh()
        for o in optimizers:
            if config.grad_dtype == "fp32":
                round_for_step(o)
            _attach(o, bank, book, replicas)
        return
    saved = [o.state_dict() if o.state else None for o in optimizers]
    remainders = split_parameters(model, extra, plan)
    bank, book = convert_layers(model, plan, device)
    for o, state in zip(optimizers, saved, strict=True):
        become_low_bit(o, bank, book, replicas, remainders, device, config)
        if state is not None:  # trained before: its fp32 moments go on
            o.load_state_dict(state)
    if config.grad_dtype == "fp32":
        widen([*model.parameters(), *extra])
    bank.refresh()
    for module in model.modules():
        if any(p is not None and p.dtype == torch.bfloat16 for p in module._parameters.values()):
            fill_remainders_on_load(module)


def become_low_bit(
    o: Any, bank: WeightBank, book: ScaleBook | None, replicas: Replicas, remainders: dict[int, Tensor], device: torch.device, config: Config
) -> None:
    """Change the optimizer's class in place."""
    scheduled = vars(o).pop("step", None) is not None
    o.state.clear()
    o.__class__ = LOW_BIT[type(o)]
    o.adopt(bank, book, replicas, remainders, device, config.seed, config.power_of_two)
    if scheduled:  # a scheduler made before us counts steps through the object's own step; make it count ours
        _track_steps(o)


def _track_steps(o: torch.optim.Optimizer) -> None:
    """What `torch.optim.lr_scheduler.LRScheduler` does to an optimizer when it is made."""
    inner = type(o).step

    def step(*args: Any, **kwargs: Any) -> Any:
        o._opt_called = True  # type: ignore[attr-defined]
        return inner(o, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    o.step = step  # type: ignore[method-assign]


def _attach(o: torch.optim.Optimizer, bank: WeightBank, book: ScaleBook | None, replicas: Replicas) -> None:
    """O1: after each step of any optimizer, W8 and the scales follow."""
    owned = {id(p) for g in o.param_groups for p in g["params"]}

    @torch.no_grad()
    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        owned.update(id(p) for g in optimizer.param_groups for p in g["params"])
        replicas.agree((() if book is None else book.names), [])
        bank.refresh([w for w in bank.weights if id(w.param) in owned], settle=book is None)
        if book is not None:
            replicas.reduce_amax(book.amax)
            book.update(bank, found_inf=getattr(optimizer, "found_inf", None))

    o.register_step_post_hook(after_step)
    o._ampplug_attached = True  # type: ignore[attr-defined]
    add_scales_to_state(o, book)
