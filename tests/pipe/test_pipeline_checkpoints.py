"""A checkpoint of any pipeline loads at any other, and without one: state bitwise, and the losses go on."""

from pathlib import Path

import pytest

from tests.engine.saving import load_and_go_on, save_and_go_on
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case
from tests.pipe.pipelines import deep_tied_gpt, pipelined

CASE = Case(deep_tied_gpt, models.token_batch, clip=0.5, accumulation=2)
V = pipelined(CASE.at(1), 2, "zb-v")
SHARDED = pipelined(CASE.at(3), 2, "interleaved")
TRIPS: list[tuple[int, Case, list[tuple[int, Case]]]] = [  # what saves on so many ranks, and what loads
    (1, CASE, [(2, V)]),
    (2, V, [(1, CASE), (2, V), (4, SHARDED)]),
    (4, SHARDED, [(1, CASE)]),
]


@pytest.mark.parametrize(("num_ranks", "case", "others"), TRIPS)
def test_every_checkpoint_loads_everywhere(
    ranks: RankPool, tmp_path: Path, num_ranks: int, case: Case, others: list[tuple[int, Case]]
) -> None:
    before = ranks(num_ranks, save_and_go_on, case, tmp_path, num_ranks, "one", steps=1, after=1)[0]
    for size, other in others:
        found = ranks(size, load_and_go_on, other, tmp_path, size, "one", steps=1, after=1)[0]
        found.restored = dict(sorted(found.restored.items()))
        before.restored = dict(sorted(before.restored.items()))
        assert found.state_differences(before) == [], (size, other)
        assert found.losses == (before.losses if other is case else pytest.approx(before.losses, rel=1e-5))
