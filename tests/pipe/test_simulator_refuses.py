"""What cannot run is refused before it runs: what is wrong, where, and a picture with the failing cell marked."""

import pytest

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.passes import complete
from lowtide.pipe.schedules.registry import make_schedule
from lowtide.pipe.schedules.schedule import Action, Schedule
from lowtide.pipe.schedules.simulator import simulate
from tests.kit.training import refusal
from tests.pipe.pipelines import with_steps


def schedule_of(*rows: str, ranks: tuple[int, ...] | None = None, microbatches: int = 1) -> Schedule:
    """One line of actions per rank; by default one stage on each."""
    placed = tuple(range(len(rows))) if ranks is None else ranks
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("own", len(rows), len(placed), microbatches, placed, actions)


@pytest.mark.parametrize(
    ("rows", "message", "mark"),
    [
        (("0B0 0F0",), "rank 0, action 0 (0B0): the backward comes before 0F0", ">0B0<"),
        (("0F0 0W0 0I0",), "rank 0, action 1 (0W0): the weight half comes before the input half, 0I0", ">0W0<"),
        (("0I0 0F0 0W0",), "rank 0, action 0 (0I0): the backward comes before 0F0", ">0I0<"),
        (("0F0 0F0 0B0",), "rank 0, action 1 (0F0): it is already done at action 0", ">0F0<"),
        (("0F0 0B0 0B0",), "rank 0, action 2 (0B0): it is already done at action 1", ">0B0<"),
        (("0F0 0I0 0B0 0W0",), "rank 0, action 2 (0B0): 0I0 has done this backward; B stands for I and W", ">0B0<"),
        (("0F0 0B0 0I0 0W0",), "rank 0, action 2 (0I0): 0B0 has done this backward; B stands for I and W", ">0I0<"),
        (("0F0 0B0 0F1",), "rank 0, action 2 (0F1): expected a microbatch below 1, found 1", ">0F1<"),
        (("0F0 0B0 1F0",), "rank 0, action 2 (1F0): expected a stage below 1, found 1", ">1F0<"),
        (("0F0 0B0 1F0", "1F0 1B0"), "rank 0, action 2 (1F0): stage 1 is on rank 1", ">1F0<"),
        (("0F0 0B0", ""), "rank 1, end of its list: 1F0 is missing", ">end<"),
        (("0F0", "1F0 1B0"), "rank 0, action 0 (0F0): leak: its activations are held to the end; 0B0 is", ">0F0<"),
        (("0F0 0I0",), "rank 0, action 1 (0I0): leak: the tensors for W are held to the end; 0W0 is missing", ">0I0<"),
        (("0GATHER 0F0 0RELEASE 0B0",), "action 3 (0B0): the parameters of stage 0 are not gathered; put 0", ">0B0<"),
        (("0GATHER 0F0 0GATHER 0B0",), "(0GATHER): stage 0 is gathered at action 0 and not released", ">0GATHER<"),
        (("0RELEASE 0F0 0B0",), "action 0 (0RELEASE): stage 0 is not gathered", ">0RELEASE<"),
        (("0GATHER 0F0 0B0",), "action 0 (0GATHER): leak: the parameters of stage 0 are never released", ">0GATHER<"),
        (("0F0 0REDUCE 0B0",), "the weight gradients of stage 0 are not complete: 0 of 1 microbatches", ">0REDUCE<"),
        (("0F0 0I0 0STEP 0W0",), "the weight gradients of stage 0 are not complete: 0 of 1 microbatches", ">0STEP<"),
        (("0F0 0B0 0STEP 0REDUCE",), "action 3 (0REDUCE): stage 0 has made its step at action 2", ">0REDUCE<"),
        (("0F0 0B0 0REDUCE", "1F0 1B0"), "end of its list: 1REDUCE is missing, and a stage has REDUCE", ">end<"),
        (("0F0 0SEND_F0 0B0", "1F0 1B0"), "rank 0, action 2 (0B0): its input is not received; put 0RECV_B0 ", ">0B0<"),
        (("0SEND_F0 0F0 0B0", "1F0 1B0"), "action 0 (0SEND_F0): it is sent before it is made by 0F0", ">0SEND_F0<"),
        (
            ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1SEND_B0 1F0 1B0"),
            "rank 1, action 1 (1SEND_B0): it is sent before it is made by 1B0 or 1I0",
            ">1SEND_B0<",
        ),
        (("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"), "1SEND_B0 is missing: stage 0 waits for it", ">end<"),
        (("0F0 0SEND_B0 0B0", "1F0 1B0"), "stage 0 is the first stage and has no neighbour there", ">0SEND_B0<"),
        (("0F0 0B0", "1F0 1SEND_F0 1B0"), "its input is not received; put 0RECV_B0 before", ">0B0<"),
        (("0F0 0SEND_F0 0RECV_B0", "1RECV_F0 1F0"), "this schedule has no backward", ">0RECV_B0<"),
    ],
)
def test_a_rule_is_broken(rows: tuple[str, ...], message: str, mark: str) -> None:
    text = refusal(simulate, schedule_of(*rows))
    assert text.startswith("schedule own, rank ")
    assert message in text and mark in text


def test_a_message_between_stages_of_one_rank_is_refused() -> None:
    text = refusal(simulate, schedule_of("0F0 0SEND_F0 1F0 1B0 0B0", ranks=(0, 0)))
    assert "rank 0, action 1 (0SEND_F0): stage 1 is on this rank too and needs no message" in text


def test_ranks_that_wait_for_each_other_are_a_deadlock_and_every_one_is_marked() -> None:
    rows = ("0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1", "1F1 1F0 1B0 1B1")
    assert refusal(simulate, schedule_of(*rows, ranks=(0, 1, 0), microbatches=2)) == (
        "schedule own: deadlock, 2 of 2 ranks wait forever\n"
        "  rank 0 waits in 2F0 for 1F0 of rank 1\n"
        "  rank 1 waits in 1F1 for 0F1 of rank 0\n"
        "rank 0                         0F0  >2F0<  0F1   2F1   2B0   0B0  ...\n"
        "rank 1                              >1F1<  1F0   1B0   1B1"
    )


SENDS_FIRST = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
CROSSING = (SENDS_FIRST, "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1")


@pytest.mark.parametrize(
    ("rows", "blocking", "parts"),
    [
        (  # 0B0 comes before 0F1 on rank 0, and 1F1 before 1I0 on rank 1
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1I0 1W0 1I1 1W1"),
            False,
            ("rank 0 waits in 0B0 for 1I0 of rank 1", "rank 1 waits in 1F1 for 0F1 of rank 0"),
        ),
        (
            CROSSING,
            True,
            ("rank 0 waits in 0SEND_F1 for 1RECV_F1 of rank 1", "rank 1 waits in 1SEND_B0 for 0RECV_B0 of rank 0"),
        ),
        (
            (SENDS_FIRST, "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"),
            False,
            (
                "rank 1, action 0 (1RECV_F1): rank 0 sends 0SEND_F0 here, expected 1RECV_F0; "
                "sends and receives must be in equal order",
                ">1RECV_F1<",
            ),
        ),
    ],
)
def test_what_each_rank_waits_for_is_named(rows: tuple[str, str], blocking: bool, parts: tuple[str, ...]) -> None:
    text = refusal(simulate, schedule_of(*rows, microbatches=2), blocking=blocking)
    assert all(part in text for part in parts)


def test_sends_block_each_other_only_where_sends_block() -> None:
    assert simulate(schedule_of(*CROSSING, microbatches=2)).makespan == 9  # 0F0 1F0 1B0 1F1 1B1 0B1


@pytest.mark.parametrize(
    ("ranks", "num_lists", "message"),
    [
        ((0, 2), 2, "schedule own: stage 1 is placed on rank 2, expected a rank below 2"),
        ((0, 0), 2, "schedule own: rank 1 has no stage; place a stage on it, or use fewer ranks"),
        ((0,), 2, "schedule own: expected 2 entries in rank_of_stage, found 1"),
        ((0, 1), 1, "schedule own: expected 2 entries in actions, found 1"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(ranks: tuple[int, ...], num_lists: int, message: str) -> None:
    assert refusal(simulate, Schedule("own", 2, 2, 1, ranks, ((),) * num_lists)) == message


def test_any_action_left_out_is_noticed() -> None:
    for name in ("interleaved", "zb-v", "dualpipe-v"):
        whole = with_steps(complete(make_schedule(name, 2, 4), gathers=True, budget=1))
        for rank, actions in enumerate(whole.actions):
            for index in range(len(actions)):
                rows = list(whole.actions)
                rows[rank] = actions[:index] + actions[index + 1 :]
                refusal(simulate, whole.replace_actions(rows))


def test_of_many_ranks_and_long_lists_the_picture_shows_what_is_around_the_cell() -> None:
    schedule = make_schedule("1f1b", 40, 80)
    rows = [list(actions) for actions in schedule.actions]
    rows[30].remove(Action.parse("30B50"))
    lines = refusal(simulate, schedule.replace_actions(rows)).splitlines()
    assert lines[0] == (
        "schedule 1f1b, rank 30, action 91 (30F50): leak: its activations are held to the end; 30B50 is missing"
    )
    assert [line.split()[1] for line in lines[1:-1]] == [str(rank) for rank in range(22, 38)]
    assert lines[-1] == "(24 more ranks)"
    assert max(map(len, lines[1:])) < 120


def test_costs_for_other_stages_are_refused() -> None:
    text = refusal(simulate, make_schedule("1f1b", 4, 8), Costs.uniform(3))
    assert "expected costs for 4 stages of the schedule, found 3" in text
