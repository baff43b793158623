"""The search is exact: what it leaves out would not have been found."""

import gc
import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.plan.bounds import least_held
from lowtide.engine.plan.choice import Choice, Space
from lowtide.engine.plan.llama import Shape, batch, build, short_profiler
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.meta_run import MetaRun
from lowtide.engine.plan.pipelined import ScheduleRun, fast_simulation_of, memory_by_place, simulated_microbatches
from lowtide.engine.plan.plan import uncollected
from lowtide.engine.plan.planner import Planner, Profiler
from lowtide.engine.plan.search import SLOWEST, Bound, Found, Item, Result, Value, search
from lowtide.engine.plan.splits import PlannedSplits
from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.fast_simulation import FastSimulation
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from tests.plan.test_planned_experts import planner as expert_planner

ADAMW = {"optimizer": {"type": "adamw", "params": {}}, "bf16": {"enabled": True}}


def numbers(result: Result[int, None]) -> list[list[int]]:
    return [[one.number for one in part] for part in (result.best, result.front, result.beyond)]


def search_all(
    items: Sequence[Item],
    bound: Callable[[Item], Bound],
    evaluate: Callable[[Item, int], Found[Item, Value]],
    count: int = 10,
    num_beyond: int = 3,
) -> Result[Item, Value]:
    """Evaluate every item: the specification of `search`."""
    every = sorted((evaluate(item, number) for number, item in enumerate(items)), key=lambda found: found.order)
    fitting = [found for found in every if found.fits]
    front: list[Found[Item, Value]] = []
    for found in fitting:
        is_slow = found.seconds > SLOWEST * fitting[0].seconds
        if not is_slow and (not front or found.nbytes < front[-1].nbytes):
            front.append(found)
    limit = fitting[0].seconds if fitting else math.inf
    bounds = {found.number: bound(found.item) for found in every if not found.fits}
    beyond = [found for found in every if not found.fits and bounds[found.number][0] < limit]
    beyond.sort(key=lambda found: (*bounds[found.number][:2], found.number))
    return Result(tuple(fitting[:count]), tuple(front), tuple(beyond[:num_beyond]), len(items), len(items))


@pytest.mark.parametrize("seed", range(40))
def test_a_search_equals_looking_at_everything(seed: int) -> None:
    """Costs with many ties, and bounds from exact ones to none at all."""
    draw = random.Random(seed)
    count, kinds, slack = draw.randint(1, 60), draw.choice([3, 10, 1000]), draw.choice([0.0, 0.1, 1.0])
    costs = [(float(draw.randint(1, kinds)), float(draw.randint(1, kinds))) for _ in range(count)]
    limit = draw.uniform(0, kinds + 1)
    bounds = [
        (seconds * (1 - slack * draw.random()), least := nbytes * (1 - slack * draw.random()), least <= limit)
        for seconds, nbytes in costs
    ]

    def evaluate(item: int, number: int) -> Found[int, None]:
        seconds, nbytes = costs[item]
        return Found(item, None, seconds, nbytes, nbytes <= limit, number)

    items = list(range(count))
    found = search(items, bounds.__getitem__, evaluate, count=5)
    assert numbers(found) == numbers(search_all(items, bounds.__getitem__, evaluate, count=5))


SHAPE = Shape(layers=4, hidden=256, heads=4, vocabulary=512, sequence=64)


def planner_with(host_bytes: float = 2e12, num_hosts: int = 2, **base: Any) -> Planner:
    """A small model on a small machine, on which some choices fit."""
    machine = Machine(num_hosts, devices_per_host=4, device_bytes=40e6, reserved_bytes=0, host_bytes=host_bytes)
    return Planner(
        build(SHAPE), {**ADAMW, **base}, machine, partial(short_profiler, SHAPE), batch(SHAPE), least_tokens=16
    )


@pytest.fixture(scope="module")
def planner() -> Planner:
    return planner_with()


def choices(planner: Planner, *folders: str, num_samples: int = 32) -> list[Choice]:
    return list(Space(planner.machine, num_samples, planner.num_blocks, set(folders), can_split=planner.can_split))


def assert_bounds_are_below(planner: Planner, some: Sequence[Choice], count: int) -> None:
    for choice in random.Random(0).sample(some, count):
        (seconds, nbytes, fits), value = planner.bound(choice), planner.found(choice, 0)
        assert seconds <= value.seconds and nbytes <= value.nbytes and fits >= value.fits, choice


def test_degrees_that_do_not_divide_are_not_offered(planner: Planner) -> None:
    """4 heads, hosts of 4; more ranks share sequences by a ring; none that could be whole at as many tokens."""
    found = choices(planner)
    degrees = {(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 2)}
    assert {(one.tensor, one.sequence) for one in found} == degrees
    assert {one.rows % 2 for one in found if one.sequence > 1} == {1} and {one.expert for one in found} == {1}
    assert "heads(4) % tensor(8)" in (planner.fault(Choice(tensor=8)) or "")


def test_bounds_are_below_what_is_estimated(planner: Planner) -> None:
    assert_bounds_are_below(planner, choices(planner), 12)
    assert_bounds_are_below(planner, [one for one in choices(planner) if one.sequence > 1], 6)
    of_experts = expert_planner()
    every = choices(of_experts, num_samples=8)
    assert {one.expert for one in every} == {1, 2, 4}
    assert_bounds_are_below(of_experts, [one for one in every if one.expert > 1], 6)


def test_bounds_of_what_lies_in_files_are_below_too() -> None:
    folder = {"nvme_path": "files"}
    zero = {"offload_optimizer": folder, "offload_param": folder}
    made = planner_with(zero_optimization=zero, activation_checkpointing={"offload": folder})
    every = choices(made, "offload_optimizer", "offload_param", "offload_activations")
    assert_bounds_are_below(made, [one for one in every if "nvme" in vars(one).values()], 12)


def test_parts_of_tokens_over_stages_are_whole_between_them() -> None:
    made = planner_with(num_hosts=1, parallel={"tensor_sequence": True})
    every = choices(made)
    assert {(one.pipeline, one.tensor) for one in every} == {(1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (2, 2)}
    assert_bounds_are_below(made, [one for one in every if min(one.pipeline, one.tensor) > 1], 6)
    calls = [
        [call.kind for part in made.profile(1, 0, degrees=one).parts.values() for call in part.exchanges]
        for one in (Choice(tensor=2), Choice(tensor=2, pipeline=2, accumulation=2))
    ]
    assert calls[1].count("gather") == calls[0].count("gather") + 2  # behind the first stage, and in its backward


def test_layer_by_layer_bounds_are_below_and_two_passes_are_sent(planner: Planner) -> None:
    layered = planner_with(zero_optimization={"layered_gradient_accumulation": True})
    every = choices(layered, num_samples=64)
    assert {(one.pipeline, one.sequence) for one in every} == {(1, 1)} and {one.tensor for one in every} == {1, 2, 4}
    assert_bounds_are_below(layered, every, 12)
    found, plain = (made.estimate(Choice(stage=3, rows=1, accumulation=8)) for made in (layered, planner))
    # What the first and the last block share is gathered for each.
    assert 1 / 8 <= sum(found.sent.values()) / sum(plain.sent.values()) < 1.1 / 8
    assert found.step_seconds < plain.step_seconds


def test_bounds_know_what_the_host_holds() -> None:
    """Of a host with 6 MB for each device, less than the states of some choices, and than their activations."""
    small = planner_with(24e6)
    away = [one for one in choices(small) if "cpu" in (one.offload_optimizer, one.offload_activations)]
    left_out = 0
    for choice in random.Random(0).sample(away, 10):
        (_, _, fits), value = small.bound(choice), small.estimate(choice)
        assert fits or value.missing(small.machine), choice
        left_out += not fits and value.peak_bytes <= small.machine.usable_bytes
    assert left_out


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-v"])
@pytest.mark.parametrize("stage", [1, 3])
def test_places_that_are_alike_are_planned_as_each_of_them(planner: Planner, schedule: str, stage: int) -> None:
    choice = Choice(pipeline=2, schedule=schedule, stage=stage, accumulation=6)
    machine = planner.machine
    config = Config.load(choice.applied(ADAMW, machine.num_devices)).resolve(machine.num_devices)
    each = Blueprint.of(config, build(SHAPE), machine.num_devices, device="cuda", num_hosts=machine.num_hosts)
    of_places = memory_by_place(each, machine, planner.profile(1, 0))
    assert planner.estimate(choice).peak_bytes == max(peak for _, peak in of_places)


def test_choices_of_a_model_are_searched_exactly(planner: Planner) -> None:
    some = random.Random(0).sample(choices(planner), 40)
    found = search(some, planner.bound, planner.found, count=5)
    every = search_all(some, planner.bound, planner.found, count=5)
    assert [found.best, found.front, found.beyond] == [every.best, every.front, every.beyond]


@pytest.mark.parametrize("count", [21, 24])
def test_a_schedule_that_is_simulated_in_part_takes_as_long_and_as_much(count: int) -> None:
    """From twice as many microbatches as ranks on, each takes the time of the busiest rank."""
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"):
        counts, chunks = (simulated_microbatches(name, 4, count), count), KINDS[name].max_chunks or 2
        fewer, whole = (FastSimulation(make_schedule(name, 4, each, chunks)) for each in counts)
        costs = Costs.uniform(len(fewer.crosses))
        seconds = [ScheduleRun.of(one, costs, count).seconds for one in (fewer, whole)]
        held = [max(at.held.sum(axis=1).max() for at in one.computing) for one in (fewer, whole)]
        assert seconds[0] == pytest.approx(seconds[1], rel=0.02) and held[0] == held[1], name


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-h1", 2), ("zb-v", 2), ("dualpipe-v", 2)]
    + [("interleaved", chunks) for chunks in (2, 3, 4)],
)
def test_some_rank_holds_as_many_activations_as_bounds_say(name: str, chunks: int) -> None:
    """In a backward of some rank; of a step that is long enough all of its stages have gradients by then."""
    for ranks, factor in itertools.product((2, 3, 4, 8), (1, 1.5, 2)):
        count = int(ranks * factor)
        if count < ranks * KINDS[name].microbatches_per_rank:
            continue
        least, has_gradients = least_held(Choice(ranks, schedule=name, chunks=chunks, accumulation=count))
        simulation = fast_simulation_of(make_schedule(name, ranks, count, chunks))
        backwards = [
            (int(held.sum()), bool(begun.all()))
            for at in simulation.computing
            for code, held, begun in zip(at.codes, at.held, at.begun, strict=True)
            if code in (1, 2)
        ]
        assert any(held >= least and begun >= has_gradients for held, begun in backwards), (ranks, count)


def test_a_few_layers_stand_for_all() -> None:
    """Of a shape two layers are run: each part is as in a run of all of them."""
    shape = Shape(layers=4, hidden=64, heads=4, vocabulary=128, sequence=64)
    model, machine = build(shape), Machine(devices_per_host=4)
    short, whole = (
        Planner(model, ADAMW, machine, make_profiler, batch(shape), least_tokens=16)
        for make_profiler in (partial(short_profiler, shape), _whole_profiler)
    )
    for degrees in (Choice(), Choice(tensor=2, sequence=2)):
        for every in (0, 1, 2):
            assert short.profile(3, every, degrees=degrees) == whole.profile(3, every, degrees=degrees)


def _whole_profiler(blueprint: Blueprint) -> Profiler:
    model = build(Shape(layers=4, hidden=64, heads=4, vocabulary=128, sequence=64))
    made = Blueprint.of(blueprint.config, model, blueprint.parallel_dims.num_ranks, device=blueprint.device)
    return MetaRun(model, made.units, made.dtypes, blueprint.device, splits=PlannedSplits.of(blueprint)).profile


def test_no_garbage_is_looked_for_during_a_search() -> None:
    """And what was is so again, also where it fails."""
    with pytest.raises(ZeroDivisionError), uncollected():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()
