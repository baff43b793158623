"""Ranks that share sequences train as one process does: losses, norms and values are the same."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.comm import Axis, Collectives
from lowtide.comm.axis import SoloTransport
from lowtide.model.patches import ModelPatches
from lowtide.parallel.sequence_attention import SequenceAttention, check_attention, sent_heads
from tests.kit import models
from tests.kit.hugging_face import small
from tests.kit.ranks import RankPool
from tests.parallel.test_tiles import MODELS as TILED, ROWS, VOCAB, WIDTH, config_of, gpt2
from tests.parallel.trainings import AGAIN, SOCKETS, apart, values_after

LENGTH = 30  # neither 4 divides it, nor 2 what is left
Batch = dict[str, Tensor]


class Attends(nn.Module):
    """With as many heads as there are columns for."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Plain(nn.Module):
    """Its loss is a mean over labels that stand where they are predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Attends() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), shift_labels.flatten())


# With a window, and keys that are fewer than ranks.
mistral = partial(small, "MistralForCausalLM", num_key_value_heads=1, sliding_window=7)


def eager_llama() -> nn.Module:
    model: Any = TILED["llama"]()
    model.config._attn_implementation = "eager"
    return model


def llama_of(heads: int, of_keys: int) -> nn.Module:
    sizes = {"hidden_size": 48, "num_attention_heads": heads, "num_key_value_heads": of_keys, "head_dim": 8}
    return small("LlamaForCausalLM", **sizes)


MODELS: dict[str, Any] = {
    **TILED,
    "mistral": mistral,
    "eager": eager_llama,
    "Plain": Plain,
    "deep": partial(small, "LlamaForCausalLM", num_hidden_layers=4),
    "three": lambda: llama_of(3, 1),
    "six": lambda: llama_of(6, 2),
    "dropping": lambda: gpt2(0.3),
}


def batch_of(step: int, kind: str) -> Batch:
    """Of two microbatches."""
    generator = torch.Generator().manual_seed(step)
    length = {"divides": 32, "one row": 31}.get(kind, LENGTH)
    tokens = torch.randint(1, VOCAB, (2 * ROWS, length), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    positions = torch.arange(length).repeat(2 * ROWS, 1)
    if kind == "padded":  # unequal rows, so that parts have unequal numbers of labels
        seen = torch.ones_like(tokens)
        seen[0, 20:] = seen[2, 9:] = 0
        batch |= {"attention_mask": seen, "labels": tokens.masked_fill(seen == 0, -100)}
    if kind == "left":  # a label stands where nothing is seen
        seen = (torch.arange(length) >= torch.tensor([[0], [5], [0], [17]])).long()
        batch |= {"attention_mask": seen, "labels": tokens.masked_fill(seen == 0, -100)}
    if "packed" in kind:
        positions = torch.cat([positions[:, :11], positions[:, : length - 11]], dim=1)
        batch["position_ids"] = positions
    if kind == "packed, masked":  # Hugging Face's models look at the mask alone
        batch["attention_mask"] = torch.ones_like(tokens)
    if kind.startswith("plain"):
        labels = functional.pad(tokens, (0, 1), value=-100)[:, 1:].clone()
        labels[:, 13:] = -100  # of the last ranks nothing is predicted
        return {"input_ids": tokens, "position_ids": positions, "shift_labels": labels}
    return batch


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: Any = MODELS[name]()
    if hasattr(model, "config"):
        model.config.use_cache = False  # with a cache Hugging Face does not look for packed sequences
    return model


def train(name: str, kind: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """On batches of its data-parallel rank."""
    engine = lowtide.initialize(built(name), config)
    return values_after(engine, *(batch_of(10 * engine.data_rank + step, kind) for step in (0, 2)))


OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
BF16 = {"bf16": {"enabled": True}}
RING = {"sequence_parallel": {"attention": "ring"}}
TWO = {"parallel": {"sequence": 2}}
Row = tuple[str, str, int, dict[str, Any]]  # model, batch, stage, config
TABLE: dict[int, list[Row]] = {  # by number of ranks
    2: [
        ("llama", "padded", 3, TWO | SOCKETS),
        ("gpt2", "odd", 1, TWO),
        ("mistral", "odd", 2, TWO | OFFLOADED),
        ("Plain", "plain, packed", 1, TWO),  # it asks for no mask
        ("qwen3", "packed", 3, TWO | {"tiles": {"mlp": 5, "loss": 4}}),
        ("eager", "left", 0, TWO),
        ("llama", "packed, masked", 1, TWO),
        # Of as many heads as ranks do not divide, or as the config asks.
        ("six", "packed", 2, TWO),
        ("three", "padded", 3, TWO | SOCKETS | BF16),
        ("mistral", "left", 3, TWO | RING),
    ],
    4: [
        ("six", "packed", 2, {"parallel": {"sequence": 4}}),
        ("llama", "odd", 3, TWO),  # groups with data of their own
        ("llama", "odd", 3, {"parallel": {"sequence": 2, "tensor": 2, "tensor_sequence": True}}),
        ("six", "odd", 3, {"parallel": {"sequence": 2, "tensor": 2}}),  # three heads on each rank
        (
            *("deep", "packed", 1),
            {"parallel": {"sequence": 2, "pipeline": 2}, "pipeline": {"schedule": "zb-v"}, **SOCKETS, **AGAIN},
        ),
    ],
}


def train_all(rows: list[Row]) -> list[dict[str, Tensor]]:
    return [train(name, kind, config_of(stage) | config) for name, kind, stage, config in rows]


def ranks_of(parallel: dict[str, Any]) -> int:
    """That share the data."""
    return math.prod(value for value in parallel.values() if value is not True)


@pytest.mark.parametrize("num_ranks", TABLE)
def test_sequences_that_ranks_share_train_as_one_process_does(ranks: RankPool, num_ranks: int) -> None:
    rows = TABLE[num_ranks]
    keys = [(num_ranks // ranks_of(more["parallel"]), name, kind, "bf16" in more) for name, kind, _, more in rows]
    alone: dict[tuple[int, str, str, bool], dict[str, Tensor]] = {}
    for size in {key[0] for key in keys}:
        own = sorted({key for key in keys if key[0] == size})
        plain: list[Row] = [(name, kind, 0, BF16 if is_bf16 else {}) for _, name, kind, is_bf16 in own]
        alone |= zip(own, ranks(size, train_all, plain)[0], strict=True)
    for rank, of_rank in enumerate(ranks(num_ranks, train_all, rows, timeout=200)):
        for key, row, found in zip(keys, rows, of_rank, strict=True):
            right = alone[key]
            assert rank or found.keys() == right.keys()  # rank 0 has the values
            assert apart(found, right, 1e-2 if "bf16" in row[3] else 1e-6) == [], (rank, row)


class DecoratedAttention(Attends):
    forward = models.decorated(Attends.forward)


def test_attention_in_a_decorated_forward_is_found() -> None:
    check_attention(DecoratedAttention(), 3)


def test_close_gives_a_model_its_attention_back() -> None:
    for name in ("llama", "Plain"):
        model: Any = MODELS[name]()
        attention = SequenceAttention(Collectives(Axis("sequence", 0, (0,), (0,), SoloTransport(torch.device("cpu")))))
        patches, before = ModelPatches(), getattr(getattr(model, "config", None), "_attn_implementation", None)
        attention.put_on(model, patches)
        assert name == "Plain" or model.config._attn_implementation != before
        patches.close()
        assert name == "Plain" or model.config._attn_implementation == before
        assert not any("forward" in vars(module) for module in model.modules())


def test_keys_are_sent_as_often_as_ranks_need_them() -> None:
    assert [sent_heads(4, 8, keys) for keys in (1, 2, 4, 8)] == [4, 4, 4, 8]
    assert sent_heads(4, 12, 3) == 12 and sent_heads(2, 6, 3) == 6
