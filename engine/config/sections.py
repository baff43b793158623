"""The sections of the config other than optimizer and scheduler. Each field's docstring is its documentation."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...configs.section import Bool, Dtype, Float, Folder, Int, Natural, Positive, Section
from .offload import ActivationOffloadConfig, OffloadOptimizerConfig, OffloadParamConfig

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


class ZeroConfig(Section):
    """What is sharded over the data-parallel ranks, and how."""

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


def _masters(value: object) -> object:
    if isinstance(value, bool) or value in ("kahan", "int8"):
        return value
    raise PydanticCustomError("value_error", 'expected true, false, "kahan" or "int8"')


class BF16Config(Section):
    """Compute in bfloat16, with fp32 master parameters in the optimizer, or without."""

    enabled: Bool = False
    """Turns bf16 on."""

    masters: Annotated[bool | Literal["kahan", "int8"], BeforeValidator(_masters)] = Field(
        default=True, json_schema_extra={"enum": [True, False, "kahan", "int8"]}
    )
    """true: the optimizer has fp32 master parameters, 4 bytes each. false: the bf16 parameters are the only copy, and
    an update is computed in fp32 and rounded to them at random, by bits drawn from `seed`, the step and the place of
    the element. "kahan": nothing is random, and a second bf16 number keeps what each parameter lacks, 2 bytes each.
    "int8": 8 more bits of each parameter, 1 byte, and what is below these is rounded at random."""

    auto_cast: Bool = True
    """Cast floating-point inputs of the model to bf16, and of its blocks where it has fp32 buffers."""


class FP16Config(Section):
    """Compute in float16, with loss scaling and fp32 master parameters in the optimizer."""

    enabled: Bool = False
    """Turns fp16 on."""

    auto_cast: Bool = True
    """Cast floating-point inputs of the model to fp16, and of its blocks where it has fp32 buffers."""

    loss_scale: Float = Field(default=0.0, ge=0)
    """The fixed factor on the loss. 0: dynamic loss scaling."""

    initial_scale_power: Int = Field(default=16, ge=0, le=126)
    """Dynamic scaling starts with 2 to this power."""

    loss_scale_window: Int = Field(default=1000, ge=1)
    """Dynamic scaling: the scale doubles after this many steps without overflow."""

    hysteresis: Int = Field(default=2, ge=1)
    """Dynamic scaling: the number of overflows after which the scale is halved."""

    consecutive_hysteresis: Bool = False
    """Dynamic scaling: a step without overflow refills the hysteresis."""

    min_loss_scale: Float = Field(default=1.0, ge=0)
    """Dynamic scaling: the scale never falls below this."""


def _bfloat16(value: object) -> object:
    if value in ("bfloat16", "bf16", "torch.bfloat16"):
        return "bfloat16"
    words = 'expected "bfloat16": float16 needs a loss scale, which fp16.enabled has'
    raise PydanticCustomError("value_error", words)


class TorchAutocastConfig(Section):
    """Forwards under torch.autocast: parameters keep the model's types, operations that may are computed in another."""

    enabled: Bool = False
    """Turns it on."""

    dtype: Annotated[Literal["bfloat16"], BeforeValidator(_bfloat16)] = "bfloat16"
    """The type of such operations."""


_DTYPES = {  # also DeepSpeed's and torch's names, and those with "torch." before them
    **dict.fromkeys(("float32", "float"), "fp32"),
    "bfloat16": "bf16",
    **dict.fromkeys(("float16", "half"), "fp16"),
}


def dtype_name(value: object) -> object:
    """The name of a type here, of DeepSpeed's and torch's names; what is none of them stays."""
    return _DTYPES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value


class DataTypesConfig(Section):
    """The types in which gradients are kept."""

    grad_accum_dtype: Annotated[Dtype | None, BeforeValidator(dtype_name)] = None
    """The type in which gradients accumulate over microbatches; also by torch's name, as "bfloat16". null: fp32."""


class ActivationCheckpointingConfig(Section):
    """Recompute activations in backward rather than keep them."""

    every: Int = Field(default=0, ge=0)
    """0: none. 1: every repeated block is recomputed. k: every k-th block."""

    offload: ActivationOffloadConfig = ActivationOffloadConfig()


def _bits(value: object) -> object:
    if value is None or (value in (4, 8) and not isinstance(value, bool)):
        return value
    raise PydanticCustomError("value_error", "expected 8, 4 or null: the bits of a value in messages")


Bits = Annotated[Literal[4, 8] | None, BeforeValidator(_bits)]


class PowerSGDConfig(Section):
    """PowerSGD: a matrix of gradients is sent as two thin ones, whose product is near it. Stages 0 and 1."""

    rank: Natural = 0
    """Columns of the thin matrices. 0: off, gradients are sent as they are."""

    start_step: Natural = 1000
    """Gradients of so many steps are sent as they are first."""

    min_compression_rate: Float = Field(default=2.0, ge=1)
    """A parameter whose thin matrices, times this, have as many elements as it has, is sent as it is."""

    error_feedback: Bool = True
    """What the product lacks is added to the gradient of the next step."""

    warm_start: Bool = True
    """The product begins with the thin matrix of the step before, else with a random one in each step."""


class CommunicationConfig(Section):
    """How bytes go between the ranks."""

    route: Literal["auto", "shared_memory", "sockets", "native"] = "auto"
    """"auto" chooses for each message; "shared_memory" between the CPU ranks of one host; "sockets" is
    point-to-point; "native" is the backend's own collectives."""

    weight_bits: Bits = None
    """8 or 4: weights go to other ranks in so many bits, in blocks of 128 with a scale. At stage 3 that is what they
    are computed with (qwZ of ZeRO++); at stages 1 and 2, and between the groups of `zero_hpz_partition_size`, it is
    what an update has changed, and what is rounded away goes with the next one. Shards, of which updates are made and
    which checkpoints have, are exact. null: as they are."""

    frozen_weight_bits: Bits = None
    """Stage 3: the same of weights that are not trained. null: as weight_bits."""

    gradient_bits: Bits = None
    """8 or 4: gradients go to other hosts in so many bits, rounded at random so that the mean is exact (qgZ of ZeRO++),
    after they were summed over the ranks of a host. null: in `communication_data_type`."""

    gradient_bits_in_host: Bits = 8
    """With gradient_bits: the same of gradients between the ranks of a host. null: in `communication_data_type`."""

    ranks_of_host: Positive | None = None
    """With gradient_bits: how many ranks, next to each other, count as those of a host. null: those of a host."""

    timeout_seconds: Float = Field(default=300.0, gt=0)
    """A collective that takes longer than this is an error, not a hang."""

    step_timeout_seconds: Annotated[Float | None, Field(gt=0)] = None
    """A step, with the loading of its data, that takes longer than this is reported: `lowtide launch` says which rank
    waits for which, with the stacks of all (and then stops, with --on-stall stop); started otherwise, each rank says
    for itself what it does. Training goes on. null: no limit."""

    power_sgd: PowerSGDConfig = PowerSGDConfig()


class CheckpointConfig(Section):
    """When checkpoints are saved without a call, where they go, and how they are written."""

    folder: Folder = None
    """Where the checkpoints of every_steps and on_sigterm go: each tag is a folder below it. Every rank must see it. A
    relative path starts at the working directory."""

    every_steps: Int = Field(default=0, ge=0)
    """Save a checkpoint after every so many optimizer steps. 0: only when save_checkpoint is called."""

    keep_last: Positive | None = None
    """The number of checkpoints without a tag of the caller's that are kept: older ones are deleted once a newer one is
    complete. Checkpoints with a tag of the caller's are never deleted. null: all are kept."""

    asynchronous: Bool = Field(default=False, alias="async")
    """Write in the background: a step after a save waits only for the copy to host memory."""

    exclude_frozen_parameters: Bool = False
    """Do not write parameters that the optimizer does not update, such as the weights below adapters: a checkpoint has
    digests of them, and is loaded into a model that was built with the same values, which is checked. Those that were
    changed by hand (`engine.gathered(modify=True)`) are written."""

    on_sigterm: Bool = False
    """On SIGTERM or Ctrl-C (SIGINT): finish the step, save a checkpoint, and exit with status 0, after Ctrl-C with 130.
    A second one acts at once."""


class MemoryReportConfig(Section):
    """One step is recorded, operation by operation, and what it held is written beside what was predicted."""

    folder: Folder = None
    """Where each rank writes its report; `lowtide report` reads it. null: none is made. A relative path starts at the
    working directory."""

    step: Int = Field(default=3, ge=2)
    """Which step of this process is recorded: it takes several times as long. The first one makes the optimizer's
    states."""
