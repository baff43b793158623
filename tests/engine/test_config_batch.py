"""resolve(world_size) fills the batch triple, or shows the equation that does not hold."""

from typing import Any

import pytest

from lowtide.engine.config.config import Config, ConfigError

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def triple(values: dict[str, Any], world_size: int) -> tuple[int | None, int | None, int | None]:
    config = Config.load(values).resolve(world_size)
    return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("values", "filled"),
    [
        ({}, (4, 1, 1)),
        ({TRAIN: 24, MICRO: 2, ACCUMULATION: 3}, (24, 2, 3)),
        ({TRAIN: 24, MICRO: 2}, (24, 2, 3)),
        ({TRAIN: 24, ACCUMULATION: 3}, (24, 2, 3)),
        ({MICRO: 2, ACCUMULATION: 3}, (24, 2, 3)),
        ({TRAIN: 24}, (24, 6, 1)),
        ({MICRO: 2}, (8, 2, 1)),
        ({ACCUMULATION: 3}, (12, 1, 3)),
        ({TRAIN: "auto", MICRO: 2, ACCUMULATION: "auto"}, (8, 2, 1)),
    ],
)
def test_what_is_not_given_is_inferred(values: dict[str, Any], filled: tuple[int, int, int]) -> None:
    assert triple(values, 4) == filled


def test_every_triple_that_resolves_holds_the_equation() -> None:
    choices = [None, 1, 2, 3, 12]
    for train in [None, 7, 12, 24]:
        for micro in choices:
            for accumulation in choices:
                given = {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation}
                values = {key: value for key, value in given.items() if value is not None}
                for world_size in (1, 3, 4):
                    try:
                        t, m, a = triple(values, world_size)
                    except ConfigError:
                        continue
                    assert t is not None and m is not None and a is not None and t == m * a * world_size
                    assert values.items() <= {TRAIN: t, MICRO: m, ACCUMULATION: a}.items()


@pytest.mark.parametrize(
    ("values", "world_size", "expected"),
    [
        (
            {TRAIN: 10, MICRO: 2, ACCUMULATION: 1},
            4,
            "train_batch_size: train_batch_size(10) = train_micro_batch_size_per_gpu(2) "
            "x gradient_accumulation_steps(1) x data-parallel ranks(4) does not hold: "
            "the product is 8; the nearest legal values are train_batch_size 8",
        ),
        (
            {TRAIN: 16, MICRO: 2, ACCUMULATION: 1},
            4,
            "the product is 8; the nearest legal values are train_batch_size 8, or train_micro_batch_size_per_gpu 4, "
            "or gradient_accumulation_steps 2",
        ),
        (
            {TRAIN: 10, MICRO: 2},
            4,
            "train_batch_size: no whole gradient_accumulation_steps makes train_batch_size(10) = "
            "train_micro_batch_size_per_gpu(2) x gradient_accumulation_steps(?) x data-parallel ranks(4) hold; "
            "set train_batch_size to a multiple of 8: 8 or 16",
        ),
        (
            {TRAIN: 3, ACCUMULATION: 1},
            4,
            "no whole train_micro_batch_size_per_gpu makes train_batch_size(3) = train_micro_batch_size_per_gpu(?) x "
            "gradient_accumulation_steps(1) x data-parallel ranks(4) hold; set train_batch_size to a multiple of 4: 4",
        ),
    ],
)
def test_an_impossible_triple_shows_the_equation_and_legal_values(
    values: dict[str, Any], world_size: int, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(values).resolve(world_size)
    assert expected in str(caught.value)


def test_a_resolved_auto_has_a_note_with_its_reason() -> None:
    config = Config.load({TRAIN: "auto", MICRO: 2, "gradient_clipping": 1.0}).resolve(4)
    reason = "train_batch_size = microbatch x accumulation x ranks = 2 x 1 x 4 ranks"
    assert config.notes == (f'train_batch_size: "auto" is 8: {reason}',)
    assert config.resolve(4).notes == config.notes


def test_resolve_keeps_the_original() -> None:
    config = Config.load({MICRO: 2})
    assert config.resolve(4).train_batch_size == 8 and config.train_batch_size is None


def test_the_shard_size_must_divide_the_world_size() -> None:
    config = Config.load({"zero_optimization": {"stage": 3, "shard_size": 4}, TRAIN: 7, MICRO: 2})
    with pytest.raises(ConfigError) as caught:
        config.resolve(6)
    assert [fault.path for fault in caught.value.faults] == [TRAIN, "zero_optimization.shard_size"]
    equation = "shard_size(4) x replicas(?) = data-parallel ranks(6) does not hold"
    assert f"{equation}; the nearest legal values are 3 or 6" in str(caught.value)


def test_the_partition_of_hpz_must_divide_the_shard_group() -> None:
    for zero, data_size, legal in (({}, 6, "3 or 6"), ({"shard_size": 6}, 12, "3 or 6"), ({"shard_size": 2}, 4, "2")):
        config = Config.load({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4, **zero}, MICRO: 2})
        with pytest.raises(ConfigError) as caught:
            config.resolve(data_size)
        assert [fault.path for fault in caught.value.faults] == ["zero_optimization.zero_hpz_partition_size"]
        group = zero.get("shard_size", data_size)
        equation = f"zero_hpz_partition_size(4) x groups(?) = ranks of a shard group({group}) does not hold"
        assert f"{equation}; the nearest legal values are {legal}" in str(caught.value)
    Config.load({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 4}, MICRO: 2}).resolve(6)


def test_an_inferred_accumulation_is_checked_for_update_in_backward() -> None:
    config = Config.load({"zero_optimization": {"update_in_backward": True}, TRAIN: 16, MICRO: 2})
    with pytest.raises(ConfigError, match=r"needs gradient_accumulation_steps 1 \(found 2"):
        config.resolve(4)


def test_a_world_without_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="world_size: expected at least 1, found 0"):
        Config.load({}).resolve(0)
