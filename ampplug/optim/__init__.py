"""Optimizers with 8-bit states and split masters, stepping the whole model in one launch."""

from ampplug.optim.adamw import Adam, AdamW

__all__ = ["Adam", "AdamW"]
