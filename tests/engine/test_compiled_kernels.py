"""Fused kernels and compiled blocks compose: kernels by name are operators, "auto" leaves blocks to the compiler."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import lowtide
from lowtide.engine.model import prepared_model
from tests.kit.compiling import with_a_new_compiler
from tests.kit.ranks import RankPool

NAMED = ["rms_norm", "gated_mlp", "rotary_embedding"]
COMPILED = {"compile": {"blocks": True, "backend": "aot_eager", "fullgraph": True}}


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=51, num_hidden_layers=3, max_position_embeddings=16, **shape)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    optimizer = {"type": "adamw", "params": {"lr": 1e-2}}
    return {"optimizer": optimizer, "zero_optimization": {"stage": stage}, "steps_per_print": 0, **more}


def train(stage: int, more: dict[str, Any], steps: int = 5) -> tuple[list[float], list[int], int]:
    """Losses, graphs after each step, and graph breaks and recompilations in all."""
    with_a_new_compiler()
    losses, graphs = [], []
    with lowtide.initialize(llama(), config_of(stage, **more)) as engine:
        for step in range(steps):
            ids = torch.randint(51, (2, 9), generator=torch.Generator().manual_seed(step))
            losses.append(engine.train_step({"input_ids": ids, "labels": ids}).loss.item())
            graphs.append(counters["stats"]["unique_graphs"])
    return losses, graphs, sum(counters["graph_break"].values()) + sum(counters["recompiles"].values())


def train_both(stage: int, more: dict[str, Any]) -> Any:
    kernels = {"kernels": {"fuse_modules": NAMED}}
    return train(stage, more | kernels), train(stage, more | kernels | COMPILED)


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (0, {}),
        (3, {"activation_checkpointing": {"every": 1}, "communication": {"transport": "sockets"}}),
        (3, {"bf16": {"enabled": True}}),
    ],
    ids=["0", "3, recomputed", "3, bf16"],
)
def test_kernels_by_name_are_operators_of_one_graph(ranks: RankPool, stage: int, more: dict[str, Any]) -> None:
    """fullgraph=True raises where a launch breaks the graph."""
    (plain, _, _), (losses, graphs, broken) = ranks(2, train_both, stage, more)[0]
    assert losses == pytest.approx(plain, rel=2**-7 if more.get("bf16") else 1e-5)
    assert graphs[2:] == [graphs[2]] * 3 and broken == 0


def test_auto_leaves_compiled_blocks_to_the_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prepared_model, "where_triton_runs", lambda device, backends: ("as on a GPU", list(backends)))
    fused = {}
    for name, more in (("plain", {}), ("compiled", COMPILED)):
        with caplog.at_level("INFO", "lowtide"), lowtide.initialize(llama(), config_of(0, **more)):
            fused[name] = [line for line in caplog.messages if "fuse" in line]
            caplog.clear()
    assert fused["plain"] == [
        "fused 1 x LlamaForCausalLM (cross_entropy)",
        "fused 1 x LlamaForCausalLM (linear_cross_entropy)",
        "fused 3 x LlamaAttention (rotary_embedding)",
        "fused 3 x LlamaMLP (gated_mlp)",
        "fused 7 x LlamaRMSNorm (rms_norm)",
    ]
    assert fused["compiled"] == [
        'config: kernels.fuse_modules: "auto" leaves the layers of compiled blocks to torch.compile',
        "fused 1 x LlamaForCausalLM (cross_entropy)",
        "fused 1 x LlamaForCausalLM (linear_cross_entropy)",
        "fused 1 x LlamaRMSNorm (rms_norm)",
    ]
