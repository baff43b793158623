"""Keys whose "auto" is chosen from the model and the machine, when an engine is built or a plan is made."""

PLANNED = (
    "parallel.pipeline",
    "parallel.tensor",
    "parallel.sequence",
    "parallel.expert",
    "pipeline.schedule",
    "pipeline.chunks",
    "zero_optimization.stage",
    "zero_optimization.shard_size",
    "zero_optimization.zero_hpz_partition_size",
    "activation_checkpointing.every",
)
PLANNED_BESIDE = (  # with one of the above; alone, "auto" of these has the meaning that it has in a file for DeepSpeed
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "activation_checkpointing.offload.device",
)


def planned(auto_paths: list[str]) -> tuple[str, ...]:
    """Those of the keys that say "auto" which are planned."""
    if not any(path in PLANNED for path in auto_paths):
        return ()
    return tuple(path for path in auto_paths if path in PLANNED or path in PLANNED_BESIDE)
