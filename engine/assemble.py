"""Build an engine from a blueprint: connect the ranks, take memory, fill it, change the module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..comm import Mesh, World
from ..kernels.optimizer_step import cpu_kernel
from ..model.compiled import Compiled
from ..model.patches import ModelPatches
from ..offload import ActivationOffload
from ..parallel.expert_dispatch import split_experts
from ..parallel.expert_lists import ListedExperts
from ..parallel.layers import SplitLayers
from ..parallel.randomness import Randomness, draws
from ..parallel.region_blocks import SequenceParallelRegion
from ..parallel.sequence_regions import SequenceParallelRegions
from ..parallel.split_self_check import SplitSelfCheck, watch_copies
from ..watch.log import logger
from ..zero.build import GroupMemories
from ..zero.hooks import UnitHooks, cast_inputs, make_gradients_in_place
from ..zero.host_update import HostUpdate
from ..zero.loss_scale import LossScaler
from ..zero.optimizer import ShardedOptimizer
from ..zero.placement import ShardStore
from ..zero.plan import Role
from ..zero.sequence import UnitSequence
from ..zero.unit import Unit
from .archive.agreement import no_rank_alone
from .archive.full_values import FullValues
from .blueprint.axes import EXPERT, PIPE, TENSOR
from .blueprint.blueprint import Blueprint, Timing
from .blueprint.footprint import shared_bytes
from .blueprint.offload import Placement, activation_store, host_update, offloaded_states, shard_store_of
from .blueprint.places import shares_of
from .config.config import Config
from .engine import Engine
from .features import FEATURES
from .model.deferred import move
from .model.given_model import LossFn, Values, note_divided
from .model.prepared_model import NamedModules, PreparedModel
from .model.recomputed import checkpoint_activations
from .model.sequences import Sequences
from .planner import planner
from .step.added_groups import AddedParameterGroups
from .step.batch import ModelCall
from .step.features import StepFeatures
from .step.join import Join
from .step.learning_rates import LearningRates, scheduler_for
from .step.lr_schedule import betas_at, schedule_of
from .step.model_runner import ModelRunner
from .step.parts import Parts, Prediction
from .step.pipeline_runner import MicrobatchTurns, PipelineRunner
from .step.runner import Runner
from .step.self_checks import is_kept_anyway
from .step.steps import Steps
from .trial import Trial


def assemble(
    blueprint: Blueprint,
    world: World,
    prepared: PreparedModel,
    *,
    loss_fn: LossFn,
    lr_scheduler: Any,
    rows_per_microbatch: int | None,
    samples_per_step: int | None,
    trial: Trial | None,
) -> Engine:
    """Build the engine of a blueprint that is equal on all ranks. A collective.

    prepared: the model of the blueprint. trial: of `lowtide tune`, if any. Raises OffloadError and CollectiveError if
    memory or storage is too small.
    """
    module, patches = prepared.module, prepared.patches
    config = blueprint.config
    # First: without room for offloaded shards no rank needs connections or memory.
    shard_store = _reserve_store(blueprint, world)
    mesh = _connect(blueprint, world)
    # Now, while parameters have their whole shapes: the prediction runs a copy of the module on the meta device.
    prediction = _memory_prediction(blueprint, module, loss_fn, world)
    host = host_update(config, blueprint.offload_plan, world)
    memories, units, optimizer, scheduler = _take_memory(blueprint, mesh, shard_store, host, lr_scheduler)
    _fill(module, units, optimizer, mesh, prepared.values, blueprint)
    model_call = _model_call(blueprint, mesh, prepared, loss_fn, rows_per_microbatch)
    _compile(blueprint, prepared.compiled, world)
    _autocast(module, config, mesh.world.device, patches)
    checkpoint_activations(blueprint.units, config.activation_checkpointing.every, patches)
    activation_offload, close_last = _offload_activations(blueprint, world, module, units)
    join = Join(mesh)
    runner = _runner(blueprint, mesh, module, units, optimizer, model_call, patches, activation_offload, join)
    _cast_inputs(blueprint, module, patches)
    if trial is not None:
        patches.callback(trial.watch(world, module, config.train_batch_size or 0, config.parallel.sequence))
    features, scaler = StepFeatures(FEATURES), _loss_scaler(config)
    steps = Steps(config, mesh, runner.passes, optimizer, scaler, join, features)
    parts = Parts(
        config=config,
        mesh=mesh,
        module=module,
        runner=runner,
        optimizer=optimizer,
        added_groups=AddedParameterGroups(blueprint, mesh, memories, runner, optimizer, shard_store, host),
        activations=activation_offload,
        learning_rates=_learning_rates(config, optimizer, scheduler),
        steps=steps,
        patches=patches,
        close_last=close_last,
        blueprint=blueprint,
        memory_prediction=prediction,
        model_flops=prepared.flops,
        samples_per_step=samples_per_step,
        trial=trial,
    )
    # Last: features read the parts, and their checks are collectives.
    features.begin(parts)
    return Engine(parts)


def _reserve_store(blueprint: Blueprint, world: World) -> ShardStore | None:
    """Reserve room for shards that are offloaded. A collective, if they are; else return None."""
    if blueprint.offload_plan.parameters is Placement.MODEL:
        return None
    with no_rank_alone(world, "lowtide.initialize"):
        shard_store = shard_store_of(blueprint.config, blueprint.offload_plan, world)
        # The bytes of this rank's place: stages and split layers differ in size.
        shard_store.reserve([group.shard_bytes for group in blueprint.places[blueprint.place_of(world.rank)].groups])
    return shard_store


def _take_memory(
    blueprint: Blueprint, mesh: Mesh, shard_store: ShardStore | None, host: HostUpdate | None, lr_scheduler: Any
) -> tuple[GroupMemories, list[Unit], ShardedOptimizer, Any]:
    """Take the memory of parameters, gradients and optimizer states, and make the scheduler. A collective."""
    own = blueprint.places[blueprint.place_of(mesh.world.rank)]
    memories = GroupMemories(
        mesh,
        blueprint.reduces_every_backward,
        shard_store,
        shares_gradients=blueprint.shares_gradients,
        delays_updates=blueprint.timing is Timing.DELAYED,
        keeps_sums=not blueprint.is_layered,
        seed=blueprint.config.seed or 0,
        # A function, as the optimizer is made below, of the gradients that this object makes.
        num_steps=lambda: optimizer.num_steps_before,
        low_rank=blueprint.low_rank,
    )
    # Groups that the host updates send their gradients off the device.
    hosts = {} if host is None else dict.fromkeys(blueprint.offload_plan.updated_apart(own.updated), host)
    units = memories.units(own, hosts)
    with no_rank_alone(mesh.world, "lowtide.initialize"):
        optimizer = _optimizer(blueprint, mesh.world, units, shard_store, host)
        # The caller's code runs here, and may raise on a rank alone.
        scheduler = scheduler_for(optimizer, lr_scheduler)
    return memories, units, optimizer, scheduler


def _model_call(
    blueprint: Blueprint, mesh: Mesh, prepared: PreparedModel, loss_fn: LossFn, rows_per_microbatch: int | None
) -> ModelCall:
    """Split layers, experts and sequences of the model over ranks."""
    config, module, patches = blueprint.config, prepared.module, prepared.patches
    splits = _split_layers(blueprint, mesh, module, prepared.tiled, patches)
    _split_experts(blueprint, mesh, patches)
    axes = [name for name, plan in ((TENSOR, blueprint.tensor), (EXPERT, blueprint.experts)) if plan is not None]
    if axes:
        note_divided(module, ", ".join(f"parallel.{name}" for name in axes))
    sequences = None
    if config.parallel.sequence > 1:
        sequences = Sequences(module, mesh, patches, loss_fn, config.sequence_parallel.attention)
    dtype = blueprint.dtypes.compute if _casts_inputs(config) else None
    return ModelCall(loss_fn, sequences, splits, mesh.world, dtype, rows_per_microbatch)


def _compile(blueprint: Blueprint, compiled: Compiled, world: World) -> None:
    section = blueprint.config.compile
    if section.blocks:
        options = {key: getattr(section, key) for key in ("backend", "mode", "dynamic", "fullgraph")}
        # Repeated blocks alone: they share a compiled graph, and each other part would compile its graph for a single
        # use.
        blocks = (unit.module for unit in blueprint.units if not (unit.is_root or unit.is_end))
        compiled.want(blocks, partial(torch.compile, **options))
    pipeline = blueprint.pipeline
    num_divided = compiled.apply(
        [unit.module for unit in blueprint.units if not unit.is_root],
        None if pipeline is None else [compiled.module.get_submodule(name) for name in pipeline.split.blocks],
    )
    if num_divided and not world.rank:
        logger.info(
            "torch.compile: modules with blocks are compiled block by block, and the remaining parts separately"
        )


def _connect(blueprint: Blueprint, world: World) -> Mesh:
    mesh = Mesh.create(
        world,
        blueprint.parallel_dims,
        blueprint.wanted_transport,
        shared_bytes(blueprint),
        messages=PIPE,
        folds=blueprint.folds,
        inner=blueprint.inner,
    )
    partition = blueprint.config.zero_optimization.partition_size
    if partition > 1 and mesh.over(blueprint.sharding.states).transport.copies_are_shared and not world.rank:
        why = "its ranks share the memory of a host, with a single copy of the parameters, so nothing is gathered"
        logger.info("config: zero_optimization.zero_hpz_partition_size: %d has no effect here: %s", partition, why)
    wire = blueprint.config.communication
    if world.size > 1 and blueprint.transport == "shared_memory" and not world.rank:
        for key in ("weight_bits", "frozen_weight_bits", "gradient_bits"):
            if (bits := getattr(wire, key)) is not None:
                why = "ranks of the same host share memory, and send nothing"
                logger.info("config: communication.%s: %d has no effect here: %s", key, bits, why)
    return mesh


def _optimizer(
    blueprint: Blueprint, world: World, units: Sequence[Unit], shard_store: ShardStore | None, host: HostUpdate | None
) -> ShardedOptimizer:
    config, offload_plan, plan = blueprint.config, blueprint.offload_plan, blueprint.optimizer
    if plan.fused is not None and (host is not None or world.device.type == "cpu"):
        cpu_kernel()  # build it now: in the first step the wait would look like a hang
    offloaded = offloaded_states(config, offload_plan, world)
    gradients = [one for unit in units for one in unit.gradients if one.group.plan.role is Role.UPDATED]
    return ShardedOptimizer(
        gradients, plan.param_groups, plan.defaults, plan.make_update(), offloaded, shard_store, host
    )


def _runner(
    blueprint: Blueprint,
    mesh: Mesh,
    module: nn.Module,
    units: list[Unit],
    optimizer: ShardedOptimizer,
    model_call: ModelCall,
    patches: ModelPatches,
    activation_offload: ActivationOffload | None,
    join: Join,
) -> Runner:
    """Make the runner of the model. Hooks report the uses of units, or the schedule of a pipeline orders them."""
    if blueprint.pipeline is not None:
        plan = blueprint.pipeline.at(mesh.place(PIPE))
        turns = MicrobatchTurns(mesh.world.device, activation_offload) if plan.is_layered else None
        return PipelineRunner(plan, mesh, module, units, model_call, patches, turns)
    kind: type[UnitSequence] = UnitSequence
    run: Callable[..., Runner] = ModelRunner
    if blueprint.config.compile.graphs:
        from .step import graphs  # see [Note: what few trainings use]

        if graphs.are_possible(blueprint, mesh.world):
            kind = graphs.ReplayedSequence
            most = blueprint.config.compile.max_graphs
            run = partial(graphs.GraphRunner, optimizer=optimizer, max_graphs=most)
    # The join is asked before each pass, since ranks without data take part in the gathers of forwards.
    sequence = kind(units, blueprint.prefetch_numel, mesh.world.progress, join.before_pass, mesh.gather_values)
    on_block = activation_offload.begin_block if activation_offload else None
    hooks = UnitHooks(sequence, blueprint.policy.frees_parameters, patches, on_block)
    if mesh.world.device.type == "cpu":  # elsewhere the saved copy is cheaper than this Python code
        make_gradients_in_place(sequence, module.modules(), patches)
    return run(module, sequence, hooks, model_call, mesh, patches)


def _fill(
    module: nn.Module, units: list[Unit], optimizer: ShardedOptimizer, mesh: Mesh, values: Values, blueprint: Blueprint
) -> None:
    """Write the model's values into the shards. The model's memory is freed parameter by parameter."""
    writer = FullValues(module, units, optimizer, mesh)
    share_of, dtypes = shares_of(blueprint.tensor, blueprint.experts, mesh.place), blueprint.dtypes
    place = {id(p): (group, i) for unit in units for group in unit.groups for i, p in enumerate(group.params)}
    with torch.no_grad():
        for param, value in values:
            if id(param) in place:  # else it belongs to another stage
                group, index = place[id(param)]
                writer.write(group, index, value)
            # Parameters of other stages too: their dtype is still read.
            nothing = torch.zeros((), dtype=dtypes.of(param), device=mesh.world.device)
            # A single zero, expanded: the model's memory is free, and the shape is still known.
            move(param, nothing.expand(share_of(param).tensor_shard.shape))
        # After the values: a deferred model fills its buffers while it yields them.
        _prepare_buffers(module, mesh)
        writer.refresh()
        for unit in units:
            for group in unit.groups:
                group.install()
                # At stage 3 only shards take memory from here to the first forward.
                group.release()


def _split_layers(
    blueprint: Blueprint, mesh: Mesh, module: nn.Module, tiled: NamedModules, patches: ModelPatches
) -> SplitSelfCheck | None:
    """Split layers over ranks, and exchange their inputs and outputs. Return the check of the split layers."""
    if blueprint.tensor is None:
        return None
    exchange = mesh.exchange((TENSOR,))
    repeated = [unit.module for unit in blueprint.units if not unit.is_root]
    # The check needs the regions, which are made after it: the lambda reads the variable when the check runs.
    parts: SequenceParallelRegions | None = None
    trial = SplitSelfCheck(
        blueprint.tensor,
        module,
        repeated,
        exchange,
        lambda: nullcontext() if parts is None else parts.with_all_tokens(),
        () if blueprint.experts is None else blueprint.experts.blocks,
    )
    if trial.left_out and not mesh.world.rank:
        for why in dict.fromkeys(trial.left_out.values()):
            logger.warning(
                "parallel.tensor: no check that split layers compute the same as whole layers in %s, which %s",
                ", ".join(f"'{name or '(the model)'}'" for name, other in trial.left_out.items() if other == why),
                why,
            )
    if blueprint.tensor.left_whole and not mesh.world.rank:
        names = ", ".join(blueprint.tensor.left_whole)
        logger.warning(
            "parallel.tensor: these large layers are whole on all %d ranks, since no plan says how to split them: %s; "
            'name them in "tensor_parallel": {"plan": {...}}, or in "whole" there',
            blueprint.tensor.degree,
            names,
        )
    randomness = Randomness(exchange, mesh.world.device)  # also for random numbers that `draws` does not see
    if blueprint.tensor.regions:
        in_tiles = frozenset(id(one) for _, one in tiled)
        parts = SequenceParallelRegions(_regions_of(blueprint, mesh), in_tiles, module, exchange, randomness, patches)
    SplitLayers(blueprint.tensor, module, exchange, randomness if draws(module) else None, patches, parts)
    watch_copies(blueprint.tensor, module, exchange, patches)
    return trial


def _regions_of(blueprint: Blueprint, mesh: Mesh) -> tuple[SequenceParallelRegion, ...]:
    """Return the sequence-parallel regions; in a pipeline cut into stages, since tokens are whole in between."""
    assert blueprint.tensor is not None
    if blueprint.pipeline is None:
        return blueprint.tensor.regions
    names = blueprint.pipeline.split.names_of(blueprint.pipeline.at(mesh.place(PIPE)).stages)
    return tuple(part for stack in blueprint.tensor.regions for part in stack.cut(names))


def _split_experts(blueprint: Blueprint, mesh: Mesh, patches: ModelPatches) -> None:
    """Send tokens to the ranks with their experts."""
    if blueprint.experts is None:
        return
    if blueprint.experts.left_whole and not mesh.world.rank:
        names = ", ".join(blueprint.experts.left_whole)
        logger.warning(
            "parallel.expert: these experts are whole on all ranks, since they are neither a single module nor a list "
            "of modules of equal shapes: %s",
            names,
        )
    exchange = mesh.exchange((EXPERT,))
    split_experts(blueprint.experts, exchange, patches)
    for layer in blueprint.experts.lists:
        ListedExperts(layer, exchange, patches)


def _prepare_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Copy rank 0's buffers to the device, with their dtypes: an angle or a running mean is wrong in bf16."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                # Buffers may be drawn or counted in a constructor, so each rank takes those of rank 0.
                owner._buffers[name] = mesh.world.broadcast_tensor(buffer).to(mesh.world.device)


def _casts_inputs(config: Config) -> bool:
    return config.bf16.auto_cast if config.bf16.enabled else config.fp16.auto_cast


def _cast_inputs(blueprint: Blueprint, module: nn.Module, patches: ModelPatches) -> None:
    """Cast the inputs of blocks too, if float32 buffers may widen activations."""
    dtype = blueprint.dtypes.compute
    if dtype is not None and _casts_inputs(blueprint.config) and _has_wide_buffers(module):
        cast_inputs([unit.module for unit in blueprint.units if not unit.is_root], dtype, patches)


def _has_wide_buffers(module: nn.Module) -> bool:
    """Return True if a float32 buffer may widen the results of half-precision parameters."""
    # A batch norm computes with its float32 statistics, but returns the dtype of its input.
    owners = (part for part in module.modules() if not isinstance(part, _NormBase))
    return any(buffer.dtype == torch.float32 for part in owners for buffer in part.buffers(recurse=False))


def _autocast(module: nn.Module, config: Config, device: torch.device, patches: ModelPatches) -> None:
    """Run each forward of the model under torch.autocast, also in evaluations."""
    if not config.torch_autocast.enabled:
        return
    inner, dtype = module.forward, getattr(torch, config.torch_autocast.dtype)

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            return inner(*args, **kwargs)

    # On the model, not in the runner, so that `engine.module(...)` runs under autocast too.
    patches.override(module, "forward", forward)


def _offload_activations(
    blueprint: Blueprint, world: World, module: nn.Module, units: Sequence[Unit]
) -> tuple[ActivationOffload | None, Sequence[Callable[[], None]]]:
    """Return the offload of activations, and functions that close it. A collective, if activations are offloaded."""
    if blueprint.offload_plan.activations is Placement.MODEL:
        return None, ()
    with no_rank_alone(world, "lowtide.initialize"):
        store = activation_store(blueprint.config, blueprint.offload_plan, world)
    wanted = blueprint.config.activation_checkpointing.offload
    offload = ActivationOffload(store, wanted.min_bytes, wanted.budget_bytes, is_kept_anyway(module, units))
    # In this order: the offload waits for transfers of the store.
    return offload, (offload.close, store.close)


def _memory_prediction(blueprint: Blueprint, module: nn.Module, loss_fn: LossFn, world: World) -> Prediction | str:
    """Return the prediction for a memory report, or why it cannot be predicted."""
    if blueprint.config.memory_report.folder is None:
        return "memory_report.folder is not set in the config"
    try:
        found: Prediction = planner().memory_prediction(blueprint, module, loss_fn, world.rank)
    except ValueError as error:
        return str(error)
    return found


def _learning_rates(config: Config, optimizer: ShardedOptimizer, scheduler: Any) -> LearningRates:
    section = config.scheduler
    schedule = None if section is None else schedule_of(section)
    betas = None if section is None else partial(betas_at, section)
    return LearningRates(optimizer, schedule, betas, scheduler)


def _loss_scaler(config: Config) -> LossScaler:
    fp16 = config.fp16
    if not fp16.enabled:
        return LossScaler()
    # As in DeepSpeed, 0 asks for a dynamic scale.
    dynamic = fp16.loss_scale == 0
    return LossScaler(
        scale=2.0**fp16.initial_scale_power if dynamic else fp16.loss_scale,
        dynamic=dynamic,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )
