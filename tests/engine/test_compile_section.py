"""The section `compile`: blocks are compiled inside of their gathers, once, and compute what they did."""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters

import lowtide
from lowtide.engine.model import prepared_model
from tests.engine.adapted import base, lora, tokens
from tests.engine.test_compile import CASE, SMALL
from tests.kit.compiling import with_a_new_compiler
from tests.kit.ranks import RankPool
from tests.kit.training import Case, refusal, settings, share_of

SOCKETS = {"communication": {"transport": "sockets"}}
EAGER: dict[str, Any] = {"compile": {"blocks": True, "backend": "eager"}}
Trained = tuple[list[float], list[tuple[int, int, int]]]


def train(build: Any, config: dict[str, Any], steps: int, take: Callable[[Any, int], Any]) -> Trained:
    """Losses; after each step, how many graphs were made, how many broke, and how many were made again."""
    with_a_new_compiler()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes
    torch.manual_seed(0)
    losses, counts = [], []
    with lowtide.initialize(build(), config) as engine:
        for step in range(steps):
            losses.append(take(engine, step).loss.item())
            broken, again = (sum(counters[kind].values()) for kind in ("graph_break", "recompiles"))
            counts.append((counters["stats"]["unique_graphs"], broken, again))
    return losses, counts


def train_case(case: Case, by_run: bool) -> Trained:
    """by_run: the engine runs a function around the model."""

    def take(engine: Any, step: int) -> Any:
        batch = share_of(case.global_batch(step, engine.world_size))
        if not by_run:
            return engine.train_step(batch)
        engine.backward(engine.run(lambda *batch: 2 * engine.module(*batch), *batch))
        return engine.step()

    return train(case.build, case.as_config(), case.steps, take)


def train_cases(cases: list[Case], by_run: bool = False) -> list[Trained]:
    return [train_case(case, by_run) for case in cases]


@pytest.mark.parametrize("by_run", [False, True])
def test_blocks_are_one_graph_and_compute_the_same(ranks: RankPool, by_run: bool) -> None:
    recomputed = SOCKETS | {"activation_checkpointing": {"every": 1}}
    offload = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    beside: list[tuple[int, dict[str, Any]]] = [  # with the stage
        (0, {}),
        (3, recomputed | {"zero_optimization": offload}),
    ]
    cases = [CASE.at(stage, config=others | EAGER) for stage, others in beside]
    (plain, _), *compiled = ranks(2, train_cases, [CASE.at(0), *cases], by_run)[0]
    for losses, counts in compiled:
        assert losses == pytest.approx(plain, abs=1e-6)
        assert counts == [(1, 0, 0)] * CASE.steps


def by_aot_eager(graph: Any, inputs: Any, **options: Any) -> Any:
    """In the place of inductor, which would run a C++ compiler for half a minute."""
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def train_by_inductor() -> tuple[list[Trained], int]:
    """Without and with the compiler; and how many graphs inductor was given."""
    with_a_new_compiler()  # to import inductor warns
    with patch("torch._inductor.compile_fx.compile_fx", side_effect=by_aot_eager) as compile_fx:
        return train_cases([SMALL.at(3), SMALL.at(3, config={"compile": {"blocks": True}})]), compile_fx.call_count


def test_inductor_is_given_each_graph(ranks: RankPool) -> None:
    ((plain, _), (losses, counts)), num_graphs = ranks(1, train_by_inductor)[0]
    assert losses == pytest.approx(plain, abs=1e-6)
    assert num_graphs and counts == [(num_graphs, 0, 0)] * SMALL.steps


def train_llama(build: Any, stage: int, both: dict[str, Any], compiled: dict[str, Any]) -> list[Trained]:
    """Without and with the compiler."""

    def take(engine: Any, step: int) -> Any:
        return engine.train_step({"input_ids": tokens(step)[:2], "labels": tokens(step)[:2]})

    return [train(build, settings(stage, **both, **more), 4, take) for more in ({}, compiled)]


def test_blocks_of_hugging_face_with_adapters_of_peft(ranks: RankPool) -> None:
    pytest.importorskip("peft")
    (plain, _), (losses, counts) = ranks(1, train_llama, lora, 3, {}, EAGER)[0]
    assert losses == pytest.approx(plain, abs=1e-6)
    assert [(graphs, broken) for graphs, broken, _ in counts[1:]] == [(counts[1][0], 0)] * 3


FULLGRAPH = {"compile": {"blocks": True, "backend": "aot_eager", "fullgraph": True}}


def test_kernels_by_name_are_operators_of_one_graph(ranks: RankPool) -> None:
    """fullgraph=True raises where a launch breaks the graph."""
    more: dict[str, Any] = {"kernels": {"fuse_modules": ["rms_norm", "gated_mlp", "rotary_embedding"]}}
    more |= {"activation_checkpointing": {"every": 1}, "bf16": {"enabled": True}}
    (plain, _), (losses, counts) = ranks(1, train_llama, base, 3, more, FULLGRAPH)[0]
    assert losses == pytest.approx(plain, rel=2**-7)
    assert counts[2:] == [(counts[2][0], 0, 0)] * 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {},
            [
                "fused 1 x LlamaForCausalLM (cross_entropy)",
                "fused 1 x LlamaForCausalLM (linear_cross_entropy)",
                "fused 2 x LlamaAttention (rotary_embedding)",
                "fused 2 x LlamaMLP (gated_mlp)",
                "fused 5 x LlamaRMSNorm (rms_norm)",
            ],
        ),
        (
            FULLGRAPH,
            [
                'config: kernels.fuse_modules: "auto" leaves the layers of compiled blocks to torch.compile',
                "fused 1 x LlamaForCausalLM (cross_entropy)",
                "fused 1 x LlamaForCausalLM (linear_cross_entropy)",
                "fused 1 x LlamaRMSNorm (rms_norm)",
            ],
        ),
    ],
)
def test_auto_leaves_compiled_blocks_to_the_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, more: dict[str, Any], said: list[str]
) -> None:
    monkeypatch.setattr(prepared_model, "where_triton_runs", lambda device, backends: ("as on a GPU", list(backends)))
    with caplog.at_level("INFO", "lowtide"), lowtide.initialize(base(), settings(**more)):
        assert [line for line in caplog.messages if "fuse" in line] == said


def refused() -> str:
    return refusal(lowtide.initialize, base(), settings(parallel={"tensor": 2}, **EAGER))


def test_beside_a_tensor_split_it_is_refused(ranks: RankPool) -> None:
    assert "found compile.blocks: collectives of split layers" in ranks(2, refused)[0]
