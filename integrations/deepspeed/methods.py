"""The methods of `DeepSpeedEngine` that are replaced. Each does what it did, and more only for an engine whose configuration asks for ampplug.

Replaced on the class and not in a subclass: `deepspeed.initialize` finds them however and whenever it was imported.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.logging import print_dist

from ampplug.entry import initialize
from ampplug.integrations.deepspeed.attachment import Attachment
from ampplug.integrations.deepspeed.checks import check_engine, check_parallelism, check_version
from ampplug.integrations.deepspeed.settings import KEY, read_settings

Method = Callable[..., Any]


def attachment_of(engine: DeepSpeedEngine) -> Attachment | None:
    """What ampplug holds for an engine; None where it is not switched on."""
    # not getattr: the engine would look for the name in the model, too
    return engine.__dict__.get("_ampplug_attachment")


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
            print_dist("ampplug: opt_level 'O0' changes nothing; logger 'ampplug' has the plan", ranks=[0])
            return original(self, client_optimizer, model_parameters)
        attachment = Attachment(self, settings)
        self._ampplug_attachment = attachment
        attachment.convert(self.module)
        original(self, client_optimizer, model_parameters)
        attachment.refresh()
        print_dist(attachment.announcement(self), ranks=[0])

    return _configure_optimizer


def _take_model_step(original: Method) -> Method:
    """After the optimizer's step and the all-gather in it, the FP8 weights and the scales follow."""

    def _take_model_step(self: DeepSpeedEngine, lr_kwargs: Any) -> None:
        attachment = attachment_of(self)
        original(self, lr_kwargs)
        if attachment is not None:
            attachment.after_step(skipped=bool(getattr(self.optimizer, "overflow", False)))

    return _take_model_step


def _common_checkpoint_state(original: Method) -> Method:
    """Checkpoints carry the scales, under the same key as the configuration."""

    def _common_checkpoint_state(self: DeepSpeedEngine, module_state_dict: Any, zero_optimizer_state: Any, save_frozen_param: Any) -> dict[str, Any]:
        state = original(self, module_state_dict, zero_optimizer_state, save_frozen_param)
        attachment = attachment_of(self)
        if attachment is not None:
            state[KEY] = attachment.state_dict()
        return state

    return _common_checkpoint_state


def _load_checkpoint(original: Method) -> Method:
    """Scales come back with a checkpoint, and the FP8 weights are made of what was loaded."""

    def load_checkpoint(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        path, client_state = original(self, *args, **kwargs)
        attachment = attachment_of(self)
        if attachment is not None and path is not None:
            attachment.load_state_dict(client_state.pop(KEY, None))
        return path, client_state

    return load_checkpoint


# what is replaced, and the parameters that it must have
_REPLACED: dict[str, tuple[Callable[[Method], Method], tuple[str, ...]]] = {
    "_configure_with_arguments": (_configure_with_arguments, ("args", "mpu")),
    "_configure_optimizer": (_configure_optimizer, ("client_optimizer", "model_parameters")),
    "_take_model_step": (_take_model_step, ("lr_kwargs",)),
    "_common_checkpoint_state": (_common_checkpoint_state, ("module_state_dict", "zero_optimizer_state", "save_frozen_param")),
    "load_checkpoint": (_load_checkpoint, ("load_dir", "tag")),
}


def install() -> None:
    """Replace the methods, once a process. RuntimeError where DeepSpeed is not as expected; see `checks.check_version`."""
    if "_ampplug_installed" in DeepSpeedEngine.__dict__:
        return
    check_version(deepspeed.__version__, DeepSpeedEngine, {name: parameters for name, (_, parameters) in _REPLACED.items()})
    for name, (replacement, _) in _REPLACED.items():
        original = getattr(DeepSpeedEngine, name)
        setattr(DeepSpeedEngine, name, functools.wraps(original)(replacement(original)))
    DeepSpeedEngine._ampplug_installed = True
