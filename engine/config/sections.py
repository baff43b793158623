"""Sections without a separate file. Each field's docstring is its documentation."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...configs.section import Bool, Dtype, Float, Folder, Int, Natural, Positive, worded
from .errors import ConfigSection, Fault, SwitchedSection, Wanted, needs, quoted


class BF16Config(SwitchedSection):
    """Compute in bfloat16, with or without fp32 master weights."""

    masters: Annotated[Bool | Literal["kahan", "int8"], worded('expected true, false, "kahan" or "int8"')] = Field(
        default=True, json_schema_extra={"enum": [True, False, "kahan", "int8"]}
    )
    """true: fp32 master weights, 4 bytes each. false: none; updates are rounded at random, by `seed`, step and element.
    "kahan": a second bf16 number keeps the rounding error, 2 bytes each. "int8": 8 more bits, 1 byte each; lower bits
    are rounded at random."""

    auto_cast: Bool = True
    """Cast floating-point inputs of the model to bf16; also inputs of its blocks if it has fp32 buffers."""

    def faults(self, config: Any) -> list[Fault]:
        if not (self.enabled and config.fp16.enabled):
            return []
        # Reported once, at bf16: the section fp16 does not ask.
        message = "bf16.enabled and fp16.enabled are both true; set one of them to false"
        return [Fault("bf16.enabled", "conflict", message)]


_DYNAMIC_SCALING = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)


class FP16Config(SwitchedSection):
    """Compute in float16, with loss scaling and fp32 master weights."""

    auto_cast: Bool = True
    """Cast floating-point inputs of the model to fp16; also inputs of its blocks if it has fp32 buffers."""

    loss_scale: Float = Field(default=0.0, ge=0)
    """Fixed loss scale. 0: dynamic."""

    # float32 has normal numbers for this scale and for its inverse; the inverse of 2 ** 127 is subnormal.
    initial_scale_power: Int = Field(default=16, ge=0, le=126)
    """Dynamic: the first scale is 2 to this power."""

    loss_scale_window: Int = Field(default=1000, ge=1)
    """Dynamic: steps without overflow until the scale doubles."""

    hysteresis: Int = Field(default=2, ge=1)
    """Dynamic: overflows until the scale is halved."""

    consecutive_hysteresis: Bool = False
    """Dynamic: a step without overflow resets the count of overflows."""

    min_loss_scale: Float = Field(default=1.0, ge=0)
    """Dynamic: the smallest scale."""

    def faults(self, config: Any) -> list[Fault]:
        first = 2**self.initial_scale_power
        # A fixed scale never moves. A note says that the keys of the dynamic scale have no effect.
        if not self.enabled or self.loss_scale > 0 or self.min_loss_scale <= first:
            return []
        message = (
            f"expected at most the first scale, 2 ** fp16.initial_scale_power({self.initial_scale_power}) = {first}, "
            f"found {quoted(self.min_loss_scale)}: an overflow would raise the scale"
        )
        return [Fault("fp16.min_loss_scale", "conflict", message)]

    def notes(self, config: Any) -> list[str]:
        if not self.enabled:
            return super().notes(config)
        fixed = f"fp16.loss_scale is fixed at {self.loss_scale:g}"
        return self.idle(fixed, only=_DYNAMIC_SCALING) if self.loss_scale > 0 else []


def _bfloat16(value: object) -> object:
    if value in ("bfloat16", "bf16", "torch.bfloat16"):
        return "bfloat16"
    words = 'expected "bfloat16": float16 needs a loss scale, set fp16.enabled instead'
    raise PydanticCustomError("value_error", words)


class TorchAutocastConfig(SwitchedSection):
    """Run forwards under torch.autocast: parameters keep their dtypes, eligible operations compute in bfloat16."""

    dtype: Annotated[Literal["bfloat16"], BeforeValidator(_bfloat16)] = "bfloat16"
    """Dtype of the eligible operations."""

    def faults(self, config: Any) -> list[Fault]:
        if not self.enabled:
            return []
        wanted: Wanted = {
            "fp16.enabled": ((False,), "its operations compute in bfloat16"),
            "parallel.pipeline": ((1,), "a stage calls parts of the model; set bf16.enabled instead"),
        }
        return needs("torch_autocast", wanted, config)


_DTYPES = {  # names of DeepSpeed and torch, the latter also with "torch." before them
    **dict.fromkeys(("float32", "float"), "fp32"),
    "bfloat16": "bf16",
    **dict.fromkeys(("float16", "half"), "fp16"),
}


def dtype_name(value: object) -> object:
    """Translate a dtype name of DeepSpeed or torch to ours; return unknown values unchanged."""
    return _DTYPES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value


class DataTypesConfig(ConfigSection):
    """Dtypes of gradients."""

    grad_accum_dtype: Annotated[Dtype | None, BeforeValidator(dtype_name)] = None
    """Dtype in which gradients accumulate over microbatches, also by torch's name ("bfloat16"). null: fp32."""


Bits = Annotated[Literal[4, 8] | None, worded("expected 8, 4 or null (bits of a value in a message)")]


class PowerSGDConfig(ConfigSection):
    """PowerSGD: send a gradient matrix as two thin matrices whose product approximates it. Stages 0 and 1."""

    rank: Natural = 0
    """Columns of the thin matrices. 0: off."""

    start_step: Natural = 1000
    """Number of first steps with exact gradients."""

    min_compression_rate: Float = Field(default=2.0, ge=1)
    """Send a parameter's gradient exactly if the thin matrices save less than this factor."""

    error_feedback: Bool = True
    """Add the approximation error to the gradient of the next step."""

    warm_start: Bool = True
    """Start from the thin matrix of the previous step, not from random values."""

    def faults(self, config: Any) -> list[Fault]:
        if not self.rank:
            return []
        zero, final = config.zero_optimization, "its error feedback needs final steps"
        wanted: Wanted = {
            "zero_optimization.stage": ((0, 1), "a rank has the gradient of a whole step only at stages 0 and 1"),
            "zero_optimization.update_in_backward": ((False,), final),
            "communication.gradient_bits": ((None,), "it compresses gradients itself"),
            **{
                f"parallel.{axis}": ((1,), "ranks have only parts of a matrix")
                for axis in ("tensor", "sequence", "expert")
            },
        }
        # Stage 0 has no shard groups: a shard size has a note there, and is no fault.
        if zero.stage:
            why = "it sums a gradient over all data-parallel ranks"
            wanted["zero_optimization.shard_size"] = ((None,), why)
        if zero.offload_optimizer.is_used:
            wanted["zero_optimization.offload_optimizer.overlap"] = (("none",), final)
        return needs("communication.power_sgd", wanted, config)

    def notes(self, config: Any) -> list[str]:
        return [] if self.rank else self.idle("communication.power_sgd.rank is 0")


class CommunicationConfig(ConfigSection):
    """How ranks exchange bytes."""

    transport: Literal["auto", "shared_memory", "sockets", "native"] = "auto"
    """The way of bytes between ranks. "auto": chosen for each message. "shared_memory": CPU ranks of a host. "sockets":
    point-to-point. "native": the backend's collectives. Alias: `route`."""

    weight_bits: Bits = None
    """Bits of a weight in messages, in blocks of 128 with a scale. Stage 3 computes with the rounded weights (qwZ of
    ZeRO++). Stages 1 and 2, and groups of `zero_hpz_partition_size`, send changes with the last rounding error. Shards
    and checkpoints stay exact. null: exact."""

    frozen_weight_bits: Bits = None
    """Stage 3: bits of a frozen weight in messages. null: as weight_bits."""

    gradient_bits: Bits = None
    """Bits of a gradient in messages between hosts, after a sum within the host, with unbiased random rounding (qgZ of
    ZeRO++). null: `communication_data_type`."""

    gradient_bits_in_host: Bits = 8
    """With gradient_bits: bits of a gradient in messages within a host. null: `communication_data_type`."""

    ranks_of_host: Positive | None = None
    """With gradient_bits: number of neighbouring ranks that count as a host. null: the ranks of each host."""

    timeout_seconds: Float = Field(default=300.0, gt=0)
    """Seconds after which a collective is an error."""

    step_timeout_seconds: Annotated[Float | None, Field(gt=0)] = None
    """Seconds after which a step, with its data loading, is reported; it continues. `lowtide launch` names the waiting
    and the awaited ranks, with all stacks, and stops the job with --on-stall stop. Without the launcher each rank
    reports itself. null: off."""

    power_sgd: PowerSGDConfig = PowerSGDConfig()

    def notes(self, config: Any) -> list[str]:
        stage, found = config.zero_optimization.stage, []
        if self.gradient_bits is None:
            of_gradients = ("gradient_bits_in_host", "ranks_of_host")
            found += self.idle("communication.gradient_bits is null", only=of_gradients)
        if stage < 3:
            reason = f"stage {stage} sends updated weights only, and frozen weights are not updated"
            found += self.idle(reason, only=("frozen_weight_bits",))
        if stage == 0:
            found += self.idle("stage 0 sends no weights, since every rank updates all", only=("weight_bits",))
        return found


class CheckpointConfig(ConfigSection):
    """Automatic checkpoints, and how checkpoints are written."""

    folder: Folder = None
    """Folder of automatic checkpoints, with a folder for each tag. Every rank must see it."""

    every_steps: Int = Field(default=0, ge=0)
    """Save after this many optimizer steps. 0: only in save_checkpoint."""

    keep_last: Positive | None = None
    """Number of automatic checkpoints to keep; older ones are deleted after a newer one is complete. Checkpoints
    that `latest` names or callers tag are never deleted. null: all."""

    # `async` is a keyword of Python.
    asynchronous: Bool = Field(default=False, alias="async")
    """Write in the background; a step waits only for the copy to host memory."""

    exclude_frozen_parameters: Bool = False
    """Leave out parameters that the optimizer does not update, such as weights below adapters. Loading compares their
    digests, so build the model with the same values. Values changed by `engine.gathered(modify=True)` are written."""

    on_sigterm: Bool = False
    """On SIGTERM or Ctrl-C: finish the step, save, exit with status 0 (Ctrl-C: 130). A second signal acts at once."""

    def faults(self, config: Any) -> list[Fault]:
        users = [f"every_steps {self.every_steps}"] if self.every_steps > 0 else []
        users += ["on_sigterm true"] if self.on_sigterm else []
        # Only automatic checkpoints need a folder here: `save_checkpoint` takes it as an argument.
        if self.folder is not None or not users:
            return []
        message = f"must be given, for the checkpoints of {' and '.join(users)}"
        return [Fault("checkpoint.folder", "missing", message)]

    def notes(self, config: Any) -> list[str]:
        reason = "every_steps is 0 and on_sigterm is false; save_checkpoint takes its folder as an argument"
        return [] if self.every_steps or self.on_sigterm else self.idle(reason, only=("folder",))


class MemoryReportConfig(ConfigSection):
    """Record the memory of a step, operation by operation, next to the prediction."""

    folder: Folder = None
    """Each rank writes its report here, for `lowtide report`. null: off."""

    step: Int = Field(default=3, ge=2)
    """The recorded step, which takes several times as long. Step 1 creates the optimizer states."""

    def notes(self, config: Any) -> list[str]:
        return [] if self.folder is not None else self.idle("memory_report.folder is null")


def _place(value: Any) -> Any:
    if value is not None and (not isinstance(value, str) or "\0" in value):
        raise PydanticCustomError("string_type", "expected the path of a folder")
    # null is the working directory too, as "".
    return value or ""


_Place = Annotated[str, BeforeValidator(_place)]


class TensorboardConfig(SwitchedSection):
    """Write event files for TensorBoard. Needs the package tensorboard."""

    output_path: _Place = ""
    """Folder that holds the folder `job_name`. "": the working directory."""
    job_name: str = "run"
    """Name of the job and its folder."""


class WandbConfig(SwitchedSection):
    """Log to a run of Weights & Biases. Needs the package wandb; without a login, WANDB_MODE=offline writes files."""

    group: str | None = None
    """Name that groups runs."""
    team: str | None = None
    """Team that has the project."""
    project: str = "lowtide"
    """Name of the project."""


class CsvMonitorConfig(SwitchedSection):
    """Write a table `metrics.csv` with a row for each step."""

    output_path: _Place = ""
    """Folder that holds the folder `job_name`. "": the working directory."""
    job_name: str = "run"
    """Name of the job and its folder."""


class ProfileConfig(SwitchedSection):
    """Write a trace, collectives, and operations by module of some steps: see docs/monitors.md."""

    folder: Folder = None
    """Folder of the files. null: only the log."""
    step: Positive = 2
    """First profiled step."""
    steps: Positive = 1
    """Number of profiled steps."""
    module_depth: Annotated[Int, Field(ge=-1)] = -1
    """Depth of listed modules. -1: the deepest."""
    top_modules: Natural = 10
    """Modules listed per depth. 0: all."""
    peak_tflops: Annotated[Float | None, Field(gt=0)] = None
    """The device's peak in the model's dtype, for model FLOPs utilization. null: unknown."""


class FP8Config(SwitchedSection):
    """Multiply in float8 in the linear layers of blocks, by torchao."""

    enabled: Bool = False
    """Multiply in float8 in the linear layers of blocks. Needs the extra "fp8", and a GPU of compute capability 8.9;
    other devices emulate it."""

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """A scale for each tensor (faster), or for each row (more accurate)."""

    min_features: Positive = 1024
    """Layers with fewer input or output features keep their dtype: there casts cost more than products save."""

    exclude: tuple[str, ...] = ()
    """Patterns of names of layers that keep their dtype, such as "*.o_proj"."""

    def faults(self, config: Any) -> list[Fault]:
        if not self.enabled:
            return []
        wanted: Wanted = {
            "fp16.enabled": ((False,), "bf16 needs no loss scale"),
            "parallel.tensor": ((1,), "split layers exchange parts of their products"),
        }
        return needs("fp8", wanted, config)

    def notes(self, config: Any) -> list[str]:
        # float8 pays only if the compiler fuses the casts with their neighbours.
        if not self.enabled or config.compile.blocks:
            return super().notes(config)
        return ["fp8.enabled: set compile.blocks, else the casts cost more than fp8 saves"]


class CompileConfig(ConfigSection):
    """torch.compile on the blocks of the model, inside the code that gathers and reduces them."""

    blocks: Bool = False
    """Compile the forward of repeated blocks, not of embeddings or heads. The first run takes seconds to minutes, once
    for equal blocks."""

    backend: Annotated[str, Field(min_length=1)] = "inductor"
    """Backend of torch.compile: "inductor" (needs a C++ compiler on the CPU), "aot_eager", "eager", ..."""

    mode: str | None = None
    """Mode of torch.compile: "default", "reduce-overhead", "max-autotune", ... null: its default."""

    dynamic: Bool | None = None
    """Whether shapes may change. null: torch.compile decides after the first change."""

    fullgraph: Bool = False
    """A block that needs more than one graph is an error."""

    graphs: Bool = False
    """Replay microbatches and updates of `train_step` as CUDA graphs: see docs/kernels.md."""

    max_graphs: Positive = 8
    """Captured graphs of microbatches, for shapes of a batch and positions in a step. Further shapes run eagerly."""

    def faults(self, config: Any) -> list[Fault]:
        if not self.graphs:
            return []
        host, draws = "the host takes part in each microbatch", "its random bits change in each step"
        wanted: Wanted = {
            "zero_optimization.offload_optimizer.device": (("none",), host),
            "zero_optimization.offload_param.device": (("none",), host),
            "activation_checkpointing.offload.device": (("none",), host),
            "zero_optimization.update_in_backward": ((False,), "the update is a separate graph"),
            "zero_optimization.layered_gradient_accumulation": ((False,), "a schedule runs all microbatches together"),
            **{
                f"parallel.{axis}": ((1,), "its exchanges are not captured")
                for axis in ("pipeline", "tensor", "sequence", "expert")
            },
            **{
                f"communication.{key}": ((None,), draws)
                for key in ("weight_bits", "frozen_weight_bits", "gradient_bits")
            },
            "communication.power_sgd.rank": ((0,), "its matrices change in each step"),
            "fp8.enabled": ((False,), "this has not been tried"),
            "compile.mode": ((None, "default", "max-autotune-no-cudagraphs"), "other modes capture graphs too"),
        }
        return needs("compile.graphs", wanted, config)

    def notes(self, config: Any) -> list[str]:
        found = [] if self.blocks else self.idle("compile.blocks is false", but=("graphs", "max_graphs"))
        if self.blocks and not self.graphs and self.mode in ("reduce-overhead", "max-autotune"):
            found.append(
                f"compile.mode: on a GPU torch stops where a gradient that {self.mode!r} has computed is used after "
                "the next forward, as in accumulation; set compile.graphs with another mode instead"
            )
        if not self.graphs:
            return found + self.idle("compile.graphs is false", only=("max_graphs",))
        why = "graphs keep activations and gradients between steps; predictions of memory count a single shape"
        return [*found, f"compile.graphs: {why}"]
