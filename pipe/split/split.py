"""Divide a model into pipeline stages (`plan_split` makes a `SplitPlan`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import nn

from .blocks import Blocks, find_blocks, seconds_of_blocks
from .usage import Places, places_by_code, places_by_run

Call = Callable[[nn.Module], Any]
_Cost = Callable[[int, int, int], float]  # of a stage that has blocks begin..end


@dataclass(frozen=True)
class SplitPlan:
    """The division of a model into stages at the entries of blocks. Plain data, equal on every rank, picklable.

    A stage runs from the entry of its first block to the entry of the next stage's first block. The first stage begins
    with the forward, and the last stage ends with it.

    blocks: names in order. counts: number of blocks of each stage.
    parameters: by stage, the names of the parameters that it needs: first names, in the model's order.
    buffers: by stage, the names of buffers in its state dict. Each buffer belongs to a single stage.
    tied: parameter -> stages, if several stages need it. Each has a copy, and their gradients must be summed.
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
        """Return the indices of the stage's blocks."""
        ends = tuple(accumulate(self.counts))
        return range(ends[stage] - self.counts[stage], ends[stage])

    def names_of(self, stages: Iterable[int]) -> list[set[str]]:
        """Return the names of the blocks of each of these stages."""
        return [{self.blocks[index] for index in self.blocks_of(stage)} for stage in stages]

    def stage_of_block(self, block: int) -> int:
        """Return the stage of block number `block`."""
        return next(stage for stage, end in enumerate(accumulate(self.counts)) if block < end)

    def stage_at(self, place: int) -> int:
        """Return the stage that runs the code before block number `place`, or after all blocks."""
        return self.stage_of_block(place - 1) if place else 0


def plan_split(
    model: nn.Module,
    num_stages: int,
    balance: str | Sequence[int] = "parameters",
    sample: Call | None = None,
) -> SplitPlan:
    """Divide the blocks among stages so that the cost of the costliest stage is minimal.

    model: may be on the meta device.
    balance: "parameters"; "time" of a forward; or the number of blocks of each stage. Modules outside the blocks count,
    such as embedding and head. "time" is measured on this rank: send this plan to all ranks.
    sample: calls the model with a batch, as `lambda model: model(**batch)`, to observe the places at which parameters
    outside the blocks are used. Without it, they are read from the source text of the model's forward.
    Raises ValueError for a model without blocks, more stages than blocks, or a list with the wrong sum.
    """
    blocks = find_blocks(model)
    check_stages(len(blocks), num_stages)
    if isinstance(balance, str) and balance not in ("parameters", "time"):
        raise ValueError(
            f'pipeline: expected balance "parameters", "time" or a list of numbers of blocks, found "{balance}"'
        )
    places = places_by_code(model, blocks)
    if sample is not None:
        # Observed places replace those that were read. A parameter that the sample does not use keeps its places.
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
        # A tied parameter counts on each of its stages, since each holds a copy.
        return replace(plan, costs=tuple(sum(numel[name] for name in names) for names in plan.parameters))
    stage_costs = [sum(costs[block] for block in plan.blocks_of(stage)) for stage in range(num_stages)]
    return replace(plan, costs=(stage_costs[0] + first, *stage_costs[1:]))


def _numel_at_places(model: nn.Module, blocks: Blocks, places: Places) -> list[float]:
    """Count the parameters used before the blocks, then of each block and the code up to the next block."""
    numels = [0.0] * (len(blocks) + 1)
    numel_of = {id(param): param.numel() for param in model.parameters()}
    for number, block in enumerate(blocks.values(), 1):
        numels[number] += sum(param.numel() for param in block.parameters())
    for tensor, used_at in places.items():
        for place in used_at:
            numels[place] += numel_of.get(tensor, 0)  # buffers do not count
    return numels


def _assigned(model: nn.Module, blocks: Blocks, counts: Sequence[int], places: Places) -> SplitPlan:
    """Make the plan without costs."""
    empty = SplitPlan(tuple(blocks), tuple(counts), (), (), {}, ())
    stages_of = {param: {empty.stage_at(place) for place in used_at} for param, used_at in places.items()}
    for number, block in enumerate(blocks.values()):
        for param in block.parameters():
            # Code outside the blocks may use a block's parameter too: it is then tied.
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
    model: nn.Module, blocks: Blocks, plan: SplitPlan, stages_of: Mapping[int, set[int]]
) -> list[tuple[str, int]]:
    """List (buffer, stage): the stage of its block, else the first with a parameter of the same module, else the first
    that uses it.
    """
    in_block = {id(part): number for number, block in enumerate(blocks.values()) for part in block.modules()}
    found = []
    for name, buffer in model.named_buffers():
        owner = model.get_submodule(name.rpartition(".")[0])
        stages = {stage for param in owner.parameters() for stage in stages_of[id(param)]}
        if id(owner) in in_block:
            stages = {plan.stage_of_block(in_block[id(owner)])}
        elif not stages or any(id(part) in in_block for part in owner.modules()):
            stages = stages_of[id(buffer)]
        found.append((name, min(stages)))
    return found


def partition(costs: Sequence[float], num_stages: int, first: float = 0) -> tuple[int, ...]:
    """Choose the number of blocks of each stage, at least 1, with the minimal cost of the costliest stage.

    costs: of each block, at least 0. first: additional cost of the first stage. Among the partitions with the minimal
    largest cost, it takes the minimal sum of squares, so that the remaining stages are even too.
    Exact, O(blocks^2 x stages). Raises ValueError for more stages than blocks.
    """
    check_stages(len(costs), num_stages)
    sums = [0.0, *accumulate(float(cost) for cost in costs)]

    def cost(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + (first if stage == 0 else 0)

    limit = _smallest_limit(len(costs), num_stages, cost)
    return _most_even(len(costs), num_stages, cost, limit * (1 + 1e-12))  # sums are rounded


def given_counts(counts: Sequence[int], num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Check an explicit list of numbers of blocks per stage. Raises ValueError if it does not fit."""
    shown = " + ".join(str(count) for count in counts)
    if len(counts) != num_stages:
        raise ValueError(
            f"pipeline: expected a number of blocks for each of {num_stages} stages, found {len(counts)}: "
            f"{list(counts)}"
        )
    if any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in counts):
        raise ValueError(f"pipeline: expected at least one block for each stage, found {list(counts)}")
    if sum(counts) != num_blocks:
        raise ValueError(
            f"pipeline: the numbers of blocks per stage must add up to the model's blocks, found {shown} = "
            f"{sum(counts)} != {num_blocks}"
        )
    return tuple(counts)


def check_stages(num_blocks: int, num_stages: int) -> None:
    """Raise ValueError unless every stage can have a block."""
    if not 1 <= num_stages <= num_blocks:
        raise ValueError(
            f"pipeline: expected 1 to {num_blocks} stages, because the model has {num_blocks} blocks and each stage "
            f"needs a block, found {num_stages}; use fewer stages (ranks x chunks), or a model with more blocks"
        )


def _smallest_limit(num_blocks: int, num_stages: int, cost: _Cost) -> float:
    """Find the minimal cost of the costliest stage."""
    # best[end]: the smallest limit if the stages so far have the first `end` blocks.
    best = [cost(0, 0, end) if end else float("inf") for end in range(num_blocks + 1)]
    for stage in range(1, num_stages):
        following = [float("inf")] * (num_blocks + 1)
        for end in range(stage + 1, num_blocks + 1):
            for begin in range(end - 1, stage - 1, -1):
                stage_cost = cost(stage, begin, end)
                if stage_cost >= following[end]:
                    break  # an earlier begin costs at least as much
                following[end] = min(following[end], max(best[begin], stage_cost))
        best = following
    return best[num_blocks]


def _most_even(num_blocks: int, num_stages: int, cost: _Cost, limit: float) -> tuple[int, ...]:
    """Find the partition with the minimal sum of squares in which every stage costs at most `limit`."""
    infinite = float("inf")
    # best[end]: the smallest sum if the stages so far have the first `end` blocks. begins[stage][end]: where, then, the
    # last of these stages begins.
    best = [cost(0, 0, end) ** 2 if end and cost(0, 0, end) <= limit else infinite for end in range(num_blocks + 1)]
    begins: list[list[int]] = [[0] * (num_blocks + 1)]
    for stage in range(1, num_stages):
        following, chosen = [infinite] * (num_blocks + 1), [0] * (num_blocks + 1)
        for end in range(stage + 1, num_blocks + 1):
            for begin in range(end - 1, stage - 1, -1):
                stage_cost = cost(stage, begin, end)
                if stage_cost > limit:
                    break
                if best[begin] + stage_cost**2 < following[end]:
                    following[end], chosen[end] = best[begin] + stage_cost**2, begin
        best = following
        begins.append(chosen)
    counts, end = [], num_blocks
    for chosen in reversed(begins):
        counts.append(end - chosen[end])
        end = chosen[end]
    return tuple(reversed(counts))
