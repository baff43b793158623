"""What one rank prints, as its agent reads it: cut into lines, written to a file, and the last ones kept."""

import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

KEPT_LINES = 20  # that a failed rank's box shows, and more where a traceback is longer
_SEARCHED_LINES = 200
_SHOWN_LINES = 80
_LINE_BYTES = 4096  # that are kept of a line for the box
_CHUNK_BYTES = 1 << 16
_UNENDED_BYTES = 1 << 20  # a line that is longer is passed on in pieces, each a line
_STARTS_OF_TRACEBACKS = ("Traceback (most recent call last)", "Fatal Python error")
_BETWEEN_TRACEBACKS = ("During handling of the above exception", "The above exception was the direct cause")


class RankOutput:
    """Reads the pipe `fd`, which it owns, a chunk at a time.

    is_plain: bytes are passed on as they come (rank 0); else whole lines, each as a terminal would show it in the end.
    log: takes everything unchanged; what was in it is overwritten unless `appends_log`. note: called with the reason
    when the log cannot be written any more.
    """

    def __init__(
        self, fd: int, is_plain: bool, log: Path | None, note: Callable[[str], None], appends_log: bool = False
    ) -> None:
        self.fd = fd
        self.is_open = True
        self._is_plain = is_plain
        self._note = note
        self._log_path = log
        how = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if appends_log else os.O_TRUNC)
        self._log = None if log is None else os.open(log, how, 0o666)
        self._last: deque[bytes] = deque(maxlen=_SEARCHED_LINES)
        self._rest = b""
        os.set_blocking(fd, False)

    def read(self) -> bytes | None:
        """What is to be shown of the next chunk, b"" if nothing is there yet; None: the pipe has ended, see `close`."""
        try:
            chunk = os.read(self.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return b""
        return self._take(chunk) if chunk else None

    def read_what_is_there(self) -> bytes:
        """All that the pipe holds now, at most its capacity."""
        shown = []
        for _ in range(_UNENDED_BYTES // _CHUNK_BYTES):  # somebody may go on writing
            try:
                chunk = os.read(self.fd, _CHUNK_BYTES)
            except BlockingIOError:
                break
            if not chunk:
                break
            shown.append(self._take(chunk))
        return b"".join(shown)

    def close(self) -> bytes:
        """Closes pipe and log; what is to be shown of a last line without an end."""
        self.is_open = False
        os.close(self.fd)
        if self._log is not None:
            os.close(self._log)
        rest, self._rest = self._rest, b""
        return b"" if self._is_plain or not rest else self._lines([rest])

    def last_lines(self) -> tuple[str, ...]:
        """The last KEPT_LINES lines, oldest first, or from the beginning of the traceback that they end with."""
        kept = [*self._last, *([_visible(self._rest)] if self._rest else [])]
        lines = [line.decode(errors="replace") for line in kept]
        start = min(max(0, len(lines) - KEPT_LINES), _start_of_traceback(lines))
        lines = lines[start:]
        if len(lines) > _SHOWN_LINES:
            half = _SHOWN_LINES // 2
            lines = [*lines[:half], f"... ({len(lines) - 2 * half} lines)", *lines[-half:]]
        return tuple(lines)

    def _take(self, chunk: bytes) -> bytes:
        self._write_log(chunk)
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = _visible(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        if len(self._rest) > _UNENDED_BYTES:
            lines.append(self._rest)
            self._rest = b""
        shown = self._lines(lines)
        return chunk if self._is_plain else shown

    def _lines(self, lines: list[bytes]) -> bytes:
        visible = [_visible(line) for line in lines]
        self._last.extend(line[:_LINE_BYTES] for line in visible)
        return b"".join(line + b"\n" for line in visible)

    def _write_log(self, chunk: bytes) -> None:
        if self._log is None:
            return
        try:
            while chunk:
                chunk = chunk[os.write(self._log, chunk) :]
        except OSError as error:
            self._note(f"{self._log_path} is not written any more: {error.strerror}; the ranks go on")
            with contextlib.suppress(OSError):
                os.close(self._log)
            self._log = None


def _start_of_traceback(lines: list[str]) -> int:
    """Where the last traceback begins, with those that it says it followed from; len(lines) if there is none."""
    start = len(lines)
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith(_STARTS_OF_TRACEBACKS):
            start = i
            if not any(line.startswith(_BETWEEN_TRACEBACKS) for line in lines[max(0, i - 3) : i]):
                break
    return start


def _visible(line: bytes) -> bytes:
    """What a terminal shows in the end of a progress bar that goes back to the start of its line again and again."""
    if b"\r" not in line:
        return line
    states = [state for state in line.split(b"\r") if state]
    return states[-1] if states else b""
