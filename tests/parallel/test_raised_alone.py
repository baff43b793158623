"""A rank that raises in a forward of which others wait for it ends their waits, with its error."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from tests.ranks import RankPool

PLAN = {"tensor_parallel": {"plan": {"layers.*.up": "column", "layers.*.down": "row"}}}


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.number = number
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        if self.fails:
            self.fails = False
            raise ValueError(f"mine, in block {self.number}")
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(number) for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def three_steps(route: str, failing: tuple[int, ...], axis: str) -> list[str]:
    """What each step gives; in the second block 1 raises on some ranks, which go on as if it were nothing."""
    split = {"parallel": {"tensor": 2}, **PLAN} if axis == "tensor" else {"zero_optimization": {"stage": 3}}
    config = {"optimizer": {"type": "sgd", "params": {"lr": 0.1}}, "train_micro_batch_size_per_gpu": 2, **split}
    torch.manual_seed(0)
    engine = lowtide.initialize(Model(), {**config, "communication": {"route": route, "timeout_seconds": 120}})
    told = []
    for step in range(3):
        engine.module.layers[1].fails = step == 1 and dist.get_rank() in failing  # type: ignore[index, union-attr]
        try:
            told.append(f"{engine.train_step(torch.ones(2, 4, 8)).loss:.6f}")
        except (ValueError, lowtide.CollectiveError) as error:
            told.append(str(error))
    engine.close()
    return told


@pytest.mark.parametrize(("route", "axis"), [("shared_memory", "tensor"), ("sockets", "tensor"), ("sockets", "shard")])
def test_the_others_are_told_and_no_wait_lasts_until_the_timeout(ranks: RankPool, route: str, axis: str) -> None:
    (_, other, later), (_, own, again) = ranks(2, three_steps, route, (1,), axis)
    assert own == "mine, in block 1"
    assert "rank 1 raised ValueError: mine, in block 1, and goes no further in this call of the engine" in other
    assert "rank 0" in again and "no answer" not in later
    for text in (other, later, again):
        assert "waited 120 s" not in text and "Timed out" not in text


@pytest.mark.parametrize("route", ["shared_memory", "sockets"])
def test_what_all_ranks_raise_ends_the_step_alone(ranks: RankPool, route: str) -> None:
    failed, whole = ranks(2, three_steps, route, (0, 1), "tensor"), ranks(2, three_steps, route, (), "tensor")
    assert failed[0] == failed[1] == [whole[0][0], "mine, in block 1", whole[0][1]]
