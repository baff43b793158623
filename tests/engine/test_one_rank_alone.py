"""One rank evaluates by itself between steps; ranks agree on when to stop."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, share_of

CASE = Case(partial(models.TinyGPT, layers=2), models.token_batch, accumulation=2)


class Generating(models.TinyGPT):
    """Calls its parts, and itself, without gradients."""

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = self.embedding(ids[:, -models.LENGTH :]) + self.position
            for block in self.blocks:
                x = block(x)
            ids = torch.cat([ids, self.head(self.norm(x))[:, -1:].argmax(-1)], dim=1)
        return ids


def train_and_look(stage: int, transport: str, evaluates: bool, gathers: bool) -> tuple[list[float], list[Any]]:
    """The losses of training, and what rank 0 alone has computed before each step."""
    torch.manual_seed(0)
    config = {"communication": {"transport": transport, "timeout_seconds": 20}}
    engine = lowtide.initialize(Generating(), CASE.at(stage, config=config).as_config())
    losses, seen = [], []
    for step in range(2):
        batch = share_of(CASE.global_batch(step, engine.world_size))
        if evaluates:
            with engine.gathered() if gathers else nullcontext():
                if engine.rank == 0:
                    with torch.no_grad():
                        seen += [engine(*batch).item(), engine.module(*batch).item()]
                    if stage < 3 or gathers:  # it reads a parameter outside of the model's forward
                        seen.append(engine.module.generate(batch[0], 3).tolist())  # type: ignore[operator]
        losses.append(engine.train_step(batch).loss.item())
    engine.close()
    return losses, seen


def train_and_look_all(stage: int, transport: str, gathers: list[bool]) -> list[tuple[list[float], list[Any]]]:
    plain = train_and_look(stage, transport, evaluates=False, gathers=False)
    return [plain, *(train_and_look(stage, transport, True, one) for one in gathers)]


@pytest.mark.parametrize(
    ("transport", "stage"), [("shared_memory", 1), ("shared_memory", 3), ("sockets", 2), ("sockets", 3)]
)
def test_one_rank_evaluates_alone(ranks: RankPool, transport: str, stage: int) -> None:
    """Where parameters come from other ranks, those take part when they come to their next forward or step."""
    gathers = [False, True]
    (expected, _), *found = ranks(2, train_and_look_all, stage, transport, gathers)[0]
    for is_gathered, (losses, seen) in zip(gathers, found, strict=True):
        assert losses == expected and seen[0] == seen[1]
        assert len(seen) == (6 if stage < 3 or is_gathered else 4)


def step_inside_of_gathered(stage: int, transport: str) -> list[float]:
    """Parameters that a step has changed are not kept as they were."""
    torch.manual_seed(0)
    config = {"communication": {"transport": transport, "timeout_seconds": 20}}
    engine = lowtide.initialize(Generating(), CASE.at(stage, config=config).as_config())
    with engine.gathered():
        found = [engine.train_step(share_of(CASE.global_batch(step, 2))).loss.item() for step in range(2)]
    engine.close()
    return found


def test_steps_inside_of_gathered_go_on_with_what_they_have_made(ranks: RankPool) -> None:
    expected = ranks(2, train_and_look, 3, "sockets", False, False)[0][0]
    assert ranks(2, step_inside_of_gathered, 3, "sockets")[0] == expected


def evaluate_alone(transport: str) -> str:
    """The error where rank 0 evaluates as only all ranks together can, and the other goes on to a step."""
    config = {"communication": {"transport": transport, "timeout_seconds": 0.5}}
    engine = lowtide.initialize(CASE.build(), CASE.at(3, config=config).as_config())
    batch = share_of(CASE.global_batch(0, 2))
    with pytest.raises(lowtide.CollectiveError) as error:
        if dist.get_rank() == 0:
            with torch.no_grad():
                engine.eval_step(batch)
        engine.train_step(batch)
    return str(error.value)


@pytest.mark.parametrize(
    ("transport", "text"),
    [
        ("shared_memory", "Do all ranks make the same calls of the engine in the same order?"),
        ("sockets", "or the ranks make different calls of the engine"),
    ],
)
def test_a_call_of_all_ranks_that_one_makes_alone_is_an_error(ranks: RankPool, transport: str, text: str) -> None:
    assert text in ranks(2, evaluate_alone, transport)[0]


def agree_on_many(stage: int, transport: str) -> list[bool]:
    config = {"communication": {"transport": transport}}
    engine = lowtide.initialize(models.mlp(), Case(models.mlp, models.vector_batch, stage, config=config).as_config())
    rank = engine.rank
    found = [
        engine.agree(True),
        engine.agree(rank == 1),
        engine.agree(torch.tensor(rank == 1), how="all"),
        engine.agree(True, how="all"),
        engine.agree(False, how="any"),
    ]
    engine.train_step(share_of(models.vector_batch(0, 4)))
    return [*found, engine.agree(rank == 0)]


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "native"])
def test_ranks_agree(ranks: RankPool, transport: str) -> None:
    assert ranks(2, agree_on_many, 2, transport) == [[True, True, False, True, False, True]] * 2


def agree_on_one_rank() -> str:
    """Rank 0 asks the others, which are in another small sum."""
    engine = lowtide.initialize(models.mlp(), Case(models.mlp, models.vector_batch).as_config())
    with pytest.raises(lowtide.CollectiveError) as error:
        engine.agree(True) if engine.rank == 0 else engine.eval_step(models.vector_batch(0, 2))
    return str(error.value)


def test_small_sums_of_different_calls_are_not_mixed(ranks: RankPool) -> None:
    for rank, text in enumerate(ranks(2, agree_on_one_rank)):
        what, other = ("engine.agree()", 1) if rank == 0 else ("the mean of the loss", 0)
        assert text.startswith(f"rank {rank} in {what}: rank {other} made a different call of the engine.")


def test_how_ranks_agree_is_one_of_two() -> None:
    engine = lowtide.initialize(models.mlp(), Case(models.mlp, models.vector_batch).as_config())
    with pytest.raises(ValueError, match=r"engine\.agree: expected how=.any. or .all., found .most."):
        engine.agree(True, how="most")  # type: ignore[arg-type]  # what a user may write


def update_in_the_background_inside_of_gathered(transport: str) -> list[Any]:
    """`state_dict` takes over an update that was under way."""
    zero = {"offload_optimizer": {"device": "cpu", "overlap": "delayed", "delay_after_steps": 1}}
    config = {"communication": {"transport": transport}, "zero_optimization": zero}
    engine = lowtide.initialize(models.mlp(), Case(models.mlp, models.vector_batch, 3, config=config).as_config())
    for step in range(2):
        engine.train_step(share_of(models.vector_batch(step, 4)))
    weight: Any = engine.module.last.weight  # type: ignore[union-attr]
    with engine.gathered():
        before = weight.detach().clone()
        after = engine.state_dict()
    with engine.gathered():
        now = weight.detach().clone()
    return [torch.equal(before, now), torch.equal(after.get("last.weight", now), now)]


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_what_an_update_in_the_background_changes_is_seen_after_it(ranks: RankPool, transport: str) -> None:
    assert ranks(2, update_in_the_background_inside_of_gathered, transport) == [[False, True]] * 2
