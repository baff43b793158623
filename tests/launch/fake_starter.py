"""Programs that act as SLURM's srun and MPI's mpirun, and really start a command on other hosts, over ssh.

    fake_starter.py srun FLAGS COMMAND        as srun does in a job's batch script
    fake_starter.py openmpi FLAGS COMMAND     as mpirun of Open MPI 4 and 5
    fake_starter.py hydra FLAGS COMMAND       as mpiexec of MPICH, and of Intel MPI
    fake_starter.py node                      what stands above a task on its host (slurmstepd, orted, hydra_pmi_proxy)

A flag that the real program does not have is an error. Kept of the real ones: what of the environment travels, the
variables that tasks find, that signals are passed on, that tasks outlive a starter which is killed (they notice
themselves), the exit status, and that mpirun ends all tasks when one fails.
"""

import argparse
import contextlib
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VERSIONS = {
    "srun": "slurm 23.11.4",
    "openmpi": "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/",
    "hydra": "HYDRA build details:\n    Version:                                 4.0.2",
}


@dataclass(frozen=True)
class Task:
    """A command on a host. environment: on top of what its host has; inherits_all: it has the starter's whole one."""

    host: str
    command: Sequence[str]
    environment: Mapping[str, str]
    inherits_all: bool


def install(kind: str, folder: Path) -> str:
    """Makes the program `kind` in `folder`, under its real name; gives a PATH that has it first."""
    folder.mkdir(exist_ok=True)
    name = {"srun": "srun", "openmpi": "mpirun", "hydra": "mpiexec"}[kind]
    program = folder / name
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {kind} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def srun_tasks(arguments: Sequence[str]) -> list[Task]:
    """One task a node of the list, with the variables of a job step."""
    parser = _parser("srun")
    for flag, short in (("nodes", "-N"), ("ntasks", "-n"), ("ntasks-per-node", None)):
        parser.add_argument(*filter(None, [f"--{flag}", short]), type=int)
    parser.add_argument("-w", "--nodelist", required=True)
    for flag in (
        "export",
        "input",
        "output",
        "error",
        "cpu-bind",
        "mpi",
        "gres",
        "kill-on-bad-exit",
        "mem",
    ):
        parser.add_argument(f"--{flag}")
    for flag in ("overlap", "exact", "unbuffered", "no-kill", "label"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args(arguments)
    job_nodes = os.environ["SLURM_TEST_NODES"].split(",")
    nodes = options.nodelist.split(",")
    if unknown := set(nodes) - set(job_nodes):
        parser.error(f"Requested nodes are not in the job's allocation: {','.join(unknown)}")
    if (options.nodes, options.ntasks) != (len(nodes), len(nodes)):
        parser.error(f"More processors requested than permitted: {options.nodes} nodes, {options.ntasks} tasks")
    return [
        Task(
            node,
            options.command,
            {
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NODELIST": options.nodelist,
                "SLURM_STEP_TASKS_PER_NODE": f"1(x{len(nodes)})",
                "SLURM_PROCID": str(index),
                "SLURM_NODEID": str(index),
                "SLURM_LOCALID": "0",
                "SLURMD_NODENAME": node,
            },
            options.export in (None, "ALL"),
        )
        for index, node in enumerate(nodes)
    ]


def openmpi_tasks(arguments: Sequence[str]) -> list[Task]:
    """One task a host; only what -x names travels to other hosts."""
    parser = _parser("openmpi")
    parser.add_argument("-np", "-n", type=int, required=True)
    parser.add_argument("--host", "-H", required=True)
    parser.add_argument("--map-by")
    parser.add_argument("--bind-to")
    parser.add_argument("-x", action="append", default=[])
    parser.add_argument("--allow-run-as-root", action="store_true")
    parser.add_argument("--tag-output", action="store_true")
    options = parser.parse_args(arguments)
    if os.getuid() == 0 and not options.allow_run_as_root and os.environ.get("OMPI_ALLOW_RUN_AS_ROOT") != "1":
        parser.error("mpirun has detected an attempt to run as root")
    hosts = [place.partition(":")[0] for place in options.host.split(",")]
    passed = dict(pair.split("=", 1) if "=" in pair else (pair, os.environ[pair]) for pair in options.x)
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return [
        Task(host, options.command, passed | dict(zip(names, map(str, (rank, len(hosts), 0, 1)), strict=True)), False)
        for rank, host in enumerate(hosts)
    ]


def hydra_tasks(arguments: Sequence[str]) -> list[Task]:
    """One task a host; the whole environment travels, unless -genvlist names a part."""
    parser = _parser("hydra")
    parser.add_argument("-n", "-np", type=int, required=True)
    parser.add_argument("-ppn", type=int)
    parser.add_argument("-hosts", required=True)
    parser.add_argument("-bind-to")
    parser.add_argument("-genvlist", default="")
    parser.add_argument("-genvall", action="store_true")
    options = parser.parse_args(arguments)
    hosts = options.hosts.split(",")
    passed = {name: os.environ[name] for name in options.genvlist.split(",") if name}
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return [
        Task(
            host,
            options.command,
            passed | dict(zip(names, map(str, (rank, len(hosts), 0, 1)), strict=True)),
            not options.genvlist,
        )
        for rank, host in enumerate(hosts)
    ]


def start(tasks: Sequence[Task], ends_all: bool) -> int:
    """Runs the tasks, passes signals on; the highest exit status. ends_all: one that fails ends the others."""
    running = {node.pid: node for node in map(_start_node, tasks)}

    def pass_on(number: int) -> None:
        for node in running.values():
            assert node.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                node.stdin.write(f"{number}\n")
                node.stdin.flush()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: pass_on(number))
    worst = 0
    while running:
        pid, status = os.wait()
        node = running.pop(pid)
        node.returncode = os.waitstatus_to_exitcode(status)
        if node.returncode and ends_all:
            print("Primary job terminated normally, but 1 process returned a non-zero exit code", file=sys.stderr)
            pass_on(signal.SIGTERM)
        worst = max(worst, node.returncode)
    return worst


def node() -> int:
    """Starts the task that stands on the first line of stdin; each number that follows is a signal for it."""
    stream = os.fdopen(os.dup(0), "rb", buffering=0)
    told = json.loads(stream.readline())
    os.chdir(told["folder"])
    environment = told["environment"] if told["inherits_all"] else {**os.environ, **told["environment"]}
    process = subprocess.Popen(told["command"], env=environment, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    wakeup, wakened = os.pipe()
    for fd in (wakeup, wakened):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wakened)
    selector = selectors.DefaultSelector()
    selector.register(wakeup, selectors.EVENT_READ)
    selector.register(stream, selectors.EVENT_READ)
    while process.poll() is None:
        for key, _ in selector.select():
            if key.fileobj == wakeup:
                os.read(wakeup, 1024)
            elif line := stream.readline():
                process.send_signal(int(line))
            else:
                selector.unregister(stream)
    return 128 - process.returncode if process.returncode < 0 else process.returncode


def _start_node(task: Task) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "node"]
    if task.host != platform.node():
        command = ["ssh", "-T", "-x", "-o", "BatchMode=yes", task.host, *command]
    told = {
        "command": list(task.command),
        "folder": os.getcwd(),
        "environment": {**os.environ, **task.environment} if task.inherits_all else dict(task.environment),
        "inherits_all": task.inherits_all,
    }
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps(told) + "\n")
    process.stdin.flush()
    return process


def _parser(kind: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=kind, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=VERSIONS[kind])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def main() -> int:
    """The command lines above."""
    kind, *arguments = sys.argv[1:]
    match kind:
        case "srun":
            return start(srun_tasks(arguments), ends_all=False)
        case "openmpi":
            return start(openmpi_tasks(arguments), ends_all=True)
        case "hydra":
            return start(hydra_tasks(arguments), ends_all=True)
        case "node":
            return node()
    raise SystemExit(f"unknown: {kind}")


if __name__ == "__main__":
    sys.exit(main())
