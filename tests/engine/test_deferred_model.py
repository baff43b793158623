"""A model built on the meta device gets the bits that it gets when it is built at once, with little memory."""

import pickle
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.comm import World
from lowtide.engine.model.deferred import DeferredModel, build_in_files, plain_tensors
from lowtide.engine.model.given_model import module_and_values
from tests.engine.drawn_twice import DRAWS, DrawnTwice, FilledInPart, RowZeroed, UsedBeforeFilled
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.resident import own_bytes
from tests.kit.training import differences, refusal, settings, share_of


class CustomInit(nn.Module):
    """Initializations as they are written in the wild."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(9, 9) for _ in range(3)]
        self.layers = nn.ModuleList(layers)
        self.gain = nn.Parameter(torch.ones(9) * 0.5 + torch.rand(9))
        self.shift = nn.Parameter(torch.tensor([0.25] * 9))
        self.scale = nn.Parameter(torch.empty(9))
        for index, layer in enumerate(layers):
            nn.init.normal_(layer.weight, std=0.02 / (index + 1) ** 0.5)
            nn.init.zeros_(layer.bias)
        nn.init.xavier_uniform_(layers[0].weight, gain=2.0)
        nn.init.trunc_normal_(layers[1].weight, std=0.5, a=-0.6, b=0.6)
        with torch.no_grad():
            self.scale.copy_(torch.linspace(0, 1, 9) + layers[1].weight[[0, 3]].sum(0))
            layers[2].weight[0] = 0.0
            layers[2].weight.mul_(3).add_(torch.eye(9))
        self.apply(self.reset)

    def reset(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias.data.uniform_(-0.1, 0.1)
            module.weight.data *= 0.5

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.gain + self.shift * self.scale
        return x.square().mean()


class WithBuffers(nn.Module):
    """Buffers from Python data and from ranges, an embedding with a padding row, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 9, padding_idx=3)
        self.norm = nn.BatchNorm1d(9)
        self.linear = nn.Linear(9, 9)
        self.linear.weight.requires_grad_(False)
        self.register_buffer("positions", torch.arange(7).expand(2, -1))
        self.register_buffer("table", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.register_buffer("angles", 1.0 / 100 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("mask", torch.ones(5, 5).tril().bool(), persistent=False)


class Orthogonal(nn.Module):
    """Initializations that torch skips on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8), nn.Linear(5, 9), nn.Linear(9, 5), nn.Linear(6, 6)]
        self.layers = nn.ModuleList(layers)
        for layer in layers:
            nn.init.orthogonal_(layer.weight, gain=1.5)
        nn.init.sparse_(layers[3].weight, sparsity=0.5)
        self.conv = nn.Conv1d(4, 4, 3)
        nn.init.dirac_(self.conv.weight, groups=2)


class TiedAndShared(models.TinyGPT):
    """A tied head, one block in two places, and a parameter that is a part of nothing else."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.blocks.append(self.blocks[0])
        nn.init.normal_(self.embedding.weight, std=0.02)


def half() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).to(torch.bfloat16)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    build.__name__: build
    for build in (
        CustomInit,
        WithBuffers,
        TiedAndShared,
        half,
        Orthogonal,
        RowZeroed,
        FilledInPart,
        UsedBeforeFilled,
    )
}


def assert_same(module: nn.Module, values: Iterable[tuple[nn.Parameter, Tensor]], expected: nn.Module) -> None:
    """values: as they come, each before the next."""
    found = {id(param): value.clone() for param, value in values}
    ours = dict(module.named_parameters(remove_duplicate=False))
    theirs = dict(expected.named_parameters(remove_duplicate=False))
    assert list(ours) == list(theirs)
    for name, param in theirs.items():
        assert torch.equal(found[id(ours[name])], param) and found[id(ours[name])].dtype == param.dtype, name
        assert ours[name].requires_grad == param.requires_grad and type(ours[name]) is type(param), name
    assert len({id(param) for param in ours.values()}) == len({id(param) for param in theirs.values()})
    buffers = dict(module.named_buffers())
    assert list(buffers) == [name for name, _ in expected.named_buffers()]
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer) and buffers[name].dtype == buffer.dtype, name
    assert list(module.state_dict()) == list(expected.state_dict())


def assert_deferred_is_built(build: Callable[[], nn.Module]) -> tuple[int, list[int]]:
    """The values and the random numbers that follow are the same. The bytes at the peak, and of each parameter."""
    torch.manual_seed(7)
    expected = build()
    after = torch.rand(3)
    torch.manual_seed(7)
    deferred = DeferredModel(build)
    assert_same(deferred.module, deferred.values(), expected)
    assert torch.equal(torch.rand(3), after)
    return deferred.peak_bytes, [param.nbytes for param in expected.parameters()]


@pytest.mark.parametrize("name", BUILDERS)
def test_a_deferred_model_has_the_values_of_the_built_one(name: str) -> None:
    assert_deferred_is_built(BUILDERS[name])


@pytest.mark.parametrize("draw", DRAWS)
def test_what_a_second_pass_draws_again_is_forgotten_at_once(draw: str) -> None:
    peak, sizes = assert_deferred_is_built(partial(DrawnTwice, draw))
    alive = 2 if draw == "copy" else 1  # what is copied is alive too
    assert max(sizes) <= peak <= (alive + 0.1) * max(sizes) < sum(sizes) / 3


def test_a_model_that_is_built_with_memory_has_it_in_files() -> None:
    """Whatever is done to its tensors."""
    counts = []

    def build() -> nn.Module:
        before = own_bytes()
        layers = []
        for _ in range(10):
            layer = nn.Linear(1024, 1024)
            layer.weight.data *= 2
            layers.append(layer.to(torch.float64))
            counts.append(own_bytes() - before)
        return nn.Sequential(*layers)

    sizes = [param.nbytes for param in build_in_files(build).parameters()]
    assert max(counts) < 1.5 * max(sizes) and sum(sizes) > 9 * max(sizes)


class Habit(nn.Module):
    """A layer, and what some constructor does besides."""

    def __init__(self, does: Callable[[Any], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.read = does(self)
        self.last = nn.Parameter(torch.rand(2))


def legacy_constructors(model: Any) -> None:
    model.first = nn.Parameter(torch.Tensor(3, 4))
    nn.init.xavier_uniform_(model.first)


def seeds_of_its_own(model: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model.first = nn.Parameter(torch.rand(3))


def generators_of_its_own(model: Any) -> None:
    model.first = nn.Parameter(torch.rand(3, generator=torch.Generator().manual_seed(3)))


def other_default_dtype(model: Any) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model.first = nn.Parameter(torch.rand(3))
    finally:
        torch.set_default_dtype(torch.float32)


def moves(model: Any) -> None:
    model.layer.to("cpu", torch.float64)
    model.first = nn.Parameter(torch.rand(3).cpu().to(model.layer.weight))


def numpy_arrays(model: Any) -> list[float]:
    array = torch.arange(3.0).numpy() + 1
    model.first = nn.Parameter(torch.from_numpy(array))
    return list(map(float, array))


def shapes_that_hang_on_values(model: Any) -> None:
    model.register_buffer("places", (torch.tensor([0, 1, 1]) > 0).nonzero())


def loads_values(model: Any) -> None:
    values = {name: torch.ones_like(param, device="cpu") for name, param in model.layer.state_dict().items()}
    model.layer.load_state_dict(values)
    model.other = nn.Linear(3, 3)
    model.other.load_state_dict(values, assign=True)


def conjugates(model: Any) -> None:
    z = torch.complex(torch.rand(3), torch.rand(3))
    model.first = nn.Parameter(torch.view_as_real((z.conj() * 2).resolve_conj()))


def values_by_other_ways(model: Any) -> None:
    model.first = nn.Parameter(model.layer.weight.new_tensor([1.0, 2.0]))


def memory_beside_none(model: Any) -> None:
    model.first = nn.Parameter(torch.rand(3) + torch.from_numpy(np.ones(3, np.float32)))


def traced(model: Any) -> None:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        model.traced = torch.jit.trace(nn.Linear(3, 3), torch.rand(1, 3))


def pickles(model: Any) -> None:
    model.copied = pickle.loads(pickle.dumps(model.layer))


def falls_back(model: Any) -> None:
    """It tries what fails, and does something else then."""
    with torch.no_grad():
        for attempt in (lambda: model.layer.weight.copy_(torch.zeros(3, 2)), lambda: model.layer.bias.normal_(0, -1.0)):
            try:
                attempt()
            except RuntimeError:
                model.layer.weight.fill_(2.0)


def hides_what_it_reads(model: Any) -> float:
    try:
        return model.layer.weight.sum().item()
    except RuntimeError:
        return 0.0


def copies_what_changes_later(model: Any) -> None:
    table, array = torch.zeros(3, device="cpu"), np.zeros(3, np.float32)
    for number in range(3):
        table.fill_(number)
        array[:] = number
        model.layer.weight.data[number].copy_(table)
        model.layer.bias.data[number:].copy_(torch.from_numpy(array)[number:])


RECORDED = [other_default_dtype, moves, loads_values, traced, copies_what_changes_later]
BUILT_WITH_MEMORY: dict[Callable[[Any], object], str] = {
    legacy_constructors: "draws random numbers on a device that it names",
    seeds_of_its_own: "sets the state of torch's generator",
    generators_of_its_own: "or from a generator of its own",
    numpy_arrays: "calls numpy",
    shapes_that_hang_on_values: "calls nonzero",
    conjugates: "makes tensors that are sparse, conjugated or negated",
    values_by_other_ways: "calls new_tensor of a tensor whose values come later",
    memory_beside_none: "computes with tensors that have memory and tensors that have none",
    pickles: "pickles a tensor",
    falls_back: "calls copy_",
    hides_what_it_reads: "calls item",
}
"""What constructors do that the recorder does not know -> what it says of it."""


@pytest.mark.parametrize("does", [*RECORDED, *BUILT_WITH_MEMORY], ids=lambda does: does.__name__)
def test_habits_of_constructors_give_what_they_give_with_memory(
    does: Callable[[Any], object], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(7)
    expected = Habit(does)
    after = torch.rand(3)
    torch.manual_seed(7)
    world = World.join("cpu")
    try:
        with caplog.at_level("INFO", "lowtide"):
            module, values = module_and_values(partial(Habit, does), world)
        assert_same(module, values, expected)
    finally:
        world.leave()
    assert module.read == expected.read
    assert torch.equal(torch.rand(3), after)
    lines = [line for line in caplog.messages if line.startswith("model: built in memory-mapped files, by one rank of")]
    assert [BUILT_WITH_MEMORY.get(does, "-") in line for line in lines] == [True] * (does in BUILT_WITH_MEMORY)


def test_what_is_on_a_parameter_stays_on_it() -> None:
    def build() -> nn.Module:
        model = nn.Linear(3, 3)
        vars(model.weight)["_no_weight_decay"] = True
        model.weight.register_hook(torch.zeros_like)
        return model

    weight = DeferredModel(build).module.weight
    assert isinstance(weight, Tensor) and vars(weight) == {"_no_weight_decay": True}
    weight.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_parameters_that_have_their_values_keep_them(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with caplog.at_level("INFO", "lowtide"), lowtide.initialize(lambda: model, {"train_batch_size": 1}) as engine:
        found = engine.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "model: the builder made 4 parameters with memory (48 bytes)" in caplog.text


MADE_BEFORE = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            lambda: MADE_BEFORE,
            "the model builder made parameters or buffers that cannot be replayed, for example before it was "
            "called: 0.weight, 0.bias, 1.weight and 1 more; make them within the call, or pass initialize the "
            "constructed module",
        ),
        (lambda: 3, "model: expected a callable that returns an nn.Module, found int"),
        (3, "model: expected an nn.Module or a callable that builds one, found int"),
        (
            nn.Linear,
            "found the class Linear with required arguments in_features, out_features; pass an instance, Linear(...), ",
        ),
    ],
    ids=["made before", "a callable of no module", "no module", "a class that needs arguments"],
)
def test_what_builds_no_model_is_refused(model: Any, text: str) -> None:
    assert text in refusal(lowtide.initialize, model, settings())


def test_an_engine_is_no_model() -> None:
    with lowtide.initialize(models.mlp, settings()) as engine:
        text = refusal(lowtide.initialize, engine, settings())
    assert "found an engine; close it and pass its model, engine" in text


class ScaledByItsValues(TiedAndShared):
    """It cannot be recorded, and draws on each rank something else beside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), self.embedding.weight.abs().max().item()))
        self.own = nn.Parameter(torch.tensor(np.random.default_rng().random(3), dtype=torch.float32))


def losses_and_values(
    stage: int, is_deferred: bool, build: Callable[[], nn.Module]
) -> tuple[list[float], dict[str, Tensor]]:
    """With the values of all parameters on each rank."""
    torch.manual_seed(0)
    with lowtide.initialize(build if is_deferred else build(), settings(stage)) as engine:
        losses = [engine.train_step(share_of(models.token_batch(step, 4))).loss.item() for step in range(2)]
        return losses, {name: engine.full(name) for name, _ in engine.named_parameters()}


@pytest.mark.parametrize(("stage", "build"), [(3, TiedAndShared), (0, ScaledByItsValues)])
@on_ranks(2)
def test_a_callable_trains_as_the_module_does(stage: int, build: Callable[[], nn.Module]) -> None:
    """A callable that cannot be recorded has the values of rank 0 on all ranks."""
    (losses, deferred), (expected, plain) = (losses_and_values(stage, way, build) for way in (True, False))
    own = deferred.pop("own", torch.ones(1)).tolist()
    plain.pop("own", None)  # which a module has drawn once more
    assert losses == expected and list(deferred) == list(plain) and differences(deferred, plain) == []
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, own)
    assert everywhere == [own, own]


def built_in_turn() -> tuple[float, float, int]:
    """When it was built on this rank, and the bytes of its parameters."""
    times: list[tuple[float, float]] = []

    def build() -> nn.Module:
        begun = time.monotonic()
        model = ScaledByItsValues()
        time.sleep(0.05)
        times.append((begun, time.monotonic()))
        return model

    world = World.join("cpu")
    try:
        module, _ = module_and_values(build, world)
        return *times[-1], sum(
            param.untyped_storage().nbytes() for param in module.get_submodule("blocks").parameters()
        )
    finally:
        world.leave()


def test_a_host_has_one_model_at_a_time_that_cannot_be_recorded(ranks: RankPool) -> None:
    (begun, _, nbytes), (_, ended_on_1, nbytes_on_1) = ranks(2, built_in_turn)
    assert ended_on_1 < begun
    assert nbytes_on_1 < nbytes / 10


def fails_on_rank_1(kind: Any) -> str:
    def build() -> nn.Module:
        model = kind()
        if dist.get_rank() == 1:
            raise ValueError("no file")
        return model

    return refusal(lowtide.initialize, build, settings(1), kind=RuntimeError if dist.get_rank() == 0 else ValueError)


@pytest.mark.parametrize("kind", [models.TinyGPT, ScaledByItsValues])
def test_a_callable_that_fails_on_a_rank_fails_on_all(ranks: RankPool, kind: Any) -> None:
    """The second cannot be recorded, and is built by one rank after the other."""
    assert ranks(2, fails_on_rank_1, kind) == [
        "lowtide.initialize: the model's callable failed on rank 1: no file",
        "no file",
    ]


class Pair(NamedTuple):
    """What some models keep rotations in."""

    cos: Tensor
    sin: Tensor


class Beside(nn.Module):
    """Tensors that are no parameters and no buffers, in all places in which models of others have them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("angles", torch.rand(3))
        self.original_angles = self.angles
        self.table = torch.tensor([1.0, 2.0])
        self.more: dict[str, Any] = {"tokens": torch.arange(3), "masks": [torch.ones(2, 2).tril(), None]}
        self.more["self"] = self.more
        self.pair = Pair(torch.rand(2), self.table)
        self.hidden = [nn.Linear(2, 2).requires_grad_(False), self.linear]
        self.own = (self.linear.weight, nn.Parameter(torch.rand(2)))
        self.leaf = torch.zeros(2, requires_grad=True)
        self.shape_alone = WITHOUT_MEMORY
        normal = torch.distributions.Normal(torch.zeros(2), 1.0, validate_args=False)
        self.prior = torch.distributions.Independent(normal, 1, validate_args=False)
        self.queue = deque([torch.rand(2)])


WITHOUT_MEMORY = torch.empty(3, device="meta")


def test_tensors_beside_parameters_and_buffers_have_the_values_of_the_built_ones() -> None:
    torch.manual_seed(7)
    expected = Beside()
    torch.manual_seed(7)
    deferred = DeferredModel(Beside)
    assert_same(deferred.module, deferred.values(), expected)
    model: Any = deferred.module
    theirs = list(plain_tensors(expected))
    assert len(theirs) == 15
    for (name, ours, _), (expected_name, value, _) in zip(plain_tensors(model), theirs, strict=True):
        assert (name, type(ours), ours.requires_grad) == (expected_name, type(value), value.requires_grad)
        assert ours.is_meta or name == "own[0]" or torch.equal(ours, value), name
    assert model.original_angles is model.angles and model.pair.sin is model.table
    assert model.own[0] is model.linear.weight and model.shape_alone is WITHOUT_MEMORY
