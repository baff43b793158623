"""Messages and the line that they travel on: unchanged values, loss, silence, backlog, clocks."""

import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowtide.launch.hosts.facts import CheckRequest, CheckResult
from lowtide.launch.hosts.plan import HostPlan, RankPlan
from lowtide.launch.hosts.report import report_host
from lowtide.launch.wire import messages
from lowtide.launch.wire.channel import MAGIC, Channel
from lowtide.launch.wire.loop import Loop
from lowtide.launch.wire.messages import (
    Beat,
    Ended,
    Hello,
    Message,
    Note,
    ProgressReport,
    Signal,
    Start,
    decode,
    encode,
)
from lowtide.watch.progress import RankProgress, Wait
from tests.launch.test_handshake import sealed
from tests.launch.test_plan import GPUS

ODD = "two words, \"quotes\", 'more',\nnew line\r\n\t\0 é \u2028 \udcff $HOME `ls` \\"
WAITS = Wait("gather of layers.7", 1, 120, 0, 1, 4, 31.4)
MESSAGES: list[Message] = [
    Start(
        HostPlan("h", 1, (RankPlan(3, 0, "GPU-1", (0, 1), {"A": ODD}), RankPlan(4, 1, None, (), {}))),
        "id",
        ("python", ODD),
        "/a b",
        {"NOTE": ODD},
    ),
    messages.Output(2, bytes(range(256)).decode("latin-1")),
    Ended(1, -9, 1.5, None),
    Ended(1, 0, 2.0, ("a", "b")),
    Hello(None, ("h",), 1, ("10.0.0.1",), report_host()),
    Hello(None, ("h",), 1, ("10.0.0.1",), GPUS),
    messages.Check(
        CheckRequest(num_ranks=1, folder="/a", program="sh", script="a.py", write_folders=("x", "y"), master_port=5)
    ),
    messages.Checked((CheckResult("a", 1), CheckResult("a", 1.5), CheckResult("a", "x"), CheckResult("a", None, "e"))),
    ProgressReport((RankProgress(1, 4, 7, 12, "forward", 33.2, "layers.7", 1, 40.0, wait=WAITS, begun=((1, 120),)),)),
    ProgressReport((RankProgress(0, 1, 7, 0, "starting", 0.5),)),
]


Connect = Callable[..., Channel]


@pytest.fixture
def ends(loop: Loop) -> Iterator[tuple[socket.socket, Connect, list[Any]]]:
    """One end of a line, a function that makes a channel of an end (the other one), and what channels have heard."""
    left, right = socket.socketpair()
    got: list[Any] = []
    made: list[Channel] = []

    def connect(end: socket.socket = right, **options: Any) -> Channel:
        fd, settings = end.detach(), {"silence_seconds": None, "sends_beats": False, **options}
        lost = lambda reason: got.append(("lost", reason))  # noqa: E731
        made.append(Channel(loop, fd, os.dup(fd), got.append, lost, **settings))
        return made[-1]

    yield left, connect, got
    for channel in made:
        channel.close()
    for end in (left, right):
        if end.fileno() >= 0:
            end.close()


Ends = tuple[socket.socket, Connect, list[Any]]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: Message) -> None:
    line = encode(message)
    assert b"\n" not in line and decode(line) == message
    assert decode(line[:-1] + b',"of_a_newer_version":1}') == message


@pytest.mark.parametrize(
    "line",
    [
        b"hello",
        b"[1]",
        b"[" * 100000,
        b'{"kind":[]}',
        b'{"kind":"None"}',
        b'{"kind":"Note","text":1}',
        b'{"kind":"Signal","number":true}',
        b'{"kind":"Signal","number":"9"}',
        b'{"kind":"Signal","number":' + b"9" * 5000 + b"}",
        b'{"kind":"Beat","sent":' + b"9" * 400 + b"}",
        b'{"kind":"Reached","interfaces":[]}',
        b'{"kind":"Hello","index":null,"names":[],"pid":1,"addresses":[],"report":{"kind":"x","devices":[],"cores":[]}}',
        b'{"kind":"Note"}',
    ],
)
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line)


def test_10000_odd_lines_are_messages_or_refused() -> None:
    """Lines of every kind with pieces of others in them: what is taken has the types that its kind has."""
    source = random.Random(0)
    pieces = [*b"null true 1e999 -1 [] {} [[[ NaN".split(), b"9" * 400, b'"\\u001b[2J"', b'{"kind":0}']
    more = Beat(1.0, 2.0), Note("\x1b[2J"), messages.Reached({"a": "b"}), messages.Signal(9), messages.Held(1)
    lines = [*map(encode, (*MESSAGES, *more))]
    taken = 0
    for number in range(10_000):
        line = lines[number % len(lines)]
        found = [match.span() for match in re.finditer(rb'-?\d+(\.\d+)?|"[^"]*"|null|true|\[[^][]*\]', line)]
        start, end = source.choice(found)
        if number % 4 == 0:
            start = source.randrange(len(line))
            end = start + source.randrange(3)
        odd = line[:start] + source.choice([*pieces, source.randbytes(3)]) + line[end:]
        try:
            message = decode(odd)
        except ValueError as error:
            assert len(str(error)) < 1000 and str(error).isprintable(), odd
        else:
            taken += 1
            assert decode(encode(message)) == message or b"NaN" in odd
    assert 500 < taken < 9500


def test_a_full_line_blocks_nobody_and_its_end_is_told_after_the_last_words(loop: Loop, ends: Ends) -> None:
    left, connect, got = ends
    sender = connect(left)
    notes = [Note(str(number) + "x" * 100_000) for number in range(50)]
    for note in notes:
        sender.send(note)
    assert not sender.is_flushed
    receiver = connect()
    assert loop.run(lambda: len(got) == 50, timeout=60)
    assert got == notes and sender.is_flushed
    sender.send(Note("last"))
    sender.close()
    assert loop.run(lambda: len(got) == 52, timeout=60)
    assert got[50:] == [Note("last"), ("lost", "the connection ended")] and not receiver.is_open
    receiver.send(Note("to nobody"))


def test_a_stranger_is_told_apart(loop: Loop, ends: Ends) -> None:
    left, connect, got = ends
    connect()
    left.sendall(b"GET / HTTP/1.1\r\n")
    assert loop.run(lambda: bool(got), timeout=60)
    assert "it does not speak this launcher's protocol" in got[0][1] and "Use the same lowtide" in got[0][1]


def test_talk_before_the_mark_is_no_message(loop: Loop, ends: Ends) -> None:
    left, connect, got = ends
    talk: list[str] = []
    connect(talk=talk.append)
    left.sendall(b"Last login: today\r\nWelcome" + b"\n" + MAGIC + b"\n" + encode(Note("hello")) + b"\n")
    assert loop.run(lambda: bool(got), timeout=60)
    assert talk == ["Last login: today", "Welcome"] and got == [Note("hello")]


def test_silence_is_a_loss_and_tells_since_when(loop: Loop, ends: Ends) -> None:
    _, connect, got = ends
    start = time.monotonic()
    receiver = connect(silence_seconds=1.0, sends_beats=True)
    made = time.monotonic()
    assert loop.run(lambda: bool(got), timeout=60)
    assert got == [("lost", "nothing was heard from it for 1 s")]
    assert start <= receiver.lost_at <= made <= time.monotonic() - 0.9


def test_two_that_beat_are_not_silent_and_know_their_clocks(loop: Loop, ends: Ends) -> None:
    left, connect, got = ends
    launcher = connect(left, silence_seconds=2.0, sends_beats=True)
    connect(silence_seconds=2.0)
    assert launcher.clock_uncertainty == float("inf")
    loop.run(lambda: False, timeout=4.2)
    assert got == []
    assert abs(launcher.clock_offset) <= launcher.clock_uncertainty < 1
    for second in range(1000):  # the first answer is the quickest, and then the clocks drift apart
        offset, trip = 5e-5 * second, 0.003 if second else 1e-6
        launcher._take_clock(second, second + trip / 2 + offset, second + trip)
    assert abs(launcher.clock_offset - offset) <= launcher.clock_uncertainty < 0.003


@pytest.mark.parametrize(
    ("meddle", "received"),
    [
        (lambda said: said, [Note("one"), Note("two")]),
        (lambda said: said + encode(Signal(9)) + b"\n", [Note("one"), Note("two")]),
        (lambda said: said.replace(b"two", b"six"), [Note("one")]),
    ],
    ids=["passes_on", "adds", "changes"],
)
def test_of_sealed_lines_nothing_behind_a_wrong_seal_is_taken(
    loop: Loop, ends: Ends, meddle: Callable[[bytes], bytes], received: list[Message]
) -> None:
    left, connect, got = ends
    launchers, agents = sealed()
    connect(seal=agents)
    left.sendall(meddle(b"".join(launchers.signed(encode(Note(text))) + b"\n" for text in ("one", "two"))))
    left.shutdown(socket.SHUT_WR)
    assert loop.run(lambda: len(got) == len(received) + 1, timeout=60)
    *messages, (_, reason) = got
    is_right = meddle(b"two") == b"two"
    assert messages == received
    assert reason == "the connection ended" if is_right else reason.startswith("a line has no valid tag")
