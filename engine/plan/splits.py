"""Split layers, sequences and experts for a profile on the meta device, where a single rank runs alone.

The run uses the same layers, attention and `Collectives` as a training. Only the transport differs: it moves nothing
and counts the bytes that it would move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import comb
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...comm import EXCHANGE_SLOTS, Axis, Collectives, Numels, Pending, Terms, regions_of
from ...comm.axis import Chunk, SoloTransport
from ...model.patches import ModelPatches
from ...parallel.expert_dispatch import Slots, split_experts
from ...parallel.experts import ExpertPlan
from ...parallel.layers import SplitLayers
from ...parallel.plan import TensorPlan
from ...parallel.randomness import Randomness
from ...parallel.sequence_attention import SequenceAttention
from ...parallel.sequence_data import SequenceData
from ...parallel.sequence_regions import SequenceParallelRegions
from ..blueprint.axes import EXPERT, SEQUENCE, TENSOR
from ..blueprint.blueprint import Blueprint
from ..blueprint.places import shares_of
from .profile import CollectiveCall
from .tracker import Tracker

_META = torch.device("meta")
_SLOTS_IN_TURN = 3  # of the sockets transport


@dataclass(frozen=True)
class PlannedSplits:
    """Degrees of the axes that split layers, sequences and experts, and the rank that is profiled.

    tensor_place: coordinate on the tensor axis. plan: `tensor_parallel.plan`. transport: transport of the exchanges.
    has_parts: whether tokens are split between split layers. attention: `sequence_parallel.attention`. expert: ranks
    that share experts; routers are assumed to choose each expert equally often. stages: block names of each pipeline
    stage, between which activations are whole; None without a pipeline.
    """

    tensor: int = 1
    tensor_place: int = 0
    sequence: int = 1
    plan: Mapping[str, str] | None = None
    transport: str = "native"
    has_parts: bool = False
    attention: str = "auto"
    expert: int = 1
    stages: Sequence[Set[str]] | None = None

    @classmethod
    def of(cls, blueprint: Blueprint, tensor_place: int | None = None) -> PlannedSplits:
        """Read a blueprint. tensor_place: None: the last, which has the most if layers do not divide evenly."""
        config = blueprint.config
        parallel, pipeline = config.parallel, blueprint.pipeline
        return cls(
            tensor=parallel.tensor,
            tensor_place=parallel.tensor - 1 if tensor_place is None else tensor_place,
            sequence=parallel.sequence,
            plan=config.tensor_parallel.plan,
            transport=blueprint.transport,
            has_parts=parallel.tensor_sequence,
            attention=config.sequence_parallel.attention,
            expert=parallel.expert,
            stages=None if pipeline is None else pipeline.split.names_of(range(pipeline.split.num_stages)),
        )

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The axes with several ranks; neighbouring ranks differ in the last axis."""
        sizes = ((EXPERT, self.expert), (SEQUENCE, self.sequence), (TENSOR, self.tensor))
        return tuple((name, size) for name, size in sizes if size > 1)

    def shrink(self, model: nn.Module) -> tuple[TensorPlan | None, ExpertPlan | None]:
        """Reduce each parameter to this rank's part. Raises ValueError if layers cannot be split like this."""
        tensor = experts = None
        if self.tensor > 1:
            tensor = TensorPlan.of(model, self.tensor, self.plan, self.has_parts)
        if self.expert > 1:
            experts = ExpertPlan.of(model, self.expert)
            if experts.lists:
                raise ValueError(
                    f"parallel.expert: expected experts in a single module, found the list '{experts.lists[0].name}'; "
                    'their calls depend on values, and a plan has none. Train without a plan (no "auto" in the '
                    "config), or put the experts into a module with parameters of shape (experts, ..., ...)"
                )
        # Rank 0 of the experts stands for all: their ranks have equal numbers of experts.
        share_of = shares_of(tensor, experts, {EXPERT: 0, TENSOR: self.tensor_place}.__getitem__)
        for param in model.parameters() if self.tensor > 1 or self.expert > 1 else ():
            param.data = torch.empty(share_of(param).tensor_shard.shape, dtype=param.dtype, device=_META)
        return tensor, experts


class MetaTransport(SoloTransport):
    """The transport of an axis whose other ranks do not exist; see `Transport`.

    The tracker sees memory of the allocator. This class counts slots in shared memory and slots that are kept.
    """

    def __init__(self, transport: str, size: int, place: int, tracker: Tracker) -> None:
        super().__init__(_META)
        self.size, self.rank = size, place
        self._kind, self._tracker = transport, tracker
        self.sums_here = transport != "native"
        self._reserved = 0
        self._opened: list[tuple[int, int]] = []  # bytes of a slot, and bytes received for it

    @property
    def slot_bytes(self) -> int:
        """Bytes of slots that this rank keeps after several microbatches."""
        if self._kind == "shared_memory":
            return EXCHANGE_SLOTS * self._reserved
        if self._kind != "sockets" or not self._opened:
            return 0
        # If the number of slots is no multiple, every message sooner or later uses every slot.
        turns = _SLOTS_IN_TURN if len(self._opened) % _SLOTS_IN_TURN == 0 else 1
        several = 1 if turns > 1 else _SLOTS_IN_TURN
        return several * sum(sum(map(max, zip(*self._opened[turn::turns], strict=True))) for turn in range(turns))

    def reserve_slots(self, nbytes: int, count: int) -> None:
        self._reserved = max(self._reserved, nbytes)

    def open_slot(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        if self._kind == "native":
            return torch.empty(numel, dtype=dtype, device=_META)
        # The tracker must not see a slot. `slot_bytes` counts slots, because they outlive microbatches.
        with _disable_current_modes():
            slot = torch.empty(numel, dtype=dtype, device=_META)
        self._tracker.leave_out(slot)
        self._opened.append((slot.nbytes, 0))
        return slot

    def gather_copies(self, full: Tensor, part: Tensor, what: str) -> Pending:
        return Pending()

    def reduce_scatter(self, slot: Tensor, spare: Tensor | None, what: str) -> Terms:
        shard = slot[: slot.numel() // self.size]
        if self._kind == "native" and spare is not None:
            shard = spare
        self._receive(shard)
        return Terms(Pending(), slice(0, shard.numel()), lambda: [shard], lambda: None)

    def all_reduce(self, slot: Tensor, out: Tensor, what: str) -> Terms:
        """Count the received terms. The sum itself is in the measured seconds of the call."""
        if self._kind == "native":
            return Terms(Pending(), slice(0, out.numel()), lambda: [slot], lambda: None)
        self._receive(slot[regions_of(out.numel(), self.size)[self.rank]])
        # An empty region: nothing is summed on the meta device.
        return Terms(Pending(), slice(0, 0), lambda: [slot[:0]], lambda: None)

    def swap(self, out: Tensor, given: Tensor, numels: Numels, what: str) -> Pending:
        return Pending()

    def pass_on(self, chunks: Tensor, to: Sequence[int], of: Sequence[Chunk], out: Tensor, what: str) -> Pending:
        """Count copies: a backend needs the pieces in the order of the ranks."""
        ranks = [rank for rank, _ in of]
        copies = [torch.empty_like(chunks) for order in (to,) if self._kind == "native" and [*order] != sorted(order)]
        copies += [torch.empty_like(out) for order in (ranks,) if self._kind == "native" and order != sorted(order)]
        return Pending(copies.clear)

    def _receive(self, part: Tensor) -> None:
        if self._kind == "sockets":
            self._opened[-1] = self._opened[-1][0], (self.size - 1) * part.nbytes


class MetaCollectives(Collectives):
    """An `Collectives` that reports its calls to a tracker."""

    def __init__(self, name: str, size: int, place: int, transport: str, tracker: Tracker) -> None:
        self.transport = MetaTransport(transport, size, place, tracker)
        super().__init__(Axis(name, place, tuple(range(size)), tuple(range(size)), self.transport))
        self._name, self._tracker = name, tracker

    def sum(self, x: Tensor, what: str) -> Tensor:
        before, y = self.bytes_sent, super().sum(x, what)
        return self._record("sum", y, y.nbytes, before)

    def sum_part(self, x: Tensor, dim: int, what: str) -> Tensor:
        before, y = self.bytes_sent, super().sum_part(x, dim, what)
        return self._record("sum_part", y, x.nbytes, before)

    def gather(self, x: Tensor, dim: int, what: str) -> Tensor:
        before, y = self.bytes_sent, super().gather(x, dim, what)
        return self._record("gather", y, y.nbytes, before)

    def swap_rows(self, x: Tensor, counts: Numels, what: str) -> Tensor:
        before, y = self.bytes_sent, super().swap_rows(x, counts, what)
        return self._record("swap", y, y.nbytes, before)

    def trade(
        self, chunks: Tensor, to: Sequence[int], of: Sequence[tuple[int, int]], what: str
    ) -> Callable[[], Tensor]:
        before, arrived = self.bytes_sent, super().trade(chunks, to, of, what)
        self._record("trade", chunks, chunks.nbytes, before)
        return arrived

    def _record(self, kind: Any, y: Tensor, nbytes: int, sent_before: int) -> Tensor:
        self._tracker.counts.exchanges.append(CollectiveCall(self._name, kind, nbytes, self.bytes_sent - sent_before))
        return y


class _NoRandomness(Randomness):
    """Random state of a device on which nothing is drawn."""

    def __init__(self) -> None:
        """Make no generator."""

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    begin = leave_common = return_to_common = restore = seed = _nothing

    def states(self) -> list[Tensor]:
        """Return no states."""
        return []


class SplitModel:
    """Splits a model and its batches for a run."""

    def __init__(
        self,
        splits: PlannedSplits,
        plans: tuple[TensorPlan | None, ExpertPlan | None],
        model: nn.Module,
        device: str,
        tiled: frozenset[int],
        tracker: Tracker,
        patches: ModelPatches,
    ) -> None:
        """Put the split layers and attention on the model. plans: of `shrink`. tiled: ids of tiled modules."""
        self._splits, self._model, self._tracker = splits, model, tracker
        self._exchanges: list[MetaCollectives] = []
        plan, experts = plans
        if plan is not None:
            exchange = self._exchange(TENSOR, splits.tensor, splits.tensor_place)
            regions = plan.regions
            if splits.stages is not None:
                regions = tuple(part for stack in plan.regions for part in stack.cut(splits.stages))
            parts = (
                SequenceParallelRegions(regions, tiled, model, exchange, _NoRandomness(), patches) if regions else None
            )
            SplitLayers(plan, model, exchange, None, patches, parts)
        if experts is not None:
            exchange = self._exchange(EXPERT, splits.expert, 0)
            for layer in experts.layers:
                read = partial(_evenly, splits.expert, layer.num_experts // splits.expert)
                split_experts(replace(experts, layers=(layer,)), exchange, patches, read)
        self._attention: SequenceAttention | None = None
        if splits.sequence > 1:
            self._attention = SequenceAttention(self._sequence, splits.attention, device=device)
            self._attention.put_on(model, patches)

    @property
    def slot_bytes(self) -> int:
        return sum(exchange.transport.slot_bytes for exchange in self._exchanges)

    @cached_property
    def _sequence(self) -> MetaCollectives:
        return self._exchange(SEQUENCE, self._splits.sequence, 0)

    def _exchange(self, name: str, size: int, place: int) -> MetaCollectives:
        made = MetaCollectives(name, size, place, self._splits.transport, self._tracker)
        self._exchanges.append(made)
        return made

    def part(self, batch: Any, rows: int, has_own_loss: bool) -> Any:
        """Return this rank's inputs. With split sequences they are a `SequenceShard` with values."""
        if self._attention is None:
            return batch
        return SequenceData(self._model, self._sequence, has_own_loss).part(_with_values(batch, rows), _META)

    def run(self, part: Any, forward: Callable[[], Any]) -> Any:
        """Run a forward of the model. part: of `part`, possibly `changed`."""
        if self._attention is None:
            return forward()
        forwards = self._attention.forwards
        forwards.begin(part.whole)
        try:
            output = forward()
            forwards.end(output)
            return output
        finally:
            forwards.end(None)


def _evenly(size: int, per_rank: int, counts: Tensor, num_tokens: int) -> Slots:
    """Return tokens from each rank to each rank, if every set of k experts is chosen equally often.

    per_rank: experts of a rank.
    """
    k, num_experts = counts.shape[2], per_rank * size
    # Hypergeometric: P(n of a token's k experts are on this rank) = C(e, n) C(E - e, k - n) / C(E, k).
    exactly = [comb(per_rank, n) * comb(num_experts - per_rank, k - n) / comb(num_experts, k) for n in range(k + 1)]
    # Slot s has the tokens with more than s experts on this rank.
    slots = tuple(round(num_tokens * sum(exactly[slot + 1 :])) for slot in range(k))
    return ((slots,) * size,) * size


def _with_values(batch: Any, rows: int) -> Any:
    """Give a batch of `rows` rows values: every token is attended to, and no row is packed."""
    if not isinstance(batch, Mapping):
        return batch
    found = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim():
            shape = (rows, *value.shape[1:])
            # Expanded from a single number: a mask of 1 masks nothing, and takes no memory.
            fill = torch.ones((), dtype=value.dtype) if name == "attention_mask" else torch.zeros((), dtype=value.dtype)
            found[name] = fill.expand(shape)
    positions = found.get("position_ids")
    if isinstance(positions, Tensor):
        # Ascending positions say that no row has several packed samples.
        found["position_ids"] = torch.arange(positions.shape[-1]).expand(positions.shape)
    return found
