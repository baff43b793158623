"""What strangers may do at the port where agents connect: little, for a short time, beside agents that come in."""

import contextlib
import itertools
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from lowtide.launch.hosts.host import LaunchError
from lowtide.launch.transports import listener as listener_module
from lowtide.launch.transports.link import Link
from lowtide.launch.transports.listener import MAX_STRANGERS, Listener
from lowtide.launch.wire import handshake
from lowtide.launch.wire.handshake import connected
from lowtide.launch.wire.loop import Loop
from lowtide.launch.wire.messages import Signal, encode

PATIENCE = 60.0  # seconds for what takes milliseconds, on a machine that is busy with other things
HOME = "127.0.0.1"


class Hall:
    """A listener in a loop, whom it let in, and what it said."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.links: list[Link] = []
        self.lines: list[str] = []
        self.strangers: list[socket.socket] = []
        events = Mock(linked=self.links.append, say=self.lines.append)
        self.listener = Listener(self.loop, 0, "token", events, 4.0)

    def visit(self, words: bytes = b"") -> socket.socket:
        """A stranger who says something."""
        stranger = socket.create_connection((HOME, self.listener.port), PATIENCE)
        self.strangers.append(stranger)
        with contextlib.suppress(OSError):
            stranger.sendall(words)
        return stranger

    def come(self, ends: list[Any], token: str = "token", seconds: float = PATIENCE) -> threading.Thread:
        """An agent connects in a thread: its file descriptor and its seal go to `ends`, or its error."""

        def connect() -> None:
            try:
                end: Any = connected(f"{HOME}:{self.listener.port}", token, seconds, lambda text: None)
            except LaunchError as error:
                end = error
            self.loop.post(lambda: ends.append(end))

        thread = threading.Thread(target=connect)
        thread.start()
        return thread

    def admit(self) -> None:
        """An agent comes in, and goes."""
        ends: list[Any] = []
        thread = self.come(ends)
        assert self.loop.run(lambda: bool(ends and self.links), PATIENCE)
        thread.join()
        os.close(ends[0][0])

    def close(self) -> None:
        self.listener.close()
        for stranger in self.strangers:
            stranger.close()
        self.loop.close()


@pytest.fixture
def hall() -> Iterator[Hall]:
    with contextlib.closing(Hall()) as hall:
        yield hall


def is_sent_away(stranger: socket.socket) -> bool:
    """Whether its connection has ended; after the greeting that everybody gets."""
    stranger.setblocking(False)
    try:
        while stranger.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


PROTOCOL = "it does not speak this launcher's protocol"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (b"GET / HTTP/1.1\r\n", f"{PROTOCOL}. Use the same lowtide on all hosts"),
        (encode(Signal(9)) + b"\n", PROTOCOL),
        (b"\x1b]0;owned\x07\x1b[2J\n", PROTOCOL),
        (b"0" * 64 + b" " + b"0" * 64 + b"\n", "it does not have this job's token"),
        (b"x" * (1 << 16), PROTOCOL),
    ],
    ids=["http", "command", "escapes", "proof", "endless"],
)
def test_a_wrong_word_ends_the_connection(hall: Hall, words: bytes, why: str) -> None:
    stranger = hall.visit(words)
    assert hall.loop.run(lambda: is_sent_away(stranger), PATIENCE)
    (line,) = hall.lines
    assert line.startswith(f"a connection from 127.0.0.1 was refused: {why}") and line.isprintable()
    assert hall.links == []


def test_a_stranger_that_goes_without_a_word_is_not_told(hall: Hall) -> None:
    hall.visit().close()
    hall.loop.run(lambda: False, 0.1)
    assert hall.lines == []


def test_an_agent_with_another_token_is_told_to_compare_them(hall: Hall) -> None:
    ends: list[Any] = []
    thread = hall.come(ends, token="wrong", seconds=0.3)
    assert hall.loop.run(lambda: bool(ends), PATIENCE)
    thread.join()
    assert "it ended the connection without a proof. LOWTIDE_TOKEN must be the same on all hosts" in str(ends[0])
    assert hall.links == []


def test_a_byte_now_and_then_does_not_prolong_the_time(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "PROOF_SECONDS", 0.4)
    stranger = hall.visit()

    def drip() -> None:
        with contextlib.suppress(OSError):
            stranger.send(b"0")
        hall.loop.after(0.05, drip)

    drip()
    start = time.monotonic()
    assert hall.loop.run(lambda: is_sent_away(stranger), PATIENCE)  # while it drips on
    assert time.monotonic() - start > 0.3
    assert hall.lines[0].endswith("it did not prove within 0.4 s that it has this job's token")


def test_an_agent_comes_in_beside_idle_strangers_of_which_few_are_kept(hall: Hall) -> None:
    for _ in range(300):
        hall.visit()
        hall.loop.run(lambda: False, 0.001)
    hall.admit()
    kept = [stranger for stranger in hall.strangers if not is_sent_away(stranger)]
    assert 0 < len(kept) <= MAX_STRANGERS and kept[-1] is hall.strangers[-1]
    assert len(hall.lines) == 1 and "128 connections wait for their proof, and this is the oldest" in hall.lines[0]
    hall.listener.close()
    assert len(hall.lines) == 2 and "more connections were refused, the last from 127.0.0.1" in hall.lines[1]


NO_MORE = "a connection from 127.0.0.1 was refused: this host gives no more connections (Too many open files)"


def test_where_no_descriptor_is_left_strangers_give_theirs_back(hall: Hall) -> None:
    hall.visit()
    assert hall.loop.run(lambda: bool(hall.listener._strangers), PATIENCE)
    waiting = hall.visit()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_fd = os.dup(0)
    os.close(next_fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd, before[1]))
    try:
        assert hall.loop.run(lambda: bool(hall.lines), PATIENCE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert is_sent_away(hall.strangers[0]) and not is_sent_away(waiting)
    assert hall.lines == [NO_MORE]
    hall.admit()


def test_an_agent_for_whom_no_descriptor_is_left_comes_again(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    dup, full = os.dup, [OSError(24, "Too many open files")]

    def dup_once_full(fd: int) -> int:
        if full:
            raise full.pop()
        return dup(fd)

    monkeypatch.setattr(os, "dup", dup_once_full)
    hall.admit()
    assert hall.lines[0] == NO_MORE


def test_a_flood_leaves_the_rest_of_the_loop_alone(hall: Hall) -> None:
    ticks: list[float] = []
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError), socket.create_connection((HOME, hall.listener.port), PATIENCE) as link:
                link.sendall(b"\x1b[31m" * 100)

    def tick() -> None:
        ticks.append(time.thread_time())  # of the loop's own: others may have the processor
        hall.loop.after(0.02, tick)

    tick()
    flooders = [threading.Thread(target=flood) for _ in range(4)]
    for flooder in flooders:
        flooder.start()
    try:
        hall.loop.run(lambda: False, 0.5)
        hall.admit()
    finally:
        is_over.set()  # or they would flood what comes after a failure, and pytest would not end
        hall.listener.close()
        for flooder in flooders:
            flooder.join()
    assert max(after - before for before, after in itertools.pairwise(ticks)) < 0.5
    assert len(hall.lines) <= 2


def test_an_agent_that_waits_says_so_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_SAY_SECONDS", 0.01)
    monkeypatch.setattr(handshake, "_PAUSE_SECONDS", 0.001)
    lines: list[str] = []
    with pytest.raises(LaunchError, match="no launcher at"):
        connected(f"{HOME}:1", "token", 0.3, lines.append)
    assert 0 < len(lines) < 6 and all("waiting for the launcher at" in line for line in lines)
