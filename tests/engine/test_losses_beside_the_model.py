"""A loss may come to parameters past what the engine has returned: they get the factor that others have."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.zero import plan
from lowtide.zero.sequence import StateError
from tests.kit.grids import pairs
from tests.kit.ranks import RankPool

SGD = {"type": "sgd", "params": {"lr": 0.1}}
KINDS: dict[str, dict[str, Any]] = {
    "prescaled": {"prescale_gradients": True, "gradient_accumulation_steps": 2},
    "predivided": {"gradient_predivide_factor": 4.0},
    "float16": {"fp16": {"enabled": True, "initial_scale_power": 10}, "gradient_accumulation_steps": 2},
}


class Net(nn.Module):
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        self.kept = x.square().mean()
        found: Tensor = self.head(x)
        return found


Loss = Callable[[Any, nn.Module, Tensor], Tensor]


def penalty(call: Any, model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = call(x).square().mean() + model.get_parameter("head.weight").square().mean()
    return loss


def shared_head(call: Any, model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = (call(x) @ model.get_parameter("head.weight").T).square().mean()
    return found


def penalty_alone(call: Any, model: nn.Module, x: Tensor) -> Tensor:
    call(x)
    return model.get_parameter("head.weight").square().mean()


def kept_loss(call: Any, model: Any, x: Tensor) -> Tensor:
    loss: Tensor = call(x).square().mean()
    return loss + model.kept


def part_alone(call: Any, model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = call(x).square().mean() + model.get_submodule("head")(x.to(DTYPE[call])).square().mean()
    return loss


def made_inputs(call: Any, model: nn.Module, x: Tensor) -> Tensor:
    """As embeddings that are looked up before the engine is called; what it returned goes in again."""
    first: Tensor = call(x + model.get_parameter("head.bias"))
    loss: Tensor = call(first.float()).square().mean() + first.square().mean()
    return loss


DTYPE: dict[Any, torch.dtype] = {}  # that a model computes in
LOSSES: tuple[Loss, ...] = (penalty, shared_head, penalty_alone, kept_loss, part_alone, made_inputs)
BEFORE = (made_inputs,)  # at stage 3 a weight is read between a forward and its backward


def samples(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(loss_of: Loss, stage: int, kind: str, way: str, **config: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = {"optimizer": SGD, "zero_optimization": {"stage": stage}, **KINDS[kind], **config}
    with patch.object(plan, "_MIN_END_NUMEL", 1), lowtide.initialize(Net(), config) as engine:
        DTYPE[engine] = next(engine.parameters()).dtype
        count = KINDS[kind].get("gradient_accumulation_steps", 1)
        for number in range(2 * count):
            loss = loss_of(engine, engine.module, samples(number, engine.rank)).float()
            if way == "engine":
                engine.backward(loss)
            else:
                (engine.scale(loss) if way == "scale" else loss).backward()
            assert not engine.step().skipped
        del DTYPE[engine]
        return {name: value.float() for name, value in engine.state_dict().items()}


def train_plainly(loss_of: Loss, kind: str, world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, count = Net(), KINDS[kind].get("gradient_accumulation_steps", 1)
    DTYPE[model] = torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for number in range(step * count, (step + 1) * count):
            for rank in range(world_size):
                (loss_of(model, model, samples(number, rank)) / (count * world_size)).backward()
        optimizer.step()
    return model.state_dict()


def train_all(stages: list[int], kinds: list[str], ways: list[str], **config: Any) -> dict[tuple[Any, ...], Any]:
    return {
        (loss_of.__name__, stage, kind, way): train(loss_of, stage, kind, way, **config)
        for loss_of, stage, kind, way in pairs(LOSSES, stages, kinds, ways)
        if not (stage == 3 and loss_of in BEFORE)
    }


def check(found: dict[tuple[Any, ...], dict[str, Tensor]], world_size: int) -> None:
    losses = {loss_of.__name__: loss_of for loss_of in LOSSES}
    for (name, stage, kind, way), state in found.items():
        tolerance = 5e-3 if kind == "float16" else 1e-6
        what = f"{name}, stage {stage}, {kind}, {way}"
        torch.testing.assert_close(
            state, dict(train_plainly(losses[name], kind, world_size)), rtol=tolerance, atol=tolerance,
            msg=f"{what}: {{}}".format,
        )  # fmt: skip


def test_each_backward_is_that_of_the_loss(ranks: RankPool) -> None:
    [found] = ranks(1, train_all, [0, 1, 2, 3], list(KINDS), ["loss", "engine", "scale"], process_group=False)
    check(found, 1)


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_ranks_train_as_one(ranks: RankPool, transport: str) -> None:
    check(ranks(2, train_all, [2], ["prescaled"], ["loss"], communication={"transport": transport})[0], 2)


def with_layers_before(stages: list[int]) -> list[tuple[dict[str, Tensor], bool]]:
    """And without it: a backward needs their weights. Whether they are released after a call without one."""
    found = []
    for stage in stages:
        torch.manual_seed(0)
        config = {"optimizer": SGD, "zero_optimization": {"stage": stage}, "communication": {"transport": "sockets"}}
        with lowtide.initialize(Net(), config) as engine:
            first, head = map(engine.module.get_submodule, ("first", "head"))
            with torch.no_grad():
                head(first(samples(0, 0)))
            try:
                is_released = not head.get_parameter("weight").sum().isfinite()
            except lowtide.ReleasedParameterError:
                is_released = True
            for step in range(2):
                made = head(torch.tanh(first(samples(step, engine.rank))))
                (engine(made) if step else made).square().mean().backward()
                engine.step()
            found.append((engine.state_dict(), is_released))
    return found


def test_layers_may_be_called_before_the_model(ranks: RankPool) -> None:
    (expected, is_released), (found, is_released_at_3) = ranks(2, with_layers_before, [0, 3])[0]
    assert not is_released and is_released_at_3
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def predivided() -> lowtide.Engine:
    return lowtide.initialize(Net(), {"optimizer": SGD, "gradient_predivide_factor": 4.0})


def test_what_has_the_factor_in_part_is_refused() -> None:
    with predivided() as engine:
        x, weight = samples(0, 0), engine.module.get_parameter("head.weight")
        with pytest.raises(StateError, match=r"expected the whole loss through engine.scale\(\), found a part of it"):
            (engine.scale(engine(x).mean()) + weight.square().sum()).backward()
        with pytest.raises(
            StateError, match=r"torch.autograd.grad: expected a loss of the output of engine\(...\), found"
        ):
            torch.autograd.grad(engine(x).mean() + weight.square().sum(), weight)
        loss = engine(x).mean() + weight.square().sum()
        with pytest.raises(StateError, match="expected tensors, found a GradientEdge"):
            torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))


def test_one_loss_reads_weights_of_two_engines_and_of_none() -> None:
    gradients = []
    for factor in (1.0, 4.0):
        torch.manual_seed(0)
        config = {"optimizer": SGD, "gradient_predivide_factor": factor}
        head = nn.Linear(6, 1)
        with lowtide.initialize(Net(), config) as one, lowtide.initialize(Net(), config) as other:
            x, weights = samples(0, 0), [engine.module.get_parameter("head.weight") for engine in (one, other)]
            loss = head(one(x) + other(x)).square().mean() + (weights[0] * weights[1] * head.weight).sum()
            loss.backward()
            one.step(), other.step()
            gradients.append([head.weight.grad, one.state_dict(), other.state_dict()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-7)


def test_torch_has_its_own_function_again_when_no_engine_is_there() -> None:
    before = vars(torch.autograd)["_engine_run_backward"]
    with predivided(), predivided():
        assert type(vars(torch.autograd)["_engine_run_backward"]).__module__ == "lowtide.engine.step.gradient_scale"
    assert vars(torch.autograd)["_engine_run_backward"] is before
