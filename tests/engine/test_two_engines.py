"""Two engines in one process, taking turns or one after the other, train as each would alone."""

import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, share_of, train

FIRST = Case(models.tiny_gpt, models.token_batch, stage=3, clip=0.3)
SECOND = Case(models.mlp, models.vector_batch, stage=1, accumulation=3, config={"bf16": {"enabled": True}})


def take_turns(cases: list[Case]) -> list[Outcome]:
    engines, outcomes = [], [Outcome() for _ in cases]
    for case in cases:
        torch.manual_seed(0)
        engines.append(lowtide.initialize(case.build(), case.as_config()))
    for step in range(3):
        for case, engine, outcome in zip(cases, engines, outcomes, strict=True):
            result = engine.train_step(share_of(case.global_batch(step, engine.world_size)))
            outcome.losses.append(result.loss.item())
            outcome.norms.append(result.grad_norm.item())
    for engine, outcome in zip(engines, outcomes, strict=True):
        outcome.state = engine.state_dict()
        engine.close()
    return outcomes


def alone(cases: list[Case]) -> list[Outcome]:
    return [train(case) for case in cases]


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_two_engines_take_turns(ranks: RankPool, transport: str) -> None:
    config = {"communication": {"transport": transport}}
    cases = [FIRST.at(3, config=config), SECOND.at(1, config=config), FIRST.at(2, config=config)]
    for found, expected in zip(ranks(2, take_turns, cases)[0], ranks(2, alone, cases)[0], strict=True):
        assert found.differences(expected) == []


def teacher_and_student() -> list[float]:
    """The output of one engine is the target of another, whose forward lies between the first one's calls."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "sgd", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }

    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))

    teacher, student = lowtide.initialize(layers(), config), lowtide.initialize(layers(), config)
    x = torch.randn(4, 4)
    losses = []
    for _ in range(5):
        with torch.no_grad():
            target = teacher(x)
        loss = (student(x) - target).square().mean()
        student.backward(loss)
        losses.append(student.step().loss.item())
    return losses


def test_a_teacher_and_a_student(ranks: RankPool) -> None:
    first, second = ranks(2, teacher_and_student)
    assert first == second and first[-1] < 0.5 * first[0]


def one_closes_first() -> list[float]:
    """No process group is there before the first engine, which makes it and leaves it before the second."""
    first, second = (lowtide.initialize(models.mlp(), SECOND.as_config()) for _ in range(2))
    first.close()
    first.close()
    batches = [share_of(SECOND.global_batch(step, second.world_size)) for step in range(2)]
    losses = [second.train_step(batch).loss.item() for batch in batches]
    second.close()
    return losses


def test_an_engine_goes_on_when_the_one_that_made_the_process_group_is_closed(ranks: RankPool) -> None:
    both = ranks(2, one_closes_first, process_group=False)
    assert both[0] == both[1] and len(both[0]) == 2


def one_after_the_other(late_rank: int) -> list[float]:
    """Each engine makes the process group anew, while one rank has not left that of the engine before."""
    leave, losses = dist.destroy_process_group, []

    def leave_late() -> None:
        time.sleep(0.3 * (dist.get_rank() == late_rank))
        leave()

    with mock.patch("torch.distributed.destroy_process_group", leave_late):
        for _ in range(3):
            torch.manual_seed(0)
            engine = lowtide.initialize(models.mlp(), SECOND.as_config())
            losses.append(engine.train_step(share_of(SECOND.global_batch(0, engine.world_size))).loss.item())
            engine.close()
    return losses


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_rank_may_come_to_the_next_engine_before_another_has_left_the_last(ranks: RankPool, late_rank: int) -> None:
    both = ranks(2, one_after_the_other, late_rank, process_group=False)
    assert both[0] == both[1] == 3 * both[0][:1]


def with_a_store_that_outlives_groups() -> list[float]:
    """As under torchrun, whose agent keeps the store that the ranks meet in."""
    port, rank = int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    with mock.patch.dict(os.environ, {"TORCHELASTIC_USE_AGENT_STORE": "True"}):
        losses = one_after_the_other(late_rank=0)
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < 2:
        time.sleep(0.01)
    return losses


def test_engines_follow_each_other_where_the_launcher_keeps_the_store(ranks: RankPool) -> None:
    both = ranks(2, with_a_store_that_outlives_groups, process_group=False, timeout=10)
    assert both[0] == both[1] == 3 * both[0][:1]


FILES = {"device": "nvme", "nvme_path": "files"}
FORGOTTEN: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "sockets": {"communication": {"transport": "sockets"}},
    "in files": {"zero_optimization": {"stage": 3, "offload_optimizer": FILES, "offload_param": FILES}},
    "delayed": {"zero_optimization": {"stage": 2, "offload_optimizer": {**FILES, "overlap": "delayed"}}},
    "in backward": {"zero_optimization": {"stage": 3, "update_in_backward": True}, "gradient_clipping": 0.0},
    "recomputed, bf16": {"activation_checkpointing": {"every": 1}, "bf16": {"enabled": True}},
    "pipeline": {"parallel": {"pipeline": 2}, "zero_optimization": {"stage": 1}},
}


def forgotten(folder: str) -> dict[str, list[str]]:
    """By config, what is left of an engine that nobody has closed: threads, and its model."""
    os.chdir(folder)
    left = {}
    for name, config in FORGOTTEN.items():
        before = set(threading.enumerate())
        case = FIRST.at(config.get("zero_optimization", {}).get("stage", 3), config=config)
        engine = lowtide.initialize(case.build(), case.as_config())
        batch = case.global_batch(0, engine.data_size)
        engine.train_step(tuple(tensor.chunk(engine.data_size)[engine.data_rank] for tensor in batch))
        model = weakref.ref(engine.module)
        del engine
        deadline = time.monotonic() + 10
        while gc.collect() >= 0 and set(threading.enumerate()) - before and time.monotonic() < deadline:
            time.sleep(0.1)
        left[name] = [thread.name for thread in set(threading.enumerate()) - before]
        left[name] += ["model"] if model() is not None else []
    return left


def test_nothing_is_left_of_an_engine_that_is_forgotten(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, forgotten, str(tmp_path)) == [{name: [] for name in FORGOTTEN}] * 2
