"""Prove the job's token on both ends of a TCP connection, and sign all that follows.

    launcher -> agent    lowtide 2 NONCE
    agent -> launcher    NONCE PROOF
    launcher -> agent    PROOF
    both ways            TAG LINE, again and again

[Note: nothing before proof]
Anybody who reaches the port may connect, and anybody who listens first may pose as the launcher. So until the peer
has proved that it has the token, each end reads at most one line of fixed length, parses nothing else, and does
nothing. Every proof and key is derived from the token, its purpose, and both nonces. So a proof that was overheard or
that the peer has sent itself is invalid. A man in the middle may relay a proof but has no key: any line that is
added, changed, repeated, dropped or reflected has an invalid tag: it ends the connection. Lines are not encrypted.
"""

import hmac
import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable

from ..hosts.host import LaunchError

PROOF_SECONDS = 10.0  # for each end's part
_NONCE_BYTES = 32
_HEX = 64  # length of a nonce, a proof and a tag
_GREETING = b"lowtide 2 "  # the number is the version of this protocol
GREETING_BYTES = len(_GREETING) + _HEX + 1
ANSWER_BYTES = _HEX + 1 + _HEX + 1
WELCOME_BYTES = _HEX + 1
_TRY_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
_SAY_SECONDS = 10.0
_STRANGER = "it does not have this job's token"


class HandshakeError(ValueError):
    """The peer has not proved the token. The text does not quote it."""


class Seal:
    """Signs each line that an end of a connection sends, and verifies each line that it receives.

    A tag is the HMAC-SHA256 of the line's number and the line, with the key of its direction.
    """

    def __init__(self, sending_key: bytes, receiving_key: bytes) -> None:
        self._sending_key = sending_key
        self._receiving_key = receiving_key
        self._num_sent = 0
        self._num_received = 0

    def signed(self, line: bytes) -> bytes:
        """Return the line with its tag in front. Lines have no newline."""
        tag = _tag(self._sending_key, self._num_sent, line)
        self._num_sent += 1
        return tag + b" " + line

    def verified(self, line: bytes) -> bytes:
        """Return the received line without its tag. Raises HandshakeError if the tag is invalid."""
        tag, space, rest = line[:_HEX], line[_HEX : _HEX + 1], line[_HEX + 1 :]
        if space != b" " or not hmac.compare_digest(tag, _tag(self._receiving_key, self._num_received, rest)):
            raise HandshakeError("a line has no valid tag: it was changed or added on the way")
        self._num_received += 1
        return rest


class LauncherHandshake:
    """The launcher's end of a connection."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = secrets.token_hex(_NONCE_BYTES).encode()

    @property
    def greeting(self) -> bytes:
        """The first message, GREETING_BYTES."""
        return _GREETING + self._nonce + b"\n"

    def welcome(self, answer: bytes) -> tuple[bytes, Seal]:
        """Return the answer to send, WELCOME_BYTES, and the seal. answer: ANSWER_BYTES. Raises HandshakeError."""
        nonce, proof = answer[:_HEX], answer[_HEX + 1 : -1]
        if answer != nonce + b" " + proof + b"\n" or len(answer) != ANSWER_BYTES:
            raise HandshakeError("it does not speak this launcher's protocol. Use the same lowtide on all hosts")
        keys = _keys(self._token, self._nonce, nonce)
        # Its time does not depend on the place of the first difference, so no stranger can guess it digit by digit.
        if not hmac.compare_digest(proof, keys("proof of the agent").hex().encode()):
            raise HandshakeError(_STRANGER)
        welcome = keys("proof of the launcher").hex().encode() + b"\n"
        return welcome, Seal(keys("launcher to agent"), keys("agent to launcher"))


class AgentHandshake:
    """The agent's end of a connection. token: not empty."""

    def __init__(self, token: str) -> None:
        assert token
        self._token = token
        self._nonce = secrets.token_hex(_NONCE_BYTES).encode()

    def answer(self, greeting: bytes) -> bytes:
        """Return the answer to send, ANSWER_BYTES. greeting: GREETING_BYTES. Raises HandshakeError."""
        nonce = greeting.removeprefix(_GREETING)[:-1]
        if greeting != _GREETING + nonce + b"\n" or len(nonce) != _HEX:
            raise HandshakeError("it does not speak this agent's protocol. Use the same lowtide on all hosts")
        self._keys = _keys(self._token, nonce, self._nonce)
        return self._nonce + b" " + self._keys("proof of the agent").hex().encode() + b"\n"

    def seal(self, welcome: bytes) -> Seal:
        """Return the seal. welcome: WELCOME_BYTES, after `answer`. Raises HandshakeError."""
        if not hmac.compare_digest(welcome, self._keys("proof of the launcher").hex().encode() + b"\n"):
            raise HandshakeError(_STRANGER)
        return Seal(self._keys("agent to launcher"), self._keys("launcher to agent"))


def _keys(token: str, launcher_nonce: bytes, agent_nonce: bytes) -> Callable[[str], bytes]:
    """Return a function from a purpose to the proof or key of this connection."""
    nonces = launcher_nonce + agent_nonce  # of fixed length, so that no second pair has the same bytes
    return lambda purpose: hmac.digest(os.fsencode(token), f"lowtide {purpose} ".encode() + nonces, "sha256")


def _tag(key: bytes, number: int, line: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + line, "sha256").hex().encode()


def connected(peers: str, token: str, wait_seconds: float, say: Callable[[str], None]) -> tuple[int, Seal]:
    """Connect to the launcher, which may start later than its agents; return the connection and its seal.

    peers: HOST:PORT, separated by commas. If another program listens at the port, tell the user and try again: it may
    hold the launcher's port for a while. Raises LaunchError when the time is over.
    """
    if not token:
        raise LaunchError(
            "the agent has no token to recognize its launcher: LOWTIDE_TOKEN is not set. The command that starts the "
            "agents (srun, mpirun) must pass its environment on"
        )
    deadline = time.monotonic() + wait_seconds
    say_seconds = _SAY_SECONDS
    say_next = time.monotonic() + say_seconds
    has_met_others = False
    # The launcher offers all its addresses. Networks differ, so each is tried in turn until the time is over.
    for peer in itertools.cycle(peers.split(",")):
        try:
            return _proved(peer, token)
        except (OSError, HandshakeError) as error:
            is_other = isinstance(error, HandshakeError)
            now = time.monotonic()
            if now > deadline:
                raise LaunchError(
                    f"no launcher at {peers} after {wait_seconds:g} s ({error}). Check that it runs on the first host, "
                    "and that this host reaches it"
                ) from error
            # The first foreign program is reported at once: it may have taken the launcher's port.
            if now > say_next or (is_other and not has_met_others):
                what = f"ignoring the program at {peer}" if is_other else f"waiting for the launcher at {peer}"
                say(f"{what} ({error})")
                say_seconds *= 2  # pods of a job may start many minutes apart
                say_next = now + say_seconds
            has_met_others |= is_other
            time.sleep(_PAUSE_SECONDS)
    raise AssertionError("the cycle has no end")


def _proved(peer: str, token: str) -> tuple[int, Seal]:
    """Connect and prove. Raises OSError and HandshakeError."""
    address, _, port = peer.rpartition(":")
    connection = socket.create_connection((address.strip("[]"), int(port)), timeout=_TRY_SECONDS)
    try:
        # Messages are short and wait for answers: Nagle's algorithm would delay each by the peer's acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # For both messages together: a program that sends a byte now and then must not hold the agent.
        deadline = time.monotonic() + PROOF_SECONDS
        handshake = AgentHandshake(token)
        connection.sendall(handshake.answer(_received(connection, GREETING_BYTES, deadline)))
        seal = handshake.seal(_received(connection, WELCOME_BYTES, deadline))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection.detach(), seal


def _received(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Receive exactly `nbytes`: the next bytes are sealed."""
    said = b""
    while len(said) < nbytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise HandshakeError(f"it did not prove within {PROOF_SECONDS:g} s that it has this job's token")
        connection.settimeout(left)
        try:
            part = connection.recv(nbytes - len(said))
        except TimeoutError:
            continue
        if not part:
            raise HandshakeError("it ended the connection without a proof. LOWTIDE_TOKEN must be the same on all hosts")
        said += part
    return said
