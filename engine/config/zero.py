"""The sections of ZeRO: what is sharded, what is kept outside of the model's memory, what is recomputed."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...configs.section import Bool, Float, Folder, Int, Natural, Positive
from .batch import nearest_divisors
from .errors import ConfigSection, Fault, shown

Device = Literal["none", "cpu", "nvme"]

DRIVE_BLOCK_BYTES = 4096
"""Direct reads and writes of a drive begin and end at multiples of this."""

_LAYERED = "zero_optimization.layered_gradient_accumulation"
STAGES = (
    "0 shards nothing (plain data parallelism), 1 shards the optimizer state, "
    "2 also the gradients, 3 also the parameters"
)


def _stage(value: object) -> object:
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise PydanticCustomError("value_error", "there are four stages: " + STAGES)
    return int(str(value).removesuffix(".0"))


def _units(value: object) -> object:
    if value == "auto":
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) and item for item in value):
        return tuple(value)
    raise PydanticCustomError("value_error", 'expected "auto" or a list of patterns of module names')


class OffloadSection(ConfigSection):
    """What all sections of offload have."""

    device: Device = "none"

    nvme_path: Folder = None
    """The folder for the files. Must be given with device "nvme". A relative path starts at the working directory."""

    def why_idle(self, config: Any) -> str:
        """Why it moves nothing, whatever else it says; empty if it does."""
        return 'nothing is offloaded with device "none"' if self.device == "none" else ""

    def faults(self, config: Any) -> list[Fault]:
        if self.device != "nvme" or self.nvme_path is not None or self.why_idle(config):
            return []
        message = 'must be given with device "nvme": the folder on the drive in which the files are kept'
        return [Fault(f"{self.path}.nvme_path", "missing", message)]

    def notes(self, config: Any) -> list[str]:
        if why := self.why_idle(config):
            return self.idle(why)
        return self.idle('the device is "cpu"', only=("nvme_path",)) if self.device == "cpu" else []


class OffloadOptimizerConfig(OffloadSection):
    """Keep the optimizer state, with the fp32 master parameters, outside of the model's memory. Any stage."""

    path = "zero_optimization.offload_optimizer"

    device: Device = "none"
    """Where the state is kept. "none": with the model; "cpu": in host memory; "nvme": in files on a drive."""

    ratio: Float = Field(default=1.0, ge=0, le=1)
    """The share of the state that is offloaded; the rest stays with the model."""

    pin_memory: Bool = True
    """Page-locked host buffers, where there is an accelerator that copies from them faster."""

    overlap: Literal["none", "speculative", "delayed"] = "none"
    """When units are updated. "none": after the last gradient. "speculative": as each gradient arrives, and again if
    the norm asks for it: the same numbers. "delayed": during the next step, which computes with parameters that are
    one update old (arXiv 2101.06840)."""

    delay_after_steps: Natural = 40
    """With overlap "delayed": the number of updates, from the first of the training on, that are waited for. The
    parameters change fast then, and a stale gradient hurts."""

    @property
    def is_used(self) -> bool:
        """Whether any of the state is offloaded."""
        return self.device != "none" and self.ratio > 0

    @property
    def is_delayed(self) -> bool:
        """Whether updates are made while the next step computes."""
        return self.is_used and self.overlap == "delayed"

    def faults(self, config: Any) -> list[Fault]:
        found, param = super().faults(config), config.zero_optimization.offload_param
        if self.is_delayed and config.zero_optimization.offloads_parameters and param.device == "nvme":
            why = "what the parameters become waits in memory during the whole of the next step"
            fix = 'set overlap to "speculative" or "none"'
            message = f'"delayed" needs {param.path}.device "none" or "cpu", found "nvme": {why}; {fix}'
            found.append(Fault(f"{self.path}.overlap", "conflict", message))
        return found

    def notes(self, config: Any) -> list[str]:
        if self.device != "none" and not self.is_used:
            return self.idle("nothing is offloaded with ratio 0", but=("ratio",))
        found = super().notes(config)
        if self.is_used and not self.is_delayed:
            why = f'it is for overlap "delayed", found {shown(self.overlap)}'
            found += self.idle(why, only=("delay_after_steps",))
        return found


class OffloadParamConfig(OffloadSection):
    """Keep the parameter shards of stage 3 outside of the model's memory."""

    path = "zero_optimization.offload_param"

    device: Device = "none"
    """Where the shards are kept. "none": with the model; "cpu": in host memory; "nvme": in files on a drive."""

    pin_memory: Bool = True
    """Page-locked host buffers, where there is an accelerator that copies from them faster."""

    def why_idle(self, config: Any) -> str:
        if self.device != "none" and not config.zero_optimization.offloads_parameters:
            return "below stage 3 every rank holds all parameters at all times"
        return super().why_idle(config)

    def faults(self, config: Any) -> list[Fault]:
        found, size = super().faults(config), config.zero_optimization.partition_size
        if self.device != "none" and size > 1:
            why = "what rests in a store is a rank's own shard, and is gathered from all ranks of the shard group"
            fix = 'set it to 1 or the device to "none"; offload_optimizer works with both'
            message = f"needs zero_optimization.zero_hpz_partition_size 1, found {size}: {why}; {fix}"
            found.append(Fault(f"{self.path}.device", "conflict", message))
        return found


class ActivationOffloadConfig(OffloadSection):
    """Keep what backward needs of forward outside of the model's memory until it is needed."""

    path = "activation_checkpointing.offload"

    device: Device = "none"
    """Where saved activations are kept. "none": with the model; "cpu": in host memory; "nvme": in files on a drive."""

    min_bytes: Positive = 1 << 20
    """Smaller saved tensors stay with the model."""

    budget_bytes: Positive | None = None
    """At most so many bytes of saved activations stay with the model. null: three blocks, one that is computed,
    one that is kept for backward and one on its way."""


class ActivationCheckpointingConfig(ConfigSection):
    """Recompute activations in backward rather than keep them."""

    path = "activation_checkpointing"

    every: Int = Field(default=0, ge=0)
    """0: none. 1: every repeated block is recomputed. k: every k-th block."""

    offload: ActivationOffloadConfig = ActivationOffloadConfig()


class AioConfig(ConfigSection):
    """How files on a drive are read and written, for every offload to "nvme"."""

    path = "aio"

    block_size: Int = Field(default=8 << 20, ge=DRIVE_BLOCK_BYTES, multiple_of=DRIVE_BLOCK_BYTES)
    """Bytes per request, a multiple of 4096."""

    thread_count: Positive = 4
    """Threads that read and write, each with one request in flight. `intra_op_parallelism` works too."""

    verify: Bool = True
    """Compare a checksum of what is read with that of what was written."""

    def notes(self, config: Any) -> list[str]:
        zero = config.zero_optimization
        places = (zero.offload_optimizer, zero.offload_param, config.activation_checkpointing.offload)
        if self == AioConfig() or any(one.device == "nvme" and not one.why_idle(config) for one in places):
            return []
        return ['aio: the section has no effect here: nothing is offloaded to "nvme"']


class ZeroConfig(ConfigSection):
    """What is sharded over the data-parallel ranks, and how."""

    path = "zero_optimization"

    stage: Annotated[Int, BeforeValidator(_stage)] = Field(default=0, json_schema_extra={"enum": [0, 1, 2, 3]})
    """0 shards nothing, 1 the optimizer state, 2 also the gradients, 3 also the parameters."""

    shard_size: Positive | None = None
    """Hybrid sharding: ranks per shard group. It must divide the world size. null: all ranks are one group."""

    zero_hpz_partition_size: Positive = 1
    """Stage 3: ranks, those of a host, among which parameters are gathered; each such group holds all of them at rest,
    while optimizer states and gradients are divided over the whole shard group (hpZ of ZeRO++). It must divide the
    ranks of a shard group, and is not for `offload_param`. 1: parameters are divided over the whole shard group too."""

    units: Annotated[Literal["auto"] | tuple[str, ...], BeforeValidator(_units)] = "auto"
    """The parts that are gathered and reduced as one: "auto" finds the repeated blocks, a large embedding before and a
    large head behind them. Or a list of patterns (`*`, `?`) of module names, each matching module is one unit. Where
    one has no forward of its own (`ModuleList`, `ModuleDict`), the modules in it that have one are the units."""

    update_in_backward: Bool = False
    """Update each unit as soon as its gradient is reduced, so that all gradients are never held together. Needs
    gradient_clipping 0, no fp16, and gradient_accumulation_steps 1 or layered_gradient_accumulation."""

    layered_gradient_accumulation: Bool = False
    """All microbatches of a step go through a block before the next block does. At stage 3 parameters are gathered, or
    read, twice a step and not twice a microbatch, and gradients are reduced once; what blocks give each other is held
    for all microbatches. It is for train_step: see docs/fewer-bytes.md."""

    stage3_prefetch_bucket_size: Natural | None = None
    """Stage 3: the number of parameter elements that may be gathered ahead of their use; one unit always may. null: two
    units. 0: no prefetch. The name without `stage3_` works too."""

    stage3_max_live_parameters: Natural | None = None
    """With offload_param: the number of gathered parameter elements that may be held beside the unit in use. null:
    as many as stage3_prefetch_bucket_size lets gather ahead. The name without `stage3_` works too."""

    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadParamConfig = OffloadParamConfig()

    @property
    def offloads_parameters(self) -> bool:
        """Whether offload_param has an effect: below stage 3 every rank holds all parameters at all times."""
        return self.stage == 3 and self.offload_param.device != "none"

    @property
    def partition_size(self) -> int:
        """Ranks among which parameters are gathered, where these are fewer than a shard group; else 1."""
        return self.zero_hpz_partition_size if self.stage == 3 else 1

    def faults(self, config: Any) -> list[Fault]:
        return (_layered_faults(config) if self.layered_gradient_accumulation else []) + update_in_backward_faults(
            config
        )

    def notes(self, config: Any) -> list[str]:
        found = []
        if self.stage == 0 and self.shard_size not in (None, 1):
            found += self.idle("stage 0 shards nothing", only=("shard_size",))
        if self.stage < 3:
            reason = f"stage {self.stage} never releases parameters"
            found += self.idle(f"{reason}, every rank holds all of them", only=("zero_hpz_partition_size",))
            found += self.idle(f"{reason}, so nothing is gathered ahead", only=("stage3_prefetch_bucket_size",))
        if not self.offloads_parameters:
            why = "it is for offload_param; without it a unit is released after each use"
            found += self.idle(why, only=("stage3_max_live_parameters",))
        return found


def _layered_faults(config: Any) -> list[Fault]:
    """What needs the microbatches one after the other, or has an order of its own."""
    reasons = []
    if config.parallel.pipeline > 1:
        why = "a pipeline has schedules of its own, in which several microbatches pass a stage while it is gathered"
        reasons.append(f"needs parallel.pipeline 1, found {config.parallel.pipeline}: {why}")
    for name in ("sequence", "expert"):
        degree = getattr(config.parallel, name)
        if degree > 1:
            why = "what its ranks exchange belongs to one microbatch at a time"
            reasons.append(f"needs parallel.{name} 1, found {degree}: {why}")
    if config.torch_autocast.enabled:
        why = "blocks are called for one microbatch after the other, outside of one forward; set bf16.enabled instead"
        reasons.append(f"needs torch_autocast.enabled false, found true: {why}")
    return [Fault(_LAYERED, "conflict", reason) for reason in reasons]


_OVERLAPS = {  # why it is not for update_in_backward
    "speculative": "it updates in the backward too, and can redo what clipping or an overflow changes",
    "delayed": "it updates during the next step",
}


def update_in_backward_faults(config: Any) -> list[Fault]:
    """An update in the middle of a backward must be final: nothing may be known only at its end."""
    if not config.zero_optimization.update_in_backward:
        return []
    reasons = []
    if config.gradient_clipping > 0:
        reasons.append(f"gradient_clipping 0 (found {config.gradient_clipping}: the norm is known after all gradients)")
    is_layered = config.zero_optimization.layered_gradient_accumulation  # then a unit is reduced once a step
    if (config.gradient_accumulation_steps or 1) > 1 and not is_layered:
        steps = config.gradient_accumulation_steps
        reasons.append(f"gradient_accumulation_steps 1 (found {steps}: a gradient is whole after the last microbatch)")
    if config.fp16.enabled:
        reasons.append("fp16.enabled false (an overflow in a later unit skips the whole step; bf16 needs no scaling)")
    offload = config.zero_optimization.offload_optimizer
    if offload.is_used and offload.overlap != "none":
        reasons.append(f'offload_optimizer.overlap "none" (found "{offload.overlap}": {_OVERLAPS[offload.overlap]})')
    return [Fault("zero_optimization.update_in_backward", "conflict", f"needs {reason}") for reason in reasons]


def shard_size_faults(zero: ZeroConfig, data_size: int, expert: int) -> list[Fault]:
    """The shard size must divide the data-parallel ranks, the partition of hpZ the shard size, and experts both."""
    group_size = data_size if zero.shard_size is None else zero.shard_size
    found = []
    for key, size, of, what, whole in (
        ("shard_size", group_size, "replicas", "data-parallel ranks", data_size),
        ("zero_hpz_partition_size", zero.partition_size, "groups", "ranks of a shard group", group_size),
    ):
        if whole % size:
            message = (
                f"{key}({size}) x {of}(?) = {what}({whole}) does not hold; the nearest legal "
                f"values are {nearest_divisors(size, whole)}"
            )
            found.append(Fault(f"zero_optimization.{key}", "conflict", message))
        elif zero.stage and size > 1 and size % expert and whole % expert == 0:
            message = f"expert({expert}) x shard(?) = {key}({size}) does not hold; set a multiple of {expert}"
            found.append(Fault(f"zero_optimization.{key}", "conflict", message))
    return found
