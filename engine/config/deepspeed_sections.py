"""The keys of DeepSpeed's sections that are no fields here, so that a word that is none of them is an error.

A section that is switched off asks for nothing, whatever stands in it; but a key that DeepSpeed does not know there is
a slip of the pen. Each section has its words, at whatever depth they stand.
Source: DeepSpeed 0.19 and, for sections that it has removed, 0.9 to 0.18.
"""

from .errors import Fault, unknown_key
from .read import join

_CURRICULUM = """
    curriculum_type min_difficulty max_difficulty schedule_type schedule_config total_curriculum_step difficulty_step
    root_degree difficulty max_step
"""
_SCHEDULE_OFFSETS = "schedule_offset schedule_offset_end schedule_offset_stride"
_EXPERTS = """
    autoep_size expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model moe_layer_pattern
    expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm route_scale score_apply
    combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank
    num_expert_groups num_limited_groups score_func top_k load_balance_coeff routed_scaling_factor expert_w1 expert_w2
    expert_w3 num_experts_attr top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern
    expert_activation
"""
_WORDS = {  # section: its keys without `enabled`, which each may have
    "autotuning": """
        start_step end_step metric_path arg_mappings metric model_info profile num_params hidden_size num_layers
        results_dir exps_dir overwrite fast start_profile_step end_profile_step tuner_type tuner_early_stopping
        tuner_num_trials model_info_path mp_size max_train_batch_size min_train_batch_size
        max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes
    """,
    "compression_training": f"""
        layer_reduction keep_number_layer module_name_prefix teacher_layer other_module_name weight_quantization
        activation_quantization sparse_pruning row_pruning head_pruning channel_pruning shared_parameters
        different_groups params modules related_modules quantizer_kernel {_SCHEDULE_OFFSETS} quantize_groups
        quantize_verbose quantization_type quantize_weight_in_forward rounding fp16_mixed_quantize
        quantize_change_ratio start_bits target_bits bits quantization_period range_calibration method block_pattern
        dense_ratio excluded_modules num_heads
    """,
    "quantize_training": """
        quantize_verbose quantizer_kernel quantize_type quantize_bits start_bits target_bits quantize_schedule
        quantize_period schedule_offset quantize_groups fp16_mixed_quantize quantize_change_ratio quantize_algo q_type
        rounding eigenvalue verbose max_iter tol stability gas_boundary_resolution layer_name layer_num
    """,
    "weight_quantization": """
        quantized_initialization post_init_quant num_bits num_groups group_dim group_size symmetric q_type q_groups
    """,
    "eigenvalue": "verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
    "comet": "samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    "data_efficiency": f"""
        seed data_sampling num_epochs num_workers pin_memory curriculum_learning data_cluster_path curriculum_metrics
        index_to_sample_path index_to_metric_path clustering_type difficulty_type {_CURRICULUM} dynamic_batching
        metrics_path lr_scaling_method min_batch_size max_batch_size sequence_picking_order max_tokens verbose
        data_routing random_ltd model_mask_name model_type micro_batch_size global_batch_size sample_idx attention_mask
        hidden_state_order random_ltd_layer_num random_ltd_layer_id total_layer_num random_ltd_schedule max_value
        min_value current_value seq_per_step require_steps layer_token_lr_schedule total_layer_tokens warmup_type
        warmup_layer_tokens
    """,
    "curriculum_learning": _CURRICULUM,
    "progressive_layer_drop": "theta gamma",
    "sparse_attention": """
        mode block different_layout_per_head num_local_blocks num_global_blocks attention horizontal_global_attention
        num_different_global_patterns num_random_blocks local_window_blocks global_block_indices
        global_block_end_indices num_sliding_window_blocks
    """,
    "hybrid_engine": """
        max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size
        enable_cuda_graph
    """,
    "nebula": """
        persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load load_path
    """,
    "datastates_ckpt": "config",
    "expert_parallel": _EXPERTS,
    "zero_optimization.zenflow": """
        topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio full_warm_up_rounds
        pt_reserved_cores_perc steps_per_epoch
    """,
    "zero_optimization.zeropp_loco_param": "err_beta reset_T",
}
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
SECTION_WORDS = {path: frozenset(words.split()) | {"enabled"} for path, words in _WORDS.items()}
_FREE = {"arg_mappings", "config", "kwargs", "partition_config", "quantized_initialization", "post_init_quant"}
_NAMES = {"different_groups", "curriculum_metrics"}  # whose keys are names of the user's


def unknown_words(path: str, section: dict[str, object]) -> list[Fault]:
    """A fault for each key in the section at `path` that is none of its words; `amp` takes whatever Apex takes."""
    return _unknown(path, section, SECTION_WORDS[path]) if path in SECTION_WORDS else []


def _unknown(path: str, section: dict[str, object], words: frozenset[str]) -> list[Fault]:
    faults = []
    for key, value in section.items():
        here = join(path, key)
        if key not in words:
            faults.append(unknown_key(here, key, sorted(words)))
        elif key in _NAMES and isinstance(value, dict):
            for name, named in value.items():
                faults += _unknown(join(here, name), named, words) if isinstance(named, dict) else []
        elif key not in _FREE and isinstance(value, dict):
            faults += _unknown(here, value, words)
    return faults
