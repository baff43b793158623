"""Compiled blocks beside ranks that share sequences or experts: what these exchange is left out of the graphs."""

import warnings
from typing import Any

import pytest
import torch

import lowtide
from tests.kit.ranks import RankPool
from tests.parallel import models_of_others as others
from tests.parallel.test_sequence import batch_of
from tests.parallel.test_tiles import SIZES, VOCAB, config_of, transformers


def trained(axis: str) -> list[list[float]]:
    """Losses and norms of two steps, with each block as it is, and compiled."""
    warnings.simplefilter("ignore")  # of torch's compiler, about itself
    found = []
    for compiled in ({}, {"compile": {"blocks": True, "backend": "eager"}}):
        torch.manual_seed(0)
        model: Any = others.mixtral(num_hidden_layers=1)
        if axis == "sequence":
            sizes: dict[str, Any] = SIZES | {"num_hidden_layers": 1, "use_cache": False}
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **sizes))
        config = config_of(3, parallel={axis: 2}, gradient_accumulation_steps=1, train_micro_batch_size_per_gpu=4)
        with lowtide.initialize(model, config | compiled) as engine:
            batches: list[Any] = [batch_of(at, "odd") if axis == "sequence" else others.tokens(at, 4) for at in (0, 1)]
            results = [engine.train_step(batch) for batch in batches]
        found.append([number.item() for result in results for number in (result.loss, result.grad_norm)])
    return found


@pytest.mark.parametrize("axis", ["sequence", "expert"])
def test_they_train_as_they_do_uncompiled(ranks: RankPool, axis: str) -> None:
    plain, compiled = ranks(2, trained, axis, timeout=120)[0]
    assert compiled == pytest.approx(plain, rel=1e-6)
