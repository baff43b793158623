"""Updates that round, or that look at whole parameters, give the same bits on any number of ranks, also resumed."""

from pathlib import Path
from typing import Any

import torch

from tests.engine.test_optimizer_offload import offloaded
from tests.kit.models import same_rows, short_gpt
from tests.kit.ranks import RankPool
from tests.kit.training import Case
from tests.zero import test_whole_update, test_without_masters

CONFIGS: dict[str, Any] = {
    **{str(masters): test_without_masters.case_of(masters).config for masters in test_without_masters.FORMS},
    **test_whole_update.CONFIGS,
}
CASES = {name: Case(short_gpt, same_rows, steps=2, config=config) for name, config in CONFIGS.items()}


def test_a_resume_on_other_ranks_is_the_run_without_a_break(ranks: RankPool, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in CASES}
    go_on = test_without_masters.go_on
    whole = ranks(1, go_on, [(case, folders[name] / "whole") for name, case in CASES.items()], 0, 2)[0]
    ranks(4, go_on, [(case.at(3), folders[name]) for name, case in CASES.items()], 0, 1, looks=False)
    moved = [(offloaded(case.at(1), tmp_path), folders[name]) for name, case in CASES.items()]
    for name, expected, found in zip(CASES, whole, ranks(2, go_on, moved, 1, 2)[0], strict=True):
        assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == [], name
