from transformer_engine.pytorch.module.base import LayerNormLinear, LayerNormMLP, Linear
from transformer_engine.pytorch.quantization import autocast

__all__ = ["LayerNormLinear", "LayerNormMLP", "Linear", "autocast"]
