"""torch.compile of a model or of its blocks, before and after `initialize`: as without it, a graph for each kind."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lowtide
from tests.kit import models
from tests.kit.compiling import with_a_new_compiler
from tests.kit.grids import pairs
from tests.kit.ranks import RankPool
from tests.kit.training import Case, refusal, take_step

LAYERS = 3
KINDS = ["block", "embedding", "norm", "head"]


class Counting:
    """A backend that runs graphs as they are: how many it was given, and how often they have run."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


class Step(nn.Module):
    """Quickly traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class StepsOfTokens(nn.Module):
    """A kind of module beside the blocks in each place."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 9)
        self.blocks = nn.ModuleList(Step() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(9), nn.Linear(9, 11, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids % 11)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten() % 11)


def steps_of_tokens() -> nn.Module:
    return StepsOfTokens().double()


def steps_of_nine(count: int = LAYERS) -> Any:
    return models.Chain(*(Step() for _ in range(count))).double()


def vectors(step: int, rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 9, generator=torch.Generator().manual_seed(step), dtype=torch.float64),)


CASE = Case(steps_of_tokens, models.token_batch, steps=2)
SMALL = Case(steps_of_nine, vectors, steps=2)
HOW = ["model wrapped", "blocks in place", "model after", "blocks after"]  # and as in `test_models_of_every_shape`


def compiled(how: str, model: Any, options: dict[str, Any]) -> Any:
    """In the ways in which users write it."""
    if how == "model wrapped":
        return torch.compile(model, **options)
    if how.startswith("model"):
        model.compile(**options)
    for index, block in enumerate(model.blocks if how.startswith("blocks") else ()):
        if "wrapped" in how:
            model.blocks[index] = torch.compile(block, **options)
        else:
            block.compile(**options)
    return model


def train_compiled(case: Case, how: str) -> tuple[list[float], list[Any], Any]:
    """Losses; after each step, graphs and runs; names and values of the final state."""
    with_a_new_compiler()
    backend = Counting()
    options = {"backend": backend, "fullgraph": True}
    torch.manual_seed(0)
    model = case.build() if "after" in how else compiled(how, case.build(), options)
    losses, counts = [], []
    with lowtide.initialize(model, case.as_config()) as engine:
        if "after" in how:
            compiled(how, engine.module, options)
        for step in range(case.steps):
            losses.append(take_step(engine, case, step).loss.item())
            counts.append((backend.graphs, backend.runs))
        return losses, counts, engine.state_dict()


def train_in_each_way(case: Case, hows: list[str]) -> list[Any]:
    return [train_compiled(case, how) for how in ("not at all", *hows)]


def test_compiled_training_is_the_same(ranks: RankPool) -> None:
    """fullgraph=True has raised where a graph breaks."""
    config = {"communication": {"transport": "sockets"}, "activation_checkpointing": {"every": 2}}
    plain, *found = ranks(2, train_in_each_way, CASE.at(3, config=config), HOW)[0]
    for how, (losses, counts, state) in zip(HOW, found, strict=True):
        assert losses == plain[0], how
        assert list(state) == list(plain[2]) and all(torch.equal(state[name], plain[2][name]) for name in state)
        kinds, calls = (len(KINDS), LAYERS + 3) if "model" in how else (1, LAYERS)  # two blocks are recomputed
        assert counts == [(kinds, (calls + 2) * step) for step in range(1, CASE.steps + 1)], how


class Picture(nn.Module):
    """Without repeated blocks; its own parameter is read by its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(torch.relu(self.norm(self.conv(x))).mean((2, 3))) * self.scale).square().mean()


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = steps_of_nine()

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.model(x)


def pictures(step: int, rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 3, 5, 5, generator=torch.Generator().manual_seed(step)),)


EAGER = {"backend": "eager", "fullgraph": True}


def compiled_picture() -> Any:
    return compiled("model wrapped", Picture(), EAGER)


def wrapping_a_compiled_model() -> Any:
    model = Wrapping()
    compiled("model in place", model.model, EAGER)
    return model


def compiled_blocks() -> Any:
    return compiled("blocks wrapped", steps_of_nine(), EAGER)


@pytest.mark.parametrize(
    ("shape", "is_built_by_engine", "stage"),
    pairs(
        [
            (compiled_picture, Picture, pictures, 1),
            (wrapping_a_compiled_model, Wrapping, vectors, 2),
            (compiled_blocks, steps_of_nine, vectors, 2),
        ],
        [False, True],
        [0, 3],
    ),
)
def test_models_of_every_shape(shape: tuple[Any, Any, Any, int], is_built_by_engine: bool, stage: int) -> None:
    build, plain, batch, graphs = shape
    with_a_new_compiler()
    found = []
    for make in (plain, build):
        torch.manual_seed(0)
        case = Case(make, batch, stage)
        with lowtide.initialize(make if is_built_by_engine else make(), case.as_config()) as engine:
            losses = [engine.train_step(case.global_batch(step, 1)).loss.item() for step in range(2)]
            found.append((losses, list(engine.state_dict())))
    assert found[0] == found[1]
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


def test_after_close_the_model_is_compiled_as_it_was() -> None:
    with_a_new_compiler()
    model, backend = compiled_blocks(), Counting()
    model.compile(backend=backend)
    names, wrapped, call = list(model.state_dict()), model.blocks[0], model._compiled_call_impl
    with lowtide.initialize(model, SMALL.as_config()) as engine:
        assert model.blocks[0] is not wrapped and "blocks.0.linear.weight" in engine.state_dict()
        engine.train_step(vectors(0, 2))
        assert not backend.runs  # the blocks have options of their own, and the rest is none
    assert list(model.state_dict()) == names and model.blocks[0] is wrapped and model._compiled_call_impl is call
    assert "compile" not in model.__dict__ and "forward" not in model.blocks[0]._orig_mod.__dict__
    model(*vectors(0, 2)).backward()
    assert backend.runs


def test_the_caller_s_own_wrapper_goes_to_the_engine() -> None:
    with_a_new_compiler()
    backend = Counting()
    model: Any = torch.compile(steps_of_nine(), backend=backend)
    with lowtide.initialize(model, SMALL.at(3).as_config()) as engine:
        engine.backward(model(*vectors(0, 2)))
        engine.step()
        assert backend.runs == LAYERS and engine.global_step == 1


def wrap_engine_s_module(engine: Any) -> None:
    torch.compile(engine.module, backend="eager")(*vectors(0, 2))


def wrap_engine(engine: Any) -> None:
    torch.compile(engine, backend="eager")(*vectors(0, 2))


def wrap_a_block(engine: Any) -> None:
    engine.module.blocks[1] = torch.compile(engine.module.blocks[1], backend="eager")
    engine.train_step(vectors(0, 2))


def assign_module(engine: Any) -> None:
    engine.module = torch.compile(engine.module, backend="eager")


WRAPPED = "that an engine trains: expected its compile(...), found a wrapper"


@pytest.mark.parametrize(
    ("mistake", "stage", "kind", "text"),
    [
        (wrap_engine_s_module, 0, RuntimeError, f"torch.compile of a Chain {WRAPPED}"),
        (wrap_engine, 3, RuntimeError, "torch.compile of an engine: expected its compile(...), found a wrapper"),
        (wrap_a_block, 3, RuntimeError, f"torch.compile of a Step {WRAPPED}"),
        (assign_module, 0, AttributeError, "engine.module: expected the model of lowtide.initialize, found"),
    ],
)
def test_what_would_trace_hooks_is_refused(
    mistake: Callable[[Any], None], stage: int, kind: type[Exception], text: str
) -> None:
    with_a_new_compiler()
    engine = lowtide.initialize(steps_of_nine(), SMALL.at(stage).as_config())
    assert refusal(mistake, engine, kind=kind).startswith(text)
    if mistake is wrap_engine:
        engine.train_step(vectors(0, 2))


def four_steps_of_tokens() -> nn.Module:
    return StepsOfTokens(4).double()


IN_STAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (2, {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "1f1b"}}),
    "layer by layer": (1, {"zero_optimization": {"layered_gradient_accumulation": True}}),
}


@pytest.mark.parametrize("name", IN_STAGES)
def test_blocks_of_stages_are_compiled_and_nothing_else(ranks: RankPool, name: str) -> None:
    """The code around them runs on absent tensors. A mode of torch around the blocks would be a second graph."""
    size, config = IN_STAGES[name]
    config = config | {"activation_checkpointing": {"every": 1}}
    case = CASE.at(1, build=four_steps_of_tokens, config=config, accumulation=4)
    hows = ["model wrapped", "blocks after"]
    for plain, *found in ranks(size, train_in_each_way, case, hows):
        for losses, counts, state in found:
            assert losses == plain[0] and list(state) == list(plain[2])
            # Four microbatches, two steps, and each block runs again in its backward.
            assert counts[1] == (1, 4 // size * 4 * 2 * 2)
