"""Write a checkpoint in a background thread."""

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

# A look at the folder costs a system call for each rank, a look at processes reads /proc.
_POLL_SECONDS = 0.005
_LIVENESS_SECONDS = 0.2
# Of processes on other hosts, which may still write when this script ends.
_SECONDS_AFTER_EXIT = 60.0
_SECONDS_AFTER_LOST_RANKS = 5.0


class SaveJob:
    """Writes this rank's part. Rank 0 then waits for the parts of all ranks, and completes the checkpoint.

        rank 0   [write] [wait for the index files of all ranks] [commit]
        rank 1   [write]

    Ranks meet in the folder and not in a collective, so that training continues meanwhile. The thread outlives the
    script: a script that ends without waiting loses no checkpoint. Rank 0 does not wait for the part of a process of
    this host that has died. It cannot see processes of other hosts: it gives up their parts some time after this
    script has ended, and soon if the script ended because ranks were lost.
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
        # No daemon: the interpreter waits for the thread when the script ends.
        self._thread = threading.Thread(target=self._run, name="lowtide checkpoint", daemon=False)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Return True once this rank knows of a failure of this rank."""
        return self.write_error is not None or self.commit_error is not None

    def wait_written(self) -> None:
        """Wait until this rank's part is on the disk, or has failed."""
        self._is_written.wait()

    def wait_committed(self) -> None:
        """Wait for the thread: on rank 0 the checkpoint is then complete, or has failed."""
        self._thread.join()

    def cancel(self) -> None:
        """Stop waiting for the parts of other ranks, since a rank has failed."""
        self._is_cancelled.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # the training thread raises it
            self.write_error = error
        finally:
            self._is_written.set()
        if self._commit is not None and self.write_error is None:
            try:
                # Not by a collective: this thread runs beside the training's collectives.
                self._wait_for_others()
                if not self._is_cancelled.is_set():
                    self._commit()
            except BaseException as error:
                self.commit_error = error
        if self.has_failed:  # a script that ends without another step or `close` only sees this line
            logger.error("%s could not be completed: %s", self._folder, self.write_error or self.commit_error)

    def _wait_for_others(self) -> None:
        """Wait for all parts. Raise CheckpointError if a part will not come."""
        deadline: float | None = None
        next_look = time.monotonic()
        while self._missing() and not self._is_cancelled.wait(_POLL_SECONDS):
            if time.monotonic() < next_look:
                continue
            next_look = time.monotonic() + _LIVENESS_SECONDS
            dead = [rank for rank in self._missing() if self._processes[rank].is_dead]
            if lost := sorted({*dead} & {*self._missing()}):  # a process may have written its part before it died
                raise CheckpointError(f"ranks {lost} died before their parts were written")
            # The script has ended, and the interpreter waits for this thread: nobody calls `wait` any more.
            if deadline is None and not threading.main_thread().is_alive():
                # The interpreter keeps the error that ended the script in `sys.last_value`.
                has_lost_ranks = isinstance(getattr(sys, "last_value", None), CollectiveError)
                deadline = time.monotonic() + (_SECONDS_AFTER_LOST_RANKS if has_lost_ranks else _SECONDS_AFTER_EXIT)
            if deadline is not None and time.monotonic() > deadline:
                raise CheckpointError(f"the parts of ranks {self._missing()} never came")

    def _missing(self) -> list[int]:
        """Return the ranks without a complete part."""
        # `write_part` writes the index file last, so a part with an index file is complete.
        return [rank for rank in range(len(self._processes)) if not (self._folder / index_name(rank)).exists()]
