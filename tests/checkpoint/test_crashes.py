"""Two ranks are killed at random moments of saving: what `latest` names loads, and is the newest complete one."""

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from lowtide.checkpoint.folder import CheckpointFolder
from tests.engine.saving import engine_for, run_steps
from tests.kit.models import mlp, vector_batch
from tests.kit.ranks import RankError, RankPool
from tests.kit.training import Case

KILLS = 6  # each pair of stage and way to save
KEPT = 2
LONGEST_SECONDS = 0.08  # a save takes 10 to 30 ms


def save_until_killed(folder: Path, number: int, seconds: float) -> None:
    """Goes on where the last job was killed. Every third save replaces the one named `best`. Rank 0 tells its saves."""
    config = {"checkpoint": {"keep_last": KEPT, "async": number % 2 == 1}, "communication": {"timeout_seconds": 20}}
    case = Case(mlp, vector_batch, (0, 3, 1)[number % 3], config=config)
    engine = engine_for(case, 2)
    if CheckpointFolder(folder).latest() is not None:
        engine.load_checkpoint(folder)
    end = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    while True:
        run_steps(engine, case, engine.global_step, 1)
        engine.save_checkpoint(folder, None if engine.global_step % 3 else "best")
        if engine.rank == 0:
            with (folder.parent / "saves").open("a") as file:
                file.write(f"{engine.global_step}\n")
        if not end.is_alive():
            end.start()


@pytest.mark.slow
def test_no_kill_loses_what_a_save_has_promised(ranks: RankPool, tmp_path: Path) -> None:
    """Each job loads what the one before it has left, as two ranks, and goes on. Each checkpoint is read as a whole."""
    draw, target, saves = random.Random(1), CheckpointFolder(tmp_path / "run"), tmp_path / "saves"
    promised = num_hit = 0
    found = [0]
    for number in range(KILLS):
        saves.write_text("")
        with pytest.raises(RankError, match="Died"):
            ranks(2, save_until_killed, target.path, number, draw.uniform(0, LONGEST_SECONDS))
        steps = [int(line) for line in saves.read_text().splitlines()]
        # A save in the background has ended when the next begins.
        promised = max([promised, *(steps[:-1] if number % 2 else steps)])
        num_hit += bool(target.unfinished())
        checkpoint = target.open()
        checkpoint.verify()
        found.append(checkpoint.manifest.step)
        # Between the return of a save and the kill another one may have been completed.
        assert steps and promised <= found[-1] <= promised + 2, (number, steps, found)
        assert sum(tag != "best" for tag in target.tags()) <= KEPT + 2, number
    assert num_hit  # kills did hit a save
    assert found == sorted(found) and found[-1] > KILLS / 4
