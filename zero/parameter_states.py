"""Optimizer states by parameter, for checkpoints and for reading or writing the states of a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..offload import Memory
from .fused_update import FusedUpdate, ScalarStates, StepCounts
from .layout import ParamShard
from .shard_state import ShardState
from .sign_update import SignUpdate
from .torch_update import TorchUpdate

StateKey = tuple[int, torch.dtype]
"""(index in param_groups, dtype of the master weights). Parameters with equal keys have the same kinds of states."""
MISSED_STEPS = "missed_steps"
"""Scalar state of a parameter: the number of steps in which no rank used it."""
FACTOR = "low_rank_factor"
"""Scalar state of a parameter with PowerSGD: its factor Q."""


class ParameterStates:
    """This rank's part of each parameter's states.

    Elementwise states are ranges of shards, which all ranks describe alike. States of a single rank and states that are
    not elementwise are separate.
    """

    def __init__(self, update: FusedUpdate | TorchUpdate, shards: Sequence[ShardState], counts: StepCounts) -> None:
        """shards, counts: the optimizer's objects, to which it adds."""
        self._update = update
        self._shards = shards
        self._counts = counts

    @property
    def state_keys(self) -> dict[str, StateKey]:
        """The state key of each parameter, by name, equal on all ranks."""
        return {
            name: (shard.runs.options_index(index), shard.form.master_dtype)
            for shard in self._shards
            for index, name in enumerate(shard.group.layout.names)
        }

    def states_of(self, shard: ShardState, param_shard: ParamShard, changes: bool = False) -> dict[str, Memory]:
        """Return the elementwise states of a piece of the shard, (piece.numel,) each. Empty before the first step.

        changes: changes of states in a store are saved.
        """
        return self._update.states_of(shard, param_shard, changes) if self._counts.num_steps else {}

    def state_dtypes(self) -> dict[StateKey, dict[str, torch.dtype]]:
        """Return the dtypes of elementwise states by name, for the keys on this rank. Empty before the first step."""
        keys = self.state_keys
        return {
            keys[shard.group.layout.names[param_shard.index]]: {name: values.dtype for name, values in states.items()}
            for shard in self._shards
            for param_shard in shard.param_shards
            if (states := self.states_of(shard, param_shard))
        }

    def rank_states(self) -> Iterator[tuple[ShardState, ParamShard, str, Tensor]]:
        """Yield the elementwise states that only this rank has, with their names."""
        for shard in self._shards if self._counts.num_steps else ():
            found = self._update.rank_states(shard) if isinstance(self._update, SignUpdate) else ()
            low_rank = shard.gradient.low_rank
            for param_shard, name, values in [*found, *(() if low_rank is None else low_rank.rank_states())]:
                yield shard, param_shard, name, values

    def rank_state_dtypes(self) -> dict[str, dict[str, torch.dtype]]:
        """Return names and dtypes of the rank states of all ranks, for each parameter with rank states here."""
        found: dict[str, dict[str, torch.dtype]] = {}
        for shard, param_shard, _, values in self.rank_states():
            names = self._update.rank_state_names(shard) if isinstance(self._update, SignUpdate) else []
            low_rank = shard.gradient.low_rank
            names = [*names, *(() if low_rank is None else low_rank.rank_state_names(param_shard.index))]
            found[shard.group.layout.names[param_shard.index]] = dict.fromkeys(names, values.dtype)
        return found

    def scalar_states(self) -> ScalarStates:
        """Return the states that are not elementwise: missed steps, and the step counts of torch optimizers."""
        params = [pair for shard in self._shards for pair in shard.group.plan.params]
        missed = {name: count for name, param in params if (count := self._counts.missed[id(param)])}
        shards = self._shards if self._counts.num_steps else ()
        by_shard = [self._update.scalar_states(shard, self._counts.missed) for shard in shards]
        kept = {key: states for found in by_shard for key, states in found.items()}
        if self._update.has_rule:
            said = {name: {MISSED_STEPS: count} for name, count in missed.items()}
            both = {key: {**(kept.get(key) or {}), **said.get(str(key), {})} for key in kept.keys() | said.keys()}
            return self._with_factors(both)
        for key in kept.keys() & missed.keys():  # a rank reports the parameters that its shard has a part of
            # A parameter without any step stays None, from which `make_states` concludes that it has missed all.
            if missed[str(key)] < self._counts.num_steps:
                kept[key] = {**(kept[key] or {}), MISSED_STEPS: missed[str(key)]}
        return self._with_factors(kept)

    def _with_factors(self, scalars: dict[int | str, Any]) -> ScalarStates:
        """Add the PowerSGD factors."""
        for shard in self._shards:
            low_rank = shard.gradient.low_rank
            for index, factor in () if low_rank is None else low_rank.factors.items():
                name = shard.group.layout.names[index]
                # None must stay: no states yet. A rank without a part of the parameter does not know.
                if id(shard.group.params[index]) in shard.runs.param_ids and scalars.get(name, {}) is not None:
                    scalars[name] = {**scalars.get(name, {}), FACTOR: factor.cpu()}
        return scalars

    def _take_factors(self, scalars: ScalarStates) -> None:
        for shard in self._shards:
            low_rank = shard.gradient.low_rank
            if low_rank is not None:
                low_rank.make_errors(self._counts.num_steps)
                kept = [(i, (scalars.get(name) or {}).get(FACTOR)) for i, name in enumerate(shard.group.layout.names)]
                low_rank.factors = {
                    i: factor.to(shard.group.full.device) for i, factor in kept if isinstance(factor, Tensor)
                }

    def reset(self, params: Mapping[str, nn.Parameter], what: str) -> None:
        """Reset the states of these parameters to those before the first step. Raises ValueError.

        params: by name, the same on all ranks.
        """
        if isinstance(self._update, SignUpdate):
            raise ValueError(
                f"{what}: expected an optimizer with separate states for each parameter, found {self._update.name}, "
                "which keeps errors of messages over many parameters; save the weights, and begin with a new engine"
            )
        for shard in self._shards:
            for index, name in enumerate(shard.group.layout.names):
                if name in params:
                    self._update.reset_states(shard, index)
                    if shard.gradient.low_rank is not None:
                        shard.gradient.low_rank.forget(index)
        # As if it had missed every step, so that its bias correction begins again.
        for param in params.values():
            self._counts.missed[id(param)] = self._counts.num_steps

    def make_states(
        self,
        num_steps: int,
        dtypes: Mapping[str, Mapping[str, torch.dtype]],
        scalars: ScalarStates,
        params: Mapping[str, nn.Parameter],
    ) -> None:
        """Take memory for the states of a run of `num_steps` steps; fill them through `states_of`.

        dtypes: elementwise states by name, for each parameter by name; floating-point states take the dtype of the
        master weights, as in torch. scalars: `scalar_states` of all ranks. params: of the whole model, other pipeline
        stages included, by name.
        """
        missed = {
            id(param): num_steps if (kept := scalars[name]) is None else int(kept.get(MISSED_STEPS, 0))
            for name, param in params.items()
            if name in scalars
        }
        self._counts.load(num_steps, missed)
        own = {
            # None (no states yet) stays None.
            key: states and {n: v for n, v in states.items() if n not in (MISSED_STEPS, FACTOR)}
            for key, states in scalars.items()
            # A factor alone says nothing of the optimizer: the states of the parameter's group are its states.
            if states is None or states.keys() != {FACTOR}
        }
        self._take_factors(scalars)
        for shard in self._shards:
            if dtypes or scalars:
                self._update.make_states(shard, dtypes, own)
            else:
                self._update.forget_states(shard)
        # The run has made no step, but the chunks still have the states from before the load.
        for shard in self._shards if not dtypes and not scalars else ():
            shard.fill_chunks()
