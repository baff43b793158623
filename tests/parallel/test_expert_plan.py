"""Which experts are split, and what is said where they cannot be."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.model.prepared_model import check_units
from lowtide.offload import TensorShard
from lowtide.parallel.experts import ExpertPlan
from lowtide.parallel.sequence_data import SequenceError, check_model
from lowtide.parallel.tiles import Tiled
from tests.kit import models
from tests.parallel import expert_models as moe
from tests.parallel.test_expert_routing import Experts, Routed


class Listed(nn.Module):
    """Experts as a list, as many write them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])}) for _ in range(3))


class Aliased(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.shown = self.layers[0].up


class Scaled(Routed):
    """A buffer has a row for each expert, and stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_buffer("scale", torch.ones(4))


class Adapted(Routed):
    """A module inside has a row for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].add_module("adapter", nn.Embedding(4, 7))


@pytest.mark.parametrize("build", [moe.mixtral, moe.qwen, moe.deepseek, moe.gpt_oss])
def test_experts_of_transformers_are_found(build: Any) -> None:
    plan = ExpertPlan.of(build(), 2)
    assert len(plan.layers) in (1, 2) and not plan.left_whole
    for layer in plan.layers:
        assert layer.counts == ("num_experts",)
        assert plan.rows(layer.module.get_parameter("down_proj"), 1) == (layer.num_experts // 2, layer.num_experts)
        assert set(layer.parameters) == {name for name, _ in layer.module.named_parameters()}


@pytest.mark.parametrize(
    ("build", "degree", "text"),
    [
        (models.mlp, 2, "parallel.expert: expected a model with experts to split over 2 ranks, found none"),
        (Listed, 2, r"found only 'layers.\*.experts', of an unknown form. The experts of a layer must be a single"),
        (Routed, 3, r"'layers.0': experts\(4\) % expert\(3\) = 1; set parallel.expert to a divisor of 4"),
        (Aliased, 2, r"that 'layers.0' shares no parameter, found the same parameter at '.shown'"),
        (
            Scaled,
            2,
            r"'layers.1.scale' of shape \(4,\) has a row for each expert, but is no direct parameter of 'layers.1'",
        ),
        (Adapted, 2, r"'layers.0.adapter.weight' of shape \(4, 7\) has a row for each expert"),
    ],
)
def test_what_cannot_be_split(build: Any, degree: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ExpertPlan.of(build(), degree)


class Mixed(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2)])


def test_other_experts_are_named() -> None:
    assert ExpertPlan.of(Mixed(), 2).left_whole == ("'experts'",)


def test_a_place_has_the_same_rows_of_what_a_tensor_axis_cuts() -> None:
    whole = torch.arange(4 * 6 * 2).view(4, 6, 2)
    tensor_shard = TensorShard.along((4, 6, 2), 1, [(0, 1), (3, 5)]).cut(0, 2, 4)
    found = torch.empty(tensor_shard.shape, dtype=torch.int64)
    for chunk, own in tensor_shard.chunks:
        found[own.index] = whole[chunk.index]
    assert torch.equal(found, whole[2:4, [0, 3, 4]])


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Experts()

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        out: Tensor = self.mlp(x, index, torch.ones_like(x[:, :2]))
        return out


def test_experts_in_tiles_are_refused() -> None:
    model = Wrapped()
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "sgd"}, "parallel": {"expert": 2}}
    blueprint = Blueprint.of(Config.load(config).resolve(2), model, 2)
    with pytest.raises(ConfigError, match=r"tiles.modules: 'mlp' holds experts that ranks share"):
        check_units(Tiled([("mlp", model.mlp)], []), blueprint)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_expert_is_divided_over_the_ranks_that_have_it(stage: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "sgd"}, "parallel": {"expert": 2}}
    config["zero_optimization"] = {"stage": stage}
    blueprint = Blueprint.of(Config.load(config).resolve(4), Routed(), 4)
    groups = [group for group in blueprint.places[1].groups if group.sharding.portioned]
    assert {blueprint.parallel_dims.wide(group.sharding.summed) for group in groups} == {
        ("shard",) if stage else ("replica",)
    }
    assert all(blueprint.parallel_dims.size(group.sharding.states) == (2 if stage else 1) for group in groups)
    assert [blueprint.first_rank_of(place) for place in range(2)] == [0, 1]
    assert [blueprint.place_of(rank) for rank in range(4)] == [0, 1, 0, 1]


def test_a_loss_of_routers_is_refused_beside_sequences() -> None:
    model: Any = moe.plain_mixtral()
    model.config.output_router_logits = True
    with pytest.raises(
        SequenceError, match=r"config.output_router_logits: the router loss is a mean over all tokens of a la"
    ):
        check_model(model)
