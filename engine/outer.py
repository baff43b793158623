"""Islands that train apart: when what they have become is exchanged, and when it is taken over (`outer` of the config).

    every 50, fragments 2, overlap 2: steps in which an exchange starts, and those in which its result is taken over

    fragment 0                   50 52                        100 102
    fragment 1      25 27                       75 77

[Note: what is exchanged]
Each rank exchanges its shards with the ranks of its number on the other islands, which have the same parts. Where ranks
of an island have copies of everything (stage 0), each exchanges a part, and the island puts the results together.

Source: DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512, algorithm 2.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm import Agreed, Combine, InDtype, Islands, Mesh, MessageForm, Ring
from ..kernels.weight_rounding import Rounding
from ..zero.optimizer import ShardedOptimizer
from ..zero.outer_state import OuterRule, OuterState
from ..zero.shard_state import ShardState
from ..zero.unit import Unit
from .archive.named_state import NamedState
from .config.outer import OuterConfig
from .island_bits import InBlocks
from .island_folders import chosen, own_folder

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class _Started:
    """An exchange. numel: of what all ranks of an island have together, where each exchanges a part."""

    future: Future[Agreed]
    numel: int


@dataclass(frozen=True)
class Schedule:
    """In which steps a fragment's exchange starts and ends; steps count from 1."""

    every: int
    num_fragments: int
    overlap: int

    def starting(self, step: int) -> int | None:
        """The fragment whose exchange starts when that step is done."""
        return next((f for f in range(self.num_fragments) if step % self.every == self._first(f)), None)

    def ending(self, step: int) -> int | None:
        """The fragment whose result is taken over when that step is done: of a start `overlap` steps before."""
        return self.starting(step - self.overlap) if step > self.overlap else None

    def _first(self, fragment: int) -> int:
        return fragment * self.every // self.num_fragments


class Outer:
    """The exchanges of one engine with the other islands, and what is kept for them."""

    def __init__(
        self,
        config: OuterConfig,
        islands: Islands,
        mesh: Mesh,
        units: Sequence[Unit],
        optimizer: ShardedOptimizer,
        seed: int,
    ) -> None:
        """seed: of random bits. Raises ValueError where islands differ, or there are fewer units than fragments."""
        assert config.every is not None
        self._mixing = config.mixing
        self._schedule = Schedule(config.every, config.fragments, config.overlap)
        self._mesh = mesh
        has_rule = config.optimizer != "average"
        momentum = config.momentum if has_rule else 0.0
        rule = OuterRule(config.lr if has_rule else 1.0, momentum, config.optimizer == "nesterov")
        self.state = OuterState(_fragments(units, optimizer.shards, config.fragments), rule, config.offload)
        self._dtype = config.dtype
        self._seed = seed
        self._under_way: dict[int, _Started] = {}
        self._arrived: dict[int, Tensor] = {}  # of a checkpoint: taken over when it is due
        self._divides = all(one.group.axes.replicas.size == mesh.world.size > 1 for one in optimizer.shards)
        self.ring = Ring(islands, mesh.world.rank, config.timeout_seconds)
        try:
            self.ring.check_alike(_described(config, mesh, optimizer.shards))
        except BaseException:
            self.ring.leave("its ranks have another config or model")
            raise

    def begin(self, named: NamedState) -> None:
        """All islands have the first one's parameters, and nothing has moved. A collective of all islands."""
        self.state.begin()
        if self.ring.islands.count > 1:
            for fragment in self._fragments:
                agreed = self.state.agreed(fragment)
                values = self._result(self._exchange(agreed, InDtype(agreed.dtype), Combine.FIRST))
                self.state.agree(fragment, values)
                self._put_back(fragment, 0.0, named)

    def is_due(self, step: int) -> bool:
        """Whether something starts or ends with that step, which counts also where it was skipped."""
        return self._schedule.starting(step) is not None or self._schedule.ending(step) is not None

    def after_step(self, step: int, named: NamedState) -> None:
        """Starts and ends what is due. A collective, of all islands where something ends.

        Raises CollectiveError where the store of the job is gone, and LeftOutError.
        """
        ending, starting = self._schedule.ending(step), self._schedule.starting(step)
        if self._schedule.overlap and ending is not None:
            self._end(ending, named)
        if starting is not None:
            self._start(starting, step)
            if not self._schedule.overlap:
                self._end(starting, named)

    def restart(self, named: NamedState) -> None:
        """As `begin`, with other parameters than before. What is under way is waited for."""
        self._drain()
        self._arrived.clear()
        self.begin(named)

    def close(self) -> None:
        """Waits for what is under way; then the other islands go on without this one."""
        self._drain()
        self.ring.leave("it has ended")

    def leave(self) -> None:
        """As `close`, waiting for nothing: after an error. Does nothing after `close`."""
        self.ring.leave("it has ended with an error")

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Of a checkpoint, beside the values. `state` has until `saved` what has arrived and is not taken over yet."""
        for fragment, started in self._under_way.items():
            self._arrived[fragment] = self._result(started)
        self._under_way.clear()
        for fragment, mean in self._arrived.items():
            self.state.keep_arrived(fragment, mean)
        islands = self.ring.islands
        arrived = sorted(self._arrived)
        return {"island": islands.island, "fragments": len(self._fragments), "arrived": arrived}

    def saved(self) -> None:
        """A checkpoint has what it needs."""
        self.state.drop_arrived()

    def own_folder(self, folder: str | os.PathLike[str]) -> Path:
        """Where this island saves."""
        return own_folder(folder, self.ring.islands.island)

    def chosen(self, folder: str | os.PathLike[str], tag: str | None) -> tuple[Path, str | None]:
        """(folder, tag) that this island loads. A collective of all islands. Raises NoCheckpointError."""
        self._drain()
        return chosen(self.ring, self._mesh.world, folder, tag)

    def restore(self, saved: Mapping[str, Any] | None, named: NamedState) -> None:
        """saved: what a checkpoint has beside the values, which are in `state`; None: it is of no island."""
        if saved is None:
            self.restart(named)
            return
        self._arrived = {fragment: self.state.arrived(fragment) for fragment in saved["arrived"]}
        self.state.drop_arrived()

    # -- pieces of it ---------------------------------------------------------------------------------------------

    @property
    def _fragments(self) -> range:
        return range(len(self.state.fragments))

    def _start(self, fragment: int, step: int) -> None:
        differences = self.state.differences(fragment)
        form = self._form(differences.dtype, fragment, step)
        self._under_way[fragment] = self._exchange(differences, form, Combine.MEAN)

    def _form(self, dtype: torch.dtype, fragment: int, step: int) -> MessageForm:
        """Of differences of that dtype."""
        if self._dtype in _BITS:
            name = f"outer fragment {fragment} of island {self.ring.islands.island} rank {self._mesh.world.rank}"
            return InBlocks(_BITS[self._dtype], Rounding.of(self._seed, name, 0), step)
        return InDtype(_DTYPES[self._dtype] if self._dtype is not None else dtype)

    def _end(self, fragment: int, named: NamedState) -> None:
        if fragment in self._arrived:
            mean = self._arrived.pop(fragment)
        elif fragment in self._under_way:
            mean = self._result(self._under_way.pop(fragment))
        else:
            return  # it would have begun before this engine did
        self.state.update(fragment, mean)
        self._put_back(fragment, self._mixing, named)

    def _put_back(self, fragment: int, mixing: float, named: NamedState) -> None:
        self._mesh.fence("the end of what reads the weights")
        with torch.no_grad():
            self.state.put_back(fragment, mixing)
        named.publish([shard.group for shard in self.state.fragments[fragment]])

    def _exchange(self, values: Tensor, form: MessageForm, combine: Combine) -> _Started:
        """See [Note: what is exchanged]."""
        own = values.tensor_split(self._mesh.world.size)[self._mesh.world.rank] if self._divides else values
        return _Started(self.ring.start(own, form, combine), values.numel())

    def _result(self, started: _Started) -> Tensor:
        """(n,) on the CPU. A collective of the island, where its ranks have exchanged parts."""
        values = started.future.result().values
        if not self._divides:
            return values
        world = self._mesh.world
        whole = torch.zeros(started.numel, dtype=values.dtype, device=world.device)
        whole.tensor_split(world.size)[world.rank].copy_(values)
        return world.assemble(whole).cpu()

    def _drain(self) -> None:
        for started in self._under_way.values():
            started.future.result()
        self._under_way.clear()


def _fragments(units: Sequence[Unit], shards: Sequence[ShardState], count: int) -> list[list[ShardState]]:
    """Unit by unit in turn."""
    by_group = {id(shard.group): shard for shard in shards}
    of_units = [[by_group[id(group)] for group in unit.groups if id(group) in by_group] for unit in units]
    of_units = [found for found in of_units if found]
    if 0 < len(of_units) < count:  # a stage of a pipeline may have none that is trained
        raise ValueError(
            f"outer.fragments: expected at most the number of units that are trained here ({len(of_units)}), found "
            f"{count}; lower it, or name smaller zero_optimization.units"
        )
    return [[shard for found in of_units[first::count] for shard in found] for first in range(count)]


def _described(config: OuterConfig, mesh: Mesh, shards: Sequence[ShardState]) -> str:
    """What must be the same on all islands."""
    of_shards = [(shard.group.layout, shard.form.master_dtype) for shard in shards]
    layouts = [(list(layout.names), layout.shard_numel, str(dtype)) for layout, dtype in of_shards]
    digest = hashlib.sha256(repr(layouts).encode()).hexdigest()[:12]
    told = {key: value for key, value in config.model_dump().items() if key not in ("offload", "timeout_seconds")}
    return f"{mesh.world.size} ranks, {len(shards)} groups of parameters ({digest}), outer {told}"
