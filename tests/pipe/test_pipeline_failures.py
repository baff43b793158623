"""What fails over a pipeline says what is wrong and what to do, on every rank; nothing hangs or is mistaken later."""

import contextlib
import os
import signal
import time
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case
from tests.pipe.pipelines import deep_gpt, deep_gpt_64, pipelined

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


def tokens() -> tuple[Tensor, ...]:
    return models.token_batch(0, 8)


def batch_of(seed: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def steps_of(how: str, timeout_seconds: float) -> list[str]:
    torch.manual_seed(0)
    FailsLate.calls = 0
    engine = lowtide.initialize(Net(how), CONFIG | {"communication": {"timeout_seconds": timeout_seconds}})
    return [text_of(lambda: engine.train_step(batch_of(0))) for _ in range(2)]


def test_a_loss_without_a_graph(ranks: RankPool) -> None:
    (text, _) = ranks(2, steps_of, "detached", 60.0)[1]
    assert text == (
        "ValueError: pipeline: expected a loss with requires_grad=True, found requires_grad=False; was it computed "
        "under torch.no_grad(), or detached?"
    )


def test_an_error_in_the_last_backward_is_told_to_all_and_the_next_step_is_another_one(ranks: RankPool) -> None:
    failed, other = ranks(2, steps_of, "late", 60.0)
    assert failed == ["KeyError: 'too late'", "no error"]
    assert other[0] == (
        "RuntimeError: pipeline: a stage of rank 0 failed: KeyError: 'too late' (pipeline: in pipeline action 0B3 "
        "(stage 0, microbatch 3), of schedule 1f1b). No parameter was updated"
    )
    assert other[1] == "no error"


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
        "ValueError: batch: expected the same batch on the 2 ranks of a pipeline ({}), found different batches; divide "
        "the data by engine.data_rank and engine.data_size"
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
        assert text.startswith("ValueError: batch: expected the same batch on the 2 ranks of a pipeline (ranks 0, 1)")


def initialize_twice() -> str:
    module = Net()
    with lowtide.initialize(module, CONFIG) as engine:
        engine.train_step(batch_of(0))
    return text_of(lambda: lowtide.initialize(module, CONFIG))


def test_a_model_that_was_split_before(ranks: RankPool) -> None:
    for text, name in zip(ranks(2, initialize_twice), ("blocks.", "stem."), strict=True):
        assert text.startswith(
            "ValueError: model: expected a whole model, found a model that an earlier engine has split over a pipeline "
            f"('{name}"
        )
        assert text.endswith("is on another rank); build it again, or pass initialize the callable that builds it")


def initialize_within(budget: int) -> str:
    zero = {"stage": 3, "stage3_max_live_parameters": budget}
    return text_of(lambda: lowtide.initialize(Net(), CONFIG | {"zero_optimization": zero}))


def test_a_budget_below_a_stage(ranks: RankPool) -> None:
    assert ranks(2, initialize_within, 1_000) == ["no error"] * 2
    for text in ranks(2, initialize_within, 10):
        assert text == (
            "ValueError: zero_optimization.stage3_max_live_parameters: expected at least 216, the parameters of "
            "pipeline stage 0, found 10; raise it, or split the model over more stages"
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
        "If a module between the blocks makes it, give initialize a sample_batch, to observe the use of parameters"
    )


def use_the_classic_form() -> tuple[str, str]:
    engine = lowtide.initialize(deep_gpt(), CONFIG)
    texts = text_of(lambda: engine(*tokens())), text_of(lambda: engine.backward(torch.ones((), requires_grad=True)))
    engine.close()
    return texts


def test_the_classic_form(ranks: RankPool) -> None:
    forward, backward = ranks(2, use_the_classic_form)[1]
    expected = "expected a rank with the whole model, found stages [1] of 2 (parallel.pipeline); use "
    assert f"ValueError: engine(batch): {expected}engine.eval_step(batch)" in forward
    assert f"ValueError: engine.backward(loss): {expected}engine.train_step(batch)" in backward


def initialize_error(layers: int, config: dict[str, Any]) -> str:
    return text_of(lambda: lowtide.initialize(models.TinyGPT(layers=layers), CONFIG | config))


def test_more_stages_than_blocks(ranks: RankPool) -> None:
    for text in ranks(2, initialize_error, 3, {"pipeline": {"schedule": "interleaved", "chunks": 2}}):
        assert text.startswith("ValueError: pipeline: expected 1 to 3 stages") and "found 4" in text


def test_balance_by_time_needs_a_batch(ranks: RankPool) -> None:
    for text in ranks(2, initialize_error, 3, {"pipeline": {"balance": "time"}}):
        assert 'ValueError: pipeline: balance "time" needs a sample batch to measure with' in text


def initialize_a_builder() -> str:
    return text_of(
        lambda: lowtide.initialize(deep_gpt, CONFIG | {"pipeline": {"balance": "time"}}, sample_batch=tokens())
    )


def test_balance_by_time_needs_a_constructed_model(ranks: RankPool) -> None:
    for text in ranks(2, initialize_a_builder):
        assert 'ValueError: pipeline.balance: "time" needs a constructed model to measure, found a callable' in text


class Broken(nn.Module):
    """A block whose forward fails in one microbatch, or ends the process."""

    def __init__(self, how: str, number: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.how, self.number = how, number
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.number and self.how == "fails":
            raise KeyError("no such expert")
        if self.calls == self.number and self.how == "is stopped":
            raise KeyboardInterrupt
        if self.calls == self.number and self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        output: Tensor = self.layer(x)
        return output


def stopped() -> str:
    """The text of the step behind one that was left in its middle."""
    blocks = [Broken("works"), Broken("works"), Broken("is stopped"), Broken("works")]
    engine = lowtide.initialize(models.Chain(*blocks), CONFIG | {"communication": {"timeout_seconds": 1.0}})
    with contextlib.suppress(KeyboardInterrupt, lowtide.CollectiveError):
        engine.train_step(torch.ones(8, 8))
    return text_of(lambda: engine.train_step(torch.ones(8, 8)))


def test_a_rank_that_was_stopped_in_mid_schedule_joins_no_further_step(ranks: RankPool) -> None:
    for text, why in zip(ranks(2, stopped), ("CollectiveError: rank 0", "KeyboardInterrupt: "), strict=True):
        assert text.startswith(
            "RuntimeError: pipeline: expected ranks at the same place in the schedule, found that an earlier step "
            f"failed on this rank in the middle of its schedule ({why}"
        )
        assert text.endswith("; restart all ranks from the last checkpoint")


def train_broken(how: str, timeout_seconds: float) -> tuple[str, float]:
    """The text of the error with its notes, and how long it took."""
    model = models.Chain(Broken("works"), Broken("works"), Broken(how), Broken("works"))
    engine = lowtide.initialize(model, CONFIG | {"communication": {"timeout_seconds": timeout_seconds}})
    started, text = time.monotonic(), "no error"
    try:
        engine.train_step(torch.ones(8, 8))
    except Exception as error:
        text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return text, time.monotonic() - started


def test_an_error_in_the_model_names_the_action(ranks: RankPool) -> None:
    (first, waited), (second, _) = ranks(2, train_broken, "fails", 60.0)
    assert second == (
        "KeyError: 'no such expert'; in the forward of 'blocks.2', Broken, which was given (torch.float32 of shape "
        "(2, 8)); pipeline: in pipeline action 1F2 (stage 1, microbatch 2), of schedule 1f1b"
    )
    assert first.startswith(
        "RuntimeError: pipeline: a stage of rank 1 failed: KeyError: 'no such expert' (in the forward of 'blocks.2', "
    )
    assert "; pipeline: in pipeline action 1F2" in first
    assert waited < 30  # and not when 60 s are over


def goes_on(number: int, block: int, config: dict[str, Any]) -> list[Any]:
    """Texts of a step that fails and of an evaluation that does, with their times; then values after another step.

    number: of the microbatch in which it fails; 0: the other step alone.
    """
    torch.manual_seed(0)
    blocks = [Broken("fails" if index == block else "works", number) for index in range(4)]
    engine = lowtide.initialize(models.Chain(*blocks), CONFIG | config)
    rows = 8 * engine.data_size
    batch = batch_of(0, rows).chunk(engine.data_size)[engine.data_rank]
    found: list[Any] = []
    for call in (engine.train_step, engine.eval_step) if number else ():
        started = time.monotonic()
        found += [text_of(lambda call=call: call(batch)), time.monotonic() - started]  # type: ignore[misc]
        blocks[block].calls = number - 1
    blocks[block].how = "works"
    engine.train_step(batch)
    found.append({name: value.clone() for name, value in engine.state_dict().items()})
    engine.close()
    return found


def both_go_on(number: int, block: int, config: dict[str, Any]) -> list[list[Any]]:
    return [goes_on(one, block, config) for one in (0, number)]


SCHEDULES: dict[str, tuple[int, int, int, dict[str, Any]]] = {  # ranks, the microbatch, the block, config
    "the first of its kind": (4, 1, 0, {"parallel": {"pipeline": 4}}),
    "the last stage": (4, 3, 3, {"parallel": {"pipeline": 2}, "zero_optimization": {"stage": 3}}),
    "in the middle": (
        2,
        2,
        1,
        {"zero_optimization": {"stage": 1}, "pipeline": {"schedule": "interleaved", "chunks": 2}},
    ),
    "halves": (2, 1, 1, {"pipeline": {"schedule": "zb-h1"}}),
    "sockets": (4, 1, 2, {"parallel": {"pipeline": 2}, "communication": {"transport": "sockets"}}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stage_that_fails_ends_the_step_on_all_ranks_and_training_goes_on(ranks: RankPool, name: str) -> None:
    num_ranks, number, block, config = SCHEDULES[name]
    for (whole,), found in ranks(num_ranks, both_go_on, number, block, config):
        step, waited, evaluation, also_waited, values = found
        assert "KeyError: 'no such expert'" in step and "KeyError: 'no such expert'" in evaluation
        assert max(waited, also_waited) < 30  # where the timeout is longer than the test may take
        assert all(torch.equal(values[key], value) for key, value in whole.items())


def test_a_rank_that_dies_in_mid_schedule(ranks: RankPool) -> None:
    text, waited = ranks.fails(2, train_broken, "dies", 60.0)[0]
    assert text.startswith("CollectiveError: rank 0 in pipeline action ") and "no answer from rank 1" in text
    assert "(stage 0, microbatch " in text and waited < 30


def train_a_part_of_a_step(case: Case) -> str:
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        batch = case.global_batch(0, 1)
        with engine.accumulate(last=False):
            try:
                engine.train_step(batch)
            except ValueError as error:
                text = str(error)
        return f"{text}, then {engine.train_step(batch).loss.isfinite()}"


def test_a_schedule_has_all_of_a_step(ranks: RankPool) -> None:
    words = "expected a config without parallel.pipeline, found it: its train_step runs all microbatches"
    for text in ranks(
        2, train_a_part_of_a_step, pipelined(Case(deep_gpt_64, models.token_batch, accumulation=2), 2, "1f1b")
    ):
        assert words in text and text.endswith("then True")
