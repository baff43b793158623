"""Split over a tensor axis, a model trains as one process does: losses, norms, and parameters in the end."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.kernels.linear_layers import weight_gradient
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, assert_close, train_all, train_plainly
from tests.parallel import models_of_others as others

TOLERANCE = (
    1e-6  # a loss of transformers is computed in float32; for the same reason the optimizer is one that is linear
)
SGD: dict[str, Any] = {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}}


def case_of(build: Callable[[], nn.Module], batch: Any = others.tokens, accumulation: int = 2) -> Case:
    return Case(build, batch, clip=0.5, accumulation=accumulation, steps=2, config={"optimizer": SGD})


def split(case: Case, stage: int, transport: str = "auto", **parallel: int) -> Case:
    return case.at(stage, config={"parallel": parallel, "communication": {"transport": transport}})


def plainly(case: Case, num_ranks: int) -> Outcome:
    return train_plainly(case, num_ranks, partial(torch.optim.SGD, lr=0.1, momentum=0.9), num_parts=case.accumulation)


LLAMA = case_of(others.llama)
CASES = {
    "llama": LLAMA,
    "gpt2": case_of(others.gpt2, accumulation=1),
    "gemma2": case_of(others.gemma, accumulation=1),
    "bert": case_of(others.bert, accumulation=1),
    "gpt_oss": case_of(others.gpt_oss, accumulation=1),
    "t5": case_of(others.t5),
    "vit": case_of(others.vit, others.pictures, accumulation=1),
    "grouped_llama": case_of(others.grouped_llama, accumulation=1),
}


@cache
def expected_of(name: str, num_ranks: int = 1) -> Outcome:
    return plainly(CASES[name], num_ranks)


Row = tuple[str, int, int, dict[str, Any]]  # model, data-parallel ranks, stage, config
ROWS: dict[int, list[Row]] = {  # by number of ranks
    2: [(name, 1, number % 4, {}) for number, name in enumerate(("llama", "gpt2", "gemma2", "bert", "t5"))],
    4: [
        # Heads of keys that two ranks have are counted once.
        ("grouped_llama", 1, 3, {"parallel": {"tensor": 4}, "communication": {"transport": "sockets"}}),
        ("llama", 2, 3, {"communication": {"transport": "sockets"}}),
    ],
}


def check(ranks: RankPool, num_ranks: int, rows: Sequence[Row], **parallel: Any) -> None:
    """parallel: of each row that says nothing else."""
    cases = [CASES[name].at(stage, config={"parallel": parallel, **config}) for name, _, stage, config in rows]
    for row, outcome in zip(rows, ranks(num_ranks, train_all, cases, timeout=150)[0], strict=True):
        assert_close(outcome, expected_of(row[0], row[1]), TOLERANCE, TOLERANCE, str(row))


@pytest.mark.parametrize("num_ranks", ROWS)
def test_models_of_others_train_as_in_one_process(ranks: RankPool, num_ranks: int) -> None:
    check(ranks, num_ranks, ROWS[num_ranks], tensor=2)


def single_llama() -> nn.Module:
    return others.llama().float()


def test_float32_keeps_losses_and_norms(ranks: RankPool) -> None:
    case = case_of(single_llama)
    expected = plainly(case, 1)
    ((outcome,), _) = ranks(2, train_all, [split(case, 3, tensor=2)])
    assert outcome.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert outcome.norms == pytest.approx(expected.norms, rel=TOLERANCE)


def tiny_gpt_64() -> nn.Module:
    return models.TinyGPT().double()


def tied_gpt_64() -> nn.Module:
    return models.TinyGPT(tied=True).double()


PLAN = {"blocks.*.up": "column", "blocks.*.down": "row", "embedding": "vocabulary", "head": "vocabulary"}


def test_columns_that_do_not_divide_are_gathered(ranks: RankPool) -> None:
    case = Case(tiny_gpt_64, models.token_batch, steps=2)
    config: dict[str, Any] = {"parallel": {"tensor": 4}, "tensor_parallel": {"plan": {"head": "column_gathered"}}}
    (found,) = ranks(4, train_all, [case.at(0, config=config)])[0]
    assert_close(found, train_plainly(case, 1), 1e-10, 1e-10)


def test_a_plan_splits_any_model(ranks: RankPool) -> None:
    cases = [Case(build, models.token_batch, clip=0.3, accumulation=2, steps=2) for build in (tiny_gpt_64, tied_gpt_64)]
    config: dict[str, Any] = {"parallel": {"tensor": 2}, "tensor_parallel": {"plan": PLAN}}
    split = [case.at(stage, config=config) for case, stage in zip(cases, (0, 3), strict=True)]
    for case, outcome in zip(cases, ranks(2, train_all, split)[0], strict=True):
        assert_close(outcome, train_plainly(case, 1, num_parts=2), 1e-10, 1e-10)


class Logits(nn.Module):
    """Whose head is large enough for its gradient to be written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1024, 256), nn.Linear(256, 1024, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), ids.flatten())


def gradients_in_place() -> list[tuple[tuple[int, ...], bool]]:
    """Of products: the sizes of what they are of, and whether there was a place for them."""
    found = []

    def seen(dy: Tensor, x: Tensor, is_transposed: bool, out: Tensor | None = None) -> Tensor:
        found.append((tuple(dy.shape), out is not None))
        return weight_gradient(dy, x, is_transposed, out)

    config = {
        **split(LLAMA, 0, tensor=2).config,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 0,
        "tensor_parallel": {"plan": {"embedding": "vocabulary", "head": "vocabulary"}},
    }
    with pytest.MonkeyPatch.context() as patch, lowtide.initialize(Logits(), config) as engine:
        patch.setattr("lowtide.zero.hooks.weight_gradient", seen)
        engine.train_step((torch.arange(8).view(2, 4),))
    return found


def test_the_gradient_of_a_split_head_is_written_in_place(ranks: RankPool) -> None:
    assert ranks(2, gradients_in_place) == [[((2, 4, 512), True)]] * 2


class Together(nn.Module):
    """Attention, with two heads of keys for four of queries, and an MLP of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.num_heads, self.num_kv_heads = nn.LayerNorm(32), 4, 2
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.o_proj, self.up_proj, self.down_proj = nn.Linear(32, 32), nn.Linear(32, 44), nn.Linear(44, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q_proj(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = (layer(y).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2) for layer in (self.k_proj, self.v_proj))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o_proj(mixed.transpose(1, 2).flatten(2)) + self.down_proj(self.up_proj(y).relu())


class OfOneModule(models.TinyGPT):
    def __init__(self) -> None:
        super().__init__(width=32)
        self.blocks = nn.ModuleList(Together() for _ in range(2))


def of_one_module() -> nn.Module:
    return OfOneModule().double()


def test_heads_of_an_attention_beside_an_mlp_stay_whole(ranks: RankPool) -> None:
    case = Case(of_one_module, models.token_batch, steps=2)
    expected = train_plainly(case, 1)
    for degree, stage in ((2, 0), (4, 3)):
        assert_close(ranks(degree, train_all, [split(case, stage, tensor=degree)])[0][0], expected, 1e-10, 1e-10)
