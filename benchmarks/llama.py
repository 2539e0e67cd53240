"""The model that train_step.py trains, and its tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Grouped heads, rotary positions, causal."""

    def __init__(self, width: int, heads: int, groups: int):
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.q, self.k, self.v = nn.Linear(width, width, bias=False), nn.Linear(width, groups * size, bias=False), nn.Linear(width, groups * size, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, n, -1).transpose(1, 2) for f, n in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups)))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves as pairs."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """RMSNorm, attention; RMSNorm, SwiGLU."""

    def __init__(self, width: int, hidden: int, heads: int, groups: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed_forward = Attention(width, heads, groups), FeedForward(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.feed_forward(self.norm_2(x))


class Llama(nn.Module):
    """Tokens and targets [B, T] -> mean loss, fp32 [].

    Initialised as torch does it. With normal(0, 0.02) at this width, the residual stream is all blocks and no embedding, and 16 layers of it amplify
    rounding: BF16's own gradients then have a cosine of 0.998 with fp32's, E4M3 and E5M2, 16 and 32 times as coarse, 0.84.
    """

    def __init__(self, vocabulary: int, sequence: int, width: int, hidden: int, layers: int, heads: int, groups: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, hidden, heads, groups) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angle = torch.arange(sequence)[:, None] / 10000.0 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def batches(n: int, micro_batch: int, sequence: int, vocabulary: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """n pairs (tokens, targets) [micro_batch, sequence], int64. Learnable: each token is a fixed function of the one before, except one in eight, which is
    random. One in 16 of the vocabulary occurs, so that the loss falls within tens of steps: first to the logarithm of that many, then further."""
    generator = torch.Generator().manual_seed(0)
    distinct = max(8, vocabulary // 16)
    words = torch.randperm(vocabulary, generator=generator)[:distinct]
    follow = torch.randperm(distinct, generator=generator)
    made = []
    for _ in range(n):
        shape = (micro_batch, sequence + 1)
        tokens = torch.randint(0, distinct, shape, generator=generator)
        new = torch.rand(shape, generator=generator) < 0.125
        for t in range(1, shape[1]):
            tokens[:, t] = torch.where(new[:, t], tokens[:, t], follow[tokens[:, t - 1]])
        tokens = words[tokens]
        made.append((tokens[:, :-1].to(device), tokens[:, 1:].to(device)))
    return made
