"""A script on two ranks that are forked from one Python, which has torch already: each ends as any script does."""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.ranks import environment, free_port

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 90
# The ranks leave the loop, and come to the end of the program when their script has ended.
FORKING = """
import json, os, sys, time
import torch, torch.distributed.checkpoint, lowtide, lowtide.engine.build

for request in sys.stdin:
    started = {}
    asked = json.loads(request)
    for rank, variables in enumerate(asked["ranks"]):
        child = os.fork()
        if not child:
            break
        started[child] = rank
    else:
        ends = {}
        while started:
            child, status = os.wait()
            ends[started.pop(child)] = os.waitstatus_to_exitcode(status), time.monotonic()
        print(json.dumps([ends[rank] for rank in range(2)]), flush=True)
        continue
    break
else:
    os._exit(0)
os.environ.clear()
os.environ.update(asked["environment"] | variables)
os.chdir(asked["folder"])
os.dup2(os.open(f"rank{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
exec(compile(asked["script"], "script", "exec"))
"""


@dataclass
class End:
    """Of one rank: the status with which it left, when, and what it has said."""

    status: int
    seconds: float
    err: str


@functools.cache
def _forking() -> subprocess.Popen[str]:
    """The Python that forks them; it ends with this process."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    atexit.register(process.__exit__, None, None, None)  # closes its pipes, and waits for it
    return process


def run_on_two_ranks(script: str, folder: Path) -> list[End]:
    """In the folder, with the variables of a launcher. TimeoutError: after 90 s."""
    process, port = _forking(), free_port()
    assert process.stdin is not None and process.stdout is not None
    asked: dict[str, Any] = {"script": script, "folder": str(folder)}
    asked["ranks"] = [environment(rank, 2, port) for rank in range(2)]
    asked["environment"] = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    process.stdin.write(json.dumps(asked) + "\n")
    process.stdin.flush()
    if not wait([process.stdout.fileno()], TIMEOUT_SECONDS):
        _forking.cache_clear()
        os.killpg(process.pid, signal.SIGKILL)
        raise TimeoutError(f"the ranks have not ended in {TIMEOUT_SECONDS} s")
    ends = enumerate(json.loads(process.stdout.readline()))
    return [End(status, seconds, (folder / f"rank{rank}.err").read_text()) for rank, (status, seconds) in ends]
