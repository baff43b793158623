"""`initialize`: from a config and a model to an engine.

[Note: what few trainings use] A module takes 40 KiB of each process, a package such as the planner megabytes. Code
that only some config keys or calls need is imported there, not at the top of a file. Test:
`test_training_imports_neither_a_compiler_nor_a_planner`.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import World
from ..model.patches import ModelPatches
from ..offload import keep_heap
from ..watch.log import configure, logger
from ..zero.optimizer import BY_HAND, STATES_BY_HAND
from ..zero.sequence import StateError
from .archive.agreement import no_rank_alone
from .assemble import assemble
from .blueprint.blueprint import Blueprint
from .blueprint.optimizer_plan import OptimizerChoice
from .blueprint.pipeline_plan import agreed_split
from .config.batch import first_world_size
from .config.config import Config
from .engine import Engine
from .model.deferred import LaterModel
from .model.given_model import LossFn, Model, check_optimizers_agree
from .model.prepared_model import PreparedModel, check_units
from .planner import planner
from .step.batch import call, loss_of
from .trial import Trial


def initialize(
    model: Model,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    optimizer: OptimizerChoice = None,
    lr_scheduler: Any = None,
    sample_batch: Any = None,
    fill: Mapping[str, object] | None = None,
) -> Engine:
    """Return an engine that trains `model` as the config says.

    model: a module, or a callable without arguments that builds a module. With a callable no rank ever holds the whole
    model; if its constructors cannot be recorded, each host has it once in a memory-mapped file. config: a JSON file,
    the name of a preset such as "zero3", a dictionary, or a `lowtide.Config`. If a degree or placement is "auto", as
    in the preset "auto", `lowtide.plan` chooses it and logs why. loss_fn(output, batch) -> loss. Without it the
    model's output is the loss, or has it as .loss, ["loss"] or [0]. optimizer: in place of the config's: an optimizer
    over parameters of the model, a torch optimizer class, or a callable from parameters to an optimizer. It must be
    elementwise. Parameters outside of its groups are not updated; if they require a gradient, it counts in the norm.
    Parameters of a group may be frozen and unfrozen between steps (`requires_grad_`), also from the start. Without any
    optimizer the engine computes but does not train, as for a teacher; its parameters are frozen until it is closed.
    lr_scheduler: in place of the config's: a callable from the optimizer to a scheduler, or a scheduler of the given
    optimizer. sample_batch: a batch of any size that shows a pipeline how the model runs, and a plan which activations
    it keeps. Needed for pipeline.balance "time", and for "auto" unless the model takes tokens. fill: values for keys
    that are "auto" in the config, by path: {"scheduler.params.total_num_steps": 1000}. Other keys keep their values.

    Raises ConfigError (config), ValueError (model, optimizer), OffloadError (no room for offloaded states) and
    RuntimeError (ranks that do not agree). An error of a rank is raised on all ranks.
    """
    if isinstance(model, Engine):
        raise ValueError(
            "model: expected an nn.Module or a callable that builds a module, found an engine; close it and pass its "
            "model, engine.module"
        )
    # Before the config is read: a trial replaces it.
    trial = Trial.asked(config, optimizer, fill)
    checked = Config.load(config, fill=fill) if trial is None else trial.taken(config, fill)
    # Outside of `try`: a rank that has not joined has nothing to leave.
    world = World.join(checked.device, checked.communication.timeout_seconds)
    patches = ModelPatches()
    try:
        checked = _planned(checked, model, world, trial, loss_fn, sample_batch)
        resolved = _prepare_process(checked, world)
        prepared = PreparedModel.of(model, resolved, world, patches)
        blueprint = _blueprint(resolved, world, prepared.module, loss_fn, optimizer, lr_scheduler, sample_batch)
        check_units(prepared.tiled, blueprint)
        _take_optimizer(optimizer, blueprint, world, prepared)
        # If the config names no batch size, `resolved` has a default, which is no reason to refuse a batch.
        gives_rows = checked.train_batch_size or checked.train_micro_batch_size_per_gpu
        engine = assemble(
            blueprint,
            world,
            prepared,
            loss_fn=loss_fn,
            lr_scheduler=lr_scheduler,
            rows_per_microbatch=resolved.train_micro_batch_size_per_gpu if gives_rows else None,
            samples_per_step=resolved.train_batch_size if gives_rows or checked.elasticity.enabled else None,
            trial=trial,
        )
        if isinstance(optimizer, torch.optim.Optimizer):
            # A weak reference: the optimizer is the user's, and may outlive the engine.
            reference = weakref.ref(engine)
            patches.hook(optimizer.register_step_pre_hook(partial(_step_in_its_place, reference)))
            patches.hook(optimizer.register_state_dict_pre_hook(partial(_refuse_states, reference)))
            patches.hook(optimizer.register_load_state_dict_pre_hook(partial(_refuse_states, reference)))
        return engine
    except BaseException:
        patches.close()
        world.leave()  # ranks that wait for this rank get an error, and the next engine starts anew
        raise


def _planned(
    config: Config, model: Model, world: World, trial: Trial | None, loss_fn: LossFn, sample_batch: Any
) -> Config:
    """Return the config with values for "auto". A trial that only asks for a plan ends here. A collective."""
    described = model.module if isinstance(model, LaterModel) else model
    _log_notes(
        world, [trial.note] if trial is not None else []
    )  # also without notes: it sets the log up for the planner
    if trial is not None and trial.request.task == "plan":
        trial.plan(config, described, world, loss_fn, sample_batch)
    if not config.planned_keys:
        return config
    made: Config = planner().planned_config(config, described, world, loss_fn, sample_batch)
    return made


def _take_optimizer(optimizer: OptimizerChoice, blueprint: Blueprint, world: World, prepared: PreparedModel) -> None:
    """Check that ranks agree on the caller's optimizer; without an optimizer freeze the model. A collective."""
    if optimizer is not None:
        check_optimizers_agree(world, prepared.module, blueprint.optimizer)
    if not blueprint.optimizer.trains:
        _freeze(prepared.module, prepared.patches)
    _log_notes(world, blueprint.optimizer.notes(prepared.module))


def _step_in_its_place(
    reference: weakref.ref[Engine],
    optimizer: torch.optim.Optimizer,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> None:
    """Run the engine's step in a hook of the caller's optimizer. It leaves no gradient for that optimizer."""
    engine, name = reference(), f"{type(optimizer).__name__}.step()"
    if engine is None:
        raise StateError(BY_HAND.format(what=name))
    if any(one is not None for one in (*args[1:], *kwargs.values())):  # the first is the optimizer
        raise StateError(f"{name}: expected no closure, found a closure; run the backward before the call")
    # In the middle of a step `Engine.step` does nothing. For a step of torch's optimizer that would be silent.
    before = engine.global_step
    engine.step()
    if engine.global_step == before:
        raise StateError(
            f"{name}: expected a call after the last microbatch of a step, found an earlier microbatch: call it after "
            "the last, or engine.step() after each, which acts after the last"
        )


def _refuse_states(
    reference: weakref.ref[Engine], optimizer: torch.optim.Optimizer, *loaded: Mapping[str, object]
) -> None:
    """Refuse to save or load the states of the caller's optimizer, in its hooks: the engine has them."""
    engine = reference()
    if loaded or engine is None or engine.optimizer.counts.num_steps:
        name = "load_state_dict" if loaded else "state_dict"
        raise StateError(STATES_BY_HAND.format(what=f"{type(optimizer).__name__}.{name}()"))


def _freeze(module: nn.Module, patches: ModelPatches) -> None:
    """Freeze all parameters until the patches are undone: their gradients would never be used."""
    for param in module.parameters():
        if param.requires_grad:
            param.requires_grad_(False)
            patches.callback(partial(param.requires_grad_, True))


def _prepare_process(config: Config, world: World) -> Config:
    """Apply process settings of the config, and return the config resolved for this world."""
    if world.device.type == "cpu":
        # Else glibc gives memory back to the system, and its pages fault in each step: see "The heap and huge pages" in
        # docs/log.md.
        keep_heap()
    resolved = config.resolve(world.size, first_world_size(os.environ, world.size))
    world.watch(resolved.communication.step_timeout_seconds)
    if resolved.seed is not None:
        # Before the model is built: a callable draws its values after this.
        torch.manual_seed(resolved.seed)
    _log_notes(world, [*alone_note(world), *(f"config: {note}" for note in resolved.short_notes)])
    return resolved


def _blueprint(
    config: Config,
    world: World,
    module: nn.Module,
    loss_fn: LossFn,
    optimizer: OptimizerChoice,
    lr_scheduler: Any,
    sample_batch: Any,
) -> Blueprint:
    """Return the blueprint, the same on all ranks. A collective."""
    batch = sample_batch
    sample = None if batch is None else lambda model: loss_of(call(model, batch), batch, loss_fn)
    split = agreed_split(world, config, module, sample)
    # A collective, so it must not stand inside of `no_rank_alone`.
    num_hosts = world.num_hosts
    with no_rank_alone(world, "lowtide.initialize"):
        blueprint = Blueprint.of(
            config,
            module,
            world.size,
            device=world.device.type,
            num_hosts=num_hosts,
            optimizer=optimizer,
            split=split,
        )
        if lr_scheduler is not None and not blueprint.optimizer.trains:
            raise ValueError(
                "lr_scheduler: expected an optimizer too, in the config or passed to initialize(..., optimizer=...), "
                "found neither"
            )
        if lr_scheduler is not None and config.scheduler is not None:
            raise ValueError(
                f'scheduler: expected a single scheduler, found "{config.scheduler.type}" in the config and another '
                "passed to initialize; remove either"
            )
    _log_notes(world, blueprint.offload_plan.notes)
    return blueprint


def alone_note(world: World) -> list[str]:
    """Return a note for a user who may have forgotten the launcher."""
    if not world.began_alone:
        return []
    script = Path(sys.argv[0]).name if sys.argv[0].endswith(".py") else "SCRIPT"
    on_device = world.device.type != "cpu"
    num_devices = torch.accelerator.device_count() if on_device else 1
    ranks = "" if on_device else "--nproc N "
    return [
        f"training alone on {world.device}"
        + (f", one of {num_devices} devices" if num_devices > 1 else "")
        + f": no launcher has started this process; `lowtide launch {ranks}{script}` starts "
        + ("a rank on each device" if on_device else "N ranks")
    ]


def _log_notes(world: World, notes: Sequence[str]) -> None:
    """Log settings that have no effect here, and values of "auto"."""
    if world.rank == 0:
        configure()
    for note in notes if world.rank == 0 else ():
        logger.info("%s", note)
