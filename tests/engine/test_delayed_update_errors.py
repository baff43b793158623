"""What goes wrong in a delayed update is raised on every rank, once it is known, and nothing waits in vain."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.engine.step.step_sums import NonFiniteGradientError
from lowtide.offload import FileStore, OffloadError
from tests.engine.delaying import MLP, OWN, Sgd, start, take_steps
from tests.kit.models import Explodes
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, Case, share_of
from tests.zero.test_delayed_update import delayed

PLACES = ("cpu", "nvme")


TOLD = (
    'offload_optimizer.overlap "delayed": update 2 failed on rank 1: RuntimeError: the third disk. Master weights and '
    "states are partly updated: continue from a checkpoint (engine.load_checkpoint)"
)


def breaks() -> None:
    raise RuntimeError("the third disk")


def errors_of(action: Callable[[], object]) -> str:
    try:
        action()
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


def break_and_recover(case: Case, folder: Path) -> tuple[list[str], list[float], list[float]]:
    """What is raised after rank 1 failed in update 2; losses after a load of an earlier save, and in another engine."""
    engine = start(case, optimizer=Sgd)
    take_steps(engine, case, 0, 1)
    engine.save_checkpoint(folder / "saved")
    with broken_updates(engine):
        take_steps(engine, case, 1, 2)
    steps = [errors_of(lambda: take_steps(engine, case, 2, 3)) for _ in range(2)]
    gives = (engine.state_dict, lambda: engine.save_checkpoint(folder), lambda: engine.export(folder / "weights"))
    found = steps + [errors_of(action) for action in gives]
    engine.load_checkpoint(folder / "saved")
    again = take_steps(engine, case, 1, 4)
    engine.close()
    engine = start(case, optimizer=Sgd)
    engine.load_checkpoint(folder / "saved")
    expected = take_steps(engine, case, 1, 4)
    engine.close()
    return found, again, expected


@pytest.mark.parametrize("stage", [0, 3])
def test_an_error_in_the_background_is_raised_on_every_rank_until_a_checkpoint_is_loaded(
    ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    for found, again, expected in ranks(2, break_and_recover, delayed(OWN, stage, tmp_path), tmp_path):
        assert found == [TOLD] * 5
        assert again == expected


def break_before_the_end(case: Case, how: str) -> tuple[str, str]:
    """What is raised by the call that comes first after a failure, and by close."""
    engine = start(case, optimizer=Sgd)
    take_steps(engine, case, 0, 1)
    with broken_updates(engine):
        take_steps(engine, case, 1, 2)
    first = errors_of(engine.state_dict) if how == "state_dict" else "none"
    return first, errors_of(engine.close)


@pytest.mark.parametrize(("how", "expected"), [("state_dict", (TOLD, "none")), ("close", ("none", TOLD))])
def test_an_error_that_was_not_told_is_told_by_the_next_call_or_by_close(
    ranks: RankPool, tmp_path: Path, how: str, expected: tuple[str, str]
) -> None:
    assert ranks(2, break_before_the_end, delayed(OWN, 1, tmp_path), how) == [expected, expected]


class FailsLater:
    """A transfer that begins, and fails when it is waited for."""

    def wait(self) -> None:
        raise OffloadError("the drive is full")


def break_the_drive(case: Case) -> list[str]:
    """What is raised in each step when rank 1's file cannot be written in the second."""
    engine = start(case)
    found = [errors_of(lambda: take_steps(engine, case, 0, 1))]
    engine.state_dict()  # its update has ended
    if engine.rank == 1:
        with mock.patch.object(FileStore, "save", lambda *_: FailsLater()):
            found.append(errors_of(lambda: take_steps(engine, case, 1, 2)))
            engine.memory()  # waits for its update
    else:
        found.append(errors_of(lambda: take_steps(engine, case, 1, 2)))
    found.append(errors_of(lambda: take_steps(engine, case, 2, 3)))
    engine.close()  # says nothing more
    return found


def test_an_error_of_the_drive_is_raised_on_every_rank_in_the_next_step(ranks: RankPool, tmp_path: Path) -> None:
    for before, during, after in ranks(2, break_the_drive, delayed(MLP, 1, tmp_path, "nvme")):
        assert (before, during) == ("none", "none")
        assert after == TOLD.replace("RuntimeError: the third disk", "OffloadError: the drive is full")


def test_a_failure_that_a_load_makes_void_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(delayed(OWN, 0, tmp_path), optimizer=Sgd)
    engine.save_checkpoint(tmp_path / "saved")
    monkeypatch.setattr(Sgd, "before_step", breaks)
    take_steps(engine, OWN, 0, 1)
    logging.getLogger("lowtide").propagate = True
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        engine.load_checkpoint(tmp_path / "saved")
    assert [record.getMessage() for record in caplog.records] == [
        TOLD.replace("update 2", "update 1").replace("rank 1", "rank 0")
    ]
    engine.close()


def values_after_a_bad_step(config: dict[str, Any], is_bad: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Explodes()
    engine = lowtide.initialize(model, config)
    for step in range(4):
        x = share_of((torch.randn(4, 5, generator=torch.Generator().manual_seed(step)),))
        if is_bad and step == 2:
            model.factor = 2.0
            with pytest.raises(NonFiniteGradientError, match="No parameter was updated"):
                engine.train_step(x)
            model.factor = 0.0
        engine.train_step(x)
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("place", PLACES)
def test_a_bad_gradient_leaves_the_update_before_it_under_way(ranks: RankPool, tmp_path: Path, place: str) -> None:
    config = {**delayed(MLP, 1, tmp_path, place).as_config(), "optimizer": ADAMW}
    plain, found = (ranks(2, values_after_a_bad_step, config, is_bad)[0] for is_bad in (False, True))
    assert [name for name, value in plain.items() if not torch.equal(found[name], value)] == []
