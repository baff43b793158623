"""What benchmarks/offload_io.py makes of the seconds of its rounds."""

import pytest

from tests.benchmarks import Helper


def test_the_ideal_is_the_longer_of_transfers_and_work(helper: Helper) -> None:
    seconds = {"load": [1.0, 1.0], "save": [0.5, 0.5], "work": [1.2, 1.8], "window": [2.0, 2.0]}
    seconds |= {"fio beside": [1.9, 1.9], "work beside": [1.4, 2.0], "fio write": [0.4, 0.6], "fio read": [0.8, 0.9]}
    shares = [share for _, _, share in helper("offload_io").shares(seconds)]
    assert shares == [pytest.approx(one) for one in ([0.75, 0.9], [0.8, 1.2], [0.8, 0.9], [0.95, 1.0])]
