"""From the config's offload sections to the stores: where state rests that is not in use."""

from __future__ import annotations

import platform

from ..comm import World
from ..offload import AioOptions, FileStore, HostPool, HostStore, PagePool, StagedStore, Store
from ..zero.offloaded_states import OffloadedStates
from ..zero.shard_rest import ShardRest
from .config import Config
from .log import logger


def offloaded_states(config: Config, world: World, has_rule: bool) -> OffloadedStates | None:
    """Where the optimizer's states rest between steps; None: in memory.

    has_rule: whether the optimizer is one of the engine's own. Raises ValueError where it is not and a file is asked
    for, and OffloadError where the file cannot be made.
    """
    wanted = config.zero_optimization.offload_optimizer
    if not wanted.is_used:
        return None
    if wanted.overlap == "speculative" and not has_rule:
        raise ValueError(
            'offload_optimizer.overlap: "speculative" needs one of the optimizers of the config, whose updates it can '
            'take back; found an optimizer of the caller\'s own. Use "none"'
        )
    if wanted.is_delayed and world.device.type != "cpu":
        raise ValueError(
            'offload_optimizer.overlap: "delayed" is not supported yet where the model is on '
            f'{world.device.type}; use "none"'
        )
    if wanted.device == "cpu":
        if world.device.type != "cpu":
            raise ValueError(
                f'offload_optimizer.device: "cpu" is not supported yet where the model is on {world.device.type}; '
                'use "nvme", or "none"'
            )
        if world.rank == 0:
            logger.info("offload_optimizer: the states are in host memory in any case, since the model is on the CPU")
        return None
    if not has_rule:
        raise ValueError(
            'offload_optimizer.device: "nvme" needs one of the optimizers of the config (adamw, adam, sgd, lion, '
            'adagrad), whose states are known beforehand; found an optimizer of the caller\'s own. Use "cpu" or "none"'
        )
    assert wanted.nvme_path is not None
    keeps_old = wanted.overlap == "speculative"
    return OffloadedStates(file_store(config, world, wanted.nvme_path), HostPool(), wanted.ratio, keeps_old)


def shard_rest(config: Config, world: World) -> ShardRest | None:
    """Where the shards of stage 3 rest while nobody needs them; None: in memory.

    Raises ValueError where that is not possible here, and OffloadError where the file cannot be made.
    """
    wanted = config.zero_optimization.offload_param
    if wanted.device == "none":
        return None
    if world.device.type != "cpu":
        raise ValueError(
            f'offload_param.device: "{wanted.device}" is not supported yet where the model is on {world.device.type}; '
            'set "none"'
        )
    if wanted.device == "cpu":
        if world.rank == 0:
            logger.info("offload_param: the shards are in host memory in any case, since the model is on the CPU")
        return None
    if not PagePool.is_possible():
        raise ValueError(
            'offload_param.device: "nvme" moves pages between buffers, for which it expects Linux 5.7 or newer, found '
            f'{platform.system()} {platform.release()}; set "none"'
        )
    if config.communication.route == "shared_memory":
        raise ValueError(
            'communication.route: expected "auto" or "sockets" beside offload_param.device "nvme", found '
            '"shared_memory", with which the ranks of a host hold one copy of all parameters in memory'
        )
    assert wanted.nvme_path is not None
    return ShardRest(file_store(config, world, wanted.nvme_path))


def activation_store(config: Config, world: World) -> Store | None:
    """Where activations are between forward and backward; None: where they were made. Raises OffloadError."""
    wanted = config.activation_checkpointing.offload
    if wanted.device == "none":
        return None
    if wanted.device == "cpu":
        return HostStore()
    assert wanted.nvme_path is not None
    store = file_store(config, world, wanted.nvme_path)
    return store if world.device.type == "cpu" else StagedStore(store, HostPool())


def file_store(config: Config, world: World, folder: str) -> FileStore:
    """A file of this rank below the folder. Raises OffloadError."""
    aio = config.aio
    return FileStore(folder, world.rank, AioOptions(aio.block_size, aio.thread_count, aio.verify))
