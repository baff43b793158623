"""What ranks of a tensor axis have in common, and what a part of the tokens on each of them asks of a model."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import refusal
from tests.parallel import models_of_others as others
from tests.parallel.trainings import (
    PARTS,
    TOLERANCE,
    Mixer,
    Stacked,
    case_of,
    check,
    dropping,
    mixed,
    penalized,
    split_config,
    vectors,
)


class Between(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)) * self.scale)
        return result.square().mean()


class Opens(Between):
    """The first gradient of its scale is 0."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)


@on_ranks(2)
def test_what_ranks_have_unlike_is_told() -> None:
    with lowtide.initialize(Between(), split_config()) as engine:
        for _ in range(2):  # also in the step after the error
            text = refusal(engine.train_step, (mixed(),))
            assert "equal gradients of the replicated 'scale' on 2 ranks, found different" in text
    with lowtide.initialize(Opens(), split_config()) as engine:
        engine.train_step((mixed(),))
        text = refusal(engine.train_step, (mixed(),))
        assert "equal gradients of the replicated 'scale' on 2 ranks, found different" in text
    with lowtide.initialize(others.gpt2(), split_config()) as engine:
        for token in (-1, others.VOCAB):
            given = (torch.tensor([[1, token]]), torch.tensor([[1, 1]]))
            assert refusal(engine, *given, kind=IndexError) == "index out of range in self", "as torch says it"


def trained_later() -> list[float]:
    """The losses of a training whose last layer comes into the optimizer after the engine was made."""
    torch.manual_seed(0)
    config = split_config({"tensor": int(os.environ["WORLD_SIZE"])}) | {"optimizer": None}
    model = dropping().eval()
    with lowtide.initialize(model, config, optimizer=torch.optim.SGD(model.blocks[0].parameters(), lr=1e-6)) as engine:
        engine.optimizer.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 1e-6})
        return [engine.train_step((mixed(),)).loss.item() for _ in range(3)]


def test_groups_of_one_unit_come_to_the_optimizer_together(ranks: RankPool) -> None:
    assert ranks(2, trained_later)[0] == pytest.approx(ranks(1, trained_later)[0], rel=1e-5)


PARALLEL = PARTS["parallel"]


class Changed(Mixer):
    """change: of the block, its forward, the tokens and what is beside them."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, beside: Any = None) -> Any:
        return self.change(self, super().forward, x, beside)


class Beside(Mixer):
    """A norm of what all ranks have the same of."""

    def __init__(self) -> None:
        super().__init__()
        self.of_others = nn.LayerNorm(8)

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return super().forward(x) * self.of_others(beside).mean(-2, keepdim=True)


def grows(block: nn.Module, run: Any, x: Tensor, beside: Any) -> Any:
    """In training alone, which a first run in evaluation does not see."""
    y = run(x)
    return torch.cat([y, y], -2) if block.training else y


class CallsBeside(Stacked):
    """A layer of a block without the block."""

    def forward(self, x: Tensor) -> Tensor:
        up: Any = self.blocks[0].up
        return super().forward(x) + up(x).mean()


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


def changed(change: Callable[..., Any]) -> Callable[[], nn.Module]:
    """Two blocks with this in the place of their forward."""
    return partial(two, partial(Changed, change))


def two(block: Callable[[], Mixer] = Mixer, stack: type[Stacked] = Stacked, **more: Any) -> Stacked:
    return stack(block(), block(), **more)


def with_shared_norm() -> nn.Module:
    model = two()
    model.last = model.blocks[0].norm
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "tokens meet": (
        changed(lambda block, run, x, beside: run(x) + x.mean(-2, keepdim=True)),
        ("expected that 'blocks.0' (Changed) mixes tokens only between column and row splits",),
    ),
    "beside": (
        partial(two, Beside),
        ("'blocks.0.of_others': expected this rank's part of the tokens, found a further input of the block",),
    ),
    "between": (
        partial(two, between=torch.tanh),
        ("expected that only the next block uses the output of 'blocks.0', found tanh: between blocks",),
    ),
    "between, in place": (partial(two, between=Tensor.relu_), ("the output of 'blocks.0', found relu_",)),
    "given": (partial(two, stack=Gives), ("the output of 'blocks.0', found it in the model's output",)),
    "sizes": (
        changed(lambda block, run, x, beside: run(x) + beside),  # all tokens, to a part of them
        ("'blocks.0' (Changed) mixes ", " on each rank it fails (The size of tensor a (3) must match"),
    ),
    "not all": (
        partial(two, stack=Leaves),
        ("expected a forward through all blocks, found that it stopped after 'blocks.0'",),
    ),
    "not the first": (partial(two, first=1), ("'blocks.1': expected the unchanged output of the block before it",)),
    "grows": (changed(grows), ("'blocks.0': expected (2, 3) tokens, this ", " found (2, 6)")),
    "cuts": (
        changed(lambda block, run, x, beside: x + block.down(block.up(x)[..., :2, :]).mean(-2, keepdim=True)),
        ("'blocks.0.down': expected 6 tokens, as in the input of its block, found 2",),
    ),
    "names": (
        changed(lambda block, run, x, beside: {"x": run(x)}),
        ("'blocks.0': expected a tensor, or a tuple ", " found dict"),
    ),
    "integers": (
        partial(two, before=Tensor.long),
        ("'blocks.0': expected its tokens, ", " found (2, 6, 8) of torch.int64"),
    ),
    "called beside": (
        partial(two, stack=CallsBeside),
        ("expected that split layers run within a forward of their block, found a direct call with (2, 6, 8)",),
    ),
    "shared": (with_shared_norm, ("'blocks.0.norm.weight' is in a block, but a LayerNorm outside of the blocks",)),
    "no blocks": (Mixer, ("expected blocks in a ModuleList with row-split layers in them",)),
}


def two_steps(build: Callable[[], nn.Module]) -> None:
    """An error comes again in the step after it."""
    with lowtide.initialize(build(), split_config(PARALLEL)) as engine:
        try:
            for _ in range(2):
                engine.train_step((mixed(),))
        except ValueError as error:
            assert refusal(engine.train_step, (mixed(),)) == str(error)
            raise


@on_ranks(2)
def test_what_would_see_a_part_for_the_whole_is_an_error() -> None:
    for name, (build, parts) in REFUSED.items():
        text = refusal(two_steps, build)
        assert "parallel.tensor_sequence: " in text and all(part in text for part in parts), (name, text)
        assert not torch._C._len_torch_function_stack()  # nothing watches any more
    for key in ("output_hidden_states", "output_router_logits"):  # what is recorded of parts is not given
        model: Any = others.llama()
        setattr(model.config, key, True)
        with lowtide.initialize(model, split_config(PARALLEL)) as engine:
            text = refusal(engine.train_step, others.tokens(0, 2))
        assert text.startswith(f"parallel.tensor_sequence: expected {key} to be false")


@on_ranks(2)
def test_parts_of_tokens_have_no_second_derivative() -> None:
    with lowtide.initialize(penalized(), split_config(PARALLEL)) as engine:
        text = refusal(engine.train_step, vectors(0, 2), kind=RuntimeError)
        assert "differentiate twice a function that was marked with @once_differentiable" in text


def test_what_has_no_effect_is_said() -> None:
    notes = lowtide.Config.load({"parallel": {"tensor_sequence": True}}).notes
    assert "parallel.tensor_sequence: true has no effect here: parallel.tensor is 1" in notes


# -- recomputed blocks ------------------------------------------------------------------------------------------------


def not_reentrant() -> nn.Module:
    return models.recomputing(others.llama(), use_reentrant=False)


def reentrant_t5() -> nn.Module:
    return models.recomputing(others.t5(), use_reentrant=True)


def short_questions(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """As many tokens of the encoder as a rank has of the decoder's."""
    ids, labels = others.tokens(step, rows)
    return ids[:, :5].contiguous(), labels


def test_blocks_that_a_model_recomputes_by_itself_train_as_in_one_process(ranks: RankPool) -> None:
    """Its checkpoints lie around the hooks of blocks, where the engine's lie inside; an encoder's output is no part."""
    cases = [case_of(not_reentrant, 3), case_of(reentrant_t5, 3, short_questions)]
    check(ranks, 2, [(case, 1, PARTS) for case in cases])


class Around(Stacked):
    """Its checkpoints lie around its blocks, and so around what puts parts of the tokens on them."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


LENGTHS = (6, 7, 2)


@pytest.mark.parametrize("order", [1, -1])
@on_ranks(2)
def test_a_recomputed_block_knows_the_length_of_its_forward(order: int) -> None:
    """Losses and gradients' norm of forwards that all come before their backwards, in this order."""
    torch.manual_seed(0)
    plain = two(stack=Around).double()
    expected = [plain(mixed(length).double()) for length in LENGTHS]
    (sum(expected) / len(LENGTHS)).backward()
    norm = torch.stack([param.grad.norm() for param in plain.parameters() if param.grad is not None]).norm()
    torch.manual_seed(0)
    model = two(stack=Around).double()
    with lowtide.initialize(model, split_config(PARALLEL, gradient_accumulation_steps=len(LENGTHS))) as engine:
        losses = [engine(mixed(length).double()) for length in LENGTHS]
        for loss in losses[::order]:
            engine.backward(loss)
        found = [*losses, engine.step().grad_norm]
    assert [one.item() for one in found] == pytest.approx([one.item() for one in (*expected, norm)], rel=1e-9)


def generated(parallel: dict[str, Any]) -> tuple[float, list[int]]:
    """A loss with a cache of keys, as Hugging Face has it where nobody says no, and tokens that it gives one by one."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**others.COMMON, "bos_token_id": None, "eos_token_id": None}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double()
    ids = torch.arange(10).view(2, 5)
    with lowtide.initialize(model, split_config(parallel)) as engine:
        loss = engine.train_step({"input_ids": ids, "labels": ids}).loss.item()
        engine.module.eval()
        with torch.no_grad():
            seen = torch.ones_like(ids[:1])
            tokens = model.generate(ids[:1], attention_mask=seen, max_new_tokens=3, do_sample=False)[0].tolist()
    return loss, tokens


def test_a_cache_of_keys_is_filled_once(ranks: RankPool) -> None:
    loss, tokens = ranks(1, generated, {})[0]
    for found in ranks(2, generated, PARALLEL):
        assert found == (pytest.approx(loss, rel=TOLERANCE), tokens)
