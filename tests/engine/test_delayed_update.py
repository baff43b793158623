"""Delayed updates: what is given out between steps has them all, errors come to every rank, and no step waits."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.offload import OffloadError
from tests.kit.models import mlp, short_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, differences, start, take_step
from tests.zero.delayed_update import train_delayed
from tests.zero.test_delayed_update import delayed, in_precision

GPT = Case(short_gpt, token_batch, steps=5)
MLP = Case(mlp, vector_batch, steps=5)
OWN = MLP.at(0, config={"optimizer": None})


def take_steps(engine: lowtide.Engine, case: Case, first: int, end: int) -> list[float]:
    """The losses of steps number first, ..., end - 1."""
    return [take_step(engine, case, step).loss.item() for step in range(first, end)]


class Sgd(torch.optim.SGD):
    """Plain SGD that calls something before each step, once the engine is built."""

    before_step: Callable[[], object] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        type(self).before_step()
        super().step(closure)


def save_and_load(saved: Case, loaded: Case, folder: Path) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses of a run that saves after step 2, those of one that goes on from there, and where the second ends."""
    with start(saved) as engine:
        losses = take_steps(engine, saved, 0, 3)
        engine.save_checkpoint(folder / "saved")
        losses += take_steps(engine, saved, 3, 5)
    with start(loaded) as engine:
        take_steps(engine, loaded, 7, 9)  # with an update under way, which the load makes void
        engine.load_checkpoint(folder / "saved")
        return losses, take_steps(engine, loaded, 3, 5), engine.state_dict()


def test_a_save_loads_where_nothing_is_delayed(ranks: RankPool, tmp_path: Path) -> None:
    saved, loaded = delayed(GPT, 3, tmp_path), delayed(GPT, 1, tmp_path, overlap="speculative")
    _, again, _ = ranks(2, save_and_load, saved, loaded, tmp_path)[0]
    assert again == train_delayed(GPT, 2, settled_after=(2, 3, 4)).losses[3:]


@on_ranks(2)
def test_evaluating_and_looking_change_nothing(tmp_path: Path) -> None:
    case, losses, evaluated = delayed(GPT, 3, tmp_path), list[float](), list[float]()
    with start(case) as engine:
        plain = take_steps(engine, case, 0, case.steps)
    with start(case) as engine:
        for step in range(case.steps):
            losses += take_steps(engine, case, step, step + 1)
            evaluated.append(engine.eval_step(case.share(engine, step + 1)).item())
            engine.memory()
            with engine.gathered():
                assert all(bool(param.isfinite().all()) for param in engine.module.parameters())
    assert losses == plain
    assert evaluated[:-1] == losses[1:]  # what is evaluated is what the next step computes with


def values_given_out(case: Case, folder: Path) -> list[dict[str, Tensor]]:
    """After the last step: the state dict, the export loaded elsewhere, the module of an engine that is closed."""
    engine = start(case)
    take_steps(engine, case, 0, case.steps)
    engine.export(folder / "weights")
    engine.close()
    module = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    with start(case) as engine:
        take_steps(engine, case, 0, case.steps)
        state = engine.state_dict()
        take_steps(engine, case, 5, 7)
        engine.load_weights(folder / "weights")
        return [state, engine.state_dict(), module]


def test_what_is_given_out_has_all_updates(ranks: RankPool, tmp_path: Path) -> None:
    expected = train_delayed(GPT, 2).state
    for values in ranks(2, values_given_out, delayed(GPT, 2, tmp_path, "nvme"), tmp_path)[0]:
        assert differences(expected, values) == []


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (3, "fp32")])
@on_ranks(2)
def test_a_change_of_parameters_comes_after_the_update_that_is_under_way(
    tmp_path: Path, stage: int, precision: str
) -> None:
    """Both steps compute with what was set: the first one's own update is late, and there is none before it."""
    case = delayed(in_precision(GPT, precision), stage, tmp_path)
    with start(case) as engine:
        take_steps(engine, case, 0, 3)
        with torch.no_grad(), engine.gathered(modify=True):
            for param in engine.module.parameters():
                param.fill_(0.5)
        evaluated = [engine.eval_step(case.share(engine, step)).item() for step in (3, 4)]
        assert take_steps(engine, case, 3, 5) == evaluated


TOLD = (
    'offload_optimizer.overlap "delayed": update 2 failed on rank 1: RuntimeError: the third disk. Master weights and '
    "states are partly updated: continue from a checkpoint (engine.load_checkpoint)"
)


def breaks() -> None:
    raise RuntimeError("the third disk")


def error_of(action: Callable[..., object], *given: Any) -> str:
    try:
        action(*given)
    except OffloadError as error:
        return str(error)
    return "none"


@contextmanager
def broken_updates(engine: lowtide.Engine) -> Iterator[None]:
    """Those of rank 1 that begin meanwhile."""
    engine.state_dict()  # waits for the one before
    if engine.rank == 1:
        Sgd.before_step = staticmethod(breaks)
    try:
        yield
    finally:
        engine.memory()  # waits too, for this rank's alone
        Sgd.before_step = staticmethod(lambda: None)


@on_ranks(2)
def test_an_error_in_the_background_is_raised_on_every_rank_until_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    case = delayed(OWN, 3, tmp_path)
    with start(case, optimizer=Sgd) as engine:
        take_steps(engine, case, 0, 1)
        engine.save_checkpoint(tmp_path / "saved")
        with broken_updates(engine):
            take_steps(engine, case, 1, 2)
        found = [error_of(take_step, engine, case, 2) for _ in range(2)]
        found += [error_of(engine.state_dict), error_of(engine.save_checkpoint, tmp_path)]
        assert [*found, error_of(engine.export, tmp_path / "weights")] == [TOLD] * 5
        engine.load_checkpoint(tmp_path / "saved")
        again = take_steps(engine, case, 1, 4)
    with start(case, optimizer=Sgd) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert take_steps(engine, case, 1, 4) == again


@pytest.mark.parametrize(("how", "expected"), [("state_dict", (TOLD, "none")), ("close", ("none", TOLD))])
@on_ranks(2)
def test_an_error_that_was_not_told_is_told_by_the_next_call_or_by_close(
    tmp_path: Path, how: str, expected: tuple[str, str]
) -> None:
    case = delayed(OWN, 1, tmp_path)
    engine = start(case, optimizer=Sgd)
    take_steps(engine, case, 0, 1)
    with broken_updates(engine):
        take_steps(engine, case, 1, 2)
    first = error_of(engine.state_dict) if how == "state_dict" else "none"
    assert (first, error_of(engine.close)) == expected


def test_a_failure_that_a_load_makes_void_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(delayed(OWN, 0, tmp_path), optimizer=Sgd) as engine:
        engine.save_checkpoint(tmp_path / "saved")
        monkeypatch.setattr(Sgd, "before_step", breaks)
        take_steps(engine, OWN, 0, 1)
        logging.getLogger("lowtide").propagate = True
        with caplog.at_level(logging.WARNING, logger="lowtide"):
            engine.load_checkpoint(tmp_path / "saved")
    told = TOLD.replace("update 2", "update 1").replace("rank 1", "rank 0")
    assert [record.getMessage() for record in caplog.records] == [told]


@pytest.mark.parametrize("stage", [0, 3])
def test_an_update_may_last_until_the_next_forward_has_been(
    tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(delayed(OWN, stage, tmp_path), optimizer=Sgd)
    has_changed = threading.Condition()
    num_forwards = 0
    saw_a_forward: list[bool] = []

    def count(*_: object) -> None:
        nonlocal num_forwards
        with has_changed:
            num_forwards += 1
            has_changed.notify_all()

    def wait_for_a_forward() -> None:
        number = engine.optimizer.num_steps
        with has_changed:
            saw_a_forward.append(has_changed.wait_for(lambda: num_forwards > number, 30))

    engine.module.register_forward_hook(count)
    monkeypatch.setattr(Sgd, "before_step", wait_for_a_forward)
    take_steps(engine, OWN, 0, 3)
    engine.eval_step(OWN.global_batch(3, 1))
    engine.close()
    assert saw_a_forward == [True] * 3 * len(engine.optimizer.shards)
