"""Models as people have them train with nothing changed but a `loss_fn`, and as in plain torch."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from tests.kit.grids import pairs
from tests.kit.ranks import RankPool
from tests.kit.training import ROWS, Case, Outcome, assert_close, take_step, train, train_plainly

TOKENS, LENGTH, WIDTH = 23, 5, 8
Batch = tuple[Tensor, ...]


def language_loss(logits: Tensor, batch: Batch) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), batch[0].roll(-1, 1).flatten())


def class_loss(logits: Tensor, batch: Batch) -> Tensor:
    return functional.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])


def square(output: Tensor, batch: Batch) -> Tensor:
    return output.square().mean()


class Recurrent(nn.Module):
    """Flat weights of one module, sequences of several lengths, and the gradients of an embedding that are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH, sparse=True)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = torch.tensor([3, LENGTH])
        packed = nn.utils.rnn.pack_padded_sequence(self.lstm(self.embedding(tokens))[0], lengths, True, False)
        self.gru.flatten_parameters()
        return self.head(nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], True)[0])


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    """Batch norm, changes in place, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Conv2d(3, 4, 3), nn.Sequential(*(Residual(4) for _ in range(3)))
        self.head = nn.Linear(4, 5)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x.to(memory_format=torch.channels_last))).mean((2, 3)))


class Vit(nn.Module):
    """torch's own layers, which have a way past their modules in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.zeros(1, 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 3), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        return self.head(self.encoder(torch.cat([self.token.expand(len(x), 1, WIDTH), x], 1))[:, 0])


class Transformed(nn.Module):
    """`torch.func` in the forward: vmap, grad and both over blocks, an ensemble, a step of an inner optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        def energy(row: Tensor) -> Tensor:
            for block in self.blocks:
                row = block(row)
            return row.square().sum()

        def error(params: Mapping[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.blocks[0], dict(params), (x,)).square().mean()

        own = dict(self.blocks[0].named_parameters())
        slopes = torch.func.grad(error)(own)
        stepped = {name: param - 0.1 * slopes[name] for name, param in own.items()}
        every = [dict(block.named_parameters()) for block in self.blocks]
        stacked = {name: torch.stack([params[name] for params in every]) for name in every[0]}
        forces = torch.func.grad(energy)(x) + torch.vmap(torch.func.grad(energy))(x)
        return torch.vmap(energy)(x).mean() + forces + error(stepped) + torch.vmap(error)(stacked).sum()


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        return nn.Sequential(*(torch.jit.script(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))


def drawn(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def tokens(step: int, rows: int) -> Batch:
    return (torch.randint(TOKENS, (rows, LENGTH), generator=drawn(step)),)


def images(step: int, rows: int) -> Batch:
    return (torch.randn(rows, 3, 8, 8, generator=drawn(step)),)


def vectors(step: int, rows: int) -> Batch:
    return (torch.randn(rows, WIDTH, generator=drawn(step)),)


OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}  # a larger eps: gradients near 0 are rounding
CONFIG: dict[str, Any] = {"optimizer": {"type": "adamw", "params": OPTIONS}}
FAMILIES: dict[str, tuple[Case, Callable[[Any, Batch], Tensor]]] = {
    "LSTM and GRU": (Case(Recurrent, tokens, steps=2, config=CONFIG), language_loss),
    "ResNet": (Case(ResNet, images, steps=2, config=CONFIG), class_loss),
    "ViT": (Case(Vit, images, steps=2, config=CONFIG), class_loss),
    "blocks by torch.jit": (Case(scripted, vectors, steps=2, config=CONFIG), square),
    "torch.func": (Case(Transformed, vectors, steps=2, config=CONFIG), square),
}
ROUTES = ("shared_memory", "sockets")
GRID = pairs(list(FAMILIES), (0, 3), ROUTES)
adamw = partial(torch.optim.AdamW, **OPTIONS)


def by_torch(name: str) -> tuple[Outcome, list[float]]:
    """With an evaluation before each step; on two ranks, each of which has a part of the batch."""
    case, loss_fn = FAMILIES[name]
    evaluated = []

    def evaluate(model: nn.Module, optimizer: Any, step: int) -> None:
        batch = case.batch(9, ROWS)
        with torch.no_grad():
            evaluated.append(loss_fn(model.eval()(*batch), batch).item())
        model.train()

    def make_dense(model: nn.Module, optimizer: Any, step: int) -> None:
        """AdamW takes no sparse gradients."""
        for param in model.parameters():
            param.grad = param.grad.to_dense() if param.grad is not None and param.grad.is_sparse else param.grad

    return train_plainly(case, 2, adamw, 2, evaluate, make_dense, loss_fn), evaluated


def by_lowtide(rows: Sequence[tuple[str, int]], transport: str) -> list[tuple[Outcome, list[float]]]:
    found = []
    for name, stage in rows:
        case, loss_fn = FAMILIES[name]
        evaluated: list[float] = []

        def take(engine: lowtide.Engine, case: Case, step: int, evaluated: list[float] = evaluated) -> Any:
            evaluated.append(engine.eval_step(case.batch(9, ROWS)).item())
            return take_step(engine, case, step)

        case = case.at(stage, config={"communication": {"transport": transport}})
        found.append((train(case, take, loss_fn=loss_fn), evaluated))
    return found


@pytest.mark.parametrize("transport", ROUTES)
def test_models_of_others_train_as_in_plain_torch(ranks: RankPool, transport: str) -> None:
    rows = [(name, stage) for name, stage, its in GRID if its == transport]
    for (name, stage), (outcome, evaluated) in zip(rows, ranks(2, by_lowtide, rows, transport)[0], strict=True):
        expected, evaluated_by_torch = by_torch(name)
        for key in [key for key in expected.state if "running_" in key or "num_batches" in key]:
            del outcome.state[key], expected.state[key]  # each rank has its own
            evaluated = evaluated_by_torch
        assert_close(outcome, expected, 1e-4, 2e-5, f"{name}, stage {stage}")
        assert evaluated == pytest.approx(evaluated_by_torch, rel=1e-4, abs=2e-5), name
