"""A byte-level GPT of plain torch modules: RMSNorm, rotary positions, causal attention, GELU; nothing in it knows of FP8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT."""

    width: int
    layers: int
    heads: int
    ffn: int
    sequence: int


SHAPES = {
    "small": Shape(width=128, layers=3, heads=4, ffn=512, sequence=128),
    "124m": Shape(width=768, layers=12, heads=12, ffn=3072, sequence=1024),
    "1b": Shape(width=2048, layers=16, heads=16, ffn=8192, sequence=2048),
}


class Block(nn.Module):
    """Attention and MLP, each on a normalized residual stream."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.RMSNorm(shape.width)
        self.q, self.k, self.v, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))
        self.norm_2 = nn.RMSNorm(shape.width)
        self.up = nn.Linear(shape.width, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, sequence, width] -> the same shape. cos, sin: [sequence, width / heads]."""
        batch, sequence, width = x.shape
        h = self.norm_1(x)
        q, k, v = (p(h).view(batch, sequence, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x [batch, heads, sequence, size]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, VOCABULARY, bias=False)
        size = shape.width // shape.heads
        frequency = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
        angle = torch.outer(torch.arange(shape.sequence).float(), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self._start(shape)

    def _start(self, shape: Shape) -> None:
        """GPT-2's start: normal 0.02, less where the residual stream adds up."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * shape.layers) ** 0.5 if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [batch, sequence] -> logits [batch, sequence, 256]."""
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.lm_head(self.norm(x))


def build(preset: str | Shape) -> GPT:
    """A new GPT of a preset ("small", "124m", "1b") or of given sizes, from torch's current random state, on its current default device."""
    return GPT(preset if isinstance(preset, Shape) else SHAPES[preset])
