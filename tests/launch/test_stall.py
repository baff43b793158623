"""A step that takes too long: who waits for whom, the stacks of all ranks, and going on or stopping."""

from pathlib import Path
from unittest import mock

from lowtide.launch.job.stall import StallWatch
from lowtide.launch.wire.messages import ProgressReport
from lowtide.watch.progress import RankProgress, Wait
from tests.launch.jobs import Job

# What the engine records of a rank; rank 1 stays away from the collective that rank 0 waits in.
STALLS = """
import os, pathlib, sys, time
import lowtide
from lowtide.watch.progress import Activity, Progress

rank = int(os.environ["RANK"])
pathlib.Path(f"ready{rank}").touch()
while not all(pathlib.Path(f"ready{other}").exists() for other in range(2)):
    time.sleep(0.01)
progress = Progress.of_this_process()
progress.identify(rank, 2)
progress.end_step(12)

def where_it_hangs(seconds):
    time.sleep(seconds)

if rank == 0:
    progress.enter(Activity.FORWARD, unit="layers.7")
    number = progress.begin(0)
    progress.wait("gather of layers.7", 0, number, 0, 1, 2)
else:
    progress.enter(Activity.DATA_LOADING)
where_it_hangs(float(sys.argv[1]))
progress.end_step(13)
"""


def test_who_waits_for_whom_is_said_with_stacks_and_the_job_goes_on(tmp_path: Path) -> None:
    status, _, err = Job(tmp_path, STALLS, "--nproc", "2", "--step-limit", "1.5", arguments=("5",)).finish()
    assert status == 0, err
    assert err.count("lowtide launch: no step for ") == 1
    assert "rank 0: step 12, forward of layers.7: waiting in gather of layers.7" in err
    assert "rank 1: step 12, data loading for " in err and "rank 0 waits for rank 1." in err
    assert "Python stacks of rank 0:" in err and "Python stacks of rank 1:" in err
    assert err.count("in where_it_hangs") == 2


def test_the_job_is_stopped_where_that_is_asked(tmp_path: Path) -> None:
    options = ("--nproc", "2", "--step-limit", "1.5", "--on-stall", "stop")
    status, _, err = Job(tmp_path, STALLS, *options, arguments=("600",)).finish()
    assert status == 1
    assert "in where_it_hangs" in err
    assert "2 ranks finished no step in time; all ranks were stopped" in err


def test_without_a_limit_nothing_is_said(tmp_path: Path) -> None:
    status, _, err = Job(tmp_path, STALLS, "--nproc", "2", arguments=("2",)).finish()
    assert (status, err) == (0, "")


def test_a_rank_that_has_ended_is_one_that_others_wait_for() -> None:
    waits = Wait("gather of layers.7", 0, 120, 0, 1, 2, 9.0)
    loop, said = mock.Mock(), list[str]()
    watch = StallWatch(loop, mock.Mock(all=[]), {0: "a", 1: "a"}, 5.0, said.append, mock.Mock())
    reports = (
        RankProgress(0, 2, 10, 12, "forward", 9.0, step_seconds=9.0, wait=waits, begun=((0, 120),)),
        RankProgress(1, 2, 11, 12, "between steps", 9.0, step_seconds=9.0, begun=((0, 119),)),
    )
    watch.progress(ProgressReport(reports))
    watch.gone(1, has_ended=True)
    look = loop.after.call_args.args[1]
    look()
    assert said[0].splitlines()[2:] == [
        "    rank 1: step 12, ended with exit status 0 for 0 s",
        "    rank 0 waits for rank 1.",
    ]
