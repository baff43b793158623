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
from tests.kit.training import ADAMW, Case, Outcome, train, train_all

WIDTH, BLOCKS = 24, 2
SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulation": 2},
    {"config": {"zero_optimization": {"update_in_backward": True}}},
    {"config": {"bf16": {"enabled": True}, "communication_data_type": "bf16"}, "accumulation": 2},
    {"config": {"activation_checkpointing": {"every": 1}}},
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
        for block in self.blocks:
            block.get_parameter("hooked.weight").register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def batch(step: int, rows: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(rows, 5, WIDTH, generator=generator),)


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


def test_the_bits_are_those_of_copied_gradients(ranks: RankPool) -> None:
    """Every setting has both transports, at stages that shard parameters or not, in turn."""
    cases = []
    for number, settings in enumerate(SETTINGS):
        clip = 0.0 if "zero_optimization" in settings.get("config", {}) else 0.1
        for stage, transport in zip(((0, 3), (2, 1))[number % 2], ("shared_memory", "sockets"), strict=True):
            case = Case(Net, batch, clip=clip, steps=2, config={"communication": {"transport": transport}})
            cases.append(case.at(stage, **settings))
    assert_the_same(ranks, 2, cases)


def assert_the_same(ranks: RankPool, world_size: int, cases: list[Case]) -> None:
    """cases: each two of one setting, of which one may have no places."""
    for with_places, without, placed in ranks(world_size, train_both_ways, cases):
        assert all(map(max, placed[::2], placed[1::2]))
        assert [one.differences(other) for one, other in zip(with_places, without, strict=True)] == [[]] * len(cases)


@pytest.mark.parametrize("world_size", [1, 3])
def test_with_other_numbers_of_ranks(ranks: RankPool, world_size: int) -> None:
    assert_the_same(ranks, world_size, [Case(Net, batch, clip=0.1, steps=2).at(stage) for stage in (0, 3)])


KINDS = ["keeps", "adds", "after", "grad in backward"]
STAGES = [0, 2]


def norms_with_hooks(is_on: bool) -> list[tuple[list[float], list[float], int]]:
    return [norms_with_hook(is_on, kind, stage) for kind in KINDS for stage in STAGES]


def norms_with_hook(is_on: bool, kind: str, stage: int) -> tuple[list[float], list[float], int]:
    """The norms of steps, those of the gradients that a hook has kept, and the places that there were for that weight.

    kind: "adds" gives back the gradient and a part of the one of the step before; the others only keep it.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(2)))
    kept: list[Tensor] = []

    def keep(gradient: Tensor) -> Tensor | None:
        kept.append(gradient)
        return gradient + 0.9 * kept[-2] if kind == "adds" and len(kept) > 1 else None

    weight = model.get_parameter("1.0.weight")
    if kind == "after":
        weight.register_post_accumulate_grad_hook(lambda param: kept.append(param.grad))
    elif kind != "grad in backward":
        weight.register_hook(keep)
    else:

        def ask(module: Any, before: Any, after: Any) -> None:
            with torch.enable_grad():
                x = torch.ones(1, WIDTH)
                kept.extend(torch.autograd.grad(module[0](x).sum(), weight))

        model[1].register_full_backward_hook(ask)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "steps_per_print": 0}
    with direct(is_on) as found:
        engine = lowtide.initialize(
            model,
            {**config, "zero_optimization": {"stage": stage, "units": ["?"]}},
            loss_fn=lambda output, batch: output.square().mean(),
        )
        norms = [engine.train_step(*batch(step, 2)).grad_norm.item() for step in range(4)]
        engine.close()
    return norms, [gradient.norm().item() for gradient in kept], sum(found)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_a_user_keeps_stay_what_they_are(ranks: RankPool, world_size: int) -> None:
    with_places, without = (ranks(world_size, norms_with_hooks, is_on) for is_on in (True, False))
    for ours, theirs in zip(with_places, without, strict=True):
        assert [found[:2] for found in ours] == [found[:2] for found in theirs]
    # For the other weight; with two ranks the slot may still be the one of this weight.
    assert world_size > 1 or min(found[2] for found in with_places[0]) > 0


def test_where_gradients_are_cast_they_are_copied(ranks: RankPool) -> None:
    case = Case(Net, batch, config={"bf16": {"enabled": True}})  # reduced in fp32
    for with_places, without, placed in ranks(2, train_both_ways, [case]):
        assert placed == [0]
        assert with_places[0].differences(without[0]) == []


def places_in_steps() -> list[tuple[int, int]]:
    return [places_in_a_step(stage) for stage in range(4)]


def places_in_a_step(stage: int) -> tuple[int, int]:
    """(gradients with a place, all) of the weights of all blocks, each of one large layer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "steps_per_print": 0}
    with direct(True) as found:
        zero = {"stage": stage, "units": ["?"]}
        engine = lowtide.initialize(
            model, {**config, "zero_optimization": zero}, loss_fn=lambda output, batch: output.square().mean()
        )
        engine.train_step(*batch(0, 2))
        engine.close()
    return sum(found), len(found)


def test_one_rank_has_a_place_for_every_gradient(ranks: RankPool) -> None:
    assert ranks(1, places_in_steps) == [[(BLOCKS, BLOCKS)] * 4]


def engine_of(model: nn.Module) -> Any:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "steps_per_print": 0}
    return lowtide.initialize(model, config)


def test_a_closed_engine_leaves_the_layers_as_they_were() -> None:
    with direct(True):
        engine = engine_of(Net())
        assert "forward" in engine.module.blocks[0].wide.__dict__
        engine.close()
    assert not any("forward" in module.__dict__ for module in engine.module.modules())


def test_layers_that_have_a_forward_of_their_own_keep_it() -> None:
    model = Net()
    model.first.forward = lambda x: 2 * x  # type: ignore[method-assign, assignment]  # as users replace it
    with direct(True):
        engine = engine_of(model)
        engine.train_step(*batch(0, 2))
        engine.close()
    assert torch.equal(model.first(torch.ones(1)), 2 * torch.ones(1))


def test_a_forward_that_came_later_stays() -> None:
    with direct(True):
        engine = engine_of(Net())
        engine.module.first.forward = own = lambda x: 2 * x
        engine.close()
    assert engine.module.first.forward is own


def test_small_layers_are_left_alone() -> None:
    engine = engine_of(Net())
    assert not any("forward" in module.__dict__ for module in engine.module.modules())
    engine.close()


def layers_of(model: nn.Module) -> ModelPatches:
    patches = ModelPatches()
    LinearLayers(model.modules(), lambda param, dy, x, is_transposed: gradient_of(dy, x, is_transposed), patches)
    return patches


def test_a_copy_of_a_layer_computes_with_its_own_weights() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    layers_of(layer)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
    x = torch.randn(2, WIDTH)
    assert torch.equal(other(x), layer.bias.expand(2, WIDTH))
    other(x).sum().backward()
    assert other.weight.grad is not None and layer.weight.grad is None


def test_a_copy_lets_go_of_its_maker() -> None:
    class Maker:
        def __call__(self, param: nn.Parameter, dy: Tensor, x: Tensor | None, is_transposed: bool) -> Tensor:
            return gradient_of(dy, x, is_transposed)

    layer, maker = nn.Linear(WIDTH, WIDTH), Maker()
    patches, alive = ModelPatches(), weakref.ref(maker)
    LinearLayers([layer], maker, patches)
    other = copy.deepcopy(layer)
    patches.close()
    del maker
    assert alive() is None
    assert other(torch.ones(1, WIDTH)).requires_grad


def weight_norm(layer: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old one, which leaves a tensor in the weight's place
        nn.utils.weight_norm(layer)


UNUSUAL: dict[str, tuple[Callable[[nn.Module], None], Callable[[nn.Module, Tensor], Tensor]]] = {
    "keyword": (lambda layer: None, lambda layer, x: layer(input=x)),
    "sparse": (lambda layer: None, lambda layer, x: layer(x.to_sparse())),
    "vmap": (lambda layer: None, lambda layer, x: torch.func.vmap(layer)(x)),
    "weight norm": (weight_norm, lambda layer, x: layer(x)),
    "one row": (lambda layer: None, lambda layer, x: layer(x[0])),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_a_linear_layer_can_do_it_still_can(name: str) -> None:
    prepare, call = UNUSUAL[name]
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(3, WIDTH)
    prepare(layer)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(layer, x).square().sum(), list(layer.parameters()))

    expected = gradients()
    layers_of(layer)
    assert "forward" in layer.__dict__
    assert all(torch.equal(one, other) for one, other in zip(gradients(), expected, strict=True))


def test_a_computed_weight_is_not_put_off() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    weight_norm(layer)
    weights = WeightGradients([layer], ModelPatches())
    with weights.put_off(0):
        layer(torch.ones(2, WIDTH)).sum().backward()
    weights.make(0)
    assert all(param.grad is not None for param in layer.parameters())


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_autograd(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, 2 * WIDTH, bias=has_bias, dtype=dtype)
    x = torch.randn(2, 5, WIDTH, dtype=dtype, requires_grad=True)
    dy = torch.randn(2, 5, 2 * WIDTH, dtype=dtype)
    inputs = [x, *layer.parameters()]
    expected_y = layer(x)
    expected = torch.autograd.grad(expected_y, inputs, dy)
    patches = layers_of(layer)
    found_y = layer(x)
    found = torch.autograd.grad(found_y, inputs, dy)
    assert "forward" in layer.__dict__ and torch.equal(found_y, expected_y)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    patches.close()
    assert "forward" not in layer.__dict__


def test_under_autocast_the_products_are_those_of_torch() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(3, WIDTH, requires_grad=True)

    def gradients() -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        return [y, *torch.autograd.grad(y.float().sum(), [x, layer.weight, layer.bias])]

    expected = gradients()
    layers_of(layer)
    assert all(torch.equal(one, other) for one, other in zip(gradients(), expected, strict=True))


def test_a_backward_may_be_differentiated() -> None:
    """As in a gradient penalty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(3, WIDTH, requires_grad=True)

    def gradients() -> tuple[Tensor, ...]:
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), list(model.parameters()), materialize_grads=True)

    expected = gradients()
    layers_of(model)
    for found, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_without_gradients_the_layer_is_torchs_own() -> None:
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    layers_of(layer)
    with torch.no_grad(), mock.patch.object(nn.Linear, "forward", lambda self, x: "torch's own"):
        assert layer(x) == "torch's own"
