"""Which layers are split how: by the model's plan, by names, by the config; what cannot be is said before training."""

import re

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from lowtide.engine.archive.named_state import taken
from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.model.prepared_model import _beside_splits
from lowtide.parallel.plan import TensorPlan
from tests.kit import models
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


def test_fused_columns_are_portions_that_make_the_whole() -> None:
    model = others.gpt2()
    plan = TensorPlan.of(model, 2)
    weight = model.get_parameter("transformer.h.0.attn.c_attn.weight")
    parts = [taken(plan.tensor_shard(weight, place)[0], weight) for place in (0, 1)]
    q, k, v = weight.split(32, dim=1)
    for place, part in enumerate(parts):
        assert torch.equal(part, torch.cat([one.chunk(2, dim=1)[place] for one in (q, k, v)], dim=1))


def test_large_layers_that_nothing_matches_are_named() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 65))
    assert TensorPlan.of(model, 2, {"0": "column_gathered"}).left_whole == ("*",)


class Fused(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 3, 4
        self.qkv_proj = nn.Linear(width, 3 * width)
        self.o_proj = nn.Linear(width, width)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(6, 6) for _ in range(3))
        self.two.weight = self.one.weight


class Gated(nn.Module):
    """One layer of a gate and what it opens, in an order that no name says."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 24), nn.Linear(12, 6)


def uneven_llama(heads: int, keys: int) -> nn.Module:
    own = {"num_attention_heads": heads, "num_key_value_heads": keys, "hidden_size": 48, "head_dim": 8}
    return others.OwnLlamaForCausalLM(LlamaConfig.from_dict({**others.COMMON, **own}))


@pytest.mark.parametrize(
    ("model", "degree", "plan", "text"),
    [
        (
            uneven_llama(6, 6),
            4,
            {},
            "self_attn.q_proj', found heads(6) % tensor(4) = 2",
        ),
        (uneven_llama(12, 3), 2, {}, "k_proj', found key heads(3) % tensor(2) = 1; set a divisor of 3"),
        (Fused(), 2, {"qkv_proj": "column/3", "o_proj": "row"}, "found heads(3) % tensor(2)"),
        (
            Fused(),
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
        (Gated(), 2, {}, "found no known layer names"),
        (
            nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)),
            2,
            {"0": "vocabulary"},
            'for "vocabulary", found "0", a Embedding',
        ),
        (nn.Sequential(nn.Linear(3, 3)), 2, {}, "found no known layer names; name layers"),
        (
            nn.Sequential(nn.Linear(3, 3)),
            4,
            {"0": "column_gathered"},
            "'0': expected outputs for each rank, found outputs(3) < tensor(4)",
        ),
        (Tied(), 2, {"one": "column", "two": "row"}, "'one' and 'two' share a weight, but their splits differ"),
        (Tied(), 2, {"one": "column"}, "'one' and 'two' share a weight, but 'two' is not split"),
    ],
)
def test_what_cannot_be_split(model: nn.Module, degree: int, plan: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        TensorPlan.of(model, degree, plan)


def test_fusions_over_several_layers_are_left_out_or_refused() -> None:
    assert _beside_splits(True, ["rms_norm", "gated_mlp"]) == ["rms_norm"]
    with pytest.raises(ConfigError, match="gated_mlp fuses layers, but the ranks of parallel"):
        _beside_splits(("gated_mlp",), ["gated_mlp"])


def test_a_plan_without_an_axis_has_no_effect() -> None:
    notes = Config.load({"tensor_parallel": {"plan": {"up": "column"}}}).notes
    assert any(note.startswith("tensor_parallel.plan:") and "parallel.tensor is 1" in note for note in notes)
