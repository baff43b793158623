"""The memory that this process takes, watched from a thread."""

import threading
from pathlib import Path
from types import TracebackType

import psutil

ROLLUP = Path("/proc/self/smaps_rollup")


def process_bytes() -> int:
    """Private bytes plus shared bytes divided by the processes that map them (Linux; elsewhere all resident bytes)."""
    if not ROLLUP.exists():
        return int(psutil.Process().memory_info().rss)
    line = next(line for line in ROLLUP.read_text().splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


class MemoryWatch:
    """Keeps the highest `process_bytes` seen between `with` and its end."""

    def __init__(self, interval_seconds: float = 0.1) -> None:
        self.start_bytes = process_bytes()
        self.now_bytes = self.start_bytes
        self.peak_bytes = self.start_bytes
        self.interval_seconds = interval_seconds
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="memory-watch", daemon=True)

    def watch(self) -> None:
        while not self.stopped.wait(self.interval_seconds):
            self.sample()

    def sample(self) -> None:
        self.now_bytes = process_bytes()
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def __enter__(self) -> "MemoryWatch":
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopped.set()
        self.thread.join()
        self.sample()
