"""Chooses the placement of unused state, from the config's offload sections, and opens the stores."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ...comm import World
from ...offload import (
    AioOptions,
    FileStore,
    HostCopies,
    HostPool,
    HostStore,
    PagePool,
    StagedStore,
    Store,
    host_is_pinned,
)
from ...optimizers import OPTIMIZERS
from ...zero.host_update import HostUpdate
from ...zero.placement import ShardStore, StateChunks, StatesPlan
from ...zero.plan import GroupPlan
from ..config.config import Config
from ..config.zero import ActivationOffloadConfig, OffloadOptimizerConfig, OffloadParamConfig


class Placement(Enum):
    """The memory that holds unused bytes."""

    MODEL = "in the model's memory"
    HOST = "in host memory, for a model on an accelerator"
    FILE = "in a file of each rank"


@dataclass(frozen=True)
class OffloadPlan:
    """The placement of each kind of unused bytes. notes: settings without effect here."""

    is_apart: bool  # the model's memory is not host memory
    parameters: Placement  # the shards of stage 3
    states: Placement  # with the master weights; `states_plan` says how many
    states_plan: StatesPlan
    activations: Placement
    notes: tuple[str, ...]

    @classmethod
    def of(cls, config: Config, device: str, has_rule: bool) -> OffloadPlan:
        """Choose placements. device: the type of the model's device. has_rule: the engine has the optimizer's rule.

        Raises ValueError if a placement of the config is impossible.
        """
        is_apart = device != "cpu"
        zero = config.zero_optimization
        wanted = zero.offload_param.device if zero.offloads_parameters else "none"
        parameters, states = placement_of(wanted, is_apart), _placement_of_states(config, is_apart, has_rule)
        # On an accelerator the shards go through host buffers, and no pages move.
        if parameters is Placement.FILE and not is_apart:
            _check_pages(config)
        if parameters is Placement.HOST and zero.offload_optimizer.is_delayed:
            raise ValueError(
                f'{zero.offload_optimizer.path}.overlap: "delayed" needs {zero.offload_param.path}.device "none" on '
                f'{device}, found "cpu": a shard of the host cannot be computed with while it is updated; '
                'set it to "none", or use overlap "speculative"'
            )
        notes = []
        if wanted == "cpu" and not is_apart:
            notes.append("offload_param: no effect, since the model on the CPU has its shards in host memory")
        offload = zero.offload_optimizer
        if offload.is_used and states is Placement.MODEL:
            notes.append("offload_optimizer: no effect, since the model on the CPU has its states in host memory")
        plan = StatesPlan()
        if states is not Placement.MODEL:
            # Undoing an update needs the state before it.
            num_versions = 2 if offload.overlap == "speculative" else 1
            # Beside an accelerator a shard is updated as a whole: its gradient is on the host or on the device.
            plan = StatesPlan(offload.ratio, in_whole_shards=is_apart, num_versions=num_versions)
        activations = placement_of(config.activation_checkpointing.offload.device, is_apart)
        if config.activation_checkpointing.offload.device == "cpu" and activations is Placement.MODEL:
            notes.append(
                "activation_checkpointing.offload: no effect, since the model on the CPU has its activations in host "
                'memory; "nvme" moves them to a file'
            )
        return cls(is_apart, parameters, states, plan, activations, tuple(notes))

    @property
    def updates_on_host(self) -> bool:
        """Whether the host updates offloaded states of a model on an accelerator."""
        return self.is_apart and self.states is not Placement.MODEL

    def updated_apart(self, trained: Sequence[GroupPlan]) -> list[str]:
        """Return the names of groups that the host updates for a model on an accelerator."""
        numels = self.states_plan.resident_numels([group.layout.shard_numel for group in trained])
        return [group.name for group, stays in zip(trained, numels, strict=True) if self.updates_on_host and not stays]


def host_update(config: Config, offload_plan: OffloadPlan, world: World) -> HostUpdate | None:
    """Return the host's update of offloaded states, or None if they are updated on the model's device."""
    if not offload_plan.updates_on_host:
        return None
    wanted = config.zero_optimization.offload_optimizer
    return HostUpdate(HostCopies(world.device), _pool(wanted, world))


def offloaded_states(config: Config, offload_plan: OffloadPlan, world: World) -> StateChunks:
    """Return the store of offloaded states. Raises OffloadError if its file cannot be made."""
    wanted = config.zero_optimization.offload_optimizer
    store = file_store(config, world, wanted) if offload_plan.states is Placement.FILE else None
    return StateChunks(offload_plan.states_plan, store, _pool(wanted, world))


def shard_store_of(config: Config, offload_plan: OffloadPlan, world: World) -> ShardStore:
    """Return the store of unused stage 3 shards. Raises OffloadError."""
    wanted = config.zero_optimization.offload_param
    if offload_plan.parameters is Placement.HOST:
        return ShardStore(HostStore(_pool(wanted, world)))
    store = file_store(config, world, wanted)
    # Files are read into host memory: an accelerator's shards pass through a host buffer.
    return ShardStore(StagedStore(store, _pool(wanted, world)) if offload_plan.is_apart else store)


def activation_store(config: Config, offload_plan: OffloadPlan, world: World) -> Store:
    """Return the store of activations between forward and backward. Raises OffloadError."""
    if offload_plan.activations is Placement.HOST:
        return HostStore(pinned=host_is_pinned(world.device))
    store = file_store(config, world, config.activation_checkpointing.offload)
    return StagedStore(store, HostPool(pinned=host_is_pinned(world.device))) if offload_plan.is_apart else store


def file_store(
    config: Config, world: World, wanted: OffloadOptimizerConfig | OffloadParamConfig | ActivationOffloadConfig
) -> FileStore:
    """Return a file of this rank in the section's folder. Raises OffloadError."""
    assert wanted.nvme_path is not None, "the config was checked for it"
    aio = config.aio
    return FileStore(wanted.nvme_path, world.rank, AioOptions(aio.block_size, aio.thread_count, aio.verify))


def placement_of(wanted: str, is_apart: bool) -> Placement:
    """Translate the config's `device` to a placement. is_apart: the model is not in host memory."""
    if wanted == "nvme":
        return Placement.FILE
    return Placement.HOST if wanted == "cpu" and is_apart else Placement.MODEL


def _placement_of_states(config: Config, is_apart: bool, has_rule: bool) -> Placement:
    wanted = config.zero_optimization.offload_optimizer
    if not wanted.is_used:
        return Placement.MODEL
    if wanted.overlap == "speculative" and not has_rule:
        raise ValueError(
            'offload_optimizer.overlap: "speculative" needs an optimizer of the config, whose updates can be undone, '
            'found an optimizer of the caller; set "none"'
        )
    placement = placement_of(wanted.device, is_apart)
    # The states of a caller's optimizer are made in its first step, and their names and sizes are unknown here.
    if placement is not Placement.MODEL and not has_rule:
        other = '"none"' if is_apart else '"cpu" or "none"'
        raise ValueError(
            f'offload_optimizer.device: "{wanted.device}" needs an optimizer of the config '
            f"({', '.join(OPTIMIZERS)}), found an optimizer of the caller with unknown states; set {other}"
        )
    return placement


def _check_pages(config: Config) -> None:
    """Raise ValueError if shards of a model in host memory cannot rest in a file."""
    if not PagePool.is_possible():
        raise ValueError(
            'offload_param.device: "nvme" moves pages between buffers: expected Linux 5.7 or newer, found '
            f'{platform.system()} {platform.release()}; set "none"'
        )
    if config.communication.transport == "shared_memory":
        raise ValueError(
            'communication.transport: expected "auto" or "sockets" with offload_param.device "nvme", found '
            '"shared_memory", with a copy of all parameters in memory'
        )


def _pool(wanted: OffloadOptimizerConfig | OffloadParamConfig, world: World) -> HostPool:
    return HostPool(pinned=wanted.pin_memory and host_is_pinned(world.device))
