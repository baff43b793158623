"""In a cgroup with the planned bytes and 3 % more a job ends well, with 3 % less it is killed."""

import random
import re
from pathlib import Path

import pytest

from lowtide.engine.plan.measured import Measured, Speeds
from tests.benchmarks import Helper


def test_where_no_cgroup_can_be_made_it_is_said(
    helper: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroup = helper("cgroup_law")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "missing")
    said = re.escape("No such file or directory; it takes root and a writable")
    with pytest.raises(cgroup.NoCgroup, match=f"cannot make .*{said}"), cgroup.memory_group(1 << 30):
        pass
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    with pytest.raises(cgroup.NoCgroup, match="has no memory controller"), cgroup.memory_group(1 << 30):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_law(helper: Helper) -> None:
    law = helper("cgroup_law")
    try:
        with law.memory_group(None):
            pass
    except law.NoCgroup as error:
        pytest.skip(str(error))
    case = law.drawn(random.Random(8), 1)  # not at the edge of the 3 %
    planned = law.planned_bytes(case, Measured({1: Speeds(1, 1, {})}), timeout=120.0)
    assert law.judged(case, planned, law.parse_arguments(["--steps", "2"])).failure is None
