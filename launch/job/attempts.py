"""Restarts around attempts: on the hosts that are left, while there are enough of them and restarts are allowed.

[Note: which hosts go on]
A host whose agent was lost, or cannot be reached, is left out at once. A host on which a rank was the first to fail is
left out when that happens twice in a row there, if enough hosts remain; until then the failure is taken for chance. The
script goes on from its newest complete checkpoint where it loads `latest`; LOWTIDE_RESTART_COUNT tells it which attempt
it is in, and LOWTIDE_FIRST_WORLD_SIZE for how many ranks its batch was meant. A signal never leads to a restart.
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
    """Runs a job to its end, in as many attempts as it takes.

    make_transport: a fresh one for an attempt on the hosts of an allocation.
    """

    def __init__(
        self,
        request: Request,
        allocation: Allocation,
        make_transport: Callable[[Allocation], AgentTransport],
    ) -> None:
        if allocation.transport == "join" and request.max_restarts:
            raise LaunchError(
                "--max-restarts needs a transport that can start agents again, found launchers that somebody else has "
                "started on every host; let whoever started them do so again (a Kubernetes backoffLimit, requeueing "
                "in SLURM), or start one launcher with --hosts, --hostfile or --transport srun"
            )
        if request.min_hosts is not None and request.min_hosts > len(allocation.hosts):
            raise LaunchError(
                f"--min-hosts {request.min_hosts} asks for more hosts than there are: {allocation.source} has "
                f"{len(allocation.hosts)}; lower it, or name more hosts"
            )
        self._request = request
        self._make_transport = make_transport
        self._allocation = allocation
        self._hosts = list(allocation.hosts)
        self._most = min(request.max_hosts or len(self._hosts), len(self._hosts))
        self._least = min(request.min_hosts or self._most, self._most)
        self._blamed: tuple[str, int] = ("", 0)  # the host of the last first failure, how often in a row
        self._attempt = Attempt(str(uuid.uuid4()))  # without a first world size until the first attempt has a plan

    def run(self) -> int:
        """The exit status for the shell. Raises LaunchError where an attempt cannot begin."""
        while True:
            outcome = self._run_once()
            if outcome is None:  # hosts were not reached, and are left out
                continue
            may_restart = outcome.was_started and self._attempt.restarts < self._request.max_restarts
            if outcome.failure is None or not may_restart:
                return outcome.status
            self._leave_out(outcome)
            if len(self._hosts) < self._least:
                say(f"no restart: {len(self._hosts)} of the hosts are left, the job needs at least {self._least}")
                return outcome.status
            self._attempt = replace(self._attempt, restarts=self._attempt.restarts + 1)
            names = ", ".join(host.name for host in self._hosts[: self._most])
            say(f"restart {self._attempt.restarts} of {self._request.max_restarts} on {names}")

    def _run_once(self) -> JobOutcome | None:
        allocation = replace(self._allocation, hosts=tuple(self._hosts[: self._most]))
        loop = Loop()
        transport = self._make_transport(allocation)
        launcher = Launcher(loop, self._request, allocation, transport, self._attempt)
        try:
            outcome = launcher.run()
        except LaunchError as error:
            gone = launcher.unreachable_hosts
            self._drop(gone)
            if not (self._attempt.restarts and gone and len(self._hosts) >= self._least):
                raise
            say(f"{error}\nThe restart goes on without {', '.join(gone)}.")
            return None
        finally:
            loop.close()
        if self._attempt.first_world_size is None and launcher.plan is not None:
            self._attempt = replace(self._attempt, first_world_size=launcher.plan.world_size)
        self._tell(outcome, launcher)
        return outcome

    def _tell(self, outcome: JobOutcome, launcher: Launcher) -> None:
        if outcome.stopped_by is not None:
            say(f"stopped by {signal.Signals(outcome.stopped_by).name}; no rank is left")
        elif outcome.failure is not None:
            size = launcher.plan.world_size if launcher.plan is not None else 0
            many = self._allocation.transport != "local"
            say(obituary(outcome.failure, size, has_many_hosts=many, ended=outcome.ended))

    def _leave_out(self, outcome: JobOutcome) -> None:
        """See [Note: which hosts go on]."""
        if outcome.lost_hosts:
            self._drop(outcome.lost_hosts)
            self._blamed = ("", 0)
            return
        host = outcome.failure.host if outcome.failure is not None else ""
        count = self._blamed[1] + 1 if host == self._blamed[0] else 1
        self._blamed = (host, count)
        if host and count >= FAILURES_IN_A_ROW and len(self._hosts) > self._least:
            say(f"{host} is left out: the first failure was there {count} times in a row")
            self._drop([host])

    def _drop(self, names: Collection[str]) -> None:
        self._hosts = [host for host in self._hosts if host.name not in names]


def planned(request: Request, allocation: Allocation, transport: AgentTransport) -> JobPlan:
    """What would run where: asks the hosts what they have, and starts no rank."""
    loop = Loop()
    try:
        return Launcher(loop, request, allocation, transport, Attempt("")).only_plan()
    finally:
        loop.close()
