"""What the multi-tensor kernels read: one row of 64-bit integers a tensor, one triple a chunk, one row of numbers a param group.

The tables live on the device, so one launch serves any number of tensors, and gradients may lie anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

# How an element of a parameter or gradient is stored; SPLIT is a bf16 parameter with a 16-bit remainder.
FP32, BF16, FP16, SPLIT = 0, 1, 2, 3

# Columns of a tensor's row. Addresses are bytes; 0 means that the tensor has no such part.
COLUMNS = (
    "grad",
    "param",
    "low",  # int16 remainder of a split master
    "ratio",  # uint8 codes of the first moment
    "v",  # uint8 codes of the second moment
    "top",  # uint8 exponents of v's groups
    "w8",  # written by the step; its transpose is made apart (kernels/transpose.py)
    "rows",
    "cols",
    "numel",
    "w8_stride",  # elements from row to row of W8
    "kind",  # FP32, BF16, FP16 or SPLIT
    "grad_kind",
    "aligned",  # 1 where rows, addresses and strides allow 16-byte accesses
    "group",  # row of the hyperparameter table
    "weight",  # index in the weight bank, -1 for none
    "ordinal",  # position of the parameter in the optimizer, for the rounding bits
    "first",  # index in the parameter of the tensor's first element, for the rounding bits; 0 unless it is a part of one
)
COLUMN = {name: i for i, name in enumerate(COLUMNS)}
WIDTH = len(COLUMNS)

# Columns of a param group's row (fp64).
HYPER = ("lr", "log_beta1", "log_beta2", "eps", "weight_decay", "bound", "ratio_limit", "decoupled", "maximize", "beta1", "beta2")
HYPER_WIDTH = len(HYPER)

KIND = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}

# A chunk is CHUNK_ROWS x 128 elements of one tensor: enough to pay for reading its row of the table.
CHUNK_ROWS = 128
CHUNK_COLS = 128


def chunk_table(shapes: list[tuple[int, int]], device: torch.device) -> Tensor:
    """Tiles that cover matrices of these shapes: int32 [3, chunks] of (tensor, first row, first column)."""
    parts = []
    for index, (rows, cols) in enumerate(shapes):
        if rows == 0 or cols == 0:
            continue
        r = torch.arange(0, rows, CHUNK_ROWS, dtype=torch.int32)
        c = torch.arange(0, cols, CHUNK_COLS, dtype=torch.int32)
        grid_r, grid_c = torch.meshgrid(r, c, indexing="ij")
        parts.append(torch.stack([torch.full_like(grid_r, index), grid_r, grid_c]).flatten(1))
    table = torch.cat(parts, 1) if parts else torch.zeros(3, 0, dtype=torch.int32)
    return table.contiguous().to(device)
