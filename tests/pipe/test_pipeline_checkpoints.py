"""A checkpoint of any pipeline loads at any other, and without one: state bitwise, and the losses go on."""

import math
from pathlib import Path

import pytest
import torch

from tests.engine.saving import Continuation, load_and_go_on, save_and_go_on
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case
from tests.pipe.pipelines import deep_tied_gpt, pipelined

CASE = Case(deep_tied_gpt, models.token_batch, clip=0.5, accumulation=2)
PLACES: dict[str, tuple[int, Case]] = {  # name: ranks, case
    "one rank": (1, CASE),
    "pipeline 2 as a V, stage 1": (2, pipelined(CASE.at(1), 2, "zb-v")),
    "pipeline 2 x shard 2, stage 3": (4, pipelined(CASE.at(3), 2, "interleaved")),
}


def load_all(case: Case, folder: Path, world_size: int, tags: list[str]) -> list[Continuation]:
    return [load_and_go_on(case, folder, world_size, tag, steps=1, after=1) for tag in tags]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(ranks: RankPool, folder: Path) -> dict[str, Continuation]:
    """What went on without a break, for every place; the tag is its number."""
    return {
        name: ranks(world_size, save_and_go_on, case, folder, world_size, f"place{number}", steps=1, after=1)[0]
        for number, (name, (world_size, case)) in enumerate(PLACES.items())
    }


@pytest.mark.parametrize("name", PLACES)
def test_every_checkpoint_loads_here(ranks: RankPool, folder: Path, saved: dict[str, Continuation], name: str) -> None:
    """One rank loads what any place has saved; the others what the one before them has, and two ranks their own."""
    world_size, case = PLACES[name]
    names = list(PLACES)
    here = names.index(name)
    origins = names if world_size == 1 else [names[here - 1], *[name] * (world_size == 2)]
    tags = [f"place{names.index(origin)}" for origin in origins]
    for origin, outcome in zip(origins, ranks(world_size, load_all, case, folder, world_size, tags)[0], strict=True):
        before, where = saved[origin], f"saved at {origin}, loaded at {name}"
        assert sorted(outcome.restored) == sorted(before.restored), where
        for tensor, value in before.restored.items():
            assert torch.equal(outcome.restored[tensor], value), (where, tensor)
        pairs = zip(outcome.losses, before.losses, strict=True)
        assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in pairs), (where, outcome.losses, before.losses)
        if origin == name:
            assert outcome.losses == before.losses
