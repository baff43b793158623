"""One checkpoint on its way to the disk, in a thread of its own."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...checkpoint.files import CheckpointError, index_name
from ...checkpoint.folder import WritingProcess
from ...comm import CollectiveError
from ...watch.log import logger

_POLL_SECONDS = 0.005
_LIVENESS_SECONDS = 0.2
_SECONDS_AFTER_EXIT = 60.0
_SECONDS_AFTER_LOST_RANKS = 5.0


class SaveJob:
    """Writes this rank's part; on rank 0 then completes the checkpoint, once every rank's part is there.

        rank 0   [write] [wait for the index files of all ranks] [commit]
        rank 1   [write]

    The ranks meet in the folder and not in a collective, so that training goes on meanwhile. The thread outlives a
    script that ends: no checkpoint is lost because nobody waited for it. A part whose process has died is not waited
    for. Of one on another host that is not known: its part is given up some time after this script has ended, and soon
    where it has ended because ranks were lost.
    """

    def __init__(
        self,
        folder: Path,
        processes: Sequence[WritingProcess],
        write: Callable[[], None],
        commit: Callable[[], None] | None,
    ) -> None:
        """processes: of all ranks. commit: on rank 0 only."""
        self._folder = folder
        self._processes = processes
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
        if self._commit is not None and self.write_error is None:
            try:
                self._wait_for_others()
                if not self._is_cancelled.is_set():
                    self._commit()
            except BaseException as error:
                self.commit_error = error
        if (
            self.has_failed
        ):  # said here too: a script that ends without another step or `close` hears of it nowhere else
            logger.error("%s could not be completed: %s", self._folder, self.write_error or self.commit_error)

    def _wait_for_others(self) -> None:
        """Raises CheckpointError where a part will not come."""
        deadline: float | None = None
        next_look = time.monotonic()
        while self._missing() and not self._is_cancelled.wait(_POLL_SECONDS):
            if time.monotonic() < next_look:
                continue
            next_look = time.monotonic() + _LIVENESS_SECONDS
            dead = [rank for rank in self._missing() if self._processes[rank].is_dead]
            if lost := sorted({*dead} & {*self._missing()}):  # what one wrote before it died is there by now
                raise CheckpointError(f"ranks {lost} died before their parts were written")
            if deadline is None and not threading.main_thread().is_alive():
                has_lost_ranks = isinstance(getattr(sys, "last_value", None), CollectiveError)
                deadline = time.monotonic() + (_SECONDS_AFTER_LOST_RANKS if has_lost_ranks else _SECONDS_AFTER_EXIT)
            if deadline is not None and time.monotonic() > deadline:
                raise CheckpointError(f"the parts of ranks {self._missing()} never came")

    def _missing(self) -> list[int]:
        """The ranks whose parts are not complete."""
        return [rank for rank in range(len(self._processes)) if not (self._folder / index_name(rank)).exists()]
