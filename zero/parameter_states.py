"""The states of an optimizer by parameter, for checkpoints and for whoever reads or writes those of one parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..offload import Memory
from .fused_update import FusedUpdate, ScalarStates, StepCounts
from .layout import Piece
from .shard_state import ShardState
from .torch_update import TorchUpdate

StateKey = tuple[int, torch.dtype]
"""Index in param_groups, dtype of the master weights: parameters that agree in both have the same states."""
MISSED_STEPS = "missed_steps"
"""Among the scalar states of a parameter: in how many steps nobody used it."""
FACTOR = "low_rank_factor"
"""Among them, of PowerSGD."""


class ParameterStates:
    """What this rank has of each parameter's states.

    Elementwise ones are ranges of shards, described alike by all ranks; those that a rank alone has, and what is no
    tensor of elements, come beside them.
    """

    def __init__(self, update: FusedUpdate | TorchUpdate, shards: Sequence[ShardState], counts: StepCounts) -> None:
        """shards, counts: of the optimizer, which adds to them."""
        self._update = update
        self._shards = shards
        self._counts = counts

    @property
    def state_keys(self) -> dict[str, StateKey]:
        """The key under which each parameter's states are described, by the parameter's name, on all ranks alike."""
        return {
            name: (shard.runs.options_index(index), shard.form.master_dtype)
            for shard in self._shards
            for index, name in enumerate(shard.group.layout.names)
        }

    def states_of(self, shard: ShardState, piece: Piece, changes: bool = False) -> dict[str, Memory]:
        """The elementwise states of one of the shard's `pieces`, (piece.numel,) each; empty before the first step.

        changes: what is changed in those that rest in a store is kept.
        """
        return self._update.states_of(shard, piece, changes) if self._counts.num_steps else {}

    def state_dtypes(self) -> dict[StateKey, dict[str, torch.dtype]]:
        """The elementwise states by name, of what this rank holds; empty before the first step."""
        keys = self.state_keys
        return {
            keys[shard.group.layout.names[piece.index]]: {name: values.dtype for name, values in states.items()}
            for shard in self._shards
            for piece in shard.pieces
            if (states := self.states_of(shard, piece))
        }

    def rank_states(self) -> Iterator[tuple[ShardState, Piece, str, Tensor]]:
        """Elementwise states that this rank alone has, with their names."""
        for shard in self._shards if self._counts.num_steps else ():
            found = [] if not isinstance(self._update, FusedUpdate) else list(self._update.rank_states(shard))
            low_rank = shard.gradient.low_rank
            for piece, name, values in [*found, *(() if low_rank is None else low_rank.rank_states())]:
                yield shard, piece, name, values

    def rank_state_dtypes(self) -> dict[str, dict[str, torch.dtype]]:
        """Such states of all ranks by name, of each parameter of which this one has any."""
        found: dict[str, dict[str, torch.dtype]] = {}
        for shard, piece, _, values in self.rank_states():
            names = self._update.rank_state_names(shard) if isinstance(self._update, FusedUpdate) else ()
            low_rank = shard.gradient.low_rank
            names = [*names, *(() if low_rank is None else low_rank.rank_state_names(piece.index))]
            found[shard.group.layout.names[piece.index]] = dict.fromkeys(names, values.dtype)
        return found

    def missed_steps(self, param: nn.Parameter) -> int:
        """In how many steps nobody used a parameter, so that it stayed as it was."""
        return self._counts.missed[id(param)]

    def scalar_states(self) -> ScalarStates:
        """What is kept beside elementwise states: the steps that a parameter was not used in, or what torch keeps."""
        params = [pair for shard in self._shards for pair in shard.group.plan.params]
        missed = {name: count for name, param in params if (count := self._counts.missed[id(param)])}
        kept = {key: states for shard in self._shards for key, states in self._update.scalar_states(shard).items()}
        if self._update.has_rule:
            said = {name: {MISSED_STEPS: count} for name, count in missed.items()}
            both = {key: {**(kept.get(key) or {}), **said.get(str(key), {})} for key in kept.keys() | said.keys()}
            return self._with_factors(both)
        for key in kept.keys() & missed.keys():  # a rank has those of which it has a part
            if missed[str(key)] < self._counts.num_steps:
                kept[key] = {**(kept[key] or {}), MISSED_STEPS: missed[str(key)]}
        return self._with_factors(kept)

    def _with_factors(self, scalars: dict[int | str, Any]) -> ScalarStates:
        """With the thin matrices that the next ones begin with."""
        for shard in self._shards:
            low_rank = shard.gradient.low_rank
            for index, factor in () if low_rank is None else low_rank.factors.items():
                name = shard.group.layout.names[index]
                scalars[name] = {**(scalars.get(name) or {}), FACTOR: factor.cpu()}
        return scalars

    def _take_factors(self, scalars: ScalarStates) -> None:
        for shard in self._shards:
            low_rank = shard.gradient.low_rank
            if low_rank is not None:
                low_rank.make_errors(self._counts.num_steps)
                kept = [(i, (scalars.get(name) or {}).get(FACTOR)) for i, name in enumerate(shard.group.layout.names)]
                low_rank.factors = {i: one.to(shard.group.full.device) for i, one in kept if isinstance(one, Tensor)}

    def reset(self, params: Mapping[str, nn.Parameter], what: str) -> None:
        """These are as before their first step. params: by name, on all ranks alike. Raises ValueError."""
        if isinstance(self._update, FusedUpdate) and self._update.optimizer.sends_signs:
            raise ValueError(
                f"{what}: expected an optimizer whose states are of each parameter, found {self._update.name}, whose "
                "ranks keep errors of messages that are of many; save the weights, and begin with a new engine"
            )
        for shard in self._shards:
            for index, name in enumerate(shard.group.layout.names):
                if name in params:
                    self._update.reset_states(shard, index)
        for param in params.values():
            self._counts.missed[id(param)] = self._counts.num_steps

    def make_states(
        self,
        num_steps: int,
        dtypes: Mapping[str, Mapping[str, torch.dtype]],
        scalars: ScalarStates,
        params: Mapping[str, nn.Parameter],
    ) -> None:
        """Takes memory for the states of a run that has made `num_steps`; `states_of` says where to fill them in.

        dtypes: of the elementwise states by name, for each parameter by name; floating-point ones take the dtype of
        the master weights, as in torch. scalars: as `scalar_states` gives them, of all ranks. params: of the whole
        model, by name: of other stages of a pipeline too.
        """
        missed = {
            id(param): num_steps if (kept := scalars[name]) is None else int(kept.get(MISSED_STEPS, 0))
            for name, param in params.items()
            if name in scalars
        }
        self._counts.load(num_steps, missed)
        own = {
            key: states and {n: v for n, v in states.items() if n not in (MISSED_STEPS, FACTOR)}
            for key, states in scalars.items()
        }
        self._take_factors(scalars)
        for shard in self._shards:
            if dtypes or scalars:
                self._update.make_states(shard, dtypes, own)
            else:
                self._update.forget_states(shard)
        for shard in self._shards if not dtypes and not scalars else ():
            shard.fill_chunks()
