"""Settings that have no effect with the rest of the config: one sentence for each that is not the default."""

from ...configs.section import Section
from .errors import shown
from .sections import BF16Config, CheckpointConfig, CommunicationConfig, FP16Config, MemoryReportConfig, ZeroConfig

_DYNAMIC_SCALING = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)


def no_effect(path: str, value: object, reason: str) -> str:
    """The sentence."""
    return f"{path}: {shown(value)} has no effect here: {reason}"


def idle(path: str, section: Section, reason: str, but: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> list[str]:
    """The sentences for a section at `path`, or for some of its keys."""
    return [
        no_effect(f"{path}.{key}", getattr(section, key), reason)
        for key, field in type(section).model_fields.items()
        if getattr(section, key) != field.default and key not in but and (not only or key in only)
    ]


def zero_notes(zero: ZeroConfig) -> list[str]:
    """What the stage leaves without effect."""
    notes = []
    if zero.stage == 0 and zero.shard_size not in (None, 1):
        notes.append(no_effect("zero_optimization.shard_size", zero.shard_size, "stage 0 shards nothing"))
    if zero.stage < 3:
        reason = f"stage {zero.stage} never releases parameters"
        everywhere, not_ahead = f"{reason}, every rank holds all of them", f"{reason}, so nothing is gathered ahead"
        notes += idle("zero_optimization", zero, everywhere, only=("zero_hpz_partition_size",))
        notes += idle("zero_optimization", zero, not_ahead, only=("stage3_prefetch_bucket_size",))
    return notes


_OF_GRADIENTS = ("gradient_bits_in_host", "ranks_of_host")


def wire_notes(communication: CommunicationConfig, zero: ZeroConfig) -> list[str]:
    """Bits of messages that are never sent."""
    notes = []
    if communication.gradient_bits is None:
        notes += idle("communication", communication, "communication.gradient_bits is null", only=_OF_GRADIENTS)
    if zero.stage < 3:
        reason = f"stage {zero.stage} sends what an update has changed, and these are not updated"
        notes += idle("communication", communication, reason, only=("frozen_weight_bits",))
    if zero.stage == 0:
        reason = "stage 0 sends no weights, every rank updates all of them"
        notes += idle("communication", communication, reason, only=("weight_bits",))
    return notes


def precision_notes(bf16: BF16Config, fp16: FP16Config) -> list[str]:
    """Settings of a type in which nothing is computed, and of dynamic scaling where the scale is fixed."""
    notes = [] if bf16.enabled else idle("bf16", bf16, "bf16.enabled is false")
    if not fp16.enabled:
        return notes + idle("fp16", fp16, "fp16.enabled is false")
    if fp16.loss_scale > 0:
        notes += idle("fp16", fp16, f"fp16.loss_scale is fixed at {fp16.loss_scale:g}", only=_DYNAMIC_SCALING)
    return notes


def report_notes(report: MemoryReportConfig) -> list[str]:
    """A step that is not recorded."""
    return [] if report.folder is not None else idle("memory_report", report, "memory_report.folder is null")


def checkpoint_notes(checkpoint: CheckpointConfig) -> list[str]:
    """A folder for checkpoints that are never made."""
    if checkpoint.every_steps or checkpoint.on_sigterm:
        return []
    reason = "every_steps is 0 and on_sigterm is false; a call of save_checkpoint names its own folder"
    return idle("checkpoint", checkpoint, reason, only=("folder",))
