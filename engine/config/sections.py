"""Sections without a file of their own. Each field's docstring is its documentation."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...configs.section import Bool, Dtype, Float, Folder, Int, Natural, NonNegative, Positive
from ...optimizers import OPTIMIZERS
from .errors import ConfigSection, Fault, shown


def _masters(value: object) -> object:
    if isinstance(value, bool) or value in ("kahan", "int8"):
        return value
    raise PydanticCustomError("value_error", 'expected true, false, "kahan" or "int8"')


class BF16Config(ConfigSection):
    """Compute in bfloat16, with fp32 master parameters in the optimizer, or without."""

    path = "bf16"

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

    def faults(self, config: Any) -> list[Fault]:
        if not (self.enabled and config.fp16.enabled):
            return []
        message = "bf16.enabled and fp16.enabled are both true; there is one compute type, set one of them to false"
        return [Fault("bf16.enabled", "conflict", message)]

    def notes(self, config: Any) -> list[str]:
        return [] if self.enabled else self.idle("bf16.enabled is false")


_DYNAMIC_SCALING = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)


class FP16Config(ConfigSection):
    """Compute in float16, with loss scaling and fp32 master parameters in the optimizer."""

    path = "fp16"

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

    def notes(self, config: Any) -> list[str]:
        if not self.enabled:
            return self.idle("fp16.enabled is false")
        fixed = f"fp16.loss_scale is fixed at {self.loss_scale:g}"
        return self.idle(fixed, only=_DYNAMIC_SCALING) if self.loss_scale > 0 else []


def _bfloat16(value: object) -> object:
    if value in ("bfloat16", "bf16", "torch.bfloat16"):
        return "bfloat16"
    words = 'expected "bfloat16": float16 needs a loss scale, which fp16.enabled has'
    raise PydanticCustomError("value_error", words)


class TorchAutocastConfig(ConfigSection):
    """Forwards under torch.autocast: parameters keep the model's types, operations that may are computed in another."""

    path = "torch_autocast"

    enabled: Bool = False
    """Turns it on."""

    dtype: Annotated[Literal["bfloat16"], BeforeValidator(_bfloat16)] = "bfloat16"
    """The type of such operations."""

    def faults(self, config: Any) -> list[Fault]:
        if not self.enabled or config.parallel.pipeline == 1:
            return []
        message = "needs parallel.pipeline 1: a stage of a pipeline calls parts of the model; set bf16.enabled instead"
        return [Fault("torch_autocast.enabled", "conflict", message)]


_DTYPES = {  # also DeepSpeed's and torch's names, and those with "torch." before them
    **dict.fromkeys(("float32", "float"), "fp32"),
    "bfloat16": "bf16",
    **dict.fromkeys(("float16", "half"), "fp16"),
}


def dtype_name(value: object) -> object:
    """The name of a type here, of DeepSpeed's and torch's names; what is none of them stays."""
    return _DTYPES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value


class DataTypesConfig(ConfigSection):
    """The types in which gradients are kept."""

    path = "data_types"

    grad_accum_dtype: Annotated[Dtype | None, BeforeValidator(dtype_name)] = None
    """The type in which gradients accumulate over microbatches; also by torch's name, as "bfloat16". null: fp32."""


def _bits(value: object) -> object:
    if value is None or (value in (4, 8) and not isinstance(value, bool)):
        return value
    raise PydanticCustomError("value_error", "expected 8, 4 or null: the bits of a value in messages")


Bits = Annotated[Literal[4, 8] | None, BeforeValidator(_bits)]


class PowerSGDConfig(ConfigSection):
    """PowerSGD: a matrix of gradients is sent as two thin ones, whose product is near it. Stages 0 and 1."""

    path = "communication.power_sgd"

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

    def faults(self, config: Any) -> list[Fault]:
        if not self.rank:
            return []
        zero, parallel = config.zero_optimization, config.parallel
        each = "it is made of the gradient of a whole step, which a rank has at stages 0 and 1 alone"
        parts = "ranks have parts of a matrix there"
        wrong: dict[str, tuple[bool, str, object, str]] = {
            "zero_optimization.stage": (zero.stage > 1, "0 or 1", zero.stage, each),
            "zero_optimization.shard_size": (
                bool(zero.stage) and zero.shard_size is not None,
                "null",
                zero.shard_size,
                "a gradient is summed over one line of ranks",
            ),
            "parallel.tensor": (parallel.tensor > 1, "1", parallel.tensor, parts),
            "parallel.sequence": (parallel.sequence > 1, "1", parallel.sequence, parts),
            "parallel.expert": (parallel.expert > 1, "1", parallel.expert, parts),
            "zero_optimization.update_in_backward": (
                zero.update_in_backward,
                "false",
                True,
                "what was not sent is remembered of steps that count",
            ),
            "zero_optimization.offload_optimizer.overlap": (
                zero.offload_optimizer.is_used and zero.offload_optimizer.overlap != "none",
                '"none"',
                zero.offload_optimizer.overlap,
                "what was not sent is remembered of steps that count",
            ),
        }
        return [
            Fault(path, "conflict", f"communication.power_sgd needs {expected}, found {shown(value)}: {why}")
            for path, (is_wrong, expected, value, why) in wrong.items()
            if is_wrong
        ]


class CommunicationConfig(ConfigSection):
    """How bytes go between the ranks."""

    path = "communication"

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

    def faults(self, config: Any) -> list[Fault]:
        optimizer, rank, found = config.optimizer, self.power_sgd.rank, []
        sends_signs = optimizer is not None and OPTIMIZERS[optimizer.type].sends_signs
        if self.gradient_bits is not None and (rank or sends_signs):
            beside = "communication.power_sgd" if rank else f'optimizer.type "{optimizer.type}"'
            message = (
                f"needs null beside {beside}, found {self.gradient_bits}: that sends gradients in a form of its own"
            )
            found.append(Fault("communication.gradient_bits", "conflict", message))
        if rank and sends_signs:
            message = f'needs 0 beside optimizer.type "{optimizer.type}", found {rank}: that sends no gradients'
            found.append(Fault("communication.power_sgd.rank", "conflict", message))
        return found

    def notes(self, config: Any) -> list[str]:
        stage, found = config.zero_optimization.stage, []
        if self.gradient_bits is None:
            of_gradients = ("gradient_bits_in_host", "ranks_of_host")
            found += self.idle("communication.gradient_bits is null", only=of_gradients)
        if stage < 3:
            reason = f"stage {stage} sends what an update has changed, and these are not updated"
            found += self.idle(reason, only=("frozen_weight_bits",))
        if stage == 0:
            found += self.idle("stage 0 sends no weights, every rank updates all of them", only=("weight_bits",))
        return found


class CheckpointConfig(ConfigSection):
    """When checkpoints are saved without a call, where they go, and how they are written."""

    path = "checkpoint"

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

    def faults(self, config: Any) -> list[Fault]:
        users = [f"every_steps {self.every_steps}"] if self.every_steps > 0 else []
        users += ["on_sigterm true"] if self.on_sigterm else []
        if self.folder is not None or not users:
            return []
        message = f"must be given: it is where the checkpoints of {' and '.join(users)} go"
        return [Fault("checkpoint.folder", "missing", message)]

    def notes(self, config: Any) -> list[str]:
        reason = "every_steps is 0 and on_sigterm is false; a call of save_checkpoint names its own folder"
        return [] if self.every_steps or self.on_sigterm else self.idle(reason, only=("folder",))


class MemoryReportConfig(ConfigSection):
    """One step is recorded, operation by operation, and what it held is written beside what was predicted."""

    path = "memory_report"

    folder: Folder = None
    """Where each rank writes its report; `lowtide report` reads it. null: none is made. A relative path starts at the
    working directory."""

    step: Int = Field(default=3, ge=2)
    """Which step of this process is recorded: it takes several times as long. The first one makes the optimizer's
    states."""

    def notes(self, config: Any) -> list[str]:
        return [] if self.folder is not None else self.idle("memory_report.folder is null")


def _place(value: Any) -> Any:
    if value is not None and (not isinstance(value, str) or "\0" in value):
        raise PydanticCustomError("string_type", "expected the path of a folder")
    return value or ""


_Place = Annotated[str, BeforeValidator(_place)]


class TensorboardConfig(ConfigSection):
    """Event files for TensorBoard. Needs the package tensorboard."""

    path = "tensorboard"

    enabled: Bool = False
    """Turns it on."""
    output_path: _Place = ""
    """The folder in which `job_name` is a folder. "": the working directory."""
    job_name: str = "run"
    """Name of the job, and of its folder."""


class WandbConfig(ConfigSection):
    """A run of Weights & Biases. Needs the package wandb; without a login, WANDB_MODE=offline writes files."""

    path = "wandb"

    enabled: Bool = False
    """Turns it on."""
    group: str | None = None
    """Runs that are shown together."""
    team: str | None = None
    """Whose project it is."""
    project: str = "lowtide"
    """The project."""


class CsvMonitorConfig(ConfigSection):
    """A table `metrics.csv` with a row for each step."""

    path = "csv_monitor"

    enabled: Bool = False
    """Turns it on."""
    output_path: _Place = ""
    """The folder in which `job_name` is a folder. "": the working directory."""
    job_name: str = "run"
    """Name of the job, and of its folder."""


class ProfileConfig(ConfigSection):
    """Steps of which a trace, collectives, and operations by module are written: see docs/monitors.md."""

    path = "profile"

    enabled: Bool = False
    """Turns it on."""
    folder: Folder = None
    """Where the files go. null: only the log says it. A relative path starts at the working directory."""
    step: Positive = 2
    """The first step that is profiled."""
    steps: Positive = 1
    """How many are."""
    module_depth: Annotated[Int, Field(ge=-1)] = -1
    """Of the modules that are listed; -1: the deepest."""
    top_modules: Natural = 10
    """Modules of each depth that are listed; 0: all."""
    peak_tflops: Annotated[NonNegative | None, Field(gt=0)] = None
    """What the device can do in the dtype of the model; for model-flops utilisation. null: not known."""


class CompileConfig(ConfigSection):
    """torch.compile on the blocks of the model, each inside of what gathers and reduces it."""

    path = "compile"

    blocks: Bool = False
    """Compile the forward of every repeated block, that of an embedding or a head not. It is compiled when it first
    runs, which takes seconds to minutes, and once for all blocks that are alike."""

    backend: Annotated[str, Field(min_length=1)] = "inductor"
    """By which backend of torch.compile: "inductor" (on the CPU it needs a C++ compiler), "aot_eager", "eager", ..."""

    mode: str | None = None
    """What torch.compile takes as mode: "default", "reduce-overhead", "max-autotune", ... null: its default."""

    dynamic: Bool | None = None
    """Whether shapes are expected to change. null: a shape that has changed is, from then on."""

    fullgraph: Bool = False
    """A block that cannot be compiled as one graph is an error."""

    def notes(self, config: Any) -> list[str]:
        return [] if self.blocks else self.idle("compile.blocks is false")
