"""What the settings of offload need, and which of them have no effect together."""

from .config_errors import Fault, shown
from .config_offload import ActivationOffloadConfig, AioConfig, OffloadOptimizerConfig, OffloadParamConfig
from .config_optimizer import OptimizerConfig
from .config_sections import ActivationCheckpointingConfig, ZeroConfig
from .config_types import Section

OPTIMIZER = "zero_optimization.offload_optimizer"
PARAM = "zero_optimization.offload_param"
ACTIVATIONS = "activation_checkpointing.offload"
STATE_DTYPE = "optimizer.params.state_dtype"


def offload_faults(zero: ZeroConfig, activations: ActivationCheckpointingConfig) -> list[Fault]:
    """Offload that lacks what it needs, or contradicts the stage."""
    faults = []
    for path, section in _places(zero, activations):
        if section.device == "nvme" and section.nvme_path is None:
            message = 'must be given with device "nvme": the folder on the drive in which the files are kept'
            faults.append(Fault(f"{path}.nvme_path", "missing", message))
    if zero.offload_param.device != "none" and zero.stage < 3:
        why = "below stage 3 every rank holds all parameters at all times"
        fix = 'set the stage to 3 or the device to "none"; offload_optimizer works at every stage'
        message = f"needs zero_optimization.stage 3, found {zero.stage}: {why}; {fix}"
        faults.append(Fault(f"{PARAM}.device", "conflict", message))
    if zero.offload_param.device != "none" and zero.partition_size > 1:
        why = "what rests in a store is a rank's own shard, and is gathered from all ranks of the shard group"
        fix = 'set it to 1 or the device to "none"; offload_optimizer works with both'
        message = f"needs zero_optimization.zero_hpz_partition_size 1, found {zero.partition_size}: {why}; {fix}"
        faults.append(Fault(f"{PARAM}.device", "conflict", message))
    if zero.offload_optimizer.is_delayed and zero.offload_param.device == "nvme":
        why = "what the parameters become waits in memory during the whole of the next step"
        fix = 'set overlap to "speculative" or "none"'
        message = f'"delayed" needs {PARAM}.device "none" or "cpu", found "nvme": {why}; {fix}'
        faults.append(Fault(f"{OPTIMIZER}.overlap", "conflict", message))
    return faults


def offload_notes(
    zero: ZeroConfig, activations: ActivationCheckpointingConfig, aio: AioConfig, optimizer: OptimizerConfig | None
) -> list[str]:
    """One sentence for each setting of offload that is not the default and has no effect with the others."""
    notes = []
    for path, section in _places(zero, activations):
        if section.device == "none":
            notes += _idle(path, section, 'nothing is offloaded with device "none"')
        elif isinstance(section, OffloadOptimizerConfig) and not section.is_used:
            notes += _idle(path, section, "nothing is offloaded with ratio 0", but=("ratio",))
        elif section.device == "cpu" and section.nvme_path is not None:
            notes.append(_no_effect(f"{path}.nvme_path", section.nvme_path, 'the device is "cpu"'))
    state = zero.offload_optimizer
    if state.is_used and not state.is_delayed and state.delay_after_steps != OffloadOptimizerConfig().delay_after_steps:
        why = f'it is for overlap "delayed", found {shown(state.overlap)}'
        notes.append(_no_effect(f"{OPTIMIZER}.delay_after_steps", state.delay_after_steps, why))
    live = zero.stage3_max_live_parameters
    if zero.offload_param.device == "none" and live is not None:
        why = "it is for offload_param; without it a unit is released after each use"
        notes.append(_no_effect("zero_optimization.stage3_max_live_parameters", live, why))
    if aio != AioConfig() and all(section.device != "nvme" for _, section in _places(zero, activations)):
        notes.append('aio: the section has no effect here: nothing is offloaded to "nvme"')
    if optimizer is not None and optimizer.params.state_dtype != "fp32" and not _has_state(optimizer):
        notes.append(_no_effect(STATE_DTYPE, optimizer.params.state_dtype, "SGD without momentum has no state"))
    return notes


def _places(
    zero: ZeroConfig, activations: ActivationCheckpointingConfig
) -> list[tuple[str, OffloadOptimizerConfig | OffloadParamConfig | ActivationOffloadConfig]]:
    return [(OPTIMIZER, zero.offload_optimizer), (PARAM, zero.offload_param), (ACTIVATIONS, activations.offload)]


def _idle(path: str, section: Section, reason: str, but: tuple[str, ...] = ()) -> list[str]:
    return [
        _no_effect(f"{path}.{key}", getattr(section, key), reason)
        for key, field in type(section).model_fields.items()
        if getattr(section, key) != field.default and key not in but
    ]


def _no_effect(path: str, value: object, reason: str) -> str:
    return f"{path}: {shown(value)} has no effect here: {reason}"


def _has_state(optimizer: OptimizerConfig) -> bool:
    return optimizer.type != "sgd" or optimizer.params.momentum != 0
