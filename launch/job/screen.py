"""What the user sees of an attempt: words of the launcher, and what the ranks print once there are some."""

from collections import Counter
from collections.abc import Mapping

from ..wire.loop import Loop
from ..wire.messages import Shown
from .display import Display, say
from .peers import Peer
from .stop_signals import StopSignals

_SHOWN_BYTES = 1 << 16


class Screen:
    """Agents send only so much that is not shown yet: each is told of what was, so many bytes at a time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._display: Display | None = None
        self._peer_of: Mapping[int, Peer] = {}
        self._owed: Counter[int] = Counter()  # host -> bytes that were shown and not told to its agent

    def open(self, hosts: Mapping[int, str], peer_of: Mapping[int, Peer]) -> None:
        """For ranks, of which 0 is shown without a prefix. hosts: rank -> name of its host; peer_of: -> agent there."""
        self._peer_of = peer_of
        self._display = Display(hosts, 0, self._note_shown, ended=lambda: self._loop.post(lambda: None))

    def output(self, rank: int, text: str) -> None:
        """What a rank has printed, as its agent sends it."""
        if self._display is not None:
            self._display.output(rank, text.encode("latin-1"))

    def say(self, text: str) -> None:
        """A word of the launcher."""
        if self._display is not None and not self._display.is_done:
            self._display.say(text)
        else:
            say(text)

    def close(self, stop: StopSignals) -> None:
        """Waits until what the ranks have printed is shown; a signal ends that wait."""
        if self._display is not None:
            display, signals = self._display, stop.count
            display.finish()
            if self._loop.run(lambda: display.is_done or stop.count > signals) and display.is_done:
                display.join()  # a restart forks, which is for processes of one thread

    def _note_shown(self, rank: int, nbytes: int) -> None:
        self._loop.post(lambda: self._pay(self._peer_of[rank], nbytes))

    def _pay(self, peer: Peer, nbytes: int) -> None:
        self._owed[peer.index] += nbytes
        if self._owed[peer.index] >= _SHOWN_BYTES:
            peer.send(Shown(self._owed[peer.index]))
            self._owed[peer.index] = 0
