"""What is refused, by name and before anything is changed: untested DeepSpeed versions that differ, and modes that were not made right."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

TESTED = ("0.19.8",)

# methods of the engine that `check_engine` asks
ASKED = (
    "zero_optimization_stage", "fp16_enabled", "torch_autocast_enabled", "zero_offload_optimizer", "zero_offload_param", "zenflow_config", "autotp_size",
    "is_deepcompile_enabled", "load_universal_checkpoint", "zero_elastic_checkpoint", "zero_quantized_gradients", "zero_quantized_weights",
    "zero_hpz_partition_size", "zero_optimization_partition_weights",
)  # fmt: skip


def check_version(version: str, engine_class: type, methods: Mapping[str, Sequence[str]]) -> None:
    """Compare DeepSpeed with what was tested.

    methods: name -> parameters of the methods that are replaced. RuntimeError where one is missing or takes other parameters; a warning where
    only the version number is new.
    """
    advice = f"ampplug was tested with DeepSpeed {', '.join(TESTED)}: pip install deepspeed=={TESTED[-1]}"
    for name, parameters in methods.items():
        method = getattr(engine_class, name, None)
        if method is None:
            raise RuntimeError(f"DeepSpeed {version} has no {engine_class.__name__}.{name}, through which ampplug works. {advice}")
        found = [p for p in inspect.signature(method).parameters if p != "self"]
        if found[: len(parameters)] != list(parameters):
            raise RuntimeError(
                f"DeepSpeed {version}: {engine_class.__name__}.{name} takes ({', '.join(found)}), ampplug expects ({', '.join(parameters)}). {advice}"
            )
    if version.partition("+")[0] not in TESTED:
        warnings.warn(f"ampplug: DeepSpeed {version} was not tested. {advice}", stacklevel=3)


def check_engine(engine: Any) -> None:
    """ValueError, naming the mode, unless an engine of this configuration trains as it should. Reads the configuration alone."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    if type(engine) is not DeepSpeedEngine:
        raise ValueError(f"ampplug does not train under {type(engine).__name__}; it takes DeepSpeed's plain engine (no pipeline, no hybrid engine)")
    for refused, what in (
        (engine.fp16_enabled(), 'FP16 ("fp16"); BF16 ("bf16") and FP32 work'),
        (engine.torch_autocast_enabled(), 'torch autocast ("torch_autocast"); use "bf16"'),
        (_offloads(engine.zero_offload_optimizer()), "offloaded optimizer states (zero_optimization.offload_optimizer)"),
        (_offloads(engine.zero_offload_param()), "offloaded parameters (zero_optimization.offload_param)"),
        (engine.zenflow_config() is not None, "ZenFlow (zero_optimization.zenflow)"),
        (engine.autotp_size() > 1, "tensor parallelism (tensor_parallel.autotp_size)"),
        (int(engine._config._param_dict.get("sequence_parallel_size", 1)) > 1, "sequence parallelism (sequence_parallel_size)"),
        (engine.is_deepcompile_enabled(), "DeepCompile (compile.deepcompile)"),
        (engine.load_universal_checkpoint(), "universal checkpoints (checkpoint.load_universal)"),
        (engine.zero_elastic_checkpoint(), "elastic checkpoints (zero_optimization.elastic_checkpoint)"),
        (engine.zero_quantized_gradients(), "quantized gradients (zero_optimization.zero_quantized_gradients)"),
        (engine.zero_quantized_weights(), "quantized weights (zero_optimization.zero_quantized_weights)"),
        (engine.zero_hpz_partition_size() > 1, "hierarchical partitions (zero_optimization.zero_hpz_partition_size)"),
    ):
        if refused:
            raise ValueError(f"ampplug does not train with {what}; change that, or set ampplug.enabled to false")


def _offloads(section: Any) -> bool:
    return section is not None and str(getattr(section.device, "value", section.device)) != "none"


def check_parallelism(engine: Any) -> None:
    """ValueError for models that are split over ranks, which is known only when the engine has made its groups."""
    if engine.has_moe_layers:
        raise ValueError("ampplug does not train with mixture-of-experts layers of DeepSpeed; set ampplug.enabled to false")
    if engine.mp_world_size > 1 or engine.sequence_parallel_size > 1:
        raise ValueError("ampplug does not train with model or sequence parallelism (mpu, mesh_param); set ampplug.enabled to false")
