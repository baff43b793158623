"""Messages and the line that they travel on: unchanged values, loss, silence, backlog, clocks."""

import os
import random
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lowtide.launch.hosts.plan import HostPlan, RankPlan
from lowtide.launch.hosts.report import report_host
from lowtide.launch.wire.channel import MAGIC, Channel
from lowtide.launch.wire.loop import Loop
from lowtide.launch.wire.messages import (
    Beat,
    Ended,
    Held,
    Hello,
    Job,
    Kill,
    Message,
    Note,
    Output,
    Reached,
    Start,
    decode,
    encode,
)

ODD = "two words, \"quotes\", 'more',\nnew line\r\n\t\0 é \u2028 \udcff $HOME `ls` \\"

MESSAGES: list[Message] = [
    Start(
        HostPlan("h", 1, (RankPlan(3, 0, "GPU-1", (0, 1), {"A": ODD}), RankPlan(4, 1, None, (), {}))),
        Job("id", ("python", ODD), "/a b", {"NOTE": ODD}),
        {},
        {},
    ),
    Output(2, bytes(range(256)).decode("latin-1")),
    Ended(1, -9, 1.5, None),
    Ended(1, 0, 2.0, ("a", "b")),
    Hello(None, ("h",), 1, ("10.0.0.1",), report_host()),
]


@pytest.fixture
def loop() -> Iterator[Loop]:
    result = Loop()
    yield result
    result.close()


def channel(loop: Loop, sock: socket.socket, got: list[Any], **options: Any) -> Channel:
    """What is received and why the peer is lost go to `got`."""
    fd = sock.detach()
    settings: dict[str, Any] = {"silence_seconds": None, "sends_beats": False, **options}
    return Channel(loop, fd, os.dup(fd), got.append, lambda reason: got.append(("lost", reason)), **settings)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: Message) -> None:
    line = encode(message)
    assert b"\n" not in line and decode(line) == message


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
    pieces = [
        b"null",
        b"true",
        b"9" * 400,
        b"1e999",
        b"-1",
        b'"\\u001b[2J"',
        b"[]",
        b"{}",
        b"[[[",
        b'{"kind":0}',
        b"NaN",
    ]
    lines = [*map(encode, (*MESSAGES, Beat(1.0, 2.0), Note("\x1b[2J"), Reached({"a": "b"}), Kill(), Held(1)))]
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


def test_fields_of_a_newer_version_are_left_out() -> None:
    assert decode(b'{"kind":"Note","text":"a","colour":"red"}') == Note("a")


def test_a_full_line_blocks_nobody_and_loses_nothing(loop: Loop) -> None:
    left, right = socket.socketpair()
    got: list[Any] = []
    sender = channel(loop, left, [])
    texts = [str(number) + "x" * 100_000 for number in range(50)]
    for text in texts:
        sender.send(Note(text))
    assert not sender.is_flushed
    receiver = channel(loop, right, got)
    assert loop.run(lambda: len(got) == 50, timeout=60)
    assert [message.text for message in got] == texts and sender.is_flushed
    sender.close()
    receiver.close()


def test_the_end_of_the_peer_is_told_after_its_last_words(loop: Loop) -> None:
    left, right = socket.socketpair()
    got: list[Any] = []
    receiver = channel(loop, right, got)
    sender = channel(loop, left, [])
    sender.send(Note("last"))
    sender.close()
    assert loop.run(lambda: len(got) == 2, timeout=60)
    assert got == [Note("last"), ("lost", "the connection ended")] and not receiver.is_open
    receiver.send(Note("to nobody"))


def test_a_stranger_is_told_apart(loop: Loop) -> None:
    left, right = socket.socketpair()
    got: list[Any] = []
    channel(loop, right, got)
    with left:
        left.sendall(b"GET / HTTP/1.1\r\n")
        assert loop.run(lambda: bool(got), timeout=60)
    assert "it does not speak this launcher's protocol" in got[0][1] and "Use the same lowtide" in got[0][1]


def test_talk_before_the_mark_is_no_message(loop: Loop) -> None:
    left, right = socket.socketpair()
    got: list[Any] = []
    talk: list[str] = []
    receiver = channel(loop, right, got, talk=talk.append)
    with left:
        left.sendall(b"Last login: today\r\nWelcome" + b"\n" + MAGIC + b"\n" + encode(Note("hello")) + b"\n")
        assert loop.run(lambda: bool(got), timeout=60)
        assert talk == ["Last login: today", "Welcome"] and got == [Note("hello")]
        receiver.close()


def test_silence_is_a_loss_and_tells_since_when(loop: Loop) -> None:
    left, right = socket.socketpair()
    got: list[Any] = []
    start = time.monotonic()
    receiver = channel(loop, right, got, silence_seconds=1.0, sends_beats=True)
    made = time.monotonic()
    with left:
        assert loop.run(lambda: bool(got), timeout=60)
    assert got == [("lost", "nothing was heard from it for 1 s")]
    assert start <= receiver.lost_at <= made <= time.monotonic() - 0.9


def test_two_that_beat_are_not_silent_and_know_their_clocks(loop: Loop) -> None:
    left, right = socket.socketpair()
    got: list[Any] = []
    launcher = channel(loop, left, got, silence_seconds=2.0, sends_beats=True)
    agent = channel(loop, right, got, silence_seconds=2.0)
    assert launcher.clock_uncertainty == float("inf")
    loop.run(lambda: False, timeout=4.2)
    assert got == []
    assert abs(launcher.clock_offset) <= launcher.clock_uncertainty < 1
    launcher.close()
    agent.close()


def test_a_beat_is_answered_with_the_clock(loop: Loop) -> None:
    left, right = socket.socketpair()
    agent = channel(loop, right, [])
    with left:
        left.sendall(encode(Beat(5.0)) + b"\n")
        left.setblocking(False)
        heard: list[bytes] = []
        peer = left.fileno()
        loop.on_readable(peer, lambda: heard.append(os.read(peer, 4096)))
        assert loop.run(lambda: bool(heard), timeout=60)
        answer = decode(heard[0])
        loop.forget(peer)
    assert isinstance(answer, Beat) and answer.sent == 5.0 and answer.clock is not None
    agent.close()
