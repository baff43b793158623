"""Connections between the ranks of several islands that have the same parts of a model: plain sockets, bytes alone.

Whoever connects says the token that the other has put into the job's store, and which exchange it is for, before
anything else is read of it. The higher island connects to the lower one. What is sent has sizes that both know, and is
never anything but numbers.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from .islands import Islands

_TOKEN_BYTES = 32
_HEADER = struct.Struct(f"!{_TOKEN_BYTES}s32si")  # token, name of the attempt, island
_LOOK_SECONDS = 0.1  # between two looks at whether an exchange is over elsewhere
_TOLD_IN_TIME = 10  # as often is it told that something moves, in the time after which nobody would wait
_BACKLOG = 128  # also of those that have not said who they are
_HEADER_SECONDS = 10.0  # in which whoever connects has said it


class LinkError(Exception):
    """An exchange cannot be completed with these members: one is gone, late, or has given up."""


class Watch:
    """Over one attempt of this rank: whether it is over elsewhere, and for how long nothing has moved.

    A link may be slow: what counts is the time without a byte. Others, who may have all they need, are told of it.
    """

    def __init__(self, is_over: Callable[[], bool], tell_moved: Callable[[], None], timeout_seconds: float) -> None:
        self._is_over = is_over
        self._tell_moved = tell_moved
        self._timeout_seconds = timeout_seconds
        self._moved_at = self._told_at = time.monotonic()

    @property
    def seconds_left(self) -> float:
        return max(0.1, self._moved_at + self._timeout_seconds - time.monotonic())

    def moved(self) -> None:
        """Bytes came or went."""
        self._moved_at = time.monotonic()
        if self._moved_at - self._told_at > self._timeout_seconds / _TOLD_IN_TIME:
            self._told_at = self._moved_at
            self._tell_moved()
            self.look("an island is late")

    def look(self, why: str) -> None:
        """Raises LinkError where there is nothing to wait for."""
        if self._is_over():
            raise LinkError("the attempt is over elsewhere, or an island is gone")
        if time.monotonic() - self._moved_at > self._timeout_seconds:
            raise LinkError(why)


class Links:
    """To the ranks of other islands with this one's number."""

    def __init__(self, islands: Islands, rank: int) -> None:
        self._islands = islands
        self._rank = rank
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in islands.address else socket.AF_INET
        self._listener = socket.create_server((islands.address, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._links: dict[int, socket.socket] = {}
        self._early: dict[tuple[str, int], socket.socket] = {}  # of members that are in the next attempt already
        self._unheard: dict[socket.socket, tuple[float, bytearray]] = {}  # since when, and what of the header has come
        port = self._listener.getsockname()[1]
        islands.store.set(self._key(islands.island), f"{islands.address} {port} {self._token.hex()}")

    def connect(self, name: str, members: Sequence[int], watch: Watch) -> None:
        """To the other members, for as long as nobody leaves. name: of this attempt. Raises LinkError."""
        own = self._islands.island
        for island in members:
            if island < own:
                self._links[island] = self._dial(island, name, watch)
        awaited = {island for island in members if island > own}
        while awaited:
            for island in list(awaited):
                if (name, island) in self._early:
                    self._links[island] = self._early.pop((name, island))
                    awaited.discard(island)
            if awaited:
                self._accept()
                watch.look("an island has not come")

    def swap(
        self,
        sent: Mapping[int, memoryview],
        received: Mapping[int, memoryview],
        watch: Watch,
    ) -> None:
        """Sends to and receives from members at the same time. Raises LinkError."""
        left_to_send = {island: view for island, view in sent.items() if len(view)}
        left_to_receive = {island: view for island, view in received.items() if len(view)}
        with selectors.DefaultSelector() as selector:
            for island in {**left_to_send, **left_to_receive}:
                selector.register(self._links[island], _events(island, left_to_send, left_to_receive), island)
            while left_to_send or left_to_receive:
                ready = selector.select(_LOOK_SECONDS)
                watch.moved() if ready else watch.look("an island is late")
                for key, events in ready:
                    island, link = key.data, self._links[key.data]
                    before = _events(island, left_to_send, left_to_receive)
                    try:
                        if events & selectors.EVENT_WRITE:
                            _advance(left_to_send, island, link.send(left_to_send[island]))
                        if events & selectors.EVENT_READ:
                            count = link.recv_into(left_to_receive[island])
                            if not count:
                                raise LinkError(f"island {island} has closed the connection")
                            _advance(left_to_receive, island, count)
                    except BlockingIOError:
                        continue
                    except OSError as error:
                        raise LinkError(f"island {island}: {error}") from error
                    after = _events(island, left_to_send, left_to_receive)
                    if not after:
                        selector.unregister(link)
                    elif after != before:
                        selector.modify(link, after, island)

    @property
    def are_open(self) -> bool:
        """Whether members are connected."""
        return bool(self._links)

    def disconnect(self) -> None:
        """Members notice it at once where they wait for this rank."""
        while self._links:
            self._links.popitem()[1].close()

    def close(self) -> None:
        self.disconnect()
        while self._early:
            self._early.popitem()[1].close()
        while self._unheard:
            self._unheard.popitem()[0].close()
        self._listener.close()

    def _key(self, island: int) -> str:
        return f"address/{island}/{self._rank}"

    def _dial(self, island: int, name: str, watch: Watch) -> socket.socket:
        key = self._key(island)
        while not self._islands.store.check([key]):
            watch.look(f"island {island} has not come")
            time.sleep(_LOOK_SECONDS / 2)
        address, port, token = self._islands.store.get(key).decode().split()
        while True:
            try:
                link = socket.create_connection((address, int(port)), timeout=watch.seconds_left)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.sendall(_HEADER.pack(bytes.fromhex(token), name.encode(), self._islands.island))
            except OSError:
                watch.look(f"island {island} does not answer")
                time.sleep(_LOOK_SECONDS)
                continue
            link.setblocking(False)
            return link

    def _accept(self) -> None:
        """What comes soon: connections, and what they say first. Nobody is waited for who says it slowly."""
        now = time.monotonic()
        for late in [link for link, (since, _) in self._unheard.items() if now - since > _HEADER_SECONDS]:
            self._turn_away(late)
        with selectors.DefaultSelector() as selector:
            for waited_for in (self._listener, *self._unheard):
                selector.register(waited_for, selectors.EVENT_READ)
            for key, _ in selector.select(_LOOK_SECONDS):
                if key.fileobj is not self._listener:
                    self._hear(cast(socket.socket, key.fileobj))
                    continue
                with contextlib.suppress(OSError):
                    link = self._listener.accept()[0]
                    link.setblocking(False)
                    self._unheard[link] = (now, bytearray())
        while len(self._unheard) > _BACKLOG:
            self._turn_away(next(iter(self._unheard)))

    def _hear(self, link: socket.socket) -> None:
        """What has come of its header; what is not of this job is closed."""
        header = self._unheard[link][1]
        try:
            part = link.recv(_HEADER.size - len(header))
            header += part
            if part and len(header) < _HEADER.size:
                return
            token, name, island = _HEADER.unpack(header)
            if not secrets.compare_digest(token, self._token):
                raise ValueError("a stranger")
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BlockingIOError:
            return
        except (OSError, struct.error, ValueError):
            self._turn_away(link)
            return
        del self._unheard[link]
        before = self._early.pop((name.rstrip(b"\0").decode(), island), None)
        if before is not None:
            before.close()
        self._early[name.rstrip(b"\0").decode(), island] = link

    def _turn_away(self, link: socket.socket) -> None:
        del self._unheard[link]
        link.close()


def _events(island: int, sends: Mapping[int, memoryview], receives: Mapping[int, memoryview]) -> int:
    return selectors.EVENT_WRITE * (island in sends) | selectors.EVENT_READ * (island in receives)


def _advance(views: dict[int, memoryview], island: int, count: int) -> None:
    rest = views[island][count:]
    if len(rest):
        views[island] = rest
    else:
        del views[island]
