"""bf16 against plain torch with the same casts, and the dtypes of sending and accumulating gradients."""

from functools import partial
from typing import Any

import torch

from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, assert_alike, train_all
from tests.zero.delayed_update import Dtypes, train_mixed

BF16 = {"bf16": {"enabled": True}}
GPT = Case(models.short_gpt, models.token_batch, steps=2, config=BF16)
MLP = Case(models.mlp, models.vector_batch, config=BF16)
STAGES = (0, 3)  # all of them agree: tests/laws


def assert_near(found: Outcome, expected: Outcome, rtol: float, what: object = "") -> None:
    for name in ("norms", "losses"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=0, msg=f"{what}: {{}}".format)


def test_bf16_equals_plain_torch_with_the_same_casts(ranks: RankPool) -> None:
    """Bitwise but for the norm; with clipping a weight in a hundred may be one rounding of bfloat16 off."""
    cases = [MLP, MLP.at(0, accumulation=2, clip=0.05), GPT.at(0, accumulation=2, clip=0.05), GPT]
    grid = [(number, stage) for number in range(len(cases)) for stage in STAGES]
    plain = [train_mixed(case, 2, Dtypes(torch.bfloat16)) for case in cases]
    found = ranks(2, train_all, [cases[number].at(stage) for number, stage in grid])[0]
    for (number, stage), outcome in zip(grid, found, strict=True):
        expected, what = plain[number], (number, stage)
        assert_near(outcome, expected, 1e-2, what)
        assert list(outcome.state) == list(expected.state)
        assert {value.dtype for value in outcome.state.values()} == {torch.bfloat16}, what
        differing = sum(int((outcome.state[name] != value).sum()) for name, value in expected.state.items())
        if cases[number].accumulation == 1:
            assert outcome.losses == expected.losses and differing == 0, what
        assert differing <= 0.01 * sum(value.numel() for value in expected.state.values()), what


def expected_of(case: Case, **options: Any) -> Outcome:
    """With other dtypes than float32 in the place of one."""
    make = options.pop("make_optimizer", None)
    more = {"make_optimizer": make} if make else {}
    expected = train_mixed(case, 2, Dtypes(torch.float32, **options), **more)
    plain = train_mixed(case, 2, Dtypes(torch.float32), **more)
    assert abs(expected.norms[0] - plain.norms[0]) > 1e-5 * plain.norms[0], "the rounding must show"
    return expected


def test_gradients_are_sent_in_the_communication_data_type(ranks: RankPool) -> None:
    case = Case(models.mlp, models.vector_batch, config={"communication_data_type": "bf16"})
    routes = [{"communication": {"transport": transport}} for transport in ("shared_memory", "sockets")]
    outcomes = ranks(2, train_all, [case.at(stage, config=route) for route in routes for stage in STAGES])[0]
    assert_near(outcomes[0], expected_of(case, reduce=torch.bfloat16), 1e-6)
    assert_alike(outcomes)
    summed = [case.at(stage, accumulation=3, config={**BF16, **route}) for route in routes for stage in (0, 1)]
    assert_alike(ranks(2, train_all, summed)[0], "the sum of microbatches is rounded once")


def test_a_backend_sums_in_the_communication_data_type(ranks: RankPool) -> None:
    """Its sum is rounded once more, and added to what has another dtype."""
    config = {"communication_data_type": "bf16", "communication": {"transport": "native"}}
    case = Case(models.mlp, models.vector_batch, accumulation=2, config=config)
    expected = expected_of(case, reduce=torch.bfloat16)
    for outcome in ranks(2, train_all, [case.at(stage) for stage in STAGES])[0]:
        assert_near(outcome, expected, 2**-8)


def test_gradients_accumulate_in_grad_accum_dtype(ranks: RankPool) -> None:
    # By an update of the same bits on every processor: its last bit flips a rounding to bfloat16 in a later step.
    config = {"data_types": {"grad_accum_dtype": "bf16"}, "optimizer": {"type": "sgd", "params": {"lr": 2**-4}}}
    case = Case(models.mlp, models.vector_batch, accumulation=3, config=config)
    expected = expected_of(case, accumulate=torch.bfloat16, make_optimizer=partial(torch.optim.SGD, lr=2**-4))
    for stage, outcome in zip(STAGES, ranks(2, train_all, [case.at(stage) for stage in STAGES])[0], strict=True):
        assert_near(outcome, expected, 1e-6 if stage >= 2 else 1e-2)  # below, each rank adds its microbatches first
