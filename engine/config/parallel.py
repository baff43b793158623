"""The sections that split a model over ranks, and the conditions between them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ...configs.section import Bool, Positive, worded
from ...pipe.schedules.registry import check_counts, is_path, make_schedule
from ...pipe.schedules.schedule import Schedule, ScheduleError
from .batch import nearest_divisors
from .errors import ConfigSection, Fault, Wanted, needs, printable


class ParallelConfig(ConfigSection):
    """Sizes of the axes over which a model is split. The remaining ranks are data-parallel."""

    pipeline: Positive = 1
    """Ranks that a batch passes in turn, each with some of the blocks. 1: no pipeline."""

    tensor: Positive = 1
    """Ranks that share each layer (rows, columns, heads). They take the same data. 1: whole layers."""

    tensor_sequence: Bool = False
    """Between split layers, each rank of `tensor` has a part of the tokens. See docs/parallelism.md."""

    sequence: Positive = 1
    """Ranks that share each sequence, in consecutive parts. They take the same data. See
    docs/long-sequences.md. 1: whole sequences."""

    expert: Positive = 1
    """Data-parallel ranks that share the experts of a layer; tokens go to their experts. See
    docs/parallelism.md. 1: all experts on each rank."""

    @property
    def ranks_of_sample(self) -> int:
        """Number of ranks that take the same data."""
        return self.pipeline * self.sequence * self.tensor

    def faults(self, config: Any) -> list[Fault]:
        if self.pipeline == 1:
            return []
        zero = config.zero_optimization
        order = "activations are not needed in reverse order, but in the order of the schedule; "
        wanted: Wanted = {
            "zero_optimization.update_in_backward": ((False,), "a gradient is complete after the last microbatch"),
            "activation_checkpointing.offload.device": (("none",), f"{order}activation_checkpointing.every works"),
        }
        if zero.offloads_parameters:
            why = "the schedule gathers and releases a stage's parameters, from memory"
            wanted["zero_optimization.offload_param.device"] = (("none",), why)
        if zero.offload_optimizer.is_used:
            why = "all gradients are complete only at the end of the step"
            wanted["zero_optimization.offload_optimizer.overlap"] = (("none",), why)
        return needs(f"parallel.pipeline {self.pipeline}", wanted, config)

    def notes(self, config: Any) -> list[str]:
        return self.idle("parallel.tensor is 1", only=("tensor_sequence",)) if self.tensor == 1 else []


class TensorParallelConfig(ConfigSection):
    """How layers are split if parallel.tensor is above 1: see docs/parallelism.md."""

    plan: dict[str, str] | None = None
    """Layer name pattern -> "column", "row", "vocabulary", "column_gathered", "experts", "partial" or "whole";
    "column/3" for a layer of three equal parts. Overrides the model's plan and known layer names. null: only
    the model's plan and known names."""

    def notes(self, config: Any) -> list[str]:
        return self.idle("parallel.tensor is 1") if config.parallel.tensor == 1 else []


class SequenceParallelConfig(ConfigSection):
    """How attention is computed if parallel.sequence is above 1: see docs/long-sequences.md."""

    attention: Literal["auto", "ulysses", "ring"] = "auto"
    """"ulysses": an all-to-all gives each rank some heads of all tokens. "ring": keys and values go round the ranks.
    "auto": heads over as many ranks as divide them, and a ring over the rest."""

    def notes(self, config: Any) -> list[str]:
        return self.idle("parallel.sequence is 1") if config.parallel.sequence == 1 else []


class PipelineConfig(ConfigSection):
    """How a pipeline runs a step: see docs/pipeline.md."""

    schedule: str = Field(default="1f1b", min_length=1)
    """Order of the work: gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v, or the path of a schedule file."""

    chunks: Positive | None = None
    """Stages on each rank. null: the fewest that the schedule takes."""

    microbatches: Positive | None = None
    """Another name for gradient_accumulation_steps, with or without a pipeline."""

    balance: Annotated[
        Literal["parameters", "time"] | Annotated[tuple[Positive, ...], Field(min_length=1)],
        worded('expected "parameters", "time" or a list of numbers of blocks'),
    ] = "parameters"
    """Divide blocks over stages by "parameters", by "time" (measured once with initialize's sample_batch), or by a list
    with the number of blocks of each stage."""

    def faults(self, config: Any) -> list[Fault]:
        accumulation = config.gradient_accumulation_steps
        if None in (self.microbatches, accumulation) or self.microbatches == accumulation:
            return []
        message = (
            f"found {self.microbatches}, but gradient_accumulation_steps is {accumulation}: both are the number of "
            "microbatches of a step; leave one out"
        )
        return [Fault("pipeline.microbatches", "conflict", message)]

    def notes(self, config: Any) -> list[str]:
        # Not microbatches: without a pipeline it is the accumulation.
        settings = ("schedule", "chunks", "balance")
        return self.idle("parallel.pipeline is 1", only=settings) if config.parallel.pipeline == 1 else []


def schedule_of(parallel: ParallelConfig, pipeline: PipelineConfig, num_microbatches: int) -> Schedule:
    """Build the schedule of the config. Raises ScheduleError."""
    return make_schedule(pipeline.schedule, parallel.pipeline, num_microbatches, pipeline.chunks)


def world_faults(parallel: ParallelConfig, world_size: int) -> list[Fault]:
    """Return a fault unless the axes divide the world and experts divide the data-parallel ranks."""
    degrees = {key: getattr(parallel, key) for key in ("pipeline", "tensor", "sequence")}
    if world_size % parallel.ranks_of_sample == 0:
        data_size = world_size // parallel.ranks_of_sample
        if data_size % parallel.expert == 0:
            return []
        blamed, whole = "expert", data_size
        equation = f"expert({parallel.expert}) x groups(?) = data-parallel ranks({data_size})"
    else:
        whole = world_size
        for blamed, degree in degrees.items():  # noqa: B007  (the first that does not divide the remaining ranks)
            if whole % degree:
                break
            # Degrees before the blamed one divide the world, so the nearest legal values are divisors of the rest.
            whole //= degree
        factors = " x ".join(f"{key}({degree})" for key, degree in degrees.items() if degree > 1)
        equation = f"{factors} x data(?) = world size ({world_size})"
    message = (
        f"{equation} does not hold; the nearest legal values are {nearest_divisors(getattr(parallel, blamed), whole)}"
    )
    return [Fault(f"parallel.{blamed}", "conflict", message)]


def schedule_faults(parallel: ParallelConfig, pipeline: PipelineConfig, num_microbatches: int) -> list[Fault]:
    """Return a fault if the schedule does not take this number of ranks, microbatches or chunks."""
    if parallel.pipeline == 1:
        return []
    try:
        # A file is read and simulated. A named schedule is only counted: zb-v of 16 ranks takes 0.1 s to build.
        if is_path(pipeline.schedule):
            schedule_of(parallel, pipeline, num_microbatches)
        else:
            check_counts(pipeline.schedule, parallel.pipeline, num_microbatches, pipeline.chunks)
    except ScheduleError as error:
        # The text may quote lines of a file. Only its line breaks are ours.
        message = "\n".join(map(printable, str(error).split("\n")))
        return [Fault("pipeline.schedule", "value", message)]
    return []
