"""One checkpoint on its way to the disk, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..checkpoint.errors import CheckpointError
from ..checkpoint.index import index_name
from .log import logger

_POLL_SECONDS = 0.005
_SECONDS_AFTER_EXIT = 60.0


class SaveJob:
    """Writes this rank's part; on rank 0 then completes the checkpoint, once every rank's part is there.

        rank 0   [write] [wait for the index files of all ranks] [commit]
        rank 1   [write]

    The ranks meet in the folder and not in a collective, so that training goes on meanwhile. The thread outlives a
    script that ends: no checkpoint is lost because nobody waited for it.
    """

    def __init__(self, folder: Path, num_ranks: int, write: Callable[[], None], commit: Callable[[], None] | None):
        """commit: on rank 0 only."""
        self._folder = folder
        self._num_ranks = num_ranks
        self._write = write
        self._commit = commit
        self._is_written = threading.Event()
        self._is_cancelled = threading.Event()
        self.write_error: BaseException | None = None
        self.commit_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lowtide checkpoint", daemon=False)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """True as soon as this rank knows of a failure of its own."""
        return self.write_error is not None or self.commit_error is not None

    def wait_written(self) -> None:
        """Returns when this rank's part is on the disk, or has failed."""
        self._is_written.wait()

    def wait_committed(self) -> None:
        """Returns when the thread has ended: on rank 0 the checkpoint is complete then, or has failed."""
        self._thread.join()

    def cancel(self) -> None:
        """Rank 0 no longer waits for the parts of others: one of them has failed."""
        self._is_cancelled.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # told to the training thread, which raises it
            self.write_error = error
        finally:
            self._is_written.set()
        if self._commit is None or self.write_error is not None or not self._wait_for_others():
            return
        try:
            self._commit()
        except BaseException as error:
            self.commit_error = error
        if self.commit_error is not None and not threading.main_thread().is_alive():
            logger.error("%s could not be completed: %s", self._folder, self.commit_error)  # nobody else will say so

    def _wait_for_others(self) -> bool:
        deadline: float | None = None
        while missing := [r for r in range(self._num_ranks) if not (self._folder / index_name(r)).exists()]:
            if self._is_cancelled.wait(_POLL_SECONDS):
                return False
            if deadline is None and not threading.main_thread().is_alive():
                deadline = time.monotonic() + _SECONDS_AFTER_EXIT
            if deadline is not None and time.monotonic() > deadline:
                self.commit_error = CheckpointError(f"{self._folder}: the parts of ranks {missing} never came")
                return False
        return True
