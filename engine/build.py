"""From a config and a model to an engine: the only place that asks the config what is wanted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ..comm import Arrangement, Mesh, World
from ..kernels.cpu_optimizer import cpu_kernel
from ..kernels.dispatch import Backend
from ..model.ledger import Ledger
from ..offload import ActivationOffload, in_storages_of, keep_heap
from ..optimizers.table import OPTIMIZERS
from ..pipe.split.absent import Absent
from ..watch.log import configure, logger
from ..zero.build import Dtypes, ModelPlan, build_units
from ..zero.direct_gradients import DirectGradients
from ..zero.domain import Domain
from ..zero.fused_update import FusedUpdate
from ..zero.gradient import GroupGradient
from ..zero.hooks import UnitHooks, cast_inputs
from ..zero.host_update import HostUpdate
from ..zero.loss_scale import LossScaler
from ..zero.optimizer import ShardedOptimizer
from ..zero.optimizer_choice import another, check_elementwise, record_like
from ..zero.policy import ZeroPolicy
from ..zero.released import ReleasedParameter
from ..zero.sequence import Unit, UnitSequence
from ..zero.shard_rest import ShardRest
from ..zero.torch_update import TorchUpdate
from ..zero.units import UnitPlan, plan_units
from .archive.agreement import no_rank_alone
from .archive.full_values import FullValues
from .config.config import Config
from .config.elastic import first_world_size
from .deferred import DeferredModel
from .driver import Driver
from .engine import Engine
from .fusing import check_kernels, fuse_modules, optimizer_backend
from .learning_rates import Schedule, scheduler_for
from .lr_schedule import learning_rate_at
from .offload import activation_store, host_update, model_is_apart, offloaded_states, shard_rest
from .parts import Parts
from .pipeline import PIPE, Pipeline, PipelinePlan
from .whole_model import WholeModel

_STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}

OptimizerChoice = torch.optim.Optimizer | type[torch.optim.Optimizer] | Callable[[Any], torch.optim.Optimizer] | None
Values = Iterator[tuple[nn.Parameter, Tensor]]


def initialize(
    model: nn.Module | Callable[[], nn.Module],
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    optimizer: OptimizerChoice = None,
    lr_scheduler: Any = None,
    sample_batch: Any = None,
) -> Engine:
    """An engine that trains `model` as the config says.

    model: a module, or a callable without arguments that builds one; then no rank ever holds the whole.
    config: a JSON file, the name of a preset such as "zero3", a dictionary, or a `lowtide.Config`.
    loss_fn(output, batch) -> loss; without it the model's output is the loss, or has it as .loss, ["loss"] or [0].
    optimizer: in place of the config's: an optimizer over the model's parameters, a torch optimizer class, or a
    callable from parameters to an optimizer; it must treat every element by itself.
    lr_scheduler: in place of the config's: a callable from the optimizer to a scheduler, or a scheduler of the given
    optimizer.
    sample_batch: a batch, small or not, with which a pipeline sees how the model runs: needed for pipeline.balance
    "time" alone.

    Raises ConfigError (config), ValueError (model, optimizer), OffloadError (room for what is offloaded) and
    RuntimeError (ranks that do not fit together). What one rank cannot do is an error on all.
    """
    checked = Config.load(config)
    world = World.join(checked.device, checked.communication.timeout_seconds)
    ledger = Ledger()
    try:
        return _make_engine(checked, world, ledger, model, loss_fn, optimizer, lr_scheduler, sample_batch)
    except BaseException:
        ledger.close()
        world.leave()  # the others hear of it where they wait for this rank, and the next engine starts anew
        raise


def _make_engine(
    checked: Config,
    world: World,
    ledger: Ledger,
    model: nn.Module | Callable[[], nn.Module],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    optimizer: OptimizerChoice,
    lr_scheduler: Any,
    sample_batch: Any,
) -> Engine:
    if world.device.type == "cpu":
        keep_heap()
    resolved = checked.resolve(world.size, first_world_size(os.environ, world.size))
    world.watch(resolved.communication.step_timeout_seconds)
    if resolved.seed is not None:
        torch.manual_seed(resolved.seed)
    module, values = _module_and_values(model, world)
    _check_model(module)
    _check_ranks_agree(world, resolved, module)
    _log_notes(world, resolved)
    check_kernels(resolved, world.device)
    fuse_modules(module, resolved, world, ledger)

    policy = ZeroPolicy.from_stage(resolved.zero_optimization.stage)
    dtypes = _dtypes(resolved, module)
    patterns = resolved.zero_optimization.units
    unit_plans = plan_units(module, None if patterns == "auto" else patterns)
    pipe_size = resolved.parallel.pipeline
    pipeline_plan = PipelinePlan.of(resolved, world, module, sample_batch, loss_fn) if pipe_size > 1 else None
    own_plans = unit_plans if pipeline_plan is None else pipeline_plan.own_units(unit_plans)
    arrangement = _arrangement(resolved, policy, world.size)
    domain = _domain(policy, arrangement)
    plan = ModelPlan.of(own_plans, dtypes, domain, arrangement)
    # Not those of an update in backward, which are given back at once, nor of a delayed one, which lie beside the next.
    zero = resolved.zero_optimization
    shares_gradients = not (policy.shards_states or zero.update_in_backward or zero.offload_optimizer.is_delayed)
    shared_bytes = plan.shared_bytes(dtypes, world.size, shares_gradients)
    if pipe_size > 1:
        shared_bytes = sum(world.gather_objects(shared_bytes)) // arrangement.size(arrangement.data)
    with no_rank_alone(world, "lowtide.initialize"):
        rest = shard_rest(resolved, world)
        if rest is not None:
            rest.reserve(plan.shard_bytes)
    moves_pages = rest is not None and not model_is_apart(world)
    route = "sockets" if moves_pages and world.size > 1 else resolved.communication.route
    mesh = Mesh.create(world, arrangement, route, shared_bytes, messages=PIPE, folds=[domain.states])
    _log_one_copy(mesh, domain, zero.partition_size)
    host = host_update(resolved, world)
    units = build_units(plan, mesh, policy, dtypes, rest, shares_gradients, zero.offload_optimizer.is_delayed, host)
    with no_rank_alone(world, "lowtide.initialize"):
        sharded_optimizer, schedule, scheduler = _make_optimizer(
            resolved, world, units, module, optimizer, lr_scheduler, rest, host
        )
    _fill(module, units, sharded_optimizer, mesh, values, dtypes)
    _checkpoint_activations(unit_plans, resolved.activation_checkpointing.every, ledger)
    with no_rank_alone(world, "lowtide.initialize"):
        activation_offload, close_last = _offload_activations(resolved, world, module, units)
    if pipeline_plan is not None:
        driver: Driver = Pipeline(
            pipeline_plan, resolved, mesh, module, units, policy.frees_parameters, loss_fn, ledger
        )
    else:
        sequence = UnitSequence(units, _prefetch_numel(resolved), world.progress)
        on_block = activation_offload.begin_block if activation_offload else None
        UnitHooks(sequence, policy.frees_parameters, ledger, on_block)
        if world.device.type == "cpu":  # elsewhere the copy that it saves costs less than its Python
            DirectGradients(sequence, module.modules(), ledger)
        driver = WholeModel(module, sequence, loss_fn, activation_offload or nullcontext(), world.progress)
    casts_inputs = resolved.bf16.auto_cast if resolved.bf16.enabled else resolved.fp16.auto_cast
    if dtypes.compute is not None and casts_inputs and _has_wide_buffers(module):
        cast_inputs([unit.module for unit in unit_plans if not unit.is_rest], dtypes.compute, ledger)
    given = (checked.train_batch_size, checked.train_micro_batch_size_per_gpu, checked.gradient_accumulation_steps)
    return Engine(
        Parts(
            config=resolved,
            mesh=mesh,
            module=module,
            driver=driver,
            optimizer=sharded_optimizer,
            loss_scaler=_loss_scaler(resolved),
            input_dtype=dtypes.compute if casts_inputs else None,
            schedule=schedule,
            lr_scheduler=scheduler,
            rows_per_microbatch=resolved.train_micro_batch_size_per_gpu if any(given[:2]) else None,
            ledger=ledger,
            close_last=close_last,
        )
    )


def _arrangement(config: Config, policy: ZeroPolicy, world_size: int) -> Arrangement:
    """The axes of the job: the ranks of a pipeline place are data-parallel, in groups that shard.

    Such a group may consist of several that hold all parameters each: the places of "secondary".
    """
    pipe_size, zero = config.parallel.pipeline, config.zero_optimization
    data_size = world_size // pipe_size
    states_size = policy.shard_size(data_size, zero.shard_size)
    shard_size = zero.partition_size if zero.partition_size > 1 else states_size
    sizes = (
        (PIPE, pipe_size),
        ("replica", data_size // states_size),
        ("secondary", states_size // shard_size),
        ("shard", shard_size),
    )
    return Arrangement(sizes, data=("replica", "secondary", "shard"))


def _domain(policy: ZeroPolicy, arrangement: Arrangement) -> Domain:
    states = ("shard", "secondary") if policy.shards_states else ()
    return Domain(states, parameters=("shard",) if policy.frees_parameters else (), summed=arrangement.data)


# -- the model ----------------------------------------------------------------------------------------------------


def _module_and_values(model: nn.Module | Callable[[], nn.Module], world: World) -> tuple[nn.Module, Values]:
    if isinstance(model, nn.Module):
        return model, _values_of(model, world)
    if not callable(model):
        raise ValueError(f"model: expected an nn.Module or a callable that builds one, found {type(model).__name__}")
    torch.set_rng_state(world.broadcast_object(torch.get_rng_state()))  # every rank replays the same random numbers
    deferred = DeferredModel(model)
    return deferred.module, deferred.values()


def _values_of(module: nn.Module, world: World) -> Values:
    """Rank 0's parameters, each once."""
    for param in module.parameters():
        yield param, world.broadcast_tensor(param.detach())


def _check_model(module: nn.Module) -> None:
    attributes = (value for part in module.modules() for value in part.__dict__.values())
    absent = next((value for value in attributes if isinstance(value, Absent)), None)
    if absent is not None:
        raise ValueError(
            "model: expected a whole one, found one that an earlier engine has split over a pipeline "
            f"('{absent.origin}' is on another rank); build it again, or give initialize the callable that builds it"
        )
    params = list(module.named_parameters())
    if not params:
        raise ValueError(f"model: expected a module with parameters, found {type(module).__name__} without any")
    if not any(param.requires_grad for _, param in params):
        raise ValueError(
            f"model: expected at least one parameter that requires a gradient, found {len(params)} that do not; "
            "call requires_grad_(True) on what is to be trained"
        )
    released = [name for name, param in params if isinstance(param, ReleasedParameter)]
    if released:
        raise ValueError(
            f"model: expected parameters with values, found '{released[0]}', of which an earlier engine, or one that "
            "could not be made, has left its shards alone; build the model again, or give initialize the callable that "
            "builds it"
        )
    complex_names = [name for name, param in params if param.is_complex()]
    if complex_names:
        raise ValueError(
            f"model: expected real parameters, found complex ones: {', '.join(complex_names[:5])}; "
            "store them as a real tensor with a last dimension of 2 and use torch.view_as_complex in forward"
        )
    on_meta = [name for name, param in params if param.is_meta]
    if on_meta:
        raise ValueError(
            f"model: expected parameters with values, found '{on_meta[0]}' on the meta device; give initialize the "
            "callable that builds the model, it takes care of that"
        )


def _check_ranks_agree(world: World, config: Config, module: nn.Module) -> None:
    """Raises RuntimeError, with both sides, where another rank has another config or model."""
    params = {
        name: f"{tuple(param.shape)} {param.dtype}{'' if param.requires_grad else ' frozen'}"
        for name, param in module.named_parameters()
    }
    settings = {key: repr(value) for key, value in config.model_dump(mode="json").items()}
    digest = hashlib.sha256(repr((params, settings)).encode()).hexdigest()
    if len(set(world.gather_objects(digest))) == 1:
        return
    everyone = world.gather_objects((settings, params))
    for what, index in (("config", 0), ("model", 1)):
        for rank, described in enumerate(everyone):
            ours, theirs = everyone[0][index], described[index]
            keys = [key for key in (*ours, *theirs) if ours.get(key) != theirs.get(key)]
            if keys:
                shown = "; ".join(
                    f"{key}: rank 0 has {ours.get(key, 'nothing')}, rank {rank} has {theirs.get(key, 'nothing')}"
                    for key in dict.fromkeys(keys[:3])
                )
                raise RuntimeError(
                    f"the ranks have different {what}s: {shown}. All ranks must pass the same {what} to initialize."
                )


def _fill(
    module: nn.Module, units: list[Unit], optimizer: ShardedOptimizer, mesh: Mesh, values: Values, dtypes: Dtypes
) -> None:
    """Puts the model's values into the shards; the model's own memory is given back on the way."""
    writer = FullValues(module, units, optimizer, mesh)
    place = {id(p): (group, i) for unit in units for group in unit.groups for i, p in enumerate(group.params)}
    with torch.no_grad():
        for param, value in values:
            if id(param) in place:  # else it is of another stage of the pipeline
                group, index = place[id(param)]
                writer.write(group, index, value)
            # Of another stage too: what is not here still tells the dtype in which it is computed.
            param.data = torch.zeros((), dtype=dtypes.of(param), device=param.device).expand(param.shape)
        _prepare_buffers(module, mesh)
        writer.refresh()
        for unit in units:
            for group in unit.groups:
                group.install()
                group.release()


def _prepare_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Rank 0's buffers, on the device. They keep their types: an angle or a running mean in bf16 is another one."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = mesh.world.broadcast_tensor(buffer).to(mesh.world.device)


def _has_wide_buffers(module: nn.Module) -> bool:
    """Whether what is computed with a buffer may be float32 though the parameters are not."""
    owners = (part for part in module.modules() if not isinstance(part, _NormBase))
    return any(buffer.dtype == torch.float32 for part in owners for buffer in part.buffers(recurse=False))


def _checkpoint_activations(units: list[UnitPlan], every: int, ledger: Ledger) -> None:
    """Recomputes every `every`-th block in backward. Hooks lie outside of what is recomputed, so they run once."""
    if not every:
        return
    for unit in [unit for unit in units if not unit.is_rest][::every]:
        ledger.override(unit.module, "forward", partial(checkpoint, unit.module.forward, use_reentrant=False))


def _offload_activations(
    config: Config, world: World, module: nn.Module, units: Sequence[Unit]
) -> tuple[ActivationOffload | None, Sequence[Callable[[], None]]]:
    """What moves activations, and what is to be closed at the end."""
    store = activation_store(config, world)
    if store is None:
        return None, ()
    wanted = config.activation_checkpointing.offload
    kept = [*(group.full for unit in units for group in unit.groups), *module.buffers()]
    offload = ActivationOffload(store, wanted.min_bytes, wanted.budget_bytes, in_storages_of(kept))
    return offload, (offload.close, store.close)


# -- optimizer, schedule, numbers -----------------------------------------------------------------------------------


def _make_optimizer(
    config: Config,
    world: World,
    units: list[Unit],
    module: nn.Module,
    choice: OptimizerChoice,
    lr_scheduler: Any,
    rest: ShardRest | None,
    host: HostUpdate | None,
) -> tuple[ShardedOptimizer, Schedule | None, Any]:
    if choice is not None and config.optimizer is not None:
        raise ValueError(
            f'optimizer: found one in the config ("{config.optimizer.type}") and one passed to initialize; '
            "leave one out"
        )
    if lr_scheduler is not None and config.scheduler is not None:
        raise ValueError(
            f'scheduler: found one in the config ("{config.scheduler.type}") and one passed to initialize; '
            "leave one out"
        )
    gradients = [gradient for unit in units for gradient in unit.gradients]
    trained = [param for param in module.parameters() if param.requires_grad]
    if choice is None:
        if config.optimizer is None:
            raise ValueError(
                'optimizer: expected one in the config, for example {"type": "adamw", "params": {"lr": 1e-3}}, or one '
                "passed to initialize(..., optimizer=...); found neither"
            )
        options, record = config.optimizer.options, OPTIMIZERS[config.optimizer.type]
        groups: list[dict[str, Any]] = [{"params": trained, **options}]
        state_dtype = _state_dtype(config, gradients)
        update: FusedUpdate | TorchUpdate = FusedUpdate(record, options, state_dtype, optimizer_backend(config))
    else:
        own = choice if isinstance(choice, torch.optim.Optimizer) else _call(choice, trained)
        _check_covers(own, trained)
        groups, update = own.param_groups, _update_like(own, optimizer_backend(config))
    if update.has_rule and (host is not None or world.device.type == "cpu"):
        cpu_kernel()  # built now rather than in the first step, which would seem to hang for a second
    offloaded = offloaded_states(config, world, update.has_rule)
    sharded = ShardedOptimizer(gradients, groups, update, offloaded, rest, host)
    schedule = None
    if config.scheduler is not None:
        schedule = partial(learning_rate_at, config.scheduler)
    return sharded, schedule, scheduler_for(sharded, lr_scheduler)


def _state_dtype(config: Config, gradients: Sequence[GroupGradient]) -> torch.dtype:
    assert config.optimizer is not None
    name = config.optimizer.state_dtype
    wide = [gradient.group.name for gradient in gradients if gradient.group.dtype == torch.float64]
    if name != "fp32" and wide:
        raise ValueError(
            f'optimizer.params.state_dtype: "{name}" needs parameters of at most float32, found float64 in {wide[0]}; '
            'use "fp32", with which the states have the dtype of the parameters'
        )
    return _STATE_DTYPES[name]


def _call(make: Callable[[Any], torch.optim.Optimizer], params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return make(params)


def _update_like(own: torch.optim.Optimizer, backend: Backend) -> FusedUpdate | TorchUpdate:
    """What does to shards what the optimizer does to its parameters. Raises ValueError where nothing can."""
    record = record_like(own)
    if record is not None:
        return FusedUpdate(record, dict(own.param_groups[0]), torch.float32, backend)
    factory = partial(another, own)
    check_elementwise(factory)
    return TorchUpdate(factory)


def _check_covers(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
    covered = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missing = sum(id(param) not in covered for param in trained)
    extra = len(covered - {id(param) for param in trained})
    if missing or extra:
        raise ValueError(
            f"optimizer: expected one over exactly the {len(trained)} parameters of the model that require "
            f"gradients, found {missing} of them left out and {extra} others; freeze what is not to be trained with "
            "requires_grad_(False)"
        )


def _dtypes(config: Config, module: nn.Module) -> Dtypes:
    compute = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None
    reduce, accumulate = _DTYPES[config.communication_data_type], _DTYPES[config.data_types.grad_accum_dtype]
    return Dtypes(compute, reduce, accumulate, frozenset(map(id, _beside_statistics(module))))


def _beside_statistics(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of batch norms: torch takes them in the type of the running statistics alone, whatever the input's."""
    for part in module.modules():
        if isinstance(part, _NormBase) and part.running_mean is not None:
            yield from part.parameters(recurse=False)


def _prefetch_numel(config: Config) -> int:
    """Elements that may be gathered ahead of their use; with offloaded parameters within the budget of live ones."""
    zero = config.zero_optimization
    if not zero.offloads_parameters or zero.stage3_max_live_parameters is None:
        return zero.stage3_prefetch_bucket_size
    return min(zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters)


def _loss_scaler(config: Config) -> LossScaler:
    fp16 = config.fp16
    if not fp16.enabled:
        return LossScaler()
    dynamic = fp16.loss_scale == 0
    return LossScaler(
        scale=2.0**fp16.initial_scale_power if dynamic else fp16.loss_scale,
        dynamic=dynamic,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


def _log_one_copy(mesh: Mesh, domain: Domain, partition: int) -> None:
    if partition > 1 and mesh.over(domain.states).route.copies_are_shared and not mesh.world.rank:
        why = "its ranks share the memory of one host, which has one copy of the parameters that nobody gathers"
        logger.info("config: zero_optimization.zero_hpz_partition_size: %d has no effect here: %s", partition, why)


def _log_notes(world: World, config: Config) -> None:
    if world.rank == 0:
        configure()
        for note in config.notes:
            logger.info("config: %s", note)
