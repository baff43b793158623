"""The update by an optimizer whose ranks exchange signs of momenta instead of gradients: 1-bit Adam."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..comm import Collectives, regions_of
from ..kernels.quantized_blocks import SIGNS_PER_BYTE, packed_signs, unpacked_signs
from ..optimizers.adam import onebit_direction
from ..optimizers.optimizer import Options
from .fused_update import FusedUpdate, ScalarStates, UpdateTerms
from .layout import FlatLayout, ParamShard
from .powersgd import LOW_RANK_ERROR
from .shard_state import ShardState, StateView

RegionPart = tuple[int, int, int]
"""The part of a parameter in a region: (index of the parameter, start, end)."""


@dataclass(frozen=True)
class SignLayout:
    """The parts of parameters in each rank's region of a flat group. Each part has a separate scale.

    A message has the signs of a region and a scale for each part in it.
    """

    regions: tuple[slice, ...]
    region_parts: tuple[tuple[RegionPart, ...], ...]  # by region
    dtype: torch.dtype  # of values and scales

    @classmethod
    def of(cls, layout: FlatLayout, num_ranks: int, dtype: torch.dtype) -> SignLayout:
        regions = tuple(regions_of(layout.padded_numel, num_ranks))
        region_parts = tuple(
            tuple(
                (index, max(param_view.offset_in_flat, region.start) - region.start, end - region.start)
                for index, param_view in enumerate(layout.param_views)
                if max(param_view.offset_in_flat, region.start) < (end := min(param_view.end_in_flat, region.stop))
            )
            for region in regions
        )
        return cls(regions, region_parts, dtype)

    def numel(self, place: int) -> int:
        """Elements of a region."""
        return int(self.regions[place].stop) - int(self.regions[place].start)

    def nbytes(self, place: int) -> int:
        """Bytes of the message of a region."""
        return self.numel(place) // SIGNS_PER_BYTE + len(self.region_parts[place]) * self.dtype.itemsize

    @property
    def max_nbytes(self) -> int:
        return max(map(self.nbytes, range(len(self.regions))))

    def bytes_sent(self, place: int) -> int:
        """Bytes that a rank sends in a mean, to all ranks together."""
        others = sum(self.nbytes(other) for other in range(len(self.regions)) if other != place)
        return others + self.max_nbytes * (len(self.regions) - 1)

    def error_numel(self, place: int) -> int:
        """Elements of both errors of a rank; 0 for a single rank."""
        if len(self.regions) == 1:
            return 0
        return sum(map(self.numel, range(len(self.regions)))) + self.numel(place)


@dataclass
class SignMean:
    """The mean of a group's values over ranks, sent as signs: a compressed all-reduce.

        rank i   x_i + its error --signs, scales--> \\
        rank j   x_j + its error --signs, scales-->  owner of the region: mean + its error --signs, scales--> all

    Each rank keeps the error of its signs and adds it next time: the worker's error of all elements, the server's of
    its region. Source: 1-bit Adam, arXiv 2102.02888, algorithm 1.
    """

    layout: SignLayout
    exchange: Collectives
    what: str
    device: torch.device
    worker_error: Tensor = field(init=False)  # (padded_numel,)
    server_error: Tensor = field(init=False)  # (elements of the region,)

    def __post_init__(self) -> None:
        place = self.exchange.place
        region, whole = self.layout.regions[place], self.layout.regions[-1].stop
        sizes = (whole, region.stop - region.start) if self.exchange.size > 1 else (0, 0)
        self.worker_error, self.server_error = (
            torch.zeros(size, dtype=self.layout.dtype, device=self.device) for size in sizes
        )

    @property
    def nbytes(self) -> int:
        return self.worker_error.nbytes + self.server_error.nbytes

    def mean(self, values: Tensor, unused: Collection[int] = ()) -> Tensor:
        """Return the ranks' approximate mean of values, (padded_numel,), which are overwritten. A collective.

        unused: indices of parameters whose errors do not change, and whose mean is 0.
        """
        size, place, layout = self.exchange.size, self.exchange.place, self.layout
        if size == 1:
            return values
        values += self.worker_error
        messages = []
        for other, region in enumerate(layout.regions):
            message, said = self._encoded(values[region], other, unused)
            messages.append(message)
            self._keep(self.worker_error[region], values[region], said, other, unused)
        # Every rank sends the message of region j to rank j: equal rows.
        counts = tuple(tuple(map(layout.nbytes, range(size))) for _ in range(size))
        arrived = self.exchange.swap_rows(torch.cat(messages), counts, f"signs of {self.what}")
        own = layout.regions[place]
        total = torch.zeros(own.stop - own.start, dtype=values.dtype, device=values.device)
        for message in arrived.view(size, -1):
            total += self._decoded(message, place)
        total.div_(size).add_(self.server_error)
        message, said = self._encoded(total, place, unused)
        self._keep(self.server_error, total, said, place, unused)
        # A gather needs equal sizes. Regions differ in their number of scales.
        padded = torch.nn.functional.pad(message, (0, layout.max_nbytes - message.numel()))
        gathered = self.exchange.gather(padded, 0, f"mean signs of {self.what}").view(size, -1)
        for other, region in enumerate(layout.regions):
            values[region] = self._decoded(gathered[other, : layout.nbytes(other)], other)
        return values

    def _encoded(self, values: Tensor, place: int, unused: Collection[int]) -> tuple[Tensor, Tensor]:
        """Return (message, its decoded values) of a region."""
        region_parts: Sequence[RegionPart] = self.layout.region_parts[place]
        zero = values.new_zeros(())
        found = [zero if index in unused else _scale(values[low:high]) for index, low, high in region_parts]
        scales = torch.stack(found) if found else values.new_empty(0)
        message = torch.cat([packed_signs(values), scales.view(torch.uint8)])
        return message, self._decoded(message, place)

    def _decoded(self, message: Tensor, place: int) -> Tensor:
        region, region_parts = self.layout.regions[place], self.layout.region_parts[place]
        num_bytes = (region.stop - region.start) // SIGNS_PER_BYTE
        signs = unpacked_signs(message[:num_bytes], self.layout.dtype)
        scales = message[num_bytes:].clone().view(self.layout.dtype)  # aligned
        end = 0
        for (_, low, high), scale in zip(region_parts, scales, strict=True):
            # Padding: a sign has no zero, so it decodes to +1 or -1.
            signs[end:low] = 0
            signs[low:high] *= scale
            end = high
        signs[end:] = 0
        return signs

    def _keep(self, error: Tensor, values: Tensor, said: Tensor, place: int, unused: Collection[int]) -> None:
        for index, low, high in self.layout.region_parts[place]:
            if index not in unused:
                torch.sub(values[low:high], said[low:high], out=error[low:high])


def _scale(values: Tensor) -> Tensor:
    """(): signs times the scale have the norm of the values."""
    scale: Tensor = values.norm() / math.sqrt(values.numel())
    return scale


WORKER_ERROR, SERVER_ERROR = "worker_error", "server_error"
"""States in a checkpoint; the worker's with the number of its rank."""
AXIS = ("replica",)
Parameters = list[tuple[int, slice, Options]]
"""(index in its group, range in the shard, options) of parameters."""


@dataclass(frozen=True)
class SignUpdate(FusedUpdate):
    """1-bit Adam. Each rank has the whole states, equal on all ranks; each has separate errors of `SignMean`.

    | a step         | gradient    | momentum                           | second moment |
    |----------------|-------------|------------------------------------|---------------|
    | of the warm-up | of all      | updated with it                    | updated       |
    | after it       | of the rank | updated with it, mean of the signs | stays         |

    Signs are exchanged in the update, when all ranks know that the step counts: an error never includes a gradient that
    was thrown away.
    """

    waits_for_norm = True

    def takes(self, options: Options) -> bool:
        return super().takes(options) and set(self.options) <= set(options)

    def sums_gradients(self, step: int) -> bool:
        """Whether a step, counted from 1, sums gradients over replicas; else each replica uses its gradient."""
        return step <= int(self.options["freeze_step"])

    def update(
        self, shard: ShardState, parts: Callable[[], Iterable[StateView]], gradient: Tensor, terms: UpdateTerms
    ) -> None:
        self.make_states(shard, {}, {})
        weight = shard.master
        used = [
            (
                param_shard.index,
                param_shard.in_shard,
                terms.options[shard.runs.options_index(param_shard.index)],
            )
            for param_shard in shard.group.param_shards
            if terms.step_of(id(shard.group.params[param_shard.index]))
        ]
        # In place if the dtypes agree: with signs replicas do not share the memory of their sum (`shares_gradients`).
        gradient = gradient.to(weight.dtype).mul_(terms.gradient_scale)
        if self.sums_gradients(terms.step):
            for _, where, options in used:
                own = [state[where] for state in shard.memory.states.values()]
                self.optimizer.apply(weight[where], gradient[where], own, torch.tensor(terms.step), options)
        else:
            self._step_with_signs(shard, gradient, used)
        if shard.form.is_mixed:
            shard.group.shard.copy_(weight)

    def _step_with_signs(self, shard: ShardState, gradient: Tensor, used: Parameters) -> None:
        """Make a step after the warm-up. gradient: (padded_numel,), this rank's term of the mean."""
        mean, (momentum, squares) = self._means[id(shard)], shard.memory.states.values()
        # The gradient scale divides by the number of ranks, but the gradient is of this rank alone.
        gradient.mul_(mean.exchange.size)
        new = momentum.clone()
        for _, where, options in used:
            new[where].lerp_(gradient[where], 1 - options["betas"][0])
        new = mean.mean(new, frozenset(range(len(shard.group.params))).difference(index for index, _, _ in used))
        for _, where, options in used:
            momentum[where] = new[where]
            step = onebit_direction(shard.master[where], new[where], squares[where], options)
            shard.master[where].add_(step, alpha=-float(options["lr"]))

    # -- what is kept ---------------------------------------------------------------------------------------------

    @cached_property
    def _means(self) -> dict[int, SignMean]:
        """By id of the shard."""
        return {}

    def make_states(
        self, shard: ShardState, dtypes: Mapping[str, Mapping[str, torch.dtype]], scalars: ScalarStates
    ) -> None:
        shard.memory.make()
        if id(shard) not in self._means:
            group = shard.group
            exchange = group.axes.exchange_along(AXIS)
            layout = SignLayout.of(group.layout, exchange.size, shard.form.master_dtype)
            self._means[id(shard)] = SignMean(layout, exchange, group.plan.name, group.shard.device)

    def forget_states(self, shard: ShardState) -> None:
        shard.memory.forget()
        self._means.pop(id(shard), None)

    def held(self, shard: ShardState) -> Iterator[Tensor]:
        yield from super().held(shard)
        if id(shard) in self._means:
            mean = self._means[id(shard)]
            yield from (mean.worker_error, mean.server_error)

    def rank_states(self, shard: ShardState) -> Iterator[tuple[ParamShard, str, Tensor]]:
        """Yield (piece, name, values) of the errors of this rank."""
        mean = self._means.get(id(shard))
        if mean is None or not mean.worker_error.numel():
            return
        place = mean.exchange.place
        region = mean.layout.regions[place]
        for param_shard in shard.group.param_shards:
            yield param_shard, f"{WORKER_ERROR}_{place}", mean.worker_error[param_shard.in_shard]
        for index, low, high in mean.layout.region_parts[place]:
            offset = region.start + low - shard.group.layout.param_views[index].offset_in_flat
            yield ParamShard(index, offset, region.start + low, high - low), SERVER_ERROR, mean.server_error[low:high]

    def rank_state_names(self, shard: ShardState) -> list[str]:
        """Return the names of the errors of all ranks."""
        size = shard.group.axes.replicas.size
        return [*(f"{WORKER_ERROR}_{place}" for place in range(size)), SERVER_ERROR] if size > 1 else []


def is_rank_state(name: str) -> bool:
    """Whether a state of that name belongs to a rank, so it is useless for another number of ranks."""
    return name == SERVER_ERROR or name.startswith((f"{WORKER_ERROR}_", f"{LOW_RANK_ERROR}_"))
