"""`--bind cores`: what the plan says of cores holds in the ranks."""

import json
import os
from pathlib import Path

import pytest

from tests.launch.jobs import Job

WRITES_CORES = """
import json, os, pathlib
allowed = sorted(os.sched_getaffinity(0))
pathlib.Path("cores" + os.environ["RANK"]).write_text(json.dumps([allowed, os.environ["OMP_NUM_THREADS"]]))
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to cores")


def cores(folder: Path, num_ranks: int, bind: str) -> list[set[int]]:
    """What each rank may use."""
    status, _, err = Job(folder, WRITES_CORES, "--nproc", str(num_ranks), "--bind", bind).finish()
    assert status == 0, err
    return [set(json.loads((folder / f"cores{rank}").read_text())[0]) for rank in range(num_ranks)]


def test_each_rank_has_its_own_share(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip(f"two shares need two cores, found {len(allowed)}")
    first, second = cores(tmp_path, 2, "cores")
    assert first and second and not first & second and first | second <= allowed


def test_a_rank_alone_has_all(tmp_path: Path) -> None:
    assert cores(tmp_path, 1, "cores") == [os.sched_getaffinity(0)]


def test_unbound_ranks_may_use_what_the_launcher_may(tmp_path: Path) -> None:
    assert cores(tmp_path, 2, "none") == [os.sched_getaffinity(0)] * 2


def test_the_binding_is_within_that_of_the_launcher(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert cores(tmp_path, 1, "cores") == [{min(allowed)}]
    finally:
        os.sched_setaffinity(0, allowed)
