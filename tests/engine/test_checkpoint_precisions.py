"""Half precision, loss scales, accumulation, hybrid sharding: the master weights are saved, and all goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.saving import Continuation, Trip, engine_for, load_trips, run_steps, save_trips
from tests.kit.models import mlp, short_gpt, short_gpt_float64, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case
from tests.zero.test_special_parameters import TwoDtypes

BF16 = {"bf16": {"enabled": True}}
# The first steps overflow, and a scale lasts for two steps: nothing about it is as it was at the start.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}}
STATIC = {"fp16": {"enabled": True, "loss_scale": 128}}
HYBRID = {"zero_optimization": {"shard_size": 2}}
GPT = Case(short_gpt, token_batch, 3, clip=0.5)


def bf16(stage: int) -> Case:
    return GPT.at(stage, config=BF16)


def fp16(stage: int) -> Case:
    return GPT.at(stage, config=FP16)


SAME_NUMBERS = [
    Trip(bf16(3), bf16(0)),
    Trip(bf16(1), bf16(2)),
    Trip(fp16(3), fp16(1), steps_before=8),
    Trip(fp16(0), fp16(3), steps_before=1),
    Trip(GPT.at(2, accumulation=2), GPT.at(3, accumulation=2)),
    Trip(Case(short_gpt_float64, token_batch, 2), Case(short_gpt_float64, token_batch, 3)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def before(ranks: RankPool, folder: Path) -> list[Continuation]:
    """What went on without a break on two ranks."""
    return ranks(2, save_trips, SAME_NUMBERS, folder, 2)[0]


def test_each_goes_on_to_the_same_bits(ranks: RankPool, folder: Path, before: list[Continuation]) -> None:
    after = ranks(2, load_trips, SAME_NUMBERS, folder, 2)[0]
    for trip, one, other in zip(SAME_NUMBERS, before, after, strict=True):
        assert other.differences(one) == [], trip
    assert before[2].scales[0] < 2.0**24 and len(set(before[2].scales)) > 1  # it had come down, and still moves
    masters = {value.dtype for name, value in before[0].restored.items()}
    assert masters == {torch.float32}
    assert {value.dtype for value in before[-1].restored.values()} == {torch.float64}


def test_each_goes_on_alone(ranks: RankPool, folder: Path, before: list[Continuation]) -> None:
    after = ranks(1, load_trips, SAME_NUMBERS, folder, 1)[0]
    for trip, one, other in zip(SAME_NUMBERS, before, after, strict=True):
        assert other.state_differences(one) == [], trip
        assert other.losses == pytest.approx(one.losses, rel=1e-2), trip
        assert other.scales == one.scales


def test_replicas_of_shards_write_one_checkpoint_and_read_any(ranks: RankPool, tmp_path: Path) -> None:
    hybrid, plain = GPT.at(3, config=HYBRID), GPT.at(2)
    mixed = GPT.at(1, config={**HYBRID, **BF16})
    trips = [Trip(hybrid, plain), Trip(plain, hybrid), Trip(mixed, GPT.at(3, config=BF16))]
    before = ranks(4, save_trips, trips, tmp_path, 4)[0]
    assert len(list((tmp_path / "trip0").glob("*.distcp"))) == 4
    for world_size, loaded in ((4, trips[:2]), (2, trips)):
        after = ranks(world_size, load_trips, loaded, tmp_path, world_size)[0]
        for trip, one, other in zip(loaded, before, after, strict=False):
            assert other.state_differences(one) == [], trip
            assert other.losses == pytest.approx(one.losses, rel=1e-2 if "bf16" in trip.saved.config else 1e-5), trip


def values_of(outcome: Continuation) -> dict[str, Any]:
    return {name: value.tolist() for name, value in outcome.restored.items()}


def test_float32_and_bf16_continue_each_other(ranks: RankPool, tmp_path: Path) -> None:
    """The master weights and states are float32 in both."""
    trips = [Trip(GPT, bf16(2)), Trip(bf16(3), GPT.at(1))]
    before = ranks(2, save_trips, trips, tmp_path, 2)[0]
    after = ranks(2, load_trips, trips, tmp_path, 2)[0]
    for one, other in zip(before, after, strict=True):
        assert other.state_differences(one) == []
        assert other.losses == pytest.approx(one.losses, rel=1e-2) and other.losses != one.losses


def test_float64_and_float32_continue_each_other(tmp_path: Path) -> None:
    wide, narrow = Case(short_gpt_float64, token_batch), Case(short_gpt, token_batch)
    trips = [Trip(wide, narrow), Trip(narrow, wide)]
    before, after = save_trips(trips, tmp_path, 1), load_trips(trips, tmp_path, 1)
    for one, other in zip(before, after, strict=True):
        assert other.losses == pytest.approx(one.losses, rel=1e-5)
        for name, value in one.restored.items():
            assert torch.equal(other.restored[name].float(), value.float()), name


def test_parameters_of_two_dtypes_keep_theirs_in_their_states(ranks: RankPool, tmp_path: Path) -> None:
    trips = [
        Trip(Case(TwoDtypes, float64_batch, 3), Case(TwoDtypes, float64_batch, 0)),
        Trip(own_optimizer(TwoDtypes, 2), own_optimizer(TwoDtypes, 3), {"optimizer": torch.optim.RMSprop}),
    ]
    before = ranks(2, save_trips, trips, tmp_path, 2)[0]
    after = ranks(2, load_trips, trips, tmp_path, 2)[0]
    for one, other in zip(before, after, strict=True):
        assert other.differences(one) == []
        dtypes = {name: value.dtype for name, value in one.restored.items()}
        states = {name for name in dtypes if name.startswith("state.layers.0.weight.")}
        assert states and {dtypes[name] for name in states} == {torch.float64}
        states = {name for name in dtypes if name.startswith("state.layers.0.bias.")}
        assert states and {dtypes[name] for name in states} == {torch.float32}


def float64_batch(step: int, rows: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.double() for tensor in vector_batch(step, rows))


def own_optimizer(kind: Any, stage: int) -> Case:
    return Case(kind, float64_batch, stage, config={"optimizer": None})


@pytest.mark.parametrize("saved", [{}, BF16, STATIC], ids=["fp32", "bf16", "static"])
def test_a_dynamic_loss_scale_begins_at_the_configs_where_none_was_saved(tmp_path: Path, saved: dict[str, Any]) -> None:
    first = Case(mlp, vector_batch, config=saved)
    save_trips([Trip(first, first)], tmp_path, 1)
    engine = engine_for(first.at(0, config={"bf16": None, "fp16": {"enabled": True, "initial_scale_power": 9}}), 1)
    engine.load_checkpoint(tmp_path)
    assert run_steps(engine, first, 2, 1).scales == [512.0]
    engine.close()


def test_a_static_loss_scale_is_the_configs(tmp_path: Path) -> None:
    first = Case(mlp, vector_batch, config=FP16)
    save_trips([Trip(first, first)], tmp_path, 1)
    engine = engine_for(first.at(0, config=STATIC), 1)
    engine.load_checkpoint(tmp_path)
    assert run_steps(engine, first, 2, 1).scales == [128.0]
    engine.close()
