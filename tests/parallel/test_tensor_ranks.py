"""What the ranks of a tensor axis have in common, and what not: random numbers, batches, bytes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.blueprint.footprint import MemoryPhase, bytes_of
from lowtide.engine.config.config import Config
from tests.kit.ranks import RankError, RankPool
from tests.kit.training import ADAMW, Case, train_all
from tests.parallel import models_of_others as others


def config_of(tensor: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 0,
        "optimizer": ADAMW,
        "parallel": {"tensor": tensor},
        **more,
    }


class Dropping(nn.Module):
    """Dropout between a column and a row split, and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Drops() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64, bias=False), nn.Linear(64, 8)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(self.down(self.inner(self.up(x) + 100)))
        return result


def what_is_dropped() -> list[list[bool]]:
    """By call of a dropout: which elements are zero."""
    engine = lowtide.initialize(Dropping(), config_of())
    found: list[list[bool]] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        if module.training:
            found.append((output == 0).view(-1).tolist())

    for part in engine.module.modules():
        if isinstance(part, nn.Dropout):
            part.register_forward_hook(note)
    torch.manual_seed(0)
    engine.train_step((torch.ones(2, 8),))
    engine.close()
    return found


def test_dropout_differs_between_splits_and_agrees_elsewhere(ranks: RankPool) -> None:
    first, second = ranks(2, what_is_dropped)
    inner, outer = [0, 2], [1, 3]
    assert all(first[call] != second[call] and any(first[call]) for call in inner)
    assert all(first[call] == second[call] and any(first[call]) for call in outer)
    assert first[0] != first[2] and first[1] != first[3]


def dropping_gpt2() -> nn.Module:
    return others.gpt2(0.3)


def test_a_recomputed_block_drops_the_same(ranks: RankPool) -> None:
    case = Case(dropping_gpt2, others.tokens, clip=0.5, accumulation=2, steps=2, config={"parallel": {"tensor": 2}})
    again = case.at(3, config={"activation_checkpointing": {"every": 1}})
    (plain, recomputed), _ = ranks(2, train_all, [case.at(3), again])
    assert plain.losses == recomputed.losses and plain.norms == recomputed.norms


def other_batches() -> None:
    engine = lowtide.initialize(Dropping(), config_of())
    try:
        engine.train_step((torch.ones(2, 8) * (1 + engine.rank),))
    finally:
        engine.close()


def test_ranks_with_other_batches_are_told(ranks: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"expected the same batch on the 2 ranks of tensor \(ranks 0, 1\), found different"
    ):
        ranks(2, other_batches)


def embed_outside() -> None:
    with lowtide.initialize(others.gpt2(), config_of()) as engine:
        for token in (-1, others.VOCAB):
            with pytest.raises(IndexError) as error:
                engine(torch.tensor([[1, token]]), torch.tensor([[1, 1]]))
            assert str(error.value) == "index out of range in self"


def test_a_token_outside_of_the_vocabulary_is_the_error_of_torch(ranks: RankPool) -> None:
    ranks(2, embed_outside)


class Seeded(Drops):
    """A dropout that no module and no attribute shows."""

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = nn.functional.dropout(self.down(self.up(x)), 0.5).square().mean()
        return loss


def loss_of_other_seeds() -> float:
    model = Seeded()
    del model.inner, model.outer
    torch.manual_seed(int(os.environ["RANK"]))
    engine = lowtide.initialize(model, config_of())
    loss = float(engine.train_step((torch.ones(2, 8),)).loss)
    engine.close()
    return loss


def test_ranks_of_other_seeds_draw_the_same(ranks: RankPool) -> None:
    first, second = ranks(2, loss_of_other_seeds)
    assert first == second


def trained_later() -> list[float]:
    """The losses of a training whose last layer comes into the optimizer after the engine was made."""
    torch.manual_seed(0)
    tensor = int(os.environ["WORLD_SIZE"])
    config = {**config_of(tensor), "optimizer": None}
    model = Dropping().eval()
    engine = lowtide.initialize(model, config, optimizer=torch.optim.SGD(model.layers[0].parameters(), lr=1e-6))
    engine.optimizer.add_param_group({"params": list(model.layers[1].parameters()), "lr": 1e-6})
    losses = [float(engine.train_step((torch.ones(2, 8),)).loss) for _ in range(3)]
    engine.close()
    return losses


def test_groups_of_one_unit_come_to_the_optimizer_together(ranks: RankPool) -> None:
    assert ranks(2, trained_later)[0] == pytest.approx(ranks(1, trained_later)[0], rel=1e-5)


class Between(Drops):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)) * self.scale)
        return result.square().mean()


def train_between() -> None:
    engine = lowtide.initialize(Between(), config_of())
    try:
        engine.train_step((torch.ones(2, 8),))
    finally:
        engine.close()


def test_a_parameter_between_splits_that_nobody_names_is_found(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"equal gradients of the replicated 'scale' on 2 ranks, found different"):
        ranks(2, train_between)


def bytes_there_are() -> dict[str, int]:
    torch.manual_seed(0)
    config = config_of(communication={"transport": "sockets"})
    engine = lowtide.initialize(others.gpt2(), config)
    rows = others.tokens(0, 2 * engine.data_size)
    engine.train_step(tuple(t.chunk(engine.data_size)[engine.data_rank] for t in rows))
    memory = engine.memory()
    groups = [group for unit in engine._runner.passes.units for group in unit.groups]
    found = {
        "parameters": memory.parameter_bytes,
        "optimizer": memory.optimizer_bytes,
        "own": sum(param.numel() * 8 for group in groups for param in group.params),
    }
    engine.close()
    return found


def test_the_blueprint_says_the_bytes_of_a_split(ranks: RankPool) -> None:
    """Without shards; tests/parallel/test_split_experts.py has those of stage 3."""
    config = Config.load(config_of(communication={"transport": "sockets"})).resolve(2)
    blueprint = Blueprint.of(config, others.gpt2(), 2)
    whole = sum(param.numel() * 8 for param in others.gpt2().parameters())
    for rank, found in enumerate(ranks(2, bytes_there_are)):
        said = bytes_of(blueprint, rank, MemoryPhase.BETWEEN_STEPS)
        assert (found["parameters"], found["optimizer"]) == (said.parameters, said.optimizer), rank
        assert found["own"] < 0.55 * whole


def bytes_on_the_wire() -> tuple[int, int]:
    """(counted, by the formula) of a step of a model of two pairs of column and row splits."""
    engine = lowtide.initialize(Dropping(), config_of())
    exchange = engine._mesh.exchange(("tensor",))
    x = torch.ones(2, 8, requires_grad=True)
    engine.train_step((x.detach(),))
    before = exchange.bytes_sent
    engine.train_step((x.detach(),))
    engine.close()
    a_sum = 2 * 2 * 8 * 4 * (2 - 1) // 2  # 2 (n - 1) / n of (rows, width) float32
    return exchange.bytes_sent - before, 2 * a_sum + 1 * a_sum  # y of two rows; dx of one column: the input has none


def test_bytes_on_the_wire_are_those_of_the_formula(ranks: RankPool) -> None:
    for counted, expected in ranks(2, bytes_on_the_wire):
        assert counted == expected


def test_offload_beside_a_split_gives_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(others.llama, others.tokens, accumulation=2, steps=2, config={"parallel": {"tensor": 2}})
    file = {"device": "nvme", "nvme_path": str(tmp_path)}
    offload = {"zero_optimization": {"offload_optimizer": file, "offload_param": file}}
    (kept, offloaded), _ = ranks(2, train_all, [case.at(3), case.at(3, config=offload)])
    assert not kept.differences(offloaded)
