"""What benchmarks/offload_io.py makes of the seconds of its rounds."""

import pytest

from tests.benchmarks import Helper


def test_the_ideal_is_the_longer_of_transfers_and_work(helper: Helper) -> None:
    seconds = {"load": [1.0, 1.0], "save": [0.5, 0.5], "work": [1.2, 1.8], "window": [2.0, 2.0]}
    seconds |= {"fio write": [0.4, 0.6], "fio read": [0.8, 0.9]}
    row_of = helper("_harness").row_of
    rows = [row_of(name, *({"seconds": one} for one in found)) for name, found in seconds.items()]
    _, of_fio, of_ideal = helper("offload_io").columns(rows, 10**9)
    found = {row.contender.name: (of_fio.value(row), of_ideal.value(row)) for row in rows}
    assert found["window"] == ([], pytest.approx([0.75, 0.9]))
    assert found["save"] == (pytest.approx([0.8, 1.2]), []) and found["load"] == (pytest.approx([0.8, 0.9]), [])
    assert found["work"] == ([], [])
