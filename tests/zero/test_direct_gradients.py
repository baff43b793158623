"""Gradients of large weights are made where they are reduced from: the same bits, and nothing that a user notices."""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.kernels.linear_layers import LinearLayers, gradient_of, weight_gradient
from lowtide.model.patches import ModelPatches
from lowtide.pipe.backward import WeightGradients
from lowtide.zero import hooks
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, assert_alike, settings, train, train_all

WIDTH, BLOCKS = 24, 2
UPDATES = {"zero_optimization": {"update_in_backward": True}}
SETTINGS: list[dict[str, Any]] = [
    {"clip": 0.1, "accumulation": 2},
    {"config": UPDATES},
    {"clip": 0.1, "config": {"bf16": {"enabled": True}, "communication_data_type": "bf16"}, "accumulation": 2},
    {"clip": 0.1, "config": {"activation_checkpointing": {"every": 1}}},
]


class Block(nn.Module):
    """A layer without bias, one that is used twice, one in a reentrant checkpoint, one with a hook on its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.narrow = nn.Linear(3 * WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.recomputed = nn.Linear(WIDTH, WIDTH)
        self.hooked = nn.Linear(WIDTH, WIDTH)
        self.hooked.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.narrow(torch.tanh(self.wide(x)))
        x = self.twice(torch.tanh(self.twice(x)))
        x = x + checkpoint(self.recomputed, x, use_reentrant=True)
        return self.hooked(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def batch(step: int, rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 5, WIDTH, generator=torch.Generator().manual_seed(step)),)


CASE = Case(Net, batch, clip=0.1, steps=2)


@contextmanager
def direct(is_on: bool) -> Iterator[list[bool]]:
    """All linear layers, or none. Gives for each weight's gradient whether there was a place for it."""
    found: list[bool] = []

    def noted(dy: Tensor, x: Tensor, is_transposed: bool, out: Tensor | None = None) -> Tensor:
        found.append(out is not None)
        return weight_gradient(dy, x, is_transposed, out)

    with (
        mock.patch.object(hooks, "_MIN_NUMEL", 1 if is_on else 1 << 60),
        mock.patch.object(hooks, "weight_gradient", noted),
    ):
        yield found


def train_both_ways(cases: list[Case]) -> tuple[list[Outcome], list[Outcome], list[int]]:
    """With and without; and for how many gradients of each case there was a place."""
    with_places, placed = [], []
    for case in cases:
        with direct(True) as found:
            with_places.append(train(case))
        placed.append(sum(found))
    with direct(False) as nothing:
        without = train_all(cases)
    assert not nothing
    return with_places, without, placed


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_bits_are_those_of_copied_gradients(ranks: RankPool, world_size: int) -> None:
    """With two ranks every setting has both transports, at stages that shard parameters or not, in turn."""
    cases = [CASE.at(stage) for stage in (0, 3)] if world_size == 1 else []
    for number, changes in enumerate(SETTINGS if world_size == 2 else ()):
        for stage, transport in zip(((0, 3), (2, 1))[number % 2], ("shared_memory", "sockets"), strict=True):
            case = Case(Net, batch, steps=2, config={"communication": {"transport": transport}})
            cases.append(case.at(stage, **changes))
    for with_places, without, placed in ranks(world_size, train_both_ways, cases):
        assert all(map(max, placed[::2], placed[1::2]))  # of one setting, one case may have no places
        for case, *both in zip(cases, with_places, without, strict=True):
            assert_alike(both, case)


def test_where_gradients_are_cast_they_are_copied(ranks: RankPool) -> None:
    case = Case(Net, batch, config={"bf16": {"enabled": True}})  # reduced in fp32
    for with_places, without, placed in ranks(2, train_both_ways, [case]):
        assert placed == [0]
        assert_alike([*with_places, *without])


# -- what users see ---------------------------------------------------------------------------------------------------


def units_of(model: nn.Module, stage: int) -> lowtide.Engine:
    """Each layer of the model is a unit."""
    config = settings(stage, zero_optimization={"units": ["?"]})
    return lowtide.initialize(model, config, loss_fn=lambda output, batch: output.square().mean())


def norms_with_hooks(is_on: bool) -> list[tuple[list[float], list[float], int]]:
    kinds = ("keeps", "adds", "after", "grad in backward")
    return [norms_with_hook(is_on, kind, stage) for kind in kinds for stage in (0, 2)]


def norms_with_hook(is_on: bool, kind: str, stage: int) -> tuple[list[float], list[float], int]:
    """The norms of steps, those of the gradients that a hook has kept, and the places that there were for that weight.

    kind: "adds" gives back the gradient and a part of the one of the step before; the others only keep it.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(2)))
    weight = model.get_parameter("1.0.weight")
    kept: list[Tensor] = []

    def keep(gradient: Tensor) -> Tensor | None:
        kept.append(gradient)
        return gradient + 0.9 * kept[-2] if kind == "adds" and len(kept) > 1 else None

    def ask(module: Any, before: Any, after: Any) -> None:
        with torch.enable_grad():
            kept.extend(torch.autograd.grad(module[0](torch.ones(1, WIDTH)).sum(), weight))

    if kind == "after":
        weight.register_post_accumulate_grad_hook(lambda param: kept.append(param.grad))
    elif kind == "grad in backward":
        model[1].register_full_backward_hook(ask)
    else:
        weight.register_hook(keep)
    with direct(is_on) as found, units_of(model, stage) as engine:
        norms = [engine.train_step(*batch(step, 2)).grad_norm.item() for step in range(3)]
    return norms, [gradient.norm().item() for gradient in kept], sum(found)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_a_user_keeps_stay_what_they_are(ranks: RankPool, world_size: int) -> None:
    with_places, without = (ranks(world_size, norms_with_hooks, is_on) for is_on in (True, False))
    for ours, theirs in zip(with_places, without, strict=True):
        assert [found[:2] for found in ours] == [found[:2] for found in theirs]
    # For the other weight; with two ranks the slot may still be the one of this weight.
    assert world_size > 1 or min(found[2] for found in with_places[0]) > 0


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_has_a_place_for_every_gradient(stage: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
    with direct(True) as found, units_of(model, stage) as engine:
        engine.train_step(*batch(0, 2))
    assert found == [True] * BLOCKS


def num_patched(model: nn.Module) -> int:
    return sum("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("comes_later", [False, True])
def test_a_forward_of_a_users_own_stays_and_a_closed_engine_leaves_layers_as_they_were(comes_later: bool) -> None:
    model: Any = Net()
    with lowtide.initialize(model, settings()):
        assert num_patched(model) == 0  # small layers are left alone
    own = lambda x: 2 * x  # noqa: E731
    with direct(True):
        model.first.forward = model.first.forward if comes_later else own
        with lowtide.initialize(model, settings()) as engine:
            assert "forward" in model.blocks[0].wide.__dict__
            model.first.forward = own if comes_later else model.first.forward
            engine.train_step(*batch(0, 2))
    assert num_patched(model) == 1 and model.first.forward is own


# -- a layer by itself ------------------------------------------------------------------------------------------------


def layers_of(model: nn.Module) -> ModelPatches:
    patches = ModelPatches()
    LinearLayers(model.modules(), lambda param, dy, x, is_transposed: gradient_of(dy, x, is_transposed), patches)
    return patches


def weight_norm(layer: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old one, which leaves a tensor in the weight's place
        nn.utils.weight_norm(layer)


def autocast(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x)


def slope(layer: nn.Module, x: Tensor) -> Tensor:
    """As in a gradient penalty."""
    return torch.autograd.grad(torch.tanh(layer(x)).square().sum(), x, create_graph=True)[0]


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda layer, x: layer(x),
    "narrow": lambda layer, x: layer.bfloat16()(x.bfloat16()),
    "no bias": lambda layer, x: layer(x),
    "weight norm": lambda layer, x: layer(x),
    "keyword": lambda layer, x: layer(input=x),
    "sparse": lambda layer, x: layer(x.to_sparse()),
    "vmap": lambda layer, x: torch.func.vmap(layer)(x),
    "one row": lambda layer, x: layer(x[0]),
    "more dims": lambda layer, x: layer(x[None].expand(2, -1, -1)),
    "autocast": autocast,
    "slope": slope,
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_linear_layer_can_do_it_still_can(name: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, 2 * WIDTH, bias=name != "no bias"), torch.randn(3, WIDTH, requires_grad=True)
    if name == "weight norm":
        weight_norm(layer)

    def results() -> tuple[Tensor, ...]:
        y = CALLS[name](layer, x)
        inputs = list(layer.parameters()) if name == "sparse" else [x, *layer.parameters()]
        return (y, *torch.autograd.grad(y.float().square().sum(), inputs, materialize_grads=True))

    expected = results()
    patches = layers_of(layer)
    assert "forward" in layer.__dict__
    tolerance = None if name == "slope" else 0.0
    for found, wanted in zip(results(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    patches.close()
    assert "forward" not in layer.__dict__


def test_a_computed_weight_is_not_put_off() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    weight_norm(layer)
    weights = WeightGradients([layer], ModelPatches())
    with weights.put_off(0):
        layer(torch.ones(2, WIDTH)).sum().backward()
    weights.make(0)
    assert all(param.grad is not None for param in layer.parameters())


def test_a_gradient_that_a_hook_sees_is_not_put_off() -> None:
    layer, seen = nn.Linear(WIDTH, WIDTH), list[Tensor | None]()
    layer.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    layer.bias.register_hook(seen.append)
    weights = WeightGradients([layer], ModelPatches())
    with weights.put_off(0):
        layer(torch.ones(2, WIDTH)).sum().backward()
    assert [None if one is None else one.unique().tolist() for one in seen] == [[2.0], [2.0]]


def test_without_gradients_the_layer_is_torchs_own() -> None:
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    layers_of(layer)
    with torch.no_grad(), mock.patch.object(nn.Linear, "forward", lambda self, x: "torch's own"):
        assert layer(x) == "torch's own"


def test_a_copy_of_a_layer_computes_with_its_own_weights_and_lets_go_of_its_maker() -> None:
    class Maker:
        def __call__(self, param: nn.Parameter, dy: Tensor, x: Tensor | None, is_transposed: bool) -> Tensor:
            return gradient_of(dy, x, is_transposed)

    layer, x, maker, patches = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH), Maker(), ModelPatches()
    alive = weakref.ref(maker)
    LinearLayers([layer], maker, patches)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(other(x), layer.bias.expand(2, WIDTH))
    other(x).sum().backward()
    assert other.weight.grad is not None and layer.weight.grad is None
    patches.close()
    del maker
    assert alive() is None and other(x).requires_grad
