"""Both ends prove that they have the token, each connection has its own keys, and no line can be added or changed."""

import random
from collections.abc import Callable

import pytest

from lowtide.launch.wire.handshake import (
    ANSWER_BYTES,
    GREETING_BYTES,
    WELCOME_BYTES,
    AgentHandshake,
    HandshakeError,
    LauncherHandshake,
    Seal,
)

NO_TOKEN = "^it does not have this job's token$"


def sealed(launcher_token: str = "token", agent_token: str = "token") -> tuple[Seal, Seal]:
    """The seals of the launcher and of the agent."""
    launcher, agent = LauncherHandshake(launcher_token), AgentHandshake(agent_token)
    welcome, launchers = launcher.welcome(agent.answer(launcher.greeting))
    return launchers, agent.seal(welcome)


@pytest.mark.parametrize("token", ["token", "", "\udcff \u00e9"])
def test_an_agent_without_the_token_is_known(token: str) -> None:
    with pytest.raises(HandshakeError, match=NO_TOKEN):
        sealed(launcher_token=token, agent_token="another")


def test_proofs_of_another_token_or_connection_do_not_fit() -> None:
    launcher, agent, stranger = LauncherHandshake("token"), AgentHandshake("token"), LauncherHandshake("guess")
    answer = agent.answer(launcher.greeting)
    welcome, _ = launcher.welcome(answer)
    assert list(map(len, (launcher.greeting, answer, welcome))) == [GREETING_BYTES, ANSWER_BYTES, WELCOME_BYTES]
    guessed, _ = stranger.welcome(AgentHandshake("guess").answer(stranger.greeting))
    again = AgentHandshake("token")
    again.answer(launcher.greeting)
    for take, proof in (
        (agent.seal, guessed),
        (agent.seal, answer[-WELCOME_BYTES:]),  # its own, sent back
        (again.seal, welcome),
        (LauncherHandshake("token").welcome, answer),
    ):
        with pytest.raises(HandshakeError, match=NO_TOKEN):
            take(proof)


def test_lines_both_ways_arrive_as_they_were_sent() -> None:
    launcher, agent = sealed()
    for line in (b"first", b"", bytes(range(11, 256)), b"first"):
        assert agent.verified(launcher.signed(line)) == line == launcher.verified(agent.signed(line))


@pytest.mark.parametrize(
    "meddle",
    [
        lambda lines: [b"x" + lines[0], lines[1]],
        lambda lines: [lines[0][:-1] + b"x", lines[1]],
        lambda lines: [lines[0][:64] + lines[0][65:], lines[1]],
        lambda lines: [lines[0][:64], lines[1]],
        lambda lines: [b"", *lines],
        lambda lines: [b'{"kind":"Kill"}', *lines],
        lambda lines: [lines[0][:64] + lines[1][64:], lines[1]],
        lambda lines: [lines[0], lines[0]],
        lambda lines: [lines[1], lines[0]],
        lambda lines: [lines[1]],
        lambda lines: [sealed()[0].signed(b"first")],
    ],
    ids=["start", "end", "space", "cut", "empty", "plain", "tag", "twice", "order", "left_out", "other_connection"],
)
def test_what_somebody_did_on_the_way_is_noticed(meddle: Callable[[list[bytes]], list[bytes]]) -> None:
    launcher, agent = sealed()
    lines = [launcher.signed(b"first"), launcher.signed(b"second")]
    with pytest.raises(HandshakeError, match="a line has no valid tag: it was changed or added on the way"):
        for line in meddle(lines):
            agent.verified(line)


def test_a_line_cannot_be_sent_back_to_who_said_it() -> None:
    launcher, _ = sealed()
    with pytest.raises(HandshakeError):
        launcher.verified(launcher.signed(b"line"))


def test_10000_odd_lines_prove_nothing() -> None:
    source = random.Random(0)
    launcher, agent = LauncherHandshake("token"), AgentHandshake("token")
    answer = agent.answer(launcher.greeting)
    welcome, seal = launcher.welcome(answer)
    right: list[tuple[Callable[[bytes], object], bytes]] = [
        (launcher.welcome, answer),
        (AgentHandshake("token").answer, launcher.greeting),
        (agent.seal, welcome),
        (seal.verified, Seal(b"", b"").signed(b"{}")),
    ]
    for number in range(10_000):
        take, line = right[number % len(right)]
        if number % 3:  # near to what is right
            odd = bytearray(line)
            odd[source.randrange(len(odd))] ^= source.randrange(1, 256)
            odd = odd[: source.choice((len(odd), source.randrange(len(odd))))]
        else:
            odd = bytearray(source.randbytes(source.randrange(2 * len(line))))
        try:
            taken = take(bytes(odd))
        except HandshakeError:
            continue
        assert take is right[1][0], (taken, odd)  # any nonce is one, and what it is answered is no secret
