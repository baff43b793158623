"""Checkpoints and exports know no split of experts: what one degree has saved, another loads, bit by bit."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW
from tests.parallel import expert_models as moe

os.environ["HF_HUB_OFFLINE"] = "1"
State = dict[str, Tensor]
Parallel = dict[str, int]
EXPERTS = "model.layers.1.mlp.experts.down_proj"


def engine_of(parallel: Parallel, stage: int) -> Any:
    torch.manual_seed(0)
    config = {
        "train_batch_size": 8,
        "steps_per_print": 0,
        "optimizer": ADAMW,
        "parallel": parallel,
        "zero_optimization": {"stage": stage},
    }
    return lowtide.initialize(moe.mixtral(), config)


def stepped(engine: Any, step: int) -> float:
    rows = [t.chunk(engine.data_size)[engine.data_rank] for t in moe.tokens(step, 8)]
    return float(engine.train_step(tuple(rows)).loss)


def save(parallel: Parallel, stage: int, folder: Path) -> tuple[State, Tensor, float]:
    """Trains, saves, exports; gives the weights, a state of the optimizer, and the loss of the step after it."""
    engine = engine_of(parallel, stage)
    stepped(engine, 0)
    engine.save_checkpoint(folder / "checkpoint", tag="one")
    engine.export(folder / "plain")
    found = engine.state_dict(), engine.full(EXPERTS, state="exp_avg").clone(), stepped(engine, 1)
    engine.close()
    return found


def load(parallel: Parallel, stage: int, folder: Path) -> tuple[State, Tensor, float, State]:
    """What `save` gives, of its checkpoint; and the weights after its export was loaded, and one was set."""
    engine = engine_of(parallel, stage)
    engine.load_checkpoint(folder / "checkpoint", tag="one")
    found = engine.state_dict(), engine.full(EXPERTS, state="exp_avg").clone(), stepped(engine, 1)
    engine.load_weights(folder / "plain")
    weights = engine.state_dict()
    engine.set_full(EXPERTS, engine.full(EXPERTS) + 1)
    moved = engine.state_dict()
    assert all(torch.equal(value, weights[key] + (key == EXPERTS)) for key, value in moved.items())
    engine.load_state_dict(weights)
    assert all(torch.equal(value, weights[key]) for key, value in engine.state_dict().items())
    engine.close()
    return *found, weights


BOTH = {"tensor": 2, "expert": 2}
TRIPS: dict[str, list[tuple[int, Parallel, int]]] = {  # ranks, axes and stage: of what saves, then of those that load
    "experts": [(2, {"expert": 2}, 0), (4, {"tensor": 4}, 3)],
    "both": [(4, BOTH, 3), (1, {}, 1)],
    "whole": [(1, {}, 0), (4, BOTH, 3)],
}


@pytest.mark.parametrize("name", TRIPS)
def test_what_one_degree_saves_another_loads(ranks: RankPool, tmp_path: Path, name: str) -> None:
    (num_ranks, parallel, stage), *others = TRIPS[name]
    state, moment, loss = ranks(num_ranks, save, parallel, stage, tmp_path)[0]
    for world, degree, other in others:
        found, own_moment, own_loss, weights = ranks(world, load, degree, other, tmp_path)[0]
        for key, value in state.items():
            assert torch.equal(found[key], value) and torch.equal(weights[key], value), (key, world, degree)
        assert torch.equal(own_moment, moment)
        assert own_loss == pytest.approx(loss, rel=1e-6)
    if name == "both":
        model = moe.OwnMixtralForCausalLM.from_pretrained(tmp_path / "plain")
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
