"""`lowtide.plan`: predict memory and time of a config on a machine, and find faster configs."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...pipe.schedules.registry import is_path
from ..blueprint.blueprint import Blueprint
from ..config.batch import BATCH_KEYS, ElasticityConfig, elastic_batch
from ..config.config import Config
from ..config.errors import ConfigError, Fault, quoted
from ..model.deferred import module_for_shapes
from ..model.prepared_model import tiles_of
from ..model.sequences import check_sequences
from .choice import KEYS, Choice, Space, value_at, without_defaults
from .estimate import Estimate
from .machine import Machine, gigabytes
from .meta_run import MetaRun
from .planner import Planner, Profiler
from .search import Found, Result, search
from .splits import PlannedSplits


@contextmanager
def uncollected(is_last: bool = False) -> Iterator[None]:
    """Disable Python's cyclic garbage collector in the context. Reference counting still frees memory.

    A search makes a hundred thousand choices and bounds besides the half million objects of torch's modules. The
    collector took 4 of its 15 seconds. is_last: the process ends after the context, so no object is traversed then.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_last:
            gc.freeze()
        if was_enabled:
            gc.enable()


_SEQUENCE = 2048  # tokens of a sample, if the model does not state its length


@dataclass(frozen=True)
class Alternative:
    """A config that was considered, with the bytes of the fullest rank and the seconds of a step."""

    config: Mapping[str, Any]
    choice: Choice
    peak_bytes: int
    step_seconds: float
    samples_per_second: float
    missing: Mapping[str, int] = field(default_factory=dict)  # kind of memory -> bytes that a rank lacks
    seconds: Mapping[str, float] = field(default_factory=dict)  # the parts of step_seconds


@dataclass(frozen=True)
class Plan:
    """The predicted memory and time of a training.

    config: valid, without "auto". bytes: kind -> its peak on the fullest rank. The kinds are parameter_bytes,
    gradient_bytes and optimizer_bytes as `engine.memory()` counts them, gathered_bytes, activation_bytes, loss_bytes,
    buffer_bytes and reserved_bytes. peak_bytes: the peak of the total. The kinds may peak at different times, so their
    sum can exceed it. host_bytes, nvme_bytes: of a rank, outside of the device's memory. wire_bytes: sent by a rank in
    a step, by link: "intra", "inter", "pipe". step_seconds: the sum of `seconds`. Its "exposed" parts are waits for
    transfers. hidden_seconds: collectives, offload and updates that overlap with computing. reasons: config key -> why
    it has its value. missing: kind of memory -> bytes that a rank lacks. alternatives: configs that fit, the fastest
    first. front: configs that fit and that no other config beats in both time and memory. beyond: faster configs that
    do not fit.
    """

    config: Mapping[str, Any]
    bytes: Mapping[str, int]
    peak_bytes: int
    host_bytes: int
    nvme_bytes: int
    wire_bytes: Mapping[str, int]
    step_seconds: float
    seconds: Mapping[str, float]
    hidden_seconds: Mapping[str, float]
    samples_per_step: int
    tokens_per_step: int
    reasons: Mapping[str, str]
    missing: Mapping[str, int]
    alternatives: Sequence[Alternative]
    front: Sequence[Alternative]
    beyond: Sequence[Alternative]
    num_choices: int
    num_evaluated: int
    machine: Machine

    @property
    def fits(self) -> bool:
        return not self.missing

    @property
    def summary(self) -> str:
        """One line with the time of a step, and the memory that is free or missing."""
        rank = f"the fastest of {self.num_choices:,}: " if self.reasons and self.fits else ""
        free = gigabytes(self.machine.device_bytes - self.peak_bytes)
        lacks = " and ".join(f"{gigabytes(nbytes)} GB of {where}" for where, nbytes in self.missing.items())
        memory = f"{free} GB of a device to spare" if self.fits else f"does not fit, {lacks} missing"
        return f"{rank}{self.step_seconds:.3g} s a step, {memory}"

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds


def plan(
    model: nn.Module | Callable[[], nn.Module],
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    *,
    world_size: int,
    device_memory: float | None = None,
    hosts: int | None = None,
    sample_batch: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    machine: Machine | None = None,
    num_alternatives: int = 10,
) -> Plan:
    """Predict the memory and time of a config on `world_size` ranks, and search for the fastest config that fits.

    Nothing is started or allocated. model: a module on any device, or a callable that builds it. config: as for
    `initialize`; keys with the value "auto" are chosen. device_memory: bytes of a device. hosts: number of hosts;
    None: 8 ranks on each. sample_batch: a batch of the model, with any number of rows; None: made for models of
    tokens. loss_fn: as for `initialize`. machine: speeds and sizes that replace the defaults. num_alternatives: the
    largest number of alternatives in the plan.

    Raises ConfigError for a wrong config, ValueError if the model or machine is wrong or no config is possible.
    """
    if world_size < 1:
        raise ValueError(f"world_size: expected at least 1, found {world_size}")
    if num_alternatives < 1:
        raise ValueError(f"num_alternatives: expected at least 1, found {num_alternatives}")
    machine = machine_for(world_size, device_memory, hosts, machine)
    return plan_on(model, Config.load(config), machine, sample_batch, loss_fn, num_alternatives)


def plan_on(
    model: nn.Module | Callable[[], nn.Module],
    checked: Config,
    machine: Machine,
    sample_batch: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    num_alternatives: int = 10,
) -> Plan:
    """Plan as `plan` does, on a machine with all its devices."""
    module = model if isinstance(model, nn.Module) else module_for_shapes(model)
    batch = sample_batch if sample_batch is not None else made_batch(module)
    casts = checked.bf16.auto_cast if checked.bf16.enabled else checked.fp16.auto_cast

    def make_profiler(blueprint: Blueprint) -> Profiler:
        check_sequences(blueprint.config, module)
        tiles, splits = tiles_of(checked), PlannedSplits.of(blueprint)
        return MetaRun(module, blueprint.units, blueprint.dtypes, machine.device, loss_fn, casts, tiles, splits).profile

    return plan_with(module, checked, machine, make_profiler, batch, num_alternatives)


def machine_for(world_size: int, device_memory: float | None, hosts: int | None, machine: Machine | None) -> Machine:
    """Return the machine with `world_size` devices. Raises ValueError if the hosts do not divide them."""
    per_host = (machine or Machine()).devices_per_host
    num_hosts = hosts if hosts is not None else max(1, -(-world_size // per_host))
    if num_hosts < 1 or world_size % num_hosts:
        raise ValueError(f"hosts({num_hosts}) x devices per host(?) = world size({world_size}) does not hold")
    changes: dict[str, Any] = {"num_hosts": num_hosts, "devices_per_host": world_size // num_hosts}
    if device_memory is not None:
        changes["device_bytes"] = float(device_memory)
    return replace(machine or Machine(), **changes)


@uncollected()
def plan_with(
    model: nn.Module,
    config: Config,
    machine: Machine,
    make_profiler: Callable[[Blueprint], Profiler],
    batch: Any,
    num_alternatives: int = 10,
) -> Plan:
    """Plan as `plan_on` does. make_profiler: a blueprint -> a function that profiles microbatches."""
    if config.elasticity.enabled:
        config = _with_elastic_batch(config, machine.num_devices)
    if is_path(config.pipeline.schedule):
        raise ValueError(
            f"pipeline.schedule: expected the name of a schedule, found the file {config.pipeline.schedule}, whose "
            "microbatches a plan cannot vary; name the schedule that is most like it"
        )
    base = config.as_dict()
    planner = Planner(model, without_defaults(base), machine, make_profiler, batch)
    held = {name: value_at(base, key) for name, key in KEYS.items() if key not in config.planned_keys}
    wants = bool(config.planned_keys)
    given = None if wants else Choice.of(config.resolve(machine.num_devices))
    degrees = Choice(**{name: held.get(name, 1) for name in ("pipeline", "tensor", "sequence", "expert")})
    if fault := planner.fault(degrees):
        raise ValueError(fault)
    space = Space(
        machine,
        config.train_batch_size,
        planner.num_blocks,
        in_files=_in_files(config),
        held=_held(held) if wants else {},
        can_split=planner.can_split,
        shards_stay=config.zero_optimization.offload_optimizer.overlap == "delayed",
    )
    choices = [choice for choice in space if planner.agrees(choice)]
    result = search(choices, planner.bound, planner.found, num_alternatives)
    if given is None:
        if not choices:
            raise ValueError(_nothing(planner, space, config))
        given = result.best[0].item if result.best else _smallest(planner, choices)
    value = planner.estimate(given)
    reasons = _reasons(given, value, config, result, choices)
    return _plan(planner, given, value, machine, result, reasons)


def _plan(
    planner: Planner,
    choice: Choice,
    value: Estimate,
    machine: Machine,
    result: Result[Choice, Estimate],
    reasons: Mapping[str, str],
) -> Plan:
    reserved = round(machine.reserved_bytes)
    beyond = [found for found in result.beyond if not result.best or found.seconds < result.best[0].seconds]

    def alternative(found: Found[Choice, Estimate]) -> Alternative:
        estimate = found.value
        return Alternative(
            planner.config(found.item),
            found.item,
            estimate.peak_bytes + reserved,
            estimate.step_seconds,
            estimate.num_samples / estimate.step_seconds,
            estimate.missing(machine),
            estimate.seconds,
        )

    return Plan(
        config=planner.config(choice),
        bytes={**value.bytes, "reserved_bytes": reserved},
        peak_bytes=value.peak_bytes + reserved,
        host_bytes=value.host_bytes,
        nvme_bytes=value.nvme_bytes,
        wire_bytes=value.sent,
        step_seconds=value.step_seconds,
        seconds=value.seconds,
        hidden_seconds=value.hidden,
        samples_per_step=value.num_samples,
        tokens_per_step=value.num_tokens,
        reasons=reasons,
        missing=value.missing(machine),
        alternatives=tuple(map(alternative, result.best)),
        front=tuple(map(alternative, result.front)),
        beyond=tuple(map(alternative, beyond)),
        num_choices=result.num_items,
        num_evaluated=result.num_evaluated,
        machine=machine,
    )


def _with_elastic_batch(config: Config, num_ranks: int) -> Config:
    """Return the config with the batch that its elasticity chooses for these ranks, as `Config.resolve` does."""
    batch = elastic_batch(config.elasticity, num_ranks // config.parallel.ranks_of_sample)
    if isinstance(batch, Fault):
        raise ConfigError([batch])
    sizes = dict(zip(BATCH_KEYS, (batch.train, batch.micro, batch.accumulation), strict=True))
    return config.model_copy(update={**sizes, "elasticity": ElasticityConfig()})


def _in_files(config: Config) -> set[str]:
    """Return the offloads that can use files: those with a folder, unless another setting forbids it."""
    zero, activations = config.zero_optimization, config.activation_checkpointing.offload
    folders = {
        "offload_optimizer": zero.offload_optimizer.nvme_path,
        "offload_param": zero.offload_param.nvme_path,
        "offload_activations": activations.nvme_path,
    }
    return {name for name, folder in folders.items() if folder is not None}


def _held(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the space does not choose. A batch size that nobody gave is chosen."""
    return {name: value for name, value in values.items() if value is not None or name not in ("rows", "accumulation")}


def _smallest(planner: Planner, choices: Sequence[Choice]) -> Choice:
    """Return the choice that lacks the least memory, if nothing fits.

    Only the choice with the smallest bound for each combination of offloads is estimated.
    """
    bounds, smallest = {choice: planner.bound(choice) for choice in choices}, {}
    for choice in sorted(choices, key=lambda choice: (bounds[choice][1], bounds[choice][0]), reverse=True):
        smallest[choice.offload_optimizer, choice.offload_param, choice.offload_activations] = choice
    return min(smallest.values(), key=lambda choice: sum(planner.estimate(choice).missing(planner.machine).values()))


def _reasons(
    choice: Choice,
    value: Estimate,
    config: Config,
    result: Result[Choice, Estimate],
    choices: Sequence[Choice],
) -> dict[str, str]:
    """Explain each chosen value by the time of the best config with another value of its key."""
    reasons = {}
    for name, key in KEYS.items():
        if key not in config.planned_keys:
            continue
        chosen = getattr(choice, name)
        # `best` is ordered by time, so the first with another value is the fastest rival.
        rival = next((found for found in result.best if getattr(found.item, name) != chosen), None)
        if all(getattr(each, name) == chosen for each in choices):
            reasons[key] = "no other value is possible here"
        elif rival is not None:
            slower = f"{rival.seconds / value.seconds_per_sample - 1:.1%}"
            than = "is as fast" if slower == "0.0%" else f"is {slower} slower"
            reasons[key] = f"the best with {quoted(getattr(rival.item, name))} {than}"
        elif result.best:
            reasons[key] = f"all of the {len(result.best)} fastest have it"
        else:
            reasons[key] = "nothing fits; this lacks the least"
    return reasons


def _nothing(planner: Planner, space: Space, config: Config) -> str:
    """Return the error for a space without choices."""
    machine, held = space.machine, space.held
    batch, num_devices = config.train_batch_size, machine.num_devices
    if refusal := planner.refusal(Choice(**{"accumulation": 2 * held.get("pipeline", 1), **held})):
        return refusal
    if batch is not None:
        rows, accumulation = (held.get(name, "?") for name in ("rows", "accumulation"))
        return (
            f"train_batch_size({batch}) = microbatch({rows}) x accumulation({accumulation}) x data-parallel ranks of "
            f"{num_devices} devices(?) has no solution with the values of the config; change the batch size, or set "
            'more keys to "auto"'
        )
    return f'no combination is valid on {num_devices} devices with the values of the config; set more keys to "auto"'


def made_batch(model: nn.Module, length: int | None = None) -> Any:
    """Make a batch for a model of tokens, of `length` tokens or as many as the model states.

    Raises ValueError if it is unknown what the model takes.
    """
    parameters = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    names = [parameter.name for parameter in parameters]
    length = length or _length(model)
    ids = torch.empty(1, length, dtype=torch.int64, device="meta")
    if "input_ids" in names and "labels" in names:
        return {"input_ids": ids, "labels": ids}
    needed = [parameter for parameter in parameters if parameter.default is parameter.empty]
    has_tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
    if not has_tokens or not 1 <= len(needed) <= 2:
        raise ValueError(
            f"sample_batch: expected a batch of any number of rows, because batches are made only for models of "
            f"tokens, found {type(model).__name__}.forward({', '.join(names)}); pass sample_batch to plan or initialize"
        )
    return tuple(ids for _ in needed)


def _length(model: nn.Module) -> int:
    """Return the length of a sequence that the model or its config states."""
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "sequence", "block_size"):
        for owner in (config, model):
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return _SEQUENCE
