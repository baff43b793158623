"""What "auto" is for an engine: rank 0 plans, and all ranks take its config."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ...comm import World
from ..config.config import Config
from .machine import Machine, calibrated
from .measured import Measured, default_path, device_key
from .plan import plan_on

logger = logging.getLogger("lowtide")

_CPU = Machine(  # of a rank: a few cores, and what they reach, where nobody has measured it
    device="cpu", reserved_bytes=0, flops=1e11, memory=1e10, intra=2e9, inter=1e9, host_memory=2e10, nvme=1e9
)


def planned_config(
    config: Config,
    model: nn.Module | Callable[[], nn.Module],
    world: World,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    sample_batch: Any,
) -> Config:
    """The config without "auto". A collective. Raises ValueError where the model cannot be planned, or nothing fits."""
    num_hosts = world.num_hosts  # a collective
    found: tuple[dict[str, Any], dict[str, str]] | None = None
    failure: Exception | None = None
    if world.rank == 0:
        try:
            found = _planned(config, model, world, num_hosts, loss_fn, sample_batch)
        except Exception as error:  # of the model's forward too
            failure = error
    found, text = world.broadcast_object((found, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    if text is not None or found is None:
        raise ValueError(text)
    return config.as_planned(*found)


def _planned(
    config: Config,
    model: nn.Module | Callable[[], nn.Module],
    world: World,
    num_hosts: int,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    sample_batch: Any,
) -> tuple[dict[str, Any], dict[str, str]]:
    with torch.random.fork_rng(devices=[]):
        made = plan_on(model, config, machine_here(world, num_hosts)[0], sample_batch, loss_fn)
    if not made.fits:
        missing = ", ".join(f"{nbytes / 1e9:.3g} GB of {where} on each rank" for where, nbytes in made.missing.items())
        raise ValueError(
            f'"auto": nothing fits on {world.size} ranks; the smallest lacks {missing}. Take more devices, a smaller '
            "train_batch_size, or name a folder on a drive: nvme_path of zero_optimization.offload_optimizer"
        )
    logger.info(f'config: "auto": {made.summary}')
    return dict(made.config), dict(made.reasons)


def machine_here(world: World, num_hosts: int) -> tuple[Machine, str]:
    """(the machine on which the ranks are, as fast as it was found to be; its key among what trials have found).

    Raises ValueError for a file of such numbers that cannot be read.
    """
    on_host, path = max(1, world.size // num_hosts), default_path()
    nbytes = _device_bytes(world, on_host)
    is_cuda = world.device.type == "cuda"
    key = device_key(torch.cuda.get_device_name(world.device) if is_cuda else world.device.type, on_host)
    found = Measured.read(path) if path.exists() else Measured({})
    is_measured = world.device.type == "cpu" and bool(found.by_ranks)
    if is_measured:
        machine = Machine.measured(found, on_host, nbytes)
    else:
        machine = replace(Machine() if is_cuda else _CPU, device_bytes=nbytes)
    if is_measured or key in found.factors:
        logger.info("this machine is as fast as %s says", path)
    elif not is_cuda:
        logger.info("how fast this machine is was not measured; `lowtide env --measure` does it")
    machine = replace(machine, num_hosts=max(1, world.size // on_host), devices_per_host=on_host)
    return calibrated(machine, found.factor(key)), key


def _device_bytes(world: World, on_host: int) -> float:
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    return psutil.virtual_memory().available / on_host
