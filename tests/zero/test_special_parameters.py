"""Unused, frozen, tied, shared, empty, integer parameters, buffers, several dtypes: every stage trains them alike."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.zero import plan
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, assert_alike, assert_close, refusal, settings, train_all, train_plainly, trained
from tests.zero import containers

Build = Callable[[], nn.Module]


class Base(models.Mlp):
    """float64, so that sums in another order do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.change()
        self.double()

    def change(self) -> None: ...


class WithoutBias(nn.Linear):
    """Has one, and does not read it."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Unused(Base):
    """Nobody reads a whole layer, a bias in a unit, and a parameter of the root; in the middle the gradient stops."""

    def change(self) -> None:
        self.lonely = nn.Parameter(torch.ones(3, 5))
        self.layers[1] = WithoutBias(7, 7)
        self.layers.append(nn.Linear(7, 7))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = (x + torch.tanh(self.layers[0](x))).detach()
        for layer in list(self.layers)[1:3]:
            x = x + torch.tanh(layer(x))
        return functional.mse_loss(self.last(x), y)


class Frozen(Base):
    """A whole unit, one weight in a unit, and a part of the rest."""

    def change(self) -> None:
        self.layers[0].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)
        self.first.bias.requires_grad_(False)


class Adapted(Base):
    """In each unit a frozen layer below a trained one, so that the backward is not over with the last gradient."""

    def change(self) -> None:
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(7).requires_grad_(False), nn.Linear(7, 7)) for _ in range(3))
        )


class TiedAcrossUnits(Base):
    def change(self) -> None:
        self.layers[2].weight = self.layers[0].weight
        self.layers[1].bias = self.first.bias


class SharedModule(Base):
    """One unit has two names, and its forward runs twice with another unit in between."""

    def change(self) -> None:
        self.layers.append(self.layers[0])


class Hollow(nn.Linear):
    """Has a weight without elements and a weight without dimensions besides, or a weight without elements alone."""

    def __init__(self, is_alone: bool) -> None:
        super().__init__(7, 7)
        self.nothing = nn.Parameter(torch.zeros(3, 0))
        self.scale: Any = 1.0 if is_alone else nn.Parameter(torch.tensor(0.5))
        self.is_alone = is_alone
        if is_alone:
            self.weight = self.bias = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.is_alone else super().forward(x) * self.scale) + self.nothing.sum()


class Empty(Base):
    """Parameters without elements, in a unit, in the rest, and as a whole unit; and some without dimensions."""

    def change(self) -> None:
        self.nothing, self.scale = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(1.5))
        self.layers[1], self.layers[2] = Hollow(False), Hollow(True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x * self.scale, y) + self.nothing.sum()


class SignedLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(7, 7)
        self.sign = nn.Parameter(torch.tensor([True, False] * 3 + [True]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.where(self.sign, -x)


class Integer(Base):
    """Tables of numbers that are parameters, and values that lie in memory in another order."""

    def change(self) -> None:
        self.last.weight = nn.Parameter(torch.arange(21.0).view(7, 3).t() / 20)
        weight = self.layers[0].get_parameter("weight")
        weight.data = weight.data.t()
        self.order = nn.Parameter(torch.tensor([2, 0, 1, 4, 3]), requires_grad=False)
        self.layers[1] = SignedLinear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x[:, self.order], y)


class MixedLinear(nn.Linear):
    """A float64 weight and a float32 bias."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias.to(x.dtype))


class TwoDtypes(Base):
    """In each unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(MixedLinear(7, 7).double() for _ in range(3)))
        for layer in self.layers:
            layer.bias.data = layer.bias.data.float()


class TensorChunk:
    """Holds a tensor where no list or mapping is."""

    __slots__ = ("_x", "own")

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self.own = [self]


class Boxed(nn.Linear):
    def forward(self, x: Tensor) -> TensorChunk:  # type: ignore[override]
        return TensorChunk(super().forward(x))


class Objects(Base):
    """What a unit returns is an object of a class of one's own."""

    def change(self) -> None:
        self.layers = nn.ModuleList(Boxed(7, 7) for _ in range(3))  # type: ignore[assignment]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x)._x)
        return functional.mse_loss(self.last(x), y)


class ReadFromOutside(Base):
    """Weights of units, beside the units' own forward and before it; and of a unit that is not called itself."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, between, last = (self.get_parameter(f"layers.{index}.weight") for index in range(3))
        x = torch.tanh(self.first(functional.linear(x, first[:5, :5])))
        x = self.layers[2](x + functional.linear(x, between))
        return functional.mse_loss(self.last(self.layers[0](x)), y) + last.sum()


class Twice(nn.Linear):
    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        x = torch.tanh(super().forward(x))
        return super().forward(self(x, again=False)) if again else x


class CallThemselves(Base):
    """Units are called in their own forward."""

    def change(self) -> None:
        self.layers = nn.Sequential(*(Twice(7, 7) for _ in range(3)))


KINDS: list[Build] = list(Base.__subclasses__())  # all above
ROUTES = ("shared_memory", "sockets")


def case_of(kind: Build, stage: int = 0, transport: str = "auto", accumulation: int = 1) -> Case:
    config = {"communication": {"transport": transport}}
    return Case(kind, models.vector_batch_float64, stage, accumulation, steps=2, clip=0.05, config=config)


@pytest.mark.parametrize(
    ("accumulation", "places", "kinds"),
    [
        (1, [(3, ROUTES[1])], KINDS),
        (2, [(0, ROUTES[0]), (3, ROUTES[0]), (1, ROUTES[1]), (2, ROUTES[1])], KINDS),
        (1, [(3, ROUTES[1]), (3, ROUTES[0])], containers.KINDS),
    ],
    ids=["released", "accumulation", "containers"],
)
def test_they_train_as_by_plain_torch(
    ranks: RankPool, accumulation: int, places: Sequence[tuple[int, str]], kinds: list[Build]
) -> None:
    """places: (stage, transport), one for each kind in turn."""
    cases = [case_of(kind, *places[index % len(places)], accumulation) for index, kind in enumerate(kinds)]
    for kind, case, outcome in zip(kinds, cases, ranks(2, train_all, cases)[0], strict=True):
        tolerance = 1e-6 if kind is TwoDtypes else 1e-10
        assert_close(outcome, train_plainly(case, 2), tolerance, tolerance, f"{kind}, stage {case.stage}")


def test_special_parameters_in_bf16(ranks: RankPool) -> None:
    """float64 parameters become bf16; integer ones stay what they are."""
    config = {"bf16": {"enabled": True}, "communication": {"transport": "sockets"}}
    kinds = [TiedAcrossUnits, Empty, Integer]
    cases = [Case(kind, models.vector_batch, clip=0.05, config=config) for kind in kinds]
    outcomes = ranks(2, train_all, [case.at(stage) for case in cases for stage in (0, 3)])[0]
    for kind, first, other in zip(kinds, outcomes[::2], outcomes[1::2], strict=True):
        assert_alike([first, other], kind)
        assert len(set(first.losses)) > 1 and first.state["first.weight"].dtype == torch.bfloat16


class Normalized(Base):
    """Batch norm: buffers that the forward changes."""

    def change(self) -> None:
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)) for _ in range(3)))


def test_buffers_of_batch_norm(ranks: RankPool) -> None:
    """Where ranks have statistics of their own is asked in tests/engine/test_models_of_others.py."""
    expected = train_plainly(case_of(Normalized, accumulation=2), 1, num_parts=2)
    assert int(expected.state["layers.0.1.num_batches_tracked"]) == 4
    for outcome in ranks(1, train_all, [case_of(Normalized, stage, accumulation=2) for stage in (0, 3)])[0]:
        assert_close(outcome, expected, 1e-10, 1e-10)


# -- parameters that are read outside of the model's forward ----------------------------------------------------------


class WithoutHead(models.TinyGPT):
    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return x


def by_head(model: nn.Module, hidden: Tensor) -> Tensor:
    return functional.linear(hidden, model.get_parameter("head.weight"))


def by_embedding(model: nn.Module, hidden: Tensor) -> Tensor:
    """As a tied weight, and as that of a contrastive loss."""
    weight = model.get_parameter("embedding.weight")
    return hidden @ weight.T + functional.normalize(hidden, dim=-1) @ functional.normalize(weight, dim=-1).T


def of_places(read: Callable[[int, str], list[float]]) -> list[list[float]]:
    """At stage 0, and at stage 3 on both transports."""
    return [read(0, "auto"), *(read(3, transport) for transport in ROUTES)]


def sums_beside_the_model(stage: int, transport: str) -> list[float]:
    """Loss and norm of each step."""
    found = []
    for logits_of in (by_head, by_embedding):
        with (
            patch.object(plan, "_MIN_END_NUMEL", 1),
            trained(case_of(WithoutHead, stage, transport, accumulation=2), 0) as engine,
        ):
            for number in range(4):
                ids, targets = models.token_batch(2 * number + engine.rank, 2)
                logits = logits_of(engine.module, engine(ids))
                engine.backward(functional.cross_entropy(logits.flatten(0, 1), targets.flatten().to(logits.device)))
                if number % 2:
                    result = engine.step()
                    found += [result.loss.item(), result.grad_norm.item()]
    return found


def read_in_hooks(stage: int, transport: str) -> list[float]:
    """Of each step the loss, and what hooks of gradients have read of the block that the backward begins with."""
    found = []
    with trained(case_of(Base, stage, transport), 0) as engine:
        first, last = (engine.module.get_parameter(f"layers.{index}.weight") for index in (0, 2))
        last.register_post_accumulate_grad_hook(lambda param: found.append(param.detach().sum().item()))
        first.register_post_accumulate_grad_hook(lambda param: found.append(last.detach().square().sum().item()))
        batches = (models.vector_batch_float64(step, 2) for step in range(2))
        found.extend(engine.train_step(batch).loss.item() for batch in batches)
    return found


@pytest.mark.parametrize(("read", "rtol"), [(sums_beside_the_model, 1e-6), (read_in_hooks, 1e-9)])
def test_a_loss_may_read_large_ends_and_a_hook_the_block_that_the_backward_began_with(
    ranks: RankPool, read: Callable[[int, str], list[float]], rtol: float
) -> None:
    expected, *found = ranks(2, of_places, read)[0]
    assert found == [pytest.approx(expected, rel=rtol)] * len(ROUTES)


@on_ranks(2)
def test_what_no_loss_reads_is_an_error() -> None:
    """Without gradients, or where no backward may come, one rank may be alone with it."""
    says = partial(refusal, kind=RuntimeError)
    found = []
    with patch.object(plan, "_MIN_END_NUMEL", 1), trained(case_of(WithoutHead, 3), 0) as engine:
        for name in ("embedding.weight", "blocks.1.up.weight"):
            weight = engine.module.get_parameter(name)
            loss = engine(models.token_batch(0, 2)[0]).mean()
            with torch.no_grad():
                found.append(says(weight.sum))
            found.append(says(weight.detach))
            if name.startswith("embedding"):
                weight.sum()
            else:
                found.append(says(weight.sum))
            engine.backward(loss)
            engine.step()
            found.append(says(weight.sum))
    assert len(found) == 7 and all("is released: only its shards exist here" in text for text in found)


class Reader(nn.Module):
    """Its forward reads parameters of containers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(containers.WIDTH)])
        self.more: Any = nn.ModuleDict({"inner": nn.ParameterDict({"shift": torch.zeros(containers.WIDTH)})})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[0] + self.more["inner"]["shift"]


class Readers(containers.Dicts):
    def change(self) -> None:
        self.reader = Reader()


@on_ranks(2)
def test_a_module_that_is_called_by_itself_has_its_containers_parameters() -> None:
    """Outside of the model's own forward."""
    with lowtide.initialize(Readers(), settings(3)) as engine, torch.no_grad():
        x = torch.ones(1, containers.WIDTH, dtype=torch.float64)
        first, second = (engine.module.get_submodule(name)(x).sum().item() for name in ("blocks.1.up", "reader"))
    assert math.isfinite(first) and second == containers.WIDTH


# -- what units return ------------------------------------------------------------------------------------------------


class Aside(nn.Linear):
    """Keeps a loss of its own, with a weight of its own, in an attribute."""

    def __init__(self) -> None:
        super().__init__(7, 7)
        self.router = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.loss = torch.tanh(self.router(x)).square().mean()
        return output


class LossesAside(Base):
    def change(self) -> None:
        self.layers = nn.Sequential(*(Aside() for _ in range(3)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + sum(layer.loss for layer in self.layers)  # type: ignore[misc]


def test_a_gradient_that_comes_past_the_outputs_of_a_released_unit_is_an_error(ranks: RankPool) -> None:
    """It would be one of memory that was given back."""
    nothing_ahead = {"zero_optimization": {"stage3_prefetch_bucket_size": 0}}
    for failure in ranks.fails(2, train_all, [case_of(LossesAside, 3, "sockets").at(3, config=nothing_ahead)]):
        assert failure.kind == "StateError"
        assert "the backward of unit 'layers.1' ran while its parameters were released" in failure.text
        assert "such as a loss kept in an attribute. Return it too, or leave the unit out" in failure.text
    for outcome in ranks(2, train_all, [case_of(LossesAside, 2, "sockets"), case_of(LossesAside, 3)])[0]:
        assert_close(outcome, train_plainly(case_of(LossesAside), 2), 1e-10, 1e-10)


class ReturnsItsScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(models.FEATURES))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x), self.scale


class ScalesOutside(nn.Module):
    """Its blocks return parameters of theirs, and so does it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsItsScale() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x, scale = block(x)
            x = x * scale
        return {"loss": x.square().mean(), "scale": scale}


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_are_returned_have_one_hook(stage: int) -> None:
    model, other = ScalesOutside(), ScalesOutside()
    engine = lowtide.initialize(model, settings(stage, optimizer={"type": "sgd", "params": {"lr": 0.1}}))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(3):
        batch = models.vector_batch(step, 2)
        loss = other(*batch)["loss"]
        torch.testing.assert_close(engine.train_step(batch).loss, loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert [len(param._backward_hooks or {}) for param in model.parameters()] == [1, 1, 1]
    engine.close()
    assert not any(param._backward_hooks for param in model.parameters())


@pytest.mark.parametrize("stage", [0, 2])
def test_a_sparse_gradient_is_seen_between_microbatches(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    tokens = torch.tensor([1, 4])
    (expected,) = torch.autograd.grad(model(tokens).sum(), model.get_parameter("0.weight"))
    with lowtide.initialize(model, settings(stage, gradient_accumulation_steps=2)) as engine:
        engine.backward(engine(tokens).sum())
        found = engine.gradient("0.weight")
        assert found is not None
        torch.testing.assert_close(found, expected.to_dense() / 2)
        assert engine.memory_report().now["gradient_bytes"] > 0
