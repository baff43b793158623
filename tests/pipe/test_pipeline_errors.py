"""What cannot be trained over a pipeline is an error that says what to do, on every rank, and nothing hangs."""

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from tests import models
from tests.pipe.pipelines import deep_gpt
from tests.ranks import RankPool

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 0,
    "optimizer": {"type": "adamw", "params": {"lr": 1e-3}},
    "parallel": {"pipeline": 2},
}


def batch_of(seed: int = 0) -> tuple[Tensor, ...]:
    return models.token_batch(seed, 8)


def text_of(action: Any) -> str:
    try:
        action()
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", ()))
        return f"{type(error).__name__}: {error} [{notes}]"
    return "no error"


def give_other_batches() -> tuple[str, str]:
    """The error, and that training goes on after it."""
    engine = lowtide.initialize(deep_gpt(), CONFIG)
    text = text_of(lambda: engine.train_step(batch_of(engine.rank)))
    after = text_of(lambda: engine.train_step(batch_of()))
    engine.close()
    return text, after


def test_other_batches_on_the_ranks_of_a_pipeline(ranks: RankPool) -> None:
    for text, after in ranks(2, give_other_batches):
        assert "ValueError: batch: expected the same one on the 2 ranks of a pipeline (ranks 0, 1)" in text
        assert "divide the data by engine.data_rank and engine.data_size" in text
        assert after == "no error"


def use_the_classic_form() -> tuple[str, str]:
    engine = lowtide.initialize(deep_gpt(), CONFIG)
    texts = text_of(lambda: engine(*batch_of())), text_of(lambda: engine.backward(torch.ones((), requires_grad=True)))
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
        lambda: lowtide.initialize(deep_gpt, CONFIG | {"pipeline": {"balance": "time"}}, sample_batch=batch_of())
    )


def test_balance_by_time_needs_a_constructed_model(ranks: RankPool) -> None:
    for text in ranks(2, initialize_a_builder):
        assert 'ValueError: pipeline.balance: "time" needs a constructed model to measure, found a callable' in text


class Broken(nn.Module):
    """A block whose forward fails in the third microbatch, or ends the process, or returns another shape."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.how = how
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and self.how == "fails":
            raise KeyError("no such expert")
        if self.calls == 3 and self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        x = self.layer(x)
        return x[:, :5] if self.calls == 3 and self.how == "shrinks" else x


def train_broken(how: str, timeout_seconds: float) -> tuple[str, float]:
    model = models.Chain(Broken("works"), Broken("works"), Broken(how), Broken("works"))
    engine = lowtide.initialize(model, CONFIG | {"communication": {"timeout_seconds": timeout_seconds}})
    started = time.monotonic()
    return text_of(lambda: engine.train_step(torch.ones(8, 8))), time.monotonic() - started


def test_an_error_in_the_model_names_the_action(ranks: RankPool) -> None:
    (first, waited), (second, _) = ranks(2, train_broken, "fails", 8.0)
    assert second.startswith("KeyError: 'no such expert'")
    assert "in pipeline action 1F2 (stage 1, microbatch 2), of schedule 1f1b" in second
    assert first.startswith("CollectiveError: rank 0 in pipeline action ") and "no answer from rank 1" in first
    assert waited < 20


def test_a_rank_that_dies_in_mid_schedule(ranks: RankPool) -> None:
    text, waited = ranks.fails(2, train_broken, "dies", 60.0)[0]
    assert text.startswith("CollectiveError: rank 0 in pipeline action ") and "no answer from rank 1" in text
    assert "(stage 0, microbatch " in text and waited < 10
