"""The update of a shard by an optimizer of `optimizers/`, over whole runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.dispatch import Backend
from ..kernels.optimizer_states import new_states, stored_states
from ..kernels.optimizer_step import ShardUpdate, UpdateLaunches, are_launched, update_shards
from ..offload import Memory
from ..optimizers.optimizer import Optimizer, Options
from .group import values_of
from .layout import ParamShard
from .master_weights import MasterWeights
from .shard_state import ShardState, StateView

ScalarStates = Mapping[int | str, Mapping[str, Any] | None]
"""States that are not elementwise, by name, for a parameter's name or for an index in param_groups.

An index means all parameters of the group that are not named. None: no states yet.
"""


class StepCounts:
    """Counts the steps, and the steps that parameters have missed.

    begin  ...  count       counted from `begin` on
    begin  ...  uncount     not a step
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.is_in_step = False
        """Whether a step is counted whose shards are not all updated."""
        self.unused: frozenset[int] = frozenset()
        """Ids of the parameters without a gradient on any rank in the current or last step. They do not change."""
        self.missed: Counter[int] = Counter()
        """Id of a parameter -> number of steps in which it was unused."""

    def begin(self) -> None:
        """Begin a step: counts it until `uncount`."""
        self.num_steps += 1
        self.is_in_step = True

    def count(self) -> None:
        """Count the step in progress."""
        self.is_in_step = False
        if self.unused:
            # `Counter.update` adds to a count, unlike `dict.update`.
            self.missed.update(self.unused)

    def uncount(self) -> None:
        """Do not count the step in progress: it has changed nothing."""
        self.num_steps -= 1
        self.is_in_step = False

    def add(self, params: Iterable[nn.Parameter]) -> None:
        """Add parameters that have made no step."""
        if self.num_steps:
            self.missed.update({id(param): self.num_steps for param in params})

    def load(self, num_steps: int, missed: Mapping[int, int]) -> None:
        """Set the counts of another run."""
        self.num_steps = num_steps
        self.missed = Counter({key: count for key, count in missed.items() if count})


class UpdateTerms(NamedTuple):
    """The arguments that the updates of all shards in a step share."""

    step: int  # from 1
    options: Sequence[Options]  # by parameter group
    gradient_scale: float | Tensor  # () on the device of the update, if the host does not know it yet
    unused: Collection[int]  # ids of parameters that no rank used: they and their states do not change
    missed: Mapping[int, int]  # id of a parameter -> number of earlier steps that it has missed
    skip: Tensor | None = None  # (1,) on the device of the update: not 0 if nothing may change

    def frozen(self) -> UpdateTerms:
        """Return copies for a thread: meanwhile the user may change learning rates, and the next step is counted."""
        return self._replace(options=[dict(group) for group in self.options], missed=dict(self.missed))

    def step_of(self, param_id: int) -> int:
        """Return the number of a parameter's updates, this step included; 0 if it is not updated."""
        return 0 if param_id in self.unused else self.step - self.missed.get(param_id, 0)

    def runs_in(self, shard: ShardState, start: int, end: int) -> tuple[list[tuple[int, Options]], list[int]]:
        """Return the runs in elements [start, end) of a shard: (end, options) of each, and their steps."""
        own = shard.runs
        are_alike = own.param_ids.isdisjoint(self.unused) and own.param_ids.isdisjoint(self.missed)
        runs, steps = [], []
        # The cached runs serve if no parameter of the shard has missed a step: then all have the same number.
        for run, step in zip(own.all, repeat(self.step)) if are_alike else own.chunks_by_step(self.step_of):
            if run.start < end and run.end > start:
                runs.append((min(run.end, end) - start, self.options[run.options_index]))
                steps.append(step)
        return runs, steps


@dataclass(frozen=True)
class FusedUpdate:
    """An update by a fused kernel. Its states are known beforehand, and lie in the shard's memory or chunks."""

    has_rule: ClassVar = True
    waits_for_norm: ClassVar = False
    """Whether the host must know the norm before the update, and all ranks must update the same shard at a time."""

    optimizer: Optimizer
    options: Options  # of the first parameter group at the start: they decide the states and their first values
    state_dtype: torch.dtype  # of moments, see `new_states`
    backend: Backend  # of the kernel
    masters: MasterWeights = MasterWeights.WIDER
    seed: int = 0  # of random rounding without masters
    by_group: tuple[Options, ...] = ()  # of each parameter group at the start, if their states differ

    @property
    def name(self) -> str:
        return self.optimizer.name

    @cached_property
    def deciding_options(self) -> tuple[str, ...]:
        """Names of the options on which the answer of `lacks_state` depends."""
        needed = (state.needed_option for state in self.optimizer.states)
        return (*_OTHER_RULES, *self.optimizer.torch_options, *(name for name in needed if name is not None))

    def lacks_state(self, options: Options) -> bool:
        """Whether these options need another rule, or a state that is not kept."""
        return not _have_rule(self.optimizer, options) or not set(self.optimizer.states_for(options)) <= set(
            self.optimizer.states_for(self.options)
        )

    def takes(self, options: Options) -> bool:
        """Whether a parameter group may have these options: the same states and the same update."""
        needed, kept = (self.optimizer.states_for(group_options) for group_options in (options, self.options))
        return needed == kept and takes_options(self.optimizer, options)

    def can_take(self, kind: str, states: Collection[str]) -> bool:
        """Whether states of these names from an optimizer of that kind fit this optimizer."""
        return set(states) == {state.name for state in self.optimizer.states_for(self.options)}

    def new_states(self, master: Tensor, options_index: int = 0) -> dict[str, Tensor]:
        """Return the states of master weights, (n,), before the first step, by name."""
        options = self.by_group[options_index] if self.by_group else self.options
        states = new_states(self.optimizer, master, options, self.state_dtype)
        # The last state, as `_of_part` splits it off by its position.
        if self.masters.remainder is not None and master.dtype == torch.bfloat16:
            name, dtype = self.masters.remainder
            states[name] = torch.zeros_like(master, dtype=dtype)
        return states

    def update(
        self, shard: ShardState, parts: Callable[[], Iterable[StateView]], gradient: Tensor, terms: UpdateTerms
    ) -> None:
        """Update all parts of a shard with its gradient, (shard_numel,). parts: each call yields them again."""
        shard.memory.make()
        for shard_update in self._updates(shard, parts(), gradient, terms):
            update_shards(
                self.optimizer, [shard_update], terms.step, terms.gradient_scale, skip=terms.skip, backend=self.backend
            )  # fmt: skip

    def update_together(
        self, shards: Iterable[ShardState], terms: UpdateTerms, on_updated: Callable[[ShardState], None] | None
    ) -> None:
        """Update shards that are all in memory and have a gradient; on a device with few launches.

        on_updated: called after each shard, in the same order on all ranks.
        """
        due: list[ShardState] = []
        updates: list[ShardUpdate] = []
        for shard in shards:
            if shard.gradient.shard is not None:
                due.append(shard)
                updates.append(_of_whole(shard, shard.gradient.shard, terms))
        update_shards(
            self.optimizer, updates, terms.step, terms.gradient_scale, skip=terms.skip, backend=self.backend,
            on_updated=None if on_updated is None else lambda number: on_updated(due[number]),
        )  # fmt: skip
        for update in updates:
            update.gradient = _NOTHING  # else its memory would be held until the next step

    def launches(self, shards: Sequence[ShardState], terms: UpdateTerms) -> UpdateLaunches | None:
        """Return `update_together` of shards with a gradient for a graph. None: it is not all launches of Triton."""
        due = [(shard, shard.gradient.shard) for shard in shards if shard.gradient.shard is not None]
        updates = [_of_whole(shard, gradient, terms) for shard, gradient in due]
        if not are_launched(self.optimizer, updates, self.backend):
            return None
        return UpdateLaunches(self.optimizer, updates, terms.step, self.backend)

    def _updates(
        self, shard: ShardState, parts: Iterable[StateView], gradient: Tensor, terms: UpdateTerms
    ) -> Iterator[ShardUpdate]:
        """Yield the kernel arguments of each part. A part is valid until the next."""
        for part in parts:
            runs, steps = terms.runs_in(shard, part.start, part.end)
            of_part = gradient if part.end - part.start == gradient.numel() else gradient[part.start : part.end]
            yield _of_part(shard, part, of_part, runs, steps)

    def states_of(self, shard: ShardState, param_shard: ParamShard, changes: bool) -> dict[str, Memory]:
        shard.memory.make()  # updates in the backward leave out a shard that nobody has used
        return shard.states_of(param_shard, changes)

    def make_states(
        self,
        shard: ShardState,
        dtypes: Mapping[str, Mapping[str, torch.dtype]],
        scalars: ScalarStates,
    ) -> None:
        shard.memory.make()

    def forget_states(self, shard: ShardState) -> None:
        shard.memory.forget()

    def reset_states(self, shard: ShardState, index: int) -> None:
        """Set the states of parameter `index` of the group to their first values."""
        options = self.by_group[shard.runs.options_index(index)] if self.by_group else self.options
        # float32, whatever the stored dtype: `states_of` shows 8-bit states as float32, and `fill_` casts.
        first = new_states(self.optimizer, torch.zeros(1), options, torch.float32)
        for param_shard in shard.param_shards.of(index):
            for name, memory in shard.states_of(param_shard, changes=True).items():
                if name in first:  # but not remainders of weights
                    values_of(memory).fill_(first[name].item())

    def scalar_states(self, shard: ShardState, missed: Mapping[int, int]) -> ScalarStates:
        return {}

    def held(self, shard: ShardState) -> Iterator[Tensor]:
        """Yield the states in memory."""
        yield from shard.memory.states.values()


_NOTHING = torch.empty(0)
_OTHER_RULES = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options that ask for a rule of torch that is not ours."""


def takes_options(record: Optimizer, options: Mapping[str, Any]) -> bool:
    """Whether our optimizer does the same as torch's with these options of a parameter group."""
    return _have_rule(record, options) and all(
        isinstance(value, (int, float, bool, str, tuple, list, type(None))) for value in options.values()
    )


def _have_rule(record: Optimizer, options: Mapping[str, Any]) -> bool:
    if any(options.get(name) for name in _OTHER_RULES):
        return False
    return all(options.get(name, value) == value for name, value in record.torch_options.items())


def _of_whole(shard: ShardState, gradient: Tensor, terms: UpdateTerms) -> ShardUpdate:
    """Return the kernel arguments of a shard that is all in memory: cached, with this step's gradient and runs."""
    runs, steps = terms.runs_in(shard, 0, shard.memory.numel)
    update = shard.memory.update
    if update is None:
        shard.memory.make()
        update = shard.memory.update = _of_part(shard, shard.whole(), gradient, runs, steps)
    update.gradient, update.runs, update.steps = gradient, runs, steps
    return update


def _of_part(
    shard: ShardState, part: StateView, gradient: Tensor, runs: list[tuple[int, Options]], steps: list[int]
) -> ShardUpdate:
    states, remainder, rounding = part.states, None, shard.form.rounding
    if rounding is not None and part.start:
        rounding = rounding.at(part.start)
    if shard.form.has_remainder:
        *states, remainder = states
    return ShardUpdate(part.master, gradient, stored_states(states), runs, steps, part.rounded, rounding, remainder)
