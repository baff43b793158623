"""Torch optimizers of the user: finds our equivalent, or updates shards with the torch optimizer itself."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..kernels.weight_rounding import rounded_weights
from ..offload import Memory
from ..optimizers import OPTIMIZERS
from ..optimizers.optimizer import Optimizer, Options
from .fused_update import ScalarStates, UpdateTerms, takes_options
from .layout import BLOCK_NUMEL, ParamShard
from .master_weights import MasterWeights
from .shard_state import ShardChunk, ShardState, StateView

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_ADDED = "added options"
"""The scalar state with the values that steps have added to a parameter group, such as a count."""


def record_like(optimizer: torch.optim.Optimizer) -> Optimizer | None:
    """Return our optimizer that does the same as this torch optimizer with all its options, or None."""
    updates = _class_that_updates(type(optimizer))
    twins = _torch_twins()
    if updates not in twins:
        return None
    # AdamW is Adam with a different default of an option, so the options decide between them.
    alike = [record for twin, record in twins.items() if issubclass(twin, updates) or issubclass(updates, twin)]
    fitting = (record for record in alike if all(takes_options(record, options) for options in optimizer.param_groups))
    record = next(fitting, None)
    if record is None:
        return None
    kept = {record.states_for(options) for options in optimizer.param_groups}
    return record if len(kept) == 1 else None


def _torch_twins() -> dict[type[torch.optim.Optimizer], Optimizer]:
    return {record.torch_twin: record for record in OPTIMIZERS.values() if record.torch_twin is not None}


def _class_that_updates(cls: type) -> type:
    """Return the class, or the base class that it extends with no more than an `__init__`."""
    twins = _torch_twins()
    while cls not in twins and not any(_is_changed(cls, name) for name in vars(cls)):
        cls = cls.__mro__[1]
    return cls


def _is_changed(cls: type, name: str) -> bool:
    if name == "step":  # torch wraps `step` for each class
        return inspect.unwrap(vars(cls)[name]) is not inspect.unwrap(getattr(cls.__mro__[1], name))
    return not (name.startswith("__") and name.endswith("__"))


class _NotMadeAgainError(ValueError):
    """The class cannot be constructed for other parameters."""


def another(template: torch.optim.Optimizer, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Construct an optimizer of the same class and options for other parameters. Raises ValueError if it refuses."""
    options = {key: value for key, value in template.param_groups[0].items() if key != "params"}
    taken = inspect.signature(type(template)).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    given = {key: value for key, value in template.defaults.items() if key != "params" and (takes_all or key in taken)}
    try:
        copy = type(template)(params, **given)
    except TypeError as error:
        raise _NotMadeAgainError(
            "optimizer: expected a class that can be constructed for the shards of a rank, found "
            f"{type(template).__name__}, whose __init__ fails with the parameters and the options in its defaults: "
            f"{error}. Give all further arguments defaults"
        ) from error
    # The group may differ from the defaults that the constructor got.
    copy.param_groups[0].update(options)
    return copy


def check_elementwise(factory: OptimizerFactory) -> None:
    """Raise ValueError unless the optimizer is elementwise, so that it can update shards.

    Tries a small matrix: three steps on the whole, on its flat halves, and on a half alone must give the same values.
    """
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(8, BLOCK_NUMEL // 8, generator=generator)
    gradients = [torch.randn(whole.shape, generator=generator) for _ in range(3)]
    half = whole.numel() // 2
    results = []
    name = "the optimizer"
    for shapes in ([whole.shape], [(half,), (half,)], [(half,)]):
        params = [nn.Parameter(part) for part in _cut(whole, shapes)]
        try:
            optimizer = factory(params)
            name = type(optimizer).__name__
            options = dict(optimizer.param_groups[0])
            for gradient in gradients:
                for param, part in zip(params, _cut(gradient, shapes), strict=True):
                    param.grad = part
                optimizer.step()
        except _NotMadeAgainError:
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ValueError(
                f"optimizer: expected a torch optimizer that updates each element by itself, found {name}, "
                f"which failed on a flat parameter: {error}"
            ) from error
        results.append(torch.cat([param.detach().flatten() for param in params]))
        if fault := _fault(optimizer, params[0], options):
            raise ValueError(
                f"optimizer: expected a torch optimizer that updates each element by itself, found {name}, {fault}. "
                "Use an elementwise optimizer (AdamW, SGD, Lion, ...)."
            )
    # Not bitwise: vector loops may round the ends of a flat parameter differently.
    if not all(torch.allclose(results[0][: one.numel()], one, rtol=1e-6, atol=1e-9) for one in results):
        raise ValueError(
            f"optimizer: expected a torch optimizer that updates each element by itself, found {name}. Its result "
            "depends on the shape of the parameter or on other elements, so it cannot update shards. Use an "
            "elementwise optimizer (AdamW, SGD, Lion, ...)."
        )


def _cut(values: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Copy the first elements into tensors of these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.split(values.flatten()[: sum(sizes)].clone(), sizes)
    return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]


def _fault(optimizer: torch.optim.Optimizer, param: nn.Parameter, options: Mapping[str, Any]) -> str:
    """Return which value its steps keep where shards or checkpoints lose it; empty: none. options: before the steps."""
    for key, value in optimizer.param_groups[0].items():
        # The options of the caller's groups, which no step changes, replace those of shards.
        if value is not options.get(key, value):
            return f"whose step() changes the option '{key}' of its parameter group"
    if beside := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        return f"whose state[{beside[0]!r}] belongs to no parameter"
    for name, value in optimizer.state[param].items():
        shapes = [v.shape for v in tree_leaves(value) if isinstance(v, Tensor) and v.numel() > 1]
        if shapes not in ([], [param.shape]):
            return f"whose state '{name}' has tensors of the shapes {[*map(tuple, shapes)]} for {tuple(param.shape)}"
    return ""


@dataclass(frozen=True)
class _Flat:
    """A run of a shard, or a single parameter of it, as a flat parameter of an inner optimizer."""

    run: ShardChunk
    options: dict[str, Any]  # a parameter group of the inner optimizer
    parameter: int | None = None  # index in the group, if it is a single parameter

    @property
    def param(self) -> nn.Parameter:
        (param,) = self.options["params"]
        assert isinstance(param, nn.Parameter)
        return param


@dataclass(frozen=True)
class _Inner:
    """The inner torch optimizer of a shard's runs."""

    optimizer: torch.optim.Optimizer
    flats: list[_Flat]
    option_names: frozenset[str]  # of a new group; steps may add more

    def state_of(self, flat: _Flat) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state[flat.param]
        return state

    def cut(self, param_shards: Sequence[ParamShard], wanted: Collection[int]) -> None:
        """Split the `wanted` parameters off as flat parameters, with their part of the states.

        Each includes the padding up to the next piece, as runs do.
        """
        if not wanted:
            return
        index_at = {one.offset_in_shard: one.index for one in param_shards if one.index in wanted}
        edges = {*index_at, *(after.offset_in_shard for one, after in pairwise(param_shards) if one.index in wanted)}
        self.flats[:] = [part for flat in self.flats for part in self._parts(flat, edges, index_at)]
        self.optimizer.param_groups[:] = [flat.options for flat in self.flats]

    def _parts(self, flat: _Flat, edges: Collection[int], index_at: Mapping[int, int]) -> Iterator[_Flat]:
        run, param = flat.run, flat.param
        inside = sorted(edge for edge in edges if run.start < edge < run.end)
        if not inside:
            yield replace(flat, parameter=index_at.get(run.start, flat.parameter))
            return
        state = self.optimizer.state.pop(param, {})
        for low, high in pairwise([run.start, *inside, run.end]):
            inner = slice(low - run.start, high - run.start)
            part = nn.Parameter(param.data[inner])
            if state:
                self.optimizer.state[part] = {
                    name: v[inner] if _is_elementwise(v, param) else copy.deepcopy(v) for name, v in state.items()
                }
            yield _Flat(replace(run, start=low, end=high), {**flat.options, "params": [part]}, index_at.get(low))


class TorchUpdate:
    """Updates each run of a shard as a flat parameter of a torch optimizer that the factory makes.

    A parameter that was unused in a step becomes a separate flat parameter from then on, as torch counts its steps. It
    has the methods of `FusedUpdate`. Its states are in memory, and known after the first step.
    """

    has_rule = False
    waits_for_norm = True
    deciding_options = ()  # it follows all options

    def __init__(
        self,
        factory: OptimizerFactory,
        param_groups: Sequence[Options],
        masters: MasterWeights = MasterWeights.WIDER,
        seed: int = 0,
    ) -> None:
        """param_groups: the caller's list. masters: WIDER or NONE. seed: of random rounding without masters."""
        self.masters = masters
        self.seed = seed
        self._factory = factory
        self._param_groups = param_groups
        self._first: dict[int, dict[str, torch.dtype]] = {}  # by index in param_groups, as `_first_dtypes`
        self._inner: dict[int, _Inner] = {}  # by id of the shard

    @property
    def name(self) -> str:
        return type(self._factory([nn.Parameter(torch.zeros(1))])).__name__

    def lacks_state(self, options: Options) -> bool:
        return False

    def takes(self, options: Options) -> bool:
        return True

    def can_take(self, kind: str, states: Collection[str]) -> bool:
        return kind == self.name

    def new_states(self, master: Tensor, options_index: int = 0) -> dict[str, Tensor]:
        return {}

    def update(
        self, shard: ShardState, parts: Callable[[], Iterable[StateView]], gradient: Tensor, terms: UpdateTerms
    ) -> None:
        (whole,) = parts()
        inner = self._inner.get(id(shard)) or self._make_inner(shard)
        params = shard.group.params
        # bfloat16 without masters is updated in float32, a temporary copy of the shard.
        master = whole.master if shard.form.rounding is None else whole.master.float()
        inner.cut(shard.group.param_shards, {index for index, param in enumerate(params) if id(param) in terms.unused})
        for flat in inner.flats:
            param = flat.param
            _take_options(flat.options, terms.options[flat.run.options_index])
            # Each step anew: an offloaded shard and a delayed update come in different memory.
            param.data = master[flat.run.start : flat.run.end]
            if flat.parameter is None or id(params[flat.parameter]) not in terms.unused:
                # A copy, as ranks may share the gradient's memory.
                param.grad = gradient[flat.run.start : flat.run.end].to(master.dtype) * terms.gradient_scale
        inner.optimizer.step()
        for flat in inner.flats:
            # Else the copy of the gradient would live until the next step.
            flat.param.grad = None
            if shard.form.rounding is not None:
                # The float32 copy of the shard is for this step alone.
                flat.param.data = whole.master[flat.run.start : flat.run.end]
        if shard.form.rounding is not None:
            noise = shard.form.rounding.noise(master.numel(), terms.step, master.device)
            whole.master.copy_(rounded_weights(master, noise))
        if whole.rounded is not None:
            whole.rounded.copy_(whole.master)

    def states_of(self, shard: ShardState, param_shard: ParamShard, changes: bool) -> dict[str, Memory]:
        """Return the states of a piece. Zeros if the parameter has none yet, which `scalar_states` reports."""
        inner = self._inner_of(shard)
        flat = next(one for one in inner.flats if one.run.start <= param_shard.offset_in_shard < one.run.end)
        state = inner.state_of(flat)
        # A load fills the states that `make_states` has made: writes to zeros that nobody keeps would be lost.
        if not state and changes:
            return {}
        if not state:
            return {
                name: torch.zeros(
                    param_shard.numel, dtype=_wide(flat.param.dtype) if dtype.is_floating_point else dtype
                )
                for name, dtype in self._first_dtypes(flat.run.options_index).items()
            }
        low = param_shard.offset_in_shard - flat.run.start
        return {name: v[low : low + param_shard.numel] for name, v in state.items() if _is_elementwise(v, flat.param)}

    def make_states(
        self, shard: ShardState, dtypes: Mapping[str, Mapping[str, torch.dtype]], scalars: ScalarStates
    ) -> None:
        inner = self._make_inner(shard)
        names = shard.group.layout.names
        inner.cut(shard.group.param_shards, {index for index, name in enumerate(names) if name in scalars})
        for flat in inner.flats:
            param, state = flat.param, inner.state_of(flat)
            index = flat.parameter
            if index is None:
                # A run has the same states throughout, so its first parameter shows them.
                index = next(one.index for one in shard.group.param_shards if one.offset_in_shard >= flat.run.start)
            of_group = scalars.get(flat.run.options_index) or {}
            flat.options.update(of_group.get(_ADDED, {}))
            kept = scalars.get(names[index], of_group)
            if kept is None:
                state.clear()
                continue
            for name, dtype in dtypes.get(names[index], {}).items():
                own_dtype = _wide(param.dtype) if dtype.is_floating_point else dtype
                state[name] = torch.zeros_like(param, dtype=own_dtype)
            for name, value in kept.items():
                if name != _ADDED:
                    state[name] = value.clone() if isinstance(value, Tensor) else value

    def forget_states(self, shard: ShardState) -> None:
        self._inner.pop(id(shard), None)

    def reset_states(self, shard: ShardState, index: int) -> None:
        """Clear the states of parameter `index` of the group, as before its first step."""
        if id(shard) in self._inner:
            inner = self._inner[id(shard)]
            inner.cut(shard.group.param_shards, {index})
            for flat in inner.flats:
                if flat.parameter == index:
                    inner.state_of(flat).clear()

    def scalar_states(self, shard: ShardState, missed: Mapping[int, int]) -> ScalarStates:
        """Return the states that are not elementwise, mostly the step. missed: as in `UpdateTerms`."""
        found: dict[int | str, dict[str, Any] | None] = {}
        inner = self._inner_of(shard)
        # An update in the backward leaves out a shard that nobody has used, so `update` did not see its parameters.
        params = shard.group.params
        inner.cut(shard.group.param_shards, {index for index, param in enumerate(params) if missed.get(id(param))})
        for flat in inner.flats:
            state = inner.state_of(flat)
            kept = {name: v for name, v in state.items() if not _is_elementwise(v, flat.param)}
            of_group = found.get(flat.run.options_index) or {}
            # A step adds them to the group of every flat, with or without a gradient.
            if added := {key: v for key, v in flat.options.items() if key not in inner.option_names}:
                of_group = found[flat.run.options_index] = {**of_group, _ADDED: added}
            if flat.parameter is None:
                found[flat.run.options_index] = {**of_group, **kept}
            else:
                found[shard.group.layout.names[flat.parameter]] = kept if state else None
        return found

    def held(self, shard: ShardState) -> Iterator[Tensor]:
        """Yield the states in memory, without scalars."""
        states = self._inner[id(shard)].optimizer.state.values() if id(shard) in self._inner else ()
        return (v for state in states for v in state.values() if isinstance(v, Tensor) and v.dim())

    def _first_dtypes(self, options_index: int) -> dict[str, torch.dtype]:
        """Return the elementwise states of a float32 parameter of a group after a step: name -> dtype."""
        if options_index not in self._first:
            param = nn.Parameter(torch.zeros(2))
            param.grad = torch.zeros(2)
            optimizer = self._factory([param])
            _take_options(optimizer.param_groups[0], self._param_groups[options_index])
            optimizer.step()
            states = optimizer.state[param].items()
            self._first[options_index] = {name: v.dtype for name, v in states if _is_elementwise(v, param)}
        return self._first[options_index]

    def _inner_of(self, shard: ShardState) -> _Inner:
        """Return the optimizer of a shard after a step, which may have left all of the shard out."""
        inner = self._inner.get(id(shard))
        if inner is None:
            inner = self._make_inner(shard)
            inner.cut(shard.group.param_shards, set(range(len(shard.group.params))))
        return inner

    def _make_inner(self, shard: ShardState) -> _Inner:
        views = [nn.Parameter(shard.master[run.start : run.end]) for run in shard.runs.all]
        # torch refuses an optimizer without parameters, but a shard may be padding alone.
        optimizer = self._factory(views or [nn.Parameter(shard.master[:0])])
        template = optimizer.param_groups[0]
        flats = [_Flat(run, {**template, "params": [view]}) for run, view in zip(shard.runs.all, views, strict=True)]
        optimizer.param_groups[:] = [flat.options for flat in flats]
        inner = self._inner[id(shard)] = _Inner(optimizer, flats, frozenset(template))
        return inner


def _take_options(own: dict[str, Any], outer: Options) -> None:
    """Set the options of an inner group to those of the caller's group."""
    # The caller's groups may have keys of schedulers (initial_lr), which the inner optimizer does not know.
    own.update({key: value for key, value in outer.items() if key in own and key != "params"})


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the states: bfloat16 without masters is updated in float32."""
    return torch.promote_types(dtype, torch.float32)


def _is_elementwise(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and value.dim() == 1
