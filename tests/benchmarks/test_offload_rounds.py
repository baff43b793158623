"""What benchmarks/offload_io.py makes of the seconds of its rounds."""

from collections.abc import Callable
from types import ModuleType

import pytest


def test_the_ideal_is_the_longer_of_transfers_and_work(script: Callable[[str], ModuleType]) -> None:
    seconds = {"load": [1.0, 1.0], "save": [0.5, 0.5], "work": [1.2, 1.8], "window": [2.0, 2.0]}
    beside = {"fio beside": [1.9, 1.9], "work beside": [1.4, 2.0]}
    rounds = script("offload_io").Rounds(seconds | beside)
    assert rounds.ideal_shares() == pytest.approx([0.75, 0.9])
    assert rounds.ideal_shares_beside() == pytest.approx([0.95, 1.0])
