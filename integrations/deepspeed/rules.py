"""DeepSpeed's keys that are no fields of `Config`: keys without effect, and keys for unsupported features.

[Note: four outcomes] A key works (a field of Config), has a Rule here, or is unknown (an error). By its Rule a value
gives nothing (it holds anyway), a note (no effect, and why), or a fault (unsupported). A value that
would change numbers or the place of memory never gives just a note.
Source of the keys: DeepSpeed 0.19 runtime/config.py, runtime/zero/config.py and the files they read.

A section that is off has no effect, whatever it contains.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..engine.config.errors import Fault, quoted

Expected = Literal["true or false", "an integer", "a number", "a string", "an object", "any value"]


@dataclass(frozen=True)
class Rule:
    """The effect of a key of DeepSpeed.

    "no_effect": any value of the expected type is legal. A note gives the reason, unless the value is null (as if
    the key were missing) or in `agrees`.
    "only": just the values in `agrees` are legal. The reason says what to do.
    "section": legal if it is empty or `enabled` is false, whatever else it has, else unsupported.
    """

    outcome: Literal["no_effect", "only", "section"]
    reason: str
    expected: Expected = "true or false"
    agrees: tuple[object, ...] = ()


def _no_effect(reason: str, expected: Expected = "true or false", *agrees: object) -> Rule:
    return Rule("no_effect", reason, expected, agrees)


def _only(value: object, reason: str, expected: Expected = "true or false") -> Rule:
    return Rule("only", reason, expected, (value,))


def _section(reason: str) -> Rule:
    return Rule("section", reason, "an object")


DEEPCOMPILE_WORDS = (
    "autoep_non_moe",
    "free_activation",
    "free_activation_threshold",
    "offload_activation",
    "offload_activation_pin_memory",
    "offload_opt_states",
    "double_buffer",
    "symmetric_memory",
    "debug_log",
    "offload_parameters",
    "sync_before_reduce",
    "sync_after_reduce",
    "sync_before_allgather",
    "sync_after_allgather",
    "keep_int_input_tensors",
    "keep_all_input_tensors",
    "passes",
)

_BUCKETS = "gradients and parameters travel unit by unit in flat buffers, there are no buckets to size"
_COLLECTIVES = "the engine chooses the collective for each message (communication.transport)"
_BUFFERS = "host buffers have exactly the sizes that are needed"
_FLAT = "every unit has flat buffers in any case"
_OVERLAP = "the engine chooses whether communication overlaps with computation"
_PERSIST = "every parameter is sharded, small parameters too, so nothing stays gathered"
_REUSE = "a unit is released after each use; stage3_prefetch_bucket_size limits the gathers ahead"
_SAVE = "engine.export() writes full weights and never gathers the model; engine.state_dict() always gives them"
_MASTER_WEIGHTS = "saving and loading use the fp32 master weights"
_REMOVE = "remove the section"
_ONE_PATH = "set nvme_path: every rank has separate files in it"
_NO_TIMER = "read times in your loop or with torch.profiler"
_ONE_FOLDER = "all ranks write into the same folder, which each must see"
_ANY_TOPOLOGY = "every checkpoint loads at every number of ranks and every stage"
_BACKGROUND = "remove the section; checkpoint.async writes in the background"
_OWN_RANGES = "each rank reads only its ranges of a checkpoint"
_PARALLEL_WRITE = "every rank writes its part in parallel"
_TRACE = "the order of the units is fixed when the engine is built, there is no trace to record"
_WINDOW = "reading the next unit, updating this unit and writing the last unit always overlap"
_WHOLE = "stages send whole tensors, not divided over tensor-parallel ranks"
_TORCH_ARGUMENT = "the update is a fused pass over each flat shard"
_PARTITIONED = (
    "it divides activations over tensor-parallel ranks (parallel.tensor_sequence does that); "
    "activation_checkpointing.every recomputes blocks"
)
_COMPILED_BY_CALL = "DeepSpeed compiles where engine.compile() is called; here engine.module.compile() does"
_FROM_ZERO = "training starts at step 0, or continues at the step of a checkpoint; remove the key"
_NO_SCALE = "bf16 has the range of fp32, losses are not scaled"
_APEX = "it is Apex's key, for the section `amp`"
_NEOX = "it is GPT-NeoX's key; set bf16.enabled or fp16.enabled"
_READ_BY_NOBODY = "DeepSpeed does not read it either"

_OF_FP16 = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
_NOBODYS = ("comms_config", "monitor_config", "monitor", "logging", "disable_fused_adam")  # seen in files of users

_DEEPCOMPILE = "it belongs to deepcompile"
_SWITCHES = (True, False, 10485760)  # without effect while deepcompile is off

_TENSOR = "set parallel.tensor to the number of ranks; remove the key"
_SPLITS = "set tensor_parallel.plan; remove the key"
_VOCABULARY = "a head over the vocabulary is split together with the loss over its logits"
_LOCO = "quantized gradients use unbiased stochastic rounding without feedback; remove the section"
_SIGNS_GO = "signs use communication.transport, as every message does"

RULES: dict[str, Rule] = {
    "zero_allow_untested_optimizer": _no_effect("any elementwise optimizer works with every stage"),
    "zero_force_ds_cpu_optimizer": _no_effect("the engine's kernels update on the device of the state"),
    "wall_clock_breakdown": _no_effect(_NO_TIMER, "true or false", False),
    "memory_breakdown": _no_effect("read memory in your loop", "true or false", False),
    "dump_state": _no_effect("run `lowtide config show` on the file", "true or false", False),
    "disable_allgather": _no_effect(_COLLECTIVES, "true or false", False),
    "disable_python_gc": _no_effect("the garbage collector is left as it is", "true or false", False),
    "dataloader_drop_last": _no_effect("no data loader is built here", "true or false", False),
    "log_level": _no_effect("set the level of Python's logging in your script", "any value"),
    "vocabulary_size": _no_effect("DeepSpeed only warns about its alignment", "any value"),
    "timers": _no_effect(_NO_TIMER, "an object"),
    "aio.queue_depth": _no_effect("each thread has one request in flight; thread_count says how many", "an integer"),
    "aio.single_submit": _no_effect("each thread has one request in flight"),
    "aio.overlap_events": _no_effect("reads, writes and updates always overlap"),
    "aio.use_gds": _only(False, "a drive is read and written through host memory; set false"),
    "seq_parallel_communication_data_type": _no_effect("sequence parallelism is not in use", "a string"),
    "managed_gradient_accumulation": _only(True, "the engine counts the microbatches; remove the key"),
    "sparse_gradients": _only(False, "gradients of embeddings are reduced dense; remove the key"),
    "use_data_before_expert_parallelism": _only(
        False, "ranks that share experts are next to each other; remove the key"
    ),
    "sequence_parallel_size": _only(1, "set parallel.sequence; remove the key", "an integer"),
    "graph_harvesting": _only(False, "remove the key"),
    "amp": _section("set bf16.enabled or fp16.enabled"),
    "torch_autocast.lower_precision_safe_modules": _no_effect(
        "communication_data_type sets the type of sent gradients", "any value"
    ),
    "autotuning": _section("try configs by `lowtide tune CONFIG SCRIPT`, and remove the section"),
    "compression_training": _section("quantize or prune the model in your script and remove the section"),
    "quantize_training": _section(_REMOVE),
    "weight_quantization": _section(_REMOVE),
    "eigenvalue": _section(_REMOVE),
    "comet": _section("set tensorboard, wandb or csv_monitor; remove the section"),
    "csv_monitor.group": _no_effect("it is wandb's key", "a string"),
    "data_efficiency": _section("sample the data in your script and remove the section"),
    "curriculum_learning": _section("sample the data in your script and remove the section"),
    "progressive_layer_drop": _section("drop layers in your model; skipped blocks work at every stage"),
    "sparse_attention": _section("build it into the model and remove the section"),
    "hybrid_engine": _section(_REMOVE),
    "nebula": _section(_BACKGROUND),
    "datastates_ckpt": _section(_BACKGROUND),
    "compile.enabled": _only(False, "set compile.blocks; remove the key"),
    "compile.deepcompile": _only(False, "set compile.blocks; remove the key"),
    "compile.disable": _no_effect("compile.blocks says whether blocks are compiled"),
    "compile.kwargs": _only({}, "set compile.mode, dynamic or fullgraph; remove the key", "an object"),
    **{f"compile.{key}": _no_effect(_DEEPCOMPILE, "any value", *_SWITCHES) for key in DEEPCOMPILE_WORDS},
    "tensor_parallel.dtype": _no_effect("layers are split in the types that the model has", "any value"),
    "tensor_parallel.autotp_size": Rule("only", _TENSOR, "an integer", (0, 1)),
    "tensor_parallel.tp_size": _only(1, _TENSOR, "an integer"),
    "tensor_parallel.tp": Rule("only", _TENSOR, "an object", ({"tp_size": 1}, {})),
    "tensor_parallel.preset_model": _only(None, _SPLITS, "a string"),
    "tensor_parallel.partition_config": _only(None, _SPLITS, "an object"),
    "tensor_parallel.kernel_inject": _only(False, "set kernels.fuse_modules; remove the key"),
    "tensor_parallel.tp_overlap_comm": _no_effect(_OVERLAP, "true or false", False),
    "tensor_parallel.vocab_parallel_lm_head": _no_effect(_VOCABULARY),
    "tensor_parallel.vocab_parallel_ce_backend": _no_effect(_VOCABULARY, "a string"),
    "expert_parallel": _section("set parallel.expert to the number of ranks and remove the section"),
    "pipeline.stages": _only("auto", "set parallel.pipeline to the number of stages; remove the key", "any value"),
    "pipeline.partition": _only("best", "set pipeline.balance; remove the key", "a string"),
    "pipeline.seed_layers": _only(False, "set seed; remove the key"),
    "pipeline.activation_checkpoint_interval": _only(0, "set activation_checkpointing.every", "an integer"),
    "pipeline.pipe_partitioned": _no_effect(_WHOLE, "true or false", False),
    "pipeline.grad_partitioned": _no_effect(_WHOLE, "true or false", False),
    "checkpoint.tag_validation": _no_effect("every rank uses the tag of rank 0", "a string"),
    "checkpoint.load_universal": _no_effect(_ANY_TOPOLOGY, "true or false", False),
    "checkpoint.use_node_local_storage": _no_effect(_ONE_FOLDER, "true or false", False),
    "checkpoint.parallel_write": _no_effect(_PARALLEL_WRITE, "an object", {}),
    "checkpoint.writer": _no_effect(_PARALLEL_WRITE, "an object", {}),
    "checkpoint.checkpoint_serialization": _no_effect("the format is that of torch.distributed.checkpoint"),
    "data_types.param_dtype": _only(None, "set bf16.enabled or fp16.enabled instead", "any value"),
    "data_types.buffer_dtype": _only(None, "buffers keep their types; remove the key", "any value"),
    "data_types.keep_in_fp32_modules": _no_effect("buffers keep their types", "any value", "auto"),
    "bf16.immediate_grad_update": _no_effect("zero_optimization.update_in_backward is the key for that here"),
    "bf16.check_grad_overflow": _no_effect("a gradient that is not finite is an error here, it is never skipped"),
    "fp16.fp16_master_weights_and_grads": _only(False, "master parameters are fp32; remove the key"),
    "zero_optimization.contiguous_gradients": _no_effect(_FLAT, "true or false", True),
    "zero_optimization.reduce_scatter": _no_effect(_COLLECTIVES),
    "zero_optimization.reduce_bucket_size": _no_effect(_BUCKETS, "an integer"),
    "zero_optimization.use_multi_rank_bucket_allreduce": _no_effect(_BUCKETS),
    "zero_optimization.allgather_partitions": _no_effect(_COLLECTIVES),
    "zero_optimization.allgather_bucket_size": _no_effect(_BUCKETS, "an integer"),
    "zero_optimization.overlap_comm": _no_effect(_OVERLAP),
    "zero_optimization.compute_grad_norm": _no_effect("the pass over each shard computes the norm"),
    "zero_optimization.load_from_fp32_weights": _no_effect(_MASTER_WEIGHTS, "true or false", True),
    "zero_optimization.elastic_checkpoint": _no_effect(_ANY_TOPOLOGY, "true or false", False),
    "zero_optimization.zenflow": _section("set offload_optimizer.overlap instead and remove the section"),
    "zero_optimization.sub_group_size": _no_effect("the optimizer updates unit by unit", "an integer"),
    "zero_optimization.offload_optimizer.nvme_path_per_local_rank": _only(None, _ONE_PATH, "any value"),
    "zero_optimization.offload_optimizer.buffer_count": _no_effect(_BUFFERS, "an integer"),
    "zero_optimization.offload_optimizer.buffer_size": _no_effect(_BUFFERS, "an integer"),
    "zero_optimization.offload_optimizer.fast_init": _no_effect("states always start in the same way"),
    "zero_optimization.offload_optimizer.pipeline": _no_effect(_WINDOW, "true or false", True),
    "zero_optimization.offload_optimizer.pipeline_read": _no_effect(_WINDOW, "true or false", True),
    "zero_optimization.offload_optimizer.pipeline_write": _no_effect(_WINDOW, "true or false", True),
    "zero_optimization.offload_optimizer.super_offload": _no_effect(
        '`overlap` "speculative" is the key for that here', "true or false", False
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _no_effect(
        "the update uses torch's threads (torch.set_num_threads)", "a number"
    ),
    "zero_optimization.offload_param.nvme_path_per_local_rank": _only(None, _ONE_PATH, "any value"),
    "zero_optimization.offload_param.buffer_count": _no_effect(_BUFFERS, "an integer"),
    "zero_optimization.offload_param.buffer_size": _no_effect(_BUFFERS, "an integer"),
    "zero_optimization.offload_param.max_in_cpu": _no_effect(
        "stage3_max_live_parameters limits how many parameters are held beside the files", "an integer"
    ),
    "zero_optimization.ignore_unused_parameters": _no_effect(
        "an unused parameter is never an error, and does not change", "true or false", True
    ),
    "zero_optimization.legacy_stage1": _only(False, "stage 1 has a single form; remove the key"),
    "zero_optimization.round_robin_gradients": _no_effect("every rank copies its shard of each gradient"),
    "zero_optimization.parameter_alignment": _no_effect("the layout of the flat buffers is the engine's choice"),
    "zero_optimization.zeropp_loco_param": _section(_LOCO),
    "zero_optimization.mics_hierarchical_params_gather": _no_effect(_COLLECTIVES, "true or false", False),
    "zero_optimization.memory_efficient_linear": _no_effect("modules are used as they are"),
    "zero_optimization.pipeline_loading_checkpoint": _no_effect(_OWN_RANGES, "true or false", False),
    "zero_optimization.override_module_apply": _no_effect("modules are used as they are"),
    "zero_optimization.log_trace_cache_warnings": _no_effect(_TRACE),
    "zero_optimization.enable_sanity_checks": _no_effect("the checks are always on"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _no_effect("it is placed with the remaining states"),
    "zero_optimization.leaf_module": _no_effect("skipped modules need no list: the order is fixed", "an object"),
    "activation_checkpointing.partition_activations": _no_effect(_PARTITIONED, "true or false", False),
    "activation_checkpointing.contiguous_memory_optimization": _no_effect("it needs partition_activations"),
    "activation_checkpointing.number_checkpoints": _no_effect("`every` chooses", "any value"),
    "activation_checkpointing.synchronize_checkpoint_boundary": _no_effect("no step waits for the device"),
    "activation_checkpointing.profile": _no_effect(_NO_TIMER, "true or false", False),
    "optimizer.adam_w_mode": _only(True, "put it into optimizer.params, where DeepSpeed reads it"),
    "optimizer.legacy_fusion": _no_effect(_TORCH_ARGUMENT),
    "optimizer.torch_adam": _no_effect(_TORCH_ARGUMENT),
    "optimizer.params.torch_adam": _no_effect(_TORCH_ARGUMENT),
    "optimizer.params.fused": _no_effect(_TORCH_ARGUMENT, "any value"),
    "optimizer.params.foreach": _no_effect(_TORCH_ARGUMENT, "any value"),
    "optimizer.params.capturable": _no_effect(_TORCH_ARGUMENT),
    "optimizer.params.set_grad_none": _no_effect("gradients are freed after the step in any case"),
    "optimizer.params.fp32_optimizer_states": _only(True, "set state_dtype instead"),
    "optimizer.params.amsgrad": _only(False, "set false; or pass your own torch optimizer class to initialize"),
    "optimizer.params.maximize": _only(False, "negate the loss instead"),
    "optimizer.params.max_grad_norm": _only(0, "set gradient_clipping at the top level instead", "a number"),
    "optimizer.params.cuda_aware": _no_effect(_SIGNS_GO),
    "optimizer.params.comm_backend_name": _no_effect(_SIGNS_GO, "a string"),
    "optimizer.params.eps_inside_sqrt": _only(False, "eps is added to the root; set false"),
    "scheduler.params.last_batch_iteration": _only(-1, _FROM_ZERO, "an integer"),
    "scheduler.params.last_epoch": _only(-1, _FROM_ZERO, "an integer"),
    "scheduler.params.verbose": _no_effect("steps_per_print logs the learning rate", "any value"),
    **{f"bf16.{key}": _no_effect(_NO_SCALE, "a number") for key in _OF_FP16},
    "bf16.loss_scale": _no_effect(_NO_SCALE, "any value"),  # "dynamic", in files of users
    "bf16.consecutive_hysteresis": _no_effect(_NO_SCALE),
    "bf16.opt_level": _no_effect(_APEX, "a string"),
    "fp16.opt_level": _no_effect(_APEX, "a string"),
    "fp16.fp16": _only(True, _NEOX),
    "fp16.type": _only("fp16", _NEOX, "a string"),
    "fp32_allreduce": _only(False, 'set communication_data_type to "fp32" instead'),
    **{key: _no_effect(_READ_BY_NOBODY, "any value") for key in _NOBODYS},
}
for _name in (
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_reuse_distance",
    "module_granularity_threshold",
    "gather_16bit_weights_on_model_save",
    "gather_fp16_weights_on_model_save",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
):
    _is_flag = _name.startswith(("gather", "use", "allgather"))
    _why = _PERSIST if "persistence" in _name else _REUSE if _name.startswith("max") else _COLLECTIVES
    _why = _SAVE if _name.startswith("gather") else _FLAT if "granularity" in _name else _why
    for _prefix in ("stage3_", ""):
        RULES[f"zero_optimization.{_prefix}{_name}"] = _no_effect(_why, "true or false" if _is_flag else "an integer")


def _has_type(value: object, expected: Expected) -> bool:
    """Return whether a value has the expected type."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "true or false": isinstance(value, bool),
        "an integer": is_number and float(str(value)).is_integer(),
        "a number": is_number,
        "a string": isinstance(value, str),
        "an object": isinstance(value, dict),
        "any value": True,
    }[expected]


def is_on(section: dict[str, object]) -> bool:
    """Return whether a section is on: by its switch, else by a switch inside it, else if it is not empty."""
    for switch in ("enabled", "deepcompile"):
        if switch in section:
            return section[switch] is not False
    if section.keys() & {"disable", "backend"}:  # of DeepSpeed's compile, which engine.compile() starts
        return False
    if section.get("autotp_size") in (0, 1):
        return False
    parts = [part for part in section.values() if isinstance(part, dict)]
    if any(_mentions_enabled(part) for part in parts):
        return any(is_on(part) for part in parts if _mentions_enabled(part))
    return any(value is not False and value is not None for value in section.values())


def _mentions_enabled(section: dict[str, object]) -> bool:
    return "enabled" in section or any(isinstance(v, dict) and _mentions_enabled(v) for v in section.values())


def judge(path: str, rule: Rule, value: object) -> Sequence[str | Fault]:
    """Return the notes or faults of a value, nothing if it holds anyway."""
    if value is None and rule.outcome != "only":
        return ()
    for agreed in rule.agrees:
        # In Python 1 equals true. In JSON they differ.
        if value == agreed and isinstance(value, bool) == isinstance(agreed, bool):
            return ()
    if rule.outcome == "section" and value is False:
        return ()
    # Hugging Face's config files have "auto" for keys that the Trainer fills in.
    if not _has_type(value, rule.expected) and not (value == "auto" and rule.outcome == "no_effect"):
        return [Fault(path, "type", f"expected {rule.expected}, found {quoted(value)}")]
    if rule.outcome == "no_effect":
        return [f"{path}: {quoted(value)} has no effect here: {rule.reason}"]
    if rule.outcome == "section":
        if isinstance(value, dict) and not is_on(value):
            asks = path == "compile" and "backend" in value and value.get("disable") is not True
            return [f"{path}: {quoted(value)} has no effect here: {_COMPILED_BY_CALL}"] if asks else []
        return [Fault(path, "unsupported", f"not supported yet; {rule.reason}")]
    return [Fault(path, "unsupported", f"{quoted(value)} is not supported yet; {rule.reason}")]


_TYPES = {
    "true or false": "boolean",
    "an integer": "number",
    "a number": "number",
    "a string": "string",
    "an object": "object",
}


def rule_schema(rule: Rule) -> dict[str, Any]:
    """Return the JSON schema of a key: any value of its type or "auto" if it has no effect, else the legal values."""
    if rule.outcome == "no_effect":
        described = {"description": f"No effect here: {rule.reason}."}
        kind = _TYPES.get(rule.expected)
        return described if kind is None else {"anyOf": [{"type": [kind, "null"]}, {"const": "auto"}], **described}
    described = {"description": f"Not supported yet: {rule.reason}."}
    return described if rule.outcome == "section" else {"enum": list(rule.agrees), **described}
