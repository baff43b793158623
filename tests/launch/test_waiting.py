"""From the reports of all ranks to the rank that the others wait for; what is said when a step takes too long."""

import time
from typing import Any
from unittest import mock

import pytest

from lowtide.launch.job.stall import StallWatch
from lowtide.launch.wire.messages import ProgressReport
from lowtide.watch.progress import RankProgress, Wait
from lowtide.watch.waiting import named, stalled, who_waits_for_whom
from tests.kit.ranks import slowness
from tests.launch.jobs import Job

Ranks = dict[int, RankProgress | None]
GATHER = "gather of layers.7"


def report(rank: int, activity: str = "forward", seconds: float = 33.0, **others: Any) -> RankProgress:
    return RankProgress(rank, 4, 100 + rank, 12, activity, seconds, **others)


def gathers(
    rank: int, ranks: range = range(4), what: str = GATHER, sequence: int = 120, channel: int = 2, seconds: float = 31.0
) -> RankProgress:
    wait = Wait(what, channel, sequence, ranks.start, ranks.step, len(ranks), seconds)
    return report(rank, unit="layers.7", wait=wait, begun=((channel, sequence),))


def loads(rank: int, **others: Any) -> RankProgress:
    return report(rank, "data loading", **others)


def receives(rank: int, other: int) -> RankProgress:
    return report(rank, "pipeline action", unit="2F0", wait=Wait(f"message from stage {other}", 3, 0, other, 1, 1, 5.0))


SAME_CALLS = "Do all ranks run the same calls of the engine in the same order?"
LAWS: dict[str, tuple[Ranks, list[str]]] = {
    "who_does_not_come": (
        {**{rank: gathers(rank, seconds=29.0 + rank) for rank in range(3)}, 3: loads(3, begun=((2, 118),))},
        [
            "ranks 0-2: after step 12, forward of layers.7: waiting in gather of layers.7 (seq 120) for 31 s",
            "rank 3: after step 12, data loading for 33 s",
            "ranks 0-2 wait for rank 3.",
        ],
    ),
    "who_is_in_an_earlier_collective_is_not_waited_for_itself": (
        {
            0: gathers(0),
            1: gathers(1, range(1, 5, 2), "reduction of layers.3", sequence=40, channel=1),
            2: gathers(2),
            3: report(3, "saving a checkpoint"),
        },
        ["ranks 0-2 wait for rank 3."],
    ),
    "who_is_past_it_is_not_waited_for": (
        {0: gathers(0, range(3)), 1: report(1, "backward", begun=((2, 121),)), 2: report(2, begun=((2, 120),))},
        ["rank 0 waits for rank 2."],
    ),
    "other_groups_do_not_count": (
        {0: gathers(0, range(2)), 1: loads(1), 2: gathers(2, range(2, 4)), 3: report(3, "update")},
        ["rank 0 waits for rank 1.", "rank 2 waits for rank 3."],
    ),
    "a_chain_of_messages": (
        {0: receives(0, 1), 1: receives(1, 2), 2: report(2, "pipeline action", unit="3F0")},
        [
            "rank 0: after step 12, pipeline action 2F0: waiting in message from stage 1 for 5 s",
            "rank 1: after step 12, pipeline action 2F0: waiting in message from stage 2 for 5 s",
            "rank 2: after step 12, pipeline action 3F0 for 33 s",
            "ranks 0-1 wait for rank 2.",
        ],
    ),
    "each_other": (
        {0: receives(0, 1), 1: receives(1, 0), 2: report(2)},
        [f"ranks 0-1 wait for each other: no one of them can go on. {SAME_CALLS}"],
    ),
    "different_collectives_with_one_number": (
        {0: gathers(0), 1: gathers(1), 2: gathers(2, what="gather of layers.8")},
        [
            "Collective 120 is not the same on all ranks: ranks 0-1: gather of layers.7; rank 2: gather of layers.8. "
            + SAME_CALLS
        ],
    ),
    "all_in_the_same": (
        {rank: gathers(rank) for rank in range(4)},
        ["All ranks are in the same collective: it is the device or the network that does not answer."],
    ),
    "nobody": (
        {rank: loads(rank) for rank in range(4)},
        ["ranks 0-3: after step 12, data loading for 33 s", "No rank waits for another one."],
    ),
    "no_report": (
        {0: gathers(0, range(2)), 1: None},
        ["rank 1: not come to `import lowtide` yet", "rank 0 waits for rank 1."],
    ),
    "who_has_ended": ({0: gathers(0, range(2))}, ["No rank waits for another one."]),
}


@pytest.mark.parametrize("name", LAWS)
def test_who_waits_for_whom(name: str) -> None:
    ranks, expected = LAWS[name]
    assert who_waits_for_whom(ranks).splitlines()[-len(expected) :] == expected


def test_hosts_of_late_ranks_are_named_once() -> None:
    ranks: Ranks = {0: gathers(0), **{rank: loads(rank) for rank in (1, 2, 3)}}
    text = who_waits_for_whom(ranks, {0: "a", 1: "b", 2: "c", 3: "b"})
    assert text.endswith("rank 0 waits for ranks 1-3 (hosts b, c).")
    ranks |= {rank: gathers(rank) for rank in (1, 2)}
    assert who_waits_for_whom(ranks, dict.fromkeys(range(3), "a") | {3: "b"}).endswith("wait for rank 3 (host b).")


def test_thousands_of_ranks_make_a_few_lines_in_little_time() -> None:
    size = 4096
    ranks: Ranks = {rank: gathers(rank, range(size)) for rank in range(size)}
    ranks[77] = loads(77)
    started = time.process_time()
    assert who_waits_for_whom(ranks).splitlines()[-1] == "ranks 0-76, 78-4095 wait for rank 77."
    assert time.process_time() - started < 1.0


def test_ranks_are_named_as_ranges() -> None:
    assert [named(ranks) for ranks in ([3], [2, 0, 1], [0, 5, 6, 9])] == ["rank 3", "ranks 0-2", "ranks 0, 5-6, 9"]


def test_a_step_over_the_limit_is_stalled() -> None:
    ranks: Ranks = {
        0: report(0, step_seconds=10.0, step_limit_seconds=9.0),
        1: report(1, step_seconds=10.0, step_limit_seconds=11.0),
        2: report(2, step_seconds=None, step_limit_seconds=1.0),  # no step is expected of it
        3: report(3, step_seconds=10.0),
        4: None,
    }
    assert [stalled(ranks), stalled(ranks, 5.0), stalled(ranks, 20.0)] == [[0], [0, 1, 3], []]


# -- what the launcher says ------------------------------------------------------------------------------------------

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
LIMIT = ("--step-limit", "1.5")
STACKS = ["Python stacks of rank 0:", "Python stacks of rank 1:", "in where_it_hangs"]
SAYS = [
    "rank 0: after step 12, forward of layers.7: waiting in gather of layers.7",
    "rank 1: after step 12, data loading for ",
]
SAYS += ["lowtide launch: no step for ", "rank 0 waits for rank 1."]
STOPPED = "finished no step in time; all ranks were stopped"  # 1 rank or 2, as they begin


@pytest.mark.parametrize(
    ("options", "seconds", "expected", "told"),
    [
        (LIMIT, "5", 0, [*SAYS, *STACKS]),
        ((*LIMIT, "--on-stall", "stop"), "600", 1, [*STACKS, STOPPED]),
    ],
    ids=["goes_on", "stops"],
)
def test_who_waits_for_whom_is_said_with_stacks(
    tmp_path: Any, options: tuple[str, ...], seconds: str, expected: int, told: list[str]
) -> None:
    hangs = str(float(seconds) * slowness())  # the stacks of both ranks are asked for meanwhile
    status, _, err = Job(tmp_path, STALLS, "--nproc", "2", *options, arguments=(hangs,)).finish()
    assert status == expected and all(text in err for text in told), err
    assert err.count("lowtide launch: no step for ") <= 1 and err.count("in where_it_hangs") == 2


def test_a_rank_that_has_ended_is_one_that_others_wait_for() -> None:
    waits = Wait(GATHER, 0, 120, 0, 1, 2, 9.0)
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
    expected = ["    rank 1: after step 12, ended with exit status 0 for 0 s", "    rank 0 waits for rank 1."]
    assert said[0].splitlines()[2:] == expected
