"""Parts of the tokens in models whose attentions no rank has columns of, and over stages of a pipeline."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lowtide
from tests.kit.ranks import RankPool
from tests.kit.training import assert_close, train_all
from tests.parallel import expert_models as moe
from tests.parallel import models_of_others as others
from tests.parallel.test_tensor_training import CASES as FAMILIES
from tests.parallel.test_tensor_training import TOLERANCE, case_of, plainly

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


def one_head_of_keys() -> nn.Module:
    """Both ranks have its linear layers, and parts of their gradients."""
    config = transformers.LlamaConfig(**others.COMMON, num_key_value_heads=1)
    return others.OwnLlamaForCausalLM(config).double()


CASES = {build.__name__: case_of(build, accumulation=1) for build in (olmo2, phi3, glm, bloom)} | {
    "deepseek": case_of(moe.deepseek, moe.tokens, accumulation=1),
    "one_head_of_keys": case_of(one_head_of_keys),
    "t5": FAMILIES["t5"],
}
PARTS: dict[str, Any] = {"parallel": {"tensor": 2, "tensor_sequence": True}}
AGAIN: dict[str, Any] = {"activation_checkpointing": {"every": 1}, "communication": {"transport": "sockets"}}
# Between stages tokens are whole.
STAGES: dict[str, Any] = {"parallel": {"tensor": 2, "tensor_sequence": True, "pipeline": 2}}
ROWS: dict[int, list[tuple[str, int, dict[str, Any]]]] = {  # by number of ranks: model, stage, config
    2: [
        ("olmo2", 1, {"parallel": {"tensor": 2}}),
        ("olmo2", 3, PARTS | AGAIN),
        ("phi3", 1, PARTS),
        ("glm", 0, PARTS),
        ("bloom", 3, PARTS | AGAIN),
        ("deepseek", 2, PARTS),
    ],
    4: [
        ("one_head_of_keys", 3, STAGES | AGAIN | {"pipeline": {"schedule": "zb-h1"}}),
        ("t5", 1, STAGES | {"pipeline": {"schedule": "interleaved", "chunks": 2}}),
    ],
}


@pytest.mark.parametrize("num_ranks", ROWS)
def test_they_train_as_in_one_process(ranks: RankPool, num_ranks: int) -> None:
    cases = [CASES[name].at(stage, config=config) for name, stage, config in ROWS[num_ranks]]
    for row, outcome in zip(ROWS[num_ranks], ranks(num_ranks, train_all, cases)[0], strict=True):
        assert_close(outcome, plainly(CASES[row[0]], 1), TOLERANCE, TOLERANCE, str(row))


def config_of(every: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "sgd", "params": {"lr": 0.1}},
        "parallel": {"tensor": 2, "tensor_sequence": True},
        "activation_checkpointing": {"every": every},
    }


def with_dropout() -> list[list[float]]:
    """Losses without and with a recomputation."""
    found = []
    for every in (0, 1):
        torch.manual_seed(0)
        with lowtide.initialize(bloom(rate=0.3), config_of(every)) as engine:
            found.append([engine.train_step(others.tokens(step, 2)).loss.item() for step in range(2)])
    return found


def test_dropout_of_what_all_compute_is_the_same_on_all_and_in_a_recomputation(ranks: RankPool) -> None:
    """Else the first backward finds other gradients of what ranks have alike."""
    (first, again), others_have = ranks(2, with_dropout)
    assert others_have == [first, again] and first == pytest.approx(again, rel=1e-9)
    assert len(set(first)) == 2


# In sbh (t - 1) / t. Bloom: in front of attention its input and the residual, behind it its gradient; four of an MLP.
# OLMo2: the input, queries, and keys and values of half their width, and the output; backward the gradients of the
# output, of the columns of what goes into it, and of the input; four of an MLP. And the sums of gradients of two norms
# and of a bias behind rows.
BYTES = {bloom: (3 + 4, 5 * 32), olmo2: (1 + 1 + 0.5 + 0.5 + 1 + 3 + 4, 32 + 32)}


def bytes_of_blocks() -> list[int]:
    """Those of a step that the third block of each model adds to two."""
    found = []
    for build in BYTES:
        sent = []
        for num_blocks in (2, 3):
            with lowtide.initialize(build(num_blocks), config_of(0)) as engine:
                exchange = engine._mesh.exchange(("tensor",))
                for _ in range(2):
                    before = exchange.bytes_sent
                    engine.train_step(tuple(one[:, :8] for one in others.tokens(0, 2)))
                sent.append(exchange.bytes_sent - before)
        found.append(sent[1] - sent[0])
    return found


def test_bytes_are_those_of_the_formula(ranks: RankPool) -> None:
    assert ranks(2, bytes_of_blocks)[0] == [
        moved * (2 * 8 * 32 * 8) // 2 + summed * 8 for moved, summed in BYTES.values()
    ]
