"""What one rank prints: shown on the terminal, written to a file, and its last lines kept for the closing message."""

import contextlib
import os
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO

KEPT_LINES = 20
_CHUNK_BYTES = 1 << 16
_TERMINAL = threading.Lock()  # lines of two ranks never mix


class RankOutput:
    """Reads the output of one rank from the pipe `source` in a thread until it ends.

    `prefix` stands before each line on the terminal; None shows the bytes as they come (rank 0); `shown=False` shows
    nothing. `log` takes everything unchanged.
    """

    def __init__(self, source: IO[bytes], prefix: bytes | None, shown: bool, log: Path | None) -> None:
        self._source = source
        self._prefix = prefix
        self._shown = shown
        self._log = log
        self._last: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def last_lines(self) -> list[str]:
        """The last KEPT_LINES lines, oldest first."""
        return [line.decode(errors="replace") for line in list(self._last)]

    def wait(self, timeout_seconds: float) -> None:
        """Returns when all output has been read, or after `timeout_seconds`."""
        self._thread.join(timeout_seconds)

    def _pump(self) -> None:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self._log.open("wb", buffering=0)) if self._log else None
            rest = b""
            while chunk := os.read(self._source.fileno(), _CHUNK_BYTES):
                if log is not None:
                    log.write(chunk)
                if self._prefix is None and self._shown:
                    _write(chunk)
                *lines, rest = (rest + chunk).split(b"\n")
                rest = _visible(rest) + (b"\r" if rest.endswith(b"\r") else b"")
                self._take(lines)
            if rest:
                self._take([rest])

    def _take(self, lines: list[bytes]) -> None:
        lines = [_visible(line) for line in lines]
        self._last.extend(lines)
        if self._prefix is not None and self._shown and lines:
            _write(b"".join(self._prefix + line + b"\n" for line in lines))


def _visible(line: bytes) -> bytes:
    """What a terminal shows in the end of a progress bar that goes back to the start of its line again and again."""
    states = [state for state in line.split(b"\r") if state]
    return states[-1] if states else b""


def _write(content: bytes) -> None:
    with _TERMINAL, contextlib.suppress(BrokenPipeError):
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
