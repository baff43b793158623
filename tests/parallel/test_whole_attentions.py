"""Parts of the tokens in models whose attentions no rank has columns of, and over stages of a pipeline."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lowtide
from tests.parallel import expert_models as moe
from tests.parallel import models_of_others as others
from tests.parallel.test_tensor_sequence import parts
from tests.parallel.test_tensor_training import CASES as FAMILIES
from tests.parallel.test_tensor_training import TOLERANCE, case_of, plainly, split
from tests.ranks import RankPool
from tests.zero.training import assert_close, train_all

KEYS: dict[str, Any] = {"num_key_value_heads": 2, "pad_token_id": 0}


def _own(kind: Any) -> Any:
    """Of a class of transformers one whose forward is the loss of (ids, labels)."""

    class Own(kind):  # type: ignore[misc]  # of any class
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = super().forward(input_ids=ids, labels=labels, use_cache=False).loss
            return loss

    Own.__name__, Own.__module__ = f"Own{kind.__name__}", kind.__module__
    return Own


def olmo2(num_blocks: int = 2) -> nn.Module:
    """Norms over all heads of queries and keys, which are gathered for them."""
    config = transformers.Olmo2Config.from_dict({**others.COMMON, **KEYS, "num_hidden_layers": num_blocks})
    model: nn.Module = _own(transformers.Olmo2ForCausalLM)(config)
    return model.double()


def phi3() -> nn.Module:
    """Queries, keys and values in one layer, by widths of the config."""
    config = transformers.Phi3Config.from_dict({**others.COMMON, **KEYS})
    model: nn.Module = _own(transformers.Phi3ForCausalLM)(config)
    return model.double()


def glm() -> nn.Module:
    config = transformers.GlmConfig.from_dict({**others.COMMON, **KEYS, "head_dim": 8})
    model: nn.Module = _own(transformers.GlmForCausalLM)(config)
    return model.double()


def bloom(num_blocks: int = 2, rate: float = 0.0) -> nn.Module:
    """Its attention adds the residual itself."""
    sizes = {"vocab_size": others.VOCAB, "hidden_size": 32, "n_layer": num_blocks, "n_head": 4}
    config = transformers.BloomConfig.from_dict({**sizes, "attention_dropout": rate, "hidden_dropout": rate})
    model: nn.Module = _own(transformers.BloomForCausalLM)(config)
    return model.double()


CASES = {name: case_of(build) for name, build in {"olmo2": olmo2, "phi3": phi3, "glm": glm, "bloom": bloom}.items()}
CASES["deepseek"] = case_of(moe.deepseek, moe.tokens)


@pytest.mark.parametrize("name", CASES)
def test_they_train_as_in_one_process(ranks: RankPool, name: str) -> None:
    case = CASES[name]
    expected = plainly(case, 1)
    recomputed = parts(case, 3, "sockets", activation_checkpointing={"every": 1})
    for outcome in ranks(2, train_all, [split(case, 1, tensor=2), parts(case, 1), recomputed])[0]:
        assert_close(outcome, expected, TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("name", ["olmo2", "bloom"])
def test_four_ranks_train_as_one(ranks: RankPool, name: str) -> None:
    (outcome,) = ranks(4, train_all, [parts(CASES[name], 1, tensor=4)])[0]
    assert_close(outcome, plainly(CASES[name], 1), TOLERANCE, TOLERANCE)


def one_head_of_keys() -> nn.Module:
    """Both ranks have its linear layers, and parts of their gradients."""
    config = transformers.LlamaConfig(**others.COMMON, num_key_value_heads=1)
    return others.OwnLlamaForCausalLM(config).double()


PIPELINES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "llama": (FAMILIES["llama"], 1, {}),
    "gpt2": (FAMILIES["gpt2"], 3, {"communication": {"route": "sockets"}, "activation_checkpointing": {"every": 1}}),
    "bloom": (CASES["bloom"], 2, {"pipeline": {"schedule": "zb-h1"}}),
    "keys": (case_of(one_head_of_keys), 1, {"pipeline": {"schedule": "zb-h1"}}),
    "t5": (FAMILIES["t5"], 1, {"pipeline": {"schedule": "interleaved", "chunks": 2}}),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_parts_within_stages_of_a_pipeline(ranks: RankPool, name: str) -> None:
    """Between stages tokens are whole."""
    case, stage, config = PIPELINES[name]
    parallel = {"parallel": {"tensor": 2, "tensor_sequence": True, "pipeline": 2}}
    (outcome,) = ranks(4, train_all, [case.at(stage, config=parallel | config)])[0]
    assert_close(outcome, plainly(case, 1), TOLERANCE, TOLERANCE)


def config_of(every: int, has_parts: bool = True) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "sgd", "params": {"lr": 0.1}},
        "parallel": {"tensor": 2, "tensor_sequence": has_parts},
        "activation_checkpointing": {"every": every},
    }


def with_dropout(every: int) -> list[float]:
    torch.manual_seed(0)
    with lowtide.initialize(bloom(rate=0.3), config_of(every)) as engine:
        return [engine.train_step(others.tokens(step, 2)).loss.item() for step in range(3)]


def test_dropout_of_what_all_compute_is_the_same_on_all_and_in_a_recomputation(ranks: RankPool) -> None:
    """Else the first backward finds other gradients of what ranks have alike."""
    (first, second), (again, _) = ranks(2, with_dropout, 0), ranks(2, with_dropout, 1)
    assert first == second and first == pytest.approx(again, rel=1e-9)
    assert len(set(first)) == 3


def bytes_of_blocks(name: str, num_blocks: int) -> int:
    build = {"bloom": bloom, "olmo2": olmo2}[name]
    with lowtide.initialize(build(num_blocks), config_of(0)) as engine:
        exchange = engine._mesh.exchange(("tensor",))
        for _ in range(2):
            before = exchange.bytes_sent
            engine.train_step(tuple(one[:, :8] for one in others.tokens(0, 2)))
        return exchange.bytes_sent - before


# In sbh (t - 1) / t. Bloom: in front of attention its input and the residual, behind it its gradient; four of an MLP.
# OLMo2: the input, queries, and keys and values of half their width, and the output; backward the gradients of the
# output, of the columns of what goes into it, and of the input; four of an MLP. And the sums of gradients of two norms
# and of a bias behind rows.
BYTES = {"bloom": (3 + 4, 5 * 32), "olmo2": (1 + 1 + 0.5 + 0.5 + 1 + 3 + 4, 32 + 32)}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_those_of_the_formula(ranks: RankPool, name: str) -> None:
    two, three = (ranks(2, bytes_of_blocks, name, number)[0] for number in (2, 3))
    moved, summed = BYTES[name]
    assert three - two == moved * (2 * 8 * 32 * 8) // 2 + summed * 8
