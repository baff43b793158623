"""Plan for an engine that starts or runs.

Values for "auto" (`planned_config`), bytes for a memory report (`memory_prediction`), configs for `lowtide tune`
(`plans_of_trial`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...comm import World
from ...watch.log import logger
from ..blueprint.axes import TENSOR
from ..blueprint.blueprint import Blueprint
from ..config.config import Config
from ..model.deferred import module_for_shapes
from ..step.batch import loss_of
from .choice import Choice, without_defaults
from .estimate import estimate, writes_gradients
from .layered import layered_memory
from .machine import Machine, calibrated, gigabytes
from .measured import Measured, default_path, device_key
from .meta_run import MetaRun
from .pipelined import memory_by_place
from .plan import made_batch, plan_on
from .splits import PlannedSplits

__all__ = ["memory_prediction", "planned_config", "plans_of_trial", "without_defaults"]

_CPU = Machine(  # speeds of a rank with a few cores, unless they were measured
    device="cpu", reserved_bytes=0, flops=1e11, memory=1e10, intra=2e9, inter=1e9, host_memory=2e10, nvme=1e9
)


def planned_config(
    config: Config,
    model: nn.Module | Callable[[], nn.Module],
    world: World,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    sample_batch: Any,
) -> Config:
    """Return the config without "auto". A collective.

    Raises ValueError on all ranks if the model cannot be planned, or nothing fits.
    """
    num_hosts = world.num_hosts  # a collective
    found: tuple[dict[str, Any], dict[str, str]] | None = None
    failure: Exception | None = None
    # Only rank 0 plans: ranks may read different speeds and free memory, and all must get the same config.
    if world.rank == 0:
        try:
            found = _planned(config, model, world, num_hosts, loss_fn, sample_batch)
        except Exception as error:  # the model's forward can raise anything
            failure = error
    found, text = world.broadcast_object((found, None if failure is None else str(failure)))
    # Rank 0 keeps the traceback of the model's forward. The remaining ranks know only its text.
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
    # A plan must not change the random numbers of the training, for example those of a deferred model's weights.
    with torch.random.fork_rng(devices=[]):
        made = plan_on(model, config, machine_here(world, num_hosts, config)[0], sample_batch, loss_fn)
    if not made.fits:
        missing = ", ".join(f"{gigabytes(nbytes)} GB of {where} on each rank" for where, nbytes in made.missing.items())
        raise ValueError(
            f'"auto": nothing fits on {world.size} ranks; the smallest config lacks {missing}. Use more devices, a '
            "smaller train_batch_size, or offload to a drive: set nvme_path of zero_optimization.offload_optimizer"
        )
    logger.info(f'config: "auto": {made.summary}')
    return dict(made.config), dict(made.reasons)


def machine_here(world: World, num_hosts: int, config: Config) -> tuple[Machine, str]:
    """Return the machine of this world, with measured speeds if there are any, and its key in the factors of trials.

    config: names the folders of offloads; the drive with the least free room counts.

    Raises ValueError if the file of measured speeds cannot be read.
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
        host = float(psutil.virtual_memory().available)
        machine = replace(Machine() if is_cuda else _CPU, device_bytes=nbytes, host_bytes=host)
    if is_measured or key in found.factors:
        logger.info("speeds of this machine are from %s", path)
    elif not is_cuda:
        logger.info("speeds of this machine are guessed; `lowtide env --measure` measures them")
    zero, saved = config.zero_optimization, config.activation_checkpointing.offload
    folders = [section.nvme_path for section in (zero.offload_optimizer, zero.offload_param, saved)]
    room = min((_free_bytes(folder) for folder in folders if folder is not None), default=machine.nvme_bytes)
    machine = replace(machine, num_hosts=max(1, world.size // on_host), devices_per_host=on_host, nvme_bytes=room)
    return calibrated(machine, found.factor(key)), key


def _device_bytes(world: World, on_host: int) -> float:
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    # At the start no rank of the host has its share in use yet.
    return psutil.virtual_memory().available / on_host


def _free_bytes(folder: str) -> float:
    """Return the free room on the drive of a folder, which need not exist yet."""
    path = Path(folder).absolute()
    return float(shutil.disk_usage(next(each for each in (path, *path.parents) if each.is_dir())).free)


def memory_prediction(
    blueprint: Blueprint, module: nn.Module, loss_fn: Any, rank: int
) -> Callable[[Any], tuple[dict[str, int], int]]:
    """Return a function from a batch to the rank's (bytes by kind, peak of the total).

    module: the user's model, before the engine changes it. This function and the returned function raise ValueError if
    a prediction is not possible.
    """
    config = blueprint.config
    if config.tiles.mlp or config.tiles.loss:
        raise ValueError("the model already has tiles; only `lowtide plan` predicts them")
    casts = config.bf16.auto_cast if config.bf16.enabled else config.fp16.auto_cast
    machine = Machine(device="cpu" if blueprint.device == "cpu" else "cuda")
    try:
        splits = PlannedSplits.of(blueprint, blueprint.parallel_dims.place(rank, (TENSOR,)))
        run = MetaRun(module, blueprint.units, blueprint.dtypes, machine.device, loss_fn, casts, splits=splits)
    except Exception as error:  # a model may contain objects that cannot be copied; a report must not end the training
        logger.info("memory_report: the model cannot be copied for a prediction: %s", error)
        raise ValueError(f"the model cannot be copied ({error})") from error
    place = blueprint.place_of(rank)

    def predict(batch: Any) -> tuple[dict[str, int], int]:
        shapes = [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
        rows = shapes[0][0] if shapes else 1
        profile = run.profile(batch, rows, config.activation_checkpointing.every, writes_gradients(blueprint))
        kinds: Mapping[str, int]
        if blueprint.pipeline is None:
            found = estimate(blueprint, machine, profile, place)
            kinds, peak = found.bytes, found.peak_bytes
        elif blueprint.is_layered:
            kinds, peak = layered_memory(blueprint, machine, profile, place)
        else:
            kinds, peak = memory_by_place(blueprint, machine, profile)[place]
        return {**kinds, "slot_bytes": profile.slot_bytes}, peak

    return predict


def plans_of_trial(
    model: nn.Module | Callable[[], nn.Module],
    config: Config,
    world: World,
    num_hosts: int,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    batch: Any,
    sequence: int | None,
    num_plans: int,
) -> dict[str, Any]:
    """Return the best configs and the given config, as `lowtide tune` reads them. Raises ValueError.

    batch: a batch of the model; None: made, with `sequence` tokens.
    """
    machine, key = machine_here(world, num_hosts, config)
    if batch is None and sequence is not None:
        batch = made_batch(model if isinstance(model, nn.Module) else module_for_shapes(model), sequence)
    begun = time.monotonic()
    found = plan_on(model, config, machine, batch, loss_fn or _any_loss, num_plans)
    given = None
    if not config.planned_keys:
        given = {"choice": asdict(Choice.of(config.resolve(machine.num_devices))), **_taken(found)}
    return {
        "device": key,
        "plan_seconds": time.monotonic() - begun,
        "num_choices": found.num_choices,
        "given": given,
        "best": [
            {"config": dict(best.config), "choice": asdict(best.choice), **_taken(best)} for best in found.alternatives
        ],
        "missing": dict(found.missing),
    }


def _taken(plan: Any) -> dict[str, Any]:
    return {"peak_bytes": plan.peak_bytes, "seconds": dict(plan.seconds)}


def _any_loss(output: Any, batch: Any) -> Tensor:
    """Return the model's loss, or, if the script computes the loss, a value with a gradient for the whole output."""
    try:
        return loss_of(output, batch, None)
    except ValueError:
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not outputs:
            raise
        return torch.stack([leaf.float().mean() for leaf in outputs]).sum()
