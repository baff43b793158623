"""Checkpoints and exports know no split of layers or experts: what one degree has saved, another loads, bit by bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW
from tests.parallel import models_of_others as others
from tests.parallel.test_expert_lists import rows_of, skipping
from tests.parallel.trainings import EXPERT, TENSOR

BOTH = {"parallel": {"tensor": 2, "expert": 2}}
Place = tuple[int, int, dict[str, Any]]  # ranks, stage and config
Trip = tuple[Callable[[], nn.Module], str, list[Place]]  # a parameter; what saves, then what loads
LISTED, STACKED = "layers.1.moe.experts.3.up.weight", "model.layers.1.mlp.experts.down_proj"
TRIPS: dict[str, Trip] = {
    "gpt2": (others.gpt2, "transformer.h.0.attn.c_attn.weight", [(4, 3, TENSOR), (1, 1, {})]),
    "grouped_llama": (
        others.grouped_llama,
        "model.layers.1.self_attn.k_proj.weight",
        [(2, 0, TENSOR), (4, 3, {"parallel": {"tensor": 4}})],
    ),
    "both": (others.mixtral, STACKED, [(4, 3, BOTH), (1, 1, {})]),
    "whole": (others.mixtral, STACKED, [(1, 0, {}), (4, 3, BOTH)]),
    "lists": (skipping, LISTED, [(4, 1, EXPERT), (4, 3, {"parallel": {"expert": 4}})]),
}
Found = tuple[dict[str, Tensor], Tensor, float]  # weights, a state of the optimizer, and the loss of the step after


def engine_of(name: str, stage: int, config: dict[str, Any]) -> lowtide.Engine:
    torch.manual_seed(0)
    more = {"zero_optimization": {"stage": stage}, "train_batch_size": 8, "optimizer": ADAMW}
    return lowtide.initialize(TRIPS[name][0](), {**more, **config})


def stepped(engine: lowtide.Engine, name: str, step: int) -> float:
    rows = rows_of(step, 8) if name == "lists" else others.tokens(step, 8)
    batch = tuple(one.chunk(engine.data_size)[engine.data_rank] for one in rows)
    return engine.train_step(batch).loss.item()


def seen(engine: lowtide.Engine, name: str) -> Found:
    moment = engine.full(TRIPS[name][1], state="exp_avg").clone()
    return engine.state_dict(), moment, stepped(engine, name, 1)


def save(name: str, stage: int, config: dict[str, Any], folder: Path) -> Found:
    with engine_of(name, stage, config) as engine:
        stepped(engine, name, 0)
        engine.save_checkpoint(folder / "checkpoint", tag="one")
        engine.export(folder / "plain")
        return seen(engine, name)


def load(name: str, stage: int, config: dict[str, Any], folder: Path) -> tuple[Found, dict[str, Tensor]]:
    """With the weights after the export was loaded. Then one is set, and all are loaded from memory."""
    key = TRIPS[name][1]
    with engine_of(name, stage, config) as engine:
        engine.load_checkpoint(folder / "checkpoint", tag="one")
        found = seen(engine, name)
        engine.load_weights(folder / "plain")
        weights = engine.state_dict()
        engine.set_full(key, engine.full(key) + 1)
        assert all(torch.equal(value, weights[one] + (one == key)) for one, value in engine.state_dict().items())
        engine.load_state_dict(weights if engine.rank == 0 else {})
        assert all(torch.equal(value, weights[one]) for one, value in engine.state_dict().items())
        return found, weights


@pytest.mark.parametrize("name", TRIPS)
def test_what_one_degree_saves_another_loads(ranks: RankPool, tmp_path: Path, name: str) -> None:
    (num_ranks, *saving), *others_load = TRIPS[name][2]
    state, moment, loss = ranks(num_ranks, save, name, *saving, tmp_path)[0]
    for size, *loading in others_load:
        (found, own_moment, own_loss), weights = ranks(size, load, name, *loading, tmp_path)[0]
        for key, value in state.items():
            assert torch.equal(found[key], value) and torch.equal(weights[key], value), (key, loading)
        assert torch.equal(own_moment, moment) and own_loss == pytest.approx(loss, rel=1e-6)
    kind = {"gpt2": "GPT2LMHeadModel", "both": "MixtralForCausalLM"}.get(name)
    if kind is not None:
        loaded = others.own(kind).from_pretrained(tmp_path / "plain").state_dict()
        assert all(torch.equal(value, state[key]) for key, value in loaded.items())
