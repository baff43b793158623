"""What fails over a pipeline says what is wrong, and is never taken for something else in the next step."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from tests.ranks import RankPool

WIDTH = 8
CONFIG: dict[str, Any] = {
    "gradient_accumulation_steps": 4,
    "steps_per_print": 0,
    "optimizer": {"type": "adamw", "params": {"lr": 1e-3}},
    "parallel": {"pipeline": 2},
}


class FailsLate(torch.autograd.Function):
    """The identity; the fourth backward fails."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        FailsLate.calls += 1
        if FailsLate.calls == 4:
            raise KeyError("too late")
        return dy


class Net(nn.Module):
    """how: "detached" gives a loss without a graph, "late" fails in the last backward of the first stage."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.how == "late":
            x = FailsLate.apply(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss = x.square().mean()
        return loss.detach() if self.how == "detached" else loss


class Between(Net):
    """A layer between the blocks, which the text of the forward does not show as such."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        x = self.stem(x)
        return self.blocks[3](self.blocks[2](x)).square().mean()


def text_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def batch_of(seed: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def steps_of(how: str, timeout_seconds: float) -> list[str]:
    torch.manual_seed(0)
    FailsLate.calls = 0
    engine = lowtide.initialize(Net(how), CONFIG | {"communication": {"timeout_seconds": timeout_seconds}})
    return [text_of(lambda: engine.train_step(batch_of(0))) for _ in range(2)]


def test_a_loss_without_a_graph(ranks: RankPool) -> None:
    (text, _) = ranks(2, steps_of, "detached", 8.0)[1]
    assert text == (
        "ValueError: pipeline: expected a loss that requires a gradient, found one that does not; was it computed "
        "under torch.no_grad(), or detached?"
    )


def test_a_rank_that_has_failed_joins_no_further_step(ranks: RankPool) -> None:
    failed, other = ranks(2, steps_of, "late", 8.0)
    assert failed[0] == "KeyError: 'too late'"
    assert failed[1] == (
        "RuntimeError: pipeline: expected ranks that are in step with each other, found that an earlier step has "
        "failed on this one in the middle of its schedule (KeyError: 'too late'); start all ranks again, from the last "
        "checkpoint"
    )
    # Its last step was not completed either: the other one had its gradients, but no norm.
    assert all(text.startswith("CollectiveError: rank 1 in the ") for text in other)


def other_batches_in_one_pipeline() -> tuple[str, str]:
    torch.manual_seed(0)
    engine = lowtide.initialize(Net(), CONFIG)
    seed = engine.rank if engine.data_rank else 9
    texts = text_of(lambda: engine.train_step(batch_of(seed))), text_of(lambda: engine.train_step(batch_of(0)))
    engine.close()
    return texts


def test_a_batch_that_differs_in_one_pipeline_fails_on_all(ranks: RankPool) -> None:
    found = ranks(4, other_batches_in_one_pipeline)
    expected = (
        "ValueError: batch: expected the same one on the 2 ranks of a pipeline ({}), found different ones; divide"
    )
    for rank, (text, after) in enumerate(found):
        assert text.startswith(expected.format("ranks 1, 3" if rank % 2 else "not this rank's"))
        assert after == "no error"


def mappings_of_each_rank() -> str:
    """Batches as tokenizers give them: a mapping that is no dictionary."""
    torch.manual_seed(0)
    engine = lowtide.initialize(Net(), CONFIG)
    return text_of(lambda: engine.train_step(iter([UserDict(x=batch_of(4 * engine.rank + i, 2)) for i in range(4)])))


def test_batches_in_mappings_are_compared(ranks: RankPool) -> None:
    for text in ranks(2, mappings_of_each_rank):
        assert text.startswith("ValueError: batch: expected the same one on the 2 ranks of a pipeline (ranks 0, 1)")


def initialize_twice() -> str:
    module = Net()
    with lowtide.initialize(module, CONFIG) as engine:
        engine.train_step(batch_of(0))
    return text_of(lambda: lowtide.initialize(module, CONFIG))


def test_a_model_that_was_split_before(ranks: RankPool) -> None:
    for text, name in zip(ranks(2, initialize_twice), ("blocks.", "stem."), strict=True):
        assert text.startswith(
            "ValueError: model: expected a whole one, found one that an earlier engine has split over a pipeline "
            f"('{name}"
        )
        assert text.endswith("is on another rank); build it again, or give initialize the callable that builds it")


def initialize_within(budget: int) -> str:
    zero = {"stage": 3, "stage3_max_live_parameters": budget}
    return text_of(lambda: lowtide.initialize(Net(), CONFIG | {"zero_optimization": zero}))


def test_a_budget_below_a_stage(ranks: RankPool) -> None:
    assert ranks(2, initialize_within, 1_000) == ["no error"] * 2
    for text in ranks(2, initialize_within, 10):
        assert text == (
            "ValueError: zero_optimization.stage3_max_live_parameters: expected at least the 216 parameters of "
            "pipeline stage 0, which is gathered as a whole, found 10; raise it, or split the model over more stages"
        )


def layer_between_blocks(shows: bool) -> str:
    torch.manual_seed(0)
    sample = batch_of(0) if shows else None
    engine = lowtide.initialize(
        Between(),
        CONFIG | {"communication": {"timeout_seconds": 8.0}, "pipeline": {"balance": [2, 2]}},
        sample_batch=sample,
    )
    return text_of(lambda: engine.train_step(batch_of(0)))


def test_a_layer_between_the_blocks_needs_a_sample_batch(ranks: RankPool) -> None:
    assert ranks(2, layer_between_blocks, True) == ["no error"] * 2
    text = ranks(2, layer_between_blocks, False)[1]
    assert text.startswith("ValueError: pipeline: 'blocks.2' takes a tensor of shape (2, 8) that stage 1 ")
    assert text.endswith(
        "If a module between the blocks makes it, give initialize a sample_batch: it shows where parameters are used"
    )
