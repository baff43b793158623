"""In a cgroup with the planned bytes and 3 % more a job ends well, with 3 % less it is killed."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from lowtide.engine.plan.measured import Measured, Speeds
from lowtide.engine.plan.measuring.measure import environment_of
from lowtide.engine.plan.measuring.process import name_of, process_bytes


def test_where_no_cgroup_can_be_made_it_is_said(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroup = script("cgroup_law")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "missing")
    said = re.escape("No such file or directory; it takes root and a writable")
    with pytest.raises(cgroup.NoCgroup, match=f"cannot make .*{said}"):
        cgroup.MemoryGroup(1 << 30)
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    with pytest.raises(cgroup.NoCgroup, match="has no memory controller"):
        cgroup.MemoryGroup(1 << 30)
    assert list(tmp_path.iterdir()) == []


def test_the_law(script: Callable[[str], ModuleType]) -> None:
    law = script("cgroup_law")
    try:
        law.MemoryGroup(None).close()
    except law.NoCgroup as error:
        pytest.skip(str(error))
    case = law.drawn(random.Random(2), 2)  # a small one
    kind = bool(case.config["activation_checkpointing"]["every"]), "bf16" in case.config
    taken = process_bytes(lambda count, rank: environment_of(count, rank, 0), [(1, *kind)])
    measured = Measured({1: Speeds(1, 1, {})}, {name_of(2, *kind): taken[name_of(1, *kind)]})
    outcome = law.judged(case, law.planned_bytes(case, measured), law.parse_arguments(["--steps", "2"]))
    assert outcome.holds, outcome
