"""A comparison of pipelines: makespans and bubbles of what was done when, ratios, and losses that differ."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.benchmarks import Helper

# Two ranks, one microbatch, a second each from 10:   rank 0  F F . . B B
# six of the twelve cells are empty.                  rank 1  . . F B . .
TIMELINE = [
    [("F", 0, 0, 10e3, 12e3), ("B", 0, 0, 14e3, 16e3)],
    [("F", 1, 0, 12e3, 13e3), ("B", 1, 0, 13e3, 14e3)],
]


@pytest.fixture
def row(helper: Helper) -> Callable[..., Any]:
    harness, pipeline = helper("_harness"), helper("pipeline")

    def make(name: str, ranks: int, rounds: dict[int, list[float]], losses: list[float] | None = None) -> Any:
        timed = {number: harness.Result(losses or [5.0, 4.0], seconds) for number, seconds in rounds.items()}
        return harness.Row(pipeline.CONTENDERS[name], ranks, timed)

    return make


def test_the_step_that_is_shown_has_the_median_makespan(helper: Helper, row: Callable[..., Any]) -> None:
    pipeline = helper("pipeline")
    timelines = [
        [[(*action[:3], action[3] * by, action[4] * by) for action in actions] for actions in TIMELINE]
        for by in (3.0, 1.0, 4.0, 2.0)
    ]
    ours = row("1f1b", 2, {0: [6.0], 1: [6.0]})
    ours.timed[0].more, ours.timed[1].more = {"timelines": timelines[:3]}, {"timelines": timelines[3:]}
    found = pipeline.measured(ours, pipeline.parse_arguments(["--mode", "sleep", "--microbatches", "1"]))
    assert found.makespan == 12000.0 and found.bubble == 0.5


def test_what_was_done_when_is_shown_and_drawn(helper: Helper, row: Callable[..., Any], tmp_path: Path) -> None:
    ours, peer = row("1f1b", 2, {0: [6.0]}), row("torch-1f1b", 2, {0: [7.0]})
    ours.timed[0].more = {"timelines": [TIMELINE]}
    pipeline, sleeps = helper("pipeline"), ["--milliseconds", "1000", "500", "500"]
    options = pipeline.parse_arguments(["--mode", "sleep", "--microbatches", "1", *sleeps])
    pipeline.write_timelines(options, "a machine", [ours, peer], tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 0
    said = Console(width=200, record=True, file=io.StringIO())
    said.print(helper("_harness").table_of([ours, peer], pipeline.sleep_columns([ours, peer], options), "a machine"))
    words = {"4000", "6000", "50.0%", "0.86", "7000"}
    shown = [word for word in said.export_text().split() if word in words]
    assert shown == ["4000", "6000", "50.0%", "50.0%", "6000", "0.86", "7000"]


def test_ratios_and_right_losses_are_those_of_as_many_ranks(helper: Helper, row: Callable[..., Any]) -> None:
    ours, peer = row("zb-v", 2, {0: [1.0]}), row("torch-zb-v", 2, {0: [1.0]})
    rows, other = [row("torch-1f1b", 2, {0: [1.0]}), peer, ours], row("zb-v", 4, {0: [1.0]})
    harness = helper("_harness")
    assert harness.peer_of(rows, ours) is peer and harness.peer_of(rows, other) is None
    assert harness.reference_of([peer, other], ours) is peer and harness.reference_of([peer, other], other) is other
