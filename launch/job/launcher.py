"""An attempt of a job: start agents, check hosts, start and watch ranks, and end all together.

    connect -> plan -> port and address of rank 0's store -> checks -> start -> watch -> stop -> leave

A signal or the loss of an agent may cut any of this short. In every case `run` returns only when all reachable
processes of the job are gone.
"""

import signal
import time
from collections.abc import Callable, Sequence

from ..agent.orphans import MAGIC, VARIABLE
from ..agent.process_tree import adopt_orphans, kill_descendants, reap_all
from ..hosts.host import Allocation, LaunchError
from ..hosts.plan import JobPlan
from ..transports.link import AgentTransport, Client
from ..wire.loop import Loop
from ..wire.messages import (
    Ended,
    Leave,
    Message,
    Output,
    ProgressReport,
    Signal,
    StackDump,
    Started,
)
from .display import Display
from .outcome import Failure, JobOutcome, StopSignals, outcome_of
from .peers import Peer, Peers
from .preparation import Attempt, Prepared, Request, plan_of, prepare_attempt
from .stall import StallWatch

_KILLED_SECONDS = 5.0  # for the kernel to remove a killed process and close its pipes
_STOP_AFTER_FAILURE_SECONDS = 3.0  # the remaining ranks cannot continue, and all must be gone within five seconds
_SECONDS = 10.0  # of a host that may be busy: an answer ends the wait
_SILENT_SECONDS = 1.0  # the host itself may be gone; a living agent also notices the silence and cleans up
_POLL_SECONDS = 0.02


class Sweeps:
    """Kills the job's processes on hosts with lost agents, all at once, with orphans.py. say: shows the user a line.

    A transport without a second way to a host is left alone: see `AgentTransport.orphans_command`.
    """

    def __init__(self, loop: Loop, transport: AgentTransport, identity: str, say: Callable[[str], None]) -> None:
        self._loop = loop
        self._transport = transport
        self._identity = identity
        self._say = say
        self._sweeps: list[tuple[str, Client, float, float]] = []  # host, and seconds and end of its time
        self._answers: dict[str, str] = {}  # by host, of those that have answered

    def begin(self, index: int, host: str, was_silent: bool) -> None:
        """Start to look on a host, without waiting."""
        command = self._transport.orphans_command(index, self._identity)
        if command is None:
            return
        seconds = _SILENT_SECONDS if was_silent else _SECONDS
        try:
            client = Client(self._loop, host, command, self._hold, is_link=False)
        except OSError as error:
            self._report_failure(host, str(error))
            return
        self._sweeps.append((host, client, seconds, time.monotonic() + seconds))

    def finish(self) -> None:
        """Wait until all have ended or their time is over, and show their results."""
        for host, client, seconds, deadline in self._sweeps:
            # The end of a client is no event of the loop, so it is polled.
            while client.exit_status is None and time.monotonic() < deadline:
                self._loop.run(lambda: False, _POLL_SECONDS)
            if client.exit_status is None:
                client.kill()
                how = f"no answer within {seconds:g} s"
            else:
                how = client.epitaph()  # reads the rest of its output
            client.close()
            answer = self._answers.pop(host, None)
            if answer is None:
                self._report_failure(host, how)
            elif answer:
                self._say(f"{host}: killed what the job had left there: {answer}")
        self._sweeps.clear()

    def _hold(self, host: str, line: str) -> None:
        # Of all lines, as they come: a remote shell may print more than a client keeps.
        if line.startswith(MAGIC):
            self._answers[host] = line.removeprefix(MAGIC).strip()

    def _report_failure(self, host: str, how: str) -> None:
        self._say(
            f"{host}: could not look for processes that the job left there: {how}\nIf that host is alive, find them "
            f"there by `grep -lz {VARIABLE}={self._identity} /proc/*/environ`."
        )


class Launcher:
    """Runs an attempt."""

    def __init__(
        self, loop: Loop, request: Request, allocation: Allocation, transport: AgentTransport, attempt: Attempt
    ) -> None:
        self._loop = loop
        self._request = request
        self._allocation = allocation
        self._transport = transport
        self._attempt = attempt
        self._display = Display(loop)
        hosts = [host.name for host in allocation.hosts]
        self._peers = Peers(loop, hosts, transport, self._take, self._lose, self._display.say)
        self._sweeps = Sweeps(loop, transport, attempt.identity, self._display.say)
        self._is_leaving = False
        self._prepared: Prepared | None = None
        self._pids: dict[int, int] = {}
        self._stall: StallWatch | None = None  # once the ranks start
        self._failures: list[Failure] = []  # that end the attempt, in the order of their messages
        self._lost_hosts: list[str] = []
        self._ended: list[int] = []  # ranks, with exit status 0 before any failure
        # If an agent and its guard are killed together, the kernel gives their ranks' children to this process.
        adopt_orphans()
        self._stop = StopSignals(loop, first=lambda number: self._peers.send(Signal(number)))

    @property
    def plan(self) -> JobPlan | None:
        """The plan, once the hosts have reported."""
        return None if self._prepared is None else self._prepared.plan

    @property
    def unreachable_hosts(self) -> tuple[str, ...]:
        """The hosts without an agent."""
        return tuple(peer.name for peer in self._peers.all if peer.hello is None)

    def run(self) -> JobOutcome:
        """Run the attempt. Raises LaunchError if it cannot begin."""
        status = 1  # of an attempt that cannot begin
        try:
            for stage in (self._connect, self._prepare, self._start):
                stage()
                if self._is_cut_short:
                    break
            self._watch()
            # The agents end with the job's status: under srun, mpirun and in pods it is the status of their task.
            status = self._outcome().status
        finally:
            self._leave(status)
        return self._outcome()

    def only_plan(self) -> JobPlan:
        """Return the plan: start agents, ask them, and end them."""
        try:
            self._connect()
            if self._stop.has_come:
                raise LaunchError(f"stopped by {self._stop.name}")
            return plan_of(self._peers, self._request, self._allocation)
        finally:
            self._leave(self._outcome().status)

    # -- before the ranks -------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._peers.connect(self._request.connect_seconds, lambda: self._stop.has_come)

    def _prepare(self) -> None:
        self._prepared = prepare_attempt(
            self._peers, self._request, self._allocation, lambda: self._is_cut_short, self._display.say
        )
        if self._prepared is not None:
            for note in self._prepared.plan.notes:
                if note not in self._allocation.notes:  # shown before
                    self._display.say(note)

    @property
    def _is_cut_short(self) -> bool:
        return self._stop.has_come or bool(self._failures)

    # -- the ranks --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        assert self._prepared is not None
        plan, request = self._prepared.plan, self._request
        hosts = {rank.rank: host.name for host in plan.hosts for rank in host.ranks}
        places = list(zip(self._peers.all, plan.hosts, strict=True))
        self._display.open(hosts, {rank.rank: peer for peer, host in places for rank in host.ranks})
        for peer, host in places:
            # Before Start is sent: if the agent is lost before it answers, these ranks count as lost.
            peer.running = {rank.rank for rank in host.ranks}
            peer.send(self._attempt.start(self._prepared, host, request, self._transport.inherits_terminal))
        self._stall = StallWatch(
            self._loop, self._peers, hosts, request.step_limit_seconds, self._display.say, self._take_stall
        )

    def _watch(self) -> None:
        """Wait until no rank is left. After a failure or a signal, stop the ranks and then kill them."""
        self._loop.run(lambda: not self._are_running or self._is_cut_short)
        if not self._are_running:
            return
        grace = self._request.grace_seconds
        # After a signal the ranks have it already: `StopSignals` sent it on when it came.
        if not self._stop.has_come:
            self._peers.send(Signal(signal.SIGTERM))
            grace = min(grace, _STOP_AFTER_FAILURE_SECONDS)
        self._loop.run(lambda: not self._are_running or self._stop.is_killed, grace)
        self._peers.send(Signal(signal.SIGKILL))
        # Limited: a process in an uninterruptible wait of a driver does not end even now.
        self._loop.run(lambda: not self._are_running, _KILLED_SECONDS)

    @property
    def _are_running(self) -> bool:
        return any(peer.running for peer in self._peers.all)

    def _take(self, peer: Peer, message: Message) -> None:
        match message:
            case Output(rank, text):
                self._display.output(rank, text)
            case Ended():
                self._bury(peer, message)
            case Started(_, error) if error:
                peer.running.clear()
                self._failures.append(Failure(time.monotonic(), 1, peer.name, text=f"{peer.name}: {error}"))
            case Started(pids):
                assert self.plan is not None
                ranks = [rank.rank for rank in self.plan.hosts[peer.index].ranks]
                self._pids.update(zip(ranks, pids, strict=True))
            case Signal(number):
                if not self._stop.has_come:
                    self._display.say(
                        f"the agent of {peer.name} received {signal.Signals(number).name}: the job is stopped"
                    )
                    self._stop.take(number)
            case ProgressReport():
                if self._stall is not None:
                    self._stall.progress(message)
            case StackDump():
                if self._stall is not None:
                    self._stall.stack(message)
            case _:
                self._peers.answered(peer, message)

    def _bury(self, peer: Peer, message: Ended) -> None:
        peer.running.discard(message.rank)
        if self._stall is not None:
            self._stall.gone(message.rank, message.status == 0)
        if message.status == 0:
            # Only ranks that ended before any failure: later, a rank may leave because it was asked to stop.
            self._ended += [] if self._failures else [message.rank]
            return
        assert peer.channel is not None
        self._failures.append(
            Failure(
                # The agent's clock of this event, as the launcher's clock: `first_of` compares hosts.
                clock=message.clock - peer.channel.clock_offset,
                uncertainty=peer.channel.clock_uncertainty,
                status=message.status,
                host=peer.name,
                rank=message.rank,
                pid=self._pids.get(message.rank, 0),
                last_lines=message.last_lines,
            )
        )

    def _lose(self, peer: Peer, reason: str) -> None:
        # The agents end now because they were told to.
        if self._is_leaving:
            return
        self._lost_hosts.append(peer.name)
        assert peer.channel is not None
        what = "the agent of this host" if self._allocation.transport == "local" else f"host {peer.name}"
        text, running = f"lost {what}: {reason}", set(peer.running)
        peer.running.clear()
        # Before the ranks start, nothing can be left to sweep.
        if self._stall is not None:
            for rank in running:
                self._stall.gone(rank, has_ended=False)
            self._sweeps.begin(peer.index, peer.name, peer.channel.was_silent)
        many, count = len(self._peers.all) > 1, len(running)
        if many:
            text += f"; its {count} rank{'s' if count > 1 else ''} are lost, and the other ranks were stopped"
        self._failures.append(Failure(peer.channel.lost_at, 1, peer.name, text=text))

    def _take_stall(self, late: Sequence[int]) -> None:
        if self._request.on_stall == "stop":
            text = f"{len(late)} rank{'s' if len(late) > 1 else ''} finished no step in time; all ranks were stopped"
            self._failures.append(Failure(time.monotonic(), 1, text=text))

    # -- the end ----------------------------------------------------------------------------------------------------

    def _leave(self, status: int) -> None:
        """End all agents with `status`, and wait until the ranks' output is shown, or a signal comes."""
        self._is_leaving = True
        if self._stall is not None:
            self._stall.close()
        # An agent may need this time twice: to see killed processes go, and to send the last output.
        self._peers.leave(Leave(status), 2 * _KILLED_SECONDS)
        self._sweeps.finish()
        kill_descendants()  # orphans are adopted here if an agent and its guard were killed together
        reap_all(_KILLED_SECONDS)
        self._display.close(self._stop)

    def _outcome(self) -> JobOutcome:
        return outcome_of(self._failures, self._lost_hosts, self._ended, self._stop, was_started=bool(self._pids))
