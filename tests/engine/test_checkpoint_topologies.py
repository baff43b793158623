"""A checkpoint of any number of ranks and stage loads at any other: state bitwise, and the losses go on."""

import math
from pathlib import Path

import pytest
import torch

from tests.engine.saving import Continuation, load_all, save_all
from tests.kit.grids import pairs
from tests.kit.models import short_gpt, token_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case

WORLD_SIZES = (1, 2, 4)
STAGES = (0, 1, 3)  # shards of stage 2 lie as those of stage 1
CASE = Case(short_gpt, token_batch, clip=0.5)
CASES = [CASE.at(stage) for stage in STAGES]
TOPOLOGIES = pairs(WORLD_SIZES, STAGES, WORLD_SIZES, STAGES)  # ranks and stage that save, ranks and stage that load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(ranks: RankPool, folder: Path) -> dict[str, Continuation]:
    """Tag -> what went on without a break, for every number of ranks and stage."""
    found = {}
    for world_size in WORLD_SIZES:
        outcomes = ranks(world_size, save_all, CASES, folder, world_size)[0]
        found.update({f"{world_size}-{stage}": outcome for stage, outcome in zip(STAGES, outcomes, strict=True)})
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_checkpoint_loads_at_every_topology(
    ranks: RankPool, folder: Path, saved: dict[str, Continuation], world_size: int
) -> None:
    """Every number of ranks meets every other and each stage, before and after, and every stage every other."""
    cases = [(f"{w}-{stage}", CASE.at(other)) for w, stage, loads, other in TOPOLOGIES if loads == world_size]
    outcomes = ranks(world_size, load_all, cases, folder, world_size, timeout=240)[0]
    for (tag, case), outcome in zip(cases, outcomes, strict=True):
        before, where = saved[tag], f"saved at {tag}, loaded at {world_size}-{case.stage}"
        assert list(outcome.restored) == list(before.restored), where
        for name, value in before.restored.items():
            assert torch.equal(outcome.restored[name], value), (where, name)
        if tag.startswith(f"{world_size}-"):
            assert outcome.losses == before.losses, where
        else:  # another number of ranks sums a batch in another order
            pairs = zip(outcome.losses, before.losses, strict=True)
            assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in pairs), (where, outcome, before)
