"""Recomputed blocks of models that keep keys and values, as those of Hugging Face do by default."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import lowtide
from lowtide.watch.log import logger
from tests.kit.training import settings

# What a model of this version of transformers calls its cache.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
IDS = torch.arange(16).view(2, 8)
SEEN = torch.ones(2, 8, dtype=torch.long).index_put((torch.tensor([0]), torch.tensor([0])), torch.tensor(0))
SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=3, pad_token_id=0)).double()


def t5() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = T5Config.from_dict({**sizes, "vocab_size": 40, "dropout_rate": 0.0, "decoder_start_token_id": 0})
    return T5ForConditionalGeneration(config).double()


def trained(build: Any, every: int, **more: Any) -> list[Tensor]:
    config = settings(3, optimizer={"type": "sgd"}, activation_checkpointing={"every": every})
    with lowtide.initialize(build(), config) as engine:
        losses = []
        for _ in range(2):
            output = engine(input_ids=IDS, attention_mask=SEEN, labels=IDS, **more)
            engine.backward(output.loss)
            losses.append(output.loss.detach())
            engine.step()
        with torch.no_grad():
            model: Any = engine.module.eval()
            given = model.generate(IDS[:, :3], attention_mask=SEEN[:, :3], max_new_tokens=5, do_sample=False)
        return [*losses, given, *(value.clone() for value in engine.state_dict().values())]


@pytest.mark.parametrize("build", [llama, t5])
@pytest.mark.parametrize("every", [1, 2])
def test_a_cache_changes_nothing(build: Any, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "info", lambda text, *args: said.append(text % args))
    plain = trained(build, 0, use_cache=False)
    for found, right in zip(trained(build, every), plain, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
    assert sum("recomputed blocks add nothing to a" in line for line in said) == 1


def with_prefix(every: int) -> list[Tensor]:
    """A loss behind tokens whose keys and values are in the cache, with the gradients that go through them."""
    config = settings(optimizer={"type": "sgd"}, activation_checkpointing={"every": every})
    with lowtide.initialize(llama(), config) as engine:
        prefix = [torch.linspace(-1, 1, 96).double().view(2, 2, 3, 8).requires_grad_() for _ in range(6)]
        cache = DynamicCache(list(zip(prefix[::2], prefix[1::2], strict=True)))
        logits = engine(input_ids=IDS, **{CACHE: cache}).logits
        engine.backward(functional.cross_entropy(logits.flatten(0, 1), IDS.flatten()))
        engine.step()
        return [one.grad for one in prefix if one.grad is not None] + [
            value.clone() for value in engine.state_dict().values()
        ]


def test_a_cache_with_a_prefix_is_seen_as_it_was() -> None:
    for found, right in zip(with_prefix(1), with_prefix(0), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
