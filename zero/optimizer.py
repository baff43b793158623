"""The optimizer over sharded groups: master weights, states, and who updates what."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..offload import bytes_in_memory
from .averages import Averages
from .fused_update import FusedUpdate, StepCounts, UpdateTerms
from .gradient import GroupGradient
from .host_update import HostUpdate
from .parameter_states import ParameterStates
from .placement import OffloadedStates, ShardRest
from .sequence import StateError
from .shard_state import ShardHomes, ShardState
from .torch_update import TorchUpdate
from .versions import DelayedUpdate, Speculation, Version

BY_HAND = (
    "{what}: expected engine.step(), which updates the shards of all ranks with the gradients of the whole step, found "
    "a call of the optimizer itself, which has none of them; call engine.step() in its place. zero_grad() is not needed"
)

_NO_STATE_DICT = (
    "{what}: expected engine.save_checkpoint and engine.load_checkpoint, which save and load the states of all ranks, "
    "found a call of the optimizer itself, whose states are divided over the ranks; engine.full(parameter, state) "
    "shows those of one parameter"
)


class ShardedOptimizer(torch.optim.Optimizer):
    """Updates every rank's shards. `param_groups` are the user's: learning rates and decays may be changed there.

    Two kinds of update: a fused rule of `kernels/` over whole runs, or the user's own elementwise torch optimizer
    class, which gets each run as one flat parameter.
    """

    def __init__(
        self,
        gradients: Sequence[GroupGradient],
        param_groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        update: FusedUpdate | TorchUpdate,
        offloaded: OffloadedStates,
        rest: ShardRest | None = None,
        host: HostUpdate | None = None,
    ) -> None:
        """param_groups: [{"params": [...], options...}]. defaults: options that a group has which does not say them.

        offloaded: where states rest between steps. rest: where the groups' shards rest, if they do. host: updates what
        is offloaded, where the parameters are not in host memory. Raises OffloadError.
        """
        # Optimizer.__init__ imports torch's compiler, 70 MiB a process; what unpickling sets is all that is needed. The
        # groups are the user's very dictionaries: a scheduler bound to them acts here too. From the defaults schedulers
        # read which options there are.
        self.__setstate__({"defaults": defaults, "state": {}, "param_groups": param_groups})
        self._group_sizes = [len(group["params"]) for group in param_groups]
        self.counts = StepCounts()
        self._update = update
        self.speculation = Speculation()
        self.delayed = DelayedUpdate(gradients[0].group.full.device if gradients else torch.device("cpu"))
        self.averages: Averages | None = None
        """Of the master weights, where somebody wants them."""
        self._homes = ShardHomes(offloaded, rest, host)
        self._on_group: weakref.WeakMethod[Callable[[dict[str, Any]], None]] | None = None
        self.shards = self.make_shards(gradients, dict(enumerate(param_groups)))
        self._are_here = self._homes.are_where_computed(self.shards)
        self.by_parameter = ParameterStates(update, self.shards, self.counts)
        for shard in self.shards:
            shard.fill_chunks()

    @property
    def num_steps(self) -> int:
        """How often it has updated, with the step that is under way."""
        return self.counts.num_steps

    @property
    def num_steps_before(self) -> int:
        """Without one whose gradients may still come: an update in the backward is counted when that begins."""
        return self.counts.num_steps - self.counts.is_in_step

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group; 0 where there is none."""
        return float(self.param_groups[0]["lr"]) if self.param_groups else 0.0

    @property
    def lacks_state(self) -> bool:
        """Whether an option was set that needs a state which is not kept: SGD's momentum, where it began without."""
        return any(map(self._update.lacks_state, self.param_groups))

    def step(self, closure: Any = None) -> NoReturn:
        """Raises StateError: an update needs all ranks and the norm of all gradients, which the engine knows."""
        raise StateError(BY_HAND.format(what="engine.optimizer.step()"))

    def state_dict(self) -> dict[str, Any]:
        """Of the options alone. Raises StateError once there are states, which no rank has as a whole."""
        if self.counts.num_steps:
            raise StateError(_NO_STATE_DICT.format(what="engine.optimizer.state_dict()"))
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of the options alone. Raises StateError for one with states, which would be lost."""
        if state_dict.get("state"):
            raise StateError(_NO_STATE_DICT.format(what="engine.optimizer.load_state_dict()"))
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
        """on_group: takes up a parameter group that the caller adds, with all its options; a method of the engine.

        That is not held: the hooks on the model hold this optimizer.
        """
        self._on_group = weakref.WeakMethod(on_group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """From the next step on these parameters of the model are updated too, where they require a gradient.

        As torch's: options that the group does not say are the defaults. All ranks must call it alike, between steps,
        with parameters that are in no other group. Their master weights begin with what is computed with, and their
        states anew. Raises ValueError, or StateError in the middle of a step, before anything is changed.
        """
        take_up = self._on_group() if self._on_group is not None else None
        if take_up is None:
            raise StateError(
                "engine.optimizer.add_param_group(): expected its engine, found that nobody has it any more"
            )
        params = param_group["params"]
        if isinstance(params, Set):
            raise TypeError(
                "engine.optimizer.add_param_group(): expected parameters in an order that all ranks have alike, found "
                "a set; pass a list"
            )
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        for name, default in self.defaults.items():
            param_group.setdefault(name, default)
        take_up(param_group)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises ValueError for those of a parameter group with which the others' update would be another one."""
        if not self._update.takes(options):
            raise ValueError(
                f"engine.optimizer.add_param_group(): expected options of {self.kind} with the states that it keeps, "
                f"found { ({key: value for key, value in options.items() if key != 'params'}) }; an option that is "
                "another kind of update must be the same in all groups"
            )

    def make_shards(
        self, gradients: Sequence[GroupGradient], param_groups: Mapping[int, Mapping[str, Any]]
    ) -> list[ShardState]:
        """Takes memory for masters and states of groups. param_groups: that have the parameters, by index."""
        index_of = {id(p): index for index, group in param_groups.items() for p in group["params"]}
        shards = self._homes.make_shards(gradients, index_of, self._update)
        if isinstance(self._update, FusedUpdate):
            for one in gradients:
                one.sum_if(lambda: self.sums_gradients)
        return shards

    def take_up(self, param_group: dict[str, Any], shards: Sequence[ShardState]) -> None:
        """The group's parameters are updated from now on. shards: of `make_shards`; what this rank has of them."""
        self.param_groups.append(param_group)
        self._group_sizes.append(len(param_group["params"]))
        self.shards.extend(shards)
        self._are_here = self._homes.are_where_computed(self.shards)
        self.counts.take_up(param_group["params"])
        for shard in shards:
            shard.fill_chunks()
            shard.begin_with_parameters()
            if self.counts.num_steps:
                self._update.make_states(shard, {}, dict.fromkeys(shard.group.layout.names))
            if self.averages is not None:
                self.averages.add(shard)
        self._homes.put_back()

    # -- updates --------------------------------------------------------------------------------------------------

    @property
    def sums_gradients(self) -> bool:
        """Whether the step that comes is made with a sum of gradients."""
        return not isinstance(self._update, FusedUpdate) or self._update.sums_gradients(self.counts.num_steps + 1)

    @property
    def can_be_skipped(self) -> bool:
        """Whether an update can be started before the host knows if it counts: its kernels ask the device then."""
        return self._are_here and not self._update.waits_for_norm

    def update_all(
        self,
        gradient_scale: float | Tensor,
        on_updated: Callable[[ShardState], None] = lambda shard: None,
        skip: Tensor | None = None,
    ) -> None:
        """Updates all shards with gradient_scale * gradient. The engine calls it; it has reduced the gradients.

        on_updated: called after each shard, so that sending it overlaps with the update of the next. skip: (1,) on the
        device: where it is not 0, nothing changes. It is read there, and `count` or `uncount` has to follow.
        """
        self.begin_step()
        due = deque([(one, one.gradient.shard) for one in self.shards if one.gradient.shard is not None])
        terms = self._terms(gradient_scale, skip)
        if self._are_here and isinstance(self._update, FusedUpdate) and not self._update.waits_for_norm:
            self._update.update_together(due, terms, on_updated)
        else:
            self._homes.window.expect([shard.resident for shard, _ in due])
            self._update_all(due, terms, self._update_shard, on_updated)
        if skip is None:
            self.count()

    def count(self) -> None:
        """What was updated in the step that was begun counts."""
        self.counts.count()
        if self.averages is not None:
            self._average(self.averages)

    def uncount(self) -> None:
        """In the step that was begun nothing has changed."""
        self.counts.uncount()

    def start_delayed(self, gradient_scale: float) -> None:
        """As `update_all`, in the background, with options as they are now; the next gradients may come meanwhile.

        Parameters stay as they are, until `delayed.wait` has found no error and every shard was told to take `ahead`.
        """
        what = "a shard that is not in memory cannot be computed with while it is updated"
        assert self._homes.rest is None, what
        self.begin_step()
        due = deque((shard, gradient) for shard in self.shards if (gradient := shard.gradient.hand_over()) is not None)
        for shard, _ in due:
            shard.versions.begin()
        now = self._terms(gradient_scale)
        terms = now._replace(options=[dict(group) for group in now.options], missed=dict(now.missed))
        self.counts.count()

        def update() -> None:
            self._update_all(due, terms, self._update_ahead)
            if self.averages is not None:
                self._average(self.averages, ahead=True)
            self._homes.offloaded.window.wait()  # an error of the drive is one of this step

        self.delayed.start(update, [gradient for _, gradient in due])

    def begin_step(self, order: Sequence[ShardState] = (), speculates: bool = False) -> None:
        """Counts a step whose shards are then updated one by one.

        order: of the updates, where it is known: what rests in a store is read ahead then. speculates: the step may be
        taken back, until `accept`.
        """
        if [len(group["params"]) for group in self.param_groups] != self._group_sizes:
            raise ValueError(
                "optimizer: expected the parameter groups of the engine, found others, which were added to the "
                "optimizer that was passed to lowtide.initialize, or taken out; add groups by "
                "engine.optimizer.add_param_group"
            )
        self.counts.begin()
        self._opt_called = True  # what a scheduler of torch, over this, takes for a call of `step`
        if self._are_here:
            self._homes.widened.settle()
        else:
            self._homes.put_back()
            self._homes.expect(order)
        if speculates:
            self.speculation.begin()

    def update(
        self, shard: ShardState, gradient_scale: float, gradient: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """Updates one shard; its gradient, or the one given, (shard_numel,), is used up. skip: as of `update_all`."""
        gradient = shard.gradient.shard if gradient is None else gradient
        if gradient is not None:
            self._update_shard(shard, gradient, self._terms(gradient_scale, skip))
            if shard.is_apart:
                self._homes.window.let_go(shard.group.resident)  # what was read of it for `speculation` is of before

    def skip(self, shard: ShardState) -> None:
        """Leaves a shard as it is, in its turn among those of `begin_step`."""
        self._homes.window.let_go(shard.group.resident)

    def accept(self) -> None:
        """A step whose shards were updated one by one is whole, and counts."""
        self.speculation.forget()
        self.count()

    def roll_back(self) -> bool:
        """A step that speculated, whole or in part, has not been. Says whether there was one."""
        was_open = self.speculation.is_open
        if was_open:
            self.counts.uncount()
            self.speculation.roll_back()
        return was_open

    # -- what it keeps --------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """The name of the rule, or of the caller's class."""
        return self._update.name

    def can_take(self, kind: str, states: Collection[str]) -> bool:
        """True where states of these names, made by an optimizer of that kind, are states of this one."""
        return self._update.can_take(kind, states)

    def state_bytes(self) -> int:
        """Bytes of optimizer states, master weights, averages and what updates keep, in memory.

        Waits for an update in the background, whose gradients are given back then.
        """
        self.delayed.wait()
        averages = 0 if self.averages is None else self.averages.nbytes
        return self.speculation.nbytes + averages + sum(map(self.bytes_of, self.shards))

    def bytes_of(self, shard: ShardState) -> int:
        """Of one shard's states, master weights and second version of the parameters, in memory."""
        return sum(map(bytes_in_memory, self._held_of(shard)))

    def held(self) -> Iterator[Tensor]:
        """Tensors of states, master weights and averages, in memory of a device or of the host."""
        for shard in self.shards:
            yield from self._held_of(shard)
        if self.averages is not None:
            yield from self.averages.held()

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of states and master weights in the store."""
        return self._homes.offloaded.nbytes

    def settle(self) -> None:
        """What was changed through `states_of` is in the states."""
        self._homes.widened.settle()

    def close(self) -> None:
        """Gives back what is in a store, when nothing is updated any more."""
        self.delayed.close()
        self._homes.close()

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _held_of(self, shard: ShardState) -> Iterator[Tensor]:
        yield shard.versions.ahead.values
        if shard.form.is_mixed:
            yield shard.master
        yield from self._update.held(shard)

    def _average(self, averages: Averages, ahead: bool = False) -> None:
        """After a step that counts. Master weights that rest in a store are read once more for it."""
        averages.update(ahead)
        self._homes.put_back()

    def _terms(self, gradient_scale: float | Tensor, skip: Tensor | None = None) -> UpdateTerms:
        counts = self.counts
        return UpdateTerms(counts.num_steps, self.param_groups, gradient_scale, counts.unused, counts.missed, skip)

    def _update_all(
        self,
        due: deque[tuple[ShardState, Tensor]],  # with gradients, whose memory may be given back on the way
        terms: UpdateTerms,
        update: Callable[[ShardState, Tensor, UpdateTerms], None],
        on_updated: Callable[[ShardState], None] = lambda shard: None,
    ) -> None:
        self._homes.expect([shard for shard, _ in due])
        while due:
            shard, gradient = due.popleft()
            update(shard, gradient, terms)
            on_updated(shard)

    def _update_shard(self, shard: ShardState, gradient: Tensor, terms: UpdateTerms) -> None:
        with self._homes.window.use(shard.resident) as values:
            self.speculation.keep(shard.versions.keep)
            parts = partial(shard.parts, Version(0, values), self.speculation)
            self._update.update(shard, parts, gradient, terms)

    def _update_ahead(self, shard: ShardState, gradient: Tensor, terms: UpdateTerms) -> None:
        """Beside the parameters, which are computed with."""
        if not shard.form.is_mixed:
            shard.versions.ahead.values.copy_(shard.group.shard)
        self._update.update(shard, partial(shard.parts, shard.versions.ahead, self.speculation), gradient, terms)
        shard.gradient.give_back(gradient)
