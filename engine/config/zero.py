"""The sections of ZeRO: sharding, offload and recomputation."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...configs.section import Bool, Float, Folder, Int, Natural, Patterns, Positive
from .batch import nearest_divisors
from .errors import ConfigSection, Fault, Wanted, needs, quoted

Device = Literal["none", "cpu", "nvme"]

DRIVE_BLOCK_BYTES = 4096
"""Direct I/O on a drive is aligned to this."""

STAGES = (
    "0 shards nothing (plain data parallelism), 1 shards the optimizer state, "
    "2 also the gradients, 3 also the parameters"
)


def _stage(value: object) -> object:
    # true equals 1, but is no stage. DeepSpeed's `"zero_optimization": true` is translated before.
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise PydanticCustomError("value_error", "expected a stage from 0 to 3: " + STAGES)
    # `value` is 0 to 3, perhaps as a float: templates write 2.0.
    return int(str(value).removesuffix(".0"))


class OffloadSection(ConfigSection):
    """Common keys of all offload sections."""

    device: Device = "none"

    nvme_path: Folder = None
    """Folder of the files; device "nvme" needs it."""

    def why_idle(self, config: Any) -> str:
        """Return why the section moves nothing, or an empty string if it does."""
        return 'nothing is offloaded with device "none"' if self.device == "none" else ""

    def faults(self, config: Any) -> list[Fault]:
        # A section that moves nothing needs no folder: a preset for stage 3 stays legal at stage 1.
        if self.device != "nvme" or self.nvme_path is not None or self.why_idle(config):
            return []
        message = 'must be given with device "nvme": the folder on the drive in which the files are kept'
        return [Fault(f"{self.path}.nvme_path", "missing", message)]

    def notes(self, config: Any) -> list[str]:
        if why := self.why_idle(config):
            return self.idle(why)
        return self.idle('the device is "cpu"', only=("nvme_path",)) if self.device == "cpu" else []


class OffloadOptimizerConfig(OffloadSection):
    """Keep the optimizer state and the fp32 master weights outside of the model's memory. Any stage."""

    device: Device = "none"
    """Placement of states and master weights. "none": with the model. "cpu": host memory. "nvme": files on a drive."""

    ratio: Float = Field(default=1.0, ge=0, le=1)
    """Share of the state that is offloaded; the rest stays with the model."""

    pin_memory: Bool = True
    """Use page-locked host buffers if the accelerator copies faster from them."""

    overlap: Literal["none", "speculative", "delayed"] = "none"
    """When units are updated. "none": after the last gradient. "speculative": as gradients arrive, repeated if clipping
    needs it; same numbers. "delayed": during the next step, whose parameters are one update old (arXiv 2101.06840)."""

    delay_after_steps: Natural = 40
    """With "delayed": number of first updates without delay, while stale gradients hurt most."""

    @property
    def is_used(self) -> bool:
        """Whether any of the state is offloaded."""
        return self.device != "none" and self.ratio > 0

    @property
    def is_delayed(self) -> bool:
        """Whether updates run while the next step computes."""
        return self.is_used and self.overlap == "delayed"

    def faults(self, config: Any) -> list[Fault]:
        if not (self.is_delayed and config.zero_optimization.offloads_parameters):
            return super().faults(config)
        why = 'updated parameters stay in memory during the whole next step; overlap may be "speculative"'
        wanted: Wanted = {"zero_optimization.offload_param.device": (("none", "cpu"), why)}
        return super().faults(config) + needs(f'{self.path}.overlap "delayed"', wanted, config)

    def notes(self, config: Any) -> list[str]:
        # Not used with a device: the ratio is 0. `super` looks at the device alone.
        if self.device != "none" and not self.is_used:
            return self.idle("nothing is offloaded with ratio 0", but=("ratio",))
        found = super().notes(config)
        if self.is_used and not self.is_delayed:
            why = f'overlap is {quoted(self.overlap)}, not "delayed"'
            found += self.idle(why, only=("delay_after_steps",))
        return found


class OffloadParamConfig(OffloadSection):
    """Keep the parameter shards of stage 3 outside of the model's memory."""

    device: Device = "none"
    """Placement of the parameter shards. "none": with the model. "cpu": host memory. "nvme": files on a drive."""

    pin_memory: Bool = True
    """Use page-locked host buffers if the accelerator copies faster from them."""

    def why_idle(self, config: Any) -> str:
        if self.device != "none" and not config.zero_optimization.offloads_parameters:
            return "below stage 3 every rank holds all parameters at all times"
        return super().why_idle(config)

    def faults(self, config: Any) -> list[Fault]:
        if self.device == "none" or config.zero_optimization.stage < 3:
            return super().faults(config)
        why = "offloaded shards are gathered from the whole shard group; offload_optimizer works with both"
        wanted: Wanted = {"zero_optimization.zero_hpz_partition_size": ((1,), why)}
        return super().faults(config) + needs(f"{self.path}.device {quoted(self.device)}", wanted, config)


class ActivationOffloadConfig(OffloadSection):
    """Keep activations that backward needs outside of the model's memory."""

    device: Device = "none"
    """Placement of saved activations. "none": with the model. "cpu": host memory. "nvme": files on a drive."""

    min_bytes: Positive = 1 << 20
    """Smaller tensors stay with the model."""

    budget_bytes: Positive | None = None
    """Bytes that may stay with the model. null: three blocks (computing, kept for backward, in transfer)."""


class ActivationCheckpointingConfig(ConfigSection):
    """Recompute activations in backward instead of keeping them."""

    every: Int = Field(default=0, ge=0)
    """0: off. 1: recompute every repeated block. k: every k-th block."""

    offload: ActivationOffloadConfig = ActivationOffloadConfig()


class AioConfig(ConfigSection):
    """How files of all "nvme" offloads are read and written."""

    block_size: Int = Field(default=8 << 20, ge=DRIVE_BLOCK_BYTES, multiple_of=DRIVE_BLOCK_BYTES)
    """Bytes per request, a multiple of 4096."""

    thread_count: Positive = 4
    """I/O threads, each with one request in flight. Alias: `intra_op_parallelism`."""

    verify: Bool = True
    """Compare checksums of written and read data."""

    def notes(self, config: Any) -> list[str]:
        zero = config.zero_optimization
        places = (zero.offload_optimizer, zero.offload_param, config.activation_checkpointing.offload)
        # A note for the section as a whole: its keys have an effect together or not at all.
        if self == AioConfig() or any(one.device == "nvme" and not one.why_idle(config) for one in places):
            return []
        return ['aio: the section has no effect here: nothing is offloaded to "nvme"']


class ZeroConfig(ConfigSection):
    """What is sharded over the data-parallel ranks, and how."""

    # `_stage` runs before the validator of `Int`, so each wrong value gets its text.
    stage: Annotated[Int, BeforeValidator(_stage)] = Field(default=0, json_schema_extra={"enum": [0, 1, 2, 3]})
    """0 shards nothing, 1 the optimizer state, 2 also the gradients, 3 also the parameters."""

    shard_size: Positive | None = None
    """Hybrid sharding: each group of so many ranks holds a whole copy of the sharded tensors. Must divide the
    data-parallel ranks. null: all of them are a group."""

    zero_hpz_partition_size: Positive = 1
    """Stage 3 (hpZ of ZeRO++): ranks of a host that hold all parameters together and gather them from each other.
    States and gradients stay sharded over the shard group, whose size this must divide. Not for `offload_param`. 1:
    off."""

    units: Patterns = "auto"
    """Modules that are gathered and reduced as a whole. "auto": repeated blocks, a large embedding before and a large
    head behind them. Or a list of module name patterns (`*`, `?`). A container without a forward (`ModuleList`) stands
    for its modules."""

    update_in_backward: Bool = False
    """Update each unit as soon as its gradient is reduced, so that gradients never exist all at once. Needs
    gradient_clipping 0, no fp16, and gradient_accumulation_steps 1 or layered_gradient_accumulation."""

    layered_gradient_accumulation: Bool = False
    """Run all microbatches through a block before the next block, in train_step only. Stage 3 gathers parameters twice
    a step, not twice a microbatch, and reduces gradients once, but keeps block outputs of all microbatches. See
    docs/fewer-bytes.md."""

    stage3_prefetch_bucket_size: Natural | None = None
    """Stage 3: parameter elements gathered ahead of use; at least one unit. null: two units. 0: no prefetch. Alias:
    `prefetch_bucket_size`."""

    stage3_max_live_parameters: Natural | None = None
    """With offload_param: gathered parameter elements held in addition to the unit in use. null: as
    stage3_prefetch_bucket_size. Alias: `max_live_parameters`."""

    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadParamConfig = OffloadParamConfig()

    @property
    def offloads_parameters(self) -> bool:
        """Whether offload_param has an effect: below stage 3 every rank holds all parameters at all times."""
        return self.stage == 3 and self.offload_param.device != "none"

    @property
    def partition_size(self) -> int:
        """Number of ranks that gather parameters from each other, if fewer than a shard group; else 1."""
        return self.zero_hpz_partition_size if self.stage == 3 else 1

    def faults(self, config: Any) -> list[Fault]:
        return (_layered_faults(config) if self.layered_gradient_accumulation else []) + update_in_backward_faults(
            config
        )

    def notes(self, config: Any) -> list[str]:
        found = []
        # A shard size of 1 shards nothing either, so it says the same.
        if self.stage == 0 and self.shard_size not in (None, 1):
            found += self.idle("stage 0 shards nothing", only=("shard_size",))
        if self.stage < 3:
            reason = f"stage {self.stage} never releases parameters"
            found += self.idle(f"{reason}, every rank holds all of them", only=("zero_hpz_partition_size",))
            found += self.idle(f"{reason}, so nothing is gathered ahead", only=("stage3_prefetch_bucket_size",))
        if not self.offloads_parameters and (self.stage < 3 or config.parallel.pipeline == 1):
            why = "it is for offload_param and pipelines; without them a unit is released after each use"
            found += self.idle(why, only=("stage3_max_live_parameters",))
        return found


def _layered_faults(config: Any) -> list[Fault]:
    """Return conflicts with features that need a different order of microbatches."""
    single = "its ranks exchange data of a single microbatch at a time"
    wanted: Wanted = {
        "parallel.pipeline": ((1,), "a pipeline schedule already runs several microbatches while a stage is gathered"),
        "parallel.sequence": ((1,), single),
        "parallel.expert": ((1,), single),
        "torch_autocast.enabled": ((False,), "blocks run outside of a whole forward; set bf16.enabled instead"),
    }
    return needs("zero_optimization.layered_gradient_accumulation", wanted, config)


def update_in_backward_faults(config: Any) -> list[Fault]:
    """Return conflicts with update_in_backward: an update during a backward is final, so nothing may change it at the
    end.
    """
    zero = config.zero_optimization
    if not zero.update_in_backward:
        return []
    wanted: Wanted = {
        "gradient_clipping": ((0,), "the norm is known after all gradients"),
        "fp16.enabled": ((False,), "an overflow in a later unit skips the whole step; bf16 needs no scaling"),
    }
    # Layered accumulation reduces each unit once a step. null: `resolve` asks again, when it is known.
    if not zero.layered_gradient_accumulation and config.gradient_accumulation_steps is not None:
        wanted["gradient_accumulation_steps"] = ((1,), "gradients are complete after the last microbatch")
    if zero.offload_optimizer.is_used:
        why = {
            "speculative": "it also updates in the backward, and repeats an update after clipping or an overflow",
            "delayed": "it updates during the next step",
        }.get(zero.offload_optimizer.overlap, "")
        wanted["zero_optimization.offload_optimizer.overlap"] = (("none",), why)
    return needs("zero_optimization.update_in_backward", wanted, config)


def shard_size_faults(zero: ZeroConfig, data_size: int, expert: int) -> list[Fault]:
    """Return faults unless the shard size divides the data-parallel ranks, hpZ the shard size, and experts both."""
    if zero.stage == 0:  # shards nothing: the keys have notes
        return []
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
        # Experts lie within each group. If they do not divide the whole, another fault says so. hpZ of 1 rank is off,
        # but a shard group of 1 rank is a group.
        elif size % expert and whole % expert == 0 and (key == "shard_size" or size > 1):
            message = f"expert({expert}) x shard(?) = {key}({size}) does not hold; set a multiple of {expert}"
            found.append(Fault(f"zero_optimization.{key}", "conflict", message))
    return found
