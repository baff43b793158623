"""Threads for calls that wait for a disk."""

from __future__ import annotations

import mmap
import queue
import threading
import weakref
from collections.abc import Callable

Task = Callable[["Scratch"], None]


class Scratch:
    """Aligned memory of one thread, for bytes that are not aligned themselves. Taken when first used."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._memory: memoryview | None = None

    def view(self, nbytes: int) -> memoryview:
        """nbytes at the beginning of a page; the same ones at every call."""
        if self._memory is None:
            self._memory = memoryview(mmap.mmap(-1, self._nbytes))
        return self._memory[:nbytes]


class IoThreads:
    """Does tasks in the order in which they come, as many at a time as there are threads. A task must not raise."""

    def __init__(self, count: int, scratch_bytes: int) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=_work, args=(self._tasks, Scratch(scratch_bytes)), name=f"lowtide disk {index}", daemon=True
            )
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()
        self._stop = weakref.finalize(self, _stop, self._tasks, count)

    def submit(self, task: Task) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        """Does what has been submitted, and ends the threads."""
        self._stop()
        for thread in self._threads:
            thread.join()


def _work(tasks: queue.SimpleQueue[Task | None], scratch: Scratch) -> None:
    while (task := tasks.get()) is not None:
        task(scratch)
        del task  # it keeps tensors, and the next may be long in coming


def _stop(tasks: queue.SimpleQueue[Task | None], count: int) -> None:
    for _ in range(count):
        tasks.put(None)
