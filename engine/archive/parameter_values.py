"""Master weights, optimizer states and gradient of a single parameter, whole or as this rank has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...offload import Memory
from ...zero.group import ShardedGroup, part_of, values_of
from ...zero.layout import ParamShard
from ...zero.sequence import StateError
from .agreement import no_rank_alone
from .named_state import NamedState, chunk_views_of


@dataclass(frozen=True)
class _Place:
    """The place of a parameter. The group is None if the parameter is in another stage of a pipeline."""

    name: str
    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype  # of the master weights, but at least float32 if trained
    group: ShardedGroup | None
    index: int  # in the group

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, before sharding, flat."""
        if self.group is None:
            return whole
        return self.group.layout.param_views[self.index].tensor_shard.take(whole).reshape(-1)


Part = tuple[ParamShard, Memory]


class ParameterValues:
    """Reads and writes the values of a parameter, in the dtype of its master weights.

    | values        | `state`           | parameters                                       |
    |---------------|-------------------|--------------------------------------------------|
    | weights       | None              | all: master weights, if it has them              |
    | a state       | "exp_avg", ...    | trained parameters, from the first step on       |
    | the gradient  | see `gradient`    | trained parameters                               |

    All ranks must call each method alike, except for local reads. Errors are raised on all ranks, before any change.
    """

    def __init__(self, named: NamedState, note_changed: Callable[[Iterable[str]], None]) -> None:
        """note_changed: called with the names of frozen parameters that the caller has changed."""
        self._named, self._note_changed = named, note_changed
        self._groups, self._shards = named.groups, named.shards
        self._optimizer, self._mesh = named.optimizer, named.mesh

    def full(self, param: nn.Parameter | str, state: str | None, what: str) -> Tensor:
        """Return the whole value, of the parameter's shape, on every rank's device. what: the call for users."""
        with no_rank_alone(self._mesh.world, what):
            place = self._place_of(param, what)
            parts = self._parts(place, state, what)
        # After the checks of all ranks: `_collected` is a collective, and a rank that has raised would not come.
        return self._collected(place, parts)

    def local(self, param: nn.Parameter | str, state: str | None, what: str) -> Tensor:
        """Return this rank's part of the value, flat. Moves nothing between ranks."""
        place = self._place_of(param, what)
        return _flat(self._parts(place, state, what), place.dtype, self._mesh.world.device)

    def set_full(self, param: nn.Parameter | str, value: Tensor, state: str | None, what: str) -> None:
        """Set the value to rank 0's `value`, of the parameter's shape."""
        with no_rank_alone(self._mesh.world, what):
            place = self._place_of(param, what)
            parts = self._parts(place, state, what, changes=True)
            _check(what, place, value, place.shape, "the parameter's shape")
        flat = place.own(self._mesh.world.broadcast_tensor(value.detach().to(place.dtype)))
        self._write(place, state, [(p, m, flat.reshape(-1)[p.in_param]) for p, m in parts])

    def set_local(self, param: nn.Parameter | str, value: Tensor, state: str | None, what: str) -> None:
        """Set this rank's part of the value to `value`, flat as in `local`."""
        with no_rank_alone(self._mesh.world, what):
            place = self._place_of(param, what)
            parts = self._parts(place, state, what, changes=True)
            sizes = [param_shard.numel for param_shard, _ in parts]
            _check(what, place, value, (sum(sizes),), "this rank's part, flat")
        values = torch.split(value.detach(), sizes)
        self._write(place, state, [(p, m, v) for (p, m), v in zip(parts, values, strict=True)])

    def gradient(
        self, param: nn.Parameter | str, factor: float, is_local: bool, what: str, *, is_complete: bool = True
    ) -> Tensor | None:
        """Return `factor` times the reduced gradient; None if the parameter is frozen, or no rank has used it.

        is_complete: False in the middle of a step, when the gradient may not be reduced yet.
        """
        if is_local:
            place = self._place_of(param, what)
        else:
            with no_rank_alone(self._mesh.world, what):
                place = self._place_of(param, what)
        if place.name not in self._named.catalog.state_keys:
            return None
        if not is_complete or not self._optimizer.sums_gradients:
            return self._gradient_in_terms(place, factor, is_local, what, is_complete)
        parts = self._gradient_parts(place)
        if is_local:
            return _flat(parts, place.dtype, self._mesh.world.device).mul_(factor)
        # A rank may hold a part of the shard without having used the parameter, so the ranks count.
        used = place.group is not None and place.index in self._shards[id(place.group)].gradient.used
        count = torch.tensor([int(used)], dtype=torch.int64, device=self._mesh.world.device)
        if not int(self._mesh.sum_small(count, what)):
            return None
        return self._collected(place, parts).mul_(factor)

    def set_gradient(
        self, param: nn.Parameter | str, value: Tensor | None, factor: float, is_local: bool, what: str
    ) -> None:
        """Set `factor` times the reduced gradient to `value`: rank 0's, or with is_local this rank's part, flat.

        None: mark the parameter as unused.
        """
        with no_rank_alone(self._mesh.world, what):
            place = self._place_of(param, what)
            if place.name not in self._named.catalog.state_keys:
                raise ValueError(f"{what}: expected a trained parameter, found the frozen '{place.name}'")
            parts = self._gradient_parts(place)
            sizes = [param_shard.numel for param_shard, _ in parts]
            if value is not None and is_local:
                _check(what, place, value, (sum(sizes),), "this rank's part, flat")
            elif value is not None:
                _check(what, place, value, place.shape, "the parameter's shape")
        if len(set(self._mesh.world.gather_objects(value is None))) > 1:
            raise ValueError(f"{what}: expected None for '{place.name}' on all ranks or on none, found both")
        if value is None:
            # Zeros for the norm: the update leaves out an unused parameter by its mark, not by its value.
            values: Sequence[Tensor] = [torch.zeros(()) for _ in parts]
        elif is_local:
            values = torch.split(value.detach(), sizes)
        else:
            flat = place.own(self._mesh.world.broadcast_tensor(value.detach().to(place.dtype)))
            values = [flat.reshape(-1)[param_shard.in_param] for param_shard, _ in parts]
        for (_, memory), own in zip(parts, values, strict=True):
            reduced = values_of(memory)
            assert place.group is not None
            # A 1-bit optimizer has a term of the sum on each replica, so each replica takes an equal part.
            num_terms = 1 if self._optimizer.sums_gradients else place.group.axes.replicas.size
            reduced.copy_(own.to(device=reduced.device, dtype=place.dtype) / (factor * num_terms))
        if place.group is not None:
            self._shards[id(place.group)].gradient.mark_changed(place.index, is_used=value is not None)

    def reset_states(self, params: Iterable[nn.Parameter | str], what: str) -> None:
        """Reset the states of these parameters to those before their first step."""
        with no_rank_alone(self._mesh.world, what):
            places = [self._place_of(param, what) for param in params]
            for place in places:
                if place.name not in self._named.catalog.state_keys:
                    raise ValueError(
                        f"{what}: expected trained parameters, found the frozen '{place.name}'; leave it out"
                    )
        self._optimizer.by_parameter.reset({one.name: self._named.whole.params[one.name] for one in places}, what)
        self._optimizer.flush()

    # -- pieces of the calls above --------------------------------------------------------------------------------

    def _place_of(self, param: nn.Parameter | str, what: str) -> _Place:
        """Find a parameter. Raise ValueError if it is no parameter of the model."""
        catalog = self._named.catalog
        name = param if isinstance(param, str) else self._name_of(param, what)
        name = catalog.aliases.get(name, name)
        info = catalog.parameters.get(name)
        if info is not None and name in catalog.state_keys:  # states and gradients of a bfloat16 may be float32
            info = replace(info, dtype=torch.promote_types(info.dtype, torch.float32))
        if info is None:
            raise ValueError(
                f"{what}: expected a parameter of the model or its name, as in engine.named_parameters(), found "
                f"'{name}'"
            )
        for group in self._groups:
            if name in group.layout.index_of:
                index = group.layout.index_of[name]
                return _Place(name, info.shape, info.dtype, group, index)
        return _Place(name, info.shape, info.dtype, None, 0)

    def _name_of(self, param: nn.Parameter, what: str) -> str:
        for group in self._groups:
            for name, own in group.plan.params:
                if own is param:
                    return name
        for name, own in self._named.whole.params.items():  # of other stages too
            if own is param:
                return name
        raise ValueError(
            f"{what}: expected a parameter of the engine's module, for example engine.module.head.weight, or its name, "
            f"found a {type(param).__name__} of another module"
        )

    def _parts(self, place: _Place, state: str | None, what: str, changes: bool = False) -> list[Part]:
        """Return this rank's parts of weights or of a state. Raise ValueError if the state does not exist."""
        group = place.group
        shard = None if group is None else self._shards.get(id(group))
        if state is None:
            if group is None:
                return []
            if shard is None:
                own = group.own_values(changes)
                return [(p, part_of(own, p.in_shard)) for p in group.param_shards.of(place.index)]
            return [(p, shard.master_of(p, changes)) for p in shard.param_shards.of(place.index)]
        self._check_has_states(place, what)
        states_of = self._optimizer.by_parameter.states_of
        found = [] if shard is None else [(p, states_of(shard, p, changes)) for p in shard.param_shards.of(place.index)]
        for _, states in found:
            if changes and not states:
                raise ValueError(
                    f"{what}: expected a parameter that a step has updated, found '{place.name}' without any: its "
                    "optimizer makes its states in the first update"
                )
            if state not in states:
                raise ValueError(
                    f"{what}: expected a state with the shape of '{place.name}' ({', '.join(states)}), found '{state}'"
                )
        return [(param_shard, states[state]) for param_shard, states in found]

    def _check_has_states(self, place: _Place, what: str) -> None:
        if place.name not in self._named.catalog.state_keys:
            raise ValueError(f"{what}: expected a trained parameter, found the frozen '{place.name}'")
        if not self._optimizer.num_steps:
            raise ValueError(
                f"{what}: expected a call after the first step, found no step: optimizer states come with it"
            )

    def _gradient_parts(self, place: _Place) -> list[Part]:
        if place.group is None:
            return []
        gradient = self._shards[id(place.group)].gradient
        gradient.arrive()
        assert gradient.shard is not None
        return [(p, gradient.shard[p.in_shard]) for p in place.group.param_shards.of(place.index)]

    def _gradient_in_terms(
        self, place: _Place, factor: float, is_local: bool, what: str, is_complete: bool
    ) -> Tensor | None:
        """Do `gradient` when it may not be reduced yet: each rank has a term of the sum."""
        group, device = place.group, self._mesh.world.device
        own, is_used = torch.empty(0), False
        if group is not None:
            gradient = self._shards[id(group)].gradient
            if is_local and not gradient.sums_each:
                raise StateError(
                    f"{what}: expected the gradient of '{place.name}' summed over the ranks, found a term of it: the "
                    "last backward of a step sums it, or with a 1-bit optimizer the step. Without `local` "
                    "(safe_get_full_grad in lowtide.deepspeed) the call sums it, on all ranks"
                )
            own, is_used = gradient.so_far(place.index, place.dtype, is_complete)
        if is_local:
            param_shards = () if group is None else group.param_shards.of(place.index)
            return _flat([(one, own[one.in_param]) for one in param_shards], place.dtype, device).mul_(factor)
        if not int(self._mesh.sum_small(torch.tensor([int(is_used)], dtype=torch.int64, device=device), what)):
            return None
        whole = torch.zeros(place.shape, dtype=place.dtype, device=device)
        # Of ranks with equal copies only the first gives its term.
        if group is not None and group.axes.is_counted:
            tensor_shard = group.layout.param_views[place.index].tensor_shard
            whole = tensor_shard.put(own.view(tensor_shard.shape))
        return self._mesh.world.sum(whole, what).mul_(factor)

    def _collected(self, place: _Place, parts: Sequence[Part]) -> Tensor:
        """Assemble the whole value on every rank from the parts of all. A collective."""
        device = self._mesh.world.device
        whole = torch.zeros(math.prod(place.shape), dtype=place.dtype, device=device)
        for param_shard, memory in parts:
            assert place.group is not None
            # `saves`: `assemble` adds the parts of all ranks, so replicas must not give the same elements.
            for chunk_view in chunk_views_of(place.group, param_shard, "", memory, saves=True):
                start = 0
                for low, high in chunk_view.flat_ranges():
                    whole[low:high].copy_(chunk_view.values[start : start + high - low])
                    start += high - low
        return self._mesh.world.assemble(whole).view(place.shape)

    def _write(self, place: _Place, state: str | None, changes: Sequence[tuple[ParamShard, Memory, Tensor]]) -> None:
        shard = None if place.group is None else self._shards.get(id(place.group))
        with torch.no_grad():
            if state is None and shard is not None:
                shard.forget_remainders([param_shard for param_shard, _, _ in changes])
            for _, memory, values in changes:
                values_of(memory).copy_(values)
            if state is None:
                if place.name not in self._named.catalog.state_keys:
                    self._note_changed([place.name])
                self._named.publish([] if place.group is None else [place.group])
            else:
                self._optimizer.flush()


def _flat(parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a copy of all parts, concatenated."""
    # A copy, since a stored range is valid only until the next range is opened.
    values = [values_of(memory).detach().to(device=device, dtype=dtype, copy=True) for _, memory in parts]
    return torch.cat(values) if values else torch.empty(0, dtype=dtype, device=device)


def _check(what: str, place: _Place, value: object, shape: tuple[int, ...], whose: str) -> None:
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{what}: expected a tensor of shape {shape}, {whose}, for '{place.name}', found {found}")
