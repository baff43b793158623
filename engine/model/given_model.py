"""The caller's model: whether it can be trained, whether ranks agree on it, and the values of its parameters."""

from __future__ import annotations

import gc
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...comm import World
from ...model.patches import ModelPatches
from ...pipe.split.absent import Absent
from ...watch.log import logger
from ...zero.released import ReleasedParameter
from ..archive.agreement import no_rank_alone
from ..blueprint.optimizer_plan import OptimizerPlan
from ..config.config import Config
from ..config.errors import quoted
from ..config.read import leaves
from .deferred import DeferredModel, LaterModel, build_in_files, move
from .recording import NotRecordedError

Values = Iterator[tuple[nn.Parameter, Tensor]]

_MESSAGE_BYTES = 1 << 18  # far below the size of a layer; a message for each norm and bias would be slow

_BUILDING = "lowtide.initialize: the model's callable"
_OPEN = "_lowtide_engine"  # attribute of an engine's modules: (id of the module, is it the model, its patches)
_DIVIDED = "_lowtide_divided"  # attribute of a model that has only parts of some layers: the axes
LossFn = Callable[[Any, Any], Tensor] | None
Model = nn.Module | Callable[[], nn.Module] | LaterModel


def module_and_values(model: Model, world: World) -> tuple[nn.Module, Values]:
    """Return the module, and rank 0's values, a parameter at a time. Raises ValueError for an invalid model."""
    if isinstance(model, nn.Module):
        return model, values_of(model.parameters(), world)
    if not callable(model) and not isinstance(model, LaterModel):
        raise ValueError(f"model: expected an nn.Module or a callable that builds one, found {type(model).__name__}")
    if isinstance(model, type) and issubclass(model, nn.Module) and (needed := _needed(model)):
        raise ValueError(
            f"model: expected an nn.Module or a callable without arguments that builds one, found the class "
            f"{model.__name__} with required arguments {', '.join(needed)}; pass an instance, {model.__name__}(...), "
            f"or lambda: {model.__name__}(...)"
        )
    draws = not isinstance(model, LaterModel) or model.random_state is not None
    if draws:
        torch.set_rng_state(world.broadcast_object(torch.get_rng_state()))  # every rank replays the same random numbers
    later: LaterModel
    if isinstance(model, LaterModel):
        later = model
    else:
        refusal: NotRecordedError | None = None
        with no_rank_alone(world, _BUILDING):
            try:
                later = DeferredModel(model)
            except NotRecordedError as error:
                refusal = error
        # If any rank cannot record, none does: `values_of` broadcasts, and a recorded model draws on each rank.
        refusal = next((one for one in world.gather_objects(refusal) if one is not None), None)
        if refusal is not None:
            module = _built_in_turn(model, world, refusal)
            return module, values_of(module.parameters(), world)
    if draws:
        later.random_state = world.broadcast_object(later.random_state)
    # Lazy: values come when the shards exist, about a parameter at a time.
    return later.module, chain(values_of(later.given, world), later.values())


def _built_in_turn(build: Callable[[], nn.Module], world: World, refusal: NotRecordedError) -> nn.Module:
    """Build the module on each rank, with values on rank 0 only. See [Note: built in files] in `deferred.py`."""
    if world.rank == 0:
        logger.info("model: built in memory-mapped files, by one rank of a host after the other: %s", refusal)
    peers = [rank for rank, host in enumerate(world.hosts) if host == world.hosts[world.rank]]
    module = None
    # Rank 0 is the last of its host, so that no rank builds while rank 0 holds its values.
    for turn in reversed(range(max(map(world.hosts.count, world.hosts)))):
        # A host may have fewer ranks than the turns. All ranks still take part in each barrier.
        with no_rank_alone(world, _BUILDING):
            if peers.index(world.rank) == turn:
                try:
                    module = build_in_files(build)
                except Exception as error:
                    error.add_note(f"It was called with memory: {refusal}")
                    raise
                if world.rank > 0:
                    for param in module.parameters():
                        move(param, torch.zeros((), dtype=param.dtype).expand(param.shape))
    assert module is not None
    return module


def _needed(cls: type) -> list[str]:
    """Return the required arguments of a class."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = inspect.signature(cls).parameters.values()
    return [one.name for one in given if one.default is one.empty and one.kind not in kinds]


def values_of(params: Iterable[nn.Parameter], world: World, source: int = 0) -> Values:
    """Yield the values of rank `source`. All tensors of a message are copied before its first value is yielded."""
    for several in _messages(params):
        yield from zip(several, world.broadcast_tensors([param.detach() for param in several], source), strict=True)


def _messages(params: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield consecutive parameters of a dtype within the message size, or a single larger parameter."""
    several: list[nn.Parameter] = []
    nbytes = 0  # of them
    for param in params:
        # `broadcast_tensors` joins the tensors of a message, so they need the same dtype.
        if several and (nbytes + param.nbytes > _MESSAGE_BYTES or param.dtype != several[0].dtype):
            yield several
            several, nbytes = [], 0
        several.append(param)
        nbytes += param.nbytes
    if several:
        yield several


def take(module: nn.Module, patches: ModelPatches) -> None:
    """Mark the module as an engine's until that engine closes. Raises ValueError if an open engine has it or a part of
    it.

    The mark holds for this object, not for copies of it. An engine without references is closed.
    """
    parts = dict(module.named_modules())
    _close_lost(parts.values())
    # A copy of a module has the note too, but another id.
    found = [name for name, part in parts.items() if part.__dict__.get(_OPEN, ())[:2] == (id(part), True)]
    if found or module.__dict__.get(_OPEN, ())[:2] == (id(module), False):
        what = f"its '{found[0]}'" if found and found[0] else f"this {type(module).__name__}"
        where = "the model" if found else "a part of the model"
        raise ValueError(
            f"model: expected a model without an engine, found that {what} is {where} of an open engine; close that "
            "engine first (engine.close(), destroy() in lowtide.deepspeed, or `with lowtide.initialize(...) as "
            "engine`), or build another model"
        )
    divided = next((one for part in parts.values() if (one := part.__dict__.get(_DIVIDED))), None)
    if divided is not None:
        raise ValueError(
            f"model: expected whole layers, found layers that an earlier engine divided over ranks ({divided}); build "
            "the model again, or pass initialize the callable that builds it"
        )
    for part in parts.values():
        patches.override(part, _OPEN, (id(part), part is module, patches))


def refuse_copy(protocol: object) -> NoReturn:
    """Refuse copy.deepcopy, pickle and torch.save of a module of an open engine."""
    raise TypeError(
        "a module of an open engine cannot be copied or pickled, since the engine's hooks are on it: copy it before "
        "lowtide.initialize; for its weights call engine.state_dict() or engine.export(folder) on all ranks, for an "
        "average of them (AveragedModel) engine.ema(decay)"
    )


def note_divided(module: nn.Module, how: str) -> None:
    """Mark a model with layers divided over ranks. The mark outlives the engine, also in copies of the model."""
    module.__dict__[_DIVIDED] = how


def _close_lost(parts: Iterable[nn.Module]) -> None:
    """Close engines without references. If ranks differ, the rank with a reference raises an error for all ranks."""
    noted = {note[2]: None for part in parts if (note := part.__dict__.get(_OPEN, ()))[:1] == (id(part),)}
    if noted:
        gc.collect()  # a reference cycle of the caller may still hold the engine
    for patches in noted:
        if patches.close_if_lost():
            logger.info("model: its earlier engine has no references left and is closed now")


def check_model(module: nn.Module) -> None:
    """Raise ValueError for a module that cannot be trained."""
    attributes = (value for part in module.modules() for value in part.__dict__.values())
    absent = next((value for value in attributes if isinstance(value, Absent)), None)
    if absent is not None:
        raise ValueError(
            "model: expected a whole model, found a model that an earlier engine has split over a pipeline "
            f"('{absent.origin}' is on another rank); build it again, or pass initialize the callable that builds it"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"model: expected a Python module, found a {type(module).__name__} without hooks; pass initialize "
            "the module before torch.jit"
        )
    params = list(module.named_parameters())
    unmade = [name for name, param in params if isinstance(param, nn.UninitializedParameter)]
    if unmade:
        raise ValueError(
            f"model: expected parameters with shapes, found '{unmade[0]}' of a lazy module; call the model on a batch "
            "before initialize"
        )
    if not params:
        raise ValueError(f"model: expected a module with parameters, found {type(module).__name__} without any")
    released = [name for name, param in params if isinstance(param, ReleasedParameter)]
    if released:
        raise ValueError(
            f"model: expected parameters with values, found that an earlier engine released '{released[0]}'; "
            "build the model again, or pass initialize the callable that builds it"
        )
    wrapped = [(name, param) for name, param in params if is_traceable_wrapper_subclass(param)]
    if wrapped:
        name, param = wrapped[0]
        raise ValueError(
            f"model: expected parameters with plain values, found '{name}' of class {type(param).__name__}; a flat "
            "buffer cannot hold it: pass initialize the model before it is quantized or distributed"
        )
    complex_names = [name for name, param in params if param.is_complex()]
    if complex_names:
        raise ValueError(
            f"model: expected real parameters, found complex parameters {', '.join(complex_names[:5])}; "
            "store them as a real tensor with a last dimension of 2 and use torch.view_as_complex in forward"
        )
    on_meta = [name for name, param in params if param.is_meta]
    if on_meta:
        raise ValueError(
            f"model: expected parameters with values, found '{on_meta[0]}' on the meta device; pass initialize the "
            "callable that builds the model; it needs no memory"
        )
    first: dict[int, tuple[str, nn.Parameter]] = {}  # address -> the first parameter there
    for name, param in params:
        other, at_address = first.setdefault(param.data_ptr(), (name, param)) if param.numel() else (name, param)
        # In torch each of them is updated by the gradients of both; shards have memory of their own.
        if other != name and (param.requires_grad or at_address.requires_grad):
            raise ValueError(
                f"model: expected parameters with memory of their own, found '{name}' in the memory of '{other}'; "
                "assign the parameter itself to tie them (b.weight = a.weight), or clone the tensor"
            )


def refuse_max_norm(module: nn.Module) -> None:
    """Raise ValueError for embeddings whose forward shrinks the rows of this rank's batch."""
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise ValueError(
                f"model: expected embeddings without max_norm, found '{name}' with max_norm={part.max_norm:g}: its "
                "forward would shrink rows of this rank's copy, not of the master weights; normalize the output"
            )


def check_ranks_agree(world: World, config: Config, module: nn.Module) -> None:
    """Raise RuntimeError, with both sides, if a rank has a different config or model."""
    params = {
        name: f"{tuple(param.shape)} {param.dtype}{'' if param.requires_grad else ' frozen'}"
        for name, param in module.named_parameters()
    }
    settings = {path: quoted(value) for path, value in leaves(config.model_dump(mode="json")).items()}
    digest = hashlib.sha256(repr((params, settings)).encode()).hexdigest()
    if len(set(world.gather_objects(digest))) == 1:
        return
    # Only now the whole texts, since they are large: all ranks have seen that digests differ.
    everyone = world.gather_objects((settings, params))
    for what, index in (("config", 0), ("model", 1)):
        for rank, described in enumerate(everyone):
            ours, theirs = everyone[0][index], described[index]
            keys = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
            if keys:
                sides = [
                    f"{key}: rank 0 has {ours.get(key, 'nothing')}, rank {rank} has {theirs.get(key, 'nothing')}"
                    for key in keys[:3]
                ]
                sides += [f"and {len(keys) - 3} more"] if len(keys) > 3 else []
                raise RuntimeError(
                    f"the ranks have different {what}s: {'; '.join(sides)}. "
                    f"All ranks must pass the same {what} to initialize."
                )


def check_optimizers_agree(world: World, module: nn.Module, optimizer: OptimizerPlan) -> None:
    """Raise RuntimeError if a rank's optimizer has different parameters or groups."""
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
