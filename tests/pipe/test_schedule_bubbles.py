"""The idle time of each schedule is that of its closed form, over grids of ranks, microbatches, chunks and costs."""

import pytest

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.registry import make_schedule
from lowtide.pipe.schedules.simulator import Simulation, simulate

RANKS = (1, 2, 3, 6)
COSTS = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (3.0, 5.0, 2.0))  # F, I, W of a rank's share of the model


def run(name: str, ranks: int, microbatches: int, chunks: int, costs: tuple[float, float, float]) -> Simulation:
    """A step in which a rank's stages divide its costs evenly."""
    schedule = make_schedule(name, ranks, microbatches, chunks)
    forward, input_backward, weight_backward = (cost / chunks for cost in costs)
    per_stage = Costs.uniform(
        schedule.num_stages, forward=forward, input_backward=input_backward, weight_backward=weight_backward
    )
    return simulate(schedule, per_stage)


def idle(simulation: Simulation) -> float:
    """The time of a step that is not work; every rank has the same work."""
    return float(simulation.makespan - simulation.busy[0])


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_gpipe_and_1f1b_is_p_less_1_over_m_plus_p_less_1(
    name: str, costs: tuple[float, float, float]
) -> None:
    for p in RANKS:
        for m in (1, 2, 3, 5, 8, 17):
            simulation = run(name, p, m, 1, costs)
            assert simulation.bubble == pytest.approx((p - 1) / (m + p - 1))
            assert simulation.overhead == pytest.approx((p - 1) / m)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("chunks", [2, 3])
def test_the_bubble_of_interleaved_is_p_less_1_over_v_m_of_the_ideal(
    chunks: int, costs: tuple[float, float, float]
) -> None:
    for p in RANKS:
        for rounds in (1, 2, 5):
            simulation = run("interleaved", p, rounds * p, chunks, costs)
            assert simulation.overhead == pytest.approx((p - 1) / (chunks * rounds * p))


@pytest.mark.parametrize("costs", COSTS)
def test_the_idle_time_of_zb_h1_is_p_less_1_times_f_plus_i_less_w(costs: tuple[float, float, float]) -> None:
    forward, input_backward, weight_backward = costs
    for p in RANKS:
        for m in (p, p + 1, 2 * p, 3 * p + 2):
            expected = (p - 1) * (forward + input_backward - weight_backward)
            assert idle(run("zb-h1", p, m, 1, costs)) == pytest.approx(expected)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks_divide_the_idle_time_of_zb_h1(chunks: int, costs: tuple[float, float, float]) -> None:
    forward, input_backward, weight_backward = costs
    for p in RANKS:
        for m in (p, 2 * p, 3 * p):
            expected = (p - 1) * (forward + input_backward - weight_backward) / chunks
            assert idle(run("zb-h1", p, m, chunks, costs)) == pytest.approx(expected)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_rounds_that_are_not_full_add_no_idle_time_to_zb_h1(chunks: int) -> None:
    for p in RANKS:
        for m in range(p, 3 * p + 1):
            assert idle(run("zb-h1", p, m, chunks, (1.0, 1.0, 1.0))) == pytest.approx((p - 1) / chunks)


def test_no_rank_of_zb_v_waits_between_its_first_and_its_last_action_where_f_i_and_w_take_the_same_time() -> None:
    for p in RANKS:
        for m in (max(2 * p - 1, 1), 2 * p, 3 * p + 1, 6 * p):
            simulation = run("zb-v", p, m, 2, (1.0, 1.0, 1.0))
            assert simulation.waits == pytest.approx([0.0] * p)
            # What is left is the way of the first microbatch to the last rank, in half-size stages.
            assert idle(simulation) == pytest.approx((p - 1) / 2)


def test_dualpipe_v_has_the_idle_time_of_zb_v_where_f_i_and_w_take_the_same_time() -> None:
    for p in RANKS:
        for m in (2 * p, 2 * p + 1, 5 * p):
            assert idle(run("dualpipe-v", p, m, 2, (1.0, 1.0, 1.0))) == pytest.approx((p - 1) / 2)


@pytest.mark.parametrize(
    ("name", "chunks"), [("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-h1", 2), ("zb-v", 2)]
)
def test_it_is_no_slower_than_1f1b_for_any_number_of_microbatches_from_p_on(name: str, chunks: int) -> None:
    for p in RANKS:
        for m in range(p, 3 * p + 1):
            plain = run("1f1b", p, m, 1, (1.0, 1.0, 1.0)).makespan
            assert run(name, p, m, chunks, (1.0, 1.0, 1.0)).makespan <= plain * (1 + 1e-9)
