"""The update of a shard by an optimizer that needs whole parameters, while a shard has parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..comm import Collectives
from ..kernels.exact_sum import NUM_LIMBS, add_limbs, from_limbs
from ..kernels.optimizer_step import ShardUpdate, chunk_numel, update_shards
from ..kernels.weight_rounding import with_remainder
from ..optimizers.optimizer import Optimizer, Options, WholeTensorRule
from .fused_update import FusedUpdate, ScalarStates, UpdateTerms
from .group import ShardedGroup
from .layout import BLOCK_NUMEL, FlatLayout, ParamShard
from .shard_state import ShardState, StateView


@dataclass(frozen=True)
class MatrixTrip:
    """Sends the matrices of a group to owner ranks and back. Owners balance the cost of orthogonalisation.

        rank 0 | a a a b |  bring   | a a a a   |  scatter  | a a a b |
        rank 1 | a b b . |          |       b b b|            | a b b . |

    Each rank sends its parts of a matrix to the owner, and gets the same parts back. If all ranks have whole matrices
    (`owning_axes` are then the replicas), nothing is sent to the owner, and the owner sends its result to all.
    """

    group: ShardedGroup
    exchange: Collectives
    owners: tuple[int, ...]  # rank of the owner of each slot
    param_shards: tuple[tuple[ParamShard, ...], ...]  # the pieces of each rank
    is_repeated: bool

    @classmethod
    def of(cls, group: ShardedGroup) -> MatrixTrip:
        is_repeated = group.axes.states.size == 1
        exchange = group.axes.exchange_along(group.plan.sharding.owning_axes(group.axes.states.size))
        owners = tuple(owners_of(group.layout, exchange.size))
        param_shards = tuple(
            tuple(group.layout.param_shards(0 if is_repeated else place)) for place in range(exchange.size)
        )
        return cls(group, exchange, owners, param_shards, is_repeated)

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        """values: (shard_numel,) -> the matrices that this rank owns, whole and flat, by slot."""
        place, param_views = self.exchange.place, self.group.layout.param_views
        if self.is_repeated:
            return {i: values[s.in_flat] for i, s in enumerate(param_views) if self.owners[i] == place}
        given = [values[p.in_shard] for p in self._to_owners(place)]
        arrived = self._swap(_joined(given, values), self._counts, f"matrices of {self.group.plan.name}")
        owned = {
            i: values.new_empty(param_view.numel) for i, param_view in enumerate(param_views) if self.owners[i] == place
        }
        low = 0
        for param_shards in self.param_shards:
            for param_shard in param_shards:
                if param_shard.index in owned:
                    owned[param_shard.index][param_shard.in_param] = arrived[low : low + param_shard.numel]
                    low += param_shard.numel
        return owned

    def scatter(self, owned: dict[int, Tensor], values: Tensor) -> None:
        """Move the owners' results into values, (shard_numel,)."""
        if self.is_repeated and self.exchange.size == 1:
            return  # `gather` gave parts of `values`
        given = [
            owned[param_shard.index][param_shard.in_param]
            for param_shards in self.param_shards
            for param_shard in param_shards
            if param_shard.index in owned
        ]
        # The way back: transposed.
        counts = tuple(zip(*self._counts, strict=True))
        joined = _joined(given, values)
        given.clear()
        owned.clear()  # the results have the size of a shard: not twice beside what arrives
        arrived = self._swap(joined, counts, f"matrices back to {self.group.plan.name}")
        low = 0
        for param_shard in self._to_owners(self.exchange.place):
            values[param_shard.in_shard] = arrived[low : low + param_shard.numel]
            low += param_shard.numel

    def _swap(self, values: Tensor, counts: tuple[tuple[int, ...], ...], what: str) -> Tensor:
        """Send values of the host through the device, since a group of devices refuses host memory."""
        return self.exchange.swap_rows(values.to(self.group.shard.device), counts, what).to(values.device)

    def _to_owners(self, place: int) -> list[ParamShard]:
        """The pieces of a rank, in the order of their owners."""
        return sorted(self.param_shards[place], key=lambda param_shard: self.owners[param_shard.index])

    @cached_property
    def _counts(self) -> tuple[tuple[int, ...], ...]:
        """[i][j]: number of elements that rank i has of the matrices of rank j."""
        found = [[0] * self.exchange.size for _ in self.param_shards]
        for place, param_shards in enumerate(self.param_shards):
            for param_shard in param_shards:
                found[place][self.owners[param_shard.index]] += param_shard.numel
        return tuple(map(tuple, found))


def owners_of(layout: FlatLayout, num_places: int) -> list[int]:
    """Return the owner of each slot: the costliest first, to the rank with the least load. Cost: multiplications."""
    loads = [0] * num_places
    owners = [0] * len(layout.param_views)
    costs = [
        param_view.numel * min(param_view.shape) if len(param_view.shape) == 2 else param_view.numel
        for param_view in layout.param_views
    ]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        # Each rank computes this for itself: ties go to the lower index and the lower rank, so all agree.
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def sent_numels(layout: FlatLayout, num_places: int, place: int, is_repeated: bool) -> tuple[int, int]:
    """Return the elements that a rank sends to owners and, as an owner, back. is_repeated: as in `MatrixTrip`."""
    owners = owners_of(layout, num_places)
    whole = sum(view.numel for view, owner in zip(layout.param_views, owners, strict=True) if owner == place)
    if is_repeated:
        return 0, (num_places - 1) * whole
    parts = layout.param_shards(place)
    kept = sum(part.numel for part in parts if owners[part.index] == place)
    return sum(part.numel for part in parts) - kept, whole - kept


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else like.new_empty(0)


Ratios = Mapping[int, float]
"""Index of a parameter in its group -> the scale of its direction. Unused parameters are absent."""


@dataclass(frozen=True)
class WholeUpdate(FusedUpdate):
    """Updates a shard in three passes, with a sum over ranks in the second.

        elements      weight, gradient, states -> direction     `optimizer.apply`; takes a float32 shard for a while
        parameters    norms of weight and direction, summed over ranks, give the ratio; matrices are sent to an owner,
                      which may keep states of them
        elements      weight, direction, ratio -> weight         `optimizer.whole.finish`, with its rounding

    Norms sum blocks of 1024 elements in float64, and add the blocks exactly, so all stages have the same bits.
    Offloaded states are loaded twice in a step.
    """

    has_rule = True
    waits_for_norm = True

    def lacks_state(self, options: Options) -> bool:
        return False

    def takes(self, options: Options) -> bool:
        return not self.by_group and super().takes(options)

    def can_take(self, kind: str, states: Collection[str]) -> bool:
        if not self.by_group:
            return super().can_take(kind, states)
        if self._whole.factors((1, 1)) and kind != self.name:
            return False  # elementwise states do not show which optimizer they are from
        return not states or set(states) == {
            s.name for group in self.by_group for s in self.optimizer.states_for(group)
        }

    def update(
        self, shard: ShardState, parts: Callable[[], Iterable[StateView]], gradient: Tensor, terms: UpdateTerms
    ) -> None:
        beside, params = self._beside, shard.group.params
        if beside is not None and params and not terms.options[shard.runs.options_index(0)]["is_matrix"]:
            beside.update(shard, parts, gradient, terms)
            return
        moves = self._moves(shard)
        shard.memory.make()
        numel, dtype = gradient.numel(), torch.promote_types(shard.form.master_dtype, torch.float32)
        direction = torch.empty(numel, dtype=dtype, device=gradient.device)
        norms = _Norms(shard)
        for low, update in _with_offsets(self._updates(shard, parts(), gradient, terms)):
            part = direction[low : low + update.numel]
            part.copy_(update.master if update.remainder is None else with_remainder(update.master, update.remainder))
            # Before the rule, which overwrites the weight in `part`.
            if self._whole.ratio is not None:
                norms.add(0, part, low)
            # The rule sees the weight in `part` and leaves the direction there: the weight itself changes later.
            moments = dataclasses.replace(update, master=part, out=None, rounding=None, remainder=None)
            self._run(self.optimizer, moments, terms, terms.gradient_scale)
            # A matrix gets its direction from the owner, clipped already (`_adafactor_ratio`), or has no ratio (Muon).
            if not moves:
                norms.add(1, part, low)
        if moves:
            self._change_matrices(shard, direction, terms)
        ratios = self._ratios(shard, norms, terms)
        for low, update in _with_offsets(self._updates(shard, parts(), direction, terms)):
            runs = list(_runs(shard, ratios, terms, low, update.numel))
            ends, steps = [(end, options) for end, options, _ in runs], [step for _, _, step in runs]
            finish = dataclasses.replace(update, states=(), runs=ends, steps=steps)
            self._run(self._finish, finish, terms, 1.0)

    # -- states of matrices that are not elementwise ---------------------------------------------------------------

    def make_states(
        self, shard: ShardState, dtypes: Mapping[str, Mapping[str, torch.dtype]], scalars: ScalarStates
    ) -> None:
        super().make_states(shard, dtypes, scalars)
        shard.memory.factors.clear()
        if not self._moves(shard):
            return
        group, trip = shard.group, MatrixTrip.of(shard.group)
        device = torch.device("cpu") if shard.is_apart else group.shard.device
        for index, name in enumerate(group.layout.names):
            kept = scalars.get(name) or {}
            shapes = self._whole.factors(group.layout.param_views[index].shape)
            if trip.owners[index] == trip.exchange.place and shapes.keys() <= kept.keys():
                dtype = torch.promote_types(shard.form.master_dtype, torch.float32)
                shard.memory.factors[index] = {factor: kept[factor].to(device, dtype).clone() for factor in shapes}

    def reset_states(self, shard: ShardState, index: int) -> None:
        super().reset_states(shard, index)
        shard.memory.factors.pop(index, None)

    def scalar_states(self, shard: ShardState, missed: Mapping[int, int]) -> ScalarStates:
        return {shard.group.layout.names[index]: factors for index, factors in shard.memory.factors.items()}

    def held(self, shard: ShardState) -> Iterator[Tensor]:
        yield from super().held(shard)
        for by_name in shard.memory.factors.values():
            yield from by_name.values()

    # -- helpers --------------------------------------------------------------------------------------------------

    @property
    def _whole(self) -> WholeTensorRule:
        assert self.optimizer.whole is not None
        return self.optimizer.whole

    @cached_property
    def _finish(self) -> Optimizer:
        """The last pass, as an optimizer without states."""
        return Optimizer(self.optimizer.title, "", {}, (), self._whole.finish, keeps_step=False)

    @cached_property
    def _beside(self) -> FusedUpdate | None:
        """The update of the parameters that are not matrices."""
        if self._whole.beside is None:
            return None
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return FusedUpdate(**{**fields, "optimizer": self._whole.beside, "by_group": ()})

    def _moves(self, shard: ShardState) -> bool:
        """Whether the shard's parameters are matrices that are sent to owners. All parameters of a group agree."""
        # The config puts matrices in param_groups[0], and `_plan_groups` keeps them apart from other parameters.
        return bool(self._whole.matrix is not None and shard.group.params and not shard.runs.options_index(0))

    def _change_matrices(self, shard: ShardState, direction: Tensor, terms: UpdateTerms) -> None:
        """Apply the matrix rule to every matrix on its owner rank. A collective."""
        group, used = shard.group, {i for i, p in enumerate(shard.group.params) if terms.step_of(id(p))}
        trip = MatrixTrip.of(group)
        owned = trip.gather(direction)
        matrix = self._whole.matrix
        assert matrix is not None
        for index in used & owned.keys():
            shape = group.layout.param_views[index].shape
            options, step = terms.options[shard.runs.options_index(index)], terms.step_of(id(group.params[index]))
            factors = self._factors_of(shard, index, direction)
            given = owned[index].view(shape)
            given.copy_(matrix(given, step, options, factors))
        trip.scatter(owned, direction)

    def _factors_of(self, shard: ShardState, index: int, like: Tensor) -> dict[str, Tensor]:
        """Return the factors of a matrix that this rank owns, made at the first call on the device of the update."""
        if index not in shard.memory.factors:
            shapes = self._whole.factors(shard.group.layout.param_views[index].shape)
            shard.memory.factors[index] = {name: like.new_zeros(shape) for name, shape in shapes.items()}
        return shard.memory.factors[index]

    def _run(self, optimizer: Optimizer, update: ShardUpdate, terms: UpdateTerms, scale: float | Tensor) -> None:
        # Padding alone has no options to read coefficients from.
        if update.is_used:
            # These rules have no Triton kernel, and "triton" would refuse them.
            update_shards(
                optimizer, [update], terms.step, scale, backend="auto" if self.backend == "triton" else self.backend
            )

    def _ratios(self, shard: ShardState, norms: _Norms, terms: UpdateTerms) -> Ratios:
        params, param_views, ratio = shard.group.params, shard.group.layout.param_views, self._whole.ratio
        steps = {index: step for index, param in enumerate(params) if (step := terms.step_of(id(param)))}
        if ratio is None:
            return dict.fromkeys(steps, 1.0)
        found = norms.summed()
        return {
            index: ratio(
                terms.options[shard.runs.options_index(index)],
                step,
                param_views[index].numel,
                *(math.sqrt(sums[index]) for sums in found),
            )
            for index, step in steps.items()
        }


class _Norms:
    """Sums of squares of weights and directions, by parameter of a group."""

    def __init__(self, shard: ShardState) -> None:
        self._shard = shard
        self._num_params = len(shard.group.params)
        device = shard.group.shard.device
        # The last element flags a value that is not finite.
        self._sums = torch.zeros(2 * self._num_params * NUM_LIMBS + 1, dtype=torch.int64, device=device)

    def add(self, kind: int, values: Tensor, low: int) -> None:
        """Add squares. values: (n,) of the shard's elements from `low` on, a multiple of 1024. kind: 0 or 1."""
        for param_shard in self._shard.param_shards:
            start, end = param_shard.offset_in_shard - low, param_shard.offset_in_shard + param_shard.numel - low
            # Pieces are cut at the ends of chunks, so a piece lies inside of these values or outside.
            if start < 0 or end > values.numel():
                continue
            row = (kind * self._num_params + param_shard.index) * NUM_LIMBS
            most = chunk_numel(values.device.type)  # whole blocks: sums of blocks are added exactly, in any order
            for first in range(start - start % most, end, most):
                begin = max(start, first)
                part = values[begin : min(end, first + most)]
                squares = part.to(self._sums.device, torch.float64, copy=True).square_()
                add_limbs(self._sums, _by_block(squares, begin), row, self._sums.numel() - 1)

    def summed(self) -> list[list[float]]:
        """Return [kind][parameter], summed over the ranks of the group. A collective."""
        # Replicas hold the same states and gradients, so they compute the same sums.
        axis = self._shard.group.axes.states
        sums = self._sums
        if axis.size > 1:
            sums = axis.transport.sum_small(sums, f"norms of {self._shard.group.plan.name}")
        *limbs, flag = sums.tolist()
        parts = [limbs[at : at + NUM_LIMBS] for at in range(0, len(limbs), NUM_LIMBS)]
        values = [math.nan if flag else from_limbs(part) for part in parts]
        return [values[: self._num_params], values[self._num_params :]]


def _by_block(values: Tensor, start: int) -> Tensor:
    """Sum values, (n,), by block of 1024 elements of the shard. `start`: the first value's index in the shard."""
    before = start % BLOCK_NUMEL
    after = -(before + values.numel()) % BLOCK_NUMEL
    return torch.nn.functional.pad(values, (before, after)).view(-1, BLOCK_NUMEL).sum(1)


def _with_offsets(updates: Iterator[ShardUpdate]) -> Iterator[tuple[int, ShardUpdate]]:
    """Yield each update with the index of its first element in the shard."""
    low = 0
    for update in updates:
        yield low, update
        low += update.numel


def _runs(
    shard: ShardState, ratios: Ratios, terms: UpdateTerms, low: int, numel: int
) -> Iterator[tuple[int, Mapping[str, Any], int]]:
    """Yield (end, options, step) of each parameter in elements [low, low + numel) of the shard, without gaps."""
    param_shards: Sequence[ParamShard] = [
        part for part in shard.param_shards if low <= part.offset_in_shard < low + numel
    ]
    if not param_shards:
        return
    ends = [part.offset_in_shard - low for part in param_shards[1:]] + [numel]
    if param_shards[0].offset_in_shard > low:  # padding
        yield param_shards[0].offset_in_shard - low, terms.options[0], 0
    for param_shard, end in zip(param_shards, ends, strict=True):
        options = terms.options[shard.runs.options_index(param_shard.index)]
        is_updated = param_shard.index in ratios
        yield end, {**options, "ratio": ratios.get(param_shard.index, 0.0)}, terms.step if is_updated else 0
