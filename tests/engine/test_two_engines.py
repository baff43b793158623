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
import torch.distributed as dist

from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, start, take_step, train_all

FIRST = Case(models.short_gpt, models.token_batch, stage=3, clip=0.3)
SECOND = Case(models.mlp, models.vector_batch, stage=1, accumulation=3, config={"bf16": {"enabled": True}})


def alone_and_in_turn(cases: list[Case]) -> list[tuple[Outcome, Outcome]]:
    expected, outcomes = train_all(cases), [Outcome() for _ in cases]
    engines = [start(case) for case in cases]
    for step in range(3):
        for case, engine, outcome in zip(cases, engines, outcomes, strict=True):
            outcome.add(take_step(engine, case, step))
    for engine, outcome in zip(engines, outcomes, strict=True):
        outcome.state = engine.state_dict()
        engine.close()
    return list(zip(expected, outcomes, strict=True))


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_two_engines_take_turns(ranks: RankPool, transport: str) -> None:
    config = {"communication": {"transport": transport}}
    cases = [FIRST.at(3, config=config), SECOND.at(1, config=config), FIRST.at(2, config=config)]
    for expected, found in ranks(2, alone_and_in_turn, cases)[0]:
        assert found.differences(expected) == []


def one_closes_first() -> list[float]:
    """No process group is there before the first engine, which makes it and leaves it before the second."""
    first, second = start(SECOND), start(SECOND)
    first.close()
    first.close()
    losses = [take_step(second, SECOND, step).loss.item() for step in range(2)]
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
            with start(SECOND) as engine:
                losses.append(take_step(engine, SECOND, 0).loss.item())
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
FORGOTTEN: dict[str, Case] = {
    "shared memory": FIRST,
    "sockets": FIRST.at(3, config={"communication": {"transport": "sockets"}}),
    "in files": FIRST.at(3, config={"zero_optimization": {"offload_optimizer": FILES, "offload_param": FILES}}),
    "delayed": FIRST.at(2, config={"zero_optimization": {"offload_optimizer": {**FILES, "overlap": "delayed"}}}),
    "in backward": FIRST.at(3, clip=0.0, config={"zero_optimization": {"update_in_backward": True}}),
    "recomputed, bf16": FIRST.at(3, config={"activation_checkpointing": {"every": 1}, "bf16": {"enabled": True}}),
    "pipeline": FIRST.at(1, build=models.tiny_gpt, config={"parallel": {"pipeline": 2}}),
}


def forgotten(folder: str) -> dict[str, list[Any]]:
    """By config, what is left of an engine that nobody has closed: threads, and its model."""
    os.chdir(folder)
    left = {}
    for name, case in FORGOTTEN.items():
        before = set(threading.enumerate())
        engine = start(case)
        take_step(engine, case, 0)
        model = weakref.ref(engine.module)
        del engine
        deadline = time.monotonic() + 10
        while gc.collect() >= 0 and set(threading.enumerate()) - before and time.monotonic() < deadline:
            time.sleep(0.1)
        threads = [thread.name for thread in set(threading.enumerate()) - before]
        left[name] = [*threads, *([] if model() is None else ["model"])]
    return left


def test_nothing_is_left_of_an_engine_that_is_forgotten(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, forgotten, str(tmp_path)) == [{name: [] for name in FORGOTTEN}] * 2
