"""The agent's way to its launcher: the first address at which somebody listens who proves to have the job's token."""

import itertools
import socket
import time
from collections.abc import Callable

from ..hosts.host import LaunchError
from .handshake import GREETING_BYTES, PROOF_SECONDS, WELCOME_BYTES, AgentHandshake, HandshakeError, Seal

_TRY_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
_SAY_SECONDS = 10.0


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
