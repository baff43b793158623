"""Agents that do not come, do not answer or do not reach each other: the user is told which, and nothing is started."""

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from lowtide.launch.hosts.facts import CheckResult
from lowtide.launch.hosts.host import Allocation, Host, LaunchError
from lowtide.launch.hosts.report import report_host
from lowtide.launch.job import peers
from lowtide.launch.job.peers import Peers
from lowtide.launch.job.preparation import Request, prepare_attempt
from lowtide.launch.transports.link import AgentTransport, Events, Link
from lowtide.launch.wire.channel import Channel
from lowtide.launch.wire.loop import Loop
from lowtide.launch.wire.messages import Check, Checked, Held, Hello, Hold, Leave, Message, Reach, Reached, Welcome
from tests.kit.training import refusal

Answer = Callable[[str, Message], Message | None]
HOSTS = ("n1", "n2", "n3")
CLOCK = re.compile(r"([+-]\d+\.\d{3}) s\b")


class ScriptedTransport(AgentTransport):
    """Its agents live in this process: what each answers is a function of the host and the message.

    answer: gives the agent's message, or None for silence; Beats are answered always. last: called before the last host
    sends its checks, which waits until those of all others have been taken.
    """

    advice = "This is the advice."

    def __init__(self, answer: Answer, last: Callable[[], None] | None = None) -> None:
        self._answer, self._last = answer, last
        self._channels: list[Channel] = []
        self.num_checked = 0  # taken by the launcher

    def start(self, loop: Loop, hosts: Sequence[str], events: Events) -> None:
        """See Transport."""
        self._loop = loop
        for index, host in enumerate(hosts):
            ours, theirs = (end.detach() for end in socket.socketpair())
            received = partial(self._received, index, host)
            agent = Channel(loop, theirs, os.dup(theirs), received, lambda reason: None, None, sends_beats=False)
            self._channels.append(agent)
            events.linked(Link(index, ours, os.dup(ours), False, None))

    def _received(self, index: int, host: str, message: Message) -> None:
        if (answer := self._answer(host, message)) is not None:
            self._send(index, answer)

    def _send(self, index: int, answer: Message) -> None:
        num_others = len(self._channels) - 1
        if self._last is not None and isinstance(answer, Checked) and index == num_others:
            if self.num_checked < num_others:
                self._loop.after(0.01, lambda: self._send(index, answer))
                return
            self._last()
        self._channels[index].send(answer)

    def why_lost(self, index: int) -> str:
        """See Transport."""
        return "this is what is known"

    def close(self) -> None:
        """See Transport."""
        for channel in self._channels:
            channel.close()


def prepare(
    loop: Loop,
    answer: Answer,
    said: list[str],
    seconds: float = 5.0,
    hosts: Sequence[str] = HOSTS,
    last: Callable[[], None] | None = None,
) -> None:
    """Raises LaunchError where agents with these answers do not make a job."""
    transport = ScriptedTransport(answer, last)
    allocation = Allocation("a test", "ssh", tuple(Host(name, (0,)) for name in hosts))

    def take(peer: peers.Peer, message: Message) -> None:
        found.answered(peer, message)
        transport.num_checked += isinstance(message, Checked)

    found = Peers(loop, hosts, transport, take, _unexpected, said.append)
    try:
        found.connect(seconds, lambda: False)
        prepare_attempt(found, Request(("python", "x"), "/"), allocation, lambda: False, said.append)
    finally:
        found.leave(Leave(0), 0)


def _unexpected(peer: peers.Peer, reason: str) -> None:
    raise AssertionError(f"lost {peer.name}: {reason}")


def well(host: str, message: Message) -> Message | None:
    """The answer of an agent whose host is fine, but to Check."""
    match message:
        case Welcome():
            report = report_host({}, list_nvidia=lambda: None)
            return Hello(None, (host,), 1, (f"10.0.0.{host[-1]}",), report)
        case Hold():
            return Held(2345)
        case Reach():
            return Reached(dict.fromkeys(message.addresses, "eth0"))
    return None


@pytest.mark.parametrize("hosts", [HOSTS, HOSTS[:1]])
def test_the_port_of_a_job_of_one_host_is_held_for_that_host_alone(loop: Loop, hosts: tuple[str, ...]) -> None:
    asked: list[Message] = []

    def answer(host: str, message: Message) -> Message | None:
        asked.extend([message] if isinstance(message, Hold) else [])
        return Checked(()) if isinstance(message, Check) else well(host, message)

    with contextlib.suppress(LaunchError):  # of checks that found nothing
        prepare(loop, answer, [], hosts=hosts)
    assert asked == [Hold(None, is_local=len(hosts) == 1)]


REACHED = {"n1": {"10.0.0.1": "lo"}, "n2": {"n1": "eth0"}, "n3": {}}
NO_HELLO = """1 of 3 hosts cannot be used; nothing was started:
  n2: no agent said hello within 0.3 s
this is what is known
This is the advice."""
NOT_REACHED = """\
no address of n1, the host of rank 0's store, can be reached from all hosts; tried n1, 10.0.0.1 at port 2345:
  n1 reaches 10.0.0.1
  n2 reaches n1
  n3 reaches {}
Check the firewall between the hosts. --master-port chooses a port that it lets through."""


@pytest.mark.parametrize(
    ("kind", "odd", "error"),
    [
        (Welcome, lambda host: None if host == "n2" else well(host, Welcome()), NO_HELLO),
        (Hold, lambda host: None, "no answer within 0.3 s from n1; nothing was started"),
        (Reach, lambda host: Reached(REACHED[host]), NOT_REACHED.format("none")),
        (Reach, lambda host: Reached(REACHED[host] or REACHED["n2"]), NOT_REACHED.format("n1")),
        (Hold, lambda host: Held(0, "port 80: it is taken"), "n1: port 80: it is taken"),
    ],
    ids=["no_hello", "no_answer", "not_reached", "not_by_itself", "port_taken"],
)
def test_hosts_that_cannot_be_used_are_named(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, kind: type, odd: Callable[[str], Message | None], error: str
) -> None:
    assert peers.ANSWER_SECONDS == 30
    monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.3)

    def answer(host: str, message: Message) -> Message | None:
        return odd(host) if isinstance(message, kind) else well(host, message)

    seconds = 0.3 if kind is Welcome else 5.0
    assert refusal(prepare, loop, answer, [], seconds, kind=LaunchError) == error


def test_checks_that_do_not_come_are_told_and_nothing_is_started(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.3)
    said: list[str] = []
    asked: list[str] = []

    def answer(host: str, message: Message) -> Message | None:
        if isinstance(message, Check):
            asked.append(host)
        return well(host, message)

    text = refusal(prepare, loop, answer, said, kind=LaunchError)
    assert text.startswith("nothing was started. Fix the faults above, or skip")
    assert sorted(asked) == list(HOSTS)
    assert any("no answer within 30 s" in line for line in said)


def test_a_slow_host_does_not_shift_the_clocks_of_the_remaining_hosts(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that stands still, but for the 20 s that the last host takes."""
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def wait() -> None:
        now[0] += 20

    def answer(host: str, message: Message) -> Message | None:
        if isinstance(message, Check):
            return Checked(tuple(CheckResult(name, time.time()) for name in ("clock_start", "clock_end")))
        return well(host, message)

    said: list[str] = []
    with contextlib.suppress(LaunchError):  # of checks that found nothing else
        prepare(loop, answer, said, last=wait)
    table = next(text for text in said if text.startswith("hosts of the job:"))
    offsets = {line.split()[0]: float(found[1]) for line in table.splitlines() if (found := CLOCK.search(line))}
    assert offsets == {"n1": 0.0, "n2": 0.0, "n3": -10.0}
