"""Adam and AdamW. `initialize` turns the user's own optimizer object into one of these, so that schedulers and wrappers keep their reference."""

from __future__ import annotations

import torch

from ampplug.optim.base import LowBitOptimizer


class Adam(LowBitOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` with 8-bit moments (Kingma and Ba, 2015); weight decay is L2, as torch's."""


class AdamW(LowBitOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` with 8-bit moments (Loshchilov and Hutter, 2019); weight decay is decoupled."""


LOW_BIT: dict[type, type[LowBitOptimizer]] = {torch.optim.Adam: Adam, torch.optim.AdamW: AdamW}
