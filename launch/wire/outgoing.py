"""What is on its way to a peer: kept while the peer does not take it."""

import os

from .loop import Loop

CHUNK_BYTES = 1 << 16


class Outgoing:
    """Lines to a descriptor, which it owns. Never blocks: what is not taken now is sent when it is."""

    def __init__(self, loop: Loop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._unsent = bytearray()
        self._waits = False
        self._is_broken = False
        os.set_blocking(fd, False)

    @property
    def num_bytes(self) -> int:
        """That wait."""
        return len(self._unsent)

    def put(self, line: bytes) -> None:
        """line: without its end. Lost where the peer has gone."""
        if not self._is_broken:
            self._unsent += line + b"\n"
            self._write()

    def close(self) -> None:
        self._loop.forget(self._fd)
        os.close(self._fd)

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._fd, memoryview(self._unsent)[:CHUNK_BYTES].tobytes())]
        except BlockingIOError:
            self._wait(True)
            return
        except OSError:  # what it said before may still be there to be read: the end of reading tells
            self._is_broken = True
            self._unsent.clear()
        self._wait(False)

    def _wait(self, wanted: bool) -> None:
        if wanted and not self._waits:
            self._loop.on_writable(self._fd, self._write)
        elif not wanted and self._waits:
            self._loop.forget(self._fd)
        self._waits = wanted
