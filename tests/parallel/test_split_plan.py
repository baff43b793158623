"""Which layers and experts are split how: by the model's plan, names, the config; and what cannot be."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.model.prepared_model import _beside_splits, check_units
from lowtide.offload import TensorShard
from lowtide.parallel.experts import ExpertLayout, ExpertPlan
from lowtide.parallel.plan import TensorPlan
from lowtide.parallel.sequence_data import check_model
from tests.kit import models
from tests.kit.training import refusal
from tests.parallel import models_of_others as others
from tests.parallel.test_expert_routing import Experts, Routed
from tests.parallel.trainings import EXPERT, split_config


def styles(model: nn.Module, plan: dict[str, str] | None = None) -> dict[str, str]:
    found = TensorPlan.of(model, 2, plan)
    return {re.sub(r"\b\d+\b", "*", layer.name): layer.style.value for layer in found.layers}


def test_the_plan_of_a_model_comes_before_names() -> None:
    assert styles(others.qwen()) == {
        "model.embed_tokens": "vocabulary",
        "lm_head": "vocabulary",
        **{f"model.layers.*.self_attn.{key}_proj": "column" for key in "qkv"},
        **{f"model.layers.*.self_attn.{key}_norm": "partial" for key in "qk"},
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp.gate_proj": "column",
        "model.layers.*.mlp.up_proj": "column",
        "model.layers.*.mlp.down_proj": "row",
    }


def test_names_of_families_are_known() -> None:
    assert styles(others.gpt2())["transformer.h.*.attn.c_attn"] == "column"
    assert styles(others.t5())["encoder.block.*.layer.*.SelfAttention.relative_attention_bias"] == "column"
    assert "classifier" not in styles(others.vit())
    assert styles(models.TinyGPT()) == {"blocks.*.up": "column", "blocks.*.down": "row"}


def test_blocks_whose_rows_are_beside_their_columns_are_known() -> None:
    found = styles(others.bert())
    assert {name.rpartition("encoder.layer.*.")[2]: style for name, style in found.items() if "encoder" in name} == {
        **{f"attention.self.{key}": "column" for key in ("query", "key", "value")},
        "attention.output.dense": "row",
        "intermediate.dense": "column",
        "output.dense": "row",
    }
    assert found["cls.predictions.decoder"] == "vocabulary"
    assert styles(nn.TransformerEncoderLayer(8, 2, 12)) == {"linear1": "column", "linear2": "row"}


def test_the_config_comes_before_all() -> None:
    found = styles(others.llama(), {"layers.*.mlp.*_proj": "whole", "lm_head": "column_gathered"})
    assert not any(".mlp." in name for name in found) and found["lm_head"] == "column_gathered"
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 65))
    assert TensorPlan.of(model, 2, {"0": "column_gathered"}).left_whole == ("*",)  # a large layer that nothing matches


def test_fused_columns_are_portions_that_make_the_whole() -> None:
    model = others.gpt2()
    plan = TensorPlan.of(model, 2)
    weight = model.get_parameter("transformer.h.0.attn.c_attn.weight")
    parts = [plan.tensor_shard(weight, place)[0].take(weight) for place in (0, 1)]
    q, k, v = weight.split(32, dim=1)
    for place, part in enumerate(parts):
        assert torch.equal(part, torch.cat([one.chunk(2, dim=1)[place] for one in (q, k, v)], dim=1))


def fused() -> nn.Module:
    model: nn.Module = nn.ModuleDict({"qkv_proj": nn.Linear(12, 36), "o_proj": nn.Linear(12, 12)})
    model.num_heads, model.head_dim = 3, 4  # type: ignore[assignment]
    return model


def tied() -> nn.Module:
    model = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("one", "two", "three")})
    model["two"].weight = model["one"].weight
    return model


def uneven_llama(heads: int, keys: int) -> nn.Module:
    return others.llama(num_attention_heads=heads, num_key_value_heads=keys, hidden_size=48, head_dim=8)


GATED = nn.ModuleDict({"fc1": nn.Linear(6, 24), "fc2": nn.Linear(12, 6)})  # in an order that no name says
NORMED_EMBEDDING = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))
GPT, LINEAR = models.TinyGPT(), nn.Sequential(nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("model", "degree", "plan", "text"),
    [
        (uneven_llama(6, 6), 4, {}, "self_attn.q_proj', found heads(6) % tensor(4) = 2"),
        (uneven_llama(12, 3), 2, {}, "k_proj', found key heads(3) % tensor(2) = 1; set a divisor of 3"),
        (fused(), 2, {"qkv_proj": "column/3", "o_proj": "row"}, "found heads(3) % tensor(2)"),
        (fused(), 3, {"qkv_proj": "column/5"}, "divide the outputs of 'qkv_proj', found 36 % (1 + 1 + 1 + 1 + 1) = 1"),
        (GPT, 2, {"layers.*.mlp.up": "column"}, 'found "layers.*.mlp.up", which matches no layer; the'),
        (GPT, 2, {"norm": "column"}, 'linear layer or an embedding for "column", found "blocks.0.norm", a LayerNorm'),
        (GPT, 2, {"head": "columns"}, '"column/3" for a layer of three equal parts, or "column/4:1:1"'),
        (GATED, 2, {}, "found no known layer names"),
        (NORMED_EMBEDDING, 2, {"0": "vocabulary"}, 'for "vocabulary", found "0", a Embedding'),
        (LINEAR, 2, {}, "found no known layer names; name layers"),
        (LINEAR, 4, {"0": "column_gathered"}, "'0': expected outputs for each rank, found outputs(3) < tensor(4)"),
        (tied(), 2, {"one": "column", "two": "row"}, "'one' and 'two' share a weight, but their splits differ"),
        (tied(), 2, {"one": "column"}, "'one' and 'two' share a weight, but 'two' is not split"),
    ],
)
def test_what_cannot_be_split(model: nn.Module, degree: int, plan: dict[str, str], text: str) -> None:
    assert text in refusal(TensorPlan.of, model, degree, plan)


def test_fusions_over_several_layers_are_left_out_or_refused() -> None:
    assert _beside_splits(True, ["rms_norm", "gated_mlp"]) == ["rms_norm"]
    text = refusal(_beside_splits, ("gated_mlp",), ["gated_mlp"])
    assert "gated_mlp fuses layers, but the ranks of parallel" in text


def test_a_plan_without_an_axis_has_no_effect() -> None:
    notes = Config.load({"tensor_parallel": {"plan": {"up": "column"}}}).notes
    assert any(note.startswith("tensor_parallel.plan:") and "parallel.tensor is 1" in note for note in notes)


class Listed(nn.Module):
    """Experts as a list, as many write them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])}) for _ in range(3))


def routed(change: Callable[[Any], object]) -> nn.Module:
    model: Any = Routed()
    change(model)
    return model


def alias(model: Any) -> None:
    model.shown = model.layers[0].up


def scale(model: Any) -> None:
    model.layers[1].register_buffer("scale", torch.ones(4))


def adapt(model: Any) -> None:
    model.layers[0].add_module("adapter", nn.Embedding(4, 7))


def mix(model: Any) -> None:
    model.experts = nn.ModuleList([nn.Linear(2, 2)])


@pytest.mark.parametrize("build", [others.mixtral, others.qwen_moe, others.deepseek, others.gpt_oss])
def test_experts_of_transformers_are_found(build: Any) -> None:
    plan = ExpertPlan.of(build(), 2)
    assert len(plan.layers) in (1, 2) and not plan.left_whole
    for layer in plan.layers:
        assert layer.counts == ("num_experts",)
        assert plan.rows(layer.module.get_parameter("down_proj"), 1) == (layer.num_experts // 2, layer.num_experts)
        assert set(layer.parameters) == {name for name, _ in layer.module.named_parameters()}


@pytest.mark.parametrize(
    ("model", "degree", "text"),
    [
        (models.mlp(), 2, "parallel.expert: expected a model with experts to split over 2 ranks, found none"),
        (Listed(), 2, "found only 'layers.*.experts', of an unknown form. The experts of a layer must be a single"),
        (Routed(), 3, "'layers.0': experts(4) % expert(3) = 1; set parallel.expert to a divisor of 4"),
        (routed(alias), 2, "that 'layers.0' shares no parameter, found the same parameter at '.shown'"),
        (
            routed(scale),
            2,
            "'layers.1.scale' of shape (4,) has a row for each expert, but is no direct parameter of 'l",
        ),
        (routed(adapt), 2, "'layers.0.adapter.weight' of shape (4, 7) has a row for each expert"),
    ],
)
def test_experts_that_cannot_be_split(model: nn.Module, degree: int, text: str) -> None:
    assert text in refusal(ExpertPlan.of, model, degree)


def test_other_experts_are_named() -> None:
    assert ExpertPlan.of(routed(mix), 2).left_whole == ("'experts'",)


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


def blueprint_of(model: nn.Module, num_ranks: int, stage: int = 0) -> Blueprint:
    config = split_config(**EXPERT, zero_optimization={"stage": stage})
    return Blueprint.of(Config.load(config).resolve(num_ranks), model, num_ranks)


def test_experts_in_tiles_and_a_loss_of_routers_beside_sequences_are_refused() -> None:
    model, router_loss = Wrapped(), others.plain_mixtral()
    text = refusal(check_units, [("mlp", model.mlp)], blueprint_of(model, 2))
    assert "tiles.modules: 'mlp' holds experts that ranks share" in text
    router_loss.config.output_router_logits = True  # type: ignore[union-attr]
    text = refusal(check_model, router_loss)
    assert "config.output_router_logits: the router loss is a mean over all tokens of a la" in text


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_expert_is_divided_over_the_ranks_that_have_it(stage: int) -> None:
    blueprint = blueprint_of(Routed(), 4, stage)
    groups = [group for group in blueprint.places[1].groups if group.sharding.partitioned]
    assert {blueprint.parallel_dims.wide(group.sharding.summed) for group in groups} == {
        ("shard",) if stage else ("replica",)
    }
    assert all(blueprint.parallel_dims.size(group.sharding.states) == (2 if stage else 1) for group in groups)
    assert [blueprint.first_rank_of(place) for place in range(2)] == [0, 1]
    assert [blueprint.place_of(rank) for rank in range(4)] == [0, 1, 0, 1]


# -- columns of experts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [others.mixtral, others.deepseek, others.gpt_oss])
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_gates_and_values_of_a_column_are_on_one_rank(build: Callable[[], nn.Module], degree: int) -> None:
    model: Any = build()
    experts = model.model.layers[1].mlp.experts
    is_transposed, is_alternating = experts.is_transposed, not experts.is_concatenated
    up, down = experts.gate_up_proj, experts.down_proj
    columns = torch.arange(down.shape[1 if is_transposed else 2]).double()
    both = torch.stack([columns, columns], 1).view(-1) if is_alternating else torch.cat([columns, columns])
    up.data = both.view(1, 1, -1).expand(up.shape) if is_transposed else both.view(1, -1, 1).expand(up.shape)
    down.data = columns.view(1, -1, 1).expand(down.shape) if is_transposed else columns.expand(down.shape)
    layout = ExpertLayout.of(experts)
    assert layout is not None
    parameters = layout.split("experts", experts, degree).parameters
    seen: list[float] = []
    for place in range(degree):
        tensor_shards = [parameters[key].tensor_shards[place] for key in ("gate_up_proj", "down_proj")]
        ups, downs = tensor_shards[0].take(up).unique(), tensor_shards[1].take(down).unique()
        assert torch.equal(ups, downs)
        seen += downs.tolist()
    assert seen == columns.tolist()


def test_experts_that_say_nothing_of_their_layout_stay_whole_with_a_warning_and_those_of_a_plan_without() -> None:
    model = nn.ModuleDict({"experts": Experts(32), "up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
    plan = {"up": "column", "down": "row"}
    found = TensorPlan.of(model, 2, plan)
    assert [layer.name for layer in found.layers] == ["up", "down"] and found.left_whole == ("experts",)
    found = TensorPlan.of(others.mixtral(), 2, {"mlp.experts": "whole"})
    assert not found.left_whole and not any("experts" in layer.name for layer in found.layers)
    text = refusal(TensorPlan.of, model, 2, {**plan, "experts": "experts"})
    declared = r'a module with all experts of a layer that declares its layout .* for "experts", found "experts"'
    assert re.search(declared, text)
    text = refusal(TensorPlan.of, others.deepseek(), 16, {"mlp.shared_experts.*": "whole"})
    assert "'model.layers.1.mlp.experts': expected columns for each rank, found columns(12) < tensor(16)" in text
