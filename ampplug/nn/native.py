"""The FP8 Linear in C++ (`csrc/linear.h`), which costs the host a fraction of what Python does: the common case of a training step on a GPU.

Built on first use with the C++ compiler that is there, once for a user and a version of torch. Without a compiler, or where the build fails, the
Python path computes the same; so it does for whatever is not common: evaluation, the first steps of a slot, current scaling, Conv1D, sizes that are no
multiples of 16, subclasses of tensors, torch.func and dispatch modes. AMPPLUG_NATIVE=1 in the environment turns it on.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampplug import formats
from ampplug.kernels import cast as cast_module
from ampplug.kernels.triton_runtime import hooked, launches, multiprocessors, on_gpu
from ampplug.nn.gemm import scaled_mm
from ampplug.nn.linear_function import LinearState, _Shared

# The one switch: without AMPPLUG_NATIVE in the environment, whether layers on a GPU run in C++. Off until tests/gpu/test_host_path.py and
# benchmarks/host_time.py have been run on one.
DEFAULT = False

logger = logging.getLogger("ampplug")

SOURCES = Path(__file__).resolve().parents[1] / "csrc"
_devices = {"cuda"} if os.environ.get("AMPPLUG_NATIVE", "1" if DEFAULT else "0") != "0" else set()
_module: Any = None
_failed = False
_kept: list[Any] = []  # compiled kernels whose code C++ launches


# ---------------------------------------------------------------- layers


def wanted(x: Tensor) -> bool:
    """Whether layers given x should have a counterpart in C++."""
    return not _failed and x.device.type in _devices


def attach(state: LinearState) -> None:
    """Give a layer its counterpart in C++, if it can have one: a new one where it has moved, or its scales have."""
    w, book = state.weight, state.book
    if book is None or state.transposed or state.fp32_gradient or type(state) is not LinearState:
        return
    of = (w.param, w.w8, book.scale_views, state.x_key)
    if len(state.native_of) == 4 and all(a is b for a, b in zip(of, state.native_of, strict=True)):
        return
    state.native, state.native_of = None, of
    device = w.param.device
    # sizes without padding, and FP8 copies of the weight as it is
    fits = all(size % 16 == 0 and size > 0 for size in w.param.shape) and w.w8.shape == w.param.shape == w.w8t.t().shape
    fits = fits and type(w.param) in (Tensor, torch.nn.Parameter) and device == state.bank.device == book.device
    if not fits or (device.type == "cuda" and not on_gpu(device)):
        return
    module = load()
    if module is None:
        return
    if state.bank.native is None:
        state.bank.native = module.Bank()
    state.native = module.Layer(
        w, state.bank, state.bank.native, book, state.x_slot, state.own_slot, state.dy_slot, state.bank.power_of_two,
        multiprocessors(device), cast_module.TILE_M, cast_module.TILE_K, cast_module.SPAN,
    )  # fmt: skip


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Within, all layers run in Python: to compare the two."""
    global _devices
    devices, _devices = _devices, set()
    if _module is not None:
        _module.enable(False)
    try:
        yield
    finally:
        _devices = devices
        if _module is not None:
            _module.enable(True)


def _resolve(
    key: int,
    x: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    scale_inv: Tensor,
    scale: Tensor,
    record: Tensor | None,
    scratch: Tensor,
    power_of_two: bool,
) -> None:
    """Called by C++ for the first cast of a kind: launch it as Python does, and have C++ launch the same kernel from now on."""
    dtype = formats.E4M3 if (rows if rows is not None else columns).dtype == formats.E4M3 else formats.E5M2  # type: ignore[union-attr]
    compiled = cast_module.launch_cast(x, dtype, rows, columns, scale_inv, scale, None, record, scratch, power_of_two)
    if compiled is None or hooked():
        return
    problem = unlike(compiled, _module.parameter_sizes(key))
    if problem is None:
        _module.add_kernel(key, compiled.function, 32 * compiled.metadata.num_warps, compiled.metadata.shared)
        _kept.append(compiled)
    else:
        logger.warning("ampplug: a kernel stays with Triton's launcher: %s", problem)


def unlike(compiled: Any, sizes: list[int]) -> str | None:
    """Why a compiled kernel is not one that C++ can launch with parameters of these sizes (bytes each); None if it is."""
    m = compiled.metadata
    for name, plain in (("num_ctas", 1), ("launch_cooperative_grid", False), ("launch_pdl", False), ("global_scratch_size", 0), ("profile_scratch_size", 0)):
        if (found := getattr(m, name, plain) or plain) != plain:
            return f"{name} is {found}"
    found = parameter_sizes(compiled.asm["ptx"]) if "ptx" in compiled.asm else []
    # behind the arguments come addresses of scratch memory, one or two as Triton has it
    if found[: len(sizes)] != sizes or len(found) > len(sizes) + 4 or any(size != 8 for size in found[len(sizes) :]):
        return f"its parameters have {found} bytes, {sizes} were expected"
    return None


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel in PTX text."""
    header = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    return [int(bits) // 8 for bits in re.findall(r"\.param\s+\.[a-z]+(\d+)", header.group(1))] if header else []


# ---------------------------------------------------------------- building


def load() -> Any:
    """The module, built if need be; None where that is impossible, which is said once."""
    global _module, _failed
    if _module is None and not _failed:
        try:
            module = _import(build())
            ready = module.set_up(_resolve, scaled_mm, _Shared)
            if not ready and torch.cuda.is_available():
                raise RuntimeError("the CUDA driver or torch's C interface to CUDA is not found")
        except Exception as error:
            _failed = True
            logger.warning("ampplug: layers run in Python, since their C++ counterpart is not to be had: %s", error)
            return None
        launches.sources.append(lambda: {"cast_kernel": module.take_launches()})
        _module = module
    return _module


def build() -> Path:
    """Compile the sources unless that was done before. Returns the shared library."""
    compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler (c++, g++, clang++ or $CXX)")
    home = Path(torch.__file__).parent
    flags = ["-O2", "-std=c++20", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-I{path}" for path in (home / "include", home / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])]
    digest = hashlib.sha256(repr((compiler, flags, torch.__version__, torch.version.git_version, sys.version)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")) / "ampplug"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / f"ampplug_native-{digest.hexdigest()[:16]}.so"
    with (folder / f"{target.stem}.lock").open("w") as lock:  # ranks of one job build once; a lock dies with its process
        _lock(lock)
        if not target.exists():
            logger.info("ampplug: building C++, once for this version of torch")
            began = time.perf_counter()
            made = folder / f"{target.stem}.{os.getpid()}.tmp"
            command = [compiler, *flags, str(SOURCES / "module.cpp"), "-o", str(made), f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python", "-ldl"]
            try:
                found = subprocess.run(command, capture_output=True, text=True, timeout=600)
                if found.returncode:
                    raise RuntimeError(f"{compiler} failed:\n{found.stderr[-2000:]}")
                made.replace(target)
            finally:
                made.unlink(missing_ok=True)
            logger.info("ampplug: built C++ in %.0f s: %s", time.perf_counter() - began, target)
    return target


def _lock(file: Any) -> None:
    """Wait for an exclusive lock, where the file system has locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):
        pass


def _import(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("ampplug_native", str(path))
    spec = importlib.util.spec_from_loader("ampplug_native", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
