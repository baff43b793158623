"""How the two ends of a TCP connection prove to each other that they have the job's token, and seal what follows.

    launcher -> agent    lowtide 2 NONCE
    agent -> launcher    NONCE PROOF
    launcher -> agent    PROOF
    both ways            TAG LINE, again and again

[Note: nothing before proof]
Whoever reaches the port may connect, and whoever listens there first may be taken for the launcher. So until the other
end has proved that it has the token, each end takes no more than one line of fixed length, parses nothing else, and
does nothing. Every proof and every key is made of the token, of what it is for, and of the nonces of both ends: a proof
that was heard elsewhere, or that the other end has made itself, does not fit. Somebody in between may pass a proof on,
but has no key: whatever is then added, changed, repeated, left out or turned around has a tag that does not fit, and
ends the connection. It can be read, though: nothing is encrypted.
"""

import hmac
import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable

from ..hosts.host import LaunchError

PROOF_SECONDS = 10.0  # that each end has for its part, however slowly it speaks
_NONCE_BYTES = 32
_HEX = 64  # of a nonce, a proof and a tag
_GREETING = b"lowtide 2 "  # the number changes with what is said here
GREETING_BYTES = len(_GREETING) + _HEX + 1
ANSWER_BYTES = _HEX + 1 + _HEX + 1
WELCOME_BYTES = _HEX + 1
_TRY_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
_SAY_SECONDS = 10.0
_STRANGER = "it does not have this job's token"


class HandshakeError(ValueError):
    """The other end has not proved what it must; the text says why, and has no word of it."""


class Seal:
    """Signs each line that one end of a connection sends, and verifies each that it receives.

    A tag is HMAC-SHA256 of the line's number and the line, with the key of its direction.
    """

    def __init__(self, sending_key: bytes, receiving_key: bytes) -> None:
        self._sending_key = sending_key
        self._receiving_key = receiving_key
        self._num_sent = 0
        self._num_received = 0

    def signed(self, line: bytes) -> bytes:
        """The next line to send, with its tag in front. Lines are without their ends."""
        tag = _tag(self._sending_key, self._num_sent, line)
        self._num_sent += 1
        return tag + b" " + line

    def verified(self, line: bytes) -> bytes:
        """The next line that was received, without its tag. Raises HandshakeError where that does not fit."""
        tag, space, rest = line[:_HEX], line[_HEX : _HEX + 1], line[_HEX + 1 :]
        if space != b" " or not hmac.compare_digest(tag, _tag(self._receiving_key, self._num_received, rest)):
            raise HandshakeError("a line has no valid tag: somebody has changed or added it on the way")
        self._num_received += 1
        return rest


class LauncherHandshake:
    """The launcher's end of one connection."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = secrets.token_hex(_NONCE_BYTES).encode()

    @property
    def greeting(self) -> bytes:
        """Comes first, GREETING_BYTES."""
        return _GREETING + self._nonce + b"\n"

    def welcome(self, answer: bytes) -> tuple[bytes, Seal]:
        """What is to be sent, WELCOME_BYTES, and the seal. answer: ANSWER_BYTES. Raises HandshakeError."""
        nonce, proof = answer[:_HEX], answer[_HEX + 1 : -1]
        if answer != nonce + b" " + proof + b"\n" or len(answer) != ANSWER_BYTES:
            raise HandshakeError("it does not speak this launcher's protocol; is its lowtide of the same version?")
        keys = _keys(self._token, self._nonce, nonce)
        if not hmac.compare_digest(proof, keys("proof of the agent").hex().encode()):
            raise HandshakeError(_STRANGER)
        welcome = keys("proof of the launcher").hex().encode() + b"\n"
        return welcome, Seal(keys("launcher to agent"), keys("agent to launcher"))


class AgentHandshake:
    """The agent's end of one connection. token: not empty."""

    def __init__(self, token: str) -> None:
        assert token
        self._token = token
        self._nonce = secrets.token_hex(_NONCE_BYTES).encode()

    def answer(self, greeting: bytes) -> bytes:
        """What is to be sent, ANSWER_BYTES. greeting: GREETING_BYTES. Raises HandshakeError."""
        nonce = greeting.removeprefix(_GREETING)[:-1]
        if greeting != _GREETING + nonce + b"\n" or len(nonce) != _HEX:
            raise HandshakeError("it does not speak this agent's protocol; is its lowtide of the same version?")
        self._keys = _keys(self._token, nonce, self._nonce)
        return self._nonce + b" " + self._keys("proof of the agent").hex().encode() + b"\n"

    def seal(self, welcome: bytes) -> Seal:
        """The seal. welcome: WELCOME_BYTES, after `answer`. Raises HandshakeError."""
        if not hmac.compare_digest(welcome, self._keys("proof of the launcher").hex().encode() + b"\n"):
            raise HandshakeError(_STRANGER)
        return Seal(self._keys("agent to launcher"), self._keys("launcher to agent"))


def _keys(token: str, launcher_nonce: bytes, agent_nonce: bytes) -> Callable[[str], bytes]:
    """From what a proof or a key of a connection is for, to the proof or the key."""
    nonces = launcher_nonce + agent_nonce  # of fixed length, so that no other pair gives the same bytes
    return lambda purpose: hmac.digest(os.fsencode(token), f"lowtide {purpose} ".encode() + nonces, "sha256")


def _tag(key: bytes, number: int, line: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + line, "sha256").hex().encode()


def connected(peers: str, token: str, wait_seconds: float, say: Callable[[str], None]) -> tuple[int, Seal]:
    """A connection to the launcher, which may start later than its agents, and the seal of what is said on it.

    peers: HOST:PORT, several with commas. Others that listen there are told to the user and tried again, as they may
    have taken the launcher's place for a while. Raises LaunchError when the wait is over.
    """
    if not token:
        raise LaunchError(
            "the agent has no token to know its launcher by: expected one in LOWTIDE_TOKEN, found nothing; what starts "
            "the agents (srun, mpirun) must pass its environment on"
        )
    deadline = time.monotonic() + wait_seconds
    say_next = time.monotonic() + _SAY_SECONDS
    has_met_others = False
    for peer in itertools.cycle(peers.split(",")):
        try:
            return _proved(peer, token)
        except (OSError, HandshakeError) as error:
            is_other = isinstance(error, HandshakeError)
            now = time.monotonic()
            if now > deadline:
                raise LaunchError(
                    f"there is no launcher at {peers} after {wait_seconds:g} s ({error}); has it been started on the "
                    "first host, and does this host reach it?"
                ) from error
            if now > say_next or (is_other and not has_met_others):
                what = f"what listens at {peer} is not obeyed" if is_other else f"waiting for the launcher at {peer}"
                say(f"{what} ({error})")
                say_next = now + _SAY_SECONDS
            has_met_others |= is_other
            time.sleep(_PAUSE_SECONDS)
    raise AssertionError("the cycle has no end")


def _proved(peer: str, token: str) -> tuple[int, Seal]:
    """Raises OSError and HandshakeError."""
    address, _, port = peer.rpartition(":")
    connection = socket.create_connection((address.strip("[]"), int(port)), timeout=_TRY_SECONDS)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
    """Exactly so many bytes, and not one more: what follows is sealed."""
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
            raise HandshakeError("it ended the connection without a proof; is LOWTIDE_TOKEN the same on all hosts?")
        said += part
    return said
