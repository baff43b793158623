"""What islands cannot do is said in words."""

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

import lowtide
from lowtide.comm.errors import CollectiveError
from lowtide.comm.islands import Islands, ranks_of_an_island
from lowtide.comm.votes import Votes
from tests import models
from tests.engine.outer_training import Plan, batch_of
from tests.ranks import RankPool
from tests.zero.training import Case

CASE = Case(models.tiny_gpt_float64, models.token_batch, steps=3)


def error_of(outer: dict[str, Any], build: Any = CASE.build) -> str:
    try:
        lowtide.initialize(build(), {**CASE.as_config(), "outer": outer}).close()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "none"


def one_block() -> nn.Module:
    return models.Chain(nn.Linear(3, 3))


def start_wrongly() -> list[str]:
    return [
        error_of({"every": 2, "ranks": 1, "fragments": 2}, one_block),
        error_of({"every": 2 + int(os.environ["RANK"]), "ranks": 1}),
    ]


def test_islands_that_do_not_fit_are_told_at_the_start(ranks: RankPool) -> None:
    found = ranks(2, start_wrongly, process_group=False)
    text = "outer.fragments: expected at most the number of units that are trained here (1), found 2; lower it, or name"
    assert all(text in errors[0] for errors in found)
    assert any("expected the same model, config and ranks on all islands" in errors[1] for errors in found)


def start_after_another_group() -> str:
    return error_of({"every": 2, "ranks": 1})


def test_the_process_group_must_be_an_islands(ranks: RankPool) -> None:
    for text in ranks(2, start_after_another_group):
        assert "expected a process group of this island's 1 ranks, or none, found one of 2 that was made before" in text


def live_and_refuse() -> list[str]:
    """Another engine on other islands, a group that comes late; and a warning of a checkpoint that is an island's."""
    with lowtide.initialize(CASE.build(), {**CASE.as_config(), "outer": {"every": 2, "ranks": 1}}) as engine:
        found = [error_of({"every": 2, "ranks": 2})]
        with pytest.raises(RuntimeError) as caught:
            engine.optimizer.add_param_group({"params": [next(engine.module.parameters())]})
        return [*found, str(caught.value)]


def test_what_islands_have_agreed_on_stays(ranks: RankPool) -> None:
    for other, late in ranks(2, live_and_refuse, process_group=False):
        assert "outer.ranks: expected 1, as an engine before this one had it, found 2; close that one first" in other
        assert "expected an engine without `outer`, found one whose islands have agreed on the parameters" in late


def save_under_way(folder: str) -> str:
    streaming = Plan(every=4, fragments=2, overlap=2).as_config(1)
    with lowtide.initialize(CASE.build(), {**CASE.as_config(), "outer": streaming}) as engine:
        for step in range(3):
            engine.train_step(batch_of(engine, CASE, step))
        engine.save_checkpoint(folder)
    with lowtide.initialize(CASE.build(), {**CASE.as_config(), "outer": {**streaming, "fragments": 1}}) as engine:
        with pytest.raises(lowtide.CheckpointError) as caught:
            engine.load_checkpoint(folder)
        return str(caught.value)


def test_an_exchange_under_way_needs_the_same_fragments(ranks: RankPool, tmp_path: Any) -> None:
    text = "exchanges of 2 fragments were under way, this run has 1; set outer.fragments 2, or load one that was saved"
    assert all(text in one for one in ranks(2, save_under_way, str(tmp_path), process_group=False))


@pytest.mark.parametrize(
    ("variables", "wanted", "text"),
    [
        (
            {"WORLD_SIZE": "6", "LOWTIDE_ISLAND_RANKS": "2"},
            3,
            "expected 2, which `lowtide launch --islands` has started",
        ),
        ({"WORLD_SIZE": "6"}, 4, "outer.ranks: expected a divisor of the 6 ranks of the job"),
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}, None, "the ranks of a host: expected a divisor of the 6 ranks"),
    ],
)
def test_islands_are_of_one_size(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: int | None, text: str
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOWTIDE_ISLAND_RANKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        ranks_of_an_island(wanted)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"WORLD_SIZE": "6", "LOWTIDE_ISLAND_RANKS": "2", "LOCAL_WORLD_SIZE": "6"}, 2),
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}, 3),
        ({}, 1),
    ],
)
def test_an_island_is_a_host_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: int
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOWTIDE_ISLAND_RANKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks_of_an_island(None) == found


def test_a_store_that_is_gone_is_told() -> None:
    class Gone(HashStore):
        def compare_set(self, *arguments: Any) -> bytes:
            raise torch.distributed.DistNetworkError("Connection reset")

    store = Gone()
    votes = Votes(Islands(0, 2, 1, store, store, "127.0.0.1"), "3.0", (0, 1), 1.0)
    with pytest.raises(CollectiveError) as caught:
        votes.cast(has_all=False)
    assert "outer exchange 3.0: expected the store of the job, found it gone (Connection reset)" in str(caught.value)
