"""A job that goes on with other ranks than it began with keeps its global batch, or says why it cannot."""

from itertools import product
from typing import Any

import pytest

from lowtide.engine.config.batch import first_world_size
from lowtide.engine.config.config import Config, ConfigError
from tests.kit.training import refusal

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
IN_BACKWARD = {"zero_optimization": {"update_in_backward": True}}
TWO_STAGES = {"parallel": {"pipeline": 2}}
AT_LEAST_FOUR = {**TWO_STAGES, "pipeline": {"schedule": "dualpipe-v"}}


def kept(values: dict[str, Any], first: int, now: int) -> tuple[int | None, int | None, int | None]:
    config = Config.load(values).resolve(now, first)
    return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


def faults(values: dict[str, Any], first: int, now: int) -> str:
    return refusal(lambda: Config.load(values).resolve(now, first), kind=ConfigError)


# -- what is chosen -------------------------------------------------------------------------------------------------


def test_accumulation_makes_up_for_ranks_and_a_microbatch_that_does_not_divide_becomes_the_next_smaller_one() -> None:
    """The equation holds, and no more memory is needed."""
    for micro, accumulation, first, now in product((1, 2, 3, 5, 12), (1, 2, 7), (1, 2, 3, 8), range(1, 10)):
        global_batch, values = micro * accumulation * first, {MICRO: micro, ACCUMULATION: accumulation}
        if global_batch % now:
            assert f"x data-parallel ranks({now}) hold" in faults(values, first, now)
            continue
        largest = max(size for size in range(1, micro + 1) if global_batch // now % size == 0)
        assert kept(values, first, now) == (global_batch, largest, global_batch // now // largest)


@pytest.mark.parametrize(
    ("values", "first", "now", "filled"),
    [
        ({MICRO: 4}, 3, 2, (12, 3, 2)),
        ({TRAIN: 24, MICRO: 2, ACCUMULATION: 3}, 4, 3, (24, 2, 4)),  # all three, for the first ranks
        ({TRAIN: 24, ACCUMULATION: 3}, 4, 2, (24, 2, 6)),
        ({TRAIN: 24}, 4, 2, (24, 6, 2)),  # without a microbatch in the config that of the first ranks stays
        ({TRAIN: 16, **IN_BACKWARD}, 4, 2, (16, 8, 1)),  # a larger one is the last resort, where the config has none
        ({MICRO: 4, ACCUMULATION: 2, **TWO_STAGES}, 4, 2, (16, 4, 4)),  # ranks of one pipeline count once
        ({MICRO: 4, ACCUMULATION: 2, **TWO_STAGES}, 4, 8, (16, 4, 1)),
        ({MICRO: 4, ACCUMULATION: 4, **AT_LEAST_FOUR}, 4, 8, (32, 2, 4)),  # as many as the schedule needs
        ({MICRO: 4, "pipeline": {"microbatches": 2}}, 2, 1, (16, 4, 4)),
    ],
)
def test_what_the_config_says_stays(values: dict[str, Any], first: int, now: int, filled: tuple[int, int, int]) -> None:
    assert kept(values, first, now) == filled


def test_both_names_of_the_number_of_microbatches_say_the_same() -> None:
    config = Config.load({MICRO: 4, "pipeline": {"microbatches": 2}}).resolve(1, 2)
    assert config.pipeline.microbatches == 4
    assert Config.load(config.as_dict()).gradient_accumulation_steps == 4


def test_a_batch_that_the_config_does_not_say_is_left_to_the_script() -> None:
    for values in ({}, {ACCUMULATION: 2}):
        config = Config.load(values).resolve(3, 4)
        assert config.gradient_accumulation_steps == values.get(ACCUMULATION, 1)
        assert config.notes == (
            "train_batch_size: the job began on 4 ranks and continues on 3; neither it nor "
            "train_micro_batch_size_per_gpu is given, so the script decides the global batch",
        )


def test_a_note_says_both_triples_and_nothing_is_said_without_a_change() -> None:
    values = {MICRO: 4, ACCUMULATION: 2, **TWO_STAGES}
    assert Config.load(values).resolve(2, 4).notes == (
        "train_batch_size: stays 16 on 2 ranks, as the job began on 4: microbatch x accumulation x data-parallel ranks "
        "is now 4 x 4 x 1, was 4 x 2 x 2",
    )
    assert Config.load(values).resolve(4, 4).notes == ()


# -- where nothing fits ---------------------------------------------------------------------------------------------


SHARDED: dict[str, Any] = {MICRO: 2, "zero_optimization": {"stage": 3, "shard_size": 3}}
REPLICAS = "zero_optimization.shard_size: shard_size(3) x replicas(?) = data-parallel ranks(2) does not hold"
UPDATES = "zero_optimization.update_in_backward: needs gradient_accumulation_steps 1 (found 2"
STARVED = "pipeline.schedule: schedule dualpipe-v needs 2 microbatches for each rank, at least 4 on 2 ranks, found 2"
REFUSED = [  # the nearest numbers of ranks that are allowed, and what else forbids these
    ({MICRO: 3}, 4, 5, "4 or 6", ""),
    ({MICRO: 1}, 3, 4, "3", ""),
    ({MICRO: 1}, 5, 2, "1 or 5", ""),
    ({MICRO: 1, ACCUMULATION: 4, **AT_LEAST_FOUR}, 4, 8, "4", STARVED),
    ({MICRO: 4, **IN_BACKWARD}, 4, 2, "4", UPDATES),
    ({MICRO: 2, **TWO_STAGES}, 4, 3, "2 or 4", "parallel.pipeline: pipeline(2) x data(?) = world size (3)"),
    (SHARDED, 6, 2, "3", REPLICAS),
]


@pytest.mark.parametrize(("values", "first", "now", "nearest", "reason"), REFUSED)
def test_ranks_that_do_not_divide_the_batch_are_an_error_with_the_nearest_that_do(
    values: dict[str, Any], first: int, now: int, nearest: str, reason: str
) -> None:
    text = faults(values, first, now)
    assert text.startswith("2 faults:" if reason else "1 fault:") and reason in text
    assert f"It cannot continue on {now} ranks; the nearest legal numbers of ranks are {nearest}. Use one of " in text


def test_the_error_shows_both_equations() -> None:
    assert faults({MICRO: 4}, 2, 3) == (
        "1 fault:\n  train_batch_size: the job began on 2 ranks, and its global batch stays: train_batch_size(8) = "
        "4 x 1 x 2; no whole numbers make train_batch_size(8) = train_micro_batch_size_per_gpu(?) x "
        "gradient_accumulation_steps(?) x data-parallel ranks(3) hold. It cannot continue on 3 ranks; the nearest "
        "legal numbers of ranks are 2 or 4. Use one of these with train_batch_size 8 in the config, or "
        "set a train_batch_size that more numbers of ranks divide"
    )
    text = faults({TRAIN: 8, MICRO: 4}, 3, 2)  # impossible at first
    assert "train_micro_batch_size_per_gpu(4) x gradient_accumulation_steps(?) x data-parallel ranks(3) hold" in text


# -- from the launcher to the engine --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"WORLD_SIZE": "2"}, None),
        ({"WORLD_SIZE": "2", "LOWTIDE_FIRST_WORLD_SIZE": "4"}, 4),
        ({"LOWTIDE_FIRST_WORLD_SIZE": "4"}, None),  # a process that a rank has started for itself
        ({"WORLD_SIZE": "8", "LOWTIDE_FIRST_WORLD_SIZE": "4"}, None),
    ],
)
def test_the_first_ranks_are_those_of_this_job_only(environ: dict[str, str], found: int | None) -> None:
    assert first_world_size(environ, 2) == found


@pytest.mark.parametrize("text", ["", "0", "-2", "two", "²"])
def test_a_variable_without_a_number_of_ranks_is_an_error(text: str) -> None:
    assert refusal(first_world_size, {"WORLD_SIZE": "2", "LOWTIDE_FIRST_WORLD_SIZE": text}, 2) == (
        "LOWTIDE_FIRST_WORLD_SIZE: expected the number of ranks of the first attempt, at least 1, found "
        f'"{text}"; unset it: `lowtide launch` sets it for every rank'
    )
