"""Updates that begin before it is known whether they count have the bits of the plain step."""

import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lowtide.engine.step import step_update
from lowtide.engine.step.step_sums import Clipping, NonFiniteGradientError, SummedStep
from lowtide.kernels.exact_sum import NUM_LIMBS, to_limbs
from tests.kit import models
from tests.kit.models import FEATURES, Explodes, mlp, tiny_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, differences, rank_and_world, refusal, start, take_step, train_all
from tests.zero.test_float16 import overflowing_batch

PLACES = ("cpu", "nvme")


def speculative(case: Case, place: str, folder: Path, **changes: Any) -> Case:
    section = {"device": place, "overlap": "speculative", **({"nvme_path": str(folder)} if place == "nvme" else {})}
    zero = {**case.config.get("zero_optimization", {}), "offload_optimizer": {**section, **changes}}
    return case.at(case.stage, config={"zero_optimization": zero})


def run_pairs(ranks: RankPool, pairs: list[tuple[Case, Case]]) -> list[Outcome]:
    """The outcomes of the second ones, which are those of the first to the last bit."""
    outcomes: list[Outcome] = ranks(2, train_all, [case for pair in pairs for case in pair])[0]
    for outcome in outcomes:  # NaN, the norm of a skipped step, is not equal to itself
        outcome.norms = [-1.0 if math.isnan(norm) else norm for norm in outcome.norms]
    for pair, plain, found in zip(pairs, outcomes[::2], outcomes[1::2], strict=True):
        assert found.differences(plain) == [], pair
    return outcomes[1::2]


def test_it_is_bitwise_the_plain_step(ranks: RankPool, tmp_path: Path) -> None:
    """Where some of the steps are clipped; all or none are in tests/laws."""
    case = Case(tiny_gpt, token_batch, accumulation=2, steps=4)
    norms = sorted(ranks(2, train_all, [case.at(1)])[0][0].norms)
    between = (norms[1] + norms[2]) / 2
    plain = [case.at(3, clip=between), case.at(0, clip=between, config={"bf16": {"enabled": True}})]
    pairs = [(one, speculative(one, place, tmp_path)) for one, place in zip(plain, PLACES, strict=True)]
    for outcome in run_pairs(ranks, pairs):
        assert 0 < sum(norm > between for norm in outcome.norms) < 4


def loads_of_a_step(case: Case) -> list[str]:
    """Which shards a step loads, after the first."""
    found: list[str] = []
    with start(case) as engine:
        take_step(engine, case, 0)
        shard_store = engine.optimizer._placements.shard_store
        assert shard_store is not None
        load = shard_store._store.load

        def noted(key: str, out: Tensor) -> Any:
            found.append(key)
            return load(key, out)

        shard_store._store.load = noted  # type: ignore[method-assign]  # to see its calls
        take_step(engine, case, 1)
    return found


def test_an_update_in_the_backward_takes_the_shard_that_is_there(ranks: RankPool, tmp_path: Path) -> None:
    """Each block's is loaded for the forward and for the backward, the last one's once, and none for its update."""
    zero = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    case = Case(tiny_gpt, token_batch, stage=3, config={"zero_optimization": zero})
    for loads in ranks(2, loads_of_a_step, speculative(case, "nvme", tmp_path)):
        assert [sum(f"blocks.{index} " in name for name in loads) for index in range(3)] == [2, 2, 1], loads


@pytest.mark.parametrize("place", PLACES)
def test_a_float16_overflow_leaves_everything_as_it_was(ranks: RankPool, tmp_path: Path, place: str) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}
    case = Case(mlp, vector_batch, steps=8, config={"fp16": fp16})
    outcomes = run_pairs(ranks, [(case.at(stage), speculative(case.at(stage), place, tmp_path)) for stage in (1, 3)])
    assert 0 < sum(outcomes[0].skipped) < 8


def rows_of(step: int, rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(step)),)


def values_after_a_bad_step(cases: list[Case]) -> list[list[str]]:
    """What a step with a bad gradient has changed: in an evaluation, and after the step that follows."""
    found = []
    for case in cases:
        states, evaluated = [], []
        for has_bad_step in (False, True):
            with start(case) as engine:
                model: Any = engine.module
                take_step(engine, case, 0)
                evaluated.append(engine.eval_step(case.share(engine, 1)))
                if has_bad_step:
                    model.factor = 2.0
                    with pytest.raises(NonFiniteGradientError, match="No parameter was updated"):
                        take_step(engine, case, 0)
                    model.factor = 0.0
                    evaluated.append(engine.eval_step(case.share(engine, 1)))
                take_step(engine, case, 1)
                states.append(engine.state_dict())
        found.append(differences(*states) + ([] if evaluated.count(evaluated[0]) == 3 else ["evaluation"]))
    return found


def test_a_bad_gradient_leaves_everything_as_it_was(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(Explodes, rows_of)
    cases = [speculative(case.at(1), place, tmp_path) for place in PLACES]
    cases += [speculative(case.at(s, config={"bf16": {"enabled": True}}), "nvme", tmp_path) for s in (1, 3)]
    assert ranks(2, values_after_a_bad_step, cases) == [[[]] * len(cases)] * 2


def losses_around_a_load(case: Case, folder: Path) -> list[float]:
    """Losses of steps after loads in the middle of a step, where no save is possible, and where weights are full."""
    with start(case) as engine:
        batch = case.share(engine, 0)
        engine.train_step(batch)
        engine.save_checkpoint(folder)
        losses = []
        for _ in range(2):
            engine.backward(engine(*batch))
            words = "save_checkpoint: expected a call between steps, found 1 of 1 microbatches"
            assert words in refusal(engine.save_checkpoint, folder)
            engine.load_checkpoint(folder)
            losses.append(engine.train_step(batch).loss.item())
            engine(*batch)  # the rest and the last block stay full for a backward that never comes
            engine.load_checkpoint(folder)
            losses.append(engine.eval_step(batch).item())
    return losses


@pytest.mark.parametrize("overlap", ["none", "speculative"])
def test_a_load_in_the_middle_of_a_step_is_whole(ranks: RankPool, tmp_path: Path, overlap: str) -> None:
    case = Case(mlp, vector_batch, stage=3, config={"communication": {"transport": "sockets"}})
    for losses in ranks(2, losses_around_a_load, speculative(case, "nvme", tmp_path, overlap=overlap), tmp_path / "at"):
        assert losses[::2] == [losses[0]] * 2 and losses[1::2] == [losses[1]] * 2


WAITED_FOR = patch.object(step_update, "_is_waited_for", lambda device: True)  # the CPU is taken for such a device


class LacksGradients(models.Mlp):
    """A layer is not used on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(7, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        rank, world_size = rank_and_world()
        return nn.functional.mse_loss(self.last(self.layers(self.own(x) if rank < world_size - 1 else x)), y)


class LacksMore(LacksGradients):
    """Another layer is used on none."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(7, 7)


def overflowing(build: Any, stage: int, transport: str = "auto") -> Case:
    config = {"fp16": {"enabled": True, "initial_scale_power": 3}, "communication": {"transport": transport}}
    return Case(build, overflowing_batch, stage, clip=0.3 if build is not models.mlp else 0.0, config=config)


GPT = Case(partial(models.TinyGPT, layers=2), models.token_batch)
CASES = [
    GPT.at(0, clip=0.3),
    GPT.at(3, clip=0.3, config={"bf16": {"enabled": True}}),
    GPT.at(2, accumulation=2),
    GPT.at(3, config={"zero_optimization": {"update_in_backward": True}}),
    overflowing(models.mlp, 1),
    overflowing(models.mlp, 3),
    overflowing(LacksGradients, 1, "shared_memory"),
    overflowing(LacksGradients, 2, "sockets"),
    overflowing(LacksMore, 2, "sockets"),
]


def train_both_ways() -> list[tuple[Outcome, Outcome]]:
    plain = train_all(CASES)
    with WAITED_FOR:
        return list(zip(plain, train_all(CASES), strict=True))


def test_it_gives_the_same_bits(ranks: RankPool) -> None:
    for case, (plain, started) in zip(CASES, ranks(2, train_both_ways)[0], strict=True):
        told, expected = (str((one.losses, one.norms, one.scales, one.skipped)) for one in (started, plain))  # with NaN
        assert told == expected, case
        assert any(plain.skipped) == ("fp16" in case.config)
        assert differences(plain.state, started.state) == [], case


class OfRank0(nn.Module):
    """The second layer gets a gradient on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return (self.sometimes(x) if rank_and_world()[0] == 0 else x).square().mean()


def overflow_where_one_rank_waits(stage: int) -> tuple[list[bool], int, Tensor]:
    config = {
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "communication": {"transport": "native", "timeout_seconds": 20},  # as of a device
    }
    with WAITED_FOR, start(Case(OfRank0, models.vector_batch, stage, clip=0.1, config=config)) as engine:
        batches = [torch.full((2, 4), value) for value in (1.0, 60000.0, 1.0)]
        skipped = [engine.train_step((batch,)).skipped for batch in batches]
        return skipped, engine.optimizer.num_steps, engine.full("sometimes.weight")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_rank_that_has_to_wait_goes_with_one_that_does_not(ranks: RankPool, stage: int) -> None:
    (skipped, num_steps, value), other = ranks(2, overflow_where_one_rank_waits, stage)
    assert (skipped, num_steps) == ([False, True, False], 2) == other[:2]
    assert torch.equal(value, other[2])


@pytest.mark.parametrize("norm", [0.0, 0.25, 0.2999999, 0.5, 2.0**100])
@pytest.mark.parametrize("clipping", [Clipping(0.3), Clipping(0.3, is_by_hand=True), Clipping(fixed=0.5), Clipping()])
def test_a_factor_is_the_same_where_its_norm_is(clipping: Clipping, norm: float) -> None:
    total = torch.zeros(2 * NUM_LIMBS + 5, dtype=torch.int64)
    total[:NUM_LIMBS] = to_limbs(torch.tensor([norm**2], dtype=torch.float64))
    factor, skip = SummedStep(total, 0, None, 1, 0).factor_and_skip(clipping, 0.5)
    assert factor.item() == pytest.approx(clipping.factor(norm / 2) / 2, rel=1e-15) and skip.item() == 0
