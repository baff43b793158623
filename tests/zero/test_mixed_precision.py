"""bf16 against plain torch with the same casts, and the dtypes of sending and accumulating gradients."""

import pytest
import torch

from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, train_all
from tests.zero.mixed_precision import Dtypes, train_mixed

BF16 = {"bf16": {"enabled": True}}
GPT = Case(models.short_gpt, models.token_batch, steps=2, config=BF16)
MLP = Case(models.mlp, models.vector_batch, config=BF16)
STAGES = (0, 1, 2, 3)
ROUTES = ("shared_memory", "sockets")


def assert_close(found: Outcome, expected: Outcome, what: object) -> None:
    """Bitwise but for the norm; with clipping a weight in a hundred may be one rounding of bfloat16 off."""
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-2, atol=0, msg=lambda m: f"{what}: {m}")
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-2, atol=0, msg=lambda m: f"{what}: {m}")
    assert list(found.state) == list(expected.state)
    differing = total = 0
    for name, value in expected.state.items():
        assert found.state[name].dtype == torch.bfloat16, what
        differing += int((found.state[name] != value).sum())
        total += value.numel()
    assert differing <= 0.01 * total, f"{what}: {differing} of {total} values differ"


@pytest.mark.parametrize("world_size", [1, 2])
def test_bf16_equals_plain_torch_with_the_same_casts(ranks: RankPool, world_size: int) -> None:
    cases = [MLP, MLP.at(0, accumulation=2, clip=0.05), GPT.at(0, accumulation=2, clip=0.05), GPT]
    grid = [(number, stage) for number in range(len(cases)) for stage in STAGES if (number + stage + world_size) % 2]
    plain = [train_mixed(case, world_size, Dtypes(torch.bfloat16)) for case in cases]
    found = ranks(world_size, train_all, [cases[number].at(stage) for number, stage in grid])[0]
    for (number, stage), outcome in zip(grid, found, strict=True):
        expected, what = plain[number], (number, stage)
        if cases[number].accumulation == 1:
            assert outcome.losses == expected.losses, what
            assert [n for n, value in expected.state.items() if not torch.equal(outcome.state[n], value)] == [], what
        assert_close(outcome, expected, what)


def test_gradients_are_sent_in_the_communication_data_type(ranks: RankPool) -> None:
    case = Case(models.mlp, models.vector_batch, config={"communication_data_type": "bf16"})
    grid = [case.at(stage, config={"communication": {"transport": r}}) for r in ROUTES for stage in STAGES]
    expected = train_mixed(case, 2, Dtypes(torch.float32, reduce=torch.bfloat16))
    plain = train_mixed(case, 2, Dtypes(torch.float32))
    assert abs(expected.norms[0] - plain.norms[0]) > 1e-5 * plain.norms[0], "the rounding must show"
    first, *others = ranks(2, train_all, grid)[0]
    torch.testing.assert_close(first.norms, expected.norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(first.losses, expected.losses, rtol=1e-6, atol=0)
    for outcome in others:
        assert first.differences(outcome) == []


def test_a_backend_sums_in_the_communication_data_type(ranks: RankPool) -> None:
    """Its sum is rounded once more, and added to what has another dtype."""
    config = {"communication_data_type": "bf16", "communication": {"transport": "native"}}
    case = Case(models.mlp, models.vector_batch, accumulation=2, config=config)
    expected = train_mixed(case, 2, Dtypes(torch.float32, reduce=torch.bfloat16))
    for outcome in ranks(2, train_all, [case.at(stage) for stage in STAGES])[0]:
        torch.testing.assert_close(outcome.norms, expected.norms, rtol=2**-8, atol=0)
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=2**-8, atol=0)


def test_gradients_accumulate_in_grad_accum_dtype(ranks: RankPool) -> None:
    # By an update of the same bits on every processor: its last bit flips a rounding to bfloat16 in a later step.
    config = {"data_types": {"grad_accum_dtype": "bf16"}, "optimizer": {"type": "sgd", "params": {"lr": 2**-4}}}
    case = Case(models.mlp, models.vector_batch, accumulation=3, config=config)

    def train(accumulate: torch.dtype) -> Outcome:
        dtypes = Dtypes(torch.float32, accumulate=accumulate)
        return train_mixed(case, 2, dtypes, make_optimizer=lambda params: torch.optim.SGD(params, lr=2**-4))

    expected, plain = train(torch.bfloat16), train(torch.float32)
    assert abs(expected.norms[0] - plain.norms[0]) > 1e-5 * plain.norms[0], "the rounding must show"
    for outcome in ranks(2, train_all, [case.at(2), case.at(3)])[0]:
        torch.testing.assert_close(outcome.norms, expected.norms, rtol=1e-6, atol=0)
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-6, atol=0)
    for outcome in ranks(2, train_all, [case.at(0), case.at(1)])[0]:  # here each rank adds its own microbatches first
        torch.testing.assert_close(outcome.norms, expected.norms, rtol=1e-2, atol=0)
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-2, atol=0)
