"""The simulated timeline of a step: what is exposed of its collectives, in the order in which they are called."""

from collections.abc import Callable
from types import ModuleType

import pytest


def test_little_of_a_large_models_collectives_is_exposed(script: Callable[[str], ModuleType]) -> None:
    timeline = script("timeline")
    machine = timeline.Machine(8, flops=450e12, bandwidth=330e9, memory=2800e9, latency=30e-6)
    shape = timeline.SHAPES["llama-8b"]
    runs = timeline.contenders(shape, machine)
    long, short = (
        {name: run(timeline.Work(shape, machine, tokens, recomputes=False)) for name, run in runs.items()}
        for tokens in (8192, 2048)
    )
    assert long["lowtide"].exposed_share < 0.02 < 0.15 < long["lowtide, one unit at a time"].exposed_share
    assert long["lowtide"].now < 1.001 * long["FSDP2"].now
    assert short["lowtide"].now < short["FSDP2"].now


def test_a_collective_waits_for_the_queue_and_for_what_was_launched_before_it(
    script: Callable[[str], ModuleType],
) -> None:
    timeline = script("timeline")
    line = timeline.Timeline(timeline.Machine(2, flops=1.0, bandwidth=1.0, memory=1.0, latency=1.0))
    first, second = line.start("gather", "a", 4), line.start("reduce", "b", 2)  # 3 s, then 2 s
    line.compute("a", 4.0)
    third = line.start("gather", "c", 2)
    line.wait(first)
    assert (line.now, line.exposed_share) == (4.0, 0.0)
    line.wait(third)
    assert [(span.start, span.end) for span in (first, second, third)] == [(0, 3), (3, 5), (5, 7)]
    assert line.now == 7.0 and line.exposed_share == pytest.approx(3 / 7)
