"""Updating each unit as its gradient comes, and taking it back where the norm asks, gives the plain step's numbers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.engine.step.step_sums import NonFiniteGradientError
from tests.engine.test_optimizer_offload import assert_pairs_agree
from tests.kit.models import FEATURES, Explodes, mlp, tiny_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, Case, Outcome, share_of, train_all

PLACES = ("cpu", "nvme")


def speculative(case: Case, place: str, folder: Path, **changes: Any) -> Case:
    section = {"device": place, "overlap": "speculative", **({"nvme_path": str(folder)} if place == "nvme" else {})}
    zero = {**case.config.get("zero_optimization", {}), "offload_optimizer": {**section, **changes}}
    return case.at(case.stage, config={"zero_optimization": zero})


def run_pairs(ranks: RankPool, case: Case, folder: Path, stages: tuple[int, ...], place: str) -> list[Outcome]:
    cases = [one for stage in stages for one in (case.at(stage), speculative(case.at(stage), place, folder))]
    outcomes: list[Outcome] = ranks(2, train_all, cases)[0]
    for outcome in outcomes:  # NaN, the norm of a skipped step, is not equal to itself
        outcome.norms = [-1.0 if math.isnan(norm) else norm for norm in outcome.norms]
    assert_pairs_agree(outcomes, (stages, place))
    return outcomes


# The norm of tiny_gpt lies between 1 and 4 in these steps: never above 100, always above 0.1, and now and then above 2.
@pytest.mark.parametrize(
    ("clip", "place", "precision", "stages"),
    [
        *((0.0, "cpu", "bf16", (1,)), (100.0, "nvme", "fp32", (3,))),
        *((0.1, "nvme", "bf16", (1,)), ("between", "nvme", "fp32", (3,)), ("between", "cpu", "bf16", (0,))),
    ],
)
def test_it_is_bitwise_the_plain_step(
    ranks: RankPool, tmp_path: Path, place: str, clip: float | str, precision: str, stages: tuple[int, ...]
) -> None:
    case = Case(tiny_gpt, token_batch, accumulation=2, steps=4, config={"bf16": {"enabled": precision == "bf16"}})
    if clip == "between":
        norms = sorted(ranks(2, train_all, [case.at(1)])[0][0].norms)
        clip = (norms[1] + norms[2]) / 2
    case = case.at(case.stage, clip=clip)
    outcomes = run_pairs(ranks, case, tmp_path, stages, place)
    if isinstance(clip, float) and 0.1 < clip < 100:
        assert 0 < sum(norm > clip for norm in outcomes[0].norms) < 4


def test_parameters_may_rest_in_a_file_too(ranks: RankPool, tmp_path: Path) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"zero_optimization": {"offload_param": place}, "communication": {"transport": "auto"}}
    case = Case(tiny_gpt, token_batch, stage=3, clip=0.1, steps=4)
    plain = case.at(3, config={"communication": {"transport": "sockets"}})
    moved = speculative(case.at(3, config=config), "nvme", tmp_path)
    assert_pairs_agree(ranks(2, train_all, [plain, moved])[0], "rest")


def loads_of_a_step(config: dict[str, Any]) -> list[str]:
    """Which shards a step loads, after the first."""
    torch.manual_seed(0)
    engine = lowtide.initialize(tiny_gpt(), config)
    found: list[str] = []
    engine.train_step(share_of(token_batch(0, 4)))
    shard_store = engine.optimizer._placements.shard_store
    assert shard_store is not None
    load = shard_store._store.load

    def noted(key: str, out: Tensor) -> Any:
        found.append(key)
        return load(key, out)

    shard_store._store.load = noted  # type: ignore[method-assign]  # to see its calls
    engine.train_step(share_of(token_batch(1, 4)))
    engine.close()
    return found


def test_an_update_in_the_backward_takes_the_shard_that_is_there(ranks: RankPool, tmp_path: Path) -> None:
    """Each block's is loaded for the forward and for the backward, the last one's once, and none for its update."""
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"offload_param": place, "offload_optimizer": {**place, "overlap": "speculative"}}
    config = Case(tiny_gpt, token_batch, stage=3, config={"zero_optimization": zero}).as_config()
    for loads in ranks(2, loads_of_a_step, config):
        assert [sum(f"blocks.{index} " in name for name in loads) for index in range(3)] == [2, 2, 1], loads


@pytest.mark.parametrize("place", PLACES)
def test_a_float16_overflow_leaves_everything_as_it_was(ranks: RankPool, tmp_path: Path, place: str) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}
    case = Case(mlp, vector_batch, steps=8, config={"fp16": fp16})
    outcomes = run_pairs(ranks, case, tmp_path, (1, 3), place)
    assert 0 < sum(outcomes[1].skipped) < 8


def values_after_a_bad_step(place: dict[str, Any]) -> bool:
    """Whether a step with a bad gradient has changed nothing, and the next one is that of an engine without it."""
    states = []
    for has_bad_step in (False, True):
        torch.manual_seed(0)
        model = Explodes()
        config = {
            "steps_per_print": 0,
            "optimizer": ADAMW,
            "zero_optimization": {"stage": 1, "offload_optimizer": place},
        }
        engine = lowtide.initialize(model, config)
        x = share_of((torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(1)),))
        engine.train_step(x)
        if has_bad_step:
            model.factor = 2.0
            with pytest.raises(NonFiniteGradientError, match="No parameter was updated"):
                engine.train_step(x)
            model.factor = 0.0
        engine.train_step(x)
        states.append(engine.state_dict())
        engine.close()
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("place", PLACES)
def test_a_bad_gradient_leaves_everything_as_it_was(ranks: RankPool, tmp_path: Path, place: str) -> None:
    section = {"device": place, "overlap": "speculative", **({"nvme_path": str(tmp_path)} if place == "nvme" else {})}
    assert all(ranks(2, values_after_a_bad_step, section))
