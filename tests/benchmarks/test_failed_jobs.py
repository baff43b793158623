"""A rank that fails ends its job at once, with the rank's own last error; no process is left behind."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import Helper
from tests.kit.ranks import RankError, in_a_new_process, slowness

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(helper: Helper, tmp_path: Path) -> Run:
    """Runs lines of Python as the worker of two ranks; they know `rank`, `job` and the `file` of their answer."""
    ranks = helper("_harness")

    def run_lines(lines: str, timeout_seconds: float = 30.0) -> list[dict[str, Any]]:
        worker = tmp_path / "worker.py"
        worker.write_text(
            "import json, os, sys, time, pathlib\n"
            "rank, description = os.environ['RANK'], pathlib.Path(sys.argv[1])\n"
            "job, file = json.loads(description.read_text()), description.with_name(f'rank{rank}.json')\n" + lines
        )
        environment = ranks.environment_of(1, None)
        found: list[dict[str, Any]] = ranks.run_ranks({"a": 7}, 2, sys.executable, environment, timeout_seconds, worker)
        return found

    return run_lines


def test_every_rank_answers(run: Run) -> None:
    found = run("file.write_text(json.dumps(job | {name: os.environ[name] for name in ('RANK', 'WORLD_SIZE')}))\n")
    assert found == [{"a": 7, "RANK": "0", "WORLD_SIZE": "2"}, {"a": 7, "RANK": "1", "WORLD_SIZE": "2"}]


def test_the_error_of_a_rank_is_told_and_the_others_are_ended(run: Run, helper: Helper, tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    started = time.monotonic()
    with pytest.raises(helper("_harness").JobError) as failed:
        run(
            f"pid = pathlib.Path({str(pids)!r})\n"
            "if rank == '0': pid.write_text(str(os.getpid())); time.sleep(600)\n"
            "while not pid.exists() or not pid.read_text(): time.sleep(0.01)\n"
            "sys.stderr.write('ValueError: an earlier line\\n')\n"
            "try: raise ValueError('2 faults:\\n  stage: expected 0, 1, 2 or 3, found 4')\n"
            "finally: import atexit; atexit.register(lambda: print('UserWarning: a later line', file=sys.stderr))\n"
        )
    assert (
        str(failed.value) == "rank 1 ended with status 1: ValueError: 2 faults: stage: expected 0, 1, 2 or 3, found 4"
    )
    assert time.monotonic() - started < 300
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)


def answers_of_forks(worker: str) -> list[Any]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from _harness import environment_of, run_ranks

    return run_ranks({"threads": 1, "worker": worker}, 2, sys.executable, environment_of(1, None), 300.0)


def test_a_fork_is_a_rank_as_a_process_is() -> None:
    assert in_a_new_process(answers_of_forks, "json:dumps") == 2 * ['{"threads": 1, "worker": "json:dumps"}']
    with pytest.raises(
        RankError, match=r"JobError: rank \d ended with status 1: TypeError: the JSON object must be str"
    ):
        in_a_new_process(answers_of_forks, "json:loads")


def test_what_a_fork_would_not_measure_alike_is_a_process(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ranks, here = helper("_harness"), sys.executable
    plain = ranks.environment_of(1, None)
    assert ranks.can_fork({"allocator": None}, here, plain) and not ranks.can_fork({"allocator": "glibc"}, here, plain)
    assert not ranks.can_fork({}, here, ranks.environment_of(1, "exact"))
    assert not ranks.can_fork({}, here, ranks.environment_of(1, None, "cuda"))
    assert not ranks.can_fork({}, "/another/python", plain)


def test_a_rank_that_names_no_error_is_told_by_its_status(run: Run, helper: Helper) -> None:
    said = "ended with status 3: a sentence without an error"
    with pytest.raises(helper("_harness").JobError, match=said):
        run("print('a sentence without an error'); sys.exit(3)")
    with pytest.raises(helper("_harness").JobError, match="ended with status -9: no output"):
        run("import signal; os.kill(os.getpid(), signal.SIGKILL)")


def test_a_job_that_takes_too_long_is_ended(run: Run, helper: Helper) -> None:
    seconds = 1.5 * slowness()  # in which rank 0 ends
    with pytest.raises(helper("_harness").JobError) as failed:
        run("if rank == '1': time.sleep(600)\n", timeout_seconds=seconds)
    assert str(failed.value) == f"not done after {seconds:.0f} s (--timeout); ranks [1] still ran"


def test_a_rank_over_its_budget_counts_before_those_that_lose_it(run: Run, helper: Helper) -> None:
    ranks = helper("_harness")
    ended = [(0, lambda: 1), (0, lambda: 75)]
    with pytest.raises(ranks.OverBudget, match=r"^rank 1 needs more memory than it may take$"):
        ranks._wait(ended, [], 30.0)
    with pytest.raises(ranks.OverBudget, match=r"^rank 0 needs more memory than it may take$"):
        run("sys.exit(75) if rank == '0' else time.sleep(600)\n")


def test_settings_of_the_allocator_are_the_jobs_own(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    ranks = helper("_harness")
    plain, exact, on_gpu = (ranks.environment_of(4, *more) for more in ([None], ["exact"], [None, "cuda"]))
    assert not [name for name in plain if name.startswith("MALLOC_")] and plain["OMP_NUM_THREADS"] == "4"
    assert exact["MALLOC_MMAP_THRESHOLD_"] == "65536" and "MALLOC_ARENA_MAX" not in exact
    assert plain["CUDA_VISIBLE_DEVICES"] == "" and on_gpu["CUDA_VISIBLE_DEVICES"] == "3"
