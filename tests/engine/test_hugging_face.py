"""Hugging Face models, unchanged, train under stage 3 to the bits of stage 0, with their caches."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.watch.log import logger
from tests.engine.test_deferred_model import assert_deferred_is_built
from tests.kit import training
from tests.kit.hugging_face import NUM_TOKENS, small, transformers
from tests.kit.models import recomputing
from tests.kit.ranks import RankPool
from tests.kit.training import Outcome, settings

ROWS = 2
ROUTES = ["shared_memory", "sockets"]


def llama() -> nn.Module:
    return small("LlamaForCausalLM")


def gpt2() -> nn.Module:
    return small("GPT2LMHeadModel")


def mixtral() -> nn.Module:
    """Each token goes to one of sixteen experts. A rank has ten tokens, so some experts get none."""
    return small("MixtralForCausalLM", num_local_experts=16, num_experts_per_tok=1)


def bert() -> nn.Module:
    return small("BertForMaskedLM")


def t5() -> nn.Module:
    return small("T5ForConditionalGeneration")


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{model.__name__: model for model in (llama, gpt2, mixtral, t5)},
    "llama_with_checkpointing": lambda: recomputing(llama(), use_reentrant=False),
    "llama_with_reentrant_checkpointing": lambda: recomputing(llama(), use_reentrant=True),
}


def batch_of(name: str, generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(NUM_TOKENS, (ROWS, 5), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens)}


def config_of(stage: int, transport: str) -> dict[str, Any]:
    optimizer = {"type": "adamw", "params": {"lr": 1e-2}}
    more = {"gradient_clipping": 1.0, "communication": {"transport": transport}}
    return training.settings(stage, optimizer=optimizer, **more)


def train(name: str, stage: int, transport: str) -> Outcome:
    torch.manual_seed(0)
    engine = lowtide.initialize(MODELS[name](), config_of(stage, transport))
    outcome = Outcome()
    torch.manual_seed(engine.rank)  # dropout
    generator = torch.Generator().manual_seed(100 + engine.rank)
    for _ in range(2):
        result = engine.train_step(batch_of(name, generator))
        outcome.losses.append(result.loss.item())
        outcome.norms.append(result.grad_norm.item())
    outcome.state = engine.state_dict()
    engine.close()
    return outcome


def train_all(names: list[str], stages: list[int], transport: str) -> dict[str, list[Outcome]]:
    return {name: [train(name, stage, transport) for stage in stages] for name in names}


@pytest.mark.parametrize("transport", ROUTES)
def test_stage_3_equals_stage_0_bitwise(ranks: RankPool, transport: str) -> None:
    """Each model has one of the transports."""
    names = [name for name in MODELS if ("llama" in name) == (transport == "sockets")]
    for results in ranks(2, train_all, names, [0, 3], transport):
        for name, (plain, sharded) in results.items():
            assert sharded.differences(plain) == [], name
            assert plain.losses[1] != plain.losses[0], name
            if "checkpointing" in name:
                assert sharded.differences(results["llama"][0]) == [], name


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5"])
def test_a_recorded_construction_gives_the_same_values_with_little_memory(name: str) -> None:
    peak, sizes = assert_deferred_is_built(MODELS[name])
    assert max(sizes) <= peak <= 1.5 * max(sizes)


# What a model of this version of transformers calls its cache.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
IDS = torch.arange(16).view(2, 8)
SEEN = torch.ones(2, 8, dtype=torch.long).index_put((torch.tensor([0]), torch.tensor([0])), torch.tensor(0))
CACHED: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}


def double_llama() -> Any:
    torch.manual_seed(0)
    return small("LlamaForCausalLM", **CACHED, num_hidden_layers=3, pad_token_id=0).double()


def double_t5() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 24, "num_heads": 2, "vocab_size": 40, "dropout_rate": 0.0}
    return small("T5ForConditionalGeneration", **sizes).double()


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


@pytest.mark.parametrize(("build", "every"), [(double_llama, 1), (double_t5, 2)])
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
    with lowtide.initialize(double_llama(), config) as engine:
        prefix = [torch.linspace(-1, 1, 96).double().view(2, 2, 3, 8).requires_grad_() for _ in range(6)]
        cache = transformers.DynamicCache(list(zip(prefix[::2], prefix[1::2], strict=True)))
        logits = engine(input_ids=IDS, **{CACHE: cache}).logits
        engine.backward(functional.cross_entropy(logits.flatten(0, 1), IDS.flatten()))
        engine.step()
        return [one.grad for one in prefix if one.grad is not None] + [
            value.clone() for value in engine.state_dict().values()
        ]


def test_a_cache_with_a_prefix_is_seen_as_it_was() -> None:
    for found, right in zip(with_prefix(1), with_prefix(0), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
