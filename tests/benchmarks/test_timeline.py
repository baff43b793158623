"""The simulated timeline of a step: what is exposed of its collectives, in the order in which they are called."""

from collections.abc import Callable
from types import ModuleType

from lowtide.engine.plan.machine import Machine


def test_little_of_a_large_models_collectives_is_exposed(script: Callable[[str], ModuleType]) -> None:
    timeline = script("timeline")
    machine = Machine()
    shape = timeline.SHAPES["llama-8b"]
    runs = timeline.contenders(shape, machine)
    long, short = (
        {name: run(timeline.Work(shape, machine, tokens, recomputes=False)) for name, run in runs.items()}
        for tokens in (8192, 2048)
    )
    assert long["lowtide"].exposed_share < 0.02 < 0.15 < long["lowtide, one unit at a time"].exposed_share
    assert long["lowtide"].now < 1.001 * long["FSDP2"].now
    assert short["lowtide"].now < short["FSDP2"].now
