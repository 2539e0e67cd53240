"""A double of Transformer Engine 2.20.2 for machines without a GPU: of its classes what ampplug reads, with the same names and the same decisions
about the cache of FP8 weights, computed in plain torch."""

__version__ = "2.20.2"
