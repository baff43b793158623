"""Which parts of a model belong to which pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import nn

from .balance import check_stages, given_counts, partition
from .block_times import seconds_of_blocks
from .blocks import Block, find_blocks
from .usage import Places, places_by_code, places_by_run

Call = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class SplitPlan:
    """A model cut into stages at the entries of blocks: plain data, equal on every rank, picklable.

    A stage runs its own blocks and the code from its first block to the first block of the next stage; the first
    stage begins with the forward, the last one ends with it.

    blocks: their names, in order.  counts: how many of them each stage has.
    parameters: by stage, the names of those that it needs, each under its first name, in the model's order.
    buffers: by stage, the names of those that it owns: each belongs to one stage, for the state dict.
    tied: parameters that several stages need, with these stages: each has a copy, and their gradients must be summed.
    costs: of each stage, in the unit of the balance: parameters or seconds.
    """

    blocks: tuple[str, ...]
    counts: tuple[int, ...]
    parameters: tuple[tuple[str, ...], ...]
    buffers: tuple[tuple[str, ...], ...]
    tied: Mapping[str, tuple[int, ...]]
    costs: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        return len(self.counts)

    def blocks_of(self, stage: int) -> range:
        """The indices of the stage's blocks."""
        ends = tuple(accumulate(self.counts))
        return range(ends[stage] - self.counts[stage], ends[stage])

    def names_of(self, stages: Iterable[int]) -> list[set[str]]:
        """Of each of these stages, the names of its blocks."""
        return [{self.blocks[index] for index in self.blocks_of(stage)} for stage in stages]

    def stage_of_block(self, block: int) -> int:
        """The stage that has block number `block`."""
        return next(stage for stage, end in enumerate(accumulate(self.counts)) if block < end)

    def stage_at(self, place: int) -> int:
        """The stage that runs the code before block number `place`, or behind all blocks."""
        return self.stage_of_block(place - 1) if place else 0


def plan_split(
    model: nn.Module,
    num_stages: int,
    balance: str | Sequence[int] = "parameters",
    sample: Call | None = None,
) -> SplitPlan:
    """Divides the blocks among stages so that the costliest stage is as cheap as can be.

    model: may be on the meta device.
    balance: "parameters"; "time", of a forward, measured here: other ranks must be given this plan and not measure
    again; or the number of blocks of each stage. Embedding, head and what else lies outside the blocks are counted.
    sample: calls the model with a batch, as `lambda model: model(**batch)`. With it the places where parameters outside
    the blocks are used are observed, without it they are read from the source text of the model's forward.
    Raises ValueError for a model without blocks, more stages than blocks, or a list that does not add up.
    """
    blocks = find_blocks(model)
    check_stages(len(blocks), num_stages)
    if isinstance(balance, str) and balance not in ("parameters", "time"):
        raise ValueError(
            f'pipeline: expected balance "parameters", "time" or a list of numbers of blocks, found "{balance}"'
        )
    places = places_by_code(model, blocks)
    if sample is not None:
        places |= places_by_run(model, blocks, sample)
    if balance == "time" and sample is None:
        raise ValueError('pipeline: balance "time" needs a sample batch to measure with; found none')
    if balance == "time" and sample is not None:
        first, *costs = seconds_of_blocks(model, blocks, sample)
    else:
        first, *costs = _numel_at_places(model, blocks, places)
    if isinstance(balance, str):
        counts = partition(costs, num_stages, first)
    else:
        counts = given_counts(balance, len(blocks), num_stages)
    plan = _assigned(model, blocks, counts, places)
    if balance != "time":
        numel = {name: param.numel() for name, param in model.named_parameters()}
        return replace(plan, costs=tuple(sum(numel[name] for name in names) for names in plan.parameters))
    stage_costs = [sum(costs[block] for block in plan.blocks_of(stage)) for stage in range(num_stages)]
    return replace(plan, costs=(stage_costs[0] + first, *stage_costs[1:]))


def _numel_at_places(model: nn.Module, blocks: Sequence[Block], places: Places) -> list[float]:
    """Parameters before the blocks, then of each block with what is used behind it and before the next."""
    numels = [0.0] * (len(blocks) + 1)
    numel_of = {id(param): param.numel() for param in model.parameters()}
    for number, block in enumerate(blocks, 1):
        numels[number] += sum(param.numel() for param in block.module.parameters())
    for param, used_at in places.items():
        for place in used_at:
            numels[place] += numel_of[param]
    return numels


def _assigned(model: nn.Module, blocks: Sequence[Block], counts: Sequence[int], places: Places) -> SplitPlan:
    """The plan, but for its costs."""
    names = tuple(block.name for block in blocks)
    empty = SplitPlan(names, tuple(counts), (), (), {}, ())
    stages_of = {param: {empty.stage_at(place) for place in used_at} for param, used_at in places.items()}
    for number, block in enumerate(blocks):
        for param in block.module.parameters():
            stages_of.setdefault(id(param), set()).add(empty.stage_of_block(number))
    owned = [(name, sorted(stages_of[id(param)])) for name, param in model.named_parameters()]
    buffers = _stages_of_buffers(model, blocks, empty, stages_of)
    every = range(empty.num_stages)
    return replace(
        empty,
        parameters=tuple(tuple(name for name, stages in owned if stage in stages) for stage in every),
        buffers=tuple(tuple(name for name, owner in buffers if owner == stage) for stage in every),
        tied={name: tuple(stages) for name, stages in owned if len(stages) > 1},
    )


def _stages_of_buffers(
    model: nn.Module, blocks: Sequence[Block], plan: SplitPlan, stages_of: Mapping[int, set[int]]
) -> list[tuple[str, int]]:
    """(buffer, stage): of a block its stage, else the first stage that has a parameter of the same module, else 0."""
    in_block = {id(part): number for number, block in enumerate(blocks) for part in block.module.modules()}
    found = []
    for name, _buffer in model.named_buffers():
        owner = model.get_submodule(name.rpartition(".")[0])
        stages = {stage for param in owner.parameters() for stage in stages_of[id(param)]}
        if id(owner) in in_block:
            stages = {plan.stage_of_block(in_block[id(owner)])}
        found.append((name, min(stages, default=0)))
    return found
