"""A pipeline trains to the numbers of one process: every schedule, ZeRO stage and precision, tied weights or not.

Weights that other pairs of stages share are asked in `tests/pretend/test_pipelines.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import lowtide
from lowtide.pipe.schedules.passes import complete
from lowtide.pipe.schedules.registry import make_schedule
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, Outcome, adamw, assert_close, take_step, train_all, train_plainly
from tests.pipe.pipelines import (
    MICROBATCHES,
    SCHEDULES,
    TOLERANCE_64,
    deep_gpt,
    deep_gpt_64,
    deep_tied_gpt,
    deep_tied_gpt_64,
    pipelined,
    with_steps,
)
from tests.zero import containers


class PartlyUnused(models.TinyGPT):
    """A weight that nobody uses in each block, and one of the root; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__(layers=4, tied=True)
        for block in self.blocks:
            block.lonely = nn.Parameter(torch.ones(3, 5))
        self.lonely = nn.Parameter(torch.ones(7))
        self.double()


class Computed(nn.Module):
    """Its weight is computed, from buffers that change with every look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = spectral_norm(nn.Linear(7, 7))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def computed() -> nn.Module:
    model = models.Mlp()
    model.layers = nn.Sequential(*(Computed() for _ in range(5)))
    return model.double()


class OfList(nn.Linear):
    """A layer on each tensor of a list."""

    def forward(self, xs: Any) -> Any:
        return [super(OfList, self).forward(x) for x in xs]


class ManyTensors(models.Mlp):
    """More tensors go between stages than a message has tags."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(OfList(7, 7), OfList(7, 7))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.layers([self.first(x) / (number + 1) for number in range(66)])
        return nn.functional.mse_loss(self.last(sum(x * number for number, x in enumerate(made))), y)


def frozen() -> nn.Module:
    """Layers at both ends, and some blocks."""
    model = models.Mlp(layers=5).double()
    for part in (model.first, model.layers[0], model.layers[1], model.layers[3], model.last):
        part.requires_grad_(False)
    return model


TOKENS = Case(deep_tied_gpt_64, models.token_batch, clip=0.3, accumulation=MICROBATCHES, steps=2)
VECTORS = replace(TOKENS, build=computed, batch=models.vector_batch_float64)
UNUSED, FROZEN = replace(TOKENS, build=PartlyUnused), replace(VECTORS, build=frozen)
SOCKETS = {"communication": {"transport": "sockets"}}
ROWS: dict[int, list[tuple[Case, int, str, dict[str, Any]]]] = {  # by number of ranks: case, those of a pipeline, ...
    2: [
        *((TOKENS, 2, schedule, {}) for schedule in SCHEDULES),
        (VECTORS, 2, "zb-h1", {}),
        (FROZEN, 2, "1f1b", {}),
        (replace(VECTORS, build=ManyTensors), 2, "gpipe", {}),
        (replace(VECTORS, build=containers.Mixed).at(3), 2, "1f1b", {}),
        (UNUSED, 2, "1f1b", {}),
    ],
    4: [
        (TOKENS.at(3), 2, "zb-v", {}),
        (TOKENS.at(2), 2, "zb-v", {"zero_optimization": {"shard_size": 1}}),
        (TOKENS, 4, "zb-h1", {}),
        (UNUSED.at(3), 2, "zb-v", {}),
        (FROZEN.at(3), 2, "zb-h1", SOCKETS),
    ],
}


@cache
def plainly(build: Callable[[], nn.Module], batch: Any, data_size: int) -> Outcome:
    return train_plainly(replace(TOKENS, build=build, batch=batch), data_size, num_parts=MICROBATCHES)


@pytest.mark.parametrize("num_ranks", ROWS)
def test_a_pipeline_trains_like_one_process(ranks: RankPool, num_ranks: int) -> None:
    rows = ROWS[num_ranks]
    cases = [pipelined(case, size, schedule, **config) for case, size, schedule, config in rows]
    outcomes = zip(*ranks(num_ranks, train_all, cases, timeout=240), strict=True)
    for (case, size, *_), pipeline, (first, *others) in zip(rows, cases, outcomes, strict=True):
        expected = plainly(case.build, case.batch, num_ranks // size)
        assert_close(first, expected, TOLERANCE_64, TOLERANCE_64, str(pipeline))
        for other in others:
            assert (other.losses, other.norms, other.skipped) == (first.losses, first.norms, first.skipped)


def unfreeze(model: Any, step: int) -> None:
    for index, block in enumerate(model.blocks):
        block.requires_grad_(index >= 2 - step)


def blocks_of(model: Any) -> list[nn.Parameter]:
    return [param for block in model.blocks for param in block.parameters()]


def train_blocks(case: Case) -> dict[str, Tensor]:
    """The optimizer has the blocks alone; the first two are frozen in the beginning."""
    torch.manual_seed(0)
    model = case.build()
    unfreeze(model, 0)
    engine = lowtide.initialize(model, {**case.as_config(), "optimizer": None}, optimizer=adamw(blocks_of(model)))
    for step in range(case.steps):
        unfreeze(model, step)
        take_step(engine, case, step)
    state = engine.state_dict()
    engine.close()
    return state


def test_an_optimizer_over_blocks_that_are_unfrozen_later(ranks: RankPool) -> None:
    case = replace(TOKENS, build=deep_gpt_64)
    torch.manual_seed(0)
    model = deep_gpt_64()
    optimizer = adamw(blocks_of(model))
    for step in range(case.steps):
        unfreeze(model, step)
        model.zero_grad()
        model(*case.global_batch(step, 2)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    found = ranks(4, train_blocks, pipelined(case.at(3), 2, "zb-v"))[0]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE_64, atol=TOLERANCE_64)


# -- to the bit -------------------------------------------------------------------------------------------------------

PLAIN, TIED = (replace(TOKENS, build=build) for build in (deep_gpt, deep_tied_gpt))


def written(schedule: Any, folder: Path, name: str) -> str:
    path = folder / f"{name}.txt"
    path.write_text(schedule.to_text())
    return str(path)


def laws(num_ranks: int, folder: Path) -> dict[str, list[Case]]:
    """Trainings with the same bits."""
    schedule = make_schedule("zb-v", 2, MICROBATCHES)
    whole = written(with_steps(complete(schedule, gathers=True)), folder, "all")
    if num_ranks == 2:
        named = ["zb-v", whole, written(schedule, folder, "compute"), written(complete(schedule), folder, "messages")]
        again: tuple[dict[str, Any], ...] = ({}, {"activation_checkpointing": {"every": 1}})
        return {
            "a schedule from a file": [pipelined(PLAIN.at(0, steps=1), 2, name) for name in named],
            "blocks that are recomputed in halves": [pipelined(TIED, 2, "zb-v", **config) for config in again],
        }
    budgets: tuple[dict[str, int], ...] = ({}, {"stage3_max_live_parameters": 12_000})
    sharded = PLAIN.at(3, config=SOCKETS)
    return {
        "a schedule from a file": [pipelined(sharded.at(3, steps=1), 2, name) for name in ("zb-v", whole)],
        "gathers within a budget": [pipelined(sharded, 2, "interleaved", zero_optimization=zero) for zero in budgets],
    }


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_changes_no_bit(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    found = laws(num_ranks, tmp_path)
    outcomes = iter(ranks(num_ranks, train_all, [case for law in found.values() for case in law], timeout=120)[0])
    for name, law in found.items():
        first, *others = (next(outcomes) for _ in law)
        assert [first.differences(other) for other in others] == [[]] * len(others), name


BF16 = {"bf16": {"enabled": True}}
UNCLIPPED = PLAIN.at(0, clip=0.0)
ALONE: list[tuple[int, Case, tuple[str, ...]]] = [  # ranks without a pipeline; schedules with the bits of these
    (1, UNCLIPPED.at(0, accumulation=1), ("1f1b",)),
    (1, UNCLIPPED.at(0, config=BF16), ("interleaved", "zb-v")),
    (2, UNCLIPPED.at(2, config=BF16), ("zb-h1",)),
]


@pytest.mark.parametrize(("size", "case", "schedules"), ALONE)
def test_one_microbatch_and_bfloat16_have_the_bits_of_one_process(
    ranks: RankPool, size: int, case: Case, schedules: tuple[str, ...]
) -> None:
    """In bfloat16 each microbatch's gradients are rounded alone, and summed in float32, in the order of microbatches,
    which every schedule has: tests/pipe/test_schedule_passes.py.

    But for the norm, and what is clipped by it: blocks of 1024 elements, summed in float32, begin at other
    parameters where what lies beside the transformer blocks is divided over two stages.
    """
    (alone,) = ranks(size, train_all, [case])[0]
    for outcome in ranks(2 * size, train_all, [pipelined(case, 2, schedule) for schedule in schedules])[0]:
        assert set(alone.differences(outcome)) <= {"norms"}
        torch.testing.assert_close(outcome.norms, alone.norms, rtol=1e-6, atol=0)


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
BESIDE: list[tuple[int, Case, str, float]] = [  # ranks without a pipeline, ..., tolerance
    (1, PLAIN.at(2, config=FP16), "zb-v", 2e-2),
    (2, VECTORS.at(3, config=SOCKETS), "zb-h1", 1e-5),  # each look at a released weight computes it
]


@pytest.mark.parametrize(("size", "case", "schedule", "tolerance"), BESIDE)
def test_float16_and_computed_weights_that_are_released_train_as_without_a_pipeline(
    ranks: RankPool, size: int, case: Case, schedule: str, tolerance: float
) -> None:
    (alone,) = ranks(size, train_all, [case])[0]
    (outcome,) = ranks(2 * size, train_all, [pipelined(case, 2, schedule)])[0]
    assert outcome.losses == pytest.approx(alone.losses, rel=tolerance)
    assert outcome.norms == pytest.approx(alone.norms, rel=tolerance)
    assert outcome.scales == alone.scales
    if "fp16" in case.config:
        assert_close(outcome, alone, tolerance, tolerance)


# -- who has what -----------------------------------------------------------------------------------------------------


def places_and_values() -> dict[str, Any]:
    """Who this rank is, what it holds, and a class of torch's own as optimizer."""
    torch.manual_seed(0)
    case = pipelined(Case(deep_gpt, models.token_batch, accumulation=2), 2, "1f1b")
    engine = lowtide.initialize(deep_gpt, {**case.as_config(), "optimizer": None}, optimizer=torch.optim.RMSprop)
    batch = case.share(engine, 0)
    before = engine.eval_step(batch).item()
    for _ in range(3):
        engine.train_step(batch)
    found = {
        "place": (engine.rank, engine.data_rank, engine.data_size, engine.world_size),
        "names": [name for name, _ in engine.module.named_parameters()],
        "losses": (before, engine.eval_step(batch).item()),
        "parameter_bytes": engine.memory().parameter_bytes,
    }
    with engine.gathered():
        found["sums"] = {name: param.sum().item() for name, param in engine.module.named_parameters()}
    engine.close()
    return found


def test_ranks_know_their_places_and_hold_their_own(ranks: RankPool) -> None:
    found = ranks(4, places_and_values)
    assert [one["place"] for one in found] == [(0, 0, 2, 4), (1, 1, 2, 4), (2, 0, 2, 4), (3, 1, 2, 4)]
    first, last = found[0]["names"], found[2]["names"]
    assert "embedding.weight" in first and "head.weight" in last and not {*first} & {*last}
    assert sorted(first + last) == sorted(name for name, _ in deep_gpt().named_parameters())
    assert len({one["losses"] for one in found}) == 1 and found[0]["losses"][1] < found[0]["losses"][0]
    whole = sum(param.numel() for param in deep_gpt().parameters()) * 4
    assert all(one["parameter_bytes"] < 0.75 * whole for one in found)
    assert found[0]["sums"] == found[1]["sums"] and found[2]["sums"] == found[3]["sums"]


@on_ranks(2)
def test_blocks_are_divided_by_time() -> None:
    config = pipelined(Case(deep_gpt, models.token_batch), 2, "1f1b", pipeline={"balance": "time"}).as_config()
    with lowtide.initialize(deep_gpt(), config, sample_batch=models.token_batch(0, 2)) as engine:
        engine.train_step(models.token_batch(0, 2))
        names = {name for name, _ in engine.module.named_parameters()}
        assert ("embedding.weight" in names, "head.weight" in names) == (engine.rank == 0, engine.rank == 1)
