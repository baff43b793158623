"""What an engine asks the planner for: "auto", the prediction of a memory report, the plans of a trial."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

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
from .agreed import machine_here, planned_config
from .choice import Choice, without_defaults
from .estimate import estimate, writes_gradients
from .layered import memory_in_layers
from .machine import Machine
from .meta_run import MetaRun
from .pipelined import memory_by_place
from .plan import made_batch, plan_on
from .splits import PlannedSplits

__all__ = ["memory_prediction", "planned_config", "plans_of_trial", "without_defaults"]


def memory_prediction(
    blueprint: Blueprint, module: nn.Module, loss_fn: Any, rank: int
) -> Callable[[Any], tuple[dict[str, int], int]]:
    """A function from a batch to (bytes by kind, the peak of their total) of the rank.

    module: before anything of the engine stands on it. The function and this one raise ValueError where there is no
    prediction.
    """
    config = blueprint.config
    if config.tiles.mlp or config.tiles.loss:
        raise ValueError("tiles stand on the model already; `lowtide plan` counts them")
    casts = config.bf16.auto_cast if config.bf16.enabled else config.fp16.auto_cast
    machine = Machine(device="cpu" if blueprint.device == "cpu" else "cuda")
    try:
        splits = PlannedSplits.of(blueprint, blueprint.parallel_dims.place(rank, (TENSOR,)))
        run = MetaRun(module, blueprint.units, blueprint.dtypes, machine.device, loss_fn, casts, splits=splits)
    except Exception as error:  # a model may have anything in it that cannot be copied; a report is not worth an end
        logger.info("memory_report: the model cannot be copied for a prediction: %s", error)
        raise ValueError(f"the model cannot be copied ({error})") from error
    place = blueprint.place_of(rank)

    def predict(batch: Any) -> tuple[dict[str, int], int]:
        shapes = [one.shape for one in tree_leaves(batch) if isinstance(one, Tensor) and one.dim()]
        rows = shapes[0][0] if shapes else 1
        profile = run.profile(batch, rows, config.activation_checkpointing.every, writes_gradients(blueprint))
        kinds: Mapping[str, int]
        if blueprint.pipeline is None:
            found = estimate(blueprint, machine, profile, place)
            kinds, peak = found.bytes, found.peak_bytes
        elif blueprint.is_layered:
            kinds, peak = memory_in_layers(blueprint, machine, profile, place)
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
    """The best few configs and the given one, as `lowtide tune` reads them. Raises ValueError.

    batch: as the model takes it; None: made, of `sequence` tokens.
    """
    machine, key = machine_here(world, num_hosts)
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
            {"config": dict(one.config), "choice": asdict(one.choice), **_taken(one)} for one in found.alternatives
        ],
        "missing": dict(found.missing),
    }


def _taken(plan: Any) -> dict[str, Any]:
    return {"peak_bytes": plan.peak_bytes, "seconds": dict(plan.seconds)}


def _any_loss(output: Any, batch: Any) -> Tensor:
    """The model's own, or for a model whose loss the script computes, one with a gradient for all of its output."""
    try:
        return loss_of(output, batch, None)
    except ValueError:
        outputs = [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad]
        if not outputs:
            raise
        return torch.stack([one.float().mean() for one in outputs]).sum()
