"""The simulator's times and bytes are those worked out by hand and of the fast one; what cannot run is refused."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.fast_simulation import FastSimulation
from lowtide.pipe.schedules.passes import complete
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import Action, Op, Schedule
from lowtide.pipe.schedules.simulator import simulate
from tests.kit.training import refusal
from tests.pipe.pipelines import forward_only, schedule_of, with_steps


def two_ranks(costs: Costs) -> list[list[tuple[str, float, float]]]:
    """When each action of two ranks' 1F1B with two microbatches begins and ends."""
    simulation = simulate(make_schedule("1f1b", 2, 2), costs)
    return [[(str(slot.action), slot.start, slot.end) for slot in slots] for slots in simulation.timeline]


def test_each_stage_has_its_own_times() -> None:
    kept, parameters = (7.0, 3.0), (100.0, 50.0)
    costs = Costs((1.0, 4.0), (2.0, 10.0), (1.0, 5.0), (1.0, 5.0), kept, kept, parameters)
    assert two_ranks(costs) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 15, 17), ("0B1", 29, 31)],
        [("1F0", 1, 5), ("1B0", 5, 15), ("1F1", 15, 19), ("1B1", 19, 29)],
    ]
    found = simulate(make_schedule("1f1b", 2, 2), costs)
    assert (found.makespan, found.busy, found.waits) == (31, (6, 28), (25, 0))
    assert (found.bubble, found.overhead) == pytest.approx((1 - 34 / 62, 31 / 28 - 1))
    bytes_of_ranks = [(peak.activation_bytes, peak.parameter_bytes, peak.total_bytes) for peak in found.peaks]
    assert bytes_of_ranks == [(14, 100, 114), (3, 50, 53)]


def test_a_message_takes_its_time_only_between_ranks() -> None:
    assert two_ranks(Costs.uniform(2, send=0.5)) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 5, 7), ("0B1", 8, 10)],
        [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5), ("1F1", 4.5, 5.5), ("1B1", 5.5, 7.5)],
    ]
    assert simulate(make_schedule("zb-v", 1, 4), Costs.uniform(2, send=100.0)).makespan == 2 * 4 * 3


def test_what_is_collected_after_all_backwards_but_the_last_comes_before_what_is_sent() -> None:
    assert two_ranks(replace(Costs.uniform(2), collect=(1.0, 0.5))) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4.5, 7.5), ("0B1", 7.5, 9.5)],
        [("1F0", 1, 2), ("1B0", 2, 4.5), ("1F1", 4.5, 5.5), ("1B1", 5.5, 7.5)],
    ]


def test_messages_in_the_lists_are_under_way_while_ranks_compute_unless_they_block() -> None:
    costs = Costs.uniform(2, send=0.5)
    schedule = complete(make_schedule("1f1b", 2, 2), costs)
    assert simulate(schedule, costs).makespan == 10
    # 0F0, its message, 0F1, its message (1RECV_F1 stands before 1F0), 1F0, 1B0, its message, 1F1, 1B1, its message, 0B1
    assert simulate(schedule, costs, blocking=True).makespan == 1 + 0.5 + 1 + 0.5 + 1 + 2 + 0.5 + 1 + 2 + 0.5 + 2


def test_a_message_is_under_way_when_both_ends_are_reached() -> None:
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    timeline = simulate(schedule_of(*rows, microbatches=2), Costs.uniform(2, send=3.0)).timeline
    starts = {str(slot.action): slot.start for row in timeline for slot in row}
    assert starts["1F0"] == 1 + 3  # sent at 1
    assert (starts["1RECV_F1"], starts["1F1"]) == (7, 7 + 3)  # 0SEND_F1 is reached at 2


def test_the_order_of_slots_puts_each_action_after_what_it_waits_for() -> None:
    for name in ("1f1b", "zb-v"):
        slots = {slot.action: slot for row in simulate(make_schedule(name, 3, 6)).timeline for slot in row}
        assert sorted(slot.order for slot in slots.values()) == list(range(len(slots)))
        for action, slot in slots.items():
            step = {"F": -1, "B": 1, "I": 1}.get(action.op.value)
            before = slots.get(Action(action.op, action.stage + step, action.microbatch)) if step else None
            assert before is None or (before.order < slot.order and before.end <= slot.start)


def test_a_forward_only_schedule_keeps_no_activations() -> None:
    simulation = simulate(forward_only(make_schedule("1f1b", 4, 8)))
    assert simulation.makespan == 8 + 3
    assert [(peak.activation_bytes, peak.in_flight) for peak in simulation.peaks] == [(1, 1)] * 4


def test_the_peak_of_the_sum_is_at_most_the_sum_of_the_peaks() -> None:
    # 2F0 runs with three activations and stage 2 alone gathered; stages 0 and 1 are gathered before.
    row = "0GATHER 1GATHER 0F0 1F0 0RELEASE 1RELEASE 2GATHER 2F0 2B0 2RELEASE 1GATHER 1B0 1RELEASE 0GATHER 0B0 0RELEASE"
    peaks = simulate(schedule_of(row, ranks=(0, 0, 0)), Costs.uniform(3, parameter_bytes=10.0)).peaks[0]
    assert (peaks.activation_bytes, peaks.parameter_bytes, peaks.total_bytes) == (3, 20, 22)


def placed(ranks: tuple[int, ...], num_lists: int = 2) -> None:
    simulate(Schedule("own", 2, 2, 1, ranks, ((),) * num_lists))


COSTS = Costs.uniform(2)
REFUSED: dict[str, Callable[[], object]] = {
    "forward of stage 0: expected 0 or more, found -1": lambda: replace(COSTS, forward=(-1.0, 1.0)),
    "kept_bytes of stage 0: expected at most activation_bytes, 1, found 2": lambda: replace(COSTS, kept_bytes=(2, 1)),
    "send: expected 0 or more, found -0.5": lambda: replace(COSTS, send=-0.5),
    "backward: expected a value for each of 2 stages, found 1 values": lambda: replace(COSTS, backward=(2.0,)),
    "collect: expected a value for each of 2 stages, found 1 values": lambda: replace(COSTS, collect=(1.0,)),
    "schedule own: stage 1 is placed on rank 2, expected a rank below 2": lambda: placed((0, 2)),
    "schedule own: rank 1 has no stage; place a stage on it, or use fewer ranks": lambda: placed((0, 0)),
    "schedule own: expected 2 entries in rank_of_stage, found 1": lambda: placed((0,)),
    "schedule own: expected 2 entries in actions, found 1": lambda: placed((0, 1), 1),
}


@pytest.mark.parametrize("text", REFUSED)
def test_costs_and_placements_that_cannot_be_are_refused(text: str) -> None:
    assert refusal(REFUSED[text]) == text


def drawn_costs(draw: random.Random, num_stages: int) -> Costs:
    """Stages that differ, and activations of which a part is kept."""
    f, b, i, w = (tuple(draw.uniform(0.5, 2.0) for _ in range(num_stages)) for _ in range(4))
    whole = tuple(float(draw.randint(10, 20)) for _ in range(num_stages))
    kept = tuple(float(draw.randint(0, 10)) for _ in range(num_stages))
    send = draw.choice([0.0, 0.3])
    collect, half = draw.choice([(), w]), draw.choice([(), i])
    return Costs(f, b, i, w, whole, kept, (0.0,) * num_stages, send, collect, half)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_fast_simulation_equals_the_simulator(name: str, ranks: int) -> None:
    """To the bit, but for the sum of a rank's own times."""
    draw, kind = random.Random(ranks), KINDS[name]
    for microbatches in (1, ranks, 2 * ranks, 2 * ranks + 1, 3 * ranks + 2):
        if microbatches < kind.microbatches_per_rank * ranks:
            continue
        for chunks in {kind.min_chunks, kind.max_chunks or 3}:
            schedule = make_schedule(name, ranks, microbatches, chunks)
            simulation = FastSimulation(schedule)
            for costs in (Costs.uniform(schedule.num_stages, send=0.25), drawn_costs(draw, schedule.num_stages)):
                (makespan, busy), simulated = simulation.outcome(costs), simulate(schedule, costs)
                assert makespan == simulated.makespan
                slots = [slot for of_rank in simulated.timeline for slot in of_rank]
                assert simulation.starts(costs) == pytest.approx([slot.start for slot in slots], abs=1e-9)
                assert busy == pytest.approx(simulated.busy)


def moments_of(row: Sequence[Action], own: Sequence[int], num_microbatches: int) -> set[tuple[int, ...]]:
    """Rows as `Computing` has them, by counting what was done before each action of a rank."""
    done, found = list[Action](), set()
    for action in row:
        forward, input_ends, ends = (
            [sum(one.op in ops and one.stage == stage for one in done) for stage in own]
            for ops in ((Op.F,), (Op.B, Op.I), (Op.B, Op.W))
        )
        is_left, is_ended = (
            [action.op in ops and action.stage == stage for stage in own] for ops in ((Op.B, Op.I), (Op.B, Op.I, Op.W))
        )
        held = [all_ - left - now for all_, left, now in zip(forward, input_ends, is_left, strict=True)]
        kept = [all_ - left - now for all_, left, now in zip(forward, ends, is_ended, strict=True)]
        flags = [int(number >= least) for least in (1, num_microbatches) for number in ends]
        found.add(("FBIW".index(action.op.value), own.index(action.stage), *held, *kept, *flags))
        done.append(action)
    return found


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_moments_know_what_other_microbatches_hold_and_which_stages_have_ended(name: str) -> None:
    schedule = make_schedule(name, 2, 4, KINDS[name].max_chunks or 2)
    simulation = FastSimulation(schedule)
    for found, own, row in zip(simulation.computing, simulation.stages, schedule.actions, strict=True):
        columns = np.column_stack([found.codes, found.places, found.held, found.kept, found.begun, found.ended])
        assert {tuple(one) for one in columns.tolist()} == moments_of(row, own, 4)


def test_ranks_that_wait_for_ever_are_named() -> None:
    turned = schedule_of("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", microbatches=2)
    assert "deadlock, 2 of 2 ranks wait forever" in refusal(FastSimulation, turned)


@pytest.mark.parametrize(
    ("rows", "message", "mark"),
    [
        (("0B0 0F0",), "rank 0, action 0 (0B0): the backward comes before 0F0", ">0B0<"),
        (("0F0 0W0 0I0",), "rank 0, action 1 (0W0): the weight half comes before the input half, 0I0", ">0W0<"),
        (("0I0 0F0 0W0",), "rank 0, action 0 (0I0): the backward comes before 0F0", ">0I0<"),
        (("0F0 0F0 0B0",), "rank 0, action 1 (0F0): it is already done at action 0", ">0F0<"),
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
