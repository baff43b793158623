"""Scripts on ranks that are forked from a Python which has torch already: each ends as any script does."""

import ctypes
import gc
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

from tests.kit.ranks import FORKS, WORKER_VARIABLES, environment, preloaded, reserved_port, slowness

TIMEOUT_SECONDS = 90
IMPORTS = "import json, os, sys, time\nimport torch, lowtide\n"


@dataclass
class End:
    """Of one rank: the status with which it left, when, and what it has said."""

    status: int
    seconds: float
    err: str


def run_on_two_ranks(script: str, folder: Path) -> list[End]:
    return run_on_ranks(2, script, folder)


def run_on_ranks(world_size: int, script: str, folder: Path) -> list[End]:
    """In the folder, with the variables of a launcher. TimeoutError: after 90 s of an idle machine."""
    FORKS.set_forkserver_preload(["tests.uncollected", *preloaded()])
    with reserved_port() as port:
        return _run_all(script, folder, [environment(rank, world_size, port) for rank in range(world_size)])


def _run_all(script: str, folder: Path, variables: list[dict[str, str]]) -> list[End]:
    """variables: of each rank."""
    asked = [{**os.environ, **WORKER_VARIABLES, **of_rank} for of_rank in variables]
    ranks = [FORKS.Process(target=_run, args=(script, folder, rank, given)) for rank, given in enumerate(asked)]
    with mock.patch.dict(os.environ, WORKER_VARIABLES):  # the first start is that of the process that is forked
        for rank in ranks:
            rank.start()
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(ranks)}
    ends = [0.0] * len(ranks)
    while running:
        ended = wait(list(running), slowness() * TIMEOUT_SECONDS)
        for sentinel in ended:
            ends[running.pop(sentinel)] = time.monotonic()
        if not ended:
            for process in ranks:
                process.kill()
            raise TimeoutError(f"the ranks have not ended in {TIMEOUT_SECONDS} s")
    for process in ranks:
        process.join()
    found = [(process.exitcode, (folder / f"rank{rank}.err").read_text()) for rank, process in enumerate(ranks)]
    return [End(status, seconds, err) for (status, err), seconds in zip(found, ends, strict=True) if status is not None]


def _run(script: str, folder: Path, rank: int, variables: dict[str, str]) -> None:
    """As Python runs a file: what is raised is printed, and the end of the interpreter runs what waits for it.

    A process of multiprocessing would leave without that.
    """
    gc.freeze()  # what was there before takes a second to go through when the interpreter goes
    gc.enable()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    os.dup2(os.open(f"rank{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    failed = ctypes.pythonapi.PyRun_SimpleString((IMPORTS + script).encode())  # leaves by itself where the script does
    ctypes.pythonapi.Py_Exit(1 if failed else 0)
