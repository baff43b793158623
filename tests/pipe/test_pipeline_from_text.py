"""A schedule from a text file runs as it stands: with messages, gathers, reduces and steps, or without."""

from pathlib import Path

import pytest

from lowtide.pipe.schedules.passes import complete
from lowtide.pipe.schedules.registry import make_schedule
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, train_all
from tests.pipe.pipelines import MICROBATCHES, deep_gpt, pipelined, with_steps

SOCKETS = {"communication": {"transport": "sockets"}}
CASE = Case(deep_gpt, models.token_batch, accumulation=MICROBATCHES, steps=1, config=SOCKETS)


@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 0), (4, 3)])
def test_every_part_of_a_schedule_may_be_in_the_file(
    ranks: RankPool, tmp_path: Path, num_ranks: int, stage: int
) -> None:
    schedule = make_schedule("zb-v", 2, MICROBATCHES)
    variants = {"all": with_steps(complete(schedule, gathers=True))}
    if stage == 0:
        variants |= {"compute": schedule, "messages": complete(schedule)}
    cases = [pipelined(CASE.at(stage), 2, "zb-v")]
    for name, variant in variants.items():
        path = tmp_path / f"{name}.txt"
        path.write_text(variant.to_text())
        cases.append(pipelined(CASE.at(stage), 2, str(path)))
    expected, *outcomes = ranks(num_ranks, train_all, cases, timeout=120)[0]
    for name, outcome in zip(variants, outcomes, strict=True):
        assert not expected.differences(outcome), name
