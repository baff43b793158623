"""Bytes of split layers are those of the formulas; ranks draw the same numbers where they compute the same."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, refusal, trained, wrong_bytes
from tests.parallel import models_of_others as others
from tests.parallel.adapters import LAYERS, adapted
from tests.parallel.trainings import AGAIN, PARTS, SOCKETS, TENSOR, Largest, Mixer, dropping, mixed, split_config


def sent_in_second_step(engine: lowtide.Engine, batch: Any, watching: AbstractContextManager[Any] | None = None) -> int:
    """watching: is entered for that step."""
    exchange = engine._mesh.exchange(("tensor",))
    engine.train_step(batch)
    before = exchange.bytes_sent
    with watching or nullcontext():
        engine.train_step(batch)
    return exchange.bytes_sent - before


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


@on_ranks(2)
def test_bytes_of_a_block_are_those_of_the_formulas() -> None:
    """Without parts GPT-2 keeps the inputs of two norms, with two numbers of each token, and of two columns, each of
    sbh; with parts half of the first two."""
    found = [of_blocks(build, config) for build, config, _, _ in BLOCKS]
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


@on_ranks(2)
def test_what_is_made_in_tiles_is_in_proportion_to_the_tile() -> None:
    """Logits of a tile's tokens, of half of the vocabulary; those of all tokens would be 4 and 8 times as many.

    Tiles of an MLP over parts are of as many tokens on each rank. Three sums of an MLP, one of the embedding and one in
    front of the head are sent, each as large as the activations between two ranks, and three numbers of each token.
    With parts two halves around the stack too, and the biases of two rows.
    """
    plan = {"plan": {"up": "column", "down": "row", "embedding": "vocabulary", "head": "vocabulary"}}
    activations = LENGTH * WIDTH * 4
    sent = (3 * 2 + 2) * activations + 3 * LENGTH * 4
    for tile, parallel, numel, moved in (
        (64, TENSOR, 64 * VOCAB // 2, sent),
        (128, PARTS, 128 * INNER, sent + activations + 2 * WIDTH * 4),
    ):
        ids, largest = torch.arange(LENGTH)[None] % VOCAB, Largest()
        config = split_config(**parallel, tensor_parallel=plan, tiles=tile, train_micro_batch_size_per_gpu=1)
        with lowtide.initialize(Wide(), config) as engine:
            assert sent_in_second_step(engine, (ids,), largest) == moved
        assert largest.numel == numel


@on_ranks(4)
def test_the_blueprint_says_the_bytes_of_a_split_beside_experts() -> None:
    """Of a split alone it is asked in tests/laws."""
    case = Case(others.gpt_oss, others.tokens, 3, config={"parallel": {"tensor": 2, "expert": 2}, **SOCKETS})
    whole = sum(param.numel() for param in case.build().parameters())
    with trained(case, 1) as engine:
        groups = [group for unit in engine._runner.passes.units for group in unit.groups]
        with engine.gathered():
            own = sum(param.numel() for group in groups for param in group.params)
        assert not wrong_bytes(engine, case) and own < 0.45 * whole


def what_is_dropped(config: dict[str, Any]) -> tuple[list[list[bool]], float]:
    """By call of a dropout: which elements are zero; and the loss of a second step."""
    engine = lowtide.initialize(dropping(), split_config(**config))
    found: list[list[bool]] = []

    def note(part: nn.Module, args: Any, output: Tensor) -> None:
        if part.training:
            found.append((output == 0).view(-1).tolist())

    for part in engine.module.modules():
        if isinstance(part, nn.Dropout):
            part.register_forward_hook(note)
    torch.manual_seed(0)
    engine.train_step((mixed(),))
    loss = engine.train_step((mixed(),)).loss.item()
    engine.close()
    return found[:4], loss


@pytest.mark.parametrize("config", [TENSOR, PARTS])
def test_dropout_differs_where_ranks_have_parts_and_is_the_same_when_recomputed(
    ranks: RankPool, config: dict[str, Any]
) -> None:
    """Between splits each rank has half of the columns; beside them half of the tokens, or all."""
    (first, loss), (second, other_loss) = ranks(2, what_is_dropped, config)
    assert [len(one) for one in first] == [2 * 6 * 32, 2 * (3 if config == PARTS else 6) * 8] * 2
    for call, (one, other) in enumerate(zip(first, second, strict=True)):
        assert any(one) and (one != other) == (call % 2 == 0 or config == PARTS)
    assert first[0] != first[2] and first[1] != first[3]
    assert loss == other_loss == ranks(2, what_is_dropped, config | AGAIN)[0][1]


DROPPING: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (others.dropping_gpt2, TENSOR | {"zero_optimization": {"stage": 3}}),
    (partial(others.bloom, rate=0.3), PARTS),  # what all compute, beside attention
    (partial(adapted, others.llama, LAYERS, lora_dropout=0.4), TENSOR),  # matrices that all have
]


def losses_with_dropout() -> list[list[float]]:
    found = []
    for build, config in DROPPING:
        for again in ({}, AGAIN):
            torch.manual_seed(0)
            with lowtide.initialize(build(), split_config(**config, **again)) as engine:
                found.append([engine.train_step(others.tokens(step, 2)).loss.item() for step in range(2)])
    return found


def test_dropout_of_models_of_others_is_the_same_on_all_and_in_a_recomputation(ranks: RankPool) -> None:
    """Else the first backward finds other gradients of what ranks have alike."""
    found, others_have = ranks(2, losses_with_dropout)
    assert others_have == found and len({loss for losses in found for loss in losses}) >= 2 * len(DROPPING)
    for kept, recomputed in zip(found[::2], found[1::2], strict=True):
        assert kept == pytest.approx(recomputed, rel=1e-9)


class Hidden(Mixer):
    """A dropout that no module and no attribute shows."""

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5).square().mean()


def losses_of_other_seeds() -> list[float]:
    """With seeds of the ranks: of a hidden dropout, of none at all, and behind an error between two splits."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    with lowtide.initialize(Hidden(), split_config()) as engine:
        found = [engine.train_step((mixed(),)).loss.item()]
    with lowtide.initialize(dropping(0.0), split_config()) as engine:
        torch.manual_seed(rank)
        found.append(engine.train_step((mixed(),)).loss.item())
    model = dropping()
    with lowtide.initialize(model, split_config()) as engine:
        engine.train_step((mixed(),))
        failing = model.blocks[0].inner.register_forward_hook(lambda *given: 1 / 0)
        refusal(engine.train_step, (mixed(),), kind=ZeroDivisionError)
        failing.remove()
        return [*found, engine.train_step((mixed(),)).loss.item()]


def test_ranks_of_other_seeds_draw_the_same(ranks: RankPool) -> None:
    first, second = ranks(2, losses_of_other_seeds)
    assert first == second


@pytest.mark.parametrize(("size", "pipeline"), [(2, 1), (4, 2)])
@on_ranks("size")
def test_ranks_that_are_seeded_apart_are_told(size: int, pipeline: int) -> None:
    """Rank 1 seeds again, then all do alike."""
    torch.manual_seed(3)
    batch, config = (mixed(rows=4),), split_config({"tensor": 2, "pipeline": pipeline}, gradient_accumulation_steps=2)
    with lowtide.initialize(dropping(), config) as engine:
        engine.train_step(batch)
        if engine.rank == 1:
            torch.manual_seed(4)
        engine.eval_step(batch)  # which draws nothing
        assert refusal(engine.train_step, batch).startswith(
            "random generators: expected the same state on the 2 ranks of parallel.tensor, since"
        )
        torch.manual_seed(5)
        engine.train_step(batch)
