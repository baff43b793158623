"""The sections `parallel` and `pipeline`: what they take, and what they need of the rest."""

from pathlib import Path
from typing import Any

import pytest

from lowtide.engine.config.config import Config, ConfigError

OPTIMIZER = {"type": "adamw"}


def error_of(values: dict[str, Any], world_size: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        config = Config.load({"optimizer": OPTIMIZER, **values})
        if world_size is not None:
            config.resolve(world_size)
    return str(caught.value)


def test_data_parallel_ranks_are_what_a_pipeline_leaves() -> None:
    config = Config.load({"train_batch_size": 32, "parallel": {"pipeline": 4}, "pipeline": {"microbatches": 8}})
    resolved = config.resolve(8)
    assert (resolved.train_micro_batch_size_per_gpu, resolved.gradient_accumulation_steps) == (2, 8)


def test_microbatches_are_accumulation_steps_without_a_pipeline_too() -> None:
    assert Config.load({"pipeline": {"microbatches": 3}}).resolve(2).gradient_accumulation_steps == 3


def test_two_numbers_of_microbatches_are_a_conflict() -> None:
    text = error_of({"gradient_accumulation_steps": 4, "pipeline": {"microbatches": 8}})
    assert "found 8, but gradient_accumulation_steps is 4: both are the number of microbatches of a step" in text


def test_the_pipeline_must_divide_the_world() -> None:
    text = error_of({"parallel": {"pipeline": 4}}, 6)
    assert "pipeline(4) x data(?) = world size (6) does not hold; the nearest legal values are 3 or 6" in text


@pytest.mark.parametrize(
    ("pipeline", "part"),
    [
        ({"schedule": "1f1d"}, 'did you mean "1f1b"?'),
        ({"schedule": "dualpipe-v", "microbatches": 2}, "at least 4 on 2 ranks, found 2"),
        ({"schedule": "1f1b", "chunks": 3}, "3"),
        ({"schedule": "no/such/schedule.txt"}, "no/such/schedule.txt"),
    ],
)
def test_a_schedule_that_cannot_be(pipeline: dict[str, Any], part: str) -> None:
    text = error_of({"parallel": {"pipeline": 2}, "pipeline": pipeline}, 2)
    assert "pipeline.schedule" in text and part in text


@pytest.mark.parametrize(
    ("values", "path", "why"),
    [
        (
            {"zero_optimization": {"update_in_backward": True}},
            "zero_optimization.update_in_backward",
            "last microbatch",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device",
            "the schedule gathers and releases",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "overlap": "speculative"}}},
            "zero_optimization.offload_optimizer.overlap",
            "complete only at the end of the step",
        ),
        (
            {"activation_checkpointing": {"offload": {"device": "cpu"}}},
            "activation_checkpointing.offload.device",
            "in the order of the schedule",
        ),
    ],
)
def test_what_does_not_go_together_with_a_pipeline(values: dict[str, Any], path: str, why: str) -> None:
    text = error_of({**values, "parallel": {"pipeline": 2}})
    assert path in text and "is not for parallel.pipeline 2" in text and why in text
    Config.load({**values, "parallel": {"pipeline": 1}})


def test_settings_of_an_axis_that_is_not_there_are_noted() -> None:
    notes = Config.load({"pipeline": {"schedule": "zb-v", "balance": [1, 2]}}).notes
    assert 'pipeline.schedule: "zb-v" has no effect here: parallel.pipeline is 1' in notes
    assert "pipeline.balance: [1, 2] has no effect here: parallel.pipeline is 1" in notes
    notes = Config.load({"sequence_parallel": {"attention": "ring"}}).notes
    assert 'sequence_parallel.attention: "ring" has no effect here: parallel.sequence is 1' in notes


@pytest.mark.parametrize("balance", ["equal", [], [1, 0], 3])
def test_a_balance_that_cannot_be(balance: Any) -> None:
    assert 'expected "parameters", "time" or a list of numbers of blocks' in error_of(
        {"pipeline": {"balance": balance}}
    )


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(
        "name: mine\nranks: 2\nstages: 2\nmicrobatches: 2\nrank of stage: 0 1\n"
        "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"
    )
    config = Config.load({"parallel": {"pipeline": 2}, "pipeline": {"schedule": str(path), "microbatches": 2}})
    assert config.resolve(2).gradient_accumulation_steps == 2
