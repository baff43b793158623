"""The update of a shard by the user's own elementwise torch optimizer class."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..offload import Memory
from ..optimizers.optimizer import Options
from .fused_update import Terms
from .layout import Piece
from .optimizer_choice import OptimizerFactory
from .shard_state import Run, ShardState, StatePart


class TorchUpdate:
    """Each run of a shard is one flat parameter of an optimizer that the factory makes, with its own states.

    Has the methods of `FusedUpdate`. Its states are in memory, and known after the first step.
    """

    has_rule = False

    def __init__(self, factory: OptimizerFactory) -> None:
        self._factory = factory
        self._inner: dict[int, torch.optim.Optimizer] = {}  # by identity of the shard

    @property
    def name(self) -> str:
        return type(self._factory([nn.Parameter(torch.zeros(1))])).__name__

    def lacks_state(self, options: Options) -> bool:
        return False

    def can_take(self, kind: str, states: Collection[str]) -> bool:
        return kind == self.name

    def new_states(self, master: Tensor) -> dict[str, Tensor]:
        return {}

    def update(self, shard: ShardState, parts: Iterable[StatePart], gradient: Tensor, terms: Terms) -> None:
        (whole,) = parts
        if id(shard) not in self._inner:
            self._inner[id(shard)] = self._make_inner(shard)
        for run, options in self._runs(shard):
            outer = terms.options[run.options_index]
            options.update({key: value for key, value in outer.items() if key in options and key != "params"})
            (param,) = options["params"]
            param.data = whole.master[run.start : run.end]
            # A copy: other ranks may share the gradient.
            param.grad = gradient[run.start : run.end].to(whole.master.dtype) * terms.gradient_scale
        self._inner[id(shard)].step()
        for _, options in self._runs(shard):
            options["params"][0].grad = None
        if whole.rounded is not None:
            whole.rounded.copy_(whole.master)

    def states_of(self, shard: ShardState, piece: Piece, changes: bool) -> dict[str, Memory]:
        if id(shard) not in self._inner:
            return {}
        run, param = next(
            (run, options["params"][0])
            for run, options in self._runs(shard)
            if run.start <= piece.offset_in_shard < run.end
        )
        low = piece.offset_in_shard - run.start
        states = self._inner[id(shard)].state[param].items()
        return {name: v[low : low + piece.numel] for name, v in states if _is_elementwise(v, param)}

    def make_states(
        self,
        shard: ShardState,
        dtypes: Mapping[str, Mapping[str, torch.dtype]],
        scalars: Mapping[int, Mapping[str, Any]],
    ) -> None:
        inner = self._inner[id(shard)] = self._make_inner(shard)
        for run, options in self._runs(shard):
            param = options["params"][0]
            piece = next(piece for piece in shard.group.pieces if piece.offset_in_shard >= run.start)
            for name, dtype in dtypes.get(shard.group.names[piece.index], {}).items():
                own_dtype = param.dtype if dtype.is_floating_point else dtype
                inner.state[param][name] = torch.zeros_like(param, dtype=own_dtype)
            for name, value in scalars.get(run.options_index, {}).items():
                inner.state[param][name] = value.clone() if isinstance(value, Tensor) else value

    def forget_states(self, shard: ShardState) -> None:
        self._inner.pop(id(shard), None)

    def scalar_states(self, shard: ShardState) -> dict[int, dict[str, Any]]:
        """Index in param_groups -> what a torch optimizer keeps there beside elementwise states: its step, mostly."""
        found = {}
        for run, options in self._runs(shard):
            param = options["params"][0]
            states = self._inner[id(shard)].state[param].items()
            found[run.options_index] = {name: v for name, v in states if not _is_elementwise(v, param)}
        return found

    def state_bytes(self, shard: ShardState) -> int:
        states = self._inner[id(shard)].state.values() if id(shard) in self._inner else ()
        return sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor) and v.dim())

    def _runs(self, shard: ShardState) -> Iterator[tuple[Run, dict[str, Any]]]:
        """With the options of each; none before the shard has states."""
        if id(shard) in self._inner:
            yield from zip(shard.runs, self._inner[id(shard)].param_groups, strict=True)

    def _make_inner(self, shard: ShardState) -> torch.optim.Optimizer:
        views = [nn.Parameter(shard.master[run.start : run.end]) for run in shard.runs]
        if not views:
            views = [nn.Parameter(shard.master[:0])]
        inner = self._factory(views)
        template = inner.param_groups[0]
        inner.param_groups[:] = [{**template, "params": [view]} for view in views][: len(shard.runs)]
        return inner


def _is_elementwise(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and value.dim() == 1
