"""Experts whose columns ranks of a tensor axis share train as whole ones do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine.archive.named_state import taken
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.blueprint.footprint import MemoryPhase, bytes_of
from lowtide.engine.config.config import Config
from lowtide.parallel.experts import ExpertLayout
from lowtide.parallel.plan import TensorPlan
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, train_all
from tests.parallel import expert_models as moe
from tests.parallel.test_expert_routing import Experts
from tests.parallel.test_experts import (
    TOLERANCE,
    Row,
    batched_mixtral,
    case_of,
    check,
    grouped_mixtral,
    of_sequences,
    split,
)

BOTH = {"tensor": 2, "expert": 2}
PARTS: dict[str, Any] = {"tensor": 2, "tensor_sequence": True}
ROWS: dict[int, list[Row]] = {  # by number of ranks
    2: [
        ("qwen3", 1, 0, {"parallel": PARTS}),
        ("deepseek", 1, 2, {"parallel": {"tensor": 2}}),
        ("mixtral", 1, 3, {"parallel": {"tensor": 2}, "tiles": {"mlp": 4, "modules": ["model.layers.*.mlp"]}}),
    ],
    4: [
        ("gpt_oss", 1, 1, {"parallel": {"tensor": 4}}),
        ("gpt_oss", 2, 3, {"parallel": {**PARTS, "expert": 2}, "communication": {"transport": "native"}}),
        ("mixtral", 1, 1, {"parallel": {"tensor": 2, "pipeline": 2}}),
    ],
}


@pytest.mark.parametrize("num_ranks", ROWS)
def test_models_of_others_train_as_in_one_process(ranks: RankPool, num_ranks: int) -> None:
    check(ranks, num_ranks, ROWS[num_ranks])


def test_each_implementation_trains_as_whole_experts_do(ranks: RankPool) -> None:
    builds = {grouped_mixtral: 0, batched_mixtral: 3, moe.grouped_gpt_oss: 0}
    cases = [case_of(build, accumulation=1) for build in builds]
    alone = ranks(1, train_all, [case.at(1) for case in cases])[0]
    split_cases = [split(case, stage, tensor=2) for case, stage in zip(cases, builds.values(), strict=True)]
    shared = ranks(2, train_all, split_cases)[0]
    for whole, found in zip(alone, shared, strict=True):
        assert found.losses == pytest.approx(whole.losses, rel=TOLERANCE)
        assert found.norms == pytest.approx(whole.norms, rel=TOLERANCE)


def test_ranks_that_share_sequences_share_columns_of_experts_too(ranks: RankPool) -> None:
    losses, norms = ranks(1, of_sequences, {})[0]
    found = ranks(4, of_sequences, {"sequence": 2, "tensor": 2})[0]
    assert found[0] == pytest.approx(losses, rel=TOLERANCE) and found[1] == pytest.approx(norms, rel=TOLERANCE)


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 0,
    "optimizer": ADAMW,
    "parallel": BOTH,
    "zero_optimization": {"stage": 3},
    "communication": {"transport": "sockets"},
}


def bytes_there_are() -> tuple[int, int, int]:
    """Of parameters and of the optimizer, and elements of one layer's experts."""
    model: Any = moe.gpt_oss()
    engine = lowtide.initialize(model, CONFIG)
    engine.train_step(tuple(rows.chunk(engine.data_size)[engine.data_rank] for rows in moe.tokens(0, 4)))
    memory, experts = engine.memory(), model.model.layers[0].mlp.experts
    with engine.gathered(*experts.parameters()):
        own = sum(param.numel() for param in experts.parameters())
    engine.close()
    return memory.parameter_bytes, memory.optimizer_bytes, own


def test_the_blueprint_says_the_bytes_of_both_splits(ranks: RankPool) -> None:
    blueprint = Blueprint.of(Config.load(CONFIG).resolve(4), moe.gpt_oss(), 4)
    whole: Any = moe.gpt_oss()
    numel = sum(param.numel() for param in whole.model.layers[0].mlp.experts.parameters())
    for rank, (parameters, optimizer, own) in enumerate(ranks(4, bytes_there_are)):
        said = bytes_of(blueprint, rank, MemoryPhase.BETWEEN_STEPS)
        assert (parameters, optimizer) == (said.parameters, said.optimizer), rank
        assert own < 0.29 * numel  # 20 or 24 of 44 columns


@pytest.mark.parametrize("build", [moe.mixtral, moe.deepseek, moe.gpt_oss])
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_gates_and_values_of_a_column_are_on_one_rank(build: Callable[[], nn.Module], degree: int) -> None:
    model: Any = build()
    experts = model.model.layers[1].mlp.experts
    is_transposed, is_alternating = experts.is_transposed, not experts.is_concatenated
    up, down = experts.gate_up_proj, experts.down_proj
    width = down.shape[1 if is_transposed else 2]
    columns = torch.arange(width).double()
    both = torch.stack([columns, columns], 1).view(-1) if is_alternating else torch.cat([columns, columns])
    up.data = both.view(1, 1, -1).expand(up.shape) if is_transposed else both.view(1, -1, 1).expand(up.shape)
    down.data = columns.view(1, -1, 1).expand(down.shape) if is_transposed else columns.expand(down.shape)
    layout = ExpertLayout.of(experts)
    assert layout is not None
    parameters = layout.split("experts", experts, degree).parameters
    seen: list[float] = []
    for place in range(degree):
        tensor_shards = [parameters[key].tensor_shards[place] for key in ("gate_up_proj", "down_proj")]
        ups, downs = taken(tensor_shards[0], up).unique(), taken(tensor_shards[1], down).unique()
        assert torch.equal(ups, downs)
        seen += downs.tolist()
    assert seen == columns.tolist()


def test_experts_that_say_nothing_of_their_layout_stay_whole_with_a_warning() -> None:
    model = nn.ModuleDict({"experts": Experts(32), "up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
    plan = {"up": "column", "down": "row"}
    with pytest.raises(
        ValueError,
        match=r'a module with all experts of a layer that declares its layout .* for "experts", found "experts"',
    ):
        TensorPlan.of(model, 2, {**plan, "experts": "experts"})
    found = TensorPlan.of(model, 2, plan)
    assert [layer.name for layer in found.layers] == ["up", "down"] and found.left_whole == ("experts",)


def test_experts_that_a_plan_has_whole_are_whole_without_a_warning() -> None:
    model = moe.mixtral()
    plan = TensorPlan.of(model, 2, {"mlp.experts": "whole"})
    assert not plan.left_whole and not any("experts" in layer.name for layer in plan.layers)
    with pytest.raises(
        ValueError,
        match=r"'model.layers.1.mlp.experts': expected columns for each rank, found columns\(12\) < tensor\(16\)",
    ):
        TensorPlan.of(moe.deepseek(), 16, {"mlp.shared_experts.*": "whole"})
