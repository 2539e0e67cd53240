"""Stands in for the CUDA driver, so that layers in C++ run on CPU tensors: what they launch is read from its parameters as a GPU would, checked
against what the kernel was compiled for, and computed in plain torch."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch

from ampplug.kernels import cast as cast_module

LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
NAMES = cast_module.cast_kernel.arg_names[:19] if hasattr(cast_module.cast_kernel, "arg_names") else []


def memory(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that lies there."""
    return torch.frombuffer((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def kind_of(value) -> tuple:
    """What Triton compiles anew for."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return ("f32",) if isinstance(value, float) else (value == 1, value % 16 == 0)


_grid_of = cast_module.grid_of


def grid_on_gpu(m: int, k: int, tile_m: int, tile_k: int, longest: int, device: torch.device) -> cast_module.Grid:
    """`grid_of` as on a GPU of as many multiprocessors: elsewhere one program mends."""
    grid = _grid_of(m, k, tile_m, tile_k, longest, device)
    return grid._replace(menders=min(grid.programs, cast_module.multiprocessors(device)))


class Driver:
    """Kernels by number, launches, and what went wrong in them."""

    def __init__(self) -> None:
        self.kernels: list[tuple[list[tuple], dict]] = [([], {})]
        self.launches = 0
        self.resolved = 0
        self.problems: list[str] = []
        self.entry = LAUNCH(self.launch)

    def compile(self, kernel, grid, *args, **constants):
        """In the place of `launch`: computes, and returns a kernel of a number."""
        assert kernel is cast_module.cast_kernel and len(args) == len(NAMES)
        self.resolved += 1
        arguments = dict(zip(NAMES, args, strict=True))
        self.compute(arguments, constants)
        kinds = [kind_of(a) for a in args]
        self.kernels.append((kinds, {**constants, "x": args[0].dtype}))
        types = [".u64 .ptr .global .align 1" if isinstance(a, torch.Tensor) else ".f32" if isinstance(a, float) else ".u32" for a in args if not (isinstance(a, int) and a == 1)]
        ptx = ".visible .entry cast_kernel(\n" + ",\n".join(f"\t.param {t} cast_kernel_param_{i}" for i, t in enumerate([*types, ".u64 .ptr", ".u64 .ptr"])) + "\n)\n.maxntid 256\n"
        metadata = SimpleNamespace(num_ctas=1, num_warps=constants["num_warps"], shared=1024, launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0, profile_scratch_size=0)
        return SimpleNamespace(metadata=metadata, asm={"ptx": ptx}, function=len(self.kernels) - 1)

    def launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra) -> int:
        """cuLaunchKernel."""
        try:
            kinds, constants = self.kernels[function]
            position, values = 0, {}
            for name, kind in zip(NAMES, kinds, strict=True):
                if kind == (True, False):  # an integer that is 1: a constant
                    values[name] = 1
                    continue
                ctype = ctypes.c_float if kind == ("f32",) else ctypes.c_int32 if isinstance(kind[0], bool) else ctypes.c_uint64
                values[name] = ctype.from_address(parameters[position]).value
                position += 1
            m, k = values["M"], values["K"]
            grid = grid_on_gpu(values["column_stride"] if constants["COLUMNS"] else m, k, cast_module.TILE_M, cast_module.TILE_K, cast_module.SPAN, torch.device("cpu"))
            assert (gx, gy, gz, bx, by, bz, shared) == (grid.programs, 1, 1, 32 * constants["num_warps"], 1, 1, 1024)
            assert (values["tiles_m"], values["span"], values["menders"]) == (grid.tiles_m, grid.span, grid.menders)
            assert values["row_stride"] == k and values["n_partials"] == 0 and values["zero"] == 0.0 and values["column_stride"] == -(-m // 16) * 16
            for name, kind in zip(NAMES, kinds, strict=True):
                if kind != ("f32",):
                    assert kind[1] == (values[name] % 16 == 0) and (isinstance(kind[0], torch.dtype) or kind[0] == (values[name] == 1)), (name, kind, values[name])
            span = (m - 1) * values["stride_m"] + (k - 1) * values["stride_k"] + 1
            x = memory(values["x"], span, constants["x"]).as_strided((m, k), (values["stride_m"], values["stride_k"]))
            fp8 = torch.float8_e4m3fn if constants["FP8_MAX"] == 448.0 else torch.float8_e5m2
            tensors = {
                "x": x,
                "rows": memory(values["rows"], m * k, fp8).view(m, k),
                "columns": memory(values["columns"], k * values["column_stride"], fp8).view(k, -1),
                "scale_inv": memory(values["scale_inv"], 1, torch.float32),
                "slot_scale": memory(values["slot_scale"], 1, torch.float32),
                "record": memory(values["record"], 1, torch.float32),
            }
            self.compute({**values, **tensors}, constants)
            self.launches += 1
            return 0
        except BaseException as error:  # may not pass through C
            self.problems.append(repr(error))
            return 1

    @staticmethod
    def compute(a: dict, constants: dict) -> None:
        """The kernel."""
        assert constants["DELAYED"] and not constants["JUST_IN_TIME"]
        record = a["record"].view(torch.float32) if constants["RECORD"] else None
        fp8 = torch.float8_e4m3fn if constants["FP8_MAX"] == 448.0 else torch.float8_e5m2
        rows, columns, inverse = cast_module.reference_cast(a["x"], fp8, a["slot_scale"], None, record, constants["ROWS"], constants["COLUMNS"], constants["POWER_OF_TWO"])
        for name, made in (("rows", rows), ("columns", columns), ("scale_inv", inverse)):
            if made is not None:
                a[name].view(torch.uint8).copy_(made.view(torch.uint8))
