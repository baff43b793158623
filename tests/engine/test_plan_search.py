"""The search is exact: what it leaves out would not have been found."""

import random

import pytest

from lowtide.engine.planning.choice import Choice, Space
from lowtide.engine.planning.llama import Shape, batch, build, runs_of
from lowtide.engine.planning.machine import Machine
from lowtide.engine.planning.pipelined import Run
from lowtide.engine.planning.planner import Planner
from lowtide.engine.planning.search import Bound, Found, Result, search, search_all
from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.peaks import peaks_of_rank
from lowtide.pipe.schedules.recurrence import Recurrence
from lowtide.pipe.schedules.registry import make_schedule

ADAMW = {"optimizer": {"type": "adamw", "params": {}}, "bf16": {"enabled": True}}


def numbers(result: Result[int, None]) -> list[list[int]]:
    return [[one.number for one in part] for part in (result.best, result.front, result.beyond)]


@pytest.mark.parametrize("seed", range(200))
def test_a_search_equals_looking_at_everything(seed: int) -> None:
    """Costs with many ties, and bounds from exact ones to none at all."""
    draw = random.Random(seed)
    count, kinds, slack = draw.randint(1, 60), draw.choice([3, 10, 1000]), draw.choice([0.0, 0.1, 1.0])
    costs = [(float(draw.randint(1, kinds)), float(draw.randint(1, kinds))) for _ in range(count)]
    limit = draw.uniform(0, kinds + 1)
    bounds = [
        Bound(seconds * (1 - slack * draw.random()), least := nbytes * (1 - slack * draw.random()), least <= limit)
        for seconds, nbytes in costs
    ]

    def evaluate(item: int, number: int) -> Found[int, None]:
        seconds, nbytes = costs[item]
        return Found(item, None, seconds, nbytes, nbytes <= limit, number)

    items = list(range(count))
    found = search(items, bounds.__getitem__, evaluate, count=5)
    assert numbers(found) == numbers(search_all(items, bounds.__getitem__, evaluate, count=5))


@pytest.fixture(scope="module")
def planner() -> Planner:
    """A small model on a small machine, on which some choices fit."""
    shape = Shape(layers=4, hidden=256, heads=4, vocabulary=512, sequence=64)
    machine = Machine(num_hosts=2, devices_per_host=4, device_bytes=40e6, reserved_bytes=0)
    return Planner(build(shape), ADAMW, machine, runs_of(shape), batch(shape), least_tokens=16)


def choices(planner: Planner) -> list[Choice]:
    return list(Space(planner.machine, 32, planner.num_blocks, has_nvme=False, can_split=planner.can_split))


def test_degrees_that_do_not_divide_are_not_offered(planner: Planner) -> None:
    """4 heads, hosts of 4; more ranks share sequences by a ring; none that could be whole at as many tokens."""
    found = {(one.tensor, one.sequence) for one in choices(planner)}
    assert found == {(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 2)}
    assert {one.rows % 2 for one in choices(planner) if one.sequence > 1} == {1}
    assert not any(one.expert > 1 for one in choices(planner))
    assert "heads(4) / tensor(8)" in (planner.fault(Choice(tensor=8)) or "")


def test_degrees_that_the_config_does_not_take_are_not_offered() -> None:
    """Stages take all tokens: see `pipeline_faults`."""
    shape = Shape(layers=4, hidden=256, heads=4, vocabulary=512, sequence=64)
    base = {**ADAMW, "parallel": {"tensor_sequence": True}}
    made = Planner(build(shape), base, Machine(devices_per_host=4), runs_of(shape), batch(shape))
    found = {(one.pipeline, one.tensor) for one in Space(made.machine, 32, 4, can_split=made.can_split)}
    assert found == {(1, 1), (1, 2), (1, 4)}


def test_bounds_are_below_what_is_estimated(planner: Planner) -> None:
    some = random.Random(0).sample(choices(planner), 120)
    some += random.Random(0).sample([one for one in choices(planner) if one.sequence > 1], 40)
    for choice in some:
        bound, value = planner.bound(choice), planner.found(choice, 0)
        assert bound.seconds <= value.seconds and bound.nbytes <= value.nbytes and bound.fits >= value.fits, choice


def test_choices_of_a_model_are_searched_exactly(planner: Planner) -> None:
    for seed in range(10):
        some = random.Random(seed).sample(choices(planner), 40)
        found = search(some, planner.bound, planner.found, count=5)
        every = search_all(some, planner.bound, planner.found, count=5)
        assert [found.best, found.front, found.beyond] == [every.best, every.front, every.beyond]


def test_a_schedule_that_is_simulated_in_part_takes_as_long() -> None:
    """From twice as many microbatches as ranks on, each takes the time of the busiest rank."""
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"):
        fewer, whole = (Recurrence(make_schedule(name, 4, count)) for count in (8, 24))
        costs = Costs.uniform(len(fewer.crosses))
        assert Run.of(fewer, costs, 24).seconds == pytest.approx(Run.of(whole, costs, 24).seconds, rel=0.02), name


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4), ("zb-v", 2), ("dualpipe-v", 2)],
)
def test_some_rank_holds_as_many_activations_as_with_1f1b(name: str, chunks: int) -> None:
    """Which the bounds of a pipeline rely on."""
    for num_ranks in (2, 3, 4, 8):
        for count in (2 * num_ranks, 2 * num_ranks + 1, 4 * num_ranks):
            schedule = make_schedule(name, num_ranks, count, chunks)
            costs = Costs.uniform(schedule.num_stages)
            most = max(peaks_of_rank(schedule, costs, rank).activation_bytes for rank in range(num_ranks))
            assert most >= chunks * num_ranks
