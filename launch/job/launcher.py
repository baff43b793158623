"""One attempt of a job: agents start, hosts are checked, ranks start, are watched, and end together.

    connect -> plan -> port and address of rank 0's store -> checks -> start -> watch -> stop -> leave

Any of it may be cut short by a signal or by the loss of an agent. Whatever happens, `run` comes back only when every
process of the job that can be reached is gone.
"""

import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..agent.process_tree import adopt_orphans, kill_descendants, reap_all
from ..hosts.host import Allocation, LaunchError
from ..hosts.plan import Plan
from ..transports.link import Transport
from ..wire.loop import Loop
from ..wire.messages import (
    Ended,
    GiveUp,
    Job,
    Kill,
    Leave,
    Message,
    Output,
    Progress,
    Refused,
    Shown,
    Signal,
    StackDump,
    Start,
    Started,
    Stopped,
)
from .display import Display, say
from .islands import Islands
from .obituary import Failure, first_of, how_it_ended, obituary
from .peers import Peer, Peers
from .preparation import Preparation, Prepared, plan_of
from .request import Request
from .stall import StallWatch
from .stop_signals import StopSignals
from .sweeps import Sweeps

_KILLED_SECONDS = 5.0  # how long the kernel may take to remove a killed process and close its pipes
_STOP_AFTER_FAILURE_SECONDS = 3.0  # the ranks that are left cannot go on, and all is to be gone within five seconds
_SHOWN_BYTES = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """status: for the shell. failure: the first, None where none was, or where a signal stopped the job.

    lost_hosts: whose agents were lost. was_started: whether ranks ran. ended: those that had ended with exit status 0
    before the failure.
    """

    status: int
    failure: Failure | None = None
    stopped_by: int | None = None
    lost_hosts: tuple[str, ...] = ()
    was_started: bool = False
    ended: tuple[int, ...] = ()


class Launcher:
    """The life of one attempt. identity: of the job, the same in all attempts.

    restarts: how many attempts came before it; first_world_size: the ranks of the first one, None in that one itself.
    """

    def __init__(
        self,
        loop: Loop,
        request: Request,
        allocation: Allocation,
        transport: Transport,
        identity: str,
        restarts: int = 0,
        first_world_size: int | None = None,
    ) -> None:
        self._loop = loop
        self._request = request
        self._allocation = allocation
        self._transport = transport
        self._identity = identity
        self._restarts = restarts
        self._first_world_size = first_world_size
        hosts = [host.name for host in allocation.hosts]
        self._peers = Peers(loop, hosts, transport, self._take, self._lose, self._say)
        self._sweeps = Sweeps(loop, transport, identity, self._say)
        self._lost_hosts: list[str] = []
        self._is_leaving = False
        self._prepared: Prepared | None = None
        self._islands: Islands | None = None
        self._pids: dict[int, int] = {}
        self._display: Display | None = None
        self._stall: StallWatch | None = None
        self._host_of: dict[int, int] = {}  # rank -> host
        self._owed: Counter[int] = Counter()  # host -> bytes that were shown and not told to its agent
        self._failures: list[Failure] = []
        self._ended: list[int] = []  # ranks, with exit status 0 before any failure
        adopt_orphans()
        self._stop = StopSignals(loop, first=lambda number: self._peers.send(Signal(number)))

    @property
    def plan(self) -> Plan | None:
        """None until the hosts have said what they have."""
        return None if self._prepared is None else self._prepared.plan

    @property
    def unreachable_hosts(self) -> tuple[str, ...]:
        """Those from which no agent came."""
        return tuple(peer.name for peer in self._peers.all if peer.hello is None)

    def run(self) -> Outcome:
        """The whole attempt. Raises LaunchError where it cannot begin."""
        try:
            for stage in (self._connect, self._prepare, self._start):
                stage()
                if self._is_cut_short:
                    break
            self._watch()
        finally:
            self._leave()
        return self._outcome()

    def only_plan(self) -> Plan:
        """Asks the hosts what they have, and starts nothing there but agents, which leave again."""
        try:
            self._connect()
            if self._stop.has_come:
                raise LaunchError(f"stopped by {self._stop.name}")
            return plan_of(self._peers, self._request, self._allocation)
        finally:
            self._leave()

    # -- before the ranks -------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._peers.connect(self._request.connect_seconds, lambda: self._stop.has_come)

    def _prepare(self) -> None:
        preparation = Preparation(self._peers, self._request, self._allocation, lambda: self._is_cut_short, self._say)
        self._prepared = preparation.run()
        if self._prepared is not None:
            if self._request.islands is not None:
                self._islands = Islands(self._prepared.plan, self._request.islands)
            for note in self._prepared.plan.notes:
                if note not in self._allocation.notes:  # those were said before
                    self._say(note)

    @property
    def _is_cut_short(self) -> bool:
        return self._stop.has_come or bool(self._failures)

    # -- the ranks --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        assert self._prepared is not None
        plan, request = self._prepared.plan, self._request
        hosts = {rank.rank: host.name for host in plan.hosts for rank in host.ranks}
        self._host_of = {rank.rank: host.index for host in plan.hosts for rank in host.ranks}
        self._display = Display(hosts, 0, self._note_shown, ended=lambda: self._loop.post(lambda: None))
        job = Job(
            identity=self._identity,
            command=plan.command,
            folder=plan.folder,
            environment=dict(plan.environment),
            inherits_terminal=self._transport.inherits_terminal,
            sends_output=not request.quiet_ranks,
            log_folder=request.log_dir,
            appends_logs=self._restarts > 0,
        )
        environment = self._environment(self._prepared)
        for peer, host in zip(self._peers.all, plan.hosts, strict=True):
            peer.running = {rank.rank for rank in host.ranks}
            interface = self._prepared.interfaces.get(peer.index)
            defaults = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
            keeps_store = self._islands is not None and host.index == 0
            peer.send(Start(host, job, environment, defaults, keeps_store, is_local=len(plan.hosts) == 1))
        self._stall = StallWatch(
            self._loop, self._peers, hosts, request.step_limit_seconds, self._say, self._take_stall
        )

    def _environment(self, prepared: Prepared) -> dict[str, str]:
        """What the plan cannot know."""
        return {
            "MASTER_PORT": str(prepared.port),
            "LOWTIDE_RESTART_COUNT": str(self._restarts),
            "LOWTIDE_FIRST_WORLD_SIZE": str(self._first_world_size or prepared.plan.world_size),
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts),
            "TORCHELASTIC_RUN_ID": self._identity,
            # Inside of a job of torchrun it is set, and rank 0 would look for torchrun's store instead of opening one.
            "TORCHELASTIC_USE_AGENT_STORE": str(self._islands is not None),
            **({} if self._islands is None else {"LOWTIDE_ISLAND_RANKS": str(self._islands.num_ranks)}),
        }

    def _watch(self) -> None:
        """Until no rank is left: ended by themselves, after a failure or a signal by us."""
        self._loop.run(lambda: not self._are_running or self._is_cut_short)
        if not self._are_running:
            return
        grace = self._request.grace_seconds
        if not self._stop.has_come:
            self._peers.send(Signal(signal.SIGTERM))
            grace = min(grace, _STOP_AFTER_FAILURE_SECONDS)
        self._loop.run(lambda: not self._are_running or self._stop.is_killed, grace)
        self._peers.send(Kill())
        self._loop.run(lambda: not self._are_running, _KILLED_SECONDS)

    @property
    def _are_running(self) -> bool:
        return any(peer.running for peer in self._peers.all)

    def _take(self, peer: Peer, message: Message) -> None:
        match message:
            case Output(rank, text):
                if self._display is not None:
                    self._display.output(rank, text.encode("latin-1"))
            case Ended():
                self._bury(peer, message)
            case Started(pids):
                assert self.plan is not None
                ranks = [rank.rank for rank in self.plan.hosts[peer.index].ranks]
                self._pids.update(zip(ranks, pids, strict=True))
            case Refused(text):
                peer.running.clear()
                self._failures.append(Failure(time.monotonic(), 1, peer.name, text=f"{peer.name}: {text}"))
            case Stopped(number):
                if not self._stop.has_come:
                    self._say(f"the agent of {peer.name} received {signal.Signals(number).name}: the job is stopped")
                    self._stop.take(number)
            case Progress():
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
        if message.status == 0 and not self._failures:
            self._ended.append(message.rank)
        if message.status == 0:
            return
        assert peer.channel is not None
        failure = Failure(
            clock=message.clock - peer.channel.clock.offset,
            uncertainty=peer.channel.clock.uncertainty,
            status=message.status,
            host=peer.name,
            rank=message.rank,
            pid=self._pids.get(message.rank, 0),
            last_lines=message.last_lines,
        )
        if not self._goes_on_without({message.rank}, failure):
            self._failures.append(failure)

    def _goes_on_without(self, ranks: set[int], failure: Failure) -> bool:
        """Whether other islands are left. Theirs are given up then, and everyone is told, once."""
        if self._islands is None or self.plan is None or self._is_cut_short:
            return False
        islands = {self._islands.of(rank) for rank in ranks}
        new = {island for island in islands if not self._islands.is_lost(island)}
        if not self._islands.lose(new):
            return False
        for island in sorted(new):
            why = failure.text if failure.rank is None else f"rank {failure.rank} {how_it_ended(failure.status)}"
            self._peers.send(GiveUp(island, self._islands.ranks(island), why))
        if new:
            what = ", ".join(self._islands.named(island) for island in sorted(new))
            has_many_hosts = self._allocation.transport != "local"
            text = obituary(failure, self.plan.world_size, has_many_hosts, lost=what)
            self._say(text if failure.rank is not None else f"{text}; {what} is lost, and the others go on")
        return True

    def _lose(self, peer: Peer, reason: str) -> None:
        if self._is_leaving:
            return
        self._lost_hosts.append(peer.name)
        assert peer.channel is not None
        what = "the agent of this host" if self._allocation.transport == "local" else f"host {peer.name}"
        text, running = f"lost {what}: {reason}", set(peer.running)
        for rank in peer.running:
            if self._stall is not None:
                self._stall.gone(rank, has_ended=False)
        peer.running.clear()
        if self._display is not None:  # the ranks were started
            self._sweeps.begin(peer.index, peer.name, peer.channel.was_silent)
        failure = Failure(peer.channel.lost_at, 1, peer.name, text=text)
        if peer.index and self._goes_on_without(running, failure):  # the first host has the store
            return
        many, count = len(self._peers.all) > 1, len(running)
        if many:
            text += f"; its {count} rank{'s' if count > 1 else ''} are given up, and the others were stopped"
        self._failures.append(replace(failure, text=text))

    def _take_stall(self, late: Sequence[int]) -> None:
        if self._request.on_stall == "stop":
            text = f"{len(late)} rank{'s' if len(late) > 1 else ''} made no step in time; all ranks were stopped"
            self._failures.append(Failure(time.monotonic(), 1, text=text))

    # -- what the user sees -----------------------------------------------------------------------------------------

    def _note_shown(self, rank: int, nbytes: int) -> None:
        self._loop.post(lambda: self._pay(rank, nbytes))

    def _pay(self, rank: int, nbytes: int) -> None:
        peer = self._peers.all[self._host_of[rank]]
        self._owed[peer.index] += nbytes
        if self._owed[peer.index] >= _SHOWN_BYTES:
            peer.send(Shown(self._owed[peer.index]))
            self._owed[peer.index] = 0

    def _say(self, text: str) -> None:
        if self._display is not None and not self._display.is_done:
            self._display.say(text)
        else:
            say(text)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Ends all agents, and waits until what the ranks have printed is shown; a signal ends that wait."""
        self._is_leaving = True
        if self._stall is not None:
            self._stall.close()
        self._peers.leave(Leave(self._outcome().status), 2 * _KILLED_SECONDS)
        self._sweeps.finish()
        kill_descendants()  # orphans that came here, should an agent and its guard have been killed together
        reap_all(_KILLED_SECONDS)
        if self._display is not None:
            display, signals = self._display, self._stop.count
            display.finish()
            if self._loop.run(lambda: display.is_done or self._stop.count > signals) and display.is_done:
                display.join()  # a restart forks, which is for processes of one thread

    def _outcome(self) -> Outcome:
        failure = first_of(self._failures)
        lost = tuple(self._lost_hosts)
        started = bool(self._pids)
        # Where the clocks do not tell which came first, a rank has ended because it was told to.
        latest = float("inf") if failure is None else failure.clock + failure.uncertainty
        stop = self._stop.number
        if stop is not None and latest > self._stop.time and (failure is not None or not started):
            return Outcome(128 + stop, None, stop, lost, started)
        return Outcome(0 if failure is None else failure.exit_status, failure, None, lost, started, tuple(self._ended))
