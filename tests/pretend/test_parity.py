"""An engine on the pretended device gives the numbers of one on the CPU."""

from typing import Any

import pytest

from tests.models import TinyGPT, token_batch
from tests.ranks import RankPool
from tests.zero.training import Case, train

GPT = Case(TinyGPT, token_batch, steps=2, accumulation=2, clip=0.5)
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


def differences(case: Case, **changes: Any) -> list[str]:
    """What the device's training and the CPU's do not have alike, of one rank."""
    cpu = train(case.at(case.stage, config={"device": "cpu", **changes}))
    device = train(case.at(case.stage, config={"device": "auto", **changes}))
    return device.differences(cpu)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_alone(pretend_ranks: RankPool, stage: int, dtype: str) -> None:
    assert pretend_ranks(1, differences, GPT.at(stage), process_group=False, **DTYPES[dtype]) == [[]]
