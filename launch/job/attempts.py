"""Run a job, with restarts on the remaining hosts while enough hosts and restarts are left.

[Note: remaining hosts]
A host is excluded at once if its agent is lost or cannot be reached. A host with the rank that failed first is
excluded after two such failures in a row, if enough hosts remain; a single failure counts as chance. A script that
loads `latest` continues from its newest complete checkpoint. It can read the attempt from LOWTIDE_RESTART_COUNT, and
the ranks that its batch was meant for from LOWTIDE_FIRST_WORLD_SIZE. After a signal there is no restart.
"""

import signal
import uuid
from collections.abc import Callable, Collection
from dataclasses import replace

from ..hosts.host import Allocation, LaunchError
from ..hosts.plan import JobPlan
from ..transports.link import AgentTransport
from ..wire.loop import Loop
from .display import say
from .launcher import Launcher
from .outcome import JobOutcome, obituary
from .preparation import Attempt, Request

FAILURES_IN_A_ROW = 2


class Attempts:
    """Run a job to its end, in as many attempts as needed.

    make_transport: makes a new transport for the hosts of an attempt.
    """

    def __init__(
        self,
        request: Request,
        allocation: Allocation,
        make_transport: Callable[[Allocation], AgentTransport],
    ) -> None:
        if allocation.transport == "join" and request.max_restarts:
            raise LaunchError(
                "--max-restarts needs a transport that can start agents again, found a launcher on every host. Let the "
                "system that started them restart them (a Kubernetes backoffLimit, requeueing in SLURM), or start a "
                "single launcher with --hosts, --hostfile or --transport srun"
            )
        if request.min_hosts is not None and request.min_hosts > len(allocation.hosts):
            raise LaunchError(
                f"--min-hosts {request.min_hosts} is more than the {len(allocation.hosts)} hosts of "
                f"{allocation.source}. Lower it, or name more hosts"
            )
        self._request = request
        self._make_transport = make_transport
        self._allocation = allocation
        self._hosts = list(allocation.hosts)
        self._most = min(request.max_hosts or len(self._hosts), len(self._hosts))
        # Without --min-hosts a restart needs as many hosts as the first attempt had.
        self._least = min(request.min_hosts or self._most, self._most)
        self._blamed: tuple[str, int] = ("", 0)  # host of the last first failure, and how often in a row
        self._attempt = Attempt(str(uuid.uuid4()))  # the first plan gives its first world size

    def run(self) -> int:
        """Run the job, and return the exit status for the shell. Raises LaunchError if an attempt cannot begin."""
        while True:
            outcome = self._run_once()
            if outcome is None:  # unreachable hosts were excluded: try again
                continue
            # An attempt that started no rank would fail in the same way again.
            may_restart = outcome.was_started and self._attempt.restarts < self._request.max_restarts
            if outcome.failure is None or outcome.stopped_by is not None or not may_restart:
                return outcome.status
            self._exclude(outcome)
            if len(self._hosts) < self._least:
                say(f"no restart: {len(self._hosts)} hosts are left, the job needs at least {self._least}")
                return outcome.status
            self._attempt = replace(self._attempt, restarts=self._attempt.restarts + 1)
            names = ", ".join(host.name for host in self._hosts[: self._most])
            say(f"restart {self._attempt.restarts} of {self._request.max_restarts} on {names}")

    def _run_once(self) -> JobOutcome | None:
        allocation = replace(self._allocation, hosts=tuple(self._hosts[: self._most]))
        loop = Loop()
        transport = self._make_transport(allocation)
        # Each attempt has new agents: those of the last attempt have left, and their hosts may be gone.
        launcher = Launcher(loop, self._request, allocation, transport, self._attempt)
        try:
            outcome = launcher.run()
        except LaunchError as error:
            gone = launcher.unreachable_hosts
            self._drop(gone)
            # In the first attempt an unreachable host is likely a typing error. The user should see it at once.
            if not (self._attempt.restarts and gone and len(self._hosts) >= self._least):
                raise
            say(f"{error}\nThe restart continues without {', '.join(gone)}.")
            return None
        finally:
            loop.close()
        if self._attempt.first_world_size is None and launcher.plan is not None:
            self._attempt = replace(self._attempt, first_world_size=launcher.plan.world_size)
        self._report(outcome, launcher)
        return outcome

    def _report(self, outcome: JobOutcome, launcher: Launcher) -> None:
        if outcome.failure is not None:
            size = launcher.plan.world_size if launcher.plan is not None else 0
            many = self._allocation.transport != "local"
            say(obituary(outcome.failure, size, has_many_hosts=many, ended=outcome.ended))
        elif outcome.stopped_by is not None:
            say(f"stopped by {signal.Signals(outcome.stopped_by).name}; no rank is left")

    def _exclude(self, outcome: JobOutcome) -> None:
        """Exclude hosts after a failure: see [Note: remaining hosts]."""
        if outcome.lost_hosts:
            self._drop(outcome.lost_hosts)
            self._blamed = ("", 0)
            return
        host = outcome.failure.host if outcome.failure is not None else ""
        count = self._blamed[1] + 1 if host == self._blamed[0] else 1
        self._blamed = (host, count)
        # `host` is "" for a failure without a host, for example a stall.
        if host and count >= FAILURES_IN_A_ROW and len(self._hosts) > self._least:
            say(f"{host} is excluded: the first failure was on it {count} times in a row")
            self._drop([host])

    def _drop(self, names: Collection[str]) -> None:
        self._hosts = [host for host in self._hosts if host.name not in names]


def planned(request: Request, allocation: Allocation, transport: AgentTransport) -> JobPlan:
    """Ask the hosts for their resources and return the plan, without starting a rank."""
    loop = Loop()
    try:
        return Launcher(loop, request, allocation, transport, Attempt("")).only_plan()
    finally:
        loop.close()
