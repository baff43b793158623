"""Two ranks are killed at random moments of saving: what `latest` names loads, and is the newest complete one.

One process has torch; a job is two forks of it, and takes less than a second.
"""

import ctypes
import os
import random
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import lowtide
import lowtide.engine.build
from lowtide.checkpoint.folder import CheckpointFolder
from tests.engine.saving import engine_for, run_steps
from tests.kit.models import mlp, vector_batch
from tests.kit.ranks import environment, free_port, in_a_new_process
from tests.kit.training import Case

KILLS = 18  # each pair of stage and way to save three times
WORLD_SIZE = 2
KEPT = 2
LONGEST_SECONDS = 0.08  # a save takes 10 to 30 ms


@dataclass
class Death:
    """What a job had done when it was killed, and what was found afterwards."""

    promised_step: int  # of the newest checkpoint whose save had returned
    found_step: int  # of what `latest` names
    was_saving: bool  # something unfinished was left
    num_automatic: int
    num_saves: int


@pytest.mark.slow
def test_no_kill_loses_what_a_save_has_promised(tmp_path: Path) -> None:
    """Each job loads what the one before it has left, as two ranks, and goes on. Each checkpoint is read as a whole."""
    deaths = in_a_new_process(killed, tmp_path / "run", 1, timeout=120)
    assert len(deaths) == KILLS
    for number, death in enumerate(deaths):
        # Between the return of a save and the kill another one may have been completed.
        assert death.promised_step <= death.found_step <= death.promised_step + 2, (number, death)
        assert death.num_saves > 0, (number, death)
        assert death.num_automatic <= KEPT + 2, (number, death)
    assert sum(death.was_saving for death in deaths) > KILLS / 5  # kills did hit a save
    found = [death.found_step for death in deaths]
    assert found == sorted(found) and found[-1] > KILLS / 4


def killed(folder: Path, seed: int) -> list[Death]:
    """How each job died. To be called in a process of its own, with one thread."""
    draw = random.Random(seed)
    deaths: list[Death] = []
    promised = 0
    target = CheckpointFolder(folder)
    for number in range(KILLS):
        is_async = number % 2 == 1  # the stage turns with 3: six pairs
        reader, writer = os.pipe()
        port = free_port()
        ranks = [fork_rank(rank, port, folder, number, is_async, reader, writer) for rank in range(WORLD_SIZE)]
        os.close(writer)
        steps = read_steps(reader, 1, 30.0)  # both ranks have loaded, and saved once
        time.sleep(draw.uniform(0, LONGEST_SECONDS))
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        for pid in ranks:
            os.waitpid(pid, 0)
        steps += read_steps(reader, 1 << 30, 5.0)
        os.close(reader)
        # A save in the background has ended when the next begins.
        promised = max([promised, *(steps[:-1] if is_async else steps)])
        was_saving, found_step, num_automatic = bool(target.unfinished()), 0, 0
        if promised or target.latest() is not None:
            checkpoint = target.open()
            checkpoint.verify()  # every value
            found_step = checkpoint.manifest.step
            num_automatic = sum(tag != "best" for tag in target.tags())
        deaths.append(Death(promised, found_step, was_saving, num_automatic, len(steps)))
    return deaths


def fork_rank(rank: int, port: int, folder: Path, number: int, is_async: bool, reader: int, writer: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.close(reader)
        os.environ.update(environment(rank, WORLD_SIZE, port))
        save_in_a_loop(folder, number, is_async, writer)
    finally:
        os._exit(1)


def save_in_a_loop(folder: Path, number: int, is_async: bool, writer: int) -> None:
    """Goes on where the last job was killed. Every third save replaces the one named `best`."""
    config = {"checkpoint": {"keep_last": KEPT, "async": is_async}, "communication": {"timeout_seconds": 20}}
    case = Case(mlp, vector_batch, (0, 3, 1)[number % 3], config=config)
    engine: lowtide.Engine = engine_for(case, WORLD_SIZE)
    if CheckpointFolder(folder).latest() is not None:
        engine.load_checkpoint(folder)
    while True:
        run_steps(engine, case, engine.global_step, 1)
        engine.save_checkpoint(folder, None if engine.global_step % 3 else "best")
        if engine.rank == 0:
            os.write(writer, f"{engine.global_step}\n".encode())


def read_steps(reader: int, count: int, seconds: float) -> list[int]:
    """The steps that rank 0 reports, until there are `count` or it is gone."""
    text = b""
    deadline = time.monotonic() + seconds
    while text.count(b"\n") < count:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(reader, 4096) if ready else b""
        if not data:
            break
        text += data
    return [int(line) for line in text.splitlines()]
