"""`engine.run`: what a trainer's own step does with the model, as one forward; and clipping by value."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.engine.model.deferred import DeferredModel
from lowtide.engine.model.recording import Recording
from tests.engine.adapted import base
from tests.kit.models import FEATURES, mlp, vector_batch
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, Outcome, assert_close, refusal, settings, start, train, train_plainly

SGD = {"type": "sgd", "params": {"lr": 0.1}}
CASE = Case(mlp, vector_batch, steps=2, config={"optimizer": SGD})


def step_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Calls the root twice, and a part of it by itself."""
    penalty = model.get_submodule("first")(x).square().mean()
    return {"loss": model(x, y) + model(2 * x, y) + 0.1 * penalty, "note": "kept"}


def run_and_clip(engine: lowtide.Engine, case: Case, step: int) -> Any:
    result = engine.run(step_of, engine.module, *case.share(engine, step))
    assert result["note"] == "kept"
    engine.backward(result["loss"])
    engine.clip_grad_value_(0.02)
    return engine.step()


def train_by_run(cases: list[Case]) -> list[Outcome]:
    return [train(case, run_and_clip) for case in cases]


class Whole(nn.Module):
    """A step of plain torch as one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return step_of(self.model, x, y)["loss"]


@pytest.mark.parametrize(("transport", "stages"), [("shared_memory", (3,)), ("sockets", (0, 2))])
def test_a_function_that_calls_the_model_as_it_likes_is_one_forward(
    ranks: RankPool, transport: str, stages: tuple[int, ...]
) -> None:
    def clip(model: nn.Module, optimizer: Any, step: int) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.02)

    expected = train_plainly(CASE.at(0, build=Whole), 2, lambda p: torch.optim.SGD(p, lr=0.1), before_update=clip)
    for outcome in ranks(
        2, train_by_run, [CASE.at(s, config={"communication": {"transport": transport}}) for s in stages]
    )[0]:
        outcome.state = {f"model.{name}": value for name, value in outcome.state.items()}
        assert_close(outcome, expected, 1e-6, 1e-6)


def test_the_model_runs_as_before_when_the_function_has_failed() -> None:
    with start(CASE.at(3)) as engine:
        with pytest.raises(ZeroDivisionError):
            engine.run(lambda: 1 / 0)
        engine.run(step_of, engine.module, *vector_batch(0, 2))["loss"].backward()
        words = "engine.clip_grad_value_(): expected a clip_value of 0 or more"
        assert words in refusal(engine.clip_grad_value_, -1.0)
        assert not engine.step().skipped


class TwoLayers(nn.Module):
    """mixes: what is between the layers makes one of all columns, so that they cannot be split."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.mixes = mixes
        self.first = nn.Linear(FEATURES, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.up(torch.tanh(self.first(x))))
        return nn.functional.mse_loss(self.down(x.softmax(-1) if self.mixes else x), y)


SPLIT = {"parallel": {"tensor": 2}, "tensor_parallel": {"plan": {"up": "column", "down": "row", "first": "whole"}}}


def trained_split(stage: int | None, mixes: bool = False, apart: bool = False) -> tuple[list[Tensor], int]:
    """Three steps by `run`, and how often the model was called. stage: None for one process."""
    torch.manual_seed(0)
    model, calls = TwoLayers(mixes), []

    def run(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        loss: Tensor = 2 * model(x, y)
        return loss

    config = settings(stage or 0, gradient_accumulation_steps=2, optimizer=SGD, **({} if stage is None else SPLIT))
    with lowtide.initialize(model, config) as engine:
        for step in range(6):
            engine.run(run, *vector_batch(step + 10 * (engine.rank if apart else engine.data_rank), 2)).backward()
            engine.step()
        return list(engine.state_dict().values()), len(calls)


def test_ranks_that_share_layers_make_the_forward_once_together(ranks: RankPool) -> None:
    expected, _ = ranks(1, trained_split, None)[0]
    for stage in (1, 3):
        found, num_calls = ranks(2, trained_split, stage)[0]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        assert num_calls == 6


def test_a_wrong_split_and_other_batches_are_errors_there_too(ranks: RankPool) -> None:
    for failed in ranks.fails(2, trained_split, 3, mixes=True):
        assert "as without a split, found outputs" in failed.text
    for failed in ranks.fails(2, trained_split, 1, apart=True):
        assert "batch: expected the same batch on the 2 ranks of tensor" in failed.text


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"sequence": 2}, "expected a config without parallel.sequence, found it: its ranks"),
        ({"tensor": 2, "tensor_sequence": True}, "expected a config without parallel.tensor_sequence, found it"),
        ({"pipeline": 2}, "engine.run(function)"),
    ],
)
@on_ranks(2)
def test_it_is_refused_where_ranks_share_a_sample(parallel: dict[str, Any], words: str) -> None:
    is_split = "pipeline" in parallel
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) if is_split else base()
    with lowtide.initialize(model, settings(parallel=parallel)) as engine:
        batch = torch.ones(2, 4, dtype=torch.float32 if is_split else torch.int64)
        assert words in refusal(engine.run, model, batch)


@on_ranks(2)
def test_a_model_may_be_made_in_part_on_the_meta_device() -> None:
    torch.manual_seed(3)
    expected = [nn.Linear(3, 3) for _ in range(3)]
    nn.init.orthogonal_(expected[2].weight)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3))
    recording = Recording()
    with recording.running(all_on_meta=False):
        kept = nn.Linear(3, 3)
        with torch.device("meta"):
            model.append(nn.Linear(3, 3))
            nn.init.orthogonal_(model[1].weight)  # type: ignore[arg-type]
        model.append(kept)
    with lowtide.initialize(DeferredModel(lambda: model, recording), settings(3)) as engine:
        found = list(engine.state_dict().values())
    right = [value for place in (0, 2, 1) for value in expected[place].state_dict().values()]
    assert engine.rank or all(map(torch.equal, found, right))
