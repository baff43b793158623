"""`DeepSpeedConfig`: a config with DeepSpeed's defaults for the world size, and the values that an engine reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from logging import WARNING
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..engine.config.config import Config
from ..engine.config.errors import ConfigError, Fault, quoted
from ..engine.config.read import read
from ..engine.config.sections import dtype_name
from ..engine.config.translate import filled
from . import comm
from .dialect import PEAK, with_their_defaults
from .messages import UsageError, log_dist_once

TAG_VALIDATION = ("IGNORE", "WARN", "FAIL")

Source = str | os.PathLike[str] | Mapping[str, Any]


class DeepSpeedConfig:
    """A config file with DeepSpeed's defaults for missing keys.

    The batch triple may change during a training. `checked` is lowtide's config, without these changes.
    """

    def __init__(
        self,
        config: Source,
        mpu: Any = None,
        mesh_device: Any = None,
        world_size: int | None = None,
        num_stages: int = 1,
    ) -> None:
        """world_size: None: that of the process group, or 1 without a group. num_stages: of a pipeline.

        Raises ConfigError.
        """
        given, notes = filled(_read(config), {}, Config)
        for note in notes:
            log_dist_once(f"config: {note}", [0], WARNING)
        section = given.get("optimizer")
        self.optimizer_params = section.get("params") if isinstance(section, Mapping) else None  # as in the file
        self.raw = with_their_defaults(given, Config.load(_left_to_lowtide(given)))
        peak, said = self.section("scheduler", "params", PEAK), given.get("scheduler")
        # This default replaces the optimizer's rate without a word in the file.
        if peak is not None and isinstance(said, Mapping) and PEAK not in (said.get("params") or {}):
            log_dist_once(
                f"scheduler.params.{PEAK}: missing, so DeepSpeed's default {peak} is used instead of the optimizer's "
                'lr. Write a value, or "auto" for that lr',
                [0],
                WARNING,
            )
        if num_stages > 1:
            section = self.raw.get("parallel")
            self.raw["parallel"] = {**(section if isinstance(section, Mapping) else {}), "pipeline": num_stages}
        self.world_size = world_size or (comm.get_world_size() if comm.is_initialized() else 1)
        self.checked = Config.load(_left_to_lowtide(self.raw))
        self.tag_validation = self._tag_validation()
        self._check_dtypes()
        self.stage = self.checked.zero_optimization.stage
        self._resolve()

    def _resolve(self) -> None:
        if self.checked.planned_keys:
            self.resolved = self.checked
        else:
            self.resolved = self.checked.resolve(self.world_size)
        resolved = self.resolved
        if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & self.raw.keys():
            raise UsageError(
                "config: expected train_batch_size or train_micro_batch_size_per_gpu, found neither. DeepSpeed counts "
                "samples by either key"
            )
        self.train_batch_size: Any = resolved.train_batch_size
        self.train_micro_batch_size_per_gpu: Any = resolved.train_micro_batch_size_per_gpu
        self.gradient_accumulation_steps: Any = resolved.gradient_accumulation_steps or 1

    def _tag_validation(self) -> str:
        """Return how to treat different tags on different ranks. Raises ConfigError for an unknown word."""
        found = str(_written("Warn", "checkpoint", "tag_validation")(self)).upper()
        if found not in TAG_VALIDATION:
            message = f"expected one of {', '.join(TAG_VALIDATION)}, in any case, found {found!r}"
            raise ConfigError([Fault("checkpoint.tag_validation", "value", message)])
        return found

    def _check_dtypes(self) -> None:
        """Raise UsageError if `param_dtype` contradicts fp16 or bf16, ConfigError if a key is no dtype."""
        for key in ("param_dtype", "buffer_dtype"):
            found = GETTERS[key](self)
            if found is not None and found not in _DTYPES:
                message = f"expected one of {', '.join(_DTYPES)}, found {quoted(found)}"
                raise ConfigError([Fault(f"data_types.{key}", "value", message)])
        mode, said = _compute_dtype(self), GETTERS["param_dtype"](self)
        if said is not None and _DTYPES[said] != mode:
            raise UsageError(
                f"data_types.param_dtype: expected the dtype that bf16.enabled and fp16.enabled choose ({mode}), found "
                f'"{said}". Change either'
            )

    @property
    def dtype_of_buffers(self) -> torch.dtype | None:
        """The dtype to cast a model's buffers to; None: keep their dtypes."""
        return _DTYPES.get(self.buffer_dtype)

    def section(self, *path: str) -> Any:
        """Return the unchecked value at a path of the file, or None."""
        found: Any = self.raw
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def __getattr__(self, name: str) -> Any:
        if name in GETTERS:
            return GETTERS[name](self)
        raise AttributeError(
            f"DeepSpeedConfig has no attribute '{name}'; `checked` is lowtide's config, `raw` the given one"
        )


def _read(config: Source) -> dict[str, Any]:
    """Read a config as lowtide does, or by hjson, if installed, for a file that is not JSON. Raises ConfigError."""
    try:
        return read(config)[0]
    except ConfigError as error:
        is_file = isinstance(config, (str, os.PathLike)) and os.path.isfile(config)
        # DeepSpeed reads hjson, so a file may have comments. The package is optional here.
        if not is_file or [fault.kind for fault in error.faults] != ["syntax"] or find_spec("hjson") is None:
            raise
        hjson = import_module("hjson")
        text = Path(config).read_text(encoding="utf-8-sig")  # type: ignore[arg-type]  # it is a file
        try:
            values = hjson.loads(text)
        except hjson.HjsonDecodeError:
            # JSON's error: it has the place in the file, and most files are meant as JSON.
            raise error from None
        return read(values)[0]


def _left_to_lowtide(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config without the keys that this package handles: lowtide would note that they have no effect."""
    left = dict(raw)
    if isinstance(left.get("dataloader_drop_last"), bool):
        del left["dataloader_drop_last"]
    if isinstance(left.get("managed_gradient_accumulation"), bool):
        del left["managed_gradient_accumulation"]
    section = left.get("data_types")
    if isinstance(section, Mapping):
        left["data_types"] = {k: value for k, value in section.items() if k not in ("param_dtype", "buffer_dtype")}
    section = left.get("pipeline")
    if isinstance(section, Mapping):
        kinds = {"seed_layers": bool, "activation_checkpoint_interval": int}
        left["pipeline"] = {k: value for k, value in section.items() if type(value) is not kinds.get(k)}
    section = left.get("checkpoint")
    if isinstance(section, Mapping) and isinstance(section.get("tag_validation"), str):
        left["checkpoint"] = {key: value for key, value in section.items() if key != "tag_validation"}
    return left


def _option(section: str, key: str) -> Callable[[DeepSpeedConfig], Any]:
    return lambda config: getattr(getattr(config.checked, section), key)


def _written(default: Any, *path: str) -> Callable[[DeepSpeedConfig], Any]:
    """Return a getter of a value in the file that is no field of lowtide's config. "stage3_" is optional in its key."""
    plain = (*path[:-1], path[-1].removeprefix("stage3_"))

    def get(config: DeepSpeedConfig) -> Any:
        written = config.section(*path)
        found = config.section(*plain) if written is None else written
        return default if found is None else found

    return get


def _dtype_of(key: str) -> Callable[[DeepSpeedConfig], Any]:
    return lambda config: dtype_name(_written(None, "data_types", key)(config))


def _type_of(section: str) -> Callable[[DeepSpeedConfig], Any]:
    return _written(None, section, "type")


def _loss_scale_args(config: DeepSpeedConfig) -> dict[str, Any] | None:
    fp16 = config.checked.fp16
    if not fp16.enabled or fp16.loss_scale:
        return None
    return {
        "init_scale": 2**fp16.initial_scale_power,
        "scale_window": fp16.loss_scale_window,
        "min_scale": fp16.min_loss_scale,
        "delayed_shift": fp16.hysteresis,
    }


def _monitors(config: DeepSpeedConfig) -> SimpleNamespace:
    """Return the sections of the monitors, with `enabled`: whether any is on."""
    found = {name: getattr(config.checked, name) for name in ("tensorboard", "wandb", "csv_monitor")}
    return SimpleNamespace(**found, enabled=any(section.enabled for section in found.values()))


_ZERO = "zero_optimization"
_PIPELINE = {  # DeepSpeed's defaults
    "stages": "auto",
    "partition": "best",
    "seed_layers": False,
    "activation_checkpoint_interval": 0,
    "pipe_partitioned": True,
    "grad_partitioned": True,
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

GETTERS: dict[str, Callable[[DeepSpeedConfig], Any]] = {
    "fp16_enabled": _option("fp16", "enabled"),
    "bfloat16_enabled": _option("bf16", "enabled"),
    "fp16_auto_cast": _written(False, "fp16", "auto_cast"),
    "loss_scale": _option("fp16", "loss_scale"),
    "dynamic_loss_scale": lambda config: not config.checked.fp16.loss_scale,
    "initial_dynamic_scale": lambda config: 2**config.checked.fp16.initial_scale_power,
    "dynamic_loss_scale_args": _loss_scale_args,
    "gradient_clipping": lambda config: config.checked.gradient_clipping,
    "steps_per_print": _written(None, "steps_per_print"),
    "gradient_predivide_factor": lambda config: config.checked.gradient_predivide_factor,
    "postscale_gradients": lambda config: not config.checked.prescale_gradients,
    "communication_data_type": lambda config: config.checked.communication_data_type,
    "optimizer_name": lambda config: _lowered(_type_of("optimizer")(config)),
    "optimizer_params": lambda config: config.optimizer_params,
    "scheduler_name": _type_of("scheduler"),
    "scheduler_params": _written(None, "scheduler", "params"),
    "zero_enabled": lambda config: config.stage > 0,
    "zero_optimization": lambda config: config.stage > 0,
    "zero_optimization_stage": lambda config: config.stage,
    "zero_optimization_partition_gradients": lambda config: config.stage >= 2,
    "zero_optimization_partition_weights": lambda config: config.stage >= 3,
    "zero_config": lambda config: config.checked.zero_optimization,
    "zero_offload_optimizer": lambda config: _if_used(config.checked.zero_optimization.offload_optimizer),
    "zero_offload_param": lambda config: _if_used(config.checked.zero_optimization.offload_param),
    "zero_cpu_offload": lambda config: config.checked.zero_optimization.offload_optimizer.device == "cpu",
    "zero_use_cpu_optimizer": lambda config: config.checked.zero_optimization.offload_optimizer.device != "none",
    "zero_nvme_offload_optimizer": lambda config: config.checked.zero_optimization.offload_optimizer.device == "nvme",
    "zero_gather_16bit_weights_on_model_save": lambda config: any(
        _written(False, _ZERO, f"stage3_gather_{kind}_weights_on_model_save")(config) for kind in ("16bit", "fp16")
    ),
    "zero_pipeline_loading_checkpoint": _written(False, _ZERO, "pipeline_loading_checkpoint"),
    "zero_reduce_scatter": _written(True, _ZERO, "reduce_scatter"),
    "zero_overlap_comm": lambda config: _written(config.stage == 3, _ZERO, "overlap_comm")(config),
    "zero_reduce_bucket_size": _written(int(5e8), _ZERO, "reduce_bucket_size"),
    "zero_allgather_bucket_size": _written(int(5e8), _ZERO, "allgather_bucket_size"),
    "zero_allgather_partitions": _written(True, _ZERO, "allgather_partitions"),
    "zero_contiguous_gradients": _written(True, _ZERO, "contiguous_gradients"),
    "zero_load_from_fp32_weights": _written(True, _ZERO, "load_from_fp32_weights"),
    "zero_elastic_checkpoint": _written(False, _ZERO, "elastic_checkpoint"),
    "zero_sub_group_size": _written(int(1e9), _ZERO, "sub_group_size"),
    "zero_max_live_parameters": _written(int(1e9), _ZERO, "stage3_max_live_parameters"),
    "zero_max_reuse_distance": _written(int(1e9), _ZERO, "stage3_max_reuse_distance"),
    "zero_prefetch_bucket_size": _written(int(5e7), _ZERO, "stage3_prefetch_bucket_size"),
    "zero_param_persistence_threshold": _written(int(1e5), _ZERO, "stage3_param_persistence_threshold"),
    "zero_ignore_unused_parameters": _written(True, _ZERO, "ignore_unused_parameters"),
    "zero_round_robin_gradients": _written(False, _ZERO, "round_robin_gradients"),
    "zero_hpz_partition_size": lambda config: config.checked.zero_optimization.zero_hpz_partition_size,
    "zero_allow_untested_optimizer": _written(False, "zero_allow_untested_optimizer"),
    "zero_force_ds_cpu_optimizer": _written(True, "zero_force_ds_cpu_optimizer"),
    "wall_clock_breakdown": _written(False, "wall_clock_breakdown"),
    "memory_breakdown": _written(False, "memory_breakdown"),
    "pipeline": lambda config: {**_PIPELINE, **(config.section("pipeline") or {})},
    "pipeline_checkpoint_interval": _written(0, "pipeline", "activation_checkpoint_interval"),
    "dump_state": _written(False, "dump_state"),
    "log_level": _written(None, "log_level"),
    "dataloader_drop_last": _written(False, "dataloader_drop_last"),
    "sparse_gradients_enabled": _written(False, "sparse_gradients"),
    "flops_profiler_enabled": _written(False, "flops_profiler", "enabled"),
    "curriculum_learning_enabled": _written(False, "curriculum_learning", "enabled"),
    "data_efficiency_enabled": _written(False, "data_efficiency", "enabled"),
    "autotuning_enabled": _written(False, "autotuning", "enabled"),
    "torch_autocast_enabled": _written(False, "torch_autocast", "enabled"),
    "torch_autocast_dtype": lambda config: (
        getattr(torch, config.checked.torch_autocast.dtype) if config.section("torch_autocast") else None
    ),
    "pld_enabled": _written(False, "progressive_layer_drop", "enabled"),
    "checkpoint_tag_validation_enabled": lambda config: config.tag_validation != "IGNORE",
    "checkpoint_tag_validation_fail": lambda config: config.tag_validation == "FAIL",
    "load_universal_checkpoint": _written(False, "checkpoint", "load_universal"),
    "use_node_local_storage": _written(False, "checkpoint", "use_node_local_storage"),
    "managed_gradient_accumulation": _written(True, "managed_gradient_accumulation"),
    "swap_tensor_config": lambda config: config.checked.aio,
    "aio_config": lambda config: config.checked.aio,
    "random_ltd_enabled": lambda config: False,
    "get_data_types": lambda config: (_compute_dtype(config), _accumulation_dtype(config)),
    "param_dtype": _dtype_of("param_dtype"),
    "buffer_dtype": _dtype_of("buffer_dtype"),
    "grad_accum_dtype": lambda config: config.checked.data_types.grad_accum_dtype,
    "gradient_allreduce_op": lambda config: config.checked.gradient_allreduce_op,
    "prescale_gradients": lambda config: config.checked.prescale_gradients,
    "float16_config": lambda config: config.checked.fp16,
    "bfloat16_config": lambda config: config.checked.bf16,
    "monitor_config": _monitors,
    "flops_profiler_profile_step": _written(1, "flops_profiler", "profile_step"),
    "flops_profiler_module_depth": _written(-1, "flops_profiler", "module_depth"),
    "flops_profiler_top_modules": _written(1, "flops_profiler", "top_modules"),
    "flops_profiler_detailed": _written(True, "flops_profiler", "detailed"),
    "flops_profiler_recompute_fwd_factor": _written(0.0, "flops_profiler", "recompute_fwd_factor"),
    "flops_profiler_output_file": _written(None, "flops_profiler", "output_file"),
    "fp16_master_weights_and_gradients": _written(False, "fp16", "fp16_master_weights_and_grads"),
    "bf16_master_weights_and_gradients": _written(False, "bf16", "bf16_master_weights_and_grads"),
    "bf16_optimizer_states": _written(False, "bf16", "bf16_optimizer_states"),
    "disable_allgather": _written(False, "disable_allgather"),
    "disable_python_gc": _written(False, "disable_python_gc"),
    "keep_in_fp32_modules": _written("auto", "data_types", "keep_in_fp32_modules"),
    "optimizer_legacy_fusion": _written(False, "optimizer", "legacy_fusion"),
    "checkpoint_parallel_write_pipeline": _written(False, "checkpoint", "parallel_write", "pipeline_stage"),
    "is_sanity_checks_enabled": _written(False, _ZERO, "enable_sanity_checks"),
    "super_offload": _written(False, _ZERO, "offload_optimizer", "super_offload"),
    "cpuadam_cores_perc": lambda config: _written(
        0.8 if config.section(_ZERO, "offload_optimizer") else 0.9, _ZERO, "offload_optimizer", "cpuadam_cores_perc"
    )(config),
    "zero_partial_offload": lambda config: config.checked.zero_optimization.offload_optimizer.ratio,
    "zero_allgather_sequential": _written(False, _ZERO, "stage3_allgather_sequential"),
    "zero_compute_grad_norm": _written(True, _ZERO, "compute_grad_norm"),
    "zero_legacy_stage1": _written(False, _ZERO, "legacy_stage1"),
    "zero_log_trace_cache_warnings": _written(False, _ZERO, "log_trace_cache_warnings"),
    "zero_model_persistence_threshold": _written(2**63 - 1, _ZERO, "stage3_model_persistence_threshold"),
    "zero_module_granularity_threshold": _written(0, _ZERO, "stage3_module_granularity_threshold"),
    "zero_multi_rank_bucket_allreduce": _written(True, _ZERO, "use_multi_rank_bucket_allreduce"),
    "zero_parameter_alignment": _written(False, _ZERO, "parameter_alignment"),
    "zero_save_muon_momentum_buffer_in_memory": _written(False, _ZERO, "save_muon_momentum_buffer_in_memory"),
    "zero_quantized_weights": _written(False, _ZERO, "zero_quantized_weights"),
    "zero_quantized_nontrainable_weights": _written(False, _ZERO, "zero_quantized_nontrainable_weights"),
    "zero_quantized_gradients": _written(False, _ZERO, "zero_quantized_gradients"),
    "autotp_size": lambda config: config.checked.parallel.tensor if config.checked.parallel.tensor > 1 else 0,
}
"""The attributes of the config. The engine has those that DeepSpeed's engine has, as methods."""


def _if_used(section: Any) -> Any:
    return None if section.device == "none" else section


def _compute_dtype(config: DeepSpeedConfig) -> torch.dtype:
    is_half = config.checked.fp16.enabled
    return torch.float16 if is_half else torch.bfloat16 if config.checked.bf16.enabled else torch.float32


def _accumulation_dtype(config: DeepSpeedConfig) -> torch.dtype:
    return _DTYPES[config.checked.data_types.grad_accum_dtype or "fp32"]


def _lowered(name: Any) -> Any:
    return name.lower() if isinstance(name, str) else name
