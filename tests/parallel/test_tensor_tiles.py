"""MLPs and losses in tiles where ranks share layers: as in one process, without a rank's own part of the logits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, assert_close, train_all, train_plainly
from tests.parallel import models_of_others as others
from tests.parallel.test_tensor_training import (
    CASES,
    LLAMA,
    PLAN,
    TOLERANCE,
    case_of,
    expected_of,
    plainly,
    tiny_gpt_64,
)

TILES = {"mlp": 4, "loss": 5}  # of 18 tokens


def tiled(case: Case, stage: int, has_parts: bool, **config: Any) -> Case:
    return case.at(stage, config={"tiles": TILES, "parallel": {"tensor": 2, "tensor_sequence": has_parts}, **config})


def test_mlps_in_tiles_train_as_in_one_process(ranks: RankPool) -> None:
    """Losses are computed of whole logits, which the model casts from float64."""
    recomputed: dict[str, Any] = {"activation_checkpointing": {"every": 1}, "communication": {"transport": "sockets"}}
    cases = {"gpt2": tiled(CASES["gpt2"], 1, False), "llama": tiled(LLAMA, 3, True, **recomputed)}
    for name, outcome in zip(cases, ranks(2, train_all, list(cases.values()))[0], strict=True):
        assert_close(outcome, expected_of(name), TOLERANCE, TOLERANCE, name)


def single_llama() -> nn.Module:
    return others.llama().float()


def single_gpt2() -> nn.Module:
    return others.gpt2().float()


def test_losses_in_tiles_are_those_of_one_process(ranks: RankPool) -> None:
    cases = [case_of(build) for build in (single_llama, single_gpt2)]
    split = [tiled(cases[0], 0, False), tiled(cases[1], 3, True)]
    for case, outcome in zip(cases, ranks(2, train_all, split)[0], strict=True):
        expected = plainly(case, 1)
        assert outcome.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert outcome.norms == pytest.approx(expected.norms, rel=TOLERANCE)


def test_the_loss_is_exact_where_nothing_is_rounded(ranks: RankPool) -> None:
    """In float64, with a head of 31 rows, which two ranks do not divide."""
    case = Case(tiny_gpt_64, models.token_batch, clip=0.3, accumulation=2, steps=2)
    config: dict[str, Any] = {"tiles": {"loss": 3}, "parallel": {"tensor": 2}, "tensor_parallel": {"plan": PLAN}}
    (outcome,) = ranks(2, train_all, [case.at(3, config=config)])[0]
    assert_close(outcome, train_plainly(case, 1, num_parts=2), 1e-10, 1e-10)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation has made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not made.is_meta and not func.is_view:
            self.numel = max(self.numel, made.numel())
        return made


LENGTH, WIDTH, INNER, VOCAB = 512, 16, 1024, 2048


class Wide(nn.Module):
    """An MLP far wider than its input, and a head larger than both."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(WideBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = WideMlp()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.mlp(x)
        return result


class WideMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)))
        return result


def largest(tile: int, has_parts: bool) -> tuple[int, int]:
    """(elements of the largest tensor of a step, bytes that it has sent)."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "sgd"},
        "parallel": {"tensor": 2, "tensor_sequence": has_parts},
        "tensor_parallel": {"plan": {"up": "column", "down": "row", "embedding": "vocabulary", "head": "vocabulary"}},
        "tiles": tile,
    }
    engine = lowtide.initialize(Wide(), config)
    ids = torch.arange(LENGTH)[None] % VOCAB
    engine.train_step((ids,))
    exchange = engine._mesh.exchange(("tensor",))
    before = exchange.bytes_sent
    with Largest() as found:
        engine.train_step((ids,))
    engine.close()
    return found.numel, exchange.bytes_sent - before


def all_largest() -> list[tuple[int, int]]:
    return [largest(*case) for case in MADE]


MADE = [(64, False), (128, True)]  # tile, has_parts


def test_what_is_made_is_in_proportion_to_the_tile(ranks: RankPool) -> None:
    """Logits of a tile's tokens, of half of the vocabulary; those of all tokens would be 4 and 8 times as many.

    Tiles of an MLP over parts are of as many tokens on each rank. Three sums of an MLP, one of the embedding and one in
    front of the head are sent, each as large as the activations between two ranks, and three numbers of each token.
    """
    activations = LENGTH * WIDTH * 4
    right = []
    for tile, has_parts in MADE:
        sent = (3 * 2 + 2) * activations + 3 * LENGTH * 4
        if has_parts:
            sent += activations + 2 * WIDTH * 4  # two halves around the stack, and the biases of two rows
        right.append((tile * max(VOCAB // 2, INNER // 2 * (1 + has_parts)), sent))
    assert ranks(2, all_largest) == [right] * 2
