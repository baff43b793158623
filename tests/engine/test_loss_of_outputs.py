"""Where the loss is found: the output itself, its .loss, ["loss"] or [0], or what loss_fn makes of it."""

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 0,
    "optimizer": {"type": "sgd", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
}


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Model(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.wrap = wrap

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.layers(x)
        return self.wrap(logits, functional.mse_loss(logits, y))


WRAPS: dict[str, Any] = {
    "tensor": lambda logits, loss: loss,
    "one element": lambda logits, loss: loss.reshape(1, 1),
    "attribute": lambda logits, loss: Output(logits, loss),
    "mapping": lambda logits, loss: {"logits": logits, "loss": loss},
    "tuple": lambda logits, loss: (loss, logits),
    "list": lambda logits, loss: [loss, logits],
}


def steps(wrap: Any, **options: Any) -> list[float]:
    torch.manual_seed(0)
    engine = lowtide.initialize(Model(wrap), CONFIG, **options)
    batch = torch.randn(4, 3), torch.randn(4, 3)
    losses = [engine.train_step(batch).loss.item() for _ in range(3)]
    return [*losses, engine.eval_step(batch).item()]


def expected() -> list[float]:
    """The same by plain torch."""
    torch.manual_seed(0)
    model = Model(WRAPS["tensor"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 3), torch.randn(4, 3)
    losses = []
    for _ in range(4):
        loss = model(*batch)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("kind", list(WRAPS))
def test_the_loss_is_found_in_the_output(kind: str) -> None:
    assert steps(WRAPS[kind]) == pytest.approx(expected(), rel=1e-5)


class Summed(nn.Module):
    """Its loss needs no value of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Output:
        logits = self.layer(x)
        self.made = weakref.ref(logits.untyped_storage())
        return Output(logits, logits.sum())


def test_logits_are_gone_when_the_backward_comes() -> None:
    model, found = Summed(), list[object]()
    with lowtide.initialize(model, CONFIG) as engine:
        model.layer.weight.register_hook(lambda _: found.append(model.made()))
        engine.train_step((torch.randn(4, 3),))
    assert found == [None]


def test_loss_fn_gets_output_and_batch() -> None:
    def loss_fn(output: Output, batch: Any) -> Tensor:
        assert isinstance(output, Output) and len(batch) == 2
        return functional.mse_loss(output.logits, batch[1])

    assert steps(lambda logits, loss: Output(logits), loss_fn=loss_fn) == pytest.approx(expected(), rel=1e-5)


@pytest.mark.parametrize(
    ("wrap", "found"),
    [
        (lambda logits, loss: logits, r"found a tensor of shape \(4, 3\)"),
        (lambda logits, loss: Output(logits), "found Output"),
        (lambda logits, loss: {"logits": logits}, "found dict"),
        (lambda logits, loss: None, "found NoneType"),
    ],
)
def test_an_output_without_a_loss_is_an_error(wrap: Any, found: str) -> None:
    with pytest.raises(ValueError, match=f"loss: expected a tensor with a single element.*{found}; give initialize"):
        steps(wrap)
