"""The launcher's connections to the agents of a job: connect, ask, send, and notice losses."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ..hosts.host import LaunchError
from ..transports.link import AgentTransport, Link
from ..wire.channel import Channel
from ..wire.loop import Loop
from ..wire.messages import Checked, Held, Hello, Leave, Message, Note, Reached, Welcome

ANSWER_SECONDS = 30.0  # for an agent to answer a question
_SAY_SECONDS = 10.0

Answer = TypeVar("Answer", Held, Reached, Checked)


@dataclass
class Peer:
    """A host. hello: None until its agent has spoken. lost: why it has no agent.

    running: its ranks that have started and not ended. answered_at: time.time() of its last answer to `ask`.
    """

    index: int
    name: str
    channel: Channel | None = None
    hello: Hello | None = None
    lost: str | None = None
    talk: list[str] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    answered_at: float = 0.0

    def send(self, message: Message) -> None:
        """Send to its agent, if any."""
        if self.channel is not None:
            self.channel.send(message)

    @property
    def is_here(self) -> bool:
        """Whether its agent can be reached."""
        return self.hello is not None and self.lost is None


class Peers:
    """Connects to all hosts over a transport. received, lost: called for agents that have said Hello.

    say: shows the user a line.
    """

    def __init__(
        self,
        loop: Loop,
        hosts: Sequence[str],
        transport: AgentTransport,
        received: Callable[[Peer, Message], None],
        lost: Callable[[Peer, str], None],
        say: Callable[[str], None],
    ) -> None:
        self.all = [Peer(index, name) for index, name in enumerate(hosts)]
        self._loop = loop
        self._transport = transport
        self._received = received
        self._lost = lost
        self._say = say
        self._is_leaving = False
        self._answers: dict[int, Message] = {}
        self._unknown: set[Channel] = set()  # linked, but their host is not known yet

    def connect(self, timeout_seconds: float, is_stopped: Callable[[], bool]) -> None:
        """Wait until every agent has said Hello, or `is_stopped`. Raises LaunchError if an agent is missing."""
        try:
            self._transport.start(self._loop, [peer.name for peer in self.all], self)
        except FileNotFoundError as error:
            raise LaunchError(
                f"the agents cannot be started: the program '{error.filename}' is not on the PATH of this host. "
                "Install it, load its module, or choose another --transport"
            ) from error
        except OSError as error:
            raise LaunchError(f"the agents cannot be started: {error}") from error
        self._reminder = self._loop.after(_SAY_SECONDS, partial(self._remind, 2 * _SAY_SECONDS))
        self._loop.run(
            lambda: is_stopped() or all(peer.hello is not None or peer.lost is not None for peer in self.all),
            timeout_seconds,
        )
        self._reminder.cancel()
        self._transport.admit_no_more()
        if is_stopped():
            return
        for peer in self.all:
            if peer.hello is None and peer.lost is None:
                more = self._transport.why_lost(peer.index) if peer.channel is not None else ""
                peer.lost = f"no agent said hello within {timeout_seconds:g} s" + (f"\n{more}" if more else "")
        missing = [peer for peer in self.all if peer.lost is not None]
        if missing:
            reasons = "\n".join(f"  {peer.name}: {peer.lost}" for peer in missing)
            many = f"{len(missing)} of {len(self.all)} hosts cannot be used" if len(self.all) > 1 else "no agent"
            raise LaunchError(f"{many}; nothing was started:\n{reasons}\n{self._transport.advice}")

    def send(self, message: Message) -> None:
        """Send to every agent."""
        for peer in self.all:
            peer.send(message)

    def linked(self, link: Link) -> None:
        """Take a new connection to an agent, from a transport."""
        peer = None if link.index is None else self.all[link.index]

        # Until Hello, `peer` is unknown for agents that connect themselves (srun, mpirun, join). Hello sets it.
        def received(message: Message) -> None:
            nonlocal peer
            if peer is not None and peer.hello is not None:
                self._take(peer, message)
            elif isinstance(message, Hello):
                peer = self._welcome(channel, message, peer)
            elif isinstance(message, Note):
                self._say(message.text)

        def lost(reason: str) -> None:
            self._unknown.discard(channel)
            if peer is not None:
                self._lose(peer, reason)

        talk = None
        if link.has_talk and peer is not None:
            name = peer.name
            talk = lambda line: self.talk(name, line)  # noqa: E731
        channel = Channel(
            self._loop,
            link.read_fd,
            link.write_fd,
            received,
            lost,
            link.silence_seconds,
            sends_beats=True,
            talk=talk,
            seal=link.seal,
        )
        if peer is None:
            self._unknown.add(channel)
        else:
            peer.channel = channel
        # The launcher speaks first: an agent collects its addresses (0.1 s) only if they are wanted.
        channel.send(Welcome(wants_addresses=len(self.all) > 1))

    def unreachable(self, index: int | None, reason: str) -> None:
        """Note that no agent will come from this host; None: from no further host."""
        for peer in self.all:
            if peer.hello is None and peer.lost is None and index in (None, peer.index):
                peer.lost = reason

    def say(self, text: str) -> None:
        """Show the user a line."""
        self._say(text)

    def talk(self, host: str, line: str) -> None:
        """Show a line that a program on the way to a host prints, for example ssh.

        Lines are kept until the host's Hello: an error would repeat them.
        """
        peer = next((peer for peer in self.all if peer.name == host), None)
        if not line.strip():
            return
        if peer is None or peer.hello is not None:
            self._say(f"{host}: {line}")
        elif line not in peer.talk:
            peer.talk.append(line)

    def ask(
        self,
        questions: Mapping[int, Message],
        kind: type[Answer],
        is_cut_short: Callable[[], bool],
        is_complete: bool = True,
    ) -> dict[int, Answer]:
        """Ask the agents and return their answers by host index. Answers are missing if it was cut short.

        Raises LaunchError if an answer is late, unless is_complete is False.
        """
        self._answers = {}
        for index, question in questions.items():
            self.all[index].send(question)
        self._loop.run(lambda: len(self._answers) == len(questions) or is_cut_short(), ANSWER_SECONDS)
        missing = [self.all[index].name for index in questions if index not in self._answers]
        if missing and is_complete and not is_cut_short():
            raise LaunchError(f"no answer within {ANSWER_SECONDS:g} s from {', '.join(missing)}; nothing was started")
        return {index: answer for index, answer in self._answers.items() if isinstance(answer, kind)}

    def answered(self, peer: Peer, message: Message) -> None:
        """Take an answer to `ask`."""
        self._answers[peer.index] = message
        peer.answered_at = time.time()

    def leave(self, message: Leave, timeout_seconds: float) -> None:
        """Send `message` to all agents, wait for them to end, then close the channels and the transport."""
        self._is_leaving = True
        for peer in self.all:
            # An agent without Hello would not answer Leave, and the wait below would last its full time.
            if peer.channel is not None and not peer.is_here:
                peer.channel.close()
        self.send(message)
        channels = [peer.channel for peer in self.all if peer.channel is not None]
        self._loop.run(lambda: not any(channel.is_open for channel in channels), timeout_seconds)
        for peer in self.all:
            if peer.channel is not None:
                peer.channel.close()
        for channel in self._unknown:
            channel.close()
        self._transport.close()

    def _take(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Note):
            self._say(f"{peer.name}: {message.text}" if len(self.all) > 1 else message.text)
        else:
            self._received(peer, message)

    def _welcome(self, channel: Channel, hello: Hello, peer: Peer | None) -> Peer | None:
        """Assign the agent to its host, and return the host; None if it is no host of this job."""
        if peer is None:
            self._unknown.discard(channel)
            peer = host_of(hello, [other for other in self.all if other.channel is None])
            if peer is None:
                self._refuse(channel, hello, "no host of this job waits for an agent from there")
                return None
            peer.channel = channel
        peer.hello = hello
        # The command of a step may have ended, and been reported for all hosts, just before this agent spoke.
        peer.lost = None
        for line in peer.talk:
            self._say(f"{peer.name}: {line}")
        return peer

    def _refuse(self, channel: Channel, hello: Hello, why: str) -> None:
        self._unknown.discard(channel)
        self._loop.post(channel.close)
        self._say(f"an agent ({', '.join(hello.names[:2])}, process {hello.pid}) was refused: {why}")

    def _lose(self, peer: Peer, reason: str) -> None:
        if self._is_leaving:
            return
        if peer.channel is not None and peer.channel.was_silent:
            # A client of a silent link would not end by itself, and `why_lost` would wait for it.
            self._transport.give_up(peer.index)
            more = ""
        else:
            more = self._transport.why_lost(peer.index)
        known = peer.hello is not None
        # Before Hello the client's words explain more than "the connection ended".
        peer.lost = more if more and not known else f"{reason} ({more})" if more else reason
        if known:
            self._lost(peer, peer.lost)

    def _remind(self, next_seconds: float) -> None:
        waiting = [peer.name for peer in self.all if peer.hello is None and peer.lost is None]
        if waiting:
            self._say(f"waiting for {', '.join(waiting[:8])}{', ...' if len(waiting) > 8 else ''}")
            self._reminder = self._loop.after(next_seconds, partial(self._remind, 2 * next_seconds))


def host_of(hello: Hello, waiting: Sequence[Peer]) -> Peer | None:
    """Return the host of an agent: by its index, a host name, an address, or the only host left."""
    if hello.index is not None:
        return next((peer for peer in waiting if peer.index == hello.index), None)
    for peer in waiting:
        if peer.name in hello.names:
            return peer
    for peer in waiting:
        if peer.name.split(".")[0] in {name.split(".")[0] for name in hello.names}:
            return peer
    for peer in waiting:
        # Last, because it asks the name service.
        if set(_addresses(peer.name)) & set(hello.addresses):
            return peer
    return waiting[0] if len(waiting) == 1 else None


def _addresses(name: str) -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(name, None)]
    except OSError:
        return []
