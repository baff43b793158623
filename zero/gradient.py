"""The gradient of a group: from the parameters' `grad` to this rank's shard of the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import Axis, Pending, regions_of
from ..offload import FINISHED, Transfer
from .accumulation import LocalSum, ShardMemory, Staging
from .codec import Codec
from .gradient_reducer import GradientReducer, GradientStats, NonFinite
from .group import ShardedGroup
from .host_update import HostSum, HostUpdate
from .powersgd import PowerSGDOptions, PowerSGDReducer


class GradientState(NamedTuple):
    """The host's record of a gradient after a backward. Its tensors are those of that time, not copies."""

    grads: tuple[Tensor | None, ...]  # `param.grad` of each parameter
    shard: Tensor | None
    flat: Tensor | None  # of `LocalSum`
    counted: tuple[Tensor, ...]  # of `GradientStats`, as the next
    was_finite: Tensor | None
    used: frozenset[int]
    has_values: bool
    has_shard: bool
    is_final: bool

    def is_at(self, other: GradientState) -> bool:
        """Return True if both have the same facts and the same tensors."""
        tensors, others = ((*one.grads, one.shard, one.flat, *one.counted, one.was_finite) for one in (self, other))
        facts = self[5:] == other[5:]
        return facts and len(tensors) == len(others) and all(a is b for a, b in zip(tensors, others, strict=True))


class GroupGradient:
    """Reduces a group's gradients into `shard`, (shard_numel,) of the accumulation dtype.

        param.grad --Staging--> message --GradientReducer--> shard
             |                                     |  |
         LocalSum, of earlier microbatches   ShardMemory, HostSum

    Three parts: `accumulation.py` adds up microbatches, `gradient_reducer.py` sums over ranks, and the sums are
    inspected on the way, while they are in cache (also `gradient_reducer.py`). If reductions wait for the accumulation
    boundary, gradients of earlier microbatches stay full on each rank; else their shards are added up. If the host
    updates, a reduced shard leaves the device, and the final `shard` is in host memory: complete after `arrive`.
    """

    def __init__(
        self,
        group: ShardedGroup,
        levels: Sequence[Codec],
        replicas: Codec,
        accumulation_dtype: torch.dtype,
        reduces_every_backward: bool,
        common: Tensor | None = None,
        is_handed_over: bool = False,
        host: HostUpdate | None = None,
        keeps_sum: bool = True,
        low_rank: PowerSGDOptions | None = None,
    ) -> None:
        """levels, replicas: see `GradientReducer`. common, is_handed_over: see `ShardMemory`. keeps_sum: see
        `LocalSum`.

        host: set if the host updates a device's parameters. low_rank: set if gradients are sent as thin matrices.
        """
        self.group = group
        self.accumulation_dtype = accumulation_dtype
        self.reduces_every_backward = reduces_every_backward
        self.shard: Tensor | None = None
        self.used: set[int] = set()
        """Indices of the parameters that got a gradient on this rank, in any backward of this step."""
        self.stats = GradientStats(group)
        self._reducer = GradientReducer(group, levels, replicas, accumulation_dtype, self.stats)
        if low_rank is not None:
            self._reducer = PowerSGDReducer(group, levels, replicas, accumulation_dtype, self.stats, low_rank)
        self._local = LocalSum(group, accumulation_dtype, keeps_sum)
        self._memory = ShardMemory(group, accumulation_dtype, common, is_handed_over)
        self._host = None if host is None else HostSum(host, self._memory.take)
        self._has_shard = False  # `shard` has the sum of earlier microbatches
        self._is_final = False  # `shard` has the step's sum; another backward may still add to it
        self._staging: Staging | None = None  # of the current backward
        self._early: set[int] = set()  # indices of gradients that wait for `_staging`
        self._is_in_place = False  # each `param.grad` is a view of the shard

    @property
    def takes_each(self) -> bool:
        """Whether every backward empties `param.grad`, not only the last of a step."""
        return self.reduces_every_backward or self._local.is_flat

    @property
    def sums_each(self) -> bool:
        """Whether every backward sums over ranks, not only the last of a step."""
        axes = self.group.axes
        return axes.replicas.size == 1 and (self.reduces_every_backward or axes.states.size == 1)

    @property
    def leaves_device(self) -> bool:
        """Whether the gradient is computed on a device and the update runs on the host."""
        return self._host is not None

    def sum_if(self, sums: Callable[[], bool]) -> None:
        """Sum over replicas only in steps for which `sums` returns True."""
        self._reducer.sums = sums

    @property
    def low_rank(self) -> PowerSGDReducer | None:
        """The PowerSGD reducer, if the group has it."""
        return self._reducer if isinstance(self._reducer, PowerSGDReducer) else None

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors that `held_bytes` counts."""
        kept = () if self.low_rank is None else self.low_rank.held()
        tensors = (self.shard, self._local.flat, *(param.grad for param in self.group.params), *kept)
        return (tensor for tensor in tensors if tensor is not None)

    @property
    def held_bytes(self) -> int:
        """Bytes that gradients take now on this rank, `param.grad` included."""
        # In place, `param.grad` is a view of the shard, which counts already.
        params = () if self._is_in_place else self.group.params
        of_params = sum(_bytes_of(param.grad) for param in params if param.grad is not None)
        kept = 0 if self.low_rank is None else self.low_rank.nbytes
        return self._memory.nbytes(self.shard) + of_params + self._local.nbytes + kept

    @property
    def non_finite(self) -> NonFinite | None:
        """The first non-finite value found. Waits for the device."""
        self.arrive()
        return self.stats.first(self.shard, is_own=not self.group.axes.is_tied)

    def check(self) -> bool:
        """Return whether the gradient is finite, and keep the first value that is not. Waits for the device."""
        if self.stats.is_finite:
            return True
        self.arrive()
        self.stats.first(self.shard, is_own=not self.group.axes.is_tied)
        return False

    def remember(self) -> None:
        """As `check`, before the shard is freed, without waiting for a device: see `stats.is_bad`."""
        if self.shard is not None:
            self.stats.remember(self.shard, is_own=not self.group.axes.is_tied)

    def clear(self, cleared: Mapping[int, bool]) -> None:
        """Zero final gradients. cleared: id of a parameter -> whether its gradient becomes None."""
        self.arrive()
        for index, param in enumerate(self.group.params):
            if id(param) in cleared:
                for param_shard in self.group.param_shards.of(index):
                    assert self.shard is not None
                    self.shard[param_shard.in_shard].zero_()
                self.mark_changed(index, is_used=index in self.used and not cleared[id(param)])

    def so_far(self, index: int, dtype: torch.dtype, is_complete: bool) -> tuple[Tensor, bool]:
        """Return this rank's term of the gradient of parameter `index`, flat, and whether this rank has used the
        parameter.

        The sum of the terms over the ranks of the sharding spec is the gradient of the step's backwards until now.
        is_complete: the last backward of the step has run.
        """
        param_view, param = self.group.layout.param_views[index], self.group.params[index]
        found = torch.zeros(param_view.numel, dtype=dtype, device=self.group.full.device)
        # The replicas hold equal final sums, so a single replica reports it.
        has_final = self.group.axes.replicas.rank == 0 or not self._reducer.sums()
        self.arrive()
        total = self.shard if self._host is None or self._host.is_open else self._host.total
        if self._has_shard and (has_final or not self._is_final) and total is not None:
            for param_shard in self.group.param_shards.of(index):
                part = total[param_shard.in_shard]
                found[param_shard.in_param] += part.to(found.device)
        if self._local.has_values and self._local.flat is not None:
            found += self._local.flat[param_view.in_flat]
        arrived = None if is_complete or self.takes_each else param.grad  # else `grad` is a placeholder
        if arrived is not None:
            found += arrived.to_dense().reshape(-1)
        return found, arrived is not None or index in self.used

    def count_again(self) -> None:
        """Count the final gradient again: it was changed, so `stats.is_outdated` is True."""
        self.stats.forget()
        self._count()

    @property
    def arrived(self) -> Transfer:
        """The copy of the final shard to the host; complete if it stays on the device."""
        return FINISHED if self._host is None else self._host.arrived

    def arrive(self) -> None:
        """Let the host wait until a gradient that leaves the device has arrived."""
        self.arrived.wait()

    def mark_changed(self, index: int, is_used: bool) -> None:
        """The caller has changed the final gradient of parameter `index`. is_used: it is not None."""
        self.stats.is_outdated = True
        if is_used:
            self.used.add(index)
        else:
            self.used.discard(index)

    def clamp(self, bound: float) -> None:
        """Clamp the elements of the final sum to [-bound, bound]."""
        if self.shard is not None:
            self.arrive()
            self.shard.clamp_(-bound, bound)
            self.stats.is_outdated = True

    def state(self) -> GradientState:
        """Return the state between two backwards of a gradient that stays on the device."""
        assert self._host is None and self._staging is None and not self._is_in_place
        return GradientState(
            tuple([param.grad for param in self.group.params]),
            self.shard,
            self._local.flat,
            tuple(self.stats.counted),
            self.stats.was_finite,
            frozenset(self.used),
            self._local.has_values,
            self._has_shard,
            self._is_final,
        )

    def restore(self, state: GradientState) -> None:
        """Take the state after a backward that a device has replayed in the same memory."""
        for param, grad in zip(self.group.params, state.grads, strict=True):
            param.grad = grad
        self.shard, self._local.flat = state.shard, state.flat
        self.stats.counted, self.stats.was_finite = list(state.counted), state.was_finite
        self.used = set(state.used)
        self._local.has_values, self._has_shard, self._is_final = state.has_values, state.has_shard, state.is_final

    def reset(self) -> None:
        """Forget the gradient after an optimizer step."""
        self.stats.forget()
        if self._reducer.has_steps:
            self._reducer.reset()
        self.used.clear()
        self._staging = None
        self._early.clear()
        self._is_in_place = False
        self._local.has_values = False
        self._has_shard = self._is_final = False
        # See `drop_shard`: only such a shard stays in memory between steps.
        is_sent_in_parts = self.group.axes.states.size > 1 and not self.group.axes.copies_are_shared
        if not is_sent_in_parts or self._host is not None or self.group.full.device.type != "cpu":
            self.drop_shard()

    def drop_shard(self) -> None:
        """Free the shard after its use, so that the next forward has its memory for activations.

        `reset` keeps the shard if messages carry each rank's part of the sum: taking it again would cost 1 to 2 % of a
        step on top of the messages, and it is only a rank's share.
        """
        self._has_shard = False
        self.shard = None
        self._memory.drop()
        if self._host is not None:
            self._host.drop()

    def hand_over(self) -> Tensor | None:
        """Return the final shard, in memory that the next gradient does not reuse before `give_back`."""
        taken, self.shard = self.shard, None
        if self._host is not None:
            self._host.hand_over()
        return taken

    def give_back(self, taken: Tensor) -> None:
        """Free a shard that was handed over."""
        if self._host is not None:
            self._host.give_back(taken)

    def accumulate_in_place(self) -> None:
        """Let autograd add up a step's gradients in the shard, if no other rank has a part in them.

        Else it does nothing. Copying them there at the end costs page faults for all bytes, 4 % of a step.
        """
        is_alone = self.group.axes.states.size == self.group.axes.replicas.size == 1
        if is_alone and self._host is None and self.accumulation_dtype == self.group.plan.dtype:
            shard = self._open_shard().zero_()
            for param_view, param in zip(self.group.layout.param_views, self.group.params, strict=True):
                # `.data` has a separate `_version`, which shows if anything was added.
                param.grad = shard[param_view.in_flat].view(param_view.shape).data
            self._is_in_place = True

    def take_early(self, index: int, boundary: bool) -> None:
        """Stage the gradient of parameter `index` as it arrives, in a group that is the next to be reduced.

        If staging would wait for other ranks or change a rounding, `collect` stages it later.
        """
        if self.group.params[index].grad is None:  # frozen since its forward: autograd calls the hook and adds nothing
            return
        self._early.add(index)  # a set: a gradient that arrives twice was added up by autograd
        staging = self._staging or self._early_staging(boundary)
        if staging is not None:
            staging.take(self._early)
            self._early.clear()

    def place_for(self, index: int, boundary: bool) -> Tensor | None:
        """Return memory to compute the gradient of parameter `index` in; see `Staging`. None if it is staged later."""
        staging = self._staging or self._early_staging(boundary)
        return None if staging is None else staging.place(index)

    def collect(self, boundary: bool) -> Iterator[Pending]:
        """Take the gradients of a backward and reduce them, a phase for each `next`.

        The first phase stages them and frees `param.grad`. Each later phase waits for the pending result of the phase
        before.
        """
        # A gradient that could not be staged early is still in `param.grad`, and `finish` takes it.
        self._early.clear()
        # `param.grad` is the shard: autograd has added to it.
        if not boundary and self._is_in_place:
            return
        if not boundary and not self.reduces_every_backward:
            if not self._has_shard:
                self.drop_shard()  # full gradients lie elsewhere until the boundary
            self.used |= self._local.add()
            return
        if self._is_final:
            self._reopen()
        axis = self._reducer.staging_axis(boundary, self._has_shard)
        # If staging began early, it has written to this same memory: see `next_message`.
        message = None if axis is None else self._reducer.open_message(axis, self._has_shard)
        staging, self._staging = self._staging or self._open_staging(axis, message), None
        if self._is_in_place:
            # Else every unused parameter would count as used with a zero gradient, and decay.
            self._drop_untouched()
        self.used |= staging.finish()
        self._is_in_place = False
        # Tied gradients are counted later, when they are complete.
        counts = boundary and not self.group.axes.is_tied and self.group.axes.is_counted
        assert self.shard is not None
        yield from self._reducer.sum(axis, message, self.shard, self._has_shard, boundary, counts)
        self._has_shard, self._is_final = True, boundary
        # A tied gradient leaves in `replace`, after the sum over its copies.
        if self._host is not None and not self.group.axes.is_tied and (boundary or self.group.axes.replicas.size == 1):
            self._leave(boundary)

    def replace(self, total: Tensor) -> None:
        """Set the final shard of a tied weight to the sum over its copies, (shard_numel,)."""
        assert self.shard is not None
        self.stats.remember(self.shard, is_own=True)  # before the sum hides which rank has a bad value
        self.shard.copy_(total)
        self._count()
        self._leave(is_final=True)

    # -- helpers --------------------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        """Prepare a final sum for another backward. Over replicas, the first replica keeps the sum alone."""
        self.stats.count_anew()
        self._is_final = False
        replica = self.group.axes.replicas.rank
        if self.group.axes.replicas.size == 1 or not self._has_shard:
            return
        shard = self._open_shard()
        # The sum over replicas comes again, so a single replica may still hold the first sum.
        if self.group.axes.states.size > 1:
            if replica:
                shard.zero_()
            return
        if replica == 0 or not self._reducer.sums():  # else replicas may share the shard's memory
            self._local.add_total(shard)
        self._has_shard = False

    def _drop_untouched(self) -> None:
        """Set `grad` to None if nothing was added to it."""
        assert self.shard is not None
        memory = self.shard.untyped_storage().data_ptr()  # `data_ptr` of an empty part would be 0
        for param in self.group.params:
            # Autograd raises the counter of a tensor that it adds to in place. A hook may have set another tensor.
            grad = param.grad
            if grad is not None and grad._version == 0 and grad.untyped_storage().data_ptr() == memory:
                param.grad = None

    def _open_shard(self) -> Tensor:
        if self._host is not None:
            if not self._host.is_open:
                self.shard = self._host.open()
        elif self.shard is None:
            self.shard = self._memory.take()
        assert self.shard is not None
        return self.shard

    def _leave(self, is_final: bool) -> None:
        """Send the reduced shard to the host, if the host updates."""
        if self._host is not None and self._host.is_open:
            total = self._host.leave()
            self.shard = total if is_final else None

    def _count(self) -> None:
        """Count a final shard that was changed after its reduction: each element on a single rank."""
        if not self.group.axes.is_counted:
            return
        axis, shard = self.group.axes.replicas, self.shard
        assert shard is not None
        region = regions_of(shard.numel(), axis.size)[axis.rank] if self._reducer.sums() else slice(0, shard.numel())
        self.stats.look(axis, region.start, shard[region], (), counts=True)

    def _early_staging(self, boundary: bool) -> Staging | None:
        """Return the staging of the current backward. Begins it if possible; the next gradient may ask again.

        It is possible if the gradient is reduced after this backward, and if adding a second part is exact.
        """
        if self._local.has_values or not (boundary or self.reduces_every_backward):
            return None
        axis = self._reducer.staging_axis(boundary, self._has_shard)
        if axis is None:
            if not self._has_shard:
                self._staging = self._open_staging(None, None)
        elif self._reducer.adds_exactly:
            message = self._reducer.next_message(axis, self._has_shard)
            if message is not None:
                self._staging = self._open_staging(axis, message)
        return self._staging

    def _open_staging(self, axis: Axis | None, message: Tensor | None) -> Staging:
        places = self._reducer.places(axis, message, self._open_shard(), self._has_shard)
        # A message holds only this backward's gradient: the earlier sum in the shard is added after the exchange.
        adds = message is None and self._has_shard
        if self._local.has_values:
            if message is not None and message.dtype != self.accumulation_dtype:
                # The whole sum is rounded once, as that of microbatches that are added up in the shard.
                self.used |= self._local.add()
            self._local.move_sum_to(places, adds)
            adds = True
        return Staging(self.group, places, adds)


def _bytes_of(gradient: Tensor) -> int:
    """Return the bytes of a gradient, which an embedding with sparse=True makes sparse."""
    return gradient._values().nbytes + gradient._indices().nbytes if gradient.is_sparse else gradient.nbytes
