"""From the config's offload sections to the stores: where state rests that is not in use."""

from __future__ import annotations

import platform

from ..comm import World
from ..offload import AioOptions, FileStore, HostCopies, HostPool, HostStore, PagePool, StagedStore, Store, StreamCopies
from ..watch.log import logger
from ..zero.host_update import HostUpdate
from ..zero.offloaded_states import OffloadedStates
from ..zero.shard_rest import ShardRest
from .config.config import Config
from .config.offload import ActivationOffloadConfig, OffloadOptimizerConfig, OffloadParamConfig


def model_is_apart(world: World) -> bool:
    """Whether the model's memory is another one than the host's."""
    return world.device.type != "cpu"


def copies_for(world: World) -> HostCopies:
    """What copies between the two."""
    return StreamCopies(world.device)


def host_update(config: Config, world: World) -> HostUpdate | None:
    """What updates offloaded states on the host; None: they are updated where the model is."""
    if not config.zero_optimization.offload_optimizer.is_used or not model_is_apart(world):
        return None
    wanted = config.zero_optimization.offload_optimizer
    return HostUpdate(copies_for(world), _pool(wanted), wanted.ratio)


def offloaded_states(config: Config, world: World, has_rule: bool) -> OffloadedStates:
    """Where the optimizer's states rest between steps.

    has_rule: whether the optimizer is one of the engine's own. Raises ValueError where it is not and its states would
    have to be elsewhere, and OffloadError where the file cannot be made.
    """
    wanted = config.zero_optimization.offload_optimizer
    if not wanted.is_used:
        return OffloadedStates.none()
    if wanted.overlap == "speculative" and not has_rule:
        raise ValueError(
            'offload_optimizer.overlap: "speculative" needs one of the optimizers of the config, whose updates it can '
            'take back; found an optimizer of the caller\'s own. Use "none"'
        )
    is_apart = model_is_apart(world)
    if wanted.device == "cpu" and not is_apart:
        if world.rank == 0:
            logger.info("offload_optimizer: the states are in host memory in any case, since the model is on the CPU")
        return OffloadedStates.none()
    if not has_rule:
        other = '"none"' if is_apart else '"cpu" or "none"'
        raise ValueError(
            f'offload_optimizer.device: "{wanted.device}" needs one of the optimizers of the config (adamw, adam, sgd, '
            f"lion, adagrad), whose states are known beforehand; found an optimizer of the caller's own. Use {other}"
        )
    keeps_old = wanted.overlap == "speculative"
    store = file_store(config, world, wanted) if wanted.device == "nvme" else None
    return OffloadedStates(store, _pool(wanted), wanted.ratio, keeps_old)


def shard_rest(config: Config, world: World) -> ShardRest | None:
    """Where the shards of stage 3 rest while nobody needs them; None: in memory.

    Raises ValueError where that is not possible here, and OffloadError where the file cannot be made.
    """
    wanted = config.zero_optimization.offload_param
    if not config.zero_optimization.offloads_parameters:
        return None
    is_apart = model_is_apart(world)
    if wanted.device == "cpu":
        if is_apart:
            return ShardRest(HostStore(_pool(wanted)))
        if world.rank == 0:
            logger.info("offload_param: the shards are in host memory in any case, since the model is on the CPU")
        return None
    if not is_apart and not PagePool.is_possible():
        raise ValueError(
            'offload_param.device: "nvme" moves pages between buffers, for which it expects Linux 5.7 or newer, found '
            f'{platform.system()} {platform.release()}; set "none"'
        )
    if not is_apart and config.communication.route == "shared_memory":
        raise ValueError(
            'communication.route: expected "auto" or "sockets" beside offload_param.device "nvme", found '
            '"shared_memory", with which the ranks of a host hold one copy of all parameters in memory'
        )
    store = file_store(config, world, wanted)
    return ShardRest(StagedStore(store, _pool(wanted)) if is_apart else store)


def activation_store(config: Config, world: World) -> Store | None:
    """Where activations are between forward and backward; None: where they were made. Raises OffloadError."""
    wanted = config.activation_checkpointing.offload
    if wanted.device == "none":
        return None
    if wanted.device == "cpu":
        return HostStore()
    store = file_store(config, world, wanted)
    return StagedStore(store, HostPool()) if model_is_apart(world) else store


def file_store(
    config: Config, world: World, wanted: OffloadOptimizerConfig | OffloadParamConfig | ActivationOffloadConfig
) -> FileStore:
    """A file of this rank below the folder of the section. Raises OffloadError."""
    assert wanted.nvme_path is not None, "the config was checked for it"
    aio = config.aio
    return FileStore(wanted.nvme_path, world.rank, AioOptions(aio.block_size, aio.thread_count, aio.verify))


def _pool(wanted: OffloadOptimizerConfig | OffloadParamConfig) -> HostPool:
    return HostPool(pinned=None if wanted.pin_memory else False)
