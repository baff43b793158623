"""`resolve` fills the batch triple, or says why not; it stays, whatever ranks a job goes on with.

DeepSpeed's section `elasticity` chooses it. The table has the errors of a job that begins.
"""

from itertools import product
from typing import Any

import pytest

from lowtide.engine.config.batch import first_world_size, legal_sizes
from lowtide.engine.config.config import Config, ConfigError
from tests.kit.training import refusal

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def triple(config: Config) -> list[int]:
    return [getattr(config, key) for key in (TRAIN, MICRO, ACCUMULATION)]


def test_every_triple_that_resolves_holds_the_equation() -> None:
    choices = [None, 1, 2, 3, 12]
    for train, micro, accumulation, world_size in product([None, 7, 12, 24], choices, choices, (1, 3, 4)):
        given = {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation}
        values = {key: value for key, value in given.items() if value is not None}
        try:
            t, m, a = triple(Config.load(values).resolve(world_size))
        except ConfigError:
            continue
        assert t == m * a * world_size and values.items() <= {TRAIN: t, MICRO: m, ACCUMULATION: a}.items()


def test_resolve_keeps_the_original_and_happens_once() -> None:
    config = Config.load({TRAIN: "auto", MICRO: 2})
    resolved = config.resolve(4)
    assert resolved.train_batch_size == 8 and config.train_batch_size is None
    assert resolved.resolve(4).notes == resolved.notes != config.notes
    with pytest.raises(ValueError, match="world_size: expected at least 1, found 0"):
        config.resolve(0)


def section(limit: int, micros: list[int], version: float = 0.2, **others: Any) -> dict[str, Any]:
    return {"enabled": True, "max_train_batch_size": limit, "micro_batch_sizes": micros, "version": version, **others}


@pytest.mark.parametrize(
    ("elasticity", "ranks", "batch", "micro", "num_sizes"),  # of DeepSpeed 0.18.0's compute_elastic_config
    [
        (section(2000, [2, 4, 6], 0.1), 8, 1680, 6, 32),
        (section(2000, [2, 4, 6], 0.1, prefer_larger_batch=False), 4, 1680, 6, 32),
        (section(10000, [8, 12, 16, 17], 0.1, min_gpus=32, max_gpus=1500), 64, 9792, 17, 23),
        (section(1, [1], 0.1), 1, 1, 1, 1),
        (section(2000, [2, 4, 6]), 7, 1680, 6, 32),
        (section(2000, [2, 4, 6], num_gpus_per_node=8), 16, 1920, 6, 16),
        (section(2000, [2, 4, 6], num_gpus_per_node=8), 56, 1904, 2, None),  # a batch of these ranks alone
        (section(2000, [3, 7], num_gpus_per_node=4), 11, 1980, 3, None),
        (section(500, [5, 9], prefer_larger_batch=False), 13, 455, 5, None),
        (section(300, [4, 6], max_gpus=4), 64, 256, 4, None),
    ],
)
def test_elastic_numbers_are_deepspeeds(
    elasticity: dict[str, Any], ranks: int, batch: int, micro: int, num_sizes: int | None
) -> None:
    loaded = Config.load({"elasticity": elasticity})
    config = loaded.resolve(ranks)
    again = Config.load(config.as_dict())
    assert triple(config) == [batch, micro, batch // micro // ranks]
    assert again == config and again.notes == again.resolve(ranks).notes == ()
    _, sizes = legal_sizes(loaded.elasticity)
    assert ranks not in sizes if num_sizes is None else len(sizes) == num_sizes


def test_an_elastic_batch_stays_on_other_ranks_and_the_note_says_where_it_does_not() -> None:
    config = Config.load({"elasticity": section(2000, [2, 4, 6])})
    assert config.resolve(6, 8).notes[-1] == (
        "elasticity.enabled: it has chosen train_batch_size 1680 = microbatch x accumulation x data-parallel "
        "ranks = 4 x 70 x 6; 1680 is the batch on 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, ... data-parallel ranks"
    )
    assert " = 6 x 30 x 11; the job began with 1680; " in config.resolve(11, 8).notes[-1]


def test_ranks_of_one_sample_count_once() -> None:
    elasticity = section(16, [1, 2], model_parallel_size=2, num_gpus_per_node=2)
    config = Config.load({"elasticity": elasticity, "parallel": {"pipeline": 2}, ACCUMULATION: "auto"})
    assert triple(config.resolve(8)) == [12, 1, 3]


# -- a job that goes on with other ranks ------------------------------------------------------------------------------

IN_BACKWARD = {"zero_optimization": {"update_in_backward": True}}
TWO_STAGES = {"parallel": {"pipeline": 2}}
AT_LEAST_FOUR = {**TWO_STAGES, "pipeline": {"schedule": "dualpipe-v"}}


def kept(values: dict[str, Any], first: int, now: int) -> list[int]:
    return triple(Config.load(values).resolve(now, first))


def faults(values: dict[str, Any], first: int, now: int) -> str:
    return refusal(lambda: Config.load(values).resolve(now, first), kind=ConfigError)


# -- what is chosen -------------------------------------------------------------------------------------------------


def test_accumulation_makes_up_for_ranks_and_a_microbatch_that_does_not_divide_becomes_the_next_smaller_one() -> None:
    """The equation holds, and no more memory is needed."""
    for micro, accumulation, first, now in product((2, 5, 12), (1, 7), (1, 3, 8), (1, 2, 3, 5, 8)):
        global_batch, values = micro * accumulation * first, {MICRO: micro, ACCUMULATION: accumulation}
        if global_batch % now:
            assert f"x data-parallel ranks({now}) hold" in faults(values, first, now)
            continue
        largest = max(size for size in range(1, micro + 1) if global_batch // now % size == 0)
        assert kept(values, first, now) == [global_batch, largest, global_batch // now // largest]


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
    assert kept(values, first, now) == list(filled)


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
UPDATES = "gradient_accumulation_steps: zero_optimization.update_in_backward needs 1, found 2"
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
