"""W8T, the transposes of all W8, in one launch. Bytes: one read, one write: 2 an element.

Hopper's FP8 GEMM wants both operands with the summed dimension contiguous: W8 serves forward, W8T the input gradient. Both are padded to
multiples of 16, with zeros, so tiles need no care at the edges of the weight itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampplug.kernels.numerics import pack4
from ampplug.kernels.triton_runtime import jit, launch, tl

# Columns of the table, int64: addresses of W8 and W8T, padded rows and columns of W8.
TRANSPOSE_WIDTH = 4
TILE = 64


def transpose_tiles(shapes: list[tuple[int, int]], device: torch.device) -> Tensor:
    """Tiles of W8s of these padded shapes: int32 [3, tiles] of (weight, first row, first column)."""
    parts = []
    for index, (rows, cols) in enumerate(shapes):
        if rows * cols:
            r, c = torch.meshgrid(
                torch.arange(0, rows, TILE, dtype=torch.int32), torch.arange(0, cols, TILE, dtype=torch.int32), indexing="ij"
            )
            parts.append(torch.stack([torch.full_like(r, index), r, c]).flatten(1))
    table = torch.cat(parts, 1) if parts else torch.zeros(3, 0, dtype=torch.int32)
    return table.contiguous().to(device)


def reference_transpose(w8: Tensor, w8t: Tensor) -> None:
    """One weight, in plain torch."""
    w8t.view(torch.uint8).copy_(w8.view(torch.uint8).t())


@jit
def transpose_kernel(table, tiles, n_tiles, TILE: tl.constexpr):
    """One tile a program: every fourth row apart, four rows packed into words, words transposed."""
    tile = tl.program_id(0)
    row = table + tl.load(tiles + tile).to(tl.int64) * 4
    row0 = tl.multiple_of(tl.load(tiles + n_tiles + tile), 64)
    col0 = tl.multiple_of(tl.load(tiles + 2 * n_tiles + tile), 64)
    R = tl.multiple_of(tl.load(row + 2).to(tl.int32), 16)
    C = tl.multiple_of(tl.load(row + 3).to(tl.int32), 16)
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.uint8)), 16)
    target = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.int32)), 16)
    quarter = row0 // 4 + tl.arange(0, TILE // 4)
    c = col0 + tl.arange(0, TILE)
    inside = (quarter[:, None] * 4 < R) & (c[None, :] < C)
    at = source + quarter[:, None].to(tl.int64) * (4 * C) + c[None, :]
    q0 = tl.load(at, mask=inside, other=0)
    q1 = tl.load(at + C, mask=inside, other=0)
    q2 = tl.load(at + 2 * C, mask=inside, other=0)
    q3 = tl.load(at + 3 * C, mask=inside, other=0)
    words = R // 4
    edge = (c[:, None] < C) & (quarter[None, :] < words)
    tl.store(target + c[:, None].to(tl.int64) * words + quarter[None, :], tl.trans(pack4(q0, q1, q2, q3)), mask=edge)


def triton_transpose(table: Tensor, tiles: Tensor) -> None:
    """All weights of `table` (int64 [weights, 4])."""
    n = tiles.shape[1]
    if n:
        launch(transpose_kernel, (n,), table, tiles, n, TILE=TILE, num_warps=4)
