"""`engine.run`: what a trainer's own step does with the model, as one forward; and clipping by value."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.engine.adapted import base
from tests.kit.models import FEATURES, Mlp
from tests.kit.ranks import RankPool


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, FEATURES, generator=generator), torch.randn(4, 3, generator=generator)


def step_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Calls the root twice, and a part of it by itself."""
    penalty = model.get_submodule("first")(x).square().mean()
    return {"loss": model(x, y) + model(2 * x, y) + 0.1 * penalty, "note": "kept"}


def trained(config: dict[str, Any], clip: float) -> list[Tensor]:
    torch.manual_seed(0)
    model = Mlp()
    given = {"device": "cpu", "optimizer": {"type": "sgd", "params": {"lr": 0.1}}, **config}
    with lowtide.initialize(model, given) as engine:
        for step in range(3):
            result = engine.run(step_of, model, *batch(step))
            assert result["note"] == "kept"
            result["loss"].backward()
            engine.clip_grad_value_(clip)
            engine.step()
        return [engine.full(param).clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("transport", "stage"), [("shared_memory", 1), ("shared_memory", 3), ("sockets", 0), ("sockets", 2), ("sockets", 3)]
)
def test_a_function_that_calls_the_model_as_it_likes_is_one_forward(
    ranks: RankPool, transport: str, stage: int
) -> None:
    torch.manual_seed(0)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        step_of(model, *batch(step))["loss"].backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
    config = {"zero_optimization": {"stage": stage}, "communication": {"transport": transport}}
    found = ranks(2, trained, config, 0.02)[0]
    torch.testing.assert_close(found, [param.detach() for param in model.parameters()], rtol=1e-6, atol=1e-7)


def test_the_model_runs_as_before_when_the_function_has_failed() -> None:
    model = Mlp()
    config = {"device": "cpu", "optimizer": {"type": "sgd", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3}}
    with lowtide.initialize(model, config) as engine:
        with pytest.raises(ZeroDivisionError):
            engine.run(lambda: 1 / 0)
        engine.run(step_of, model, *batch(0))["loss"].backward()
        with pytest.raises(ValueError, match=r"engine.clip_grad_value_\(\): expected a clip_value of 0 or more"):
            engine.clip_grad_value_(-1.0)
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
    given = {"device": "cpu", "optimizer": {"type": "sgd", "params": {"lr": 0.1}}, "gradient_accumulation_steps": 2}
    more = {} if stage is None else {**SPLIT, "zero_optimization": {"stage": stage}}
    with lowtide.initialize(model, given | more) as engine:
        for step in range(6):
            part = step + 10 * (engine.rank if apart else engine.data_rank)
            engine.run(lambda x, y: calls.append(1) or {"loss": 2 * model(x, y)}, *batch(part))["loss"].backward()  # type: ignore[func-returns-value]
            engine.step()
        return list(engine.state_dict().values()), len(calls)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_share_layers_make_the_forward_once_together(ranks: RankPool, stage: int) -> None:
    expected, _ = ranks(1, trained_split, None)[0]
    found, num_calls = ranks(2, trained_split, stage)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert num_calls == 6


def test_a_wrong_split_and_other_batches_are_errors_there_too(ranks: RankPool) -> None:
    for failed in ranks.fails(2, trained_split, 3, mixes=True):
        assert "as without a split, found outputs" in failed.text
    for failed in ranks.fails(2, trained_split, 1, apart=True):
        assert "batch: expected the same batch on the 2 ranks of tensor" in failed.text


def over_a_split(config: dict[str, Any]) -> str:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = {"type": "sgd", "params": {"lr": 0.1}}
    with lowtide.initialize(model, {"device": "cpu", "optimizer": optimizer, **config}) as engine:
        with pytest.raises(ValueError) as caught:
            engine.run(model, torch.ones(2, 4))
        return str(caught.value)


def over_parts(parallel: dict[str, Any]) -> str:
    config = {"device": "cpu", "optimizer": {"type": "sgd", "params": {"lr": 0.1}}, "parallel": parallel}
    with lowtide.initialize(base(), config) as engine:
        with pytest.raises(ValueError) as caught:
            engine.run(engine.module, torch.ones(2, 4, dtype=torch.int64))
        return str(caught.value)


def test_it_is_refused_where_ranks_share_a_sample(ranks: RankPool) -> None:
    assert (
        "expected a config without parallel.sequence, found it: its ranks" in ranks(2, over_parts, {"sequence": 2})[0]
    )
    parts = {"tensor": 2, "tensor_sequence": True}
    assert "expected a config without parallel.tensor_sequence, found it" in ranks(2, over_parts, parts)[0]
    assert "engine.run(function)" in ranks(2, over_a_split, {"parallel": {"pipeline": 2}})[0]


def half_on_meta() -> list[Tensor]:
    from lowtide.engine.model.deferred import DeferredModel
    from lowtide.engine.model.recording import Recording

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3))
    recording = Recording()
    with recording.running(all_on_meta=False):
        kept = nn.Linear(3, 3)
        with torch.device("meta"):
            model.append(nn.Linear(3, 3))
            nn.init.orthogonal_(model[1].weight)  # type: ignore[arg-type]
        model.append(kept)
    config = {"device": "cpu", "optimizer": {"type": "sgd", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3}}
    with lowtide.initialize(DeferredModel(lambda: model, recording), config) as engine:
        return list(engine.state_dict().values())


def test_a_model_may_be_made_in_part_on_the_meta_device(ranks: RankPool) -> None:
    torch.manual_seed(3)
    first, kept = nn.Linear(3, 3), nn.Linear(3, 3)
    second = nn.Linear(3, 3)
    nn.init.orthogonal_(second.weight)
    expected = [value for layer in (first, second, kept) for value in layer.state_dict().values()]
    assert all(map(torch.equal, ranks(2, half_on_meta)[0], expected))
