"""Agents that do not come, do not answer or do not reach each other: the user is told which, and nothing is started."""

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

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
NO_DELAY: Mapping[str, float] = MappingProxyType({})


class ScriptedTransport(AgentTransport):
    """Its agents live in this process: what each answers is a function of the host and the message.

    answer: gives the agent's message, or None for silence; Beats are answered always. late: seconds of a host's checks.
    """

    advice = "This is the advice."

    def __init__(self, answer: Answer, late: Mapping[str, float] = NO_DELAY) -> None:
        self._answer, self._late = answer, late
        self._channels: list[Channel] = []

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
            seconds = self._late.get(host, 0.0) if isinstance(answer, Checked) else 0.0
            self._loop.after(seconds, lambda: self._channels[index].send(answer))

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
    late: Mapping[str, float] = NO_DELAY,
) -> None:
    """Raises LaunchError where agents with these answers do not make a job."""
    transport = ScriptedTransport(answer, late)
    allocation = Allocation("a test", "ssh", tuple(Host(name, (0,)) for name in hosts))
    found = Peers(loop, hosts, transport, lambda peer, message: found.answered(peer, message), _unexpected, said.append)
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
  n2 reaches n1
  n3 reaches none
Check the firewall between the hosts. --master-port chooses a port that it lets through."""


@pytest.mark.parametrize(
    ("kind", "odd", "error"),
    [
        (Welcome, lambda host: None if host == "n2" else well(host, Welcome()), NO_HELLO),
        (Hold, lambda host: None, "no answer within 0.3 s from n1; nothing was started"),
        (Reach, lambda host: Reached(REACHED[host]), NOT_REACHED),
        (Hold, lambda host: Held(0, "port 80: it is taken"), "n1: port 80: it is taken"),
    ],
    ids=["no_hello", "no_answer", "not_reached", "port_taken"],
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


def test_a_slow_host_does_not_shift_the_clocks_of_the_remaining_hosts(loop: Loop) -> None:
    def answer(host: str, message: Message) -> Message | None:
        if isinstance(message, Check):
            return Checked(tuple(CheckResult(name, time.time()) for name in ("clock_start", "clock_end")))
        return well(host, message)

    said: list[str] = []
    with contextlib.suppress(LaunchError):  # of checks that found nothing else
        prepare(loop, answer, said, late={"n3": 1.0})
    table = next(text for text in said if text.startswith("hosts of the job:"))
    offsets = {line.split()[0]: float(found[1]) for line in table.splitlines() if (found := CLOCK.search(line))}
    assert offsets.keys() == set(HOSTS)
    assert max(abs(offsets[host]) for host in ("n1", "n2")) < 0.25
