"""What the settings of offload need, and which of them have no effect together."""

from ...optimizers import OPTIMIZERS
from .errors import Fault, shown
from .idle import idle, no_effect
from .offload import ActivationOffloadConfig, AioConfig, OffloadOptimizerConfig, OffloadParamConfig
from .optimizer import OptimizerConfig
from .sections import ActivationCheckpointingConfig, ZeroConfig

OPTIMIZER = "zero_optimization.offload_optimizer"
PARAM = "zero_optimization.offload_param"
ACTIVATIONS = "activation_checkpointing.offload"
STATE_DTYPE = "optimizer.params.state_dtype"
_Place = OffloadOptimizerConfig | OffloadParamConfig | ActivationOffloadConfig


def offload_faults(zero: ZeroConfig, activations: ActivationCheckpointingConfig) -> list[Fault]:
    """Offload that lacks what it needs, or contradicts the stage."""
    faults = []
    for path, section in _places(zero, activations):
        if section.device == "nvme" and section.nvme_path is None and not _why_idle(section, zero):
            message = 'must be given with device "nvme": the folder on the drive in which the files are kept'
            faults.append(Fault(f"{path}.nvme_path", "missing", message))
    if zero.offload_param.device != "none" and zero.partition_size > 1:
        why = "what rests in a store is a rank's own shard, and is gathered from all ranks of the shard group"
        fix = 'set it to 1 or the device to "none"; offload_optimizer works with both'
        message = f"needs zero_optimization.zero_hpz_partition_size 1, found {zero.partition_size}: {why}; {fix}"
        faults.append(Fault(f"{PARAM}.device", "conflict", message))
    if zero.offload_optimizer.is_delayed and zero.offloads_parameters and zero.offload_param.device == "nvme":
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
        why = _why_idle(section, zero)
        if why:
            notes += idle(path, section, why)
        elif isinstance(section, OffloadOptimizerConfig) and not section.is_used:
            notes += idle(path, section, "nothing is offloaded with ratio 0", but=("ratio",))
        elif section.device == "cpu" and section.nvme_path is not None:
            notes.append(no_effect(f"{path}.nvme_path", section.nvme_path, 'the device is "cpu"'))
    state = zero.offload_optimizer
    if state.is_used and not state.is_delayed and state.delay_after_steps != OffloadOptimizerConfig().delay_after_steps:
        why = f'it is for overlap "delayed", found {shown(state.overlap)}'
        notes.append(no_effect(f"{OPTIMIZER}.delay_after_steps", state.delay_after_steps, why))
    live = zero.stage3_max_live_parameters
    if not zero.offloads_parameters and live is not None:
        why = "it is for offload_param; without it a unit is released after each use"
        notes.append(no_effect("zero_optimization.stage3_max_live_parameters", live, why))
    users = [section for _, section in _places(zero, activations) if not _why_idle(section, zero)]
    if aio != AioConfig() and all(section.device != "nvme" for section in users):
        notes.append('aio: the section has no effect here: nothing is offloaded to "nvme"')
    if optimizer is not None and optimizer.state_dtype != "fp32" and not optimizer.states:
        notes.append(no_effect(STATE_DTYPE, optimizer.state_dtype, OPTIMIZERS[optimizer.type].why_no_state))
    return notes


def _places(zero: ZeroConfig, activations: ActivationCheckpointingConfig) -> list[tuple[str, _Place]]:
    return [(OPTIMIZER, zero.offload_optimizer), (PARAM, zero.offload_param), (ACTIVATIONS, activations.offload)]


def _why_idle(section: _Place, zero: ZeroConfig) -> str:
    """Why a section moves nothing, whatever else it says; empty if it does."""
    if section.device == "none":
        return 'nothing is offloaded with device "none"'
    if isinstance(section, OffloadParamConfig) and not zero.offloads_parameters:
        return "below stage 3 every rank holds all parameters at all times"
    return ""
