"""Agents that do not come, do not answer or do not reach each other: the user is told which, and nothing is started."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowtide.launch.hosts.host import Allocation, Host, LaunchError
from lowtide.launch.job import peers
from lowtide.launch.job.peers import Peers
from lowtide.launch.job.preparation import Preparation, Prepared, Request
from lowtide.launch.wire.loop import Loop
from lowtide.launch.wire.messages import Check, Checked, Held, Hold, Leave, Message, Reach, Reached, Welcome
from tests.launch.fakes import ScriptedTransport, hello
from tests.launch.jobs import Job

Answer = Callable[[str, Message], Message | None]
HOSTS = ("n1", "n2", "n3")


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def prepared(
    loop: Loop, answer: Answer, said: list[str], seconds: float = 5.0, hosts: tuple[str, ...] = HOSTS
) -> Prepared | None:
    """What comes of agents with these answers."""
    transport = ScriptedTransport(answer)
    allocation = Allocation("a test", "ssh", tuple(Host(name, (0,)) for name in hosts))
    found = Peers(loop, hosts, transport, lambda peer, message: found.answered(peer, message), _unexpected, said.append)
    try:
        found.connect(seconds, lambda: False)
        return Preparation(found, Request(("python", "x"), "/"), allocation, lambda: False, said.append).run()
    finally:
        found.leave(Leave(0), 0)


def _unexpected(peer: peers.Peer, reason: str) -> None:
    raise AssertionError(f"lost {peer.name}: {reason}")


def well(host: str, message: Message) -> Message | None:
    """The answer of an agent whose host is fine, but to Check."""
    match message:
        case Welcome():
            return hello(host)
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
        prepared(loop, answer, [], hosts=hosts)
    assert asked == [Hold(None, is_local=len(hosts) == 1)]


def test_no_hello_in_time_names_the_hosts(loop: Loop) -> None:
    silent: Answer = lambda host, message: None if host == "n2" else well(host, message)  # noqa: E731
    with pytest.raises(LaunchError) as raised:
        prepared(loop, silent, [], seconds=0.3)
    assert str(raised.value) == (
        "1 of 3 hosts cannot be used; nothing was started:\n"
        "  n2: no agent said hello within 0.3 s\nthis is what is known\nThis is the advice."
    )


def test_no_answer_in_time_names_the_hosts(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.3)
    silent: Answer = lambda host, message: None if isinstance(message, Hold) else well(host, message)  # noqa: E731
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"^no answer within 0\.3 s from n1; nothing was started$"):
        prepared(loop, silent, [])
    assert time.monotonic() - start < 25  # of the 30 that it would be


def test_the_limit_for_an_answer_is_half_a_minute() -> None:
    assert peers.ANSWER_SECONDS == 30


def test_checks_that_do_not_come_are_told_and_nothing_is_started(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.3)
    said: list[str] = []
    asked: list[str] = []

    def answer(host: str, message: Message) -> Message | None:
        if isinstance(message, Check):
            asked.append(host)
        return well(host, message)

    with pytest.raises(LaunchError, match=r"^nothing was started. Fix the faults above, or skip"):
        prepared(loop, answer, said)
    assert sorted(asked) == list(HOSTS)
    assert any("no answer within 30 s" in line for line in said)


def test_no_address_that_all_reach_names_who_reaches_what(loop: Loop) -> None:
    def answer(host: str, message: Message) -> Message | None:
        if isinstance(message, Reach):
            return Reached({"n1": {"10.0.0.1": "lo"}, "n2": {"n1": "eth0"}, "n3": {}}[host])
        return well(host, message)

    with pytest.raises(LaunchError) as raised:
        prepared(loop, answer, [])
    assert str(raised.value) == (
        "no address of n1, the host of rank 0's store, can be reached from all hosts; tried n1, 10.0.0.1 at "
        "port 2345:\n  n2 reaches n1\n  n3 reaches none\nCheck the firewall between the hosts. --master-port chooses a "
        "port that it lets through."
    )


def test_a_port_that_cannot_be_held_is_told_with_its_host(loop: Loop) -> None:
    def answer(host: str, message: Message) -> Message | None:
        return Held(0, "port 80: it is taken") if isinstance(message, Hold) else well(host, message)

    with pytest.raises(LaunchError, match=r"^n1: port 80: it is taken$"):
        prepared(loop, answer, [])


def test_the_meeting_port_of_join_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        by_hand = ("--num-hosts", "2", "--host-index", "0", "--meet", f"127.0.0.1:{port}", "--nproc", "1")
        status, out, err = Job(tmp_path, "print('started')", *by_hand).finish()
    assert (status, out) == (1, "")
    assert f"cannot listen for agents at port {port}: " in err
    assert "Address already in use. End the program that has the port, or choose another port for all hosts" in err
    assert "(MASTER_PORT, or --meet HOST:PORT)" in err
