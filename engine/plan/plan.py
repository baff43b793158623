"""`lowtide.plan`: what a config makes of a model on a machine, and what would be better."""

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

from ...model import blocks as model_blocks
from ..blueprint.blueprint import Blueprint
from ..config.config import Config
from ..config.errors import shown
from ..model.deferred import module_for_shapes
from ..model.prepared_model import tiles_of
from ..model.sequences import check_sequences
from .choice import KEYS, Choice, Space, value_at
from .estimate import Estimate
from .machine import Machine
from .meta_run import MetaRun
from .planner import Planner, Runs
from .search import Found, Result, search
from .splits import PlannedSplits


@contextmanager
def uncollected(is_last: bool = False) -> Iterator[None]:
    """No garbage is looked for meanwhile; what nobody holds is freed at once as ever, but for cycles.

    A search makes a hundred thousand choices and bounds beside the half a million objects of torch's modules: 4 of its
    15 seconds were the collector's. is_last: the process ends after it, and nothing that there is is gone through then.
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


_SEQUENCE = 2048  # of a model of tokens that does not say how long it reads


@dataclass(frozen=True)
class Alternative:
    """A config that was looked at: its bytes of the fullest rank, and seconds of a step."""

    config: Mapping[str, Any]
    choice: Choice
    peak_bytes: int
    step_seconds: float
    samples_per_second: float
    missing: Mapping[str, int] = field(default_factory=dict)  # where -> bytes of a rank that are not there
    seconds: Mapping[str, float] = field(default_factory=dict)  # the parts of step_seconds


@dataclass(frozen=True)
class Plan:
    """What a training takes, before it is started.

    config: valid, without "auto". bytes: kind -> the most that the fullest rank has of it; parameter_bytes,
    gradient_bytes and optimizer_bytes as `engine.memory()` counts them, then gathered_bytes, activation_bytes,
    loss_bytes, buffer_bytes and reserved_bytes. peak_bytes: the most at one moment, with what is reserved; the kinds
    need not come together. host_bytes, nvme_bytes: of a rank, where the model's memory is another. wire_bytes: that a
    rank sends in a step, by link: "intra", "inter", "pipe". step_seconds: the
    sum of `seconds`, of a machine as it was described; "exposed" is what the computing waits for. hidden_seconds: of
    collectives, of what is offloaded on its way, of updates, which go on beside what computes. reasons: key of the
    config -> why it has its value. missing: where -> bytes of a rank that this plan lacks. alternatives: what fits, the
    fastest first. front: of all that fit, none is faster and smaller. beyond: what would be faster, and does not fit.
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
        """One line: the time of a step, and what of a device is free or missing."""
        of = f"the fastest of {self.num_choices:,}: " if self.reasons and self.fits else ""
        free = (self.machine.device_bytes - self.peak_bytes) / 1e9
        lacks = " and ".join(f"{nbytes / 1e9:.3g} GB of {where}" for where, nbytes in self.missing.items())
        memory = f"{free:.3g} GB of a device to spare" if self.fits else f"does not fit, {lacks} missing"
        return f"{of}{self.step_seconds:.3g} s a step, {memory}"

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
    """What a config takes on so many ranks, and which would be the fastest that fits. Starts and allocates nothing.

    model: a module, on any device, or a callable that builds one. config: as `initialize` takes it; the keys that say
    "auto" are chosen. world_size: ranks. device_memory: bytes of each device. hosts: that the ranks are on; None: 8
    ranks on each. sample_batch: a batch, of any number of rows, as the model takes one; None: made for models of
    tokens. loss_fn: as of `initialize`. machine: how fast hosts and devices are, in the place of the defaults.
    num_alternatives: the most that are named.

    Raises ConfigError (config), ValueError (model, machine, or nothing that could be looked at).
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
    """As `plan`, on a machine that has the ranks."""
    module = model if isinstance(model, nn.Module) else module_for_shapes(model)
    batch = sample_batch if sample_batch is not None else made_batch(module)
    casts = checked.bf16.auto_cast if checked.bf16.enabled else checked.fp16.auto_cast

    def runs(blueprint: Blueprint) -> MetaRun:
        check_sequences(blueprint.config, module)
        tiles, splits = tiles_of(checked), PlannedSplits.of(blueprint)
        return MetaRun(module, blueprint.units, blueprint.dtypes, machine.device, loss_fn, casts, tiles, splits)

    return plan_with(module, checked, machine, runs, batch, num_alternatives)


def machine_for(world_size: int, device_memory: float | None, hosts: int | None, machine: Machine | None) -> Machine:
    """Of so many devices. Raises ValueError where hosts do not divide them."""
    per_host = (machine or Machine()).devices_per_host
    num_hosts = hosts if hosts is not None else max(1, -(-world_size // per_host))
    if num_hosts < 1 or world_size % num_hosts:
        raise ValueError(f"hosts({num_hosts}) x devices of each(?) = world size({world_size}) does not hold")
    changes: dict[str, Any] = {"num_hosts": num_hosts, "devices_per_host": world_size // num_hosts}
    if device_memory is not None:
        changes["device_bytes"] = float(device_memory)
    return replace(machine or Machine(), **changes)


@uncollected()
def plan_with(
    model: nn.Module,
    config: Config,
    machine: Machine,
    runs: Callable[[Blueprint], Runs],
    batch: Any,
    num_alternatives: int = 10,
) -> Plan:
    """As `plan_on`, with what gives the profile of a microbatch."""
    base = config.as_dict()
    planner = Planner(model, base, machine, runs, batch)
    held = {name: value_at(base, key) for name, key in KEYS.items() if key not in config.planned_keys}
    wants = bool(config.planned_keys)
    given = None if wants else Choice.of(config.resolve(machine.num_devices))
    degrees = Choice(**{name: held.get(name, 1) for name in ("pipeline", "tensor", "sequence", "expert")})
    if fault := planner.fault(degrees):
        raise ValueError(fault)
    every = Space(
        machine,
        config.train_batch_size,
        len(model_blocks.find_blocks(model)),
        in_files=_in_files(config),
        held=_held(held) if wants else {},
        can_split=planner.can_split,
    )
    choices = list(every)
    none: Result[Choice, Estimate] = Result((), (), (), 0, 0)
    result = search(choices, planner.bound, planner.found, num_alternatives) if choices else none
    if given is None:
        if not choices:
            raise ValueError(_nothing(planner, every, config))
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
    beyond = [one for one in result.beyond if not result.best or one.seconds < result.best[0].seconds]

    def alternative(found: Found[Choice, Estimate]) -> Alternative:
        one = found.value
        speed = one.num_samples / one.step_seconds
        missing = one.missing(machine)
        return Alternative(
            planner.config(found.item),
            found.item,
            one.peak_bytes + reserved,
            one.step_seconds,
            speed,
            missing,
            one.seconds,
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


def _in_files(config: Config) -> set[str]:
    """What can be offloaded to files, since a folder is named, and nothing else is in the way."""
    zero, activations = config.zero_optimization, config.activation_checkpointing.offload
    folders = {
        "offload_optimizer": zero.offload_optimizer.nvme_path,
        "offload_param": zero.offload_param.nvme_path if zero.offload_optimizer.overlap != "delayed" else None,
        "offload_activations": activations.nvme_path,
    }
    return {name for name, folder in folders.items() if folder is not None}


def _held(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the space does not choose. A batch that nobody has given is not held at a value."""
    return {name: value for name, value in values.items() if value is not None or name not in ("rows", "accumulation")}


def _smallest(planner: Planner, choices: Sequence[Choice]) -> Choice:
    """Where nothing fits: of what bounds say is the smallest of each way to offload, the one that lacks the least."""
    bounds, smallest = {choice: planner.bound(choice) for choice in choices}, {}
    for choice in sorted(choices, key=lambda one: (bounds[one].nbytes, bounds[one].seconds), reverse=True):
        smallest[choice.offload_optimizer, choice.offload_param, choice.offload_activations] = choice
    return min(smallest.values(), key=lambda one: sum(planner.estimate(one).missing(planner.machine).values()))


def _reasons(
    choice: Choice,
    value: Estimate,
    config: Config,
    result: Result[Choice, Estimate],
    choices: Sequence[Choice],
) -> dict[str, str]:
    """One for each value that was chosen: what the best with another value of this key would take."""
    found = {}
    for name, key in KEYS.items():
        if key not in config.planned_keys:
            continue
        own = getattr(choice, name)
        other = next((one for one in result.best if getattr(one.item, name) != own), None)
        if all(getattr(one, name) == own for one in choices):
            found[key] = "no other value is possible here"
        elif other is not None:
            slower = f"{other.seconds / value.seconds_per_sample - 1:.1%}"
            than = "is as fast" if slower == "0.0%" else f"is {slower} slower"
            found[key] = f"the best with {shown(getattr(other.item, name))} {than}"
        elif result.best:
            found[key] = f"all of the {len(result.best)} fastest have it"
        else:
            found[key] = "nothing fits; this lacks the least"
    return found


def _nothing(planner: Planner, space: Space, config: Config) -> str:
    """Why there is nothing to choose from."""
    machine, held = space.machine, space.held
    batch, num_devices = config.train_batch_size, machine.num_devices
    if refusal := planner.refusal(Choice(**{"accumulation": 2 * held.get("pipeline", 1), **held})):
        return refusal
    if batch is not None:
        rows, accumulation = (held.get(name, "?") for name in ("rows", "accumulation"))
        return (
            f"train_batch_size({batch}) = microbatch({rows}) x accumulation({accumulation}) x data-parallel ranks of "
            f"{num_devices} devices(?) has no solution with what the config holds; change it, or set more keys "
            'to "auto"'
        )
    return f'nothing fits together on {num_devices} devices with what the config holds; set more keys to "auto"'


def made_batch(model: nn.Module, length: int | None = None) -> Any:
    """For a model of tokens, of so many; None: as many as it says that it reads.

    Raises ValueError where it is not known what the model takes.
    """
    parameters = [
        one
        for one in inspect.signature(model.forward).parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    names = [one.name for one in parameters]
    length = length or _length(model)
    ids = torch.empty(1, length, dtype=torch.int64, device="meta")
    if "input_ids" in names and "labels" in names:
        return {"input_ids": ids, "labels": ids}
    needed = [one for one in parameters if one.default is one.empty]
    has_tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
    if not has_tokens or not 1 <= len(needed) <= 2:
        raise ValueError(
            f"sample_batch: expected a batch, since {type(model).__name__}.forward({', '.join(names)}) is not one of a "
            "model of tokens, for which (ids, targets) are made; give plan(..., sample_batch=...) or initialize one of "
            "any number of rows"
        )
    return tuple(ids for _ in needed)


def _length(model: nn.Module) -> int:
    """Tokens that the model reads at a time."""
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "sequence", "block_size"):
        for owner in (config, model):
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return _SEQUENCE
