"""The "ampplug" block of a DeepSpeed configuration, and MS-AMP's "msamp" block as a way to come from there."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ampplug.config import Config

KEY = "ampplug"
_FOREIGN = "msamp"
_LEVELS = ("O0", "O1", "O2")


def read_settings(configuration: Mapping[str, Any]) -> Config | None:
    """Settings of a DeepSpeed configuration; None where nothing is asked for or the block is disabled.

    Raises ValueError for an unknown or missing key, an illegal value, "auto" and a misspelt block; TypeError for a value of the wrong type.
    """
    if KEY in configuration and _FOREIGN in configuration:
        raise ValueError(f'the DeepSpeed configuration has both an "{KEY}" and a "{_FOREIGN}" block; keep "{KEY}"')
    if KEY in configuration:
        return _from_block(configuration[KEY])
    if _FOREIGN in configuration:
        return _from_msamp(configuration[_FOREIGN])
    for key in configuration:  # DeepSpeed itself keeps unknown blocks without a word
        if difflib.SequenceMatcher(None, str(key).lower().replace("_", "").replace("-", ""), KEY).ratio() > 0.8:
            raise ValueError(f'the DeepSpeed configuration has a block {key!r}, which nothing reads; did you mean "{KEY}"?')
    return None


def _from_block(block: Any) -> Config | None:
    settings = _mapping(KEY, block)
    legal = ["enabled", *(f.name for f in fields(Config))]
    for key, value in settings.items():
        if key not in legal:
            near = difflib.get_close_matches(str(key), legal, 1, 0.5)
            raise ValueError(f"{KEY}: unknown key {key!r}{f' (did you mean {near[0]!r}?)' if near else ''}; legal keys are {', '.join(legal)}")
        if value == "auto" and key not in ("backend", "select"):
            raise ValueError(f"{KEY}: {key} is 'auto', which nothing fills in; write the value itself")
    enabled = _enabled(KEY, settings)
    level = settings.get("opt_level", "O2")
    if level == "O3":
        raise ValueError(f"{KEY}: opt_level='O3' is not available in this version; legal values are {', '.join(map(repr, _LEVELS))}")
    try:
        config = Config.from_dict({k: v for k, v in settings.items() if k != "enabled"})
    except (TypeError, ValueError) as error:
        raise type(error)(f"{KEY}: {error}") from None
    if config.grad_dtype is not None:
        raise ValueError(f"{KEY}: grad_dtype={config.grad_dtype!r} is not available under DeepSpeed, whose own data_types.grad_accum_dtype = 'fp32' does it")
    if config.backend == "te":
        raise ValueError(f"{KEY}: backend='te' is not available under DeepSpeed; legal values are 'auto', 'native'")
    return config if enabled else None


def _from_msamp(block: Any) -> Config | None:
    """MS-AMP's block with MS-AMP's defaults. Warns once a run of what became of it."""
    settings = _mapping(_FOREIGN, block)
    legal = ("enabled", "opt_level", "use_te")
    for key in settings:
        if key not in legal:
            raise ValueError(f"{_FOREIGN}: unknown key {key!r}; MS-AMP's keys are {', '.join(legal)}")
    enabled = _enabled(_FOREIGN, {"enabled": False, **settings})
    level = settings.get("opt_level", "O1")
    if level not in ("O1", "O2", "O3"):
        raise ValueError(f"{_FOREIGN}: opt_level={level!r} is not legal; MS-AMP's levels are 'O1', 'O2', 'O3'")
    use_te = settings.get("use_te", False)
    if not isinstance(use_te, bool):
        raise TypeError(f"{_FOREIGN}: use_te={use_te!r} is a {type(use_te).__name__}; legal are true and false")
    if not enabled:
        return None
    mine = "O1" if level == "O1" else "O2"
    notes = f'"opt_level": "{level}" runs as ampplug\'s "{mine}"'
    if level == "O3":
        notes += " (FP8 gradients and weights without a 16-bit copy are not available in this version)"
    if use_te:
        notes += '; "use_te": true runs on ampplug\'s own FP8 layers'
    warnings.warn(
        f'ampplug: the configuration has MS-AMP\'s block "{_FOREIGN}": {notes}. Replace it by "{KEY}": {{"enabled": true, "opt_level": "{mine}"}}',
        stacklevel=2,
    )
    return Config(opt_level=mine)


def _mapping(name: str, block: Any) -> Mapping[str, Any]:
    if not isinstance(block, Mapping):
        raise TypeError(f'"{name}" is {block!r}, a {type(block).__name__}; it must be a block such as {{"enabled": true, "opt_level": "O2"}}')
    return block


def _enabled(name: str, settings: Mapping[str, Any]) -> bool:
    if "enabled" not in settings:
        raise ValueError(f'{name}: the key "enabled" is missing; write "enabled": true or false')
    if not isinstance(settings["enabled"], bool):
        raise TypeError(f"{name}: enabled={settings['enabled']!r} is a {type(settings['enabled']).__name__}; legal are true and false")
    return settings["enabled"]
