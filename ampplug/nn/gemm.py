"""Scaled FP8 matrix products: `torch._scaled_mm` on GPUs with FP8 units, the same numbers in fp32 elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from ampplug import formats
from ampplug.kernels.triton_runtime import on_gpu


def scaled_mm(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """a [M, K] times b [N, K] transposed -> [M, N] in out_dtype. Both FP8, K contiguous, K and N multiples of 16.

    The inverse scales are fp32 [1]. `fast` accumulates without promotion to fp32 between instructions: for the forward pass only.
    """
    if on_gpu(a.device):
        return torch._scaled_mm(a, b.t(), a_scale_inv, b_scale_inv, out_dtype=out_dtype, use_fast_accum=fast)
    with torch.autocast(a.device.type, enabled=False):
        product = formats.fp8_to_float(a) @ formats.fp8_to_float(b).t()
    return (product * (a_scale_inv * b_scale_inv)).to(out_dtype)
