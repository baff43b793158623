"""The update of a shard by a rule of `kernels/`, over whole runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kernels.dispatch import Backend
from ..kernels.optimizer_step import UpdateRule, update_runs
from ..offload import Memory
from .layout import Piece
from .shard_state import ShardState, StatePart


@dataclass(frozen=True)
class Terms:
    """What the updates of all shards in a step have in common."""

    step: int  # from 1
    options: Sequence[Mapping[str, Any]]  # of each parameter group
    gradient_scale: float


@dataclass(frozen=True)
class FusedUpdate:
    """States are the shard's own, in memory or in chunks, and known beforehand."""

    has_rule: ClassVar = True

    rule: UpdateRule
    options: Mapping[str, Any]  # of the first parameter group: what states begin with
    state_dtype: torch.dtype  # see `UpdateRule.new_states`
    backend: Backend  # of the kernel

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def keeps_momentum(self) -> bool:
        """Whether a momentum that is set has an effect: SGD's rule was chosen with or without its state."""
        return self.rule.name != "sgd" or bool(self.rule.states)

    def can_take(self, kind: str, states: Collection[str]) -> bool:
        """True where states of these names, made by an optimizer of that kind, are states of this one."""
        return set(states) == set(self.rule.states)

    def new_states(self, master: Tensor) -> dict[str, Tensor]:
        """The states of master weights, (n,), before the first step, by name."""
        return self.rule.new_states(master, self.options, self.state_dtype)

    def update(self, shard: ShardState, parts: Iterable[StatePart], gradient: Tensor, terms: Terms) -> None:
        """Makes one step of all parts of the shard with its gradient, (shard_numel,)."""
        if not shard.states:
            shard.make_states()
        for part in parts:
            runs = [
                (min(run.end, part.end) - part.start, terms.options[run.options_index])
                for run in shard.runs
                if run.start < part.end and run.end > part.start
            ]
            if runs:  # else no parameter reaches into this part
                update_runs(
                    self.rule,
                    part.master,
                    gradient[part.start : part.end],
                    part.states,
                    terms.step,
                    runs,
                    terms.gradient_scale,
                    part.rounded,
                    backend=self.backend,
                )

    def states_of(self, shard: ShardState, piece: Piece, changes: bool) -> dict[str, Memory]:
        return shard.states_of(piece, changes)

    def make_states(
        self,
        shard: ShardState,
        dtypes: Mapping[str, Mapping[str, torch.dtype]],
        scalars: Mapping[int, Mapping[str, Any]],
    ) -> None:
        shard.make_states()

    def forget_states(self, shard: ShardState) -> None:
        shard.states.clear()

    def scalar_states(self, shard: ShardState) -> dict[int, dict[str, Any]]:
        return {}

    def state_bytes(self, shard: ShardState) -> int:
        """Of those in memory."""
        return sum(state.nbytes for state in shard.states.values())
