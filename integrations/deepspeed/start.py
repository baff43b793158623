"""`initialize`: make an engine from DeepSpeed's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..engine.build import initialize as start_engine
from ..engine.config.config import Config
from ..engine.config.zero import ZeroConfig
from . import comm
from .config import DeepSpeedConfig, Source
from .divided import DividedModel, not_dividing
from .engine import DeepSpeedEngine, DeepSpeedOptimizerCallable, DeepSpeedSchedulerCallable
from .layers import PipelineModule, StagedModel
from .lr_schedules import SteppedScheduler, scheduler_of
from .messages import UsageError
from .operations import DeepSpeedCPUAdam, FusedAdam, FusedLion
from .owners import take_from_owner
from .parameters import refuse_moe_params, set_leaves_of
from .pipeline import PipelineEngine

Returned = tuple[DeepSpeedEngine, Any, Any, Any]


def initialize(
    args: Any = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | DeepSpeedOptimizerCallable | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any | DeepSpeedSchedulerCallable | None = None,
    distributed_port: int = comm.DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Source | None = None,
    mesh_param: Any = None,
    config_params: Source | None = None,
) -> Returned:
    """Return (engine, optimizer, loader of `training_data` or None, scheduler or None).

    args: an object with `deepspeed_config`, if `config` is not given.
    model: a module, a `PipelineModule`, or a callable that builds a module; no rank then holds all of it.
    optimizer: over parameters of the model, or a callable from parameters to an optimizer; overrides the config's.
    model_parameters: the trained parameters, or groups with options; None: all that require a gradient.
    lr_scheduler: over `optimizer`, or a callable from an optimizer to a scheduler; overrides the config's.
    mpu: must have a single rank of model parallelism; set `parallel` in the config for more.

    If the model has an engine already, that engine is destroyed; all ranks hold the full parameters meanwhile.
    Raises ConfigError, UsageError (for DeepSpeed's assertions) and the errors of lowtide.initialize.
    """
    if model is None:
        raise UsageError("deepspeed.initialize: expected a model, found none")
    _check_groups(mpu, mesh_param)
    source = _config_of(args, config if config is not None else config_params)
    # Before the config: its batch sizes depend on the number of ranks.
    comm.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    num_stages = model.num_pipeline_stages() if isinstance(model, PipelineModule) else 1
    settings = DeepSpeedConfig(source, num_stages=num_stages)
    _check_settled(settings, optimizer, lr_scheduler)
    if isinstance(model, nn.Module):
        refuse_moe_params(model.parameters())
        # An earlier engine may still hold the parameters, as shards.
        take_from_owner(model)
        set_leaves_of(model, settings.section("zero_optimization", "leaf_module") or {})
    if isinstance(model, PipelineModule) and settings.pipeline_checkpoint_interval > 0:
        model.set_checkpoint_interval(settings.pipeline_checkpoint_interval)
    _cast_buffers(settings, model)
    basic = _basic_optimizer(settings, model, optimizer, model_parameters)
    has_optimizer = basic is not None or settings.checked.optimizer is not None
    with _values_later(model) as source_of_values:
        engine = start_engine(
            source_of_values,
            _engine_config(settings, model, has_own=basic is not None, has_optimizer=has_optimizer),
            loss_fn=model.loss_of if isinstance(model, PipelineModule) else None,
            optimizer=basic,
            lr_scheduler=_scheduler_maker(settings, basic, lr_scheduler) if has_optimizer else None,
        )
    kind = PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine
    found = kind(engine, settings, basic, training_data, collate_fn, mpu)
    return found, found.optimizer, found.training_dataloader, found.lr_scheduler


@contextmanager
def _values_later(model: Any) -> Iterator[Any]:
    """Yield the model, or a `LaterModel` if ranks hold parts of it. Restores the model if no engine is made."""
    # Inside `zero.Init`, parameters that the engine makes would be divided.
    with not_dividing():
        later: DividedModel | StagedModel | None = None
        if isinstance(model, PipelineModule) and model.built_by:
            later = StagedModel(model)
        elif isinstance(model, nn.Module) and (divided := DividedModel(model)).is_divided:
            later = divided
        if later is None:
            yield model
            return
        try:
            yield later
        # Also for an interrupt: a half-made engine must not leave NaN in the caller's model.
        except BaseException:
            later.restore()
            raise


def _config_of(args: Any, config: Source | None) -> Source:
    """Return the config from `args` or the argument. Raises UsageError for none, or two."""
    named = None
    for key in ("deepscale_config", "deepspeed_config"):
        named = getattr(args, key, None) or named
    if named is not None and config is not None:
        raise UsageError("config: found both args.deepspeed_config and a config passed to initialize. Leave one out")
    if named is None and config is None:
        raise UsageError("config: expected initialize(config=...) or args with a deepspeed_config, found neither")
    found: Any = named if config is None else config
    source: Source = found
    return source


def _cast_buffers(settings: DeepSpeedConfig, model: Any) -> None:
    """Cast buffers to data_types.buffer_dtype, if it is given. Raises UsageError for a model that is not built yet."""
    dtype = settings.dtype_of_buffers
    if dtype is None:
        return
    if not isinstance(model, nn.Module):
        raise UsageError(
            "data_types.buffer_dtype: expected a model, found a callable that builds it. Cast the buffers in the "
            "callable, and remove the key"
        )
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _check_groups(mpu: Any, mesh_param: Any) -> None:
    for call in ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size"):
        size = getattr(mpu, call)() if hasattr(mpu, call) else 1
        if size > 1:
            raise NotImplementedError(
                f"mpu: expected one rank of model parallelism, found {size}. lowtide splits the layers itself: pass a "
                'whole model, and set "parallel": {"tensor": ' + str(size) + "} in the config"
            )
    if mesh_param is not None:
        raise NotImplementedError('mesh_param: expected none. Set "parallel": {"sequence": N} in the config instead')


def _check_settled(settings: DeepSpeedConfig, optimizer: Any, lr_scheduler: Any) -> None:
    """Raise UsageError for values that are still "auto", and for a scheduler without its optimizer."""
    if not settings.managed_gradient_accumulation and settings.resolved.parallel.pipeline > 1:
        raise UsageError(
            "managed_gradient_accumulation: expected true with a pipeline, found false. The schedule of a pipeline "
            "contains the microbatches of a step"
        )
    if settings.resolved.planned_keys:
        raise UsageError(
            f'config: expected values for {", ".join(settings.resolved.planned_keys)}, found "auto". Run '
            "`lowtide plan`, and write its values into the config"
        )
    if lr_scheduler is not None and not callable(lr_scheduler) and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"lr_scheduler: expected a callable from an optimizer to a scheduler, found a "
            f"{type(lr_scheduler).__name__} without its optimizer. Pass its optimizer too, or a callable"
        )


def _engine_config(settings: DeepSpeedConfig, model: Any, *, has_own: bool, has_optimizer: bool) -> Config:
    """Return lowtide's config. Without a pipeline, the batch keys go: `DeepSpeedEngine` counts the microbatches."""
    resolved = settings.resolved
    update: dict[str, Any] = {"scheduler": None, "steps_per_print": 0}
    if has_own:
        update["optimizer"] = None
    if not has_optimizer:
        # The engine then only evaluates, as in DeepSpeed, and these keys are for updates.
        update["gradient_clipping"] = 0.0
        offload_param = resolved.zero_optimization.offload_param
        plain = ZeroConfig().offload_optimizer
        update["zero_optimization"] = resolved.zero_optimization.model_copy(
            update={"offload_optimizer": plain, "offload_param": offload_param}
        )
    if not isinstance(model, PipelineModule):
        update |= {"train_batch_size": None, "gradient_accumulation_steps": 1}
        update["train_micro_batch_size_per_gpu"] = None
    return resolved.model_copy(update=update)


# -- scheduler and optimizer ------------------------------------------------------------------------------------------


def _scheduler_maker(
    settings: DeepSpeedConfig, basic: torch.optim.Optimizer | None, given: Any
) -> Callable[[torch.optim.Optimizer], SteppedScheduler] | None:
    """Return a function from the engine's optimizer to the scheduler: the caller's, or the config's over `basic`."""
    section = settings.resolved.scheduler
    if given is None and section is None:
        return None

    def make(sharded: torch.optim.Optimizer) -> SteppedScheduler:
        # The caller's scheduler acts on the caller's optimizer, and the engine takes the rates from it.
        of = sharded if basic is None else basic
        if given is None:
            made: Any = scheduler_of(section, of)
        else:
            made = given(of) if callable(given) else given
        return SteppedScheduler(made, lambda: int(settings.train_batch_size or 0))

    return make


def _basic_optimizer(
    settings: DeepSpeedConfig, model: Any, optimizer: Any, model_parameters: Iterable[Any] | None
) -> torch.optim.Optimizer | None:
    """Return the caller's optimizer, or the config's over the caller's groups. None: lowtide makes it, or none."""
    if isinstance(optimizer, torch.optim.Optimizer):
        # DeepSpeed drops groups without parameters too.
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer
    if not isinstance(model, nn.Module):
        if optimizer is not None or model_parameters is not None:
            raise UsageError(
                "initialize: expected no optimizer and no model_parameters with a callable that builds the model: its "
                "parameters do not exist yet. Set the optimizer in the config"
            )
        return None
    given = list(model.parameters() if model_parameters is None else model_parameters)
    if optimizer is not None:
        made: torch.optim.Optimizer = optimizer(given)
        return made
    section = settings.checked.optimizer
    groups = _trained(given)
    if section is None:
        return None
    # torch's classes know no other dtype of states, so lowtide must make the optimizer.
    is_plain = section.state_dtype == "fp32"
    found = _of_type(settings, section.type, groups, section.options) if is_plain else None
    if found is not None:
        return found
    everything = {id(param) for param in model.parameters() if param.requires_grad}
    if any(isinstance(group, Mapping) for group in groups) or {id(param) for param in groups} != everything:
        raise UsageError(
            f'model_parameters: optimizer "{section.type}" with these params needs all {len(everything)} parameters '
            f"that require a gradient, without groups; found {len(groups)} groups or parameters. Make the optimizer "
            "over them yourself, and pass it"
        )
    return None


def _of_type(
    settings: DeepSpeedConfig, kind: str, groups: list[Any], options: dict[str, Any]
) -> torch.optim.Optimizer | None:
    if kind in ("adam", "adamw"):
        decoupled = kind == "adamw"
        if settings.zero_use_cpu_optimizer:
            return DeepSpeedCPUAdam(groups, adamw_mode=decoupled, **options)
        return FusedAdam(groups, adam_w_mode=decoupled, **options)
    if kind == "sgd":
        return torch.optim.SGD(groups, **options)
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, **options)
    # Without groups the config's Lion does the same, and needs no class of torch.
    if kind == "lion" and any(isinstance(group, Mapping) for group in groups):
        return FusedLion(groups, **options)
    return None


def _trained(given: list[Any]) -> list[Any]:
    """Return parameters or groups without the frozen parameters."""
    found: list[Any] = []
    for group in given:
        if not isinstance(group, Mapping):
            found += [group] if group.requires_grad else []
            continue
        params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        if kept := [param for param in params if param.requires_grad]:
            found.append({**group, "params": kept})
    return found


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config, for `initialize(args=...)`, and return the parser."""
    group = parser.add_argument_group("DeepSpeed", "the engine, and its config")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script itself; the engine ignores it")
    group.add_argument("--deepspeed_config", type=str, default=None, help="the JSON config file")
    group.add_argument("--deepscale", action="store_true", help="the old name of --deepspeed")
    group.add_argument("--deepscale_config", type=str, default=None, help="the old name of --deepspeed_config")
    return parser
