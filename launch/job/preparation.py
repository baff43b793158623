"""What is settled with the agents before a rank starts: the plan, the place of rank 0's store, that all is well."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..checks.preflight import HostChecks, clock_offset, faults, folders_of_config, request_for, table
from ..hosts.host import Allocation, LaunchError
from ..hosts.plan import JobPlan, make_plan
from ..wire.messages import Check, Checked, Held, Hold, Reach, Reached
from .peers import ANSWER_SECONDS, Peers
from .request import Request

# gloo would listen at the address that the host's name leads to. "": its choice, where the name is not known.
_LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else ""


@dataclass(frozen=True)
class Prepared:
    """port: of rank 0's store. interfaces: host -> its interface that leads there; "": not known."""

    plan: JobPlan
    port: int
    interfaces: dict[int, str]


class Preparation:
    """Asks the agents. is_cut_short: a signal or a loss has ended the attempt. say: a line for the user."""

    def __init__(
        self,
        peers: Peers,
        request: Request,
        allocation: Allocation,
        is_cut_short: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._peers = peers
        self._request = request
        self._allocation = allocation
        self._is_cut_short = is_cut_short
        self._say = say

    def run(self) -> Prepared | None:
        """None where it was cut short. Raises LaunchError where the job cannot run like this."""
        plan = plan_of(self._peers, self._request, self._allocation)
        is_local = len(plan.hosts) == 1
        held = self._peers.ask({0: Hold(self._request.master_port, is_local)}, Held, self._is_cut_short)
        if self._is_cut_short():
            return None
        if held[0].error:
            raise LaunchError(f"{self._peers.all[0].name}: {held[0].error}")
        port = held[0].port
        interfaces = {0: _LOOPBACK_INTERFACE}
        if not is_local:
            address, interfaces = self._meeting_point(plan, port)
            if address != plan.master_address:
                plan = plan_of(self._peers, self._request, self._allocation, address)
        if not self._is_cut_short():
            self._check(plan, port)
        return None if self._is_cut_short() else Prepared(plan, port, interfaces)

    def _meeting_point(self, plan: JobPlan, port: int) -> tuple[str, dict[int, str]]:
        """The first address of rank 0's host that all others reach, and the interfaces that lead there."""
        first, *others = self._peers.all
        assert first.hello is not None
        candidates = tuple(dict.fromkeys([plan.master_address, *first.hello.addresses]))
        questions = {peer.index: Reach(candidates, port) for peer in self._peers.all}
        reached = self._peers.ask(questions, Reached, self._is_cut_short)
        if self._is_cut_short():
            return plan.master_address, {}
        for address in candidates:
            if all(address in reached[peer.index].interfaces for peer in others):
                return address, {index: _interface(found, address) for index, found in reached.items()}
        lines = [f"  {peer.name} reaches {', '.join(reached[peer.index].interfaces) or 'none'}" for peer in others]
        raise LaunchError(
            f"no address of {first.name}, where rank 0's store is to be, can be reached from all other hosts; tried "
            f"{', '.join(candidates)} at port {port}:\n" + "\n".join(lines) + "\nIs there a firewall between them? "
            "--master-port chooses a port that it lets through."
        )

    def _check(self, plan: JobPlan, port: int) -> None:
        """Raises LaunchError after having shown what is wrong."""
        request = self._request
        folders = [*request.check_folders, *folders_of_config(request.arguments, Path(request.folder))]
        has_devices = any(peer.hello is not None and peer.hello.report.devices for peer in self._peers.all)
        if not request.preflight or not (len(plan.hosts) > 1 or folders or has_devices):
            return
        held_port = port if len(plan.hosts) > 1 else None
        checks = {host.index: Check(request_for(plan, host, folders, held_port)) for host in plan.hosts}
        sent = time.time()
        answers = self._peers.ask(checks, Checked, self._is_cut_short, is_complete=False)
        received = time.time()
        if self._is_cut_short():
            return
        checked = []
        for peer in self._peers.all:
            found = answers.get(peer.index)
            results = found.results if found is not None else ()
            report = peer.hello.report if peer.hello is not None else None
            offset = clock_offset(results, sent, received)
            error = "" if found is not None else f"no answer within {ANSWER_SECONDS:g} s"
            checked.append(HostChecks(peer.name, results, report, offset, error))
        wrong = faults(plan, checked)
        if len(plan.hosts) > 1 or wrong:
            self._say("hosts of the job:\n" + table(checked, wrong))
        for fault in wrong:
            self._say(f"{'' if fault.is_fatal else 'warning: '}{fault}")
        if any(fault.is_fatal for fault in wrong):
            raise LaunchError("nothing was started; mend what is said above, or disregard it with --no-preflight")


def _interface(found: Reached, address: str) -> str:
    """That leads to `address`; rank 0's host itself may know it as a loopback address, and then any of its others."""
    return found.interfaces.get(address) or next(filter(None, found.interfaces.values()), "")


def plan_of(peers: Peers, request: Request, allocation: Allocation, master_address: str | None = None) -> JobPlan:
    """The plan for hosts that have all said Hello. Raises LaunchError where they have less than is asked."""
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
