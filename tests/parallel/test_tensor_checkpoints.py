"""Checkpoints and exports know no split: what one degree has saved, another loads, bit by bit."""

import os
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

os.environ["HF_HUB_OFFLINE"] = "1"
State = dict[str, Tensor]
MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": others.gpt2, "grouped_llama": others.grouped_llama}


def engine_of(name: str, tensor: int, stage: int) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 0,
        "optimizer": ADAMW,
        "parallel": {"tensor": tensor},
        "zero_optimization": {"stage": stage},
    }
    return lowtide.initialize(MODELS[name](), config)


def stepped(engine: Any, step: int) -> float:
    batch = others.tokens(step, 2 * engine.data_size)
    loss = engine.train_step(tuple(t.chunk(engine.data_size)[engine.data_rank] for t in batch)).loss
    return float(loss)


def save(name: str, tensor: int, stage: int, folder: Path) -> tuple[State, Tensor, float]:
    """Trains, saves, exports; gives the weights, a state of the optimizer, and the loss of the step after it."""
    engine = engine_of(name, tensor, stage)
    stepped(engine, 0)
    engine.save_checkpoint(folder / "checkpoint", tag="one")
    engine.export(folder / "plain")
    found = engine.state_dict(), engine.full(FUSED[name], state="exp_avg").clone(), stepped(engine, 1)
    engine.close()
    return found


FUSED = {"gpt2": "transformer.h.0.attn.c_attn.weight", "grouped_llama": "model.layers.1.self_attn.k_proj.weight"}


def load(name: str, tensor: int, stage: int, folder: Path) -> tuple[State, Tensor, float, State]:
    """What `save` gives, of its checkpoint; and the weights after its export was loaded."""
    engine = engine_of(name, tensor, stage)
    engine.load_checkpoint(folder / "checkpoint", tag="one")
    found = engine.state_dict(), engine.full(FUSED[name], state="exp_avg").clone(), stepped(engine, 1)
    engine.load_weights(folder / "plain")
    weights = engine.state_dict()
    engine.load_state_dict(weights if engine.rank == 0 else {})
    assert all(torch.equal(value, weights[key]) for key, value in engine.state_dict().items())
    engine.close()
    return *found, weights


TRIPS: dict[str, list[tuple[int, int, int]]] = {  # ranks, degree and stage: of what saves, then of those that load
    "gpt2": [(4, 2, 3), (1, 1, 1)],
    "grouped_llama": [(2, 2, 0), (4, 4, 3)],
}


@pytest.mark.parametrize("name", MODELS)
def test_what_one_degree_saves_another_loads(ranks: RankPool, tmp_path: Path, name: str) -> None:
    (num_ranks, tensor, stage), *loading = TRIPS[name]
    state, moment, loss = ranks(num_ranks, save, name, tensor, stage, tmp_path)[0]
    for world, degree, other in loading:
        found, own_moment, own_loss, weights = ranks(world, load, name, degree, other, tmp_path)[0]
        for key, value in state.items():
            assert torch.equal(found[key], value) and torch.equal(weights[key], value), (key, world, degree)
        assert torch.equal(own_moment, moment)
        if world // degree == num_ranks // tensor:
            assert own_loss == pytest.approx(loss, rel=1e-6)
    if name == "gpt2":
        model = others.OwnGpt2ForCausalLM.from_pretrained(tmp_path / "plain")
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
