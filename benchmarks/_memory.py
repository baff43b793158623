"""Memory of one rank of a job on one host, as the host pays for it.

    bytes of a rank = private bytes + shared-memory bytes / processes that map them + library bytes / ranks

- private: `RssAnon` of `/proc/self/status`: heap, stacks, anonymous maps. Nobody else holds them.
- shared memory: `Pss_Shmem` of `/proc/self/smaps_rollup` (files of `/dev/shm`): the kernel counts a page that k
  have touched as 1/k in each of them. A page that one rank alone has touched counts whole for that rank and not at all
  for the others, so the sum over the ranks is always what the host holds.
- libraries: `RssFile` divided by the ranks of the job: code that every rank maps. `Pss_File` would say the same on an
  empty machine, but becomes smaller as soon as somebody else on the machine runs torch too.

Nothing is subtracted. What torch itself takes after `import torch` is reported beside it. RSS alone would count shared
memory once for every rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

STATUS = Path("/proc/self/status")
ROLLUP = Path("/proc/self/smaps_rollup")
KIB = 1024
OVER_BUDGET_STATUS = 75
"""A rank ends with it when the model needs more memory than the rank may take; nothing else ends so."""


def supported() -> bool:
    """Says whether this system tells what is needed (Linux 5.0 or newer)."""
    return STATUS.exists() and ROLLUP.exists() and "Pss_Shmem:" in ROLLUP.read_text()


def _kib(text: str, key: str) -> int:
    return int(text.split(f"{key}:", 1)[1].split(None, 1)[0])


def rank_bytes(ranks: int, above: int = 0) -> int:
    """Gives the bytes that this process costs the host now, as the head of this file defines them.

    The roll-up walks the page table (about 10 ms a GiB) and blocks page faults meanwhile. It is left out, and 0 given,
    where even shared memory counted whole would not bring the sum over `above`; and where there is no shared memory.
    """
    status = STATUS.read_text()
    shared_kib = _kib(status, "RssShmem")
    others_kib = _kib(status, "RssAnon") + _kib(status, "RssFile") // ranks
    if (others_kib + shared_kib) * KIB <= above:
        return 0
    if shared_kib:
        shared_kib = _kib(ROLLUP.read_text(), "Pss_Shmem")
    return (others_kib + shared_kib) * KIB


class PeakSampler:
    """Keeps the highest `rank_bytes` seen between `with` and its end, from a thread, every `interval_seconds`.

    It uses at most half of the time for itself, and so slows the training: use it in runs that are not timed.
    on_peak: called with every new peak, from the thread.
    """

    def __init__(
        self, ranks: int, interval_seconds: float = 0.02, on_peak: Callable[[int], None] | None = None
    ) -> None:
        self.peak_bytes = 0
        self._ranks = ranks
        self._on_peak = on_peak
        self._interval_seconds = interval_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def sample(self) -> None:
        """Takes one sample now."""
        found = rank_bytes(self._ranks, above=self.peak_bytes)
        if found > self.peak_bytes:
            self.peak_bytes = found
            if self._on_peak:
                self._on_peak(found)

    def _run(self) -> None:
        while not self._stopped.is_set():
            started = time.perf_counter()
            self.sample()
            cost_seconds = time.perf_counter() - started
            self._stopped.wait(max(self._interval_seconds - cost_seconds, cost_seconds))

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        self.sample()
