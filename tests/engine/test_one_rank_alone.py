"""One rank evaluates by itself between steps; ranks agree on when to stop."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, refusal, share_of

CASE = Case(partial(models.TinyGPT, layers=2), models.token_batch, accumulation=2)
MLP = Case(models.mlp, models.vector_batch)


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


def engine_of(case: Case, transport: str = "auto", seconds: float = 20, **config: Any) -> lowtide.Engine:
    torch.manual_seed(0)
    communication = {"transport": transport, "timeout_seconds": seconds}
    return lowtide.initialize(
        case.build(), case.at(case.stage, config={"communication": communication, **config}).as_config()
    )


def train_and_look(stage: int, transport: str, how: str) -> tuple[list[float], list[Any]]:
    """The losses of training, and what rank 0 alone has computed before each step, where it evaluates."""
    losses, seen = [], []
    with engine_of(replace(CASE, build=Generating, stage=stage), transport) as engine:
        for step in range(2):
            batch = share_of(CASE.global_batch(step, engine.world_size))
            if how != "trains":
                with engine.gathered() if how == "gathers" else nullcontext():
                    if engine.rank == 0:
                        with torch.no_grad():
                            seen += [engine(*batch).item(), engine.module(*batch).item()]
                        if stage < 3 or how == "gathers":  # it reads a parameter outside of the model's forward
                            seen.append(engine.module.generate(batch[0], 3).tolist())  # type: ignore[operator]
            losses.append(engine.train_step(batch).loss.item())
    return losses, seen


def train_and_look_all(stage: int, transport: str) -> list[tuple[list[float], list[Any]]]:
    return [train_and_look(stage, transport, how) for how in ("trains", "evaluates", "gathers")]


@pytest.mark.parametrize(
    ("transport", "stage"), [("shared_memory", 1), ("shared_memory", 3), ("sockets", 2), ("sockets", 3)]
)
def test_one_rank_evaluates_alone(ranks: RankPool, transport: str, stage: int) -> None:
    """Where parameters come from other ranks, those take part when they come to their next forward or step."""
    (expected, _), evaluated, gathered = ranks(2, train_and_look_all, stage, transport)[0]
    for losses, seen in (evaluated, gathered):
        assert losses == expected and seen[0] == seen[1]
    assert [len(seen) for _, seen in (evaluated, gathered)] == [6 if stage < 3 else 4, 6]


def step_inside_of_gathered() -> tuple[list[float], list[float]]:
    """Parameters that a step has changed are not kept as they were."""
    with engine_of(replace(CASE, build=Generating, stage=3), "sockets") as engine, engine.gathered():
        found = [engine.train_step(share_of(CASE.global_batch(step, 2))).loss.item() for step in range(2)]
    return found, train_and_look(3, "sockets", "trains")[0]


def test_steps_inside_of_gathered_go_on_with_what_they_have_made(ranks: RankPool) -> None:
    found, expected = ranks(2, step_inside_of_gathered)[0]
    assert found == expected


def evaluate_alone(transport: str) -> str:
    """The error where rank 0 evaluates as only all ranks together can, and the other goes on to a step."""
    engine = engine_of(CASE.at(3), transport, 0.5)
    batch = share_of(CASE.global_batch(0, 2))

    def step() -> None:
        if engine.rank == 0:
            with torch.no_grad():
                engine.eval_step(batch)
        engine.train_step(batch)

    return refusal(step, kind=lowtide.CollectiveError)


@pytest.mark.parametrize(
    ("transport", "text"),
    [
        ("shared_memory", "Do all ranks make the same calls of the engine in the same order?"),
        ("sockets", "or the ranks make different calls of the engine"),
    ],
)
def test_a_call_of_all_ranks_that_one_makes_alone_is_an_error(ranks: RankPool, transport: str, text: str) -> None:
    assert text in ranks(2, evaluate_alone, transport)[0]


def agree_on_many(transport: str) -> list[bool]:
    engine = engine_of(MLP.at(2), transport)
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
    assert ranks(2, agree_on_many, transport) == [[True, True, False, True, False, True]] * 2


def agree_on_one_rank() -> str:
    """Rank 0 asks the others, which are in another small sum."""
    engine = engine_of(MLP)
    call: Any = engine.eval_step if engine.rank else engine.agree
    return refusal(call, models.vector_batch(0, 2) if engine.rank else True, kind=lowtide.CollectiveError)


def test_small_sums_of_different_calls_are_not_mixed(ranks: RankPool) -> None:
    first, second = ranks(2, agree_on_one_rank)
    assert first.startswith("rank 0 in engine.agree(): rank 1 made a different call of the engine.")
    assert second.startswith("rank 1 in the mean of the loss: rank 0 made a different call of the engine.")


def test_how_ranks_agree_is_one_of_two() -> None:
    text = refusal(engine_of(MLP).agree, True, how="most")
    assert text == 'engine.agree: expected how="any" or "all", found \'most\''


def update_in_the_background_inside_of_gathered(transport: str) -> list[Any]:
    """`state_dict` takes over an update that was under way."""
    delayed = {"offload_optimizer": {"device": "cpu", "overlap": "delayed", "delay_after_steps": 1}}
    engine = engine_of(MLP.at(3), transport, zero_optimization=delayed)
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
