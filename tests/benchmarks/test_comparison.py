"""A comparison's numbers: a ratio is of one round, a time is a median, and losses that differ fail."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

Helper = Callable[[str], ModuleType]


@pytest.fixture
def row(helper: Helper) -> Callable[..., Any]:
    """A row whose rounds took these seconds, each step by step, and which always had the same losses."""
    report, contenders, job = helper("_report"), helper("_contenders"), helper("_job")

    def make(name: str, rounds: dict[int, list[float]], losses: list[float] | None = None) -> Any:
        timed = {number: job.JobResult(losses or [5.0, 4.0], seconds) for number, seconds in rounds.items()}
        return report.Row(contenders.CONTENDERS[name], timed=timed)

    return make


def comparison_of(helper: Helper, *rows: Any) -> Any:
    return helper("_report").Comparison(list(rows), {"title": "a machine"}, 1e-4)


def test_times_are_medians_and_ratios_are_of_rounds_that_both_finished(row: Callable[..., Any]) -> None:
    ours = row("lowtide-3", {0: [1.0, 9.0, 2.0], 1: [4.0], 2: [6.0]})
    ddp = row("ddp", {0: [4.0, 4.0, 100.0], 2: [3.0]})
    assert ours.step_seconds == 4.0
    assert ours.ratios(ddp) == [0.5, 2.0]
    assert ours.ratios(None) == [] and row("ddp", {}).step_seconds is None


@pytest.mark.parametrize(("loss", "difference"), [(4.001, "2.5e-04"), (math.nan, "nan"), (math.inf, "inf")])
def test_losses_that_differ_fail(helper: Helper, row: Callable[..., Any], loss: float, difference: str) -> None:
    same, close = row("ddp", {0: [1.0]}), row("fsdp2", {0: [1.0]}, [5.0, 4.0001])
    other = row("lowtide-3", {0: [1.0]}, [5.0, loss])
    found = comparison_of(helper, same, close, other)
    found.judge_losses()
    assert helper("_conclusion").failures(found.rows) == [
        f"lowtide-3 FAILED: losses differ: expected at most 0.0001 (relative) from DDP, found {difference}"
    ]


def test_the_losses_of_one_process_are_right_by_definition(helper: Helper, row: Callable[..., Any]) -> None:
    ddp, ours = row("ddp", {0: [1.0]}), row("lowtide-3", {0: [1.0]}, [5.0, 4.5])
    single = row("single", {0: [1.0]}, [5.0, 4.5])
    found = comparison_of(helper, ddp, ours, single)
    found.judge_losses()
    assert [line.split()[0] for line in helper("_conclusion").failures(found.rows)] == ["ddp"]
    assert comparison_of(helper, ours, ddp).loss_reference is ddp
    assert comparison_of(helper, row("ddp", {}), ours).loss_reference is ours


def test_losses_of_who_never_updates_are_not_judged(helper: Helper, row: Callable[..., Any]) -> None:
    alone, ours = row("alone", {0: [1.0]}, [5.0, 5.0]), row("lowtide-3", {0: [1.0]})
    found = comparison_of(helper, alone, ours)
    found.judge_losses()
    assert found.loss_reference is ours and not helper("_conclusion").failures(found.rows)


def test_an_earlier_failure_is_kept(helper: Helper, row: Callable[..., Any]) -> None:
    other = row("lowtide-3", {0: [1.0]}, [5.0, 9.0])
    other.failure = "round 2: rank 0 ended with status 1: no output"
    found = comparison_of(helper, row("ddp", {0: [1.0]}), other)
    found.judge_losses()
    assert other.failure == "round 2: rank 0 ended with status 1: no output"


def test_peaks_of_ranks_become_the_largest_and_warm_up_is_left_out(helper: Helper) -> None:
    ranks = [
        {"losses": [2.0, 4.0], "seconds": [9.0, 1.0], "peak_bytes": 3, "rest_bytes": 1, "baseline_bytes": None},
        {"losses": [4.0, 5.0], "seconds": [8.0, 2.0], "peak_bytes": 2, "rest_bytes": 2, "baseline_bytes": None},
    ]
    found = helper("_job")._gathered(ranks, 1, 7.5)
    assert found == helper("_job").JobResult([3.0, 4.5], [2.0], 3, 2, 0, 7.5)


def test_a_failed_contender_gives_status_1_and_the_numbers_are_kept(
    helper: Helper, row: Callable[..., Any], tmp_path: Path
) -> None:
    conclude = helper("_conclusion").conclude
    ours, ddp = row("lowtide-3", {0: [1.0], 1: [3.0]}), row("ddp", {0: [2.0], 1: [2.0]})
    found, console = comparison_of(helper, ddp, ours), Console(width=140, record=True, file=io.StringIO())
    assert conclude(console, found.rows, found.as_dict(), None) == 0
    ddp.failure = "memory exact: rank 0 ended with status 1: no output"
    assert conclude(console, found.rows, found.as_dict(), tmp_path / "found.json") == 1
    assert console.export_text().strip() == "ddp FAILED: memory exact: rank 0 ended with status 1: no output"
    read = json.loads((tmp_path / "found.json").read_text())
    assert [one["ratios_to_ddp"] for one in read["contenders"]] == [[1.0, 1.0], [0.5, 1.5]]
