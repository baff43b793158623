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
import os
import secrets

PROOF_SECONDS = 10.0  # that each end has for its part, however slowly it speaks
_NONCE_BYTES = 32
_HEX = 64  # of a nonce, a proof and a tag
_GREETING = b"lowtide 2 "  # the number changes with what is said here
GREETING_BYTES = len(_GREETING) + _HEX + 1
ANSWER_BYTES = _HEX + 1 + _HEX + 1
WELCOME_BYTES = _HEX + 1
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
        keys = _Keys(self._token, self._nonce, nonce)
        if not hmac.compare_digest(proof, keys.of("proof of the agent").hex().encode()):
            raise HandshakeError(_STRANGER)
        welcome = keys.of("proof of the launcher").hex().encode() + b"\n"
        return welcome, Seal(keys.of("launcher to agent"), keys.of("agent to launcher"))


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
        self._keys = _Keys(self._token, nonce, self._nonce)
        return self._nonce + b" " + self._keys.of("proof of the agent").hex().encode() + b"\n"

    def seal(self, welcome: bytes) -> Seal:
        """The seal. welcome: WELCOME_BYTES, after `answer`. Raises HandshakeError."""
        if not hmac.compare_digest(welcome, self._keys.of("proof of the launcher").hex().encode() + b"\n"):
            raise HandshakeError(_STRANGER)
        return Seal(self._keys.of("agent to launcher"), self._keys.of("launcher to agent"))


class _Keys:
    """Proofs and keys of a connection."""

    def __init__(self, token: str, launcher_nonce: bytes, agent_nonce: bytes) -> None:
        self._token = os.fsencode(token)
        self._nonces = launcher_nonce + agent_nonce  # of fixed length, so that no other pair gives the same bytes

    def of(self, purpose: str) -> bytes:
        return hmac.digest(self._token, f"lowtide {purpose} ".encode() + self._nonces, "sha256")


def _tag(key: bytes, number: int, line: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + line, "sha256").hex().encode()
