"""Every kernel compiles for Hopper, which needs no GPU. The interpreter would not notice what the compiler refuses."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = '''
import re
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ampplug.kernels import adam_step, cast, norm, refresh, rms_norm, scale_update, swiglu, transpose
from ampplug.nn import native

def check(kernel, arguments, constants, warps):
    names = kernel.arg_names
    given = dict(pair.split(":") for pair in arguments.split())
    assert set(names) == set(given) | set(constants), set(names) ^ (set(given) | set(constants))
    source = ASTSource(
        fn=kernel,
        signature={n: given.get(n, "constexpr") for n in names},
        constexprs={(names.index(k),): v for k, v in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n, t in given.items() if t.startswith("*")},
    )
    built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert "cubin" in built.asm
    # a constant beyond fp32 makes whole tiles fp64, at a tenth of the speed
    assert kernel is scale_update.scale_update_kernel or not re.search("tensor<[0-9x]+xf64", built.asm["ttgir"]), kernel
    print(kernel.fn.__name__, "compiled")
    return built

CAST = ("x:*bf16 rows:*fp8e4nv columns:*fp8e4nv scale_inv:*fp32 slot_scale:*fp32 partials:*i32 record:*i32 scratch:*i32 M:i32 K:i32 stride_m:i32 "
        "row_stride:i32 column_stride:i32 n_partials:i32 tiles_m:i32 span:i32 menders:i32 zero:fp32")
module = native.load()  # C++, which launches this kernel with parameters of its own making
for delayed, own, ones in ((True, False, ["stride_k"]), (True, False, ["M", "stride_k", "tiles_m", "span", "menders"]), (True, True, ["stride_k"]), (False, True, ["stride_k"])):
    given = " ".join(pair for pair in (CAST + " stride_k:i32").split() if pair.split(":")[0] not in ones)
    built = check(cast.cast_kernel, given, dict(**dict.fromkeys(ones, 1), FP8_MAX=448.0, OUTGROWN_MAX=460.0, DELAYED=delayed, JUST_IN_TIME=own,
          RECORD=delayed, ROWS=True, COLUMNS=True, POWER_OF_TWO=False, FP8=tl.float8e4nv, BM=cast.TILE_M, BK=cast.TILE_K, PARTIALS=cast.MAX_PARTIALS),
          cast.WARPS)
    if module is not None:
        integers = cast.cast_kernel.arg_names[8:18]
        key = sum(2 << 2 * (9 - integers.index(name)) for name in ones)  # as Cast::key has them
        assert native.unlike(built, module.parameter_sizes(key)) is None, native.unlike(built, module.parameter_sizes(key))
        assert "parameters have" in native.unlike(built, module.parameter_sizes(key ^ 2))
SWIGLU = ("a:*bf16 b:*bf16 dh:*bf16 rows:*fp8e4nv columns:*fp8e4nv scale_inv:*fp32 slot_scale:*fp32 partials:*i32 record:*i32 scratch:*i32 "
          "rows_2:*fp8e4nv columns_2:*fp8e4nv scale_inv_2:*fp32 slot_scale_2:*fp32 partials_2:*i32 record_2:*i32 scratch_2:*i32 "
          "h_columns:*fp8e4nv h_inv:*fp32 M:i32 K:i32 column_stride:i32 n_partials:i32 tiles_m:i32 span:i32 menders:i32 zero:fp32")
for backward, own in ((False, False), (True, False), (True, True)):
    check(swiglu.swiglu_kernel, SWIGLU, dict(BACKWARD=backward, H_COLUMNS=backward, FP8_MAX=448.0, OUTGROWN_MAX=460.0, DELAYED=not own, JUST_IN_TIME=own, RECORD=True, ROWS=True,
          COLUMNS=True, POWER_OF_TWO=False, FP8=tl.float8e4nv, BM=32, BK=128, PARTIALS=cast.MAX_PARTIALS), swiglu.WARPS)
    check(swiglu.partial_amaxes_kernel, "a:*bf16 b:*bf16 dh:*bf16 first:*i32 second:*i32 M:i32 K:i32", dict(BACKWARD=backward, BM=32, BK=128), 8)
NORM = ("x:*bf16 weight:*bf16 y:*bf16 r_out:*fp32 rows:*fp8e4nv columns:*fp8e4nv scale_inv:*fp32 slot_scale:*fp32 record:*i32 scratch:*i32 M:i32 K:i32 "
        "column_stride:i32 eps:fp32 tiles_m:i32 menders:i32 zero:fp32")
for early, made, rows in ((False, True, rms_norm.TILE_M), (True, True, rms_norm.SMALL_M), (True, False, rms_norm.TILE_M)):
    check(rms_norm.rms_norm_kernel, NORM, dict(EARLY=early, CAST=made, FP8_MAX=448.0, OUTGROWN_MAX=460.0, RECORD=made, COLUMNS=made, POWER_OF_TWO=False,
          FP8=tl.float8e4nv, BM=rows, BK=rms_norm.TILE_K), rms_norm.WARPS)
check(rms_norm.rms_norm_backward_kernel, "dy:*bf16 x:*bf16 weight:*fp32 r_in:*fp32 dx:*bf16 partials:*fp32 M:i32 K:i32",
      dict(EARLY=True, NEED_X=True, NEED_WEIGHT=True, BK=2048), 4)
check(cast.partial_amax_kernel, "x:*bf16 partials:*i32 M:i32 K:i32 stride_m:i32", dict(stride_k=1, BM=32, BK=128), 4)
STEP = ("table:*i64 chunks:*i32 hyper:*fp64 steps:*i32 limits:*fp32 amaxes:*fp32 next_amaxes:*i32 scales:*fp32 scale_invs:*fp32 found_inf:*fp32 "
        "loss_scale:*fp32 clip:*fp32 seed:i32 n_chunks:i32")
for flag in (False, True):
    check(adam_step.adam_step_kernel, STEP, dict(HAS_FOUND_INF=flag, HAS_LOSS_SCALE=flag, HAS_CLIP=flag, POWER_OF_TWO=flag, CHUNK=128,
          BR=adam_step.TILE_ROWS, BC=128), adam_step.WARPS)
    check(norm.norm_kernel, "table:*i64 chunks:*i32 partials:*fp32 counter:*i32 norm:*fp32 clip:*fp32 max_norm:fp32 n_chunks:i32",
          dict(HAS_PREVIOUS=flag, PROGRAMS=norm.MAX_PROGRAMS, CHUNK=128, BR=32, BC=128), 4)
    check(scale_update.scale_update_kernel, "amax:*fp32 history:*fp32 position:*i32 scale:*fp32 fp8_max:*fp32 weight_amax:*fp32 next_amax:*fp32 "
          "table:*i64 hyper:*fp64 steps:*i32 limits:*fp32 found_inf:*fp32 clip:*fp32 n_slots:i32 n_weights:i32 n_tensors:i32 fp8_factor:fp32",
          dict(HISTORY=16, HISTORY_BLOCK=16, POWER_OF_TWO=flag, HAS_FOUND_INF=flag, HAS_CLIP=flag, BLOCK=128), 4)
    check(refresh.weight_cast_kernel, "table:*i64 chunks:*i32 next_amaxes:*fp32 old_scales:*fp32 scales:*fp32 scale_invs:*fp32 n_chunks:i32",
          dict(KEEP_SCALE=flag, POWER_OF_TWO=flag, CHUNK=128, BR=refresh.TILE_ROWS, BC=128), 8)
check(refresh.weight_amax_kernel, "table:*i64 chunks:*i32 next_amaxes:*i32 n_chunks:i32", dict(CHUNK=128, BR=refresh.TILE_ROWS, BC=128), 4)
check(transpose.transpose_kernel, "table:*i64 tiles:*i32 n_tiles:i32", dict(TILE=transpose.TILE), 4)
print("all done")
'''


def test_all_kernels_compile_for_hopper(tmp_path):
    """In a process of its own: the interpreter, which other tests use, replaces the compiler for good."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    source = tmp_path / "compile_all.py"
    source.write_text(PROGRAM)
    found = subprocess.run(
        [sys.executable, str(source)], capture_output=True, text=True, env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert found.stdout.strip().endswith("all done"), found.stdout + found.stderr[-3000:]
