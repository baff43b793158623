"""What ranks that share sequences refuse: batches, models, losses, and tokens that meet past shared attention."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from tests.kit.hugging_face import small
from tests.kit.ranks import on_ranks
from tests.kit.training import refusal
from tests.parallel.test_sequence import RING, TWO, Attends, Batch, Plain, batch_of, built
from tests.parallel.test_sequence_losses import WithLogits, cross_entropy, mean
from tests.parallel.test_tiles import MODELS as TILED, ROWS, WIDTH, config_of


class Written(Attends):
    """Has torch's attention, and does not use it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ x.transpose(1, 2)).softmax(-1) @ x if x.shape[0] else super().forward(x)


class Shifting(Attends):
    """Beside attention each token sees the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + functional.pad(x, (0, 0, 1, 0))[:, :-1] / WIDTH)


class Masked(Attends):
    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, None]
        return x + functional.scaled_dot_product_attention(rows, rows, rows, torch.zeros(x.shape[1], x.shape[1]))[:, 0]


class Summing(Plain):
    """Its loss is a sum."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        return super().forward(input_ids, position_ids, shift_labels) * (shift_labels != -100).sum()


class TwoLosses(WithLogits):
    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:  # type: ignore[override]
        logits, labels = super().forward(input_ids, position_ids).flatten(0, 1), shift_labels.flatten()
        return functional.cross_entropy(logits, labels) + functional.cross_entropy(logits, labels, ignore_index=1)


def capped() -> nn.Module:
    model = small("Gemma2ForCausalLM")
    model.config._attn_implementation = "eager"
    return model


def of(block: type[nn.Module], model: type[Plain] = Plain, num_blocks: int = 2) -> nn.Module:
    made = model()
    made.blocks = nn.ModuleList(block() for _ in range(num_blocks))
    return made


def summed(output: Any, batch: Batch) -> Tensor:
    return cross_entropy(output, batch["shift_labels"], "sum")


def shifted_again(output: Any, batch: Batch) -> Tensor:
    return cross_entropy(output.logits[:, :-1], batch["labels"][:, 1:])


def of_rows(output: Any, batch: Batch) -> Tensor:
    """Rows count alike, however many labels they have."""
    labels = batch["shift_labels"]
    terms = functional.cross_entropy(output.logits.transpose(1, 2), labels, reduction="none")
    return (terms.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()


def stepped(engine: lowtide.Engine, batch: Batch) -> object:
    return engine.train_step(batch)


def with_part_of_labels(engine: lowtide.Engine, batch: Batch) -> None:
    engine.sequence_part(batch.pop("shift_labels"), fill=-100)
    engine(**batch)


@dataclass
class Refused:
    text: str
    build: Callable[[], nn.Module] = TILED["llama"]
    kind: str = "odd"
    loss_fn: Any = None
    config: dict[str, Any] = field(default_factory=lambda: TWO)
    call: Callable[[lowtide.Engine, Batch], object] = stepped  # the second time too


def changed(**changes: Callable[[Tensor], Tensor]) -> Callable[[lowtide.Engine, Batch], object]:
    """With values that are made of input_ids."""
    return lambda engine, batch: engine.train_step(batch | {key: f(batch["input_ids"]) for key, f in changes.items()})


def of_this_rank(ids: Tensor) -> Tensor:
    return ids + torch.distributed.get_rank() % 2


NO_SUM = "expected the mean over the labels of its part"
POSITIONS = "batch: expected position_ids, since"
STAGES = {"parallel": {"pipeline": 2, "sequence": 2}}
PLAIN: dict[str, Any] = {"build": Plain, "kind": "plain"}
REFUSED: dict[int, list[Refused]] = {  # by number of ranks
    2: [
        Refused(
            "batch: expected a mapping with input_ids (or inputs_embeds), found tuple",
            call=lambda engine, batch: engine.train_step((batch["input_ids"], batch["labels"])),
        ),
        Refused(
            "position_ids: expected (rows, tokens) of 30 tokens, found (2, 29)",
            call=changed(position_ids=lambda ids: ids[:, 1:]),
        ),
        Refused(
            "attention_mask: expected (rows, tokens) of 30 tokens, 1 for visible tokens, found (2, 1, 30, 30)",
            call=changed(attention_mask=lambda ids: torch.ones(2 * ROWS, 1, 30, 30)),
        ),
        Refused(
            "sequence(2) > tokens(1): a rank would have no token",
            call=lambda engine, batch: engine.train_step({key: value[:, :1] for key, value in batch.items()}),
        ),
        Refused(
            "expected a call with keyword arguments, engine(**batch), found positional arguments",
            call=lambda engine, batch: engine(batch["input_ids"]),
        ),
        Refused("expected labels among the inputs", call=lambda engine, batch: engine(input_ids=batch["input_ids"])),
        Refused("batch: expected the same batch on the 2 ranks of sequence", call=changed(input_ids=of_this_rank)),
        # Tokens that meet past attention.
        Refused("expected split attention in a forward of Plain, found no call of it", partial(of, Written), "plain"),
        Refused("as many keys as queries, and no mask but is_causal, found a mask of", partial(of, Masked), "plain"),
        Refused(
            "expected tokens of Plain to mix only in attention, found that a token's loss depends",
            partial(of, Shifting),
            "plain",
        ),
        Refused(
            "expected tokens of WithLogits to mix only in attention",
            partial(of, Shifting, WithLogits),
            "plain",
            call=with_part_of_labels,
        ),
        Refused(
            "expected engine(**batch), engine.train_step or engine.eval_step, found a direct call of the Plain",
            **PLAIN,
            call=lambda engine, batch: engine.module(**batch),
        ),
        # Losses that are no mean over labels.
        *(Refused(f"loss_fn: {NO_SUM}", loss_fn=loss_fn) for loss_fn in (summed, of_rows)),
        Refused(
            "; a loss_fn must ignore tokens without a label",
            WithLogits,
            "plain",
            loss_fn=lambda output, _: output.square().mean(),
        ),
        Refused("a loss_fn must ignore tokens without a label, and must not shift labels", loss_fn=shifted_again),
        Refused(
            "batch: expected labels or shift_labels for the loss_fn",
            loss_fn=mean,
            call=lambda engine, batch: engine.train_step({"input_ids": batch["input_ids"]}),
        ),
        Refused(f"the loss of Summing: {NO_SUM}", Summing, "plain"),
        Refused(
            "loss: expected the same ignore_index in all losses, since it pads the parts, found -100 and 1",
            TwoLosses,
            "plain",
        ),
        # Positions that are not counted from 0 through the whole row.
        Refused(f"{POSITIONS} RobertaForCausalLM", partial(small, "RobertaForCausalLM", is_decoder=True)),
        Refused(f"{POSITIONS} OPTForCausalLM", partial(small, "OPTForCausalLM", word_embed_proj_dim=32), "left"),
        # Attention that no ring computes.
        Refused("Gemma2Attention: ring attention computes scaled scores only", capped, config=TWO | RING),
        Refused(
            "attention_mask: expected no label on a token that sees no token",
            partial(built, "eager"),
            "left",
            config=TWO | RING,
        ),
    ],
    4: [
        Refused("expected tokens of Plain to mix only in attention", partial(of, Shifting), "plain", config=STAGES),
    ],
}


@pytest.mark.parametrize("num_ranks", REFUSED)
@on_ranks("num_ranks", timeout=120)
def test_what_cannot_be_shared_is_an_error(num_ranks: int) -> None:
    """The second time too."""
    for row in REFUSED[num_ranks]:
        torch.manual_seed(0)
        with lowtide.initialize(row.build(), config_of(1) | row.config, loss_fn=row.loss_fn) as engine:
            with contextlib.suppress(ValueError):
                row.call(engine, batch_of(0, row.kind))
            engine.zero_grad()
            assert row.text in refusal(row.call, engine, batch_of(0, row.kind))


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4)


llama = partial(small, "LlamaForCausalLM", num_key_value_heads=4)
REFUSED_MODELS: list[tuple[Callable[[], nn.Module], str]] = [
    (
        llama,
        r"sequence\(3\) x heads of a rank\(\?\) = attention heads\(4\) does not hold; set parallel.sequence to",
    ),
    (lambda: nn.Linear(3, 3), "Linear: expected a Hugging Face model, or modules with methods"),
    (OwnAttention, "nn.MultiheadAttention cannot be split over ranks"),
    (lambda: small("BertForMaskedLM"), "expected a causal language model of transformers"),
    (
        lambda: small("BloomForCausalLM", n_layer=1, n_head=8),
        r"expected a model whose attention can be exchanged \(AttentionInterface\), found BloomForCausalLM",
    ),
    (
        lambda: llama(layer_types=["chunked_attention"] * 2),
        "config.layer_types: expected full_attention and sliding_attention only, found chunked_attention",
    ),
    (
        lambda: llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "config.rope_parameters: expected angles that do not depend on the length, found dynamic",
    ),
    (
        lambda: llama(attn_implementation="flex_attention"),
        'attn_implementation: expected "sdpa" or "eager", found "flex_attention"',
    ),
    (lambda: llama(layerdrop=0.1), "config.layerdrop: ranks draw different random numbers"),
]


@on_ranks(3)
def test_models_whose_sequences_cannot_be_shared_are_errors() -> None:
    for make, text in REFUSED_MODELS:
        more = {"sequence_parallel": {"attention": "ulysses"}} if "heads" in text else {}
        config = config_of(1, parallel={"sequence": 3}, **more)
        assert re.search(text, refusal(lowtide.initialize, make(), config, kind=lowtide.ConfigError))
