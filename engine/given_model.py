"""The model as the caller gave it: its parameters' values, and whether it can be trained."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ..comm import World
from ..pipe.split.absent import Absent
from ..zero.released import ReleasedParameter
from .config.config import Config
from .deferred import DeferredModel
from .optimizer_plan import OptimizerPlan

Values = Iterator[tuple[nn.Parameter, Tensor]]


def module_and_values(model: nn.Module | Callable[[], nn.Module], world: World) -> tuple[nn.Module, Values]:
    """The module, and rank 0's value of each parameter, one at a time. Raises ValueError for what is neither."""
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


def check_model(module: nn.Module) -> None:
    """Raises ValueError for a module that cannot be trained, or not as it is."""
    attributes = (value for part in module.modules() for value in part.__dict__.values())
    absent = next((value for value in attributes if isinstance(value, Absent)), None)
    if absent is not None:
        raise ValueError(
            "model: expected a whole one, found one that an earlier engine has split over a pipeline "
            f"('{absent.origin}' is on another rank); build it again, or give initialize the callable that builds it"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"model: expected a module of Python, found a {type(module).__name__}, on which torch.jit lets no hook be "
            "put; give initialize the module that was compiled"
        )
    params = list(module.named_parameters())
    unmade = [name for name, param in params if isinstance(param, nn.UninitializedParameter)]
    if unmade:
        raise ValueError(
            f"model: expected parameters with shapes, found '{unmade[0]}' of a lazy module that has not seen an input; "
            "call the model on a batch before initialize"
        )
    if not params:
        raise ValueError(f"model: expected a module with parameters, found {type(module).__name__} without any")
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


def check_ranks_agree(world: World, config: Config, module: nn.Module) -> None:
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


def check_optimizers_agree(world: World, module: nn.Module, optimizer: OptimizerPlan) -> None:
    """Raises RuntimeError where another rank's optimizer has other parameters, or has them in other groups."""
    index_of = {id(param): i for i, group in enumerate(optimizer.param_groups) for param in group["params"]}
    own = {
        name: f"in group {index_of[id(param)]}" if id(param) in index_of else "in no group"
        for name, param in module.named_parameters()
    }
    for rank, theirs in enumerate(everyone := world.gather_objects(own)):
        name = next((name for name, place in everyone[0].items() if theirs[name] != place), None)
        if name is not None:
            raise RuntimeError(
                f"the ranks have different optimizers: parameter '{name}' is {everyone[0][name]} on rank 0, "
                f"{theirs[name]} on rank {rank}. All ranks must pass the same groups to initialize."
            )
