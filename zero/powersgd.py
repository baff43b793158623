"""Gradients sent as products of two thin matrices. Source: PowerSGD, arXiv 1905.13727, algorithms 1 and 2.

    M = gradient + error      P = M Q  --sum-->  orthogonalised      Q = M^T P  --sum-->      sum of gradients ~ P Q^T

The error, M minus the product, is added to the next gradient. Vectors, and matrices that would hardly shrink, are sent
unchanged in the message of P.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..comm import Axis, Collectives, Pending, regions_of
from ..offload import bytes_in_memory, sent
from .accumulation import Region
from .codec import Codec
from .gradient_reducer import GradientReducer, GradientStats
from .group import ShardedGroup
from .layout import FlatLayout, ParamShard

LOW_RANK_ERROR = "low_rank_error"
"""State in a checkpoint; the number of its rank follows."""


@dataclass(frozen=True)
class PowerSGDOptions:
    """The settings of PowerSGD in the config."""

    rank: int
    start_step: int
    min_compression_rate: float
    error_feedback: bool
    warm_start: bool
    seed: int


@dataclass(frozen=True)
class Thin:
    """A parameter as a matrix, and its factors' rank."""

    index: int
    start: int  # in the flat buffer
    rows: int
    columns: int
    rank: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns


@dataclass(frozen=True)
class ThinLayout:
    """The parameters of a group that are sent as thin matrices, and the ranges that are sent unchanged."""

    thin: tuple[Thin, ...]
    plain: tuple[slice, ...]  # of the flat buffer, padding too

    @classmethod
    def of(cls, layout: FlatLayout, low_rank: PowerSGDOptions) -> ThinLayout:
        thin = []
        for index, param_view in enumerate(layout.param_views):
            if len(param_view.shape) < 2 or not param_view.numel:
                continue
            rows, columns = param_view.shape[0], param_view.numel // param_view.shape[0]
            rank = min(low_rank.rank, rows, columns)
            # As torch's PowerSGD hook: the elements sent, times the wanted rate, are fewer than the matrix has.
            if (rows + columns) * rank * low_rank.min_compression_rate < param_view.numel:
                thin.append(Thin(index, param_view.offset_in_flat, rows, columns, rank))
        # Starts and ends alternate, so every second gap is a range that is sent unchanged.
        edges = [0, *(edge for param in thin for edge in (param.start, param.end)), layout.padded_numel]
        plain = (slice(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True))
        return cls(tuple(thin), tuple(gap for gap in plain if gap.start < gap.stop))

    @property
    def num_first(self) -> int:
        """Elements of the first message: all P, and the ranges that are sent unchanged."""
        return sum(param.rows * param.rank for param in self.thin) + sum(
            int(region.stop - region.start) for region in self.plain
        )

    @property
    def num_second(self) -> int:
        """Elements of the second message: all Q."""
        return sum(param.columns * param.rank for param in self.thin)

    @property
    def num_thin(self) -> int:
        """Elements of the matrices."""
        return sum(param.rows * param.columns for param in self.thin)

    def kept_numel(self, low_rank: PowerSGDOptions) -> int:
        """Elements that are kept between steps: errors and Q."""
        errors = self.num_thin if low_rank.error_feedback else 0
        return errors + (self.num_second if low_rank.warm_start else 0)


class PowerSGDReducer(GradientReducer):
    """As `GradientReducer`, over the only axis along which data differ. The staged gradient lies in private memory.

    Errors and Q are from the last step that counted: a skipped step does not change them.
    """

    def __init__(
        self,
        group: ShardedGroup,
        levels: Sequence[Codec],
        replicas: Codec,
        dtype: torch.dtype,
        stats: GradientStats,
        low_rank: PowerSGDOptions,
    ) -> None:
        super().__init__(group, levels, replicas, dtype, stats)
        self._low_rank = low_rank
        self.has_steps = True
        self.step: Callable[[], int] = lambda: 0
        """The number of completed steps."""
        self._layout = ThinLayout.of(group.layout, low_rank)
        # The dtype of the computation and of the kept states.
        self._wide = dtype if dtype == torch.float64 else torch.float32
        self.errors: dict[int, Tensor] = {}
        """Index of a parameter -> (rows, columns). Empty before the first step."""
        self.factors: dict[int, Tensor] = {}
        """Index of a parameter -> Q of the last step, (columns, rank)."""
        self.unit: Callable[[], float] = lambda: 1.0
        """The factor that this step's gradients will be multiplied by."""
        self._tried: dict[int, tuple[Tensor, Tensor]] = {}  # error and Q after this step, if it counts

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept between steps, and those that this step will keep if it counts."""
        yield from (*self.errors.values(), *self.factors.values())
        for pair in self._tried.values():
            yield from pair

    @property
    def nbytes(self) -> int:
        """Bytes of `held` in memory."""
        return sum(map(bytes_in_memory, self.held()))

    def _goes_thin(self, has_shard: bool) -> bool:
        """Whether the gradient is sent as thin matrices: only in the first backward, as errors are sent once a step."""
        axis = self._axis
        return not has_shard and axis.size > 1 and bool(self._layout.thin) and self.step() >= self._low_rank.start_step

    @property
    def _axis(self) -> Axis:
        group = self._group
        return group.axes.states if group.axes.states.size > 1 else group.axes.replicas

    def staging_axis(self, boundary: bool, has_shard: bool) -> Axis | None:
        return self._axis if boundary and self._goes_thin(has_shard) else super().staging_axis(boundary, has_shard)

    def next_message(self, axis: Axis, has_shard: bool) -> Tensor | None:
        return None if self._goes_thin(has_shard) else super().next_message(axis, has_shard)

    def open_message(self, axis: Axis, has_shard: bool) -> Tensor:
        if not self._goes_thin(has_shard):
            return super().open_message(axis, has_shard)
        return torch.empty(self._group.layout.padded_numel, dtype=self._wide, device=self._group.full.device)

    def places(self, axis: Axis | None, message: Tensor | None, shard: Tensor, has_shard: bool) -> list[Region]:
        if axis is None or message is None or not self._goes_thin(has_shard):
            return super().places(axis, message, shard, has_shard)
        return [(0, message.numel(), message)]

    def sum(
        self, axis: Axis | None, message: Tensor | None, shard: Tensor, has_shard: bool, boundary: bool, counts: bool
    ) -> Iterator[Pending]:
        if axis is None or message is None or not self._goes_thin(has_shard):
            yield from super().sum(axis, message, shard, has_shard, boundary, counts)
            return
        # No phases from here on: each sum is waited for at once, in a process group that has no other messages.
        matrices = self._matrices(message)
        factors = [self._factor(thin) for thin in self._layout.thin]
        first = [(matrix @ q).reshape(-1) for matrix, q in zip(matrices, factors, strict=True)]
        sent = torch.cat([*first, *(message[region] for region in self._layout.plain)])
        low = 0
        summed = self._summed(sent)
        bases = []
        for thin in self._layout.thin:
            # Every rank orthogonalises the same sum, so all have the same P.
            bases.append(orthogonal(summed[low : low + thin.rows * thin.rank].view(thin.rows, thin.rank)))
            low += thin.rows * thin.rank
        for region in self._layout.plain:
            message[region] = summed[low : low + region.stop - region.start]
            low += region.stop - region.start
        second = [(matrix.T @ p).reshape(-1) for matrix, p in zip(matrices, bases, strict=True)]
        summed = self._summed(torch.cat(second))
        low = 0
        for thin, matrix, p in zip(self._layout.thin, matrices, bases, strict=True):
            q = summed[low : low + thin.columns * thin.rank].view(thin.columns, thin.rank)
            low += thin.columns * thin.rank
            # `q` is of the sum over ranks, so the product is the sum, and 1 / size of it the mean.
            product = torch.mm(p, q.T, out=message[thin.start : thin.end].view(thin.rows, thin.columns))
            # A rank's distance to the mean is an error too: the paper's algorithm 2.
            self._tried[thin.index] = matrix.sub_(product, alpha=1 / axis.size), q.clone()
        self._finish(axis, message, shard, counts)

    def accept(self, unit: float) -> None:
        """Keep errors and Q: the step counts. unit: the factor that its gradients were multiplied by, as errors are."""
        for index, (error, factor) in self._tried.items():
            if self._low_rank.error_feedback:
                self.errors[index] = error.mul_(unit)
            if self._low_rank.warm_start:
                self.factors[index] = factor
        self._tried = {}

    def reset(self) -> None:
        """Begin another step. Errors of a step that did not count are dropped."""
        super().reset()
        self._tried = {}

    def forget(self, index: int) -> None:
        """Begin the error and Q of a parameter anew."""
        self.factors.pop(index, None)
        if index in self.errors:
            self.errors[index].zero_()

    def make_errors(self, num_steps: int) -> None:
        """Take zeroed memory for the errors of a run of `num_steps` steps."""
        self._tried = {}
        self.errors, self.factors = {}, {}
        if self._axis.size > 1 and num_steps > self._low_rank.start_step and self._low_rank.error_feedback:
            device = self._group.full.device
            self.errors = {
                thin.index: torch.zeros(thin.rows, thin.columns, dtype=self._wide, device=device)
                for thin in self._layout.thin
            }

    def rank_states(self) -> Iterator[tuple[ParamShard, str, Tensor]]:
        for index, error in self.errors.items():
            yield ParamShard(index, 0, 0, error.numel()), f"{LOW_RANK_ERROR}_{self._axis.rank}", error.view(-1)

    def rank_state_names(self, index: int) -> list[str]:
        return [f"{LOW_RANK_ERROR}_{rank}" for rank in range(self._axis.size)] if index in self.errors else []

    # -- helpers --------------------------------------------------------------------------------------------------

    def _matrices(self, message: Tensor) -> list[Tensor]:
        found = []
        for thin in self._layout.thin:
            matrix = message[thin.start : thin.end].view(thin.rows, thin.columns)
            error = self.errors.get(thin.index)
            found.append(matrix.clone() if error is None else torch.add(matrix, error, alpha=1 / self.unit()))
        return found

    def _factor(self, thin: Thin) -> Tensor:
        """Return the first Q, (columns, rank), the same on all ranks."""
        kept = self.factors.get(thin.index) if self._low_rank.warm_start else None
        # That of a checkpoint may have the rank of another config.
        if kept is not None and kept.shape == (thin.columns, thin.rank):
            return orthogonal(kept)
        # Seeded by name, so that it does not depend on the group. On the CPU, so that it does not depend on the device.
        name = zlib.crc32(self._group.layout.names[thin.index].encode())
        drawn = torch.Generator().manual_seed(self._low_rank.seed + self.step() * 1_000_003 + name)
        q = torch.randn(thin.columns, thin.rank, generator=drawn, dtype=torch.float64)
        return sent(orthogonal(q).to(self._wide).contiguous(), self._group.full.device)

    def _finish(self, axis: Axis, total: Tensor, shard: Tensor, counts: bool) -> None:
        """total: (padded_numel,)."""
        if axis is self._group.axes.states:
            shard.copy_(total[self._group.own])
            mine = slice(0, shard.numel())
        else:
            shard.copy_(total)
            mine = regions_of(shard.numel(), axis.size)[axis.rank]
        self._inspection.look(axis, mine.start, shard[mine], (), counts)

    def _summed(self, values: Tensor) -> Tensor:
        """Return the sum over ranks, on all ranks, computed in the dtype of messages."""
        return self._exchange.sum(values.to(self._stager.dtype), self._name).to(self._wide)

    @cached_property
    def _exchange(self) -> Collectives:
        """A process group apart from the groups' messages: the second message starts when the first has arrived."""
        return self._group.axes.exchange_along(("shard",) if self._group.axes.states.size > 1 else ("replica",))


def orthogonal(matrix: Tensor) -> Tensor:
    """(rows, rank) -> an orthonormal basis of its columns, completed if they are dependent."""
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis
