"""Which layers are split how: by the model's plan, by names, by the config; what cannot be is said before training."""

import re

import pytest
import torch
from torch import nn

from lowtide.engine.config.config import Config
from lowtide.engine.model.prepared_model import _beside_splits
from lowtide.parallel.plan import TensorPlan
from tests.kit import models
from tests.kit.training import refusal
from tests.parallel import models_of_others as others


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


@pytest.mark.parametrize(
    ("model", "degree", "plan", "text"),
    [
        (uneven_llama(6, 6), 4, {}, "self_attn.q_proj', found heads(6) % tensor(4) = 2"),
        (uneven_llama(12, 3), 2, {}, "k_proj', found key heads(3) % tensor(2) = 1; set a divisor of 3"),
        (fused(), 2, {"qkv_proj": "column/3", "o_proj": "row"}, "found heads(3) % tensor(2)"),
        (
            fused(),
            3,
            {"qkv_proj": "column/5"},
            "that divide the outputs of 'qkv_proj', found 36 % (1 + 1 + 1 + 1 + 1) = 1",
        ),
        (models.TinyGPT(), 2, {"layers.*.mlp.up": "column"}, 'found "layers.*.mlp.up", which matches no layer; the'),
        (
            models.TinyGPT(),
            2,
            {"norm": "column"},
            'a linear layer or an embedding for "column", found "blocks.0.norm", a LayerNorm',
        ),
        (models.TinyGPT(), 2, {"head": "columns"}, '"column/3" for a layer of three equal parts, or "column/4:1:1"'),
        (GATED, 2, {}, "found no known layer names"),
        (NORMED_EMBEDDING, 2, {"0": "vocabulary"}, 'for "vocabulary", found "0", a Embedding'),
        (nn.Sequential(nn.Linear(3, 3)), 2, {}, "found no known layer names; name layers"),
        (
            nn.Sequential(nn.Linear(3, 3)),
            4,
            {"0": "column_gathered"},
            "'0': expected outputs for each rank, found outputs(3) < tensor(4)",
        ),
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
