"""Values that DeepSpeed takes in another type: "true" for true, "500000000" for the number, 1 for true.

[Note: where it does] Some of DeepSpeed's sections are read by pydantic, which converts; the keys of these are here. The
others (the batch sizes, `gradient_clipping`, the params of optimizer and scheduler, `aio`, ...) it takes as they stand,
and trains wrong or fails with a string, so such a string is an error here. Of what is true or false it takes 1 and 0.
Source: DeepSpeed 0.19.8, the fields of its DeepSpeedConfigModel classes; pydantic's conversion table.
"""

import math
import re
from collections.abc import Callable

_WORDS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


def _flag(value: object) -> object:
    if isinstance(value, str):
        return _WORDS.get(value.lower(), value)
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def _whole(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+(_[0-9]+)*(\.0*)?\s*", value):
        return int(value.split(".")[0])
    return int(value) if isinstance(value, bool) else value


def _real(value: object) -> object:
    try:
        found = float(value) if isinstance(value, str | bool) else value
    except ValueError:
        return value
    return found if isinstance(found, int | float) and math.isfinite(found) else value


def _bare_flag(value: object) -> object:
    return value if isinstance(value, str) else _flag(value)


_STAGE_3_FLAGS = """
    gather_16bit_weights_on_model_save gather_fp16_weights_on_model_save use_all_reduce_for_fetch_params
    allgather_sequential
"""
_STAGE_3_NUMBERS = """
    prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
    max_reuse_distance module_granularity_threshold
"""
_FLAGS = {
    "zero_optimization": """
        contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm
        compute_grad_norm load_from_fp32_weights elastic_checkpoint cpu_offload cpu_offload_param
        cpu_offload_use_pin_memory ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment
        zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
        mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply
        log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
    """
    + _STAGE_3_FLAGS
    + " ".join(f"stage3_{name}" for name in _STAGE_3_FLAGS.split()),
    "zero_optimization.offload_param": "pin_memory",
    "zero_optimization.offload_optimizer": "pin_memory pipeline_read pipeline_write fast_init super_offload",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "fp16": "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
    "tensorboard": "enabled",
    "wandb": "enabled",
    "csv_monitor": "enabled",
    "comms_logger": "enabled prof_all verbose debug",
    "compile": "deepcompile",
}
_BARE_FLAGS = """
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown dump_state
    disable_allgather sparse_gradients prescale_gradients dataloader_drop_last aio.single_submit aio.overlap_events
    activation_checkpointing.partition_activations activation_checkpointing.contiguous_memory_optimization
    activation_checkpointing.cpu_checkpointing activation_checkpointing.synchronize_checkpoint_boundary
    activation_checkpointing.profile flops_profiler.enabled elasticity.enabled
"""
"""That DeepSpeed only asks whether they are true: 1 and 0 are, a string always is."""
_INTEGERS = {
    "zero_optimization": """
        stage reduce_bucket_size allgather_bucket_size sub_group_size zero_hpz_partition_size mics_shard_size
    """
    + _STAGE_3_NUMBERS
    + " ".join(f"stage3_{name}" for name in _STAGE_3_NUMBERS.split()),
    "zero_optimization.offload_param": "buffer_count buffer_size max_in_cpu",
    "zero_optimization.offload_optimizer": "buffer_count",
    "fp16": "initial_scale_power loss_scale_window hysteresis min_loss_scale",
}
_NUMBERS = {"zero_optimization.offload_optimizer": "ratio cpuadam_cores_perc", "fp16": "loss_scale"}

_TAKEN: dict[str, Callable[[object], object]] = {
    f"{section}.{name}": take
    for keys, take in ((_FLAGS, _flag), (_INTEGERS, _whole), (_NUMBERS, _real))
    for section, names in keys.items()
    for name in names.split()
}
_TAKEN.update(dict.fromkeys(_BARE_FLAGS.split(), _bare_flag))
_TAKEN["gradient_allreduce_op"] = lambda value: value.lower() if isinstance(value, str) else value


def converted(path: str, value: object) -> object:
    """The value as DeepSpeed converts it for this key, by the name that it has there; else as it stands."""
    take = _TAKEN.get(path.replace("bfloat16.", "bf16.", 1))
    if take is None or (isinstance(value, bool) and path == "fp16.loss_scale"):
        return value
    return take(value)
