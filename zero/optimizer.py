"""The optimizer over sharded groups: master weights, states and updates."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..kernels.optimizer_step import UpdateLaunches
from ..offload import OffloadError, bytes_in_memory
from .averages import Averages
from .fused_update import FusedUpdate, StepCounts, UpdateTerms
from .gradient import GroupGradient
from .host_update import HostUpdate
from .parameter_states import ParameterStates
from .placement import ShardStore, StateChunks
from .sequence import StateError
from .shard_state import ShardPlacements, ShardState
from .sign_update import SignUpdate
from .torch_update import TorchUpdate
from .versions import Running, Speculation, UpdateThread

BY_HAND = (
    "{what}: expected engine.step(), which updates the shards of all ranks with the reduced gradients, found a call of "
    "the optimizer, which has no gradients; call engine.step() instead. zero_grad() is not needed"
)

_LACKS_STATE = (
    "optimizer: expected options that keep the rule and the states of the optimizer, found an option, set after "
    "lowtide.initialize, that needs others, such as a momentum above 0, amsgrad or maximize; set it before"
)
STATES_BY_HAND = (
    "{what}: expected engine.save_checkpoint and engine.load_checkpoint, which save and load the states of all ranks, "
    "found a call of the optimizer, whose states are divided over the ranks; engine.full(parameter, state) shows the "
    "state of a parameter"
)


_FAILED = (
    "update {step} of {what} on the host failed: {error}. Master weights and states are partly updated: continue from "
    "a checkpoint (engine.load_checkpoint)"
)


class ShardedOptimizer(torch.optim.Optimizer):
    """Updates this rank's shards. `param_groups` are the user's: learning rates and decays may be changed there.

    An update is a fused rule of `kernels/`, or the user's elementwise torch optimizer class, which gets each run of
    parameters with equal options as a flat parameter.
    """

    def __init__(
        self,
        gradients: Sequence[GroupGradient],
        param_groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        update: FusedUpdate | TorchUpdate,
        offloaded: StateChunks,
        shard_store: ShardStore | None = None,
        host: HostUpdate | None = None,
    ) -> None:
        """param_groups: [{"params": [...], options...}]. defaults: options for groups that lack them.

        offloaded: where states rest between steps. shard_store: where the shards of parameters rest, if offloaded.
        host: updates the offloaded shards of a device. Raises OffloadError.
        """
        # Optimizer.__init__ imports torch's compiler, 70 MiB a process. `__setstate__`, for unpickling, sets all that
        # is needed. The groups are the user's dictionaries, so schedulers bound to them act here too. Schedulers
        # read the names of options from the defaults.
        self.__setstate__({"defaults": defaults, "state": {}, "param_groups": param_groups})
        self._group_sizes = [len(group["params"]) for group in param_groups]
        self._checked: list[tuple[Any, ...]] = []  # of each group what `_check_groups` has last looked at
        self.counts = StepCounts()
        self._update = update
        self.speculation = Speculation()
        self.thread = UpdateThread(gradients[0].group.full.device if gradients else torch.device("cpu"))
        self.are_under_way = False
        """Whether updates on the host were started, and not waited for."""
        self.has_failed = False
        """Whether one of them was found to have failed."""
        self._under_way: dict[ShardState, Running] = {}
        self.averages: Averages | None = None
        """Moving averages of the master weights, if the user wants them."""
        self._placements = ShardPlacements(offloaded, shard_store, host)
        self._on_group: weakref.WeakMethod[Callable[[dict[str, Any]], None]] | None = None
        self.shards = self.make_shards(gradients, dict(enumerate(param_groups)))
        self._are_here = self._placements.are_where_computed(self.shards)
        self.by_parameter = ParameterStates(update, self.shards, self.counts)
        for shard in self.shards:
            shard.fill_chunks()

    @property
    def num_steps(self) -> int:
        """Number of updates, including a step in progress."""
        return self.counts.num_steps

    @property
    def num_steps_before(self) -> int:
        """Number of completed steps: an update in the backward is counted when the backward begins."""
        return self.counts.num_steps - self.counts.is_in_step

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group; 0 without groups."""
        return float(self.param_groups[0]["lr"]) if self.param_groups else 0.0

    @property
    def lacks_state(self) -> bool:
        """Whether an option needs another rule, or a state that is not kept: momentum of an SGD that began without."""
        return any(map(self._update.lacks_state, self.param_groups))

    def step(self, closure: Any = None) -> NoReturn:
        """Raise StateError: an update needs all ranks and the norm of all gradients, which the engine has."""
        raise StateError(BY_HAND.format(what="engine.optimizer.step()"))

    def state_dict(self) -> dict[str, Any]:
        """Return the options. Raises StateError once states exist, as no rank has all of them."""
        if self.counts.num_steps:
            raise StateError(STATES_BY_HAND.format(what="engine.optimizer.state_dict()"))
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the options. Raises StateError if there are states, which would be lost."""
        if state_dict.get("state"):
            raise StateError(STATES_BY_HAND.format(what="engine.optimizer.load_state_dict()"))
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"engine.optimizer.load_state_dict(): expected {len(self.param_groups)} parameter groups, found "
                f"{len(groups)}"
            )
        for own, options in zip(self.param_groups, groups, strict=True):  # in place: schedulers hold these
            own.update({key: value for key, value in options.items() if key != "params"})

    # -- groups that come later -----------------------------------------------------------------------------------

    def listen(self, on_group: Callable[[dict[str, Any]], None]) -> None:
        """Set the engine's method that registers parameter groups added by the user.

        A weak reference: the hooks on the model hold this optimizer.
        """
        self._on_group = weakref.WeakMethod(on_group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Update these parameters of the model too, from the next step on, if they require a gradient.

        As in torch, missing options take the defaults. All ranks must call it alike, between steps, with parameters
        that are in no other group. Their master weights begin as the current parameters, their states as new. Raises
        ValueError, or StateError during a step, before anything is changed.
        """
        register_groups = self._on_group() if self._on_group is not None else None
        if register_groups is None:
            raise StateError(
                "engine.optimizer.add_param_group(): the engine of this optimizer was freed; keep a reference to it"
            )
        params = param_group["params"]
        if isinstance(params, Set):
            raise TypeError(
                "engine.optimizer.add_param_group(): expected parameters in the same order on all ranks, found a set; "
                "pass a list"
            )
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        for name, default in self.defaults.items():
            param_group.setdefault(name, default)
        register_groups(param_group)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for options of a parameter group that would need a different kind of update."""
        if not self._update.takes(options):
            raise ValueError(
                f"engine.optimizer.add_param_group(): expected options of {self.kind} with the states of the first "
                f"group, found { ({key: value for key, value in options.items() if key != 'params'}) }; an option that "
                "changes the kind of update must be the same in all groups"
            )

    def make_shards(
        self, gradients: Sequence[GroupGradient], param_groups: Mapping[int, Mapping[str, Any]]
    ) -> list[ShardState]:
        """Take memory for masters and states of groups. param_groups: index -> group with the parameters."""
        index_of = {id(p): index for index, group in param_groups.items() for p in group["params"]}
        shards = self._placements.make_shards(gradients, index_of, self._update)
        if isinstance(self._update, SignUpdate):
            for gradient in gradients:
                gradient.sum_if(lambda: self.sums_gradients)
        return shards

    def register_groups(self, param_group: dict[str, Any], shards: Sequence[ShardState]) -> None:
        """Add a parameter group. shards: this rank's, from `make_shards`."""
        self.param_groups.append(param_group)
        self._group_sizes.append(len(param_group["params"]))
        self.shards.extend(shards)
        self._are_here = self._placements.are_where_computed(self.shards)
        self.counts.add(param_group["params"])
        for shard in shards:
            shard.fill_chunks()
            shard.begin_with_parameters()
            if self.counts.num_steps:
                # None for each parameter: no states yet.
                self._update.make_states(shard, {}, dict.fromkeys(shard.group.layout.names))
            if self.averages is not None:
                self.averages.add(shard)
        self._placements.save_open()

    # -- updates --------------------------------------------------------------------------------------------------

    @property
    def sums_gradients(self) -> bool:
        """Whether the next step sums gradients over replicas."""
        return not isinstance(self._update, SignUpdate) or self._update.sums_gradients(self.counts.num_steps + 1)

    def starts(self, shard: ShardState) -> bool:
        """Whether the shard is updated on the host, beside the device's work: see `start`."""
        return shard.is_apart and not self._update.waits_for_norm

    @property
    def can_be_skipped(self) -> bool:
        """Whether an update can start before the host knows if the step counts: its kernels read a device flag."""
        return self._are_here and not self._update.waits_for_norm

    def update_all(
        self,
        gradient_scale: float | Tensor,
        on_updated: Callable[[ShardState], None] | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Update all shards with gradient_scale * gradient. The engine calls it after the reductions.

        Updates on the host of a device may still be under way: see `wait_for_updates`. on_updated: called after each
        shard, so that sending it overlaps with the next update. skip: (1,) on the device: if not 0, nothing changes;
        call `count` or `uncount` later.
        """
        self.begin_step()
        terms = self._terms(gradient_scale, skip)
        if self._are_here and isinstance(self._update, FusedUpdate) and not self._update.waits_for_norm:
            self._update.update_together(self.shards, terms, on_updated)
        else:
            due = deque([(shard, shard.gradient.shard) for shard in self.shards if shard.gradient.shard is not None])
            started = [shard for shard, _ in due if self.starts(shard)]
            here = deque((shard, gradient) for shard, gradient in due if not self.starts(shard))
            self._placements.window.expect([shard.offloadable for shard, _ in here if not shard.is_apart])
            self._update_all(here, terms, self._update_shard, on_updated)
            # After the updates of this thread: from `start` on the windows belong to the update thread.
            if started:
                self._placements.expect(started)
                terms = terms.frozen()
                for shard in started:
                    self.start(shard, terms)
                self.publish(on_updated)
        if skip is None:
            self.count()

    def launches(self) -> tuple[UpdateLaunches, list[ShardState]] | None:
        """Return the next `update_all` in a form for a graph, and the updated shards. None: Triton does not update all.

        It is only asked where an update can be skipped.
        """
        assert isinstance(self._update, FusedUpdate)
        due = [shard for shard in self.shards if shard.gradient.shard is not None]
        found = self._update.launches(due, self._terms(1.0)._replace(step=self.counts.num_steps + 1))
        return None if found is None else (found, due)

    def count(self) -> None:
        """Count the step in progress."""
        self.counts.count()
        if self.averages is not None:
            average = partial(self._average, self.averages)
            # The thread writes the master weights that the average reads, so the average waits in its queue.
            self.thread.start(average) if self.are_under_way else average()

    def uncount(self) -> None:
        """Do not count the step in progress: it has changed nothing."""
        self.counts.uncount()

    def start_delayed(self, gradient_scale: float) -> None:
        """As `update_all`, in the background, with the current options, while the next gradients are computed.

        Parameters keep their values until `thread.wait` returns no error and each shard is told to take `ahead`.
        """
        what = "a shard that is not in memory cannot be computed with while it is updated"
        assert self._placements.shard_store is None, what
        self.begin_step()
        # Taken now, as the next backward replaces `arrived`.
        arrivals = [shard.gradient.arrived for shard in self.shards]
        due = deque((shard, gradient) for shard in self.shards if (gradient := shard.gradient.hand_over()) is not None)
        for shard, _ in due:
            shard.versions.begin()
        terms = self._terms(gradient_scale).frozen()
        self.counts.count()

        def update() -> None:
            for arrived in arrivals:
                arrived.wait()
            self._update_all(due, terms, self._update_ahead)
            if self.averages is not None:
                self._average(self.averages, ahead=True)
            self._placements.offloaded.window.wait()  # so that a failed save is an error of this step

        self.thread.start(update, [gradient for _, gradient in due])

    # -- shards of a device that the host updates -----------------------------------------------------------------

    def start(self, shard: ShardState, terms: UpdateTerms) -> None:
        """Start to update a shard on the host when its gradient has arrived, after the updates started before.

        A gather of its group waits for it. The gradient stays until `publish`.
        """
        gradient, arrived = shard.gradient.shard, shard.gradient.arrived
        assert gradient is not None
        if self.speculation.is_open:
            self.speculation.keep(shard.versions.keep)
            self._placements.window.end_hold(shard.group.offloadable)

        def update() -> None:
            arrived.wait()
            self._change(shard, gradient, terms)

        self.are_under_way = True
        self._under_way[shard] = running = self.thread.start(update)
        shard.group.returning = partial(self._follow, shard, running)

    def publish(self, on_updated: Callable[[ShardState], None] | None = None) -> None:
        """Take the gradients of started updates, and wait for the shards that may be seen before a gather.

        on_updated: called after each of them.
        """
        started = list(self._under_way.items())
        taken = [(shard.gradient, shard.gradient.hand_over()) for shard, _ in started]

        def give_back() -> None:
            for gradient, values in taken:
                assert values is not None
                gradient.give_back(values)

        # In the thread, which runs in order: after the updates that read the gradients.
        self.thread.start(give_back)
        for shard, running in started:
            if shard.group.waits_for_update:
                # A group that is kept full has the old values. Its next gather waits for the update.
                shard.group.release_kept()
            else:
                self._follow(shard, running)
                if on_updated is not None:
                    on_updated(shard)

    def wait_for_updates(self) -> None:
        """Wait for the started updates. Raises OffloadError after a failure, at every call until `forget_started`."""
        for shard, running in list(self._under_way.items()):
            self._follow(shard, running)
        if (error := self.thread.wait()) is not None:
            self.has_failed = True
            raise OffloadError(_FAILED.format(step=self.num_steps, what="the averages", error=error)) from error
        self.forget_started()

    def forget_started(self) -> None:
        """End the started updates, failed or not: all that they write is restored, loaded or not needed."""
        self.thread.end()
        for shard in self._under_way:
            shard.group.returning = None
        self._under_way.clear()
        self.are_under_way = self.has_failed = False

    def _follow(self, shard: ShardState, running: Running) -> None:
        """Let later work come after a started update."""
        try:
            self.thread.follow(running)
        except Exception as error:
            self.has_failed = True
            what = f"'{shard.group.plan.name}'"
            raise OffloadError(_FAILED.format(step=self.num_steps, what=what, error=error)) from error
        shard.group.returning = None
        self._under_way.pop(shard, None)

    def begin_step(self, order: Sequence[ShardState] = (), speculates: bool = False) -> None:
        """Begin a step whose shards are updated in separate calls.

        order: of the updates, if known, to read stores ahead. speculates: the step may be rolled back until `accept`.
        """
        names = self._update.deciding_options
        groups = [(len(group["params"]), *map(group.get, names)) for group in self.param_groups]
        if groups != self._checked:  # which is rare, and the check takes longer
            self._check_groups()
            self._checked = groups
        self.counts.begin()
        self._opt_called = True  # torch's schedulers check it to see that `step` was called
        if self._are_here:
            # Changes of 8-bit states through `states_of` are still in float32 copies.
            if self._placements.widened.is_open:
                self._placements.widened.flush()
        else:
            self._placements.save_open()
            self._placements.expect(order)
        if speculates:
            self.speculation.begin()

    def update(
        self, shard: ShardState, gradient_scale: float, gradient: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """Update a shard with its gradient, or the given gradient, (shard_numel,). skip: see `update_all`."""
        gradient = shard.gradient.shard if gradient is None else gradient
        if gradient is not None and self.starts(shard) and self.speculation.is_open:
            self.start(shard, self._terms(gradient_scale, skip).frozen())
        elif gradient is not None:
            self._update_shard(shard, gradient, self._terms(gradient_scale, skip))
            if shard.is_apart:
                self._placements.window.end_hold(shard.group.offloadable)  # else `speculation` would read old values

    def skip(self, shard: ShardState) -> None:
        """Leave a shard as it is, in its turn of the `begin_step` order."""
        self._placements.window.end_hold(shard.group.offloadable)

    def accept(self) -> None:
        """Count a step whose shards were updated in separate calls."""
        self.speculation.forget()
        if self.are_under_way:
            self.thread.start(self.speculation.forget)  # of a value that the thread was keeping
            self.publish()
        self.count()

    def roll_back(self) -> bool:
        """Undo a speculative step, complete or partial. Returns whether a step was open."""
        was_open = self.speculation.is_open
        if was_open:
            self.forget_started()  # waits: the thread may still write the values that are restored next
            self.speculation.roll_back()
            self.counts.uncount()  # after it: an interrupted roll-back stays open, and the next call ends it
        return was_open

    # -- what it keeps --------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """The name of the rule, or of the user's class."""
        return self._update.name

    def can_take(self, kind: str, states: Collection[str]) -> bool:
        """Whether states of these names from an optimizer of that kind fit this optimizer."""
        return self._update.can_take(kind, states)

    def state_bytes(self) -> int:
        """Bytes of optimizer states, master weights, averages and old versions in memory.

        Waits for an update in the background, which then frees its gradients.
        """
        self.thread.wait()
        averages = 0 if self.averages is None else self.averages.nbytes
        return self.speculation.nbytes + averages + sum(map(self.bytes_of, self.shards))

    def bytes_of(self, shard: ShardState) -> int:
        """Bytes of a shard's states, master weights and second version of the parameters in memory."""
        return sum(map(bytes_in_memory, self._held_of(shard)))

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors of states, master weights and averages in memory of a device or the host."""
        for shard in self.shards:
            yield from self._held_of(shard)
        if self.averages is not None:
            yield from self.averages.held()

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of states and master weights in the store."""
        return self._placements.offloaded.nbytes

    def flush(self) -> None:
        """Write changes made through `states_of` into the states."""
        self._placements.widened.flush()

    def close(self) -> None:
        """Free stores and threads. No update may follow."""
        self.thread.close()
        self._placements.close()

    # -- helpers --------------------------------------------------------------------------------------------------

    def _check_groups(self) -> None:
        """Raise ValueError if the user has added a group himself, or set an option that the update does not follow."""
        sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != self._group_sizes:
            raise ValueError(
                "optimizer: the parameter groups of the optimizer that was passed to lowtide.initialize have changed: "
                f"expected {self._group_sizes} parameters in its groups, found {sizes}; add groups with "
                "engine.optimizer.add_param_group"
            )
        if self.lacks_state:
            raise ValueError(_LACKS_STATE)

    def _held_of(self, shard: ShardState) -> Iterator[Tensor]:
        yield shard.versions.ahead
        if shard.form.is_mixed:
            yield shard.master
        yield from self._update.held(shard)

    def _average(self, averages: Averages, ahead: bool = False) -> None:
        """Update the averages after a step that counts. It loads offloaded master weights a second time."""
        averages.update(ahead)
        self._placements.save_open()

    def _terms(self, gradient_scale: float | Tensor, skip: Tensor | None = None) -> UpdateTerms:
        counts = self.counts
        return UpdateTerms(counts.num_steps, self.param_groups, gradient_scale, counts.unused, counts.missed, skip)

    def _update_all(
        self,
        due: deque[tuple[ShardState, Tensor]],  # (shard, gradient); an update may free the gradient
        terms: UpdateTerms,
        update: Callable[[ShardState, Tensor, UpdateTerms], None],
        on_updated: Callable[[ShardState], None] | None = None,
    ) -> None:
        self._placements.expect([shard for shard, _ in due])
        while due:
            shard, gradient = due.popleft()
            update(shard, gradient, terms)
            if on_updated is not None:
                on_updated(shard)

    def _update_shard(self, shard: ShardState, gradient: Tensor, terms: UpdateTerms) -> None:
        shard.gradient.arrive()
        self.speculation.keep(shard.versions.keep)
        self._change(shard, gradient, terms)

    def _change(self, shard: ShardState, gradient: Tensor, terms: UpdateTerms) -> None:
        with shard.window.use(shard.offloadable) as values:
            parts = partial(shard.parts, values, self.speculation)
            self._update.update(shard, parts, gradient, terms)

    def _update_ahead(self, shard: ShardState, gradient: Tensor, terms: UpdateTerms) -> None:
        """Update a second version, while the parameters are in use."""
        # Without masters the update reads the weights from the version that it changes.
        if not shard.form.is_mixed:
            shard.versions.ahead.copy_(shard.group.shard)
        self._update.update(shard, partial(shard.parts, shard.versions.ahead, self.speculation), gradient, terms)
        shard.gradient.give_back(gradient)
