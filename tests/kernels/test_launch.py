"""A prepared launch passes to the device what Triton's own launch passes, and asks Triton only where it must."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def launches(outside_the_interpreter: list[Any]) -> list[Any]:
    return [found for found in outside_the_interpreter if isinstance(found, list)]


def test_it_passes_what_triton_passes(launches: list[Any]) -> None:
    started = {case: (through_triton, passed) for case, through_triton, passed in launches}
    through_triton, passed = started["first"]
    assert through_triton == 1 and passed[:4] == [3, 1, 1, 7] and passed[6] == [1600, 3200, 80, 0.5, 2, 32]
    assert started["same"] == (0, passed)
    assert started["other values"] == (0, [*passed[:6], [1600, 4800, *passed[6][2:]]])


def test_triton_starts_what_was_not_compiled_for_it(launches: list[Any]) -> None:
    assert {case for case, through_triton, _ in launches if through_triton} == {
        "first",
        "not aligned",  # Triton compiles it for other addresses
        "watched",  # by a hook of a profiler
        "other device",
    }
