"""Launches of a training step, held on the CPU: kernels run by Triton's interpreter are counted by the project's own counter, all else by torch's dispatch.

Dispatch is made to take the GPU's side for CPU tensors; GEMMs are torch's own `_scaled_mm`, and every operator of torch that is no view and no allocation counts
as a launch, as it is one on a GPU. tests/gpu compares the same counts with torch.profiler's.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import ampplug
from ampplug.kernels import triton_runtime
from ampplug.kernels.triton_runtime import launches
from ampplug.scaling import ScaleBook

pytestmark = [
    pytest.mark.filterwarnings("ignore:ampplug"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu counts on the GPU"),
]
BF16 = torch.bfloat16


class Operators(TorchDispatchMode):
    """Counts operators that would launch something on a GPU."""

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and "empty" not in name and name != "_unsafe_view" and not name.startswith("profiler::"):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def gpu_side():
    """Kernels by Triton although tensors lie on the CPU; pinned memory and events, which need CUDA, are left out. What the interpreter itself asks of torch
    is no launch."""
    pytest.importorskip("triton")
    replaced = {triton_runtime.on_gpu: lambda device: True, triton_runtime.launch: without_dispatch(triton_runtime.launch)}
    monkeypatch = pytest.MonkeyPatch()
    for name, module in list(sys.modules.items()):
        if name.startswith("ampplug"):
            for attribute in ("on_gpu", "launch"):
                if getattr(module, attribute, None) in replaced:
                    monkeypatch.setattr(module, attribute, replaced[getattr(module, attribute)])
    make = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(ScaleBook, "_ask", lambda self: None)
    try:
        yield
    finally:
        monkeypatch.undo()


def without_dispatch(function):
    def run(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def counted(run) -> Counter[str]:
    """What `run` launches, by name."""
    launches.clear()
    with gpu_side(), Operators() as operators:
        run()
    return operators.found + launches


def settled(model: nn.Module, x: torch.Tensor, level: str = "O2", **settings):
    """The model and its optimizer after two steps, emulated: every slot has its scale, and the host knows."""
    model = model.to(BF16)
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level, select="all", **settings)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(x.detach())
    return model, optimizer


def inputs(m: int = 16, k: int = 32) -> torch.Tensor:
    return torch.randn(m, k, dtype=BF16, requires_grad=True)


def test_the_counter_sees_what_runs():
    """Both counters count: a cast that is not there would not be missed otherwise."""
    x = inputs()
    found = counted(lambda: ampplug.kernels.cast.partial_amax(x.detach() * 2))
    assert found == Counter({"mul": 1, "partial_amax_kernel": 1})


@pytest.mark.parametrize("recipe, casts", [("delayed", 2), ("current", 4)])
def test_a_linear_takes_five(recipe, casts):
    """Cast, GEMM; cast, GEMM, GEMM. Current scaling takes an amax more for each cast."""
    x = inputs()
    model, _ = settled(nn.Sequential(nn.Linear(32, 48, bias=False)), x, recipe=recipe)
    dy = torch.randn(16, 48, dtype=BF16)
    x.grad = None
    found = counted(lambda: model(x).backward(dy))
    assert found["_scaled_mm"] == 3 and found["cast_kernel"] == 2, found
    assert sum(found.values()) <= 3 + casts, found
    assert model[0].weight.grad is not None and x.grad is not None


def test_fp32_gradients_take_no_more():
    x = inputs()
    if not hasattr(x, "grad_dtype"):
        pytest.skip("needs Tensor.grad_dtype")
    model, _ = settled(nn.Sequential(nn.Linear(32, 48, bias=False)), x, grad_dtype="fp32")
    x.grad = None
    dy = torch.randn(16, 48, dtype=BF16)
    found = counted(lambda: model(x).backward(dy))
    assert sum(found.values()) <= 5 and model[0].weight.grad.dtype == torch.float32, found


def test_siblings_share_their_cast():
    """Query, key and value: a cast for all, a GEMM each; back, a cast and two GEMMs each and two sums of the input's gradients."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(32, n, bias=False) for n in (32, 16, 16))

        def forward(self, x):
            return torch.cat([self.q(x), self.k(x), self.v(x)], -1)

    x = inputs()
    model, _ = settled(Heads(), x)
    x.grad = None
    dy = [torch.randn(16, n, dtype=BF16) for n in (32, 16, 16)]
    outputs: list = []
    forward = counted(lambda: outputs.extend((model.q(x), model.k(x), model.v(x))))
    assert forward["cast_kernel"] == 1 and sum(forward.values()) <= 4, forward
    backward = counted(lambda: torch.autograd.backward(outputs, dy))
    assert sum(backward.values()) <= 11, backward


def test_swiglu_as_one():
    """Cast, two GEMMs, SwiGLU with cast, GEMM; cast, two GEMMs, SwiGLU backward with casts, four GEMMs and a sum."""

    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)

        def forward(self, x):
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    x = inputs()
    model, _ = settled(nn.Sequential(FeedForward()), x, fuse=True)
    x.grad = None
    dy = torch.randn(16, 32, dtype=BF16)
    found = counted(lambda: model(x).backward(dy))
    assert found["swiglu_kernel"] == 2 and sum(found.values()) <= 14, found


@pytest.mark.parametrize("layers", [1, 3])
def test_optimizer_scales_and_clip_take_four(layers):
    """The norm, the step, the transposes, the scales: for any number of tensors, and nothing by torch beside them, while gradients stay where they are.

    Where they moved, the host makes one table anew and uploads it.
    """
    x = inputs()
    model, optimizer = settled(nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(layers)]), x)
    model(x).sum().backward()
    moved, found = (counted(lambda: (ampplug.clip_grad_norm_(model.parameters(), 1.0), optimizer.step())) for _ in range(2))
    assert sum(n for name, n in moved.items() if name.endswith("_kernel")) == 4 and moved["clone"] <= 1  # of the host's table
    assert found == Counter({"norm_kernel": 1, "adam_step_kernel": 1, "transpose_kernel": 1, "scale_update_kernel": 1}), found


@pytest.mark.parametrize("layers", [1, 3])
def test_o1_refreshes_all_weights_and_scales_in_four(layers):
    """Amaxes, casts, transposes, and the scales: for any number of tensors."""
    x = inputs()
    model, _ = settled(nn.Sequential(*[nn.Linear(32, 32) for _ in range(layers)]), x, "O1")
    bank, book = model[0]._ampplug.bank, model[0]._ampplug.book
    with gpu_side():
        bank.refresh(settle=False)  # the table of addresses is made once
    found = counted(lambda: (bank.refresh(settle=False), book.update(bank)))
    assert sum(found.values()) == 4 and set(found) == {"weight_amax_kernel", "weight_cast_kernel", "transpose_kernel", "scale_update_kernel"}, found
