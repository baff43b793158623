"""`Choice`: values of the parallelism, ZeRO, offload and batch keys. `Space`: the choices that the planner may try."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

from ...pipe.schedules.registry import KINDS, find_kind
from ..config.config import Config
from .machine import Machine

_MAX_ROWS = 64  # of a microbatch
_CHUNKS = (2, 4)  # for schedules that take any number
_WORSE = ("gpipe",)  # 1F1B has the same bubble and never keeps more microbatches

KEYS = {  # attribute of a choice: key of the config
    "pipeline": "parallel.pipeline",
    "tensor": "parallel.tensor",
    "sequence": "parallel.sequence",
    "expert": "parallel.expert",
    "schedule": "pipeline.schedule",
    "chunks": "pipeline.chunks",
    "stage": "zero_optimization.stage",
    "shard_size": "zero_optimization.shard_size",
    "partition": "zero_optimization.zero_hpz_partition_size",
    "offload_optimizer": "zero_optimization.offload_optimizer.device",
    "offload_param": "zero_optimization.offload_param.device",
    "rows": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
    "every": "activation_checkpointing.every",
    "offload_activations": "activation_checkpointing.offload.device",
}
"""The chosen keys. A new degree needs a row here, values in `Space`, and an axis in `Blueprint`."""


@dataclass(frozen=True)
class Choice:
    """A value for each key. The defaults are those of the config."""

    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    stage: int = 0
    shard_size: int | None = None
    partition: int = 1
    offload_optimizer: str = "none"
    offload_param: str = "none"
    rows: int = 1
    accumulation: int = 1
    every: int = 0
    offload_activations: str = "none"

    @classmethod
    def of(cls, config: Config) -> Choice:
        """Return the values of a resolved config."""
        values = {name: value_at(config.as_dict(), key) for name, key in KEYS.items()}
        return cls(**values)

    @property
    def degrees(self) -> Choice:
        """The degrees of the axes; the rest has default values."""
        return Choice(self.pipeline, self.tensor, self.sequence, self.expert)

    @property
    def ranks_of_sample(self) -> int:
        """The number of ranks that get the same data."""
        return self.pipeline * self.tensor * self.sequence

    def without_batch(self) -> Choice:
        """Return this choice with default batch and activation keys. It needs the same bytes for model states."""
        # Accumulated gradients take memory from the second microbatch on. More microbatches change nothing.
        several = min(self.accumulation, 2)
        if self.pipeline > 1:
            # A pipeline needs the least number that its schedule takes.
            several = max(2, self.pipeline * find_kind(self.schedule).microbatches_per_rank)
        return replace(self, rows=1, accumulation=several, every=0, offload_activations="none")

    def applied(self, base: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
        """Return the config file `base` with the values of this choice."""
        values = copy.deepcopy(dict(base))
        for name, key in KEYS.items():
            _put(values, key, getattr(self, name))
        num_data = max(1, num_ranks // self.ranks_of_sample)  # 0 for too large degrees, which `resolve` refuses
        values["train_batch_size"] = self.rows * self.accumulation * num_data
        # It would contradict the accumulation steps: these are the microbatches of a pipeline.
        values.get("pipeline", {}).pop("microbatches", None)
        return values


@dataclass(frozen=True)
class Space:
    """All choices that a config and a machine leave open.

    held: attribute -> fixed value. batch: samples of a step over all ranks; None: any. in_files: the offloads that have
    a folder. max_stages: the number of blocks of the model. can_split: whether a model can be trained with the degrees
    of a choice; None: layers, sequences and experts are not split. shards_stay: parameters are not offloaded.
    """

    machine: Machine
    batch: int | None
    max_stages: int
    in_files: Set[str] = frozenset()
    held: Mapping[str, Any] = field(default_factory=dict)
    can_split: Callable[[Choice], bool] | None = None
    shards_stay: bool = False

    def __iter__(self) -> Iterator[Choice]:
        for degrees in self._degrees():
            pipeline, of_axes = degrees.pipeline, (degrees.pipeline, degrees.tensor, degrees.sequence, degrees.expert)
            data = self.machine.num_devices // degrees.ranks_of_sample
            states = list(self._states(degrees, data))
            for schedule, chunks in self._schedules(pipeline):
                for rows, accumulation in self._batches(pipeline, data, schedule):
                    if self._wastes_traffic(rows, degrees.sequence):
                        continue
                    for every, offload_activations in self._activations(pipeline):
                        for stage, shard_size, partition, of_optimizer, of_param in states:
                            yield Choice(
                                *of_axes, schedule, chunks, stage, shard_size, partition, of_optimizer, of_param,
                                rows, accumulation, every, offload_activations,
                            )  # fmt: skip

    def _degrees(self) -> Iterator[Choice]:
        """Yield degrees that divide the devices. Tensor and sequence degrees stay within a host.

        Sequence degrees with a pipeline are tried only if the config gives one of the two: a search for large machines
        has no time for them.
        """
        every, of_host = divisors(self.machine.num_devices), divisors(self.machine.devices_per_host)
        splits = self.can_split is not None
        for pipeline in self._values("pipeline", every):
            for tensor in self._values("tensor", of_host if splits else (1,)):
                for sequence in self._values("sequence", of_host if splits else (1,)):
                    for expert in self._values("expert", every if splits else (1,)):
                        degrees = Choice(pipeline, tensor, sequence, expert)
                        if pipeline > self.max_stages or self.machine.num_devices % degrees.ranks_of_sample:
                            continue
                        if self.machine.num_devices // degrees.ranks_of_sample % expert:
                            continue
                        if min(pipeline, sequence) > 1 and not {"pipeline", "sequence"} & self.held.keys():
                            continue
                        is_whole = tensor * sequence * expert * (pipeline if splits else 1) == 1
                        if is_whole or (self.can_split is not None and self.can_split(degrees)):
                            yield degrees

    def _wastes_traffic(self, rows: int, sequence: int) -> bool:
        """Return True if fewer rows over fewer ranks give each rank as many tokens, with less traffic."""
        return gcd(rows, sequence) > 1 and not {"rows", "sequence", "shard_size", "partition"} & self.held.keys()

    def _values(self, name: str, every: Sequence[Any]) -> Sequence[Any]:
        return [self.held[name]] if name in self.held else every

    def _schedules(self, pipeline: int) -> Iterator[tuple[str, int | None]]:
        if pipeline == 1:
            yield self.held.get("schedule", "1f1b"), self.held.get("chunks")
            return
        for name in self._values("schedule", [name for name in KINDS if name not in _WORSE]):
            kind = find_kind(name)
            every = _CHUNKS if kind.max_chunks is None and kind.min_chunks > 1 else (None,)
            for chunks in self._values("chunks", every):
                if pipeline * (chunks or kind.min_chunks) <= self.max_stages:
                    yield name, chunks

    def _batches(self, pipeline: int, data: int, schedule: str) -> Iterator[tuple[int, int]]:
        """Yield (rows of a microbatch, microbatches)."""
        least = find_kind(schedule).microbatches_per_rank * pipeline if pipeline > 1 else 1
        if self.batch is None:
            wanted = [least * factor for factor in (1, 2, 4)] if least > 1 else [pipeline, 2 * pipeline, 4 * pipeline]
            for accumulation in self._values("accumulation", wanted if pipeline > 1 else [1]):
                for rows in self._values("rows", powers_of_two(_MAX_ROWS)):
                    if accumulation >= least:
                        yield rows, accumulation
            return
        # Every rank must get as many samples.
        if self.batch % data:
            return
        of_rank = self.batch // data
        for rows in self._values("rows", [count for count in divisors(of_rank) if count <= _MAX_ROWS]):
            if of_rank % rows == 0 and of_rank // rows >= least:
                accumulation = of_rank // rows
                if self.held.get("accumulation", accumulation) == accumulation:
                    yield rows, accumulation

    def _states(self, degrees: Choice, data: int) -> Iterator[tuple[int, int | None, int, str, str]]:
        """Yield (stage, shard_size, partition, offload_optimizer, offload_param)."""
        pipeline = degrees.pipeline
        for stage in self._values("stage", (0, 1, 2, 3)):
            for shard_size in self._values("shard_size", _shard_sizes(stage, data)):
                # Shard groups of a single rank shard nothing: stage 0 does the same.
                if data % (shard_size or data) or (shard_size == 1 and stage and data > 1 and "stage" not in self.held):
                    continue
                # The ranks that share experts must be in the same shard group.
                if stage and (shard_size or data) % degrees.expert:
                    continue
                for partition in self._values("partition", self._partitions(stage, shard_size or data, degrees)):
                    for of_optimizer in self._placements("offload_optimizer"):
                        for of_param in self._placements(
                            "offload_param", may_be_away=stage == 3 and not self.shards_stay
                        ):
                            if of_param == "none" or (partition == 1 and pipeline == 1):
                                yield stage, shard_size, partition, of_optimizer, of_param

    def _placements(self, name: str, may_be_away: bool = True) -> Sequence[str]:
        """Return the places for an offload: the device, the host's memory if separate, files if there is a folder."""
        away = [("cpu", self.machine.device == "cuda"), ("nvme", name in self.in_files)]
        return self._values(name, ["none", *(placement for placement, is_there in away if is_there and may_be_away)])

    def _partitions(self, stage: int, group: int, degrees: Choice) -> Sequence[int]:
        """Return sizes of the group that gathers parameters: the shard group, or the ranks of a host."""
        host = self.machine.devices_per_host // (degrees.tensor * degrees.sequence)
        is_possible = stage == 3 and 1 < host < group and group % host == 0 and host % degrees.expert == 0
        return (1, host) if is_possible else (1,)

    def _activations(self, pipeline: int) -> Iterator[tuple[int, str]]:
        for every in self._values("every", (0, 1)):
            for placement in self._placements("offload_activations", may_be_away=pipeline == 1):
                if placement == "none" or pipeline == 1:
                    yield every, placement


def num_chunks(choice: Choice) -> int:
    """Return the number of stages on each rank of a pipeline."""
    return choice.chunks or find_kind(choice.schedule).min_chunks


def _shard_sizes(stage: int, data: int) -> Sequence[int | None]:
    if not stage:
        return (None,)
    return [None, *(size for size in divisors(data) if 1 < size < data)]


def divisors(count: int) -> list[int]:
    return [divisor for divisor in range(1, count + 1) if count % divisor == 0]


def powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of a complete config."""
    for key in path.split("."):
        values = values[key]
    return values


def without_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the config file without keys that have their default value."""
    defaults, kept = _DEFAULTS if defaults is None else defaults, {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := without_defaults(value, default):
                kept[key] = inner
        elif value != default:
            kept[key] = value
    return kept


def without_idle_folders(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config file without `nvme_path` of offloads that do not use files."""
    kept = {key: value for key, value in values.items() if key != "nvme_path" or values.get("device") == "nvme"}
    return {key: without_idle_folders(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a key. A default value is set only if the key is already there."""
    *sections, last = path.split(".")
    default = value_at(_DEFAULTS, path)
    if value == default:
        for key in sections:
            values = values.get(key, {})
        if last in values:
            values[last] = value
        return
    for key in sections:
        values = values.setdefault(key, {})
    values[last] = value


_DEFAULTS = Config().as_dict()
