"""The fast way to launch a kernel asks Triton once for every kind of arguments, and never launches what was compiled for others."""

from __future__ import annotations

import pytest
import torch

from ampplug.kernels import triton_runtime


class Compiled:
    """What Triton returns from a launch."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.runs = []

    def run(self, *arguments):
        self.runs.append(arguments)


class Kernel:
    """What Triton makes of a decorated function."""

    arg_names = ["x", "n", "scale", "WIDE", "BLOCK"]

    def __init__(self):
        self.made, self.fn = [], object()

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.made.append(Compiled())
            return self.made[-1]

        return run


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    kernel = Kernel()

    def launch(x, n, scale=2.0, wide=True, warps=4):
        triton_runtime._launch(kernel, (5,), (x, n, scale), dict(BLOCK=64, WIDE=wide, num_warps=warps), 0)
        return len(kernel.made)

    return kernel, launch


def test_the_same_kind_is_compiled_once(launched):
    kernel, launch = launched
    x = torch.zeros(64)
    assert [launch(x, 32), launch(x, 48, 3.0), launch(torch.zeros(16), 16)] == [1, 1, 1]
    # grid, stream, kernel, no hooks, arguments, then constants in the order of the signature
    assert kernel.made[0].runs[0] == (5, 1, 1, 77, "function", "metadata", None, None, None, x, 48, 3.0, True, 64)
    assert len(kernel.made[0].runs) == 2


def test_other_kinds_are_compiled_apart(launched):
    kernel, launch = launched
    x = torch.zeros(64)
    launch(x, 32)
    others = [(x[1:], 32), (x.double(), 32), (x, 33), (x, 1), (x, 2**31), (x, 32, 2.0, False), (x, 32, 2.0, True, 8)]
    assert [launch(*arguments) for arguments in others] == [2, 3, 4, 5, 6, 7, 8]
    assert [launch(*arguments) for arguments in others] == [8] * 7


def test_a_profiler_of_launches_is_told_of_each(launched):
    """Triton's hooks are called by Triton, which therefore launches while there are any."""
    knobs = pytest.importorskip("triton").knobs
    kernel, launch = launched
    x = torch.zeros(64)
    launch(x, 32)

    def hook(metadata) -> None: ...

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert triton_runtime.hooked() and [launch(x, 32), launch(x, 32)] == [2, 3]
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert not triton_runtime.hooked() and launch(x, 32) == 3
