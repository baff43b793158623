"""Sends and receives are put where they can never deadlock and never make a step longer."""

import random
from collections import Counter

import pytest

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.passes import add_messages, forward_only, merge_backward
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op, Schedule, ScheduleError
from lowtide.pipe.schedules.simulator import simulate

GRID = [(1, 2), (2, 4), (3, 7), (4, 8)]


def random_costs(num_stages: int, seed: int) -> Costs:
    source = random.Random(seed)

    def times() -> tuple[float, ...]:
        return tuple(source.choice([0.0, 0.3, 1.0, 5.0]) for _ in range(num_stages))

    ones = (1.0,) * num_stages
    return Costs(times(), times(), times(), times(), ones, ones, ones, send=source.choice([0.0, 0.2, 2.0]))


@pytest.mark.parametrize("name", KINDS)
def test_no_order_deadlocks_even_if_every_send_and_receive_blocks(name: str) -> None:
    for p, m in GRID:
        for schedule in (make_schedule(name, p, m), forward_only(make_schedule(name, p, m))):
            simulate(add_messages(schedule), blocking=True)
            simulate(add_messages(merge_backward(schedule)), blocking=True)
            for seed in range(2):
                costs = random_costs(schedule.num_stages, seed)
                # In an order made for one machine, run on another.
                simulate(add_messages(schedule, costs), random_costs(schedule.num_stages, seed + 1), blocking=True)


def ways_of(schedule: Schedule) -> dict[tuple[int, int], tuple[list[str], list[str]]]:
    """(sender, receiver) -> what it starts to send, and what the other starts to receive, in the order of the lists."""
    found: dict[tuple[int, int], tuple[list[str], list[str]]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.op in (*SEND_OPS, *RECV_OPS):
                peer, is_send = schedule.peer_rank(action), action.op in SEND_OPS
                is_forward = action.op in (Op.SEND_F, Op.RECV_F)
                name = f"{max(action.stage, action.peer_stage)} {is_forward} {action.microbatch}"
                lists = found.setdefault((rank, peer) if is_send else (peer, rank), ([], []))
                lists[0 if is_send else 1].append(name)
    return found


def streams_run(schedule: Schedule) -> bool:
    """Whether all is done where messages have no tags, and one stream a rank for each way, to later ranks and to
    earlier ones: each waits for the one before it in its stream and for its other end, and a send for what made it.
    """
    compute = [[action for action in actions if action.op in COMPUTE_OPS] for actions in schedule.actions]
    streams: dict[tuple[int, bool], list[tuple[Action, int]]] = {}  # with the number of actions that stand before it
    for rank, row in enumerate(schedule.actions):
        num_before = 0
        for action in row:
            if action.op in (*SEND_OPS, *RECV_OPS):
                is_later = (schedule.peer_rank(action) > rank) == (action.op in SEND_OPS)
                streams.setdefault((rank, is_later), []).append((action, num_before))
            num_before += action.op in COMPUTE_OPS
    done: list[set[Action]] = [set() for _ in schedule.actions]
    at, is_moving = Counter[object](), True
    while is_moving:
        is_moving = False
        for rank, actions in enumerate(compute):
            while at[rank] < len(actions) and has_arrived(schedule, rank, actions[at[rank]], done[rank]):
                at[rank], is_moving = at[rank] + 1, True
        for (rank, is_later), messages in streams.items():
            if at[rank, is_later] == len(messages):
                continue
            action, num_before = messages[at[rank, is_later]]
            peer = schedule.peer_rank(action)
            others = streams[peer, is_later][at[peer, is_later] :]
            if action.op in SEND_OPS and num_before <= at[rank] and others and is_other_end(others[0][0], action):
                done[rank].add(action)
                done[peer].add(others[0][0])
                at[rank, is_later] += 1
                at[peer, is_later] += 1
                is_moving = True
    return all(at[rank] == len(actions) for rank, actions in enumerate(compute))


def has_arrived(schedule: Schedule, rank: int, action: Action, done: set[Action]) -> bool:
    """Whether what the action needs of other ranks is there."""
    needed = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}.get(action.op)
    receive = needed and Action(needed, action.stage, action.microbatch)
    return receive is None or receive not in schedule.actions[rank] or receive in done


def is_other_end(receive: Action, send: Action) -> bool:
    kinds = {Op.SEND_F: Op.RECV_F, Op.SEND_B: Op.RECV_B}
    return (receive.op, receive.stage, receive.microbatch) == (kinds[send.op], send.peer_stage, send.microbatch)


@pytest.mark.parametrize("name", KINDS)
def test_messages_need_no_tags(name: str) -> None:
    """Both ends start the messages of a way in the same order, whatever the machine for which the order was made."""
    for p, m in GRID:
        for schedule in (make_schedule(name, p, m), forward_only(make_schedule(name, p, m))):
            for costs in (None, *(random_costs(schedule.num_stages, seed) for seed in range(2))):
                with_messages = add_messages(schedule, costs)
                assert all(sent == received for sent, received in ways_of(with_messages).values())
                assert streams_run(with_messages)


def test_streams_find_an_order_that_deadlocks() -> None:
    schedule = add_messages(make_schedule("gpipe", 2, 2))
    first, second = schedule.actions
    swapped = [Action(Op.RECV_F, 1, 1), Action(Op.RECV_F, 1, 0), *(a for a in second if a.op is not Op.RECV_F)]
    assert streams_run(schedule) and not streams_run(schedule.replace_actions([first, swapped]))


@pytest.mark.parametrize("name", KINDS)
def test_messages_do_not_make_a_step_longer(name: str) -> None:
    for p, m in GRID:
        schedule = make_schedule(name, p, m)
        for seed in range(2):
            costs = random_costs(schedule.num_stages, seed)
            with_messages = simulate(add_messages(schedule, costs), costs)
            assert with_messages.makespan == simulate(schedule, costs).makespan


@pytest.mark.parametrize("name", KINDS)
def test_every_message_has_two_ends_and_stages_of_one_rank_need_none(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    lists = add_messages(schedule).actions
    crossings = sum(schedule.crosses(stage) for stage in range(schedule.num_stages))
    assert crossings == (6 if KINDS[name].is_v else schedule.num_stages - 1)
    for op in (*SEND_OPS, *RECV_OPS):
        assert sum(action.op is op for actions in lists for action in actions) == 8 * crossings
    if KINDS[name].is_v:  # stages 3 and 4 are both on rank 3
        assert Action(Op.SEND_F, 3, 0) not in lists[3] and Action(Op.RECV_B, 3, 0) not in lists[3]


@pytest.mark.parametrize("name", KINDS)
def test_the_order_of_what_is_computed_stays(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    lists = add_messages(schedule).actions
    assert tuple(tuple(action for action in row if action.op in COMPUTE_OPS) for row in lists) == schedule.actions


@pytest.mark.parametrize("name", KINDS)
def test_what_is_made_is_sent_at_once(name: str) -> None:
    makers = {Op.SEND_F: (Op.F,), Op.SEND_B: (Op.B, Op.I)}
    for row in add_messages(make_schedule(name, 4, 8)).actions:
        for index, action in enumerate(row):
            if action.op in SEND_OPS:
                before = [other for other in row[:index] if other.op in COMPUTE_OPS][-1]
                assert before.op in makers[action.op]
                assert (before.stage, before.microbatch) == (action.stage, action.microbatch)


def test_the_messages_of_1f1b_on_two_ranks() -> None:
    lists = [" ".join(map(str, row)) for row in add_messages(make_schedule("1f1b", 2, 3)).actions]
    assert lists == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0F2 0SEND_F2 0B1 0RECV_B2 0B2",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2",
    ]


def test_the_peer_of_a_message_is_the_other_stage_and_its_rank() -> None:
    schedule = make_schedule("zb-v", 4, 8)
    peers = {"2SEND_F0": 3, "3RECV_F0": 2, "5SEND_B0": 4, "4RECV_B0": 5, "0SEND_F1": 1, "7RECV_F0": 6}
    for text, stage in peers.items():
        assert Action.parse(text).peer_stage == stage
        assert schedule.peer_rank(Action.parse(text)) == schedule.rank_of_stage[stage]


def test_messages_are_not_added_twice() -> None:
    schedule = add_messages(make_schedule("1f1b", 2, 2))
    with pytest.raises(ScheduleError, match="schedule 1f1b: expected no sends and receives, found some"):
        add_messages(schedule)


def test_one_stage_needs_no_messages() -> None:
    schedule: Schedule = make_schedule("1f1b", 1, 3)
    assert add_messages(schedule) == schedule


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_has_at_most_four_messages_that_it_has_not_used(name: str) -> None:
    users = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}
    for p, m in ((2, 8), (4, 16), (8, 24)):
        for row in add_messages(make_schedule(name, p, m)).actions:
            unused: set[Action] = set()
            for action in row:
                if action.op in RECV_OPS:
                    unused.add(action)
                elif action.op in users:
                    unused.discard(Action(users[action.op], action.stage, action.microbatch))
                assert len(unused) <= 4
