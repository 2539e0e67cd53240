"""Triton if it is there, how kernels are launched, and how many were.

Only kernels need Triton. Where it is missing or broken, this module still imports, the torch references still run, and only
launching a kernel raises, with the reason. Triton launches do not pass through torch's dispatch modes, so the project's
launch counts are kept here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    _problem: BaseException | None = None
except Exception as error:  # a broken build raises OSError or AttributeError as readily as ImportError
    triton = None  # type: ignore[assignment]
    tl = SimpleNamespace(constexpr=lambda value: value)  # type: ignore[assignment]
    _problem = error



class Launches(Counter):
    """Launches by kernel. Those that C++ makes are counted there, and taken over from `sources` when someone looks."""

    sources: list[Callable[[], dict[str, int]]] = []

    def settle(self) -> Launches:
        """Take over what was counted elsewhere."""
        for source in self.sources:
            for name, n in source().items():
                super().__setitem__(name, super().get(name, 0) + n)
        return self

    # what reading goes through; a dict whose iterator is its own is copied by its keys, too
    def __iter__(self):  # type: ignore[no-untyped-def]
        return super(Launches, self.settle()).__iter__()

    def keys(self):  # type: ignore[no-untyped-def]
        return super(Launches, self.settle()).keys()

    def __getitem__(self, name: str) -> int:
        return super(Launches, self.settle()).__getitem__(name)

    def __repr__(self) -> str:
        return super(Launches, self.settle()).__repr__()

    def items(self):  # type: ignore[no-untyped-def]
        return super(Launches, self.settle()).items()

    def values(self):  # type: ignore[no-untyped-def]
        return super(Launches, self.settle()).values()

    def clear(self) -> None:
        super(Launches, self.settle()).clear()


launches = Launches()

# Triton's interpreter runs the kernels on a CPU; its FP8 cast drops the carry of a mantissa that rounds up and turns NaN
# into a number, so kernels compute the FP8 code by integer arithmetic there (see `to_fp8`).
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def jit(function):
    """`triton.jit`, or the bare function where there is no Triton."""
    return triton.jit(function) if triton is not None else function


NEEDED_CAPABILITY = (8, 9)


@cache
def _native(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= NEEDED_CAPABILITY


def on_gpu(device: torch.device) -> bool:
    """True where the kernels run: CUDA devices with FP8 units. Anywhere else their torch references do."""
    return device.type == "cuda" and _native(device.index if device.index is not None else torch.cuda.current_device())


def check_fp8_support(device: torch.device | str | None = None) -> None:
    """Raise RuntimeError, naming what is needed and what was found, unless `device` (default: the current one) computes FP8 natively."""
    needed = f"FP8 needs an NVIDIA GPU of compute capability {NEEDED_CAPABILITY[0]}.{NEEDED_CAPABILITY[1]} or higher (Ada, Hopper)"
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise RuntimeError(f"{needed}; device is {str(device)!r}")
    if not torch.cuda.is_available():
        raise RuntimeError(f"{needed}; torch {torch.__version__} finds no CUDA device here")
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None:
        raise RuntimeError(f"{needed}; found an AMD GPU")
    if (major, minor) < NEEDED_CAPABILITY:
        raise RuntimeError(f"{needed}; {str(device)!r} has compute capability {major}.{minor}")


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device, for kernels that keep a persistent grid (4 in the interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> Any:
    """Launch a kernel on the device of its first tensor argument, whatever the current device is, and count it. Returns what Triton compiled, or
    None from the interpreter."""
    if _problem is not None:
        raise RuntimeError(f"ampplug's kernels need Triton, which does not import here: {_problem!r}") from _problem
    launches[kernel.fn.__name__] += 1
    device = args[0].device
    if device.type != "cuda":
        return kernel[grid](*args, **constants)
    if device.index == torch.cuda.current_device():
        return _launch(kernel, grid, args, constants, device.index)
    with torch.cuda.device(device):
        return _launch(kernel, grid, args, constants, device.index)


_compiled: dict[tuple, tuple[Any, tuple]] = {}


def _launch(kernel: Any, grid: tuple[int, ...], args: tuple, constants: dict[str, Any], device: int) -> Any:
    """What `kernel[grid](*args, **constants)` does, from the second time on without asking Triton which compiled kernel that is.

    Triton compiles anew for what the key below holds, or for less: types, whether an address or integer is a multiple of 16, integers that are 1
    or need 64 bits.
    """
    key = (kernel.fn, device, *constants, *constants.values(), *map(_kind, args))
    known = _compiled.get(key)
    if known is None or hooked():
        compiled = kernel[grid](*args, **constants)
        if compiled is not None:
            _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
        return compiled
    compiled, tail = known
    stream = torch._C._cuda_getCurrentRawStream(device)
    sizes = (*grid, 1, 1)[:3]
    compiled.run(*sizes, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *tail)
    return compiled


def hooked() -> bool:
    """Whether something (Triton's profiler) wants to know of every launch: Triton then makes them."""
    runtime = triton.knobs.runtime
    return any(hook is not None and getattr(hook, "calls", True) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


def _kind(argument: Any) -> Any:
    """What of an argument a compiled kernel depends on."""
    if type(argument) is int:
        return argument == 1, argument & 15 == 0, -(2**31) <= argument < 2**31, argument < 2**63
    if type(argument) is float:
        return None
    return argument.dtype, argument.data_ptr() & 15 == 0
