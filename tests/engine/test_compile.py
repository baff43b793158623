"""torch.compile of a model or of its blocks, before and after `initialize`: as without it, a graph for each kind."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests import models
from tests.ranks import RankPool
from tests.zero.training import Case, share_of

LAYERS = 3
CASE = Case(models.tiny_gpt_float64, models.token_batch, steps=4)
KINDS = ["block", "embedding", "norm", "head"]
CHECKPOINTED = {"activation_checkpointing": {"every": 2}}


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


def blocks_of(model: Any) -> Any:
    return model.blocks


def compile_before(how: str, model: Any, options: dict[str, Any]) -> Any:
    """In the ways in which users write it."""
    if how == "model wrapped":
        return torch.compile(model, **options)
    if how == "model in place":
        model.compile(**options)
    if how == "blocks wrapped":
        for index, block in enumerate(blocks_of(model)):
            model.blocks[index] = torch.compile(block, **options)
    if how == "blocks in place":
        for block in blocks_of(model):
            block.compile(**options)
    return model


def compile_after(how: str, model: Any, options: dict[str, Any]) -> None:
    if how == "model after":
        model.compile(**options)
    if how == "blocks after":
        for block in blocks_of(model):
            block.compile(**options)


HOW = ["model wrapped", "model in place", "blocks wrapped", "blocks in place", "model after", "blocks after"]


def train_compiled(case: Case, how: str, options: dict[str, Any] | None = None) -> tuple[list[float], list[Any], Any]:
    """Losses; after each step, graphs and runs; names and values of the final state."""
    torch._dynamo.reset()
    warnings.simplefilter("ignore")  # of torch's compiler, about itself
    backend = Counting()
    options = {"backend": backend, "fullgraph": True, **(options or {})}
    torch.manual_seed(0)
    engine = lowtide.initialize(compile_before(how, case.build(), options), case.as_config())
    compile_after(how, engine.module, options)
    losses, counts = [], []
    for step in range(case.steps):
        losses.append(engine.train_step(share_of(case.global_batch(step, engine.world_size))).loss.item())
        counts.append((backend.graphs, backend.runs))
    state = engine.state_dict()
    engine.close()
    return losses, counts, state


def train_in_each_way(cases: list[Case], hows: list[str]) -> list[Any]:
    return [[train_compiled(case, how) for how in ("not at all", *hows)] for case in cases]


def check(case: Case, found: Any, how: str, plain: Any) -> None:
    """fullgraph=True has raised where a graph breaks."""
    losses, counts, state = found
    assert losses == plain[0], how
    assert list(state) == list(plain[2]) and all(torch.equal(state[name], plain[2][name]) for name in state)
    kinds, calls = (len(KINDS), LAYERS + 3) if "model" in how else (1, LAYERS)
    recomputed = 2 if "activation_checkpointing" in case.config else 0
    assert [graphs for graphs, _ in counts] == [kinds] * case.steps, f"{how}: {counts}"
    assert [runs for _, runs in counts] == [(calls + recomputed) * (n + 1) for n in range(case.steps)], how


@pytest.mark.parametrize(("stage", "route"), [(0, "shared_memory"), (3, "sockets")])
def test_compiled_training_is_the_same(ranks: RankPool, stage: int, route: str) -> None:
    case = CASE.at(stage, config={"communication": {"route": route}, **CHECKPOINTED})
    ((plain, *found),) = ranks(2, train_in_each_way, [case], HOW)[0]
    for how, one in zip(HOW, found, strict=True):
        check(case, one, how, plain)


class Step(nn.Module):
    """Quickly traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def steps_of_nine() -> nn.Module:
    return models.Chain(*(Step() for _ in range(LAYERS))).double()


def vectors(step: int, rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 9, generator=torch.Generator().manual_seed(step), dtype=torch.float64),)


SMALL = Case(steps_of_nine, vectors)
OTHERS: list[dict[str, Any]] = [
    {"communication": {"route": "sockets"}, "gradient_accumulation_steps": 1},
    {"zero_optimization": {"update_in_backward": True}},
    {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    {"activation_checkpointing": {"every": 2, "offload": {"device": "cpu", "min_bytes": 1}}},
    {"communication": {"route": "native"}},
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_goes_with_whatever_else_the_config_says(ranks: RankPool, stage: int) -> None:
    cases = [SMALL.at(stage, config=config) for config in OTHERS]
    if stage == 3:
        cases.append(SMALL.at(3, config={"zero_optimization": {"offload_param": {"device": "cpu"}}}))
    results = ranks(2, train_in_each_way, cases, ["model wrapped", "blocks after"])[0]
    for case, (plain, *found) in zip(cases, results, strict=True):
        for one in found:
            assert one[0] == plain[0] and list(one[2]) == list(plain[2]), case
            assert [graphs for graphs, _ in one[1]] == [2] * case.steps, case  # the first block's input has no gradient
