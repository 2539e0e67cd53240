"""The methods of `DeepSpeedEngine` that are replaced. Each does what it did, and more only for an engine whose configuration asks for ampplug.

Replaced on the class and not in a subclass: `deepspeed.initialize` finds them however and whenever it was imported.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine

from ampplug.entry import initialize
from ampplug.integrations.deepspeed.attachment import Attachment
from ampplug.integrations.deepspeed.checks import ASKED, check_engine, check_parallelism, check_version
from ampplug.integrations.deepspeed.gathered import Gathered
from ampplug.integrations.deepspeed.low_bit import Sharded, ShardedGathered, Whole
from ampplug.integrations.deepspeed.optimizers import adam_configuration, adam_of
from ampplug.integrations.deepspeed.settings import KEY, read_settings

Method = Callable[..., Any]


def attachment_of(engine: DeepSpeedEngine) -> Attachment | None:
    """What ampplug holds for an engine; None where it is not switched on."""
    # not getattr: the engine would look for the name in the model, too
    return engine.__dict__.get("_ampplug_attachment")


def _say(engine: DeepSpeedEngine, line: str) -> None:
    """Print a line on rank 0. DeepSpeed's own log shows warnings only, and a block that nothing reads is silent: its absence must be noticed."""
    if engine.global_rank == 0:
        print(line, flush=True)


def _configure_with_arguments(original: Method) -> Method:
    """The first method of the constructor that has the configuration: everything is refused here, while nothing is changed."""

    def _configure_with_arguments(self: DeepSpeedEngine, args: Any, mpu: Any) -> None:
        settings = read_settings(self._config._param_dict)
        if settings is not None:
            check_engine(self)
            if self.client_optimizer is None and not self._config.optimizer_name:
                warnings.warn("ampplug: the engine has no optimizer, so its model is left as it is", stacklevel=2)
        self._ampplug_settings = settings
        original(self, args, mpu)

    return _configure_with_arguments


def _configure_optimizer(original: Method) -> Method:
    """Layers are converted before the engine wraps the optimizer, while parameters are still tensors of their own."""

    def _configure_optimizer(self: DeepSpeedEngine, client_optimizer: Any, model_parameters: Any) -> None:
        settings = self.__dict__.get("_ampplug_settings")
        if settings is None:
            return original(self, client_optimizer, model_parameters)
        check_parallelism(self)
        if settings.opt_level == "O0":
            initialize(self.module, None, config=settings)
            _say(self, "ampplug: opt_level 'O0' changes nothing; logger 'ampplug' has the plan")
            return original(self, client_optimizer, model_parameters)
        kind: type[Attachment] = Attachment
        if settings.opt_level == "O2":
            client_optimizer = adam_of(self, client_optimizer, model_parameters)
            kind = Sharded if self.zero_optimization() else Whole
        if self.zero_optimization_partition_weights():
            kind = ShardedGathered if settings.opt_level == "O2" else Gathered
        attachment = kind(self, settings)
        attachment.convert(self.module, client_optimizer)
        self._ampplug_attachment = attachment
        original(self, client_optimizer, model_parameters)
        attachment.settle(self)
        _say(self, attachment.announcement(self))

    return _configure_optimizer


def _take_model_step(original: Method) -> Method:
    """After the optimizer's step and the all-gather in it, the FP8 weights and the scales follow."""

    def _take_model_step(self: DeepSpeedEngine, lr_kwargs: Any) -> None:
        attachment = attachment_of(self)
        if attachment is None:
            original(self, lr_kwargs)
        else:
            attachment.step(self, lambda: original(self, lr_kwargs))

    return _take_model_step


def _get_optimizer_configuration(original: Method) -> Method:
    """At O2 an "Adam" or "AdamW" of the configuration is torch's from the start."""

    def get_optimizer_configuration(self: DeepSpeedEngine, optimizer_parameters: dict, adam_w_mode: bool, *args: Any, **kwargs: Any) -> Any:
        settings = self.__dict__.get("_ampplug_settings")
        if settings is None or settings.opt_level != "O2" or optimizer_parameters.get("torch_adam"):
            return original(self, optimizer_parameters, adam_w_mode, *args, **kwargs)
        optimizer_parameters.pop("torch_adam", None)
        return adam_configuration(optimizer_parameters, adam_w_mode)

    return get_optimizer_configuration


def _do_optimizer_sanity_check(original: Method) -> Method:
    """Which wrapper the optimizer gets: none where ampplug's own steps the model's parameters."""

    def _do_optimizer_sanity_check(self: DeepSpeedEngine, basic_optimizer: Any) -> Any:
        wrapper = original(self, basic_optimizer)
        attachment = attachment_of(self)
        return None if attachment is not None and attachment.whole else wrapper

    return _do_optimizer_sanity_check


def _clip_fp32_gradients(original: Method) -> Method:
    """ampplug's optimizer clips within its step."""

    def clip_fp32_gradients(self: DeepSpeedEngine) -> None:
        attachment = attachment_of(self)
        if attachment is None or not attachment.whole:
            original(self)

    return clip_fp32_gradients


def _common_checkpoint_state(original: Method) -> Method:
    """Checkpoints carry the scales, under the same key as the configuration."""

    def _common_checkpoint_state(self: DeepSpeedEngine, module_state_dict: Any, zero_optimizer_state: Any, save_frozen_param: Any) -> dict[str, Any]:
        attachment = attachment_of(self)
        if attachment is not None and module_state_dict is not None:
            module_state_dict = attachment.module_state(self, module_state_dict)
        state = original(self, module_state_dict, zero_optimizer_state, save_frozen_param)
        if attachment is not None:
            state[KEY] = attachment.state_dict()
        return state

    return _common_checkpoint_state


def _load_checkpoint(original: Method) -> Method:
    """Scales come back with a checkpoint, and the FP8 weights are made of what was loaded."""

    signature = inspect.signature(original)

    def load_checkpoint(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        path, client_state = original(self, *args, **kwargs)
        attachment = attachment_of(self)
        if attachment is not None and path is not None:
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            states = given.arguments["load_optimizer_states"] and not given.arguments["load_module_only"]
            attachment.load_state_dict(client_state.pop(KEY, None), optimizer_states=bool(states))
        return path, client_state

    return load_checkpoint


# what is replaced, and the parameters that it must have
_REPLACED: dict[str, tuple[Callable[[Method], Method], tuple[str, ...]]] = {
    "_configure_with_arguments": (_configure_with_arguments, ("args", "mpu")),
    "_configure_optimizer": (_configure_optimizer, ("client_optimizer", "model_parameters")),
    "get_optimizer_configuration": (_get_optimizer_configuration, ("optimizer_parameters", "adam_w_mode")),
    "_do_optimizer_sanity_check": (_do_optimizer_sanity_check, ("basic_optimizer",)),
    "clip_fp32_gradients": (_clip_fp32_gradients, ()),
    "_take_model_step": (_take_model_step, ("lr_kwargs",)),
    "_common_checkpoint_state": (_common_checkpoint_state, ("module_state_dict", "zero_optimizer_state", "save_frozen_param")),
    "load_checkpoint": (
        _load_checkpoint,
        ("load_dir", "tag", "load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only"),
    ),
}


def install() -> None:
    """Replace the methods, once a process. RuntimeError where DeepSpeed is not as expected; see `checks.check_version`."""
    if "_ampplug_installed" in DeepSpeedEngine.__dict__:
        return
    needed = {**dict.fromkeys(ASKED, ()), **{name: parameters for name, (_, parameters) in _REPLACED.items()}}
    check_version(deepspeed.__version__, DeepSpeedEngine, needed)
    for name, (replacement, _) in _REPLACED.items():
        original = getattr(DeepSpeedEngine, name)
        setattr(DeepSpeedEngine, name, functools.wraps(original)(replacement(original)))
    DeepSpeedEngine._ampplug_installed = True
