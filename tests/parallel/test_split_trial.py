"""Split layers are compared with the whole ones before the first step. Checkpoints and exports know no split."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import ADAMW
from tests.parallel import models_of_others as others
from tests.parallel.test_expert_lists import rows_of, skipping
from tests.parallel.test_expert_routing import Experts
from tests.parallel.test_sequence import Attends, Plain, batch_of
from tests.parallel.trainings import EXPERT, TENSOR, split_config

WIDTH = 32


class GateUp(nn.Module):
    """Both in one layer. between: what is between columns and rows; without it the gate opens the rest."""

    def __init__(self, between: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.both, self.back = nn.Linear(WIDTH, 48, bias=False), nn.Linear(48 if between else 24, WIDTH)
        self.drop, self.between = nn.Dropout(0.1), between() if between else None

    def forward(self, x: Tensor) -> Tensor:
        if self.between is not None:
            return self.back(self.between(self.both(x)))
        gate, up = self.both(x).chunk(2, dim=-1)
        y: Tensor = self.drop(self.back(functional.silu(gate) * up))
        return y


class Layer(nn.Module):
    def __init__(self, mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention, self.mlp = Attends(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.mlp(x)


class BesideExperts(GateUp):
    """Split layers, a router and experts in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.router = nn.Dropout(0.0), nn.Linear(WIDTH, 4)
        self.experts: Any = Experts(WIDTH)

    def routed(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        made: Tensor = self.experts(x, index, weights)
        return made

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.routed(x.flatten(0, 1)).view(x.shape)


class BesideListed(BesideExperts):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def routed(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(index == number)
            made = made.index_add(0, token, expert(x[token]) * weights[token, choice, None])
        return made


HALVES = (
    "parallel.tensor: expected the same outputs of 'blocks.0.mlp' as without a split, found outputs off by .*% of "
    "their norm. The split of its layers does not match their use. "
    "'blocks.0.mlp.both' has 48 outputs, 'blocks.0.mlp.back' behind it 24 inputs: if it fuses 2 layers, "
    'give it the style "column/2"'
)
# The MLP, its style, those of attention, and the error.
CASES: list[tuple[Callable[[], nn.Module], str, dict[str, str], str]] = [
    (GateUp, "column", {}, HALVES),
    # What is between columns and rows needs all columns, or has a parameter for each.
    (
        partial(GateUp, partial(nn.Softmax, -1)),
        "column",
        {},
        'Change their styles in tensor_parallel.plan, or set "whole"',
    ),
    (
        partial(GateUp, partial(nn.LayerNorm, 48)),
        "column",
        {},
        r"expected 'blocks.0.mlp' to run with its layers split, found RuntimeError: .*\[48\].* Change their",
    ),
    (GateUp, "column/2", {"qkv": "column", "out": "row"}, 'give it the style "column/3"'),
    (GateUp, "column/2", {"qkv": "column/3", "out": "row"}, r"^\[.*\]$"),
]


@on_ranks(2)
def test_operations_in_bfloat16_may_differ_by_their_rounding() -> None:
    found = set()
    torch.manual_seed(0)
    model = Plain()
    model.blocks = nn.ModuleList(Layer(partial(GateUp, nn.Tanh)) for _ in range(2))
    plan = {"mlp.both": "column", "mlp.back": "row", "qkv": "column/3", "out": "row"}
    config = split_config({"tensor": 2}, tensor_parallel={"plan": plan}, torch_autocast={"enabled": True})
    back = model.get_submodule("blocks.1.mlp.back")  # it has a bias
    back.register_forward_hook(lambda *given: found.add(given[-1].dtype))
    with lowtide.initialize(model, config) as engine:
        assert engine.train_step({key: value[:2] for key, value in batch_of(0, "plain").items()}).loss > 0
    assert found == {torch.bfloat16}


def tried(case: int, parallel: dict[str, int], stage: int = 3) -> str:
    """The error of two steps, or their losses."""
    mlp, style, more, _ = CASES[case]
    return losses(mlp, parallel, stage, {"mlp.both": style, "mlp.back": "row", **more})


def losses(mlp: Callable[[], nn.Module], parallel: dict[str, int], stage: int, plan: dict[str, str]) -> str:
    torch.manual_seed(0)
    model = Plain()
    model.blocks = nn.ModuleList(Layer(mlp) for _ in range(2))
    sections = {"tensor_parallel": {"plan": plan}} if parallel else {}
    accumulation = 2 if "pipeline" in parallel else 1
    config = split_config(
        parallel, **sections, zero_optimization={"stage": stage}, gradient_accumulation_steps=accumulation
    )
    batch = {key: value[: 2 * accumulation] for key, value in batch_of(0, "plain").items()}
    with lowtide.initialize(model.double(), config) as engine:
        try:
            return str([round(engine.train_step(batch).loss.item(), 9) for _ in range(2)])
        except ValueError as error:
            return str(error)


@on_ranks(2)
def test_a_plan_that_does_not_fit_is_an_error_before_the_first_step() -> None:
    for case, (*_, text) in enumerate(CASES):
        assert re.search(text, tried(case, {"tensor": 2}))


@pytest.mark.parametrize("parallel", [{"tensor": 2, "pipeline": 2}, {"tensor": 2, "sequence": 2}])
@on_ranks(4)
def test_ranks_beside_it_hear_of_it(parallel: dict[str, int]) -> None:
    assert 'give it the style "column/2"' in tried(0, parallel, 1)


def all_beside_experts(parallel: dict[str, int]) -> list[str]:
    return [
        losses(build, parallel, 0, {"mlp.both": style, "mlp.back": "row"})
        for build, style in ((BesideExperts, "column/2"), (BesideListed, "column/2"), (BesideExperts, "column"))
    ]


def test_split_layers_beside_experts_in_one_module(ranks: RankPool) -> None:
    """Every rank has the same batch, so the losses are those of one."""
    (plain,) = ranks(1, all_beside_experts, {})
    for *found, wrong in ranks(4, all_beside_experts, {"tensor": 2, "expert": 2}):
        assert found == plain[:2]
        assert "expected the same outputs of 'blocks.0.mlp' as without a split" in wrong


BOTH = {"parallel": {"tensor": 2, "expert": 2}}
Place = tuple[int, int, dict[str, Any]]  # ranks, stage and config
Trip = tuple[Callable[[], nn.Module], str, list[Place]]  # a parameter; what saves, then what loads
LISTED, STACKED = "layers.1.moe.experts.3.up.weight", "model.layers.1.mlp.experts.down_proj"
TRIPS: dict[str, Trip] = {
    "gpt2": (others.gpt2, "transformer.h.0.attn.c_attn.weight", [(4, 3, TENSOR), (1, 1, {})]),
    "grouped_llama": (
        others.grouped_llama,
        "model.layers.1.self_attn.k_proj.weight",
        [(2, 0, TENSOR), (4, 3, {"parallel": {"tensor": 4}})],
    ),
    "both": (others.mixtral, STACKED, [(4, 3, BOTH), (1, 1, {})]),
    "whole": (others.mixtral, STACKED, [(1, 0, {}), (4, 3, BOTH)]),
    "lists": (skipping, LISTED, [(4, 1, EXPERT), (4, 3, {"parallel": {"expert": 4}})]),
}
Found = tuple[dict[str, Tensor], Tensor, float]  # weights, a state of the optimizer, and the loss of the step after


def engine_of(name: str, stage: int, config: dict[str, Any]) -> lowtide.Engine:
    torch.manual_seed(0)
    more = {"zero_optimization": {"stage": stage}, "train_batch_size": 8, "optimizer": ADAMW}
    return lowtide.initialize(TRIPS[name][0](), {**more, **config})


def stepped(engine: lowtide.Engine, name: str, step: int) -> float:
    rows = rows_of(step, 8) if name == "lists" else others.tokens(step, 8)
    batch = tuple(one.chunk(engine.data_size)[engine.data_rank] for one in rows)
    return engine.train_step(batch).loss.item()


def seen(engine: lowtide.Engine, name: str) -> Found:
    moment = engine.full(TRIPS[name][1], state="exp_avg").clone()
    return engine.state_dict(), moment, stepped(engine, name, 1)


def save(name: str, stage: int, config: dict[str, Any], folder: Path) -> Found:
    with engine_of(name, stage, config) as engine:
        stepped(engine, name, 0)
        engine.save_checkpoint(folder / "checkpoint", tag="one")
        engine.export(folder / "plain")
        return seen(engine, name)


def load(name: str, stage: int, config: dict[str, Any], folder: Path) -> tuple[Found, dict[str, Tensor]]:
    """With the weights after the export was loaded. Then one is set, and all are loaded from memory."""
    key = TRIPS[name][1]
    with engine_of(name, stage, config) as engine:
        engine.load_checkpoint(folder / "checkpoint", tag="one")
        found = seen(engine, name)
        engine.load_weights(folder / "plain")
        weights = engine.state_dict()
        engine.set_full(key, engine.full(key) + 1)
        assert all(torch.equal(value, weights[one] + (one == key)) for one, value in engine.state_dict().items())
        engine.load_state_dict(weights if engine.rank == 0 else {})
        assert all(torch.equal(value, weights[one]) for one, value in engine.state_dict().items())
        return found, weights


@pytest.mark.parametrize("name", TRIPS)
def test_what_one_degree_saves_another_loads(ranks: RankPool, tmp_path: Path, name: str) -> None:
    (num_ranks, *saving), *others_load = TRIPS[name][2]
    state, moment, loss = ranks(num_ranks, save, name, *saving, tmp_path)[0]
    for size, *loading in others_load:
        (found, own_moment, own_loss), weights = ranks(size, load, name, *loading, tmp_path)[0]
        for key, value in state.items():
            assert torch.equal(found[key], value) and torch.equal(weights[key], value), (key, loading)
        assert torch.equal(own_moment, moment) and own_loss == pytest.approx(loss, rel=1e-6)
    kind = {"gpt2": "GPT2LMHeadModel", "both": "MixtralForCausalLM"}.get(name)
    if kind is not None:
        loaded = others.own(kind).from_pretrained(tmp_path / "plain").state_dict()
        assert all(torch.equal(value, state[key]) for key, value in loaded.items())
