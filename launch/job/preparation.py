"""The user's request to the launcher, and the preparation of an attempt with the agents: plan, port, checks."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..hosts.host import Allocation, LaunchError
from ..hosts.plan import Bind, HostPlan, JobPlan, make_plan
from ..hosts.preflight import HostChecks, clock_offset, faults, folders_of_config, request_for, table
from ..wire.messages import Check, Checked, Held, Hold, Reach, Reached, Start
from .peers import ANSWER_SECONDS, Peers


@dataclass(frozen=True)
class Request:
    """The user's options, apart from the hosts.

    command: of a rank, starting with the interpreter. arguments: of the script. environment: see `job_environment`.
    grace_seconds: between asking a rank to stop and killing it. step_limit_seconds: None: as in the ranks' config.
    connect_seconds: limit for the agents of all hosts. min_hosts: the job ends with fewer; None: all. max_hosts:
    further hosts wait in reserve. notes_of_one_rank: shown if the job has a single rank.
    """

    command: tuple[str, ...]
    folder: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    quiet_ranks: bool = False
    log_dir: str | None = None
    grace_seconds: float = 15.0
    master_port: int | None = None
    bind: Bind = "auto"
    preflight: bool = True
    check_folders: tuple[str, ...] = ()
    step_limit_seconds: float | None = None
    on_stall: Literal["report", "stop"] = "report"
    connect_seconds: float = 60.0
    max_restarts: int = 0
    min_hosts: int | None = None
    max_hosts: int | None = None
    notes_of_one_rank: tuple[str, ...] = ()


# By default gloo listens at the address of the host's name. "": keep that, if the interface's name is unknown.
_LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else ""


@dataclass(frozen=True)
class Prepared:
    """A prepared attempt.

    port: of rank 0's store. interfaces: host index -> its interface towards the store, "" if unknown.
    """

    plan: JobPlan
    port: int
    interfaces: dict[int, str]


def prepare_attempt(
    peers: Peers, request: Request, allocation: Allocation, is_cut_short: Callable[[], bool], say: Callable[[str], None]
) -> Prepared | None:
    """Prepare an attempt with the agents, or return None if cut short.

    is_cut_short: a signal or a loss ended it. say: shows the user a line. Raises LaunchError if the job cannot run like
    this.
    """
    plan = plan_of(peers, request, allocation)
    is_local = len(plan.hosts) == 1
    held = peers.ask({0: Hold(request.master_port, is_local)}, Held, is_cut_short)
    if is_cut_short():
        return None
    if held[0].error:
        raise LaunchError(f"{peers.all[0].name}: {held[0].error}")
    port = held[0].port
    interfaces = {0: _LOOPBACK_INTERFACE}
    if not is_local:
        address, interfaces = _rendezvous_point(peers, plan, port, is_cut_short)
        if address != plan.master_address:
            # Planned again: the address is in every rank's environment.
            plan = plan_of(peers, request, allocation, address)
    checked = [] if is_cut_short() else _checked(peers, request, plan, port, is_cut_short)
    if is_cut_short():
        return None
    wrong = faults(plan, checked) if checked else []
    # On a single host without faults the table says nothing that the user does not know.
    if checked and (len(plan.hosts) > 1 or wrong):
        say("hosts of the job:\n" + table(checked, wrong))
    for fault in wrong:
        say(f"{'' if fault.is_fatal else 'warning: '}{fault}")
    if any(fault.is_fatal for fault in wrong):
        raise LaunchError("nothing was started. Fix the faults above, or skip the checks with --no-preflight")
    return Prepared(plan, port, interfaces)


def _rendezvous_point(
    peers: Peers, plan: JobPlan, port: int, is_cut_short: Callable[[], bool]
) -> tuple[str, dict[int, str]]:
    """Return the first address of rank 0's host that all hosts reach, and each host's interface towards it."""
    first = peers.all[0]
    assert first.hello is not None
    # The name that the user or the resource manager gave comes first, then the addresses of the host's interfaces.
    candidates = tuple(dict.fromkeys([plan.master_address, *first.hello.addresses]))
    reached = peers.ask({peer.index: Reach(candidates, port) for peer in peers.all}, Reached, is_cut_short)
    if is_cut_short():
        return plan.master_address, {}
    for address in candidates:
        if all(address in found.interfaces for found in reached.values()):  # the first host's ranks use it too
            return address, {index: _interface(found, address) for index, found in reached.items()}
    lines = [f"  {peer.name} reaches {', '.join(reached[peer.index].interfaces) or 'none'}" for peer in peers.all]
    raise LaunchError(
        f"no address of {first.name}, the host of rank 0's store, can be reached from all hosts; tried "
        f"{', '.join(candidates)} at port {port}:\n" + "\n".join(lines) + "\nCheck the firewall between the hosts. "
        "--master-port chooses a port that it lets through."
    )


def _checked(
    peers: Peers, request: Request, plan: JobPlan, port: int, is_cut_short: Callable[[], bool]
) -> list[HostChecks]:
    """Return the checks of all hosts; [] if they need none."""
    folders = [*request.check_folders, *folders_of_config(request.arguments, Path(request.folder))]
    has_devices = any(peer.hello is not None and peer.hello.report.devices for peer in peers.all)
    if not request.preflight or not (len(plan.hosts) > 1 or folders or has_devices):
        return []
    # On a single host the store listens at the loopback address, so reaching the held port proves nothing.
    held_port = port if len(plan.hosts) > 1 else None
    checks = {host.index: Check(request_for(plan, host, folders, held_port)) for host in plan.hosts}
    sent = time.time()
    answers = peers.ask(checks, Checked, is_cut_short, is_complete=False)
    checked = []
    for peer in peers.all:
        found = answers.get(peer.index)
        results = found.results if found is not None else ()
        report = peer.hello.report if peer.hello is not None else None
        error = "" if found is not None else f"no answer within {ANSWER_SECONDS:g} s"
        # By its arrival: `ask` returns when the slowest host has answered, and half of that wait would be an offset.
        offset = clock_offset(results, sent, peer.answered_at)
        checked.append(HostChecks(peer.name, results, report, offset, error))
    return checked


def _interface(found: Reached, address: str) -> str:
    """Return the interface towards `address`. Rank 0's host may see it as loopback: then any of its interfaces."""
    return found.interfaces.get(address) or next(filter(None, found.interfaces.values()), "")


def plan_of(peers: Peers, request: Request, allocation: Allocation, master_address: str | None = None) -> JobPlan:
    """Plan for hosts after the Hello of all agents. Raises LaunchError if they have too few resources."""
    reports = [peer.hello.report for peer in peers.all if peer.hello is not None]
    plan = make_plan(
        allocation,
        reports,
        request.command,
        request.folder,
        request.environment,
        request.bind,
        master_address,
    )
    return replace(plan, notes=(*plan.notes, *request.notes_of_one_rank)) if plan.world_size == 1 else plan


@dataclass(frozen=True)
class Attempt:
    """An attempt of a job. identity: of the job, the same in all attempts.

    restarts: number of attempts before. first_world_size: ranks of the first attempt; None in the first attempt.
    """

    identity: str
    restarts: int = 0
    first_world_size: int | None = None

    def start(self, prepared: Prepared, host: HostPlan, request: Request, inherits_terminal: bool) -> Start:
        """Return the message that starts a host's ranks."""
        plan, interface = prepared.plan, prepared.interfaces.get(host.index)
        # The variables of every rank that the plan does not know.
        more = {
            "MASTER_PORT": str(prepared.port),
            "LOWTIDE_RESTART_COUNT": str(self.restarts),
            "LOWTIDE_FIRST_WORLD_SIZE": str(self.first_world_size or plan.world_size),
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCHELASTIC_RUN_ID": self.identity,
            # Inside a torchrun job it is set, and rank 0 would connect to torchrun's store instead of opening a store.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        return Start(
            host=host,
            identity=self.identity,
            command=plan.command,
            folder=plan.folder,
            environment={**plan.environment, **more},
            # Without it gloo listens at the address of the host's name, and /etc/hosts often maps it to the loopback.
            defaults={"GLOO_SOCKET_IFNAME": interface} if interface else {},
            inherits_terminal=inherits_terminal,
            sends_output=not request.quiet_ranks,
            log_folder=request.log_dir,
            appends_logs=self.restarts > 0,
        )
