"""FP8 training under DeepSpeed, switched on by one block of its JSON configuration.

    import ampplug.integrations.deepspeed                                # once, anywhere in the script

    {"ampplug": {"enabled": true, "opt_level": "O2"}, ...}               # in the configuration; deepspeed.initialize(...) stays as it is

Importing this module replaces a few methods of `deepspeed.DeepSpeedEngine`; engines whose configuration has no enabled block run as before.
`from ampplug.integrations import deepspeed` works too: every other name is DeepSpeed's own.
"""

from __future__ import annotations

from typing import Any

try:
    import deepspeed as _deepspeed
except ImportError as error:
    raise ImportError("ampplug.integrations.deepspeed needs DeepSpeed: pip install deepspeed") from error

from ampplug.integrations.deepspeed.methods import install

install()


def __getattr__(name: str) -> Any:
    """DeepSpeed's own names: `deepspeed.initialize`, `deepspeed.comm`, ..."""
    return getattr(_deepspeed, name)
