"""A comparison's numbers: a ratio is of one round, a time is a median, and losses that differ fail."""

import io
import json
import math
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.benchmarks import Helper


@pytest.fixture
def row(helper: Helper) -> Callable[..., Any]:
    """A row whose rounds took these seconds, each step by step, and which always had the same losses."""
    harness, contenders = helper("_harness"), helper("_contenders")

    def make(name: str, rounds: dict[int, list[float]], losses: list[float] | None = None) -> Any:
        timed = {number: harness.Result(losses or [5.0, 4.0], seconds) for number, seconds in rounds.items()}
        return harness.Row(contenders.CONTENDERS[name], timed=timed)

    return make


def failures(helper: Helper, *rows: Any) -> list[str]:
    """What is said when losses have been judged."""
    helper("_harness").judge_losses(rows, 1e-4)
    found: list[str] = helper("_harness").failures(rows)
    return found


def test_times_are_medians_and_ratios_are_of_rounds_that_both_finished(row: Callable[..., Any]) -> None:
    ours = row("lowtide-3", {0: [1.0, 9.0, 2.0], 1: [4.0], 2: [6.0]})
    ddp = row("ddp", {0: [4.0, 4.0, 100.0], 2: [3.0]})
    assert ours.step_seconds == 4.0
    assert ours.ratios(ddp) == [0.5, 2.0]
    assert ours.ratios(None) == [] and row("ddp", {}).step_seconds is None
    assert row("ddp", {0: []}).step_seconds is None  # a job without steps, such as of checkpoints


@pytest.mark.parametrize(("loss", "difference"), [(4.001, "2.5e-04"), (math.nan, "nan"), (math.inf, "inf")])
def test_losses_that_differ_fail(helper: Helper, row: Callable[..., Any], loss: float, difference: str) -> None:
    same, close = row("ddp", {0: [1.0]}), row("fsdp2", {0: [1.0]}, [5.0, 4.0001])
    other = row("lowtide-3", {0: [1.0]}, [5.0, loss])
    assert failures(helper, same, close, other) == [
        f"lowtide-3 FAILED: losses differ: expected at most 0.0001 (relative) from DDP, found {difference}"
    ]


def test_the_losses_of_one_process_are_right_by_definition(helper: Helper, row: Callable[..., Any]) -> None:
    ddp, ours = row("ddp", {0: [1.0]}), row("lowtide-3", {0: [1.0]}, [5.0, 4.5])
    single = row("single", {0: [1.0]}, [5.0, 4.5])
    assert [line.split()[0] for line in failures(helper, ddp, ours, single)] == ["ddp"]
    reference_of = helper("_harness").reference_of
    assert reference_of([ours, ddp], ours) is ddp and reference_of([row("ddp", {}), ours], ours) is ours
    alone = row("alone", {0: [1.0]}, [5.0, 5.0])  # which never updates
    assert reference_of([alone, ours], ours) is ours and not failures(helper, alone, ours)


def test_peaks_of_ranks_become_the_largest_and_warm_up_is_left_out(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [
        {"losses": [2.0, 4.0, None], "seconds": [1.0, 1.0], "peak_bytes": 3, "baseline_bytes": None},
        {"losses": [4.0, 5.0, 1.0], "seconds": [2.0, 1.0], "peak_bytes": 2, "baseline_bytes": None},
    ]
    assert helper("_harness").gathered(ranks) == helper("_harness").Result([3.0, 4.5, 1.0], [2.0, 1.0], 3)
    monkeypatch.setenv("WORLD_SIZE", "1")
    worker, seen = helper("_worker"), list[float]()
    monkeypatch.setattr(worker.time, "perf_counter", lambda: sum(seen))
    found = worker.timed_steps(seen.append, [(9.0,), (1.0,), (2.0,)], 1, worker.PeakSampler(False))
    assert found == {"losses": 3 * [None], "seconds": [1.0, 2.0], "baseline_bytes": None, "peak_bytes": None}


def test_jobs_are_interleaved_and_a_failure_ends_a_contenders_part(helper: Helper, row: Callable[..., Any]) -> None:
    harness, ran = helper("_harness"), list[str]()
    rows = [row(name, {}) for name in ("ddp", "fsdp2", "lowtide-3")]

    def run(one: Any, allocator: str | None) -> Any:
        ran.append(one.contender.name)
        if one.contender.name == "fsdp2" and len(ran) > 3:
            raise harness.JobError("rank 0 ended with status 1: no output")
        return harness.Result([5.0], [1.0], 7 if allocator else None)

    console = Console(width=140, record=True, file=io.StringIO())
    harness.run_rounds(rows, run, 3, ["exact"], console)
    assert ran[:6] == ["ddp", "fsdp2", "lowtide-3", "fsdp2", "lowtide-3", "ddp"]  # each round begins with another
    assert ran[6:] == ["lowtide-3", "ddp", "ddp", "lowtide-3"]
    assert [sorted(one.timed) for one in rows] == [[0, 1, 2], [0], [0, 1, 2]] and rows[0].peak_bytes == 7
    assert rows[1].failure == "round 2: rank 0 ended with status 1: no output"
    assert "[12/12] memory exact  lowtide stage 3, peak 0 MiB, loss 5.00000 (job 0 s)" in console.export_text()


def test_a_failed_contender_gives_status_1_and_the_numbers_are_kept(
    helper: Helper, row: Callable[..., Any], tmp_path: Path
) -> None:
    conclude, columns = helper("_harness").conclude, helper("compare").columns
    rows = [row("ddp", {0: [2.0], 1: [2.0]}), row("lowtide-3", {0: [1.0], 1: [3.0]})]
    console, tables = Console(width=140, record=True, file=io.StringIO()), {"a machine": columns(rows, ["exact"])}
    options = Namespace(json=None, png=tmp_path / "found.png")
    assert conclude(options, console, rows, tables, "a machine") == 0
    assert (tmp_path / "found.png").stat().st_size > 0
    rows[0].failure = "memory exact: rank 0 ended with status 1: no output"
    options = Namespace(json=tmp_path / "found.json", png=None)
    assert conclude(options, console, rows, tables, "a machine") == 1
    said = console.export_text().strip()
    assert said.splitlines()[-1] == "ddp FAILED: memory exact: rank 0 ended with status 1: no output"
    assert re.search(r"lowtide stage 3 +│ +2.000 │ 1.00 \(0.50-1.50\)", said)
    read = json.loads((tmp_path / "found.json").read_text())
    assert [one["tables"]["a machine"]["x DDP"] for one in read["contenders"]] == [[1.0, 1.0], [0.5, 1.5]]


def test_the_ideal_of_offload_is_the_longer_of_transfers_and_work(helper: Helper) -> None:
    seconds = {"load": [1.0, 1.0], "save": [0.5, 0.5], "work": [1.2, 1.8], "window": [2.0, 2.0]}
    seconds |= {"fio write": [0.4, 0.6], "fio read": [0.8, 0.9]}
    row_of = helper("_harness").row_of
    rows = [row_of(name, *({"seconds": one} for one in found)) for name, found in seconds.items()]
    _, of_fio, of_ideal = helper("offload_io").columns(rows, 10**9)
    found = {row.contender.name: (of_fio.value(row), of_ideal.value(row)) for row in rows}
    assert found["window"] == ([], pytest.approx([0.75, 0.9]))
    assert found["save"] == (pytest.approx([0.8, 1.2]), []) and found["load"] == (pytest.approx([0.8, 0.9]), [])
    assert found["work"] == ([], [])
