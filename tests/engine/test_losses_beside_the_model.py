"""Gradients past what the engine has returned: of inputs, of layers before and after it, of its own parameters."""

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
from tests.kit.ranks import on_ranks
from tests.kit.training import rank_and_world, refusal

STAGES = (0, 2, 3)
WAYS = ("engine", "scale", "loss")  # in which a backward is called
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "prescaled": {"prescale_gradients": True, "gradient_accumulation_steps": 2},
    "predivided": {"gradient_predivide_factor": 4.0},
    "sent in float16": {"communication_data_type": "fp16", "gradient_accumulation_steps": 2},
    "float16": {"fp16": {"enabled": True, "initial_scale_power": 10}, "gradient_accumulation_steps": 2},
}


def count_of(kind: str) -> int:
    count: int = KINDS[kind].get("gradient_accumulation_steps", 1)
    return count


def engine_for(model: nn.Module, stage: int, kind: str, **more: Any) -> lowtide.Engine:
    optimizer = {"type": "sgd", "params": {"lr": 0.1}}
    config = {"optimizer": optimizer, "zero_optimization": {"stage": stage}, **KINDS[kind], **more}
    return lowtide.initialize(model, config)


def backward(engine: lowtide.Engine, loss: Tensor, way: str) -> None:
    if way == "engine":
        engine.backward(loss)
    else:
        (engine.scale(loss) if way == "scale" else loss).backward()


def samples(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def net(inputs: int = 6, outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs))


def outer_gradients(stage: int, kind: str, way: str, rank: int | None = None) -> list[Tensor]:
    """Of an input, of a layer before the engine, and of a head after it. rank: by plain torch, as that rank."""
    torch.manual_seed(0)
    model, before, head = net(6, 5), nn.Linear(6, 6), nn.Linear(5, 1)
    engine = engine_for(model, stage, kind) if rank is None else None
    x = samples(0, engine.rank if engine is not None else rank or 0).requires_grad_()
    for _ in range(count_of(kind)):  # torch adds the gradients up
        middle = before(x)
        output = (engine or model)(x * x + middle).float()
        loss = head(output).square().mean() + output.sum()
        loss = loss + x.square().mean() + middle.square().mean() + (head.weight * before.weight[0, 0]).sum()  # past it
        if engine is None:
            loss.backward()
        else:
            backward(engine, loss, way)
    if engine is not None:
        assert not engine.step().skipped
        engine.close()
    return [value.grad for value in (x, *before.parameters(), *head.parameters()) if value.grad is not None]


@on_ranks(2)
def test_gradients_outside_of_the_engine_are_those_of_the_loss_as_it_was_given() -> None:
    for row in pairs(STAGES, list(KINDS), WAYS):
        stage, kind, way = row
        gradients = outer_gradients(stage, kind, way)
        expected = outer_gradients(stage, kind, way, rank_and_world()[0])
        assert len(gradients) == len(expected) == 5
        rtol, atol = (1e-2, 1e-2) if "float16" in row else (1e-6, 1e-7)
        torch.testing.assert_close(gradients, expected, rtol=rtol, atol=atol, msg=f"{row}: {{}}".format)


class Net(nn.Module):
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        self.kept = x.square().mean()
        return self.head(x)


Loss = Callable[[Any, Any, Tensor], Tensor]  # of what is called, the model, and an input
LOSSES: dict[str, Loss] = {
    "penalty": lambda call, model, x: call(x).square().mean() + model.head.weight.square().mean(),
    "shared head": lambda call, model, x: (call(x) @ model.head.weight.T).square().mean(),
    "penalty alone": lambda call, model, x: (call(x), model.head.weight.square().mean())[1],
    "kept": lambda call, model, x: call(x).square().mean() + model.kept,
    "part alone": lambda call, model, x: call(x).square().mean() + model.head(x.to(model.kept.dtype)).square().mean(),
}


def made_inputs(call: Any, model: Any, x: Tensor) -> Tensor:
    """As embeddings that are looked up before the engine is called; what it returned goes in again."""
    first: Tensor = call(x + model.head.bias)
    loss: Tensor = call(first.float()).square().mean() + first.square().mean()
    return loss


LOSSES["made inputs"] = made_inputs  # at stage 3 a weight would be read between a forward and its backward


def train(name: str, stage: int, kind: str, way: str, **config: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with patch.object(plan, "_MIN_END_NUMEL", 1), engine_for(Net(), stage, kind, **config) as engine:
        for number in range(2 * count_of(kind)):
            loss = LOSSES[name](engine, engine.module, samples(number, engine.rank))
            backward(engine, loss.float(), way)
            assert not engine.step().skipped
        return {name: value.float() for name, value in engine.state_dict().items()}


def train_plainly(name: str, kind: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, count = Net(), count_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for number in range(step * count, (step + 1) * count):
            (LOSSES[name](model, model, samples(number, 0)) / count).backward()
        optimizer.step()
    return model.state_dict()


def test_each_backward_is_that_of_the_loss() -> None:
    rows = pairs(list(LOSSES), STAGES, ["prescaled", "predivided", "float16"], WAYS)
    for row in (row for row in rows if row[:2] != ("made inputs", 3)):
        name, _, kind, _ = row
        state = train(*row)
        tolerance = 5e-3 if kind == "float16" else 1e-6
        expected = dict(train_plainly(name, kind))
        torch.testing.assert_close(state, expected, rtol=tolerance, atol=tolerance, msg=f"{row}: {{}}".format)


@on_ranks(2)
def test_layers_may_be_called_before_the_model() -> None:
    """And without it: a backward needs their weights, which are released after a call without one."""
    states = []
    for stage in (0, 3):
        torch.manual_seed(0)
        with engine_for(Net(), stage, "plain", communication={"transport": "sockets"}) as engine:
            first, head = map(engine.module.get_submodule, ("first", "head"))
            with torch.no_grad():
                head(first(samples(0, 0)))
            if stage == 3:
                refusal(head.get_parameter("weight").sum, kind=lowtide.ReleasedParameterError)
            for step in range(2):
                made = head(torch.tanh(first(samples(step, engine.rank))))
                (engine(made) if step else made).square().mean().backward()
                engine.step()
            states.append(engine.state_dict())
    torch.testing.assert_close(*states, rtol=1e-6, atol=1e-7)


ROOTS: dict[str, Loss] = {  # of a backward, beside the mean square of the output
    "output": lambda output, model, x: output.abs().mean(),
    "weight": lambda output, model, x: model.head.weight.square().mean(),
    "both": lambda output, model, x: (output @ model.head.weight.T).square().mean(),
    "neither": lambda output, model, x: x.square().mean(),
}


def gradients_of_two_roots(other: str, scaled: tuple[bool, bool], stage: int, kind: str) -> list[Tensor]:
    """Of the parameters, after a step, and of the input."""
    torch.manual_seed(0)
    with engine_for(Net(), stage, kind) as engine:
        x = samples(0, 0).requires_grad_()
        output = engine(x)
        losses = output.square().mean(), ROOTS[other](output, engine.module, x)
        scales = [engine.scale(loss) if is_scaled else loss for loss, is_scaled in zip(losses, scaled, strict=True)]
        torch.autograd.backward(scales)
        engine.step()
        assert x.grad is not None
        return [x.grad, *engine.state_dict().values()]


@pytest.mark.parametrize("other", ROOTS)
def test_each_root_of_a_backward_may_be_scaled_or_not(other: str) -> None:
    for stage in (0, 3):
        expected = gradients_of_two_roots(other, (False, False), stage, "plain")
        for scaled in pairs((False, True), (False, True)):
            found = gradients_of_two_roots(other, scaled, stage, "predivided")
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=f"{stage}, {scaled}: {{}}".format)


def test_what_has_the_factor_in_part_is_refused() -> None:
    with engine_for(Net(), 0, "predivided") as engine:
        x, weight = samples(0, 0), engine.module.get_parameter("head.weight")
        words = "expected the whole loss through engine.scale(), found a part of it"
        for other in (weight.square().sum(), engine(x).mean()):
            total = engine.scale(engine(x).mean()) + other
            assert words in refusal(total.backward, kind=StateError)
        words = "torch.autograd.grad: expected a loss of the output of engine(...), found"
        assert words in refusal(torch.autograd.grad, engine(x).mean() + weight.square().sum(), weight, kind=StateError)
        edge = torch.autograd.graph.get_gradient_edge(engine(x).mean() + weight.square().sum())
        assert "expected tensors, found a GradientEdge" in refusal(torch.autograd.backward, edge, kind=StateError)
        words = "expected a loss without engine.scale(), found a loss with it"
        assert words in refusal(engine.backward, engine.scale(engine(x).mean()), kind=StateError)
        with pytest.raises(RuntimeError, match="is being modified inplace"):
            engine(x).mul_(2)  # past its factor


def train_two(is_chain: bool, scales: tuple[str, ...] = (), **config: Any) -> list[Any]:
    """By a loss that goes through both, or by one that reads weights of both and one that is scaled in parts.

    scales: the engines that scale the loss through both.
    """
    torch.manual_seed(0)
    head = nn.Linear(6, 1)
    with engine_for(Net(), 0, "plain", **config) as one, engine_for(Net(), 0, "plain", **config) as other:
        x, weights = samples(0, 0), [engine.module.get_parameter("head.weight") for engine in (one, other)]
        first = one(x).float()
        if is_chain:
            loss = head(first + other(first).float()).square().mean()
            for name in scales:
                loss = (one if name == "one" else other).scale(loss)
            loss.backward()
        else:
            loss = head(first + other(x)).square().mean() + (weights[0] * weights[1] * head.weight).sum()
            loss.backward()
            h = head(one(x))
            (one.scale(h.square().mean()) + one.scale(h.abs().mean())).backward()
        assert not one.step().skipped and not other.step().skipped
        states = [{name: value.float() for name, value in engine.state_dict().items()} for engine in (one, other)]
        return [head.weight.grad, *states]


def test_one_loss_goes_through_two_engines_and_beside_them() -> None:
    for is_chain in (False, True):
        found = train_two(is_chain, gradient_predivide_factor=4.0)
        torch.testing.assert_close(found, train_two(is_chain), rtol=1e-6, atol=1e-7)
    for scales in (("one",), ("other",), ("one", "other")):
        found = train_two(True, scales, gradient_predivide_factor=4.0)
        torch.testing.assert_close(found, train_two(True), rtol=1e-6, atol=1e-7, msg=f"{scales}: {{}}".format)
    half = train_two(True, fp16={"enabled": True, "initial_scale_power": 10})
    torch.testing.assert_close(half, train_two(True), rtol=1e-2, atol=1e-2)


def test_torch_has_its_own_function_again_when_no_engine_is_there() -> None:
    before = vars(torch.autograd)["_engine_run_backward"]
    with engine_for(Net(), 0, "predivided"), engine_for(Net(), 0, "predivided"):
        assert type(vars(torch.autograd)["_engine_run_backward"]).__module__ == "lowtide.engine.step.gradient_scale"
    assert vars(torch.autograd)["_engine_run_backward"] is before
