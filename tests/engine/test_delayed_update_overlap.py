"""A delayed update takes no time of the step, one thread, and the bytes that are written down."""

import threading
from pathlib import Path
from typing import Any

import pytest

import lowtide
from tests.engine.delaying import MLP, OWN, Sgd, start, take_steps
from tests.engine.test_optimizer_offload import Wide
from tests.kit.models import mlp, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, share_of
from tests.zero.test_delayed_update import delayed, in_precision


@pytest.mark.parametrize("stage", [0, 3])
def test_an_update_may_last_until_the_next_forward_has_been(
    tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(delayed(OWN, stage, tmp_path), optimizer=Sgd)
    changed = threading.Condition()
    num_forwards = 0
    saw_a_forward: list[bool] = []

    def count(*_: object) -> None:
        nonlocal num_forwards
        with changed:
            num_forwards += 1
            changed.notify_all()

    def wait_for_a_forward() -> None:
        number = engine.optimizer.num_steps
        with changed:
            saw_a_forward.append(changed.wait_for(lambda: num_forwards > number, 30))

    engine.module.register_forward_hook(count)
    monkeypatch.setattr(Sgd, "before_step", wait_for_a_forward)
    take_steps(engine, OWN, 0, 3)
    engine.eval_step(OWN.global_batch(3, 1))
    engine.close()
    assert saw_a_forward == [True] * 3 * len(engine.optimizer.shards)


def test_the_thread_ends_with_the_engine(tmp_path: Path) -> None:
    before = threading.active_count()
    for fails in (False, True):
        try:
            with start(delayed(MLP, 1, tmp_path)) as engine:
                take_steps(engine, MLP, 0, 2)
                assert threading.active_count() == before + 1
                if fails:
                    raise KeyError("of the caller's own")
        except KeyError:
            assert fails
        assert threading.active_count() == before


def bytes_after_a_step(config: dict[str, Any]) -> tuple[int, int]:
    engine = lowtide.initialize(Wide(384), config)
    engine.train_step(share_of(vector_batch(0, 2 * engine.world_size)))
    memory = engine.memory()
    engine.close()
    return memory.gradient_bytes, memory.optimizer_bytes


@pytest.mark.parametrize(("place", "precision", "bytes_per_element"), [
    ("cpu", "fp32", 8 + 4),  # two moments, and what the parameters become
    ("cpu", "bf16", 12),  # the master weights are that
    ("nvme", "fp32", 4),
    ("nvme", "bf16", 2),  # their rounded copy
])  # fmt: skip
def test_what_the_parameters_become_takes_the_bytes_of_the_plan(
    ranks: RankPool, tmp_path: Path, place: str, precision: str, bytes_per_element: int
) -> None:
    case = in_precision(Case(mlp, vector_batch), precision)
    num_elements = (73 + 73 + 2) * 1024  # of a shard of two; tests/engine/test_optimizer_offload.py
    for found in ranks(2, bytes_after_a_step, delayed(case, 3, tmp_path, place).as_config()):
        assert found == (0, bytes_per_element * num_elements)  # of the gradients that were used up nothing is left
