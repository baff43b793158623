"""How many microbatches each schedule holds at most, rank by rank, is that of its closed form."""

import pytest

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.registry import make_schedule
from lowtide.pipe.schedules.simulator import simulate

GRID = [(p, m) for p in (1, 2, 3, 6) for m in (1, 2, 5, 6, 7, 20)]


def in_flight(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> list[int]:
    return [peaks.in_flight for peaks in simulate(make_schedule(name, ranks, microbatches, chunks)).peaks]


def activations(name: str, ranks: int, microbatches: int, chunks: int = 1) -> list[float]:
    """In microbatches of a rank's share of the model, with all of it kept from I to W."""
    schedule = make_schedule(name, ranks, microbatches, chunks)
    costs = Costs.uniform(schedule.num_stages, activation_bytes=1 / chunks)
    return [peaks.activation_bytes for peaks in simulate(schedule, costs).peaks]


@pytest.mark.parametrize(("p", "m"), GRID)
def test_gpipe_holds_all_microbatches(p: int, m: int) -> None:
    assert in_flight("gpipe", p, m) == [m] * p


@pytest.mark.parametrize(("p", "m"), GRID)
def test_1f1b_holds_as_many_as_there_are_ranks_from_here_on(p: int, m: int) -> None:
    assert in_flight("1f1b", p, m) == [min(m, p - rank) for rank in range(p)]


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 6])
def test_interleaved_holds_its_warmup_and_one(p: int, chunks: int) -> None:
    for m in (p, 2 * p, 5 * p):
        warmup = [(chunks - 1) * p + 2 * (p - 1 - rank) for rank in range(p)]
        assert in_flight("interleaved", p, m, chunks) == [min(count + 1, chunks * m) for count in warmup]


@pytest.mark.parametrize(("p", "m"), GRID)
def test_zb_h1_holds_no_more_than_1f1b_on_its_first_rank_even_if_w_needs_all_of_it(p: int, m: int) -> None:
    assert activations("zb-h1", p, m) == [min(m, p)] * p


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 6])
def test_chunks_of_zb_h1_take_no_more_memory(p: int, chunks: int) -> None:
    for m in range(p, 3 * p + 1):
        if 2 * (m % p) >= p or m % p == 0:
            assert activations("zb-h1", p, m, chunks) == pytest.approx([p] * p)


@pytest.mark.parametrize("p", [1, 2, 3, 6])
def test_zb_v_holds_on_every_rank_what_1f1b_holds_on_its_first(p: int) -> None:
    for m in (max(2 * p - 1, 1), 2 * p, 5 * p):
        assert activations("zb-v", p, m, 2) == [p] * p
    for m in range(1, 2 * p):
        assert max(activations("zb-v", p, m, 2)) <= p


@pytest.mark.parametrize("p", [1, 2, 3, 6])
def test_dualpipe_v_holds_half_a_microbatch_more(p: int) -> None:
    for m in (2 * p, 2 * p + 3, 5 * p):
        assert activations("dualpipe-v", p, m, 2) == [p + 0.5] * p


def test_what_w_does_not_need_is_freed_after_i() -> None:
    schedule = make_schedule("zb-h1", 4, 8)
    costs = Costs.uniform(4, activation_bytes=10.0, kept_bytes=4.0)
    # Rank 3 has one microbatch before its I at a time, and three that wait for W.
    assert simulate(schedule, costs).peaks[3].activation_bytes == 10 + 3 * 4
    assert simulate(schedule, costs).peaks[0].activation_bytes == 40
