"""Compiled blocks beside ranks that share sequences or experts: what these exchange is left out of the graphs."""

import warnings
from typing import Any

import pytest
import torch

import lowtide
from tests.parallel import expert_models as moe
from tests.parallel.test_sequence import MODELS, batch_of
from tests.parallel.test_tiles import config_of
from tests.ranks import RankPool


def trained(axis: str, is_compiled: bool) -> list[tuple[float, float]]:
    """Losses and norms."""
    warnings.simplefilter("ignore")  # of torch's compiler, about itself
    torch.manual_seed(0)
    model: Any = MODELS["llama"]() if axis == "sequence" else moe.mixtral()
    model.config.use_cache = False
    config = config_of(3, parallel={axis: 2}, gradient_accumulation_steps=1, train_micro_batch_size_per_gpu=2)
    if is_compiled:
        config["compile"] = {"blocks": True, "backend": "eager"}
    with lowtide.initialize(model, config) as engine:
        batches: list[Any] = [moe.tokens(step, 2) for step in range(2)]
        if axis == "sequence":
            batches = [{key: value[:2] for key, value in batch_of(step, "odd").items()} for step in range(2)]
        results = [engine.train_step(batch) for batch in batches]
    return [(result.loss.item(), result.grad_norm.item()) for result in results]


@pytest.mark.parametrize("axis", ["sequence", "expert"])
def test_they_train_as_they_do_uncompiled(ranks: RankPool, axis: str) -> None:
    plain = ranks(2, trained, axis, False)[0]
    for found, right in zip(ranks(2, trained, axis, True, timeout=120)[0], plain, strict=True):
        assert found == pytest.approx(right, rel=1e-6)
