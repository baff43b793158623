"""Ranks that share sequences train as one process does: losses, norms and values are the same."""

import re
from pathlib import Path
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
from tests.kit.ranks import RankPool
from tests.parallel.test_tiles import MODELS as TILED
from tests.parallel.test_tiles import ROWS, SIZES, VOCAB, WIDTH, config_of, transformers

LENGTH = 30  # neither 4 divides it, nor 2 what is left
Batch = dict[str, Tensor]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


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


def mistral() -> nn.Module:
    """With a window, and keys that are fewer than ranks."""
    config = transformers.MistralConfig(vocab_size=VOCAB, num_key_value_heads=1, sliding_window=7, **SIZES)
    return transformers.MistralForCausalLM(config)


def eager_llama() -> nn.Module:
    model: Any = TILED["llama"]()
    model.config._attn_implementation = "eager"
    return model


MODELS: dict[str, Any] = {**TILED, "mistral": mistral, "eager": eager_llama, "Plain": Plain}


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


def train(
    name: str, config: dict[str, Any], kind: str, by_hand: bool = False, models: dict[str, Any] = MODELS
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = models[name]()
    if hasattr(model, "config"):
        model.config.use_cache = False  # with a cache Hugging Face does not look for packed sequences
    engine = lowtide.initialize(model, config)
    batch, found = batch_of(0, kind), dict[str, Tensor]()
    if by_hand:
        for half in range(2):
            engine.backward(engine(**{key: value.chunk(2)[half] for key, value in batch.items()}).loss)
            engine.step()
    else:
        done = engine.train_step(batch)
        found = {"loss": done.loss, "norm": done.grad_norm}
    found["evaluated"] = engine.eval_step(batch_of(2, kind))
    state = engine.state_dict()
    engine.close()
    return {key: value.detach().clone() for key, value in (found | state).items()}


CASES: list[tuple[str, int, str, dict[str, Any]]] = [
    ("llama", 3, "padded", {"communication": {"transport": "sockets"}}),
    ("gpt2", 1, "odd", {}),
    ("mistral", 2, "odd", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    ("Plain", 1, "plain, packed", {}),  # it asks for no mask
    ("qwen3", 3, "packed", {"tiles": {"mlp": 5, "loss": 4}}),
    ("eager", 0, "left", {}),
    ("llama", 1, "packed, masked", {}),
    ("eager", 0, "packed", {}),
]
OF_FOUR = 1  # the first of these, on four ranks too


def train_all(size: int) -> list[dict[str, Tensor]]:
    return [
        train(name, config_of(stage, parallel={"sequence": size}, **more), kind)
        for name, stage, kind, more in CASES[: OF_FOUR if size == 4 else None]
    ]


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> list[dict[str, Tensor]]:
    return ranks(1, train_all, 1)[0]


@pytest.mark.parametrize("size", [2, 4])
def test_sequences_that_ranks_share_train_as_one_process_does(
    ranks: RankPool, alone: list[dict[str, Tensor]], size: int
) -> None:
    wrong = []
    for rank, of_rank in enumerate(ranks(size, train_all, size)):
        for case, found, right in zip(CASES, of_rank, alone, strict=False):
            assert rank or found.keys() == right.keys()  # rank 0 has the values
            wrong += [
                f"rank {rank}, {case}: {key}: {(found[key] - right[key]).norm() / right[key].norm():.1e}"
                for key in found
                if (found[key] - right[key]).norm() > 1e-6 * right[key].norm() + 2e-7
            ]
    assert wrong == []


def by_hand(size: int) -> list[dict[str, Tensor]]:
    return [train("llama", config_of(3, parallel={"sequence": size}), "odd", by_hand=by) for by in (False, True)]


def test_a_loop_of_ones_own_trains_as_train_step_does(ranks: RankPool) -> None:
    stepped, looped = ranks(2, by_hand, 2)[0]
    assert all(torch.equal(looped[key], stepped[key]) for key in looped)


def beside_data(size: int) -> dict[str, Tensor]:
    """4 ranks: two groups with data of their own, or two ranks without sequences."""
    torch.manual_seed(0)
    config = config_of(3, parallel={"sequence": size})
    engine = lowtide.initialize(MODELS["llama"](), config)
    group = torch.distributed.get_rank() // size
    result = engine.train_step({key: value.roll(group, 1) for key, value in batch_of(0, "odd").items()})
    values = engine.state_dict() | {"loss": result.loss, "norm": result.grad_norm}
    engine.close()
    return {key: value.detach().clone() for key, value in values.items()}


def test_groups_with_data_of_their_own_shard_together(ranks: RankPool) -> None:
    shared, whole = ranks(4, beside_data, 2)[0], ranks(2, beside_data, 1)[0]
    for key, value in whole.items():
        torch.testing.assert_close(shared[key], value, rtol=1e-6, atol=2e-7)


def refusals() -> dict[str, str]:
    rank = torch.distributed.get_rank()
    found = {}
    engine = lowtide.initialize(MODELS["llama"](), config_of(1, parallel={"sequence": 2}))
    batch = batch_of(0, "odd")
    short = {key: value[:, :1] for key, value in batch.items()}
    calls: dict[str, Any] = {
        "tuple": lambda: engine.train_step((batch["input_ids"], batch["labels"])),
        "positions": lambda: engine.train_step(batch | {"position_ids": batch["input_ids"][:, 1:]}),
        "mask": lambda: engine.train_step(batch | {"attention_mask": torch.ones(2 * ROWS, 1, 30, 30)}),
        "short": lambda: engine.train_step(short),
        "positional": lambda: engine(batch["input_ids"]),
        "no labels": lambda: engine(input_ids=batch["input_ids"]),
        "differs": lambda: engine.train_step(batch | {"input_ids": batch["input_ids"] + rank}),
    }
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
        engine.zero_grad()
    engine.close()
    return found


REFUSED = {
    "tuple": "batch: expected a mapping with input_ids (or inputs_embeds), found tuple",
    "positions": "position_ids: expected (rows, tokens) of 30 tokens, found (2, 29)",
    "mask": "attention_mask: expected (rows, tokens) of 30 tokens, 1 for visible tokens, found (2, 1, 30, 30)",
    "short": "sequence(2) > tokens(1): a rank would have no token",
    "positional": "expected a call with keyword arguments, engine(**batch), found positional arguments",
    "no labels": "expected labels among the inputs",
    "differs": "batch: expected the same batch on the 2 ranks of sequence",
}


def test_batches_that_cannot_be_shared_are_errors(ranks: RankPool) -> None:
    for found in ranks(2, refusals):
        for name, text in REFUSED.items():
            assert text in found.get(name, ""), name


class DecoratedAttention(Attends):
    forward = models.decorated(Attends.forward)


def test_attention_in_a_decorated_forward_is_found() -> None:
    check_attention(DecoratedAttention(), 3)


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCAB, **SIZES))


REFUSED_MODELS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "heads": (
        MODELS["llama"],
        {"parallel": {"sequence": 3}, "sequence_parallel": {"attention": "ulysses"}},
        r"sequence\(3\) x heads of a rank\(\?\) = attention heads\(4\) does not hold; set parallel.sequence to",
    ),
    "no attention": (
        lambda: nn.Linear(3, 3),
        {"parallel": {"sequence": 3}},
        "Linear: expected a Hugging Face model, or modules with methods",
    ),
    "torch's own": (OwnAttention, {"parallel": {"sequence": 3}}, "nn.MultiheadAttention cannot be split over ranks"),
    "no causal model": (bert, {"parallel": {"sequence": 3}}, "expected a causal language model of transformers"),
    "attention of its own": (
        lambda: transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=VOCAB, n_layer=1, hidden_size=WIDTH)),
        {"parallel": {"sequence": 3}},
        r"expected a model whose attention can be exchanged \(AttentionInterface\), found BloomForCausalLM",
    ),
    "chunks": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, layer_types=["chunked_attention"] * 2)),
        {"parallel": {"sequence": 3}},
        "config.layer_types: expected full_attention and sliding_attention only, found chunked_attention",
    ),
    "angles": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            )
        ),
        {"parallel": {"sequence": 3}},
        "config.rope_parameters: expected angles that do not depend on the length, found dynamic",
    ),
    "layers left out": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, layerdrop=0.1)),
        {"parallel": {"sequence": 3}},
        "config.layerdrop: ranks draw different random numbers",
    ),
}


def refused_models() -> dict[str, str]:
    found = {}
    for name, (make, more, _) in REFUSED_MODELS.items():
        try:
            lowtide.initialize(make(), config_of(1, **more)).close()
        except lowtide.ConfigError as error:
            found[name] = str(error)
    return found


def test_models_whose_sequences_cannot_be_shared_are_errors(ranks: RankPool) -> None:
    for found in ranks(3, refused_models):
        for name, (_, _, text) in REFUSED_MODELS.items():
            assert re.search(text, found.get(name, "")), (name, found.get(name))


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


def save_and_train(folder: str, size: int) -> list[float]:
    """A step, a checkpoint, and the next step; or that step of a checkpoint that is there."""
    torch.manual_seed(0)
    config = config_of(3, parallel={"sequence": size}) | {"optimizer": {"type": "adamw", "params": {"lr": 1e-2}}}
    engine = lowtide.initialize(MODELS["llama"](), config)
    if size > 1:
        engine.train_step(batch_of(0, "odd"))
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    result = engine.train_step(batch_of(1, "odd"))
    found = [float(result.loss), float(result.grad_norm), float(engine.eval_step(batch_of(2, "odd")))]
    engine.close()
    return found


def test_a_checkpoint_knows_of_no_sequences(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks(2, save_and_train, str(tmp_path), 2)[0]
    assert ranks(1, save_and_train, str(tmp_path), 1)[0] == pytest.approx(saved, rel=1e-5)


def beside_tensor(tensor: int) -> dict[str, Tensor]:
    parallel = {"sequence": 2, "tensor": tensor, "tensor_sequence": True} if tensor > 1 else {}
    return train("llama", config_of(3, parallel=parallel), "odd")


def test_ranks_share_layers_and_parts_beside_sequences(ranks: RankPool) -> None:
    shared, alone = ranks(4, beside_tensor, 2)[0], ranks(1, beside_tensor, 1)[0]
    for key, value in alone.items():
        assert (shared[key] - value).norm() <= 1e-6 * value.norm() + 2e-7, key
