"""From the reports of all ranks to the rank that the others wait for."""

import time
from typing import Any

import pytest

from lowtide.watch.progress import RankProgress, Wait
from lowtide.watch.waiting import named, stalled, who_waits_for_whom

EVERYONE = range(4)


def report(rank: int, activity: str = "forward", seconds: float = 33.0, **others: Any) -> RankProgress:
    return RankProgress(rank, 4, 100 + rank, 12, activity, seconds, **others)


def in_collective(
    rank: int,
    sequence: int = 120,
    what: str = "gather of layers.7",
    ranks: range = range(4),
    channel: int = 2,
    seconds: float = 31.0,
) -> RankProgress:
    wait = Wait(what, channel, sequence, ranks.start, ranks.step, len(ranks), seconds)
    return report(rank, unit="layers.7", wait=wait, begun=((channel, sequence),))


def waiting_for_message(rank: int, other: int) -> RankProgress:
    return report(rank, "pipeline action", unit="2F0", wait=Wait(f"message from stage {other}", 3, 0, other, 1, 1, 5.0))


def test_the_rank_that_does_not_come_is_named() -> None:
    ranks = {
        **{rank: in_collective(rank, seconds=29.0 + rank) for rank in range(3)},
        3: report(3, "data loading", begun=((2, 118),)),
    }
    assert who_waits_for_whom(ranks).splitlines() == [
        "ranks 0-2: step 12, forward of layers.7: waiting in gather of layers.7 (seq 120) for 31 s",
        "rank 3: step 12, data loading for 33 s",
        "ranks 0-2 wait for rank 3.",
    ]
    assert who_waits_for_whom(ranks, dict.fromkeys(range(3), "a") | {3: "b"}).endswith("wait for rank 3 (host b).")


def test_hosts_of_several_late_ranks_are_named_once() -> None:
    ranks = {0: in_collective(0), **{rank: report(rank, "data loading") for rank in (1, 2, 3)}}
    text = who_waits_for_whom(ranks, {0: "a", 1: "b", 2: "c", 3: "b"})
    assert text.endswith("rank 0 waits for ranks 1-3 (hosts b, c).")


def test_a_rank_in_an_earlier_collective_is_not_waited_for_itself_but_whom_it_waits_for_is() -> None:
    ranks = {
        0: in_collective(0),
        1: in_collective(1, what="reduction of layers.3", ranks=range(1, 5, 2), channel=1, sequence=40),
        2: in_collective(2),
        3: report(3, "saving a checkpoint"),
    }
    assert who_waits_for_whom(ranks).splitlines()[-1] == "ranks 0-2 wait for rank 3."


def test_who_is_past_a_collective_is_not_waited_for() -> None:
    ranks = {
        0: in_collective(0, ranks=range(3)),
        1: report(1, "backward", begun=((2, 121),)),
        2: report(2, "forward", begun=((2, 120),)),
    }
    assert who_waits_for_whom(ranks).endswith("rank 0 waits for rank 2.")


def test_ranks_of_other_groups_do_not_count() -> None:
    ranks = {
        0: in_collective(0, ranks=range(2)),
        1: report(1, "data loading"),
        2: in_collective(2, ranks=range(2, 4)),
        3: report(3, "update"),
    }
    assert who_waits_for_whom(ranks).splitlines()[-2:] == ["rank 0 waits for rank 1.", "rank 2 waits for rank 3."]


def test_a_chain_of_messages_is_followed_to_its_end() -> None:
    ranks = {0: waiting_for_message(0, 1), 1: waiting_for_message(1, 2), 2: report(2, "pipeline action", unit="3F0")}
    assert who_waits_for_whom(ranks).splitlines() == [
        "rank 0: step 12, pipeline action 2F0: waiting in message from stage 1 for 5 s",
        "rank 1: step 12, pipeline action 2F0: waiting in message from stage 2 for 5 s",
        "rank 2: step 12, pipeline action 3F0 for 33 s",
        "ranks 0-1 wait for rank 2.",
    ]


def test_ranks_that_wait_for_each_other_are_named() -> None:
    text = who_waits_for_whom({0: waiting_for_message(0, 1), 1: waiting_for_message(1, 0), 2: report(2)})
    assert text.splitlines()[-1] == (
        "ranks 0-1 wait for each other: no one of them can go on. Do all ranks run the same calls of the engine in the "
        "same order?"
    )


def test_different_collectives_with_one_number_are_shown() -> None:
    ranks = {0: in_collective(0), 1: in_collective(1), 2: in_collective(2, what="gather of layers.8")}
    assert who_waits_for_whom(ranks).splitlines()[-1] == (
        "Collective 120 is not the same on all ranks: ranks 0-1: gather of layers.7; rank 2: gather of layers.8. "
        "Do all ranks run the same calls of the engine in the same order?"
    )


def test_all_in_the_same_collective_is_not_the_fault_of_a_rank() -> None:
    text = who_waits_for_whom({rank: in_collective(rank) for rank in EVERYONE})
    assert text.endswith("All ranks are in the same collective: it is the device or the network that does not answer.")


def test_where_nobody_waits_that_is_said() -> None:
    text = who_waits_for_whom({rank: report(rank, "data loading") for rank in EVERYONE})
    assert text == "ranks 0-3: step 12, data loading for 33 s\nNo rank waits for another one."


def test_a_rank_without_a_report_can_be_what_is_waited_for() -> None:
    text = who_waits_for_whom({0: in_collective(0, ranks=range(2)), 1: None})
    assert text.splitlines()[1:] == ["rank 1: not come to `import lowtide` yet", "rank 0 waits for rank 1."]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    assert who_waits_for_whom({0: in_collective(0, ranks=range(2))}).endswith("No rank waits for another one.")


def test_thousands_of_ranks_make_a_few_lines_in_little_time() -> None:
    size = 4096
    ranks: dict[int, RankProgress | None] = {rank: in_collective(rank, ranks=range(size)) for rank in range(size)}
    ranks[77] = report(77, "data loading")
    started = time.process_time()
    assert who_waits_for_whom(ranks).splitlines()[-1] == "ranks 0-76, 78-4095 wait for rank 77."
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([2, 0, 1], "ranks 0-2"), ([0, 5, 6, 9], "ranks 0, 5-6, 9")]
)
def test_ranks_are_named_as_ranges(ranks: list[int], text: str) -> None:
    assert named(ranks) == text


def test_a_step_over_the_limit_is_stalled() -> None:
    ranks = {
        0: report(0, step_seconds=10.0, step_limit_seconds=9.0),
        1: report(1, step_seconds=10.0, step_limit_seconds=11.0),
        2: report(2, step_seconds=None, step_limit_seconds=1.0),  # no step is expected of it
        3: report(3, step_seconds=10.0),
        4: None,
    }
    assert stalled(ranks) == [0]
    assert stalled(ranks, 5.0) == [0, 1, 3]
    assert stalled(ranks, 20.0) == []
