"""With a part of the tokens on each rank between split layers a model trains as it does in one process."""

from typing import Any

import pytest

from tests.parallel.test_tensor_training import CASES, TOLERANCE, plainly
from tests.ranks import RankPool
from tests.zero.training import Case, assert_close, train_all


def parts(case: Case, stage: int, route: str = "auto", tensor: int = 2, **config: Any) -> Case:
    """Nine tokens, which the ranks do not divide."""
    parallel = {"tensor": tensor, "tensor_sequence": True}
    return case.at(stage, config={"parallel": parallel, "communication": {"route": route}, **config})


@pytest.mark.parametrize("name", CASES)
def test_models_of_others_train_as_in_one_process(ranks: RankPool, name: str) -> None:
    stages = (0, 1, 2, 3) if name == "llama" else (3,)
    expected = plainly(CASES[name], 1)
    for outcome in ranks(2, train_all, [parts(CASES[name], stage) for stage in stages])[0]:
        assert_close(outcome, expected, TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "t5"])
def test_four_ranks_train_as_one(ranks: RankPool, name: str) -> None:
    case = CASES[name]
    recomputed = parts(case, 3, "sockets", 4, activation_checkpointing={"every": 1})
    for outcome in ranks(4, train_all, [parts(case, 1, tensor=4), recomputed])[0]:
        assert_close(outcome, plainly(case, 1), TOLERANCE, TOLERANCE)
