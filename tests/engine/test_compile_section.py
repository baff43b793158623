"""The section `compile`: blocks are compiled inside of their gathers, once, and compute what they did."""

import os
import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import lowtide
from lowtide.engine.config.config import Config, ConfigError
from tests.engine.adapted import base, engine_of, lora, run
from tests.engine.test_compile import CASE, SMALL
from tests.kit.compiling import with_a_new_compiler
from tests.kit.ranks import RankPool
from tests.kit.training import Case, share_of

SOCKETS = {"communication": {"transport": "sockets"}}
COMPILED: dict[str, Any] = {"compile": {"blocks": True, "backend": "eager"}}
OTHERS: list[dict[str, Any]] = [
    {},
    SOCKETS | {"activation_checkpointing": {"every": 1}},
    SOCKETS | {"zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}},
]


def train(case: Case, backend: str | None) -> tuple[list[float], list[tuple[int, int]]]:
    """Losses; after each step, how many graphs were made, and how often one broke or was made again."""
    with_a_new_compiler()
    torch.manual_seed(0)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes
    config = case.as_config() | ({} if backend is None else {"compile": {"blocks": True, "backend": backend}})
    losses, counts = [], []
    with lowtide.initialize(case.build(), config) as engine:
        for step in range(case.steps):
            losses.append(engine.train_step(share_of(case.global_batch(step, engine.world_size))).loss.item())
            broken = sum(counters["graph_break"].values()) + sum(counters["recompiles"].values())
            counts.append((counters["stats"]["unique_graphs"], broken))
    return losses, counts


def train_both(cases: list[Case], backend: str = "eager") -> list[Any]:
    """The first without the compiler, then all with it."""
    return [train(cases[0], None), *(train(case, backend) for case in cases)]


def test_blocks_are_one_graph_and_compute_the_same(ranks: RankPool) -> None:
    beside = [(0, OTHERS[0]), (1, OTHERS[1]), (3, OTHERS[1]), (3, OTHERS[2])]  # with the stage
    cases = [CASE.at(stage, config=others, accumulation=2) for stage, others in beside]
    (plain, _), *compiled = ranks(2, train_both, cases)[0]
    for losses, counts in compiled:
        assert losses == pytest.approx(plain, abs=1e-6)
        assert counts == [counts[0]] * len(counts) and counts[0] == (1, 0)


def run_by_hand(stage: int) -> Any:
    """Losses of steps by `engine.run`, without and with compiled blocks, and the graphs after each step."""
    with_a_new_compiler()
    found = []
    for section in ({}, COMPILED):
        losses, graphs = [], []
        torch.manual_seed(0)
        with lowtide.initialize(CASE.build(), CASE.at(stage).as_config() | section) as engine:
            for step in range(CASE.steps):
                ids, targets = share_of(CASE.global_batch(step, engine.world_size))
                loss = engine.run(lambda ids, targets: 2 * engine.module(ids, targets), ids, targets)
                engine.backward(loss)
                losses.append(engine.step().loss.item())
                graphs.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
        found.append((losses, graphs))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_blocks_are_compiled_within_a_function_that_is_run(ranks: RankPool, stage: int) -> None:
    (plain, _), (losses, graphs) = ranks(2, run_by_hand, stage)[0]
    assert losses == pytest.approx(plain, abs=1e-6)
    assert graphs == [(1, 0)] * CASE.steps


def train_adapters(build: Any, stage: int, backend: str) -> tuple[list[float], list[float], int, list[int]]:
    """Losses without and with the compiler, graph breaks, and graphs after each step."""
    with_a_new_compiler()
    with engine_of(build, stage) as engine:
        plain = run(engine, 0, 3)
    losses, graphs = [], []
    with engine_of(build, stage, compile={"blocks": True, "backend": backend}) as engine:
        for step in range(3):
            losses += run(engine, step, 1)
            graphs.append(counters["stats"]["unique_graphs"])
    return plain, losses, sum(counters["graph_break"].values()), graphs


def test_blocks_of_hugging_face_with_adapters_of_peft(ranks: RankPool) -> None:
    pytest.importorskip("peft")
    plain, losses, breaks, graphs = ranks(1, train_adapters, lora, 3, "eager")[0]
    assert losses == pytest.approx(plain, abs=1e-6)
    assert breaks == 0
    assert graphs[1:] == [graphs[1]] * 2


def test_inductor(ranks: RankPool) -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler on the CPU")
    (plain, _), (losses, counts) = ranks(1, train_both, [SMALL.at(3)], "inductor")[0]
    assert losses == pytest.approx(plain, abs=1e-6)
    assert counts == [counts[0]] * len(counts) and counts[0][1] == 0


def test_beside_a_tensor_split_it_is_refused(ranks: RankPool) -> None:
    assert "found compile.blocks: collectives of split layers" in ranks(2, refused)[0]


def refused() -> str:
    with pytest.raises(ValueError) as error:
        lowtide.initialize(base(), CASE.as_config() | COMPILED | {"parallel": {"tensor": 2}})
    return str(error.value)


def test_how_without_blocks_has_a_note() -> None:
    notes = Config.load({"compile": {"backend": "eager"}}).notes
    assert notes == ('compile.backend: "eager" has no effect here: compile.blocks is false',)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"deepcompile": True}, "compile.deepcompile: true is not supported yet; set compile.blocks; remove the key"),
        ({"blocs": True}, 'unknown key "blocs"; did you mean "blocks"?'),
        ({"kwargs": {"mode": "default"}}, "set compile.mode, dynamic or fullgraph; remove the key"),
    ],
)
def test_what_the_section_cannot_say(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.load({"compile": section})
    assert text in str(error.value)
