"""A script on two ranks of one Python, which imports torch once and forks: each rank ends as any script does."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import environment, free_port

ROOT = Path(__file__).parents[2]
FORK = """
import json, os, sys, time
import torch, lowtide, lowtide.engine.build

started = {}
for rank, variables in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        os.environ.update(variables)
        os.dup2(os.open(f"rank{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
        break
    started[child] = rank
else:
    ends = {}
    while started:
        child, status = os.wait()
        ends[started.pop(child)] = os.waitstatus_to_exitcode(status), time.monotonic()
    print(json.dumps([ends[rank] for rank in range(2)]))
    os._exit(0)
"""


@dataclass
class End:
    """Of one rank: the status with which it left, when, and what it has said."""

    status: int
    seconds: float
    err: str


def run_on_two_ranks(script: str, folder: Path) -> list[End]:
    """In the folder, with the variables of a launcher. TimeoutExpired: after 90 s."""
    port = free_port()
    variables = [environment(rank, 2, port) for rank in range(2)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    more = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORK + script, json.dumps(variables)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=os.environ | more, timeout=90)
    ends = enumerate(json.loads(ran.stdout))
    return [End(status, seconds, (folder / f"rank{rank}.err").read_text()) for rank, (status, seconds) in ends]
