"""With a part of the tokens on each rank between split layers a model trains as it does in one process."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lowtide
from tests.kit.ranks import RankPool
from tests.kit.training import assert_close, train_all
from tests.parallel import models_of_others as others
from tests.parallel.test_tensor_training import CASES, TOLERANCE, Row, check, plainly

PARTS = {"tensor": 2, "tensor_sequence": True}  # of nine tokens, which the ranks do not divide
ROWS: dict[int, list[Row]] = {  # by number of ranks
    2: [(name, 1, number % 4, {}) for number, name in enumerate(("gpt2", "bert", "gpt_oss", "t5", "vit"))],
    4: [
        (
            *("llama", 1, 3),
            {
                "parallel": {"tensor": 4, "tensor_sequence": True},
                "communication": {"transport": "sockets"},
                "activation_checkpointing": {"every": 1},
            },
        ),
    ],
}


@pytest.mark.parametrize("num_ranks", ROWS)
def test_models_of_others_train_as_in_one_process(ranks: RankPool, num_ranks: int) -> None:
    check(ranks, num_ranks, ROWS[num_ranks], **PARTS)


class Mixer(nn.Module):
    """A block whose split layers are its own, with dropout between and beside them."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 64), nn.Linear(64, 8)
        self.inner, self.outer = nn.Dropout(rate), nn.Dropout(rate)

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        result: Tensor = x + self.outer(self.down(self.inner(self.up(self.norm(x)))) + 100)
        return result


class Averaged(Mixer):
    """Tokens meet beside split layers."""

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return super().forward(x) + x.mean(-2, keepdim=True)


class Beside(Mixer):
    """A norm of what all ranks have the same of."""

    def __init__(self) -> None:
        super().__init__()
        self.of_others = nn.LayerNorm(8)

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return super().forward(x) * self.of_others(beside).mean(-2, keepdim=True)


class Grows(Mixer):
    """In training alone, which a first run in evaluation does not see."""

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        y = super().forward(x)
        return torch.cat([y, y], -2) if self.training else y


class Cuts(Mixer):
    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        result: Tensor = x + self.down(self.up(x)[..., :2, :]).mean(-2, keepdim=True)
        return result


class Names(Mixer):
    def forward(self, x: Tensor, beside: Any = None) -> Any:
        return {"x": super().forward(x)}


class Stacked(nn.Module):
    def __init__(
        self, *blocks: nn.Module, between: Any = None, before: Any = None, first: int = 0, last: int = 2
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.before, self.between = before or (lambda x: x), between or (lambda x: x)
        self.ran = slice(first, last)

    def forward(self, x: Tensor) -> Tensor:
        beside, x = x + 1, self.before(x)
        for block in self.blocks[self.ran]:
            x = self.between(block(x, beside))
        return x.square().mean()


class CallsBeside(Stacked):
    """A layer of a block without the block."""

    def forward(self, x: Tensor) -> Tensor:
        up: Any = self.blocks[0].up
        return super().forward(x) + up(x).mean()


class Exits(Stacked):
    """A loss of what each block gives."""

    def forward(self, x: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for block in self.blocks:
            x = block(x)
            loss = loss + x.std()
        return loss


class Gives(Stacked):
    """What a loss beside the model may use."""

    def forward(self, x: Tensor) -> Any:
        first = self.blocks[0](x)
        return self.blocks[1](first).mean(), first


class Leaves(Stacked):
    """Before the last block, from the second step on."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        self.ran = slice(0, 1) if self.training else self.ran
        return result


class Adds(Mixer):
    """All tokens, to a part of them."""

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return super().forward(x) + beside


def with_shared_norm() -> nn.Module:
    model = Stacked(Mixer(), Mixer())
    model.last = model.blocks[0].norm
    return model


def config_of(tensor: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "sgd"},
        "parallel": {"tensor": tensor, "tensor_sequence": True},
        **more,
    }


def what_is_dropped(every: int) -> tuple[list[list[bool]], float]:
    """By call of a dropout: which elements are zero; and the loss of a second step."""
    model = Stacked(Mixer(0.5), Mixer(0.5))
    engine = lowtide.initialize(model, config_of(activation_checkpointing={"every": every}))
    found: list[list[bool]] = []

    def note(part: nn.Module, args: Any, output: Tensor) -> None:
        if part.training:
            found.append((output == 0).view(-1).tolist())

    for part in engine.module.modules():
        if isinstance(part, nn.Dropout):
            part.register_forward_hook(note)
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    engine.train_step((x,))
    loss = engine.train_step((x,)).loss.item()
    engine.close()
    return found[:4], loss


def test_dropout_differs_on_parts_and_is_the_same_when_recomputed(ranks: RankPool) -> None:
    (first, loss), (second, other_loss) = ranks(2, what_is_dropped, 0)
    assert [len(one) for one in first] == [2 * 6 * 32, 2 * 3 * 8] * 2
    assert all(one != other and any(one) for one, other in zip(first, second, strict=True))
    assert first[0] != first[2] and first[1] != first[3]
    assert loss == other_loss == ranks(2, what_is_dropped, 1)[0][1]


REFUSED: dict[str, tuple[Any, str]] = {
    "tokens meet": (
        lambda: Stacked(Averaged(), Averaged()),
        r"expected that 'blocks.0' \(Averaged\) mixes tokens only between column and row splits",
    ),
    "beside": (
        lambda: Stacked(Beside(), Beside()),
        r"'blocks.0.of_others': expected this rank's part of the tokens, found a further input of the block",
    ),
    "between": (
        lambda: Stacked(Mixer(), Mixer(), between=torch.tanh),
        r"expected that only the next block uses the output of 'blocks.0', found tanh: between blocks",
    ),
    "between, in place": (
        lambda: Stacked(Mixer(), Mixer(), between=Tensor.relu_),
        r"the output of 'blocks.0', found relu_",
    ),
    "a loss of each": (lambda: Exits(Mixer(), Mixer()), r"the output of 'blocks.0', found std"),
    "given": (lambda: Gives(Mixer(), Mixer()), r"the output of 'blocks.0', found it in the model's output"),
    "sizes": (
        lambda: Stacked(Adds(), Adds()),
        r"'blocks.0' \(Adds\) mixes .* on each rank it fails \(The size of tensor a \(3\) must match",
    ),
    "not all": (
        lambda: Leaves(Mixer(), Mixer()),
        r"expected a forward through all blocks, found that it stopped after 'blocks.0'",
    ),
    "not the first": (
        lambda: Stacked(Mixer(), Mixer(), first=1),
        r"'blocks.1': expected the unchanged output of the block before it",
    ),
    "grows": (lambda: Stacked(Grows(), Grows()), r"'blocks.0': expected \(2, 3\) tokens, this .* found \(2, 6\)"),
    "cuts": (
        lambda: Stacked(Cuts(), Cuts()),
        r"'blocks.0.down': expected 6 tokens, as in the input of its block, found 2",
    ),
    "names": (lambda: Stacked(Names(), Names()), r"'blocks.0': expected a tensor, or a tuple .* found dict"),
    "integers": (
        lambda: Stacked(Mixer(), Mixer(), before=Tensor.long),
        r"'blocks.0': expected its tokens, .* found \(2, 6, 8\) of torch.int64",
    ),
    "called beside": (
        lambda: CallsBeside(Mixer(), Mixer()),
        r"expected that split layers run within a forward of their block, found a direct call with \(2, 6, 8\)",
    ),
    "shared": (
        with_shared_norm,
        r"'blocks.0.norm.weight' is in a block, but a LayerNorm outside of the blocks",
    ),
    "no blocks": (lambda: Mixer(), r"expected blocks in a ModuleList with row-split layers in them"),
}


def refusal(name: str) -> str:
    try:
        engine = lowtide.initialize(REFUSED[name][0](), config_of())
    except ValueError as error:
        return str(error)
    try:
        for _ in range(2):
            engine.train_step((torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1)),))
    except ValueError as error:
        return str(error)
    finally:
        engine.close()
        assert not torch._C._len_torch_function_stack()  # nothing watches any more
    return "nothing"


def refusals() -> dict[str, str]:
    return {name: refusal(name) for name in REFUSED}


def test_what_would_see_a_part_for_the_whole_is_an_error(ranks: RankPool) -> None:
    for found in ranks(2, refusals):
        for name, (_, text) in REFUSED.items():
            assert re.search(r"parallel.tensor_sequence: .*" + text, found[name]), (name, found[name])


def recorded() -> dict[str, str]:
    found = {}
    for key in ("output_hidden_states", "output_router_logits"):
        model: Any = others.llama()
        setattr(model.config, key, True)
        engine = lowtide.initialize(model, config_of())
        with pytest.raises(ValueError, match="expected") as error:
            engine.train_step(others.tokens(0, 2))
        found[key] = str(error.value)
        engine.close()
    return found


def test_what_is_recorded_of_parts_is_not_given(ranks: RankPool) -> None:
    for key, found in ranks(2, recorded)[0].items():
        assert found.startswith(f"parallel.tensor_sequence: expected {key} to be false")


def test_what_has_no_effect_is_said() -> None:
    notes = lowtide.Config.load({"parallel": {"tensor_sequence": True}}).notes
    assert "parallel.tensor_sequence: true has no effect here: parallel.tensor is 1" in notes


def counted(has_parts: bool, num_blocks: int) -> tuple[int, int]:
    """(bytes on the wire, bytes that the backward waits for) of a step of GPT-2 on two rows of eight tokens."""
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": num_blocks, "n_head": 4, "n_positions": 8, "vocab_size": 64}
    rates: dict[str, Any] = {f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")}
    config = transformers.GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0)
    parallel = {"tensor": 2, "tensor_sequence": has_parts}
    engine = lowtide.initialize(others.OwnGpt2ForCausalLM(config), config_of(parallel=parallel))
    exchange = engine._mesh.exchange(("tensor",))
    weights = {param.untyped_storage().data_ptr() for param in engine.module.parameters()}
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    ids = torch.arange(16).view(2, 8)
    engine.train_step((ids, ids))
    before = exchange.bytes_sent
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        engine.train_step((ids, ids))
    engine.close()
    return exchange.bytes_sent - before, sum(kept.values())


def all_counted() -> list[list[tuple[int, int]]]:
    return [[counted(has_parts, num_blocks) for num_blocks in (2, 3)] for has_parts in (False, True)]


def test_bytes_of_a_block_are_those_of_the_formulas(ranks: RankPool) -> None:
    """A block moves what it moves without parts, and the sums of the gradients of its whole parameters.

    Without parts it keeps the inputs of two norms, with two numbers of each token, and of two columns, each of sbh;
    with parts half of the first two.
    """
    whole, parts = ranks(2, all_counted)[0]
    of_whole, of_parts = ([three - two for two, three in zip(*found, strict=True)] for found in (whole, parts))
    sbh, ranks_in = 8 * 2 * 32 * 4, 2
    assert of_whole[0] == 8 * sbh * (ranks_in - 1) // ranks_in
    assert of_parts[0] == of_whole[0] + 6 * 32 * 4  # weights and biases of two norms, biases of two rows
    around = 2 * sbh * (ranks_in - 1) // ranks_in  # in front of all blocks, and behind them
    assert parts[0][0] - whole[0][0] == 2 * 6 * 32 * 4 + around
    assert of_whole[1] - of_parts[1] == 2 * (sbh + 2 * 16 * 4) // ranks_in


def recomputing(model: Any, is_reentrant: bool) -> Any:
    current = hasattr(model, "activation_checkpointing_enable")  # the older name warns where this one is
    enable = model.activation_checkpointing_enable if current else model.gradient_checkpointing_enable
    enable({"use_reentrant": is_reentrant})
    return model


def reentrant() -> nn.Module:
    model: nn.Module = recomputing(others.llama(), is_reentrant=True)
    return model


def not_reentrant() -> nn.Module:
    model: nn.Module = recomputing(others.llama(), is_reentrant=False)
    return model


def recomputing_t5() -> nn.Module:
    model: nn.Module = recomputing(others.t5(), is_reentrant=True)
    return model


def short_questions(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """As many tokens of the encoder as a rank has of the decoder's."""
    ids, labels = others.tokens(step, rows)
    return ids[:, :5].contiguous(), labels


def test_blocks_that_a_model_recomputes_by_itself_train_as_without(ranks: RankPool) -> None:
    """Its checkpoints lie around the hooks of blocks, where the engine's lie inside; an encoder's output is no part."""
    llamas = [replace(CASES["llama"], build=build) for build in (reentrant, not_reentrant)]
    cases = [*llamas, replace(CASES["t5"], build=recomputing_t5, batch=short_questions)]
    expected = [*[plainly(CASES["llama"], 1)] * 2, plainly(cases[2], 1)]
    outcomes = ranks(2, train_all, [case.at(3, config={"parallel": PARTS}) for case in cases])[0]
    for outcome, right in zip(outcomes, expected, strict=True):
        assert_close(outcome, right, TOLERANCE, TOLERANCE)


def test_offload_beside_parts_gives_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    offloads: dict[str, Any] = {
        "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
        "activation_checkpointing": {"offload": {"device": "cpu", "min_bytes": 1}},
    }
    case = CASES["llama"].at(3, config={"parallel": PARTS})
    (kept, offloaded), _ = ranks(2, train_all, [case, case.at(3, config=offloads)])
    assert not kept.differences(offloaded)


LENGTHS = (9, 8, 12, 5)


def of_lengths(tensor: int) -> list[float]:
    """Losses and gradients' norm of four forwards before their backwards, each of another length."""
    torch.manual_seed(0)
    parallel = {"tensor": tensor, "tensor_sequence": tensor > 1}
    sizes: dict[str, Any] = {**others.COMMON, "max_position_embeddings": max(LENGTHS)}
    model = recomputing(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double(), is_reentrant=False)
    engine = lowtide.initialize(model, config_of(parallel=parallel, gradient_accumulation_steps=len(LENGTHS)))
    ids = [torch.arange(2 * length).view(2, length) % others.VOCAB for length in LENGTHS]
    losses = [engine(input_ids=one, labels=one, use_cache=False).loss for one in ids]
    for loss in reversed(losses):
        engine.backward(loss)
    norm = engine.step().grad_norm
    engine.close()
    return [one.item() for one in (*losses, norm)]


def test_a_recomputed_block_knows_the_length_of_its_forward(ranks: RankPool) -> None:
    expected = ranks(1, of_lengths, 1)[0]
    for found in ranks(2, of_lengths, 2):
        assert found == pytest.approx(expected, rel=TOLERANCE)


def generated(tensor: int) -> tuple[float, list[int]]:
    """A loss with a cache of keys, as Hugging Face has it where nobody says no, and tokens that it gives one by one."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**others.COMMON, "bos_token_id": None, "eos_token_id": None}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double()
    engine = lowtide.initialize(model, config_of(parallel={"tensor": tensor, "tensor_sequence": tensor > 1}))
    ids = torch.arange(10).view(2, 5)
    loss = engine.train_step({"input_ids": ids, "labels": ids}).loss.item()
    engine.module.eval()
    with torch.no_grad():
        seen = torch.ones_like(ids[:1])
        tokens = model.generate(ids[:1], attention_mask=seen, max_new_tokens=3, do_sample=False)[0].tolist()
    engine.close()
    return loss, tokens


def test_a_cache_of_keys_is_filled_once(ranks: RankPool) -> None:
    loss, tokens = ranks(1, generated, 1)[0]
    for found in ranks(2, generated, 2):
        assert found == (pytest.approx(loss, rel=TOLERANCE), tokens)
