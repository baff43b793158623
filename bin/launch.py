"""`lowtide launch`: run a script as the ranks of a job, on this machine or on many."""

import argparse
import ast
import importlib.machinery
import os
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

from ..launch.agent.agent import SILENCE_SECONDS, TOKEN_VARIABLE
from ..launch.allocation.allocation import AllocationRequest, find_allocation
from ..launch.hosts.environment import job_environment
from ..launch.hosts.host import Allocation, LaunchError, TransportName
from ..launch.hosts.plan import LOCAL_RANK_WORD, Bind, command_of, printed_plan, printed_rank
from ..launch.job.attempts import Attempts, planned
from ..launch.job.display import say
from ..launch.job.preparation import Request
from ..launch.transports import transport_for
from ..launch.transports.join import become_agent
from ..launch.transports.link import AgentTransport
from .arguments import Parser

CONNECT_SECONDS = 60.0
JOIN_SECONDS = 600.0  # pods and tasks of one job may start minutes apart
_OF_A_JOB = (
    *("bind", "master_port", "quiet_ranks", "log_dir", "check_folder", "grace", "lost_after", "step_limit"),
    *("on_stall", "max_restarts", "min_hosts", "max_hosts"),
)
EPILOG = """examples:
  lowtide launch --nproc 2 examples/train_gpt.py --steps 100
  lowtide launch --nproc 4 --log-dir logs -m my_package.train --lr 1e-3
  lowtide launch --hosts node1:8,node2:8 train.py          by ssh, from a laptop or a node
  lowtide launch --hostfile hosts.txt --exclude node3 --print-plan train.py
  srun --nodes 4 --ntasks-per-node 1 lowtide launch train.py      a launcher on each node: they find each other
  lowtide launch --hostfile hosts.txt --max-restarts 3 --min-hosts 2 train.py
  lowtide launch --env "NOTE=two words" --env WANDB_API_KEY --env-file job.env train.py
  lowtide launch --nproc 2 -- script.py --help

Write options of lowtide before SCRIPT; everything after SCRIPT goes to the script.
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line of `lowtide launch`."""
    result = Parser(
        prog="lowtide launch",
        description="Run a Python script as the ranks of a job, on this machine or on many, with the environment that "
        "torchrun sets. If a rank fails, all ranks are stopped. The exit status is that of the first rank that failed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.removed = {"--islands": "for ranks that train apart use torchft (https://github.com/meta-pytorch/torchft)"}
    result.elsewhere = {  # DeepSpeed's launcher and torchrun
        "--num-gpus": "--nproc",
        "--nnodes": "--num-hosts",
        "--node-rank": "--host-index",
        "--master-addr": "--meet",
        "--launcher": "--transport",
    }
    _add_hosts(result.add_argument_group("hosts"))
    _add_ranks(result.add_argument_group("ranks"))
    _add_failure(result.add_argument_group("failures"))
    result.add_argument("script", metavar="SCRIPT", help="a Python file, or a module with -m")
    rest = result.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="passed to the script")
    rest.required = False  # argparse names a remainder among the missing arguments
    return result


def fault(options: argparse.Namespace) -> str | None:
    """Return the fault of a parsed command line, or None."""
    for name in ("grace", "step_limit", "max_restarts"):
        value = getattr(options, name)
        if value is not None and value < 0:
            return f"--{name.replace('_', '-')} must not be negative, found {value:g}"
    for name in ("min_hosts", "max_hosts"):
        value = getattr(options, name)
        if isinstance(value, int) and value < 1:
            return f"--{name.replace('_', '-')} must be at least 1, found {value}"
    for name in ("ssh_port", "master_port"):
        port = getattr(options, name)
        if port is not None and not 0 < port < 65536:
            return f"--{name.replace('_', '-')} must be from 1 to 65535, found {port}"
    if options.lost_after < 2:
        found = f"found {options.lost_after:g}"
        return f"--lost-after must be at least 2 seconds, because a sign of life comes each second, {found}"
    if options.min_hosts and options.max_hosts and options.min_hosts > options.max_hosts:
        return f"--min-hosts ({options.min_hosts}) must not be more than --max-hosts ({options.max_hosts})"
    if options.module:
        top = options.script.split(".")[0]
        if importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
            return f'no module "{top}" can be imported from {Path.cwd()}; check the name after -m'
    elif not Path(options.script).exists():
        return f'there is no script "{options.script}" in {Path.cwd()}; for a module write -m before its name'
    return None


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (without "launch"). Return the exit status, 2 for a wrong command line."""
    command_line = parser()
    options = command_line.parse_args(argv)
    if text := fault(options):
        command_line.error(text)
    try:
        allocation = find_allocation(_allocation_request(options), os.environ)
        request = _request(options, allocation)
    except LaunchError as error:
        command_line.error(str(error))
    try:
        return _run(options, allocation, request)
    except LaunchError as error:
        say(str(error))
        return 1


def _run(options: argparse.Namespace, allocation: Allocation, request: Request) -> int:
    def make_transport(allocation: Allocation) -> AgentTransport:
        return transport_for(
            allocation, options.lost_after, os.environ, request.log_dir is None, options.ssh_port, options.ssh_option
        )

    notes = (*allocation.notes, *_notes(options, allocation))
    if allocation.part == "agent" and allocation.rendezvous is not None:  # with --print-plan too: host 0 prints for all
        for note in notes:
            say(note)
        become_agent(allocation.rendezvous, JOIN_SECONDS, options.lost_after)
    if options.print_plan:
        if allocation.part == "rank":
            print(printed_rank(allocation, request.command, request.environment))
        else:
            print(printed_plan(planned(request, allocation, make_transport(allocation))))
        return 0
    for note in notes:
        say(note)
    if allocation.part == "rank":
        # The rank's numbers come last: nothing that the user passes may change them.
        environment = {**os.environ, **request.environment, **allocation.rank_environment}
        command = command_of(request.command, environment.get("LOCAL_RANK", "0"))
        # The starter of this rank waits for this process, so the script takes its place and its exit status.
        os.execve(command[0], command, environment)
    return Attempts(request, allocation, make_transport).run()


def _notes(options: argparse.Namespace, allocation: Allocation) -> list[str]:
    """Return notes about options that have no effect, and about a missing token."""
    defaults = parser()
    given = [name for name in _OF_A_JOB if getattr(options, name) != defaults.get_default(name)]
    if allocation.part == "rank" and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        return [f"no effect on a rank that was not started by lowtide: {names}"]
    notes = []
    if options.pass_local_rank is None and _local_rank_words(options):
        notes.append(
            f"each rank gets --local_rank=N, as from DeepSpeed's launcher, because {options.script} declares it and "
            "calls add_config_arguments; to omit it, use --no-pass-local-rank"
        )
    if options.min_hosts is not None and not options.max_restarts:
        notes.append("--min-hosts has no effect without --max-restarts")
    if allocation.part != "rank" and allocation.rendezvous is not None and not os.environ.get(TOKEN_VARIABLE):
        place = f"{allocation.rendezvous.address}:{allocation.rendezvous.port}"
        notes.append(
            f"LOWTIDE_TOKEN is not set: anyone who reaches {place}, or listens on it first, can run commands on this "
            "job's hosts; set LOWTIDE_TOKEN to the same secret on all hosts"
        )
    return notes


def _allocation_request(options: argparse.Namespace) -> AllocationRequest:
    """Return the options of the group "hosts", which have the names of the fields."""
    return AllocationRequest(**{field.name: getattr(options, field.name) for field in fields(AllocationRequest)})


def _request(options: argparse.Namespace, allocation: Allocation) -> Request:
    target = ["-m", options.script] if options.module else [options.script]
    target += _local_rank_words(options)
    return Request(
        command=(sys.executable, *target, *options.arguments),
        folder=str(Path.cwd()),
        arguments=tuple(options.arguments),
        environment=job_environment(options.env, options.env_file, os.environ, allocation.transport == "local"),
        quiet_ranks=options.quiet_ranks,
        log_dir=None if options.log_dir is None else str(options.log_dir),
        grace_seconds=options.grace,
        master_port=options.master_port,
        bind=options.bind,
        preflight=not options.no_preflight,
        check_folders=tuple(options.check_folder),
        step_limit_seconds=options.step_limit,
        on_stall=options.on_stall,
        notes_of_one_rank=_notes_of_one_rank(options),
        max_restarts=options.max_restarts,
        min_hosts=options.min_hosts,
        max_hosts=options.max_hosts,
        # Agents of a launcher that starts them come within seconds.
        connect_seconds=JOIN_SECONDS if allocation.transport == "join" else CONNECT_SECONDS,
    )


def _words(options: argparse.Namespace) -> set[str]:
    """Return the identifiers and strings in the script's source; nothing for a module, or if it is not Python."""
    try:
        # The source is parsed, not imported: importing would run the script.
        nodes = list(ast.walk(ast.parse("" if options.module else Path(options.script).read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return set()  # running the script gives the better error
    names = (getattr(node, key, None) for node in nodes for key in ("id", "attr", "arg", "value"))
    return {name for name in names if isinstance(name, str)}


def _notes_of_one_rank(options: argparse.Namespace) -> tuple[str, ...]:
    name, words = after_script(options, parser())
    if not name:
        return ()
    return (
        f"{name} was passed to the script, which runs as a single rank, because it comes after the script; if it is "
        f"for the launcher, write it before the script: lowtide launch {words} {options.script}",
    )


def after_script(options: argparse.Namespace, command_line: argparse.ArgumentParser) -> tuple[str, str]:
    """Return the first option of a command that is written after the script, and its words; ("", "") if there is none.

    An option that the script mentions is the script's.
    """
    known = {name: action for action in command_line._actions for name in action.option_strings if name[:2] == "--"}
    words = _words(options)
    for index, word in enumerate(options.arguments):
        name = word.partition("=")[0]
        action = known.get(name)
        if action is None or action.dest == "help" or words & {name, action.dest}:
            continue
        if getattr(options, action.dest) == action.default:
            takes_next = "=" not in word and action.nargs != 0
            return name, shlex.join(options.arguments[index : index + 1 + takes_next])
    return "", ""


def _local_rank_words(options: argparse.Namespace) -> list[str]:
    """Return `--local_rank=N`, as DeepSpeed's launcher passes it, if the script is to get it."""
    if any(word.partition("=")[0] == "--local_rank" for word in options.arguments):
        return []
    is_passed = options.pass_local_rank
    if is_passed is None:
        is_passed = {"add_config_arguments", "--local_rank"} <= _words(options)
    return [LOCAL_RANK_WORD] if is_passed else []


def _seconds(text: str) -> float:
    value = float(text)
    if value != value:  # nan: no time is longer, so the limit would never be reached
        raise ValueError
    return value


def _number_of_ranks(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'expected a number of ranks or "auto", found "{text}"') from error


_seconds.__name__ = "number"  # argparse prints `invalid number value`


def _add_hosts(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--nproc", type=_number_of_ranks, metavar="N|auto", help="ranks on each host (default: 1 per slot or device)")
    add("--hostfile", type=Path, metavar="FILE", help="a line per host: `name slots=8`; name[01-16] and comments work")
    add("--hosts", metavar="a:8,b:8", help="hosts with their slots")
    add("--include", metavar="a@b:0,2", help="use only these hosts, or these slots of them")
    add("--exclude", metavar="c", help="use all hosts but these")
    add(
        "--transport",
        choices=get_args(TransportName),
        help="how to reach the hosts (default: depends on how they are given)",
    )
    add("--ssh-port", type=int, metavar="PORT", help="port of ssh on the hosts")
    add(
        "--ssh-option",
        action="append",
        default=[],
        metavar="OPTION",
        help='an option for ssh: Name=Value, or --ssh-option="-F FILE"; repeatable',
    )
    add("--num-hosts", type=int, metavar="N", help="if you start the command on each host: the number of hosts")
    add("--host-index", type=int, metavar="I", help="if you start the command on each host: this host's index, from 0")
    add("--meet", metavar="HOST:PORT", help="if you start the command on each host: the address where host 0 listens")
    add("--print-plan", action="store_true", help="show hosts, ranks, devices, command and environment; start no rank")


def _add_ranks(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    add(
        "--pass-local-rank",
        action=argparse.BooleanOptionalAction,
        help="pass --local_rank=N to the script, as DeepSpeed's launcher does (default: if the script declares "
        "--local_rank and calls add_config_arguments)",
    )
    add("--env", action="append", default=[], metavar="K=V", help="set for every rank; K alone takes its value here")
    add("--env-file", action="append", type=Path, default=[], metavar="FILE", help="lines of K=V, set for every rank")
    add("--bind", choices=get_args(Bind), default="auto", help="how to bind ranks to cores (default: auto)")
    add("--master-port", type=int, metavar="PORT", help="port of the rendezvous of the ranks (default: a free port)")
    add("--quiet-ranks", action="store_true", help="show the output of rank 0 only")
    add(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="also write the output of each rank to DIR/rank0.log and so on, on its host",
    )


def _add_failure(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--no-preflight", action="store_true", help="do not compare and check the hosts before the start")
    add(
        "--check-folder",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder that every host must be able to write",
    )
    add(
        "--grace",
        type=_seconds,
        default=Request.grace_seconds,
        metavar="SECONDS",
        help="time for a rank to stop after a signal before it is killed (default: %(default)g)",
    )
    add(
        "--lost-after",
        type=_seconds,
        default=SILENCE_SECONDS,
        metavar="SECONDS",
        help="a host that is silent for this time is lost (default: %(default)g)",
    )
    add(
        "--step-limit",
        type=_seconds,
        metavar="SECONDS",
        help="if a step takes longer, report which ranks wait for which",
    )
    add("--on-stall", choices=("report", "stop"), default="report", help="what to do then (default: %(default)s)")
    add("--max-restarts", type=int, default=0, metavar="N", help="restarts after failures (default: 0)")
    add("--min-hosts", type=int, metavar="N", help="restart with fewer hosts, but at least N")
    add("--max-hosts", type=int, metavar="N", help="use at most N hosts at a time; more hosts are spares")
