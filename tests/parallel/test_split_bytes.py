"""Bytes of split layers are those of the formulas: on the wire, kept for the backward, in tiles, of a rank's shards."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit.ranks import RankPool
from tests.kit.training import Case, trained, wrong_bytes
from tests.parallel import models_of_others as others
from tests.parallel.trainings import PARTS, SOCKETS, TENSOR, Largest, dropping, mixed, split_config


def sent_in_second_step(engine: lowtide.Engine, batch: Any, watching: AbstractContextManager[Any] | None = None) -> int:
    """watching: is entered for that step."""
    exchange = engine._mesh.exchange(("tensor",))
    engine.train_step(batch)
    before = exchange.bytes_sent
    with watching or nullcontext():
        engine.train_step(batch)
    return exchange.bytes_sent - before


def bytes_on_the_wire() -> int:
    with lowtide.initialize(dropping(), split_config()) as engine:
        return sent_in_second_step(engine, (mixed(),))


def test_each_pair_of_a_column_and_a_row_split_sums_once_forward_and_once_backward(ranks: RankPool) -> None:
    a_sum = 2 * (2 * 6 * 8) * 4 * (2 - 1) // 2  # 2 (n - 1) / n of (rows, tokens, width) float32
    assert ranks(2, bytes_on_the_wire) == [2 * 2 * a_sum] * 2


def of_blocks(build: Callable[..., nn.Module], config: dict[str, Any]) -> list[tuple[int, int]]:
    """(bytes on the wire, bytes that the backward waits for) of a step of two blocks and of three."""
    found = []
    for number in (2, 3):
        kept: dict[int, int] = {}
        with lowtide.initialize(build(num_hidden_layers=number), split_config(**config)) as engine:
            weights = {param.untyped_storage().data_ptr() for param in engine.module.parameters()}

            def keep(x: Tensor, kept: dict[int, int] = kept, weights: set[int] = weights) -> Tensor:
                if x.untyped_storage().data_ptr() not in weights:
                    kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            batch = tuple(one[:, :8].contiguous() for one in others.tokens(0, 2))
            sent = sent_in_second_step(engine, batch, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x))
        found.append((sent, sum(kept.values())))
    return found


SBH = 8 * 2 * 32 * 8  # of float64
# What a block sends, in sbh (t - 1) / t, and gradients of whole parameters that are summed. GPT-2: two sums, each with
# its backward; with parts as much, and two norms and biases of two rows. Bloom: in front of attention its input and the
# residual, behind it its gradient; four of an MLP. OLMo2: the input, queries, and keys and values of half their width,
# and the output; backward the gradients of the output, of the columns of what goes into it, and of the input; four of
# an MLP.
BLOCKS: list[tuple[Callable[..., nn.Module], dict[str, Any], float, int]] = [
    (others.gpt2, TENSOR, 8, 0),
    (others.gpt2, PARTS, 8, 6 * 32),
    (others.bloom, PARTS, 3 + 4, 5 * 32),
    (others.olmo2, PARTS, 1 + 1 + 0.5 + 0.5 + 1 + 3 + 4, 2 * 32),
]


def of_all_blocks() -> list[list[tuple[int, int]]]:
    return [of_blocks(build, config) for build, config, _, _ in BLOCKS]


def test_bytes_of_a_block_are_those_of_the_formulas(ranks: RankPool) -> None:
    """Without parts GPT-2 keeps the inputs of two norms, with two numbers of each token, and of two columns, each of
    sbh; with parts half of the first two."""
    found = ranks(2, of_all_blocks)[0]
    for (_, _, moved, summed), (two, three) in zip(BLOCKS, found, strict=True):
        assert three[0] - two[0] == moved * SBH // 2 + summed * 8
    (whole, more_of_whole), (parts, more_of_parts) = found[:2]
    around = 2 * SBH // 2  # in front of all blocks, and behind them
    assert parts[0] - whole[0] == 2 * 6 * 32 * 8 + around
    kept_whole, kept_parts = more_of_whole[1] - whole[1], more_of_parts[1] - parts[1]
    assert kept_whole - kept_parts == 2 * (SBH + 2 * 16 * 8) // 2


LENGTH, WIDTH, INNER, VOCAB = 512, 16, 1024, 2048


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)))
        return result


class Wide(nn.Module):
    """MLPs far wider than their input, and a head larger than both."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x + self.mlp(x)
            return result

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


TILED = [(64, TENSOR), (128, PARTS)]


def in_tiles() -> list[tuple[int, int]]:
    """(elements of the largest tensor of a step, bytes that it has sent)."""
    plan = {"plan": {"up": "column", "down": "row", "embedding": "vocabulary", "head": "vocabulary"}}
    found = []
    for tile, parallel in TILED:
        ids = torch.arange(LENGTH)[None] % VOCAB
        config = split_config(**parallel, tensor_parallel=plan, tiles=tile, train_micro_batch_size_per_gpu=1)
        with lowtide.initialize(Wide(), config) as engine:
            sent = sent_in_second_step(engine, (ids,), largest := Largest())
        found.append((largest.numel, sent))
    return found


def test_what_is_made_in_tiles_is_in_proportion_to_the_tile(ranks: RankPool) -> None:
    """Logits of a tile's tokens, of half of the vocabulary; those of all tokens would be 4 and 8 times as many.

    Tiles of an MLP over parts are of as many tokens on each rank. Three sums of an MLP, one of the embedding and one in
    front of the head are sent, each as large as the activations between two ranks, and three numbers of each token.
    With parts two halves around the stack too, and the biases of two rows.
    """
    activations = LENGTH * WIDTH * 4
    sent = (3 * 2 + 2) * activations + 3 * LENGTH * 4
    right = [(64 * VOCAB // 2, sent), (128 * INNER, sent + activations + 2 * WIDTH * 4)]
    assert ranks(2, in_tiles) == [right] * 2


SPLIT: dict[int, tuple[Case, float]] = {  # by number of ranks: a case, and the most of the whole that a rank has
    2: (Case(others.gpt2, others.tokens, config=TENSOR | SOCKETS), 0.55),
    4: (Case(others.gpt_oss, others.tokens, 3, config={"parallel": {"tensor": 2, "expert": 2}, **SOCKETS}), 0.45),
}


def bytes_apart(case: Case) -> tuple[str, int]:
    """Where bytes differ from the blueprint's, and elements of a rank's parts of parameters."""
    with trained(case, 1) as engine:
        groups = [group for unit in engine._runner.passes.units for group in unit.groups]
        with engine.gathered():
            own = sum(param.numel() for group in groups for param in group.params)
        return wrong_bytes(engine, case), own


@pytest.mark.parametrize("num_ranks", SPLIT)
def test_the_blueprint_says_the_bytes_of_a_split(ranks: RankPool, num_ranks: int) -> None:
    case, most = SPLIT[num_ranks]
    whole = sum(param.numel() for param in case.build().parameters())
    for differing, own in ranks(num_ranks, bytes_apart, case):
        assert not differing and own < most * whole
