"""Compiled blocks beside ranks that share sequences or experts: what these exchange is left out of the graphs."""

import warnings
from typing import Any

import pytest
import torch

import lowtide
from tests.kit.ranks import RankPool
from tests.parallel import expert_models as moe
from tests.parallel.test_sequence import batch_of
from tests.parallel.test_tiles import SIZES, VOCAB, config_of, transformers


def trained(axis: str) -> list[list[tuple[float, float]]]:
    """Losses and norms of two steps, with each block as it is, and compiled."""
    warnings.simplefilter("ignore")  # of torch's compiler, about itself
    found = []
    for compiled in ({}, {"compile": {"blocks": True, "backend": "eager"}}):
        torch.manual_seed(0)
        sizes: dict[str, Any] = SIZES | {"num_hidden_layers": 1}
        model: Any = moe.mixtral(num_hidden_layers=1)
        if axis == "sequence":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, use_cache=False, **sizes))
        config = config_of(3, parallel={axis: 2}, gradient_accumulation_steps=1, train_micro_batch_size_per_gpu=2)
        with lowtide.initialize(model, config | compiled) as engine:
            batches: list[Any] = [moe.tokens(step, 2) for step in range(2)]
            if axis == "sequence":
                batches = [{key: value[:2] for key, value in batch_of(step, "odd").items()} for step in range(2)]
            results = [engine.train_step(batch) for batch in batches]
        found.append([(result.loss.item(), result.grad_norm.item()) for result in results])
    return found


@pytest.mark.parametrize("axis", ["sequence", "expert"])
def test_they_train_as_they_do_uncompiled(ranks: RankPool, axis: str) -> None:
    plain, compiled = ranks(2, trained, axis, timeout=120)[0]
    for found, right in zip(compiled, plain, strict=True):
        assert found == pytest.approx(right, rel=1e-6)
