"""The optimizer over sharded groups: master weights, states, and who updates what."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.dispatch import Backend
from ..kernels.optimizer_step import UpdateRule, update_runs
from ..offload import Memory, Window
from .delayed_update import DelayedUpdate
from .gradient import GroupGradient
from .host_update import HostUpdate
from .layout import Piece
from .offloaded_states import OffloadedStates
from .optimizer_choice import OptimizerFactory
from .shard_rest import ShardRest
from .shard_state import ShardState, StatePart, Version
from .speculation import Speculation
from .widened_states import WidenedStates

StateKey = tuple[int, torch.dtype]
"""Index in param_groups, dtype of the master weights: parameters that agree in both have the same states."""


@dataclass(frozen=True)
class _Terms:
    """What the updates of all shards in a step have in common."""

    step: int  # from 1
    options: Sequence[Mapping[str, Any]]  # of each parameter group
    gradient_scale: float


class ShardedOptimizer(torch.optim.Optimizer):
    """Updates every rank's shards. `param_groups` are the user's: learning rates and decays may be changed there.

    Two kinds of update: a fused rule of `kernels/` over whole runs, or the user's own elementwise torch optimizer
    class, which gets each run as one flat parameter.
    """

    def __init__(
        self,
        gradients: Sequence[GroupGradient],
        param_groups: list[dict[str, Any]],
        rule: UpdateRule | None,
        factory: OptimizerFactory | None,
        offloaded: OffloadedStates | None = None,
        rest: ShardRest | None = None,
        state_dtype: torch.dtype = torch.float32,
        backend: Backend = "auto",
        host: HostUpdate | None = None,
    ) -> None:
        """param_groups: [{"params": [...], options...}]; exactly one of rule and factory.

        offloaded: where states rest between steps, of a rule; None leaves them in memory. rest: where the groups'
        shards rest, if they do. state_dtype: of a rule's states, see `UpdateRule.new_states`. backend: of its kernel.
        host: updates what is offloaded, where the parameters are not in host memory. Raises OffloadError.
        """
        # Optimizer.__init__ imports torch's compiler, 70 MiB a process; what unpickling sets is all that is needed. The
        # groups are the user's very dictionaries: a scheduler bound to them acts here too.
        self.__setstate__({"defaults": {}, "state": {}, "param_groups": param_groups})
        self.num_steps = 0
        self._rule = rule
        self._factory = factory
        self._state_dtype = state_dtype
        self._backend = backend
        self._widened = WidenedStates()
        self.speculation = Speculation()
        self.delayed = DelayedUpdate()
        self._offloaded = offloaded
        self._rest = rest
        self._host = host
        self._window = Window() if rest is None else rest.window  # of parameters, on their way to the update
        self._inner: dict[int, torch.optim.Optimizer] = {}
        index_of = {id(p): index for index, group in enumerate(param_groups) for p in group["params"]}
        new_states = self._new_states if rule is not None else None
        self.shards = [
            ShardState(gradient, index_of, new_states, self._widened, offloaded, rest, host) for gradient in gradients
        ]
        if offloaded is not None:
            offloaded.reserve()
            self._fill_chunks()

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.param_groups[0]["lr"])

    def step(  # type: ignore[override]
        self,
        closure: Any = None,
        gradient_scale: float = 1.0,
        on_updated: Callable[[ShardState], None] | None = None,
    ) -> None:
        """Updates all shards with gradient_scale * gradient. The engine calls it; it has reduced the gradients.

        on_updated: called after each shard, so that sending it overlaps with the update of the next.
        """
        self.begin_step()
        due = [(shard, shard.gradient.shard) for shard in self.shards if shard.gradient.shard is not None]
        self._window.expect([shard.resident for shard, _ in due])
        self._expect_chunks(shard for shard, _ in due)
        terms = self._terms(gradient_scale)
        for shard, gradient in due:
            self._update(shard, gradient, terms)
            if on_updated is not None:
                on_updated(shard)

    def start_delayed(self, gradient_scale: float) -> None:
        """As `step`, in the background, with options as they are now; the next gradients may come meanwhile.

        Parameters stay as they are, until `delayed.wait` has found no error and every shard was told to take `ahead`.
        """
        assert self._rest is None, "a shard that is not in memory cannot be computed with while it is updated"
        self.begin_step()
        due = deque((shard, gradient) for shard in self.shards if (gradient := shard.take_gradient()) is not None)
        for shard, _ in due:
            shard.begin_delay()
        options = [dict(group) for group in self.param_groups]
        self.delayed.start(partial(self._update_delayed, due, _Terms(self.num_steps, options, gradient_scale)))

    def begin_step(self, order: Sequence[ShardState] = (), speculates: bool = False) -> None:
        """Counts a step whose shards are then updated one by one.

        order: of the updates, where it is known: what rests in a store is read ahead then. speculates: the step may be
        taken back, until `accept`.
        """
        self.num_steps += 1
        self.settle()
        self._window.settle()
        if self._offloaded is not None:
            self._offloaded.window.settle()
        if speculates:
            self.speculation.begin()
        self._expect_chunks(order)

    def update(self, shard: ShardState, gradient_scale: float) -> None:
        """Updates one shard; its gradient is used up."""
        if shard.gradient.shard is not None:
            self._update(shard, shard.gradient.shard, self._terms(gradient_scale))
            if shard.is_apart:
                self._window.let_go(shard.group.resident)  # what was read of it for `speculation` is of before

    def skip(self, shard: ShardState) -> None:
        """Leaves a shard as it is, in its turn among those of `begin_step`."""
        self._window.let_go(shard.group.resident)

    def accept(self) -> None:
        """A step whose shards were updated one by one is whole, and counts."""
        self.speculation.forget()

    def roll_back(self) -> None:
        """A step that speculated, whole or in part, has not been. Does nothing where there is none."""
        if self.speculation.is_open:
            self.num_steps -= 1
            self.speculation.roll_back()

    # -- states by parameter, for checkpoints ---------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """The name of the rule, or of the caller's class."""
        if self._rule is not None:
            return self._rule.name
        assert self._factory is not None
        return type(self._factory([nn.Parameter(torch.zeros(1))])).__name__

    def can_take(self, kind: str, states: Collection[str]) -> bool:
        """True where states of these names, made by an optimizer of that kind, are states of this one."""
        return set(states) == set(self._rule.states) if self._rule is not None else kind == self.kind

    @property
    def state_keys(self) -> dict[str, StateKey]:
        """The key under which each parameter's states are described, by the parameter's name, on all ranks alike."""
        index_of = {id(p): index for index, group in enumerate(self.param_groups) for p in group["params"]}
        return {
            name: (index_of[id(param)], shard.master_dtype)
            for shard in self.shards
            for name, param in zip(shard.group.names, shard.group.params, strict=True)
        }

    def states_of(self, shard: ShardState, piece: Piece, changes: bool = False) -> dict[str, Memory]:
        """The elementwise states of one of the shard's `pieces`, (piece.numel,) each; empty before the first step.

        changes: what is changed in those that rest in a store is kept.
        """
        inner = self._inner.get(id(shard))
        if inner is None:
            return shard.states_of(piece, changes) if self.num_steps else {}
        run, param = next(
            (run, options["params"][0])
            for run, options in zip(shard.runs, inner.param_groups, strict=True)
            if run.start <= piece.offset_in_shard < run.end
        )
        low = piece.offset_in_shard - run.start
        return {n: v[low : low + piece.numel] for n, v in inner.state[param].items() if _is_elementwise(v, param)}

    def state_dtypes(self) -> dict[StateKey, dict[str, torch.dtype]]:
        """The elementwise states by name, of what this rank holds; empty before the first step."""
        keys = self.state_keys
        return {
            keys[shard.group.names[piece.index]]: {name: values.dtype for name, values in states.items()}
            for shard in self.shards
            for piece in shard.pieces
            if (states := self.states_of(shard, piece))
        }

    def scalar_states(self) -> dict[int, dict[str, Any]]:
        """Index in param_groups -> what a torch optimizer keeps there beside elementwise states: its step, mostly."""
        found: dict[int, dict[str, Any]] = {}
        for shard in self.shards:
            inner = self._inner.get(id(shard))
            for run, options in zip(shard.runs, inner.param_groups if inner is not None else (), strict=False):
                param = options["params"][0]
                values = inner.state[param].items() if inner is not None else ()
                found[run.options_index] = {n: v for n, v in values if not _is_elementwise(v, param)}
        return found

    def make_states(
        self,
        num_steps: int,
        dtypes: Mapping[str, Mapping[str, torch.dtype]],
        scalars: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Takes memory for the states of a run that has made `num_steps`; `states_of` says where to fill them in.

        dtypes: of the elementwise states by name, for each parameter by name; floating-point ones take the dtype of
        the master weights, as in torch. scalars: as `scalar_states` gives them.
        """
        self.num_steps = num_steps
        self._inner.clear()
        if not dtypes and not scalars:
            for shard in self.shards:
                shard.states.clear()
            self._fill_chunks()
            return
        for shard in self.shards:
            if self._rule is not None:
                shard.make_states(self._new_states)
                continue
            inner = self._inner[id(shard)] = self._make_inner(shard)
            for run, options in zip(shard.runs, inner.param_groups, strict=True):
                param = options["params"][0]
                piece = next(piece for piece in shard.group.pieces if piece.offset_in_shard >= run.start)
                for name, dtype in dtypes.get(shard.group.names[piece.index], {}).items():
                    own_dtype = param.dtype if dtype.is_floating_point else dtype
                    inner.state[param][name] = torch.zeros_like(param, dtype=own_dtype)
                for name, value in scalars.get(run.options_index, {}).items():
                    inner.state[param][name] = value.clone() if isinstance(value, Tensor) else value

    def state_bytes(self) -> int:
        """Bytes of optimizer states, separate master weights, and what updates keep beside them, in this rank's memory.

        Waits for an update in the background, whose gradients are given back then.
        """
        self.delayed.wait()
        total = self.speculation.nbytes
        for shard in self.shards:
            total += shard.ahead.values.nbytes
            if shard.is_mixed:
                total += shard.master.nbytes
            total += sum(state.nbytes for state in shard.states.values())
        for inner in self._inner.values():
            for state in inner.state.values():
                total += sum(v.nbytes for v in state.values() if isinstance(v, Tensor) and v.dim())
        return total

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of states and master weights in the store."""
        return self._offloaded.nbytes if self._offloaded is not None else 0

    def settle(self) -> None:
        """What was changed through `states_of` is in the states."""
        self._widened.settle()

    def close(self) -> None:
        """Gives back what is in a store, when nothing is updated any more."""
        self.delayed.close()
        for place in (self._host, self._offloaded, self._rest):
            if place is not None:
                place.close()

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _new_states(self, master: Tensor) -> dict[str, Tensor]:
        assert self._rule is not None
        return self._rule.new_states(master, self.param_groups[0], self._state_dtype)

    def _fill_chunks(self) -> None:
        for shard in self.shards:
            shard.fill_chunks(self._new_states)

    def _expect_chunks(self, order: Iterable[ShardState]) -> None:
        """The chunks of all these shards in one order: that of the next shard is read while this one is updated."""
        if self._offloaded is not None:
            self._offloaded.window.expect([chunk.resident for shard in order for chunk in shard.chunks])

    def _terms(self, gradient_scale: float) -> _Terms:
        return _Terms(self.num_steps, self.param_groups, gradient_scale)

    def _update_delayed(self, due: deque[tuple[ShardState, Tensor]], terms: _Terms) -> None:
        """The whole of an update in the background; each gradient's memory is given back on the way."""
        self._expect_chunks([shard for shard, _ in due])
        while due:
            shard, gradient = due.popleft()
            if not shard.is_mixed:
                shard.ahead.values.copy_(shard.group.shard)
            self._update_parameters(shard, gradient, terms, shard.ahead)
            shard.gradient.give_back(gradient)
        if self._offloaded is not None:
            self._offloaded.window.wait()  # an error of the drive is one of this step

    def _update(self, shard: ShardState, gradient: Tensor, terms: _Terms) -> None:
        with self._window.use(shard.resident) as values:
            self.speculation.keep(shard.keep_parameters)
            self._update_parameters(shard, gradient, terms, Version(0, values))

    def _update_parameters(self, shard: ShardState, gradient: Tensor, terms: _Terms, parameters: Version) -> None:
        if self._rule is None:
            self._update_by_torch(shard, gradient, terms, parameters)
            return
        if not shard.states:
            shard.make_states(self._new_states)
        for part in shard.parts(parameters, self.speculation):
            self._update_part(self._rule, shard, part, gradient, terms)

    def _update_part(
        self, rule: UpdateRule, shard: ShardState, part: StatePart, gradient: Tensor, terms: _Terms
    ) -> None:
        runs = [
            (min(run.end, part.end) - part.start, terms.options[run.options_index])
            for run in shard.runs
            if run.start < part.end and run.end > part.start
        ]
        if not runs:  # no parameter reaches into this shard
            return
        own, scale = gradient[part.start : part.end], terms.gradient_scale
        update_runs(rule, part.master, own, part.states, terms.step, runs, scale, part.rounded, backend=self._backend)

    def _update_by_torch(self, shard: ShardState, gradient: Tensor, terms: _Terms, parameters: Version) -> None:
        inner = self._inner.get(id(shard))
        if inner is None:
            inner = self._inner[id(shard)] = self._make_inner(shard)
        (whole,) = shard.parts(parameters, self.speculation)
        for run, options in zip(shard.runs, inner.param_groups, strict=True):
            outer = terms.options[run.options_index]
            options.update({key: value for key, value in outer.items() if key in options and key != "params"})
            (param,) = options["params"]
            param.data = whole.master[run.start : run.end]
            # A copy: other ranks may share the gradient.
            param.grad = gradient[run.start : run.end].to(whole.master.dtype) * terms.gradient_scale
        inner.step()
        for options in inner.param_groups:
            options["params"][0].grad = None
        if whole.rounded is not None:
            whole.rounded.copy_(whole.master)

    def _make_inner(self, shard: ShardState) -> torch.optim.Optimizer:
        assert self._factory is not None
        views = [nn.Parameter(shard.master[run.start : run.end]) for run in shard.runs]
        if not views:
            views = [nn.Parameter(shard.master[:0])]
        inner = self._factory(views)
        template = inner.param_groups[0]
        inner.param_groups[:] = [{**template, "params": [view]} for view in views][: len(shard.runs)]
        return inner


def _is_elementwise(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and value.dim() == 1
