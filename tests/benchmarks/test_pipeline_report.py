"""A comparison of pipelines: makespans and bubbles of what was done when, ratios, and losses that differ."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Helper = Callable[[str], ModuleType]

# Two ranks, one microbatch, in seconds from 10:      rank 0  F F . . B B
# four of the twelve cells are empty.                 rank 1  . . F B . .
TIMELINE = [
    [("F", 0, 0, 10.0, 12.0), ("B", 0, 0, 14.0, 16.0)],
    [("F", 1, 0, 12.0, 13.0), ("B", 1, 0, 13.0, 14.0)],
]


def slower(timeline: list[Any], by: float) -> list[Any]:
    return [[(*action[:3], action[3] * by, action[4] * by) for action in actions] for actions in timeline]


@pytest.fixture
def result(helper: Helper) -> Callable[..., Any]:
    """What a job gave whose steps took these seconds."""
    told = {"makespan": 5.0, "bubble": 0.25}

    def make(seconds: list[float], losses: list[float] | None = None, **more: Any) -> Any:
        given = {"timelines": [], "predicted": told, "predicted_as_timed": told, "peak_bytes": 0} | more
        return helper("_pipeline_job").PipelineResult(
            losses=losses or [5.0, 4.0], seconds=seconds, baseline_bytes=0, wall_seconds=1.0, **given
        )

    return make


@pytest.fixture
def row(helper: Helper, result: Callable[..., Any]) -> Callable[..., Any]:
    def make(name: str, ranks: int, rounds: dict[int, list[float]], losses: list[float] | None = None) -> Any:
        timed = {number: result(seconds, losses) for number, seconds in rounds.items()}
        contender = helper("_pipeline_contenders").CONTENDERS[name]
        return helper("_pipeline_report").PipelineRow(contender, ranks, timed)

    return make


def test_a_makespan_is_from_the_first_start_to_the_last_end(helper: Helper) -> None:
    assert helper("_pipeline_job").makespan(TIMELINE) == 6.0


def test_a_bubble_is_the_share_of_all_ranks_time_without_an_action(helper: Helper) -> None:
    bubble = helper("_pipeline_job").bubble
    assert bubble(TIMELINE) == 0.5
    assert bubble([[("F", 0, 0, 0.0, 2.0)]]) == 0.0


def test_the_step_that_is_shown_has_the_median_makespan(result: Callable[..., Any]) -> None:
    timelines = [slower(TIMELINE, by) for by in (3.0, 1.0, 4.0, 2.0)]
    found = result([4.0, 1.0, 9.0], timelines=timelines)
    assert found.timeline == timelines[3] and found.step_seconds == 4.0


def test_a_step_is_from_the_last_rank_at_its_start_to_the_last_at_its_end(helper: Helper) -> None:
    job = helper("_pipeline_job")
    work = job.PipelineWork("tiny", 2, 8, 1, 1, 1, 2, None, 300.0)
    first = {"losses": [None, None, None], "timelines": [], "seconds": [9.0, 1.0, 1.0], "started": [0.0, 10.0, 20.0]}
    last = {"losses": [3.0, 2.0, 1.0], "timelines": [], "seconds": [9.0, 2.0, 0.5], "started": [0.0, 10.5, 20.0]}
    memory = {"peak_bytes": 5, "baseline_bytes": 1}
    found = job._gathered([first | memory, last | memory | {"peak_bytes": 7}], work, 3.0)
    assert found.seconds == [2.0, 1.0] and found.losses == [3.0, 2.0, 1.0] and found.peak_bytes == 7


def test_a_ratio_compares_the_same_schedule_on_as_many_ranks(helper: Helper, row: Callable[..., Any]) -> None:
    ours, other = row("1f1b", 2, {0: [1.0], 1: [3.0, 1.0, 2.0]}), row("torch-1f1b", 4, {0: [9.0], 1: [9.0]})
    torch_row = row("torch-1f1b", 2, {1: [4.0], 2: [8.0]})
    peer_of = helper("_pipeline_report").peer_of
    assert peer_of([other, torch_row, ours], ours) is torch_row and peer_of([other, ours], ours) is None
    assert ours.ratios(torch_row) == [0.5] and ours.ratios(None) == []
    assert ours.step_seconds == 1.5 and row("1f1b", 2, {}).step_seconds is None


@pytest.mark.parametrize(("loss", "difference"), [(4.001, "2.5e-04"), (math.nan, "nan")])
def test_losses_that_differ_fail(helper: Helper, row: Callable[..., Any], loss: float, difference: str) -> None:
    ours, other = row("zb-v", 2, {0: [1.0]}, [5.0, loss]), row("zb-v", 4, {0: [1.0]}, [5.0, 4.001])
    rows = [ours, row("torch-zb-v", 2, {0: [1.0]}), other]
    helper("_pipeline_report").judge_losses(rows, 1e-4)
    assert ours.failure == (
        f"losses differ: expected at most 0.0001 (relative) from torch-zb-v on 2 ranks, found {difference}"
    )
    assert rows[1].failure is None and other.failure is None


@pytest.mark.parametrize(
    ("name", "ranks", "blocks", "stages", "counts"),
    [
        ("1f1b", 3, 8, [[0], [1], [2]], [3, 3, 2]),
        ("interleaved", 2, 7, [[0, 2], [1, 3]], [2, 2, 2, 1]),
        ("zb-v", 2, 5, [[0, 3], [1, 2]], [2, 1, 1, 1]),
    ],
)
def test_every_block_is_in_one_stage_and_every_stage_on_one_rank(
    helper: Helper, name: str, ranks: int, blocks: int, stages: list[list[int]], counts: list[int]
) -> None:
    contender = helper("_pipeline_contenders").CONTENDERS[name]
    assert [contender.stages_of_rank(rank, ranks) for rank in range(ranks)] == stages
    assert contender.blocks_of_stages(ranks, blocks) == counts
    held = [block for stage in range(len(counts)) for block in contender.blocks_of_stage(stage, ranks, blocks)]
    assert held == list(range(blocks))
