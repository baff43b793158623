"""Memory of a host that the CPU ranks of an axis map: files, progress counters, and mail.

A file loses its name as soon as all ranks have mapped it, and takes memory only then. So a killed job leaves no memory
behind, at most a name.

[Note: ordering of stores]
A counter is stored after the data that it announces. Between the two stores a lock is released and acquired (torch
releases the GIL around a copy), which orders them on every processor.
"""

from __future__ import annotations

import os
import pickle
import resource
import secrets
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, BinaryIO

import numpy as np
import psutil
import torch
from torch import Tensor

from .errors import CollectiveError
from .in_flight import AxisRecorder

FOLDER = "/dev/shm"
_PAGE_BYTES = 4096
COUNTERS_NUMEL = 64  # each rank's counters fill whole cache lines, which no other rank writes
POSTED, REDUCED, CONSUMED, MAILED, FENCED, _LEFT = range(6)
# A look reads /proc for each missing rank, so it is not part of each turn of a wait.
_LIVENESS_SECONDS = 0.2
_WITHOUT_ERROR, _AFTER_ERROR = 1, 2  # values of _LEFT
# Why a rank is missing, for errors.
_DIED = "died. See the output of that rank."
_FAILED = "left after an error. See the output of that rank."
_HAS_LEFT = "has left: it closed its engine, or its script came to an end."
_BOX_NUMEL = 256  # the last element identifies the call
LETTER_NUMEL = _BOX_NUMEL - 1
"""Numbers that a rank can send in a call."""
MAIL_NUMEL = 2 * _BOX_NUMEL  # two boxes for each rank: it fills a box while other ranks read the previous box
Gather = Callable[[Any, str], list[Any]]
"""(value, name of the operation for errors) -> the values of all ranks in rank order. Also a barrier."""


def page_aligned(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def free_shared_bytes() -> int:
    """Return the free bytes of shared memory on this host; 0 if it has none."""
    try:
        stat = os.statvfs(FOLDER)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def shared_memory_fault(nbytes: int) -> str:
    """Explain why this process cannot take nbytes of shared memory. Returns "" if it can."""
    free = free_shared_bytes()
    if free <= nbytes:
        return f"{FOLDER} has {free:,} bytes free, and {nbytes:,} are needed"
    if fault := _size_limit_fault(nbytes):
        return fault
    file, fault = _create_file(_PAGE_BYTES, "a first page")  # /dev/shm may be read-only
    if file is None:
        return fault
    with file:
        os.unlink(file.name)
        return _reserve(file, _PAGE_BYTES, "a first page")


def map_together(nbytes: int, purpose: str, rank: int, ranks: Sequence[int], gather: Gather) -> Tensor:
    """Map zero-filled memory, (nbytes,) uint8, into all ranks. A collective.

    rank, ranks: as in `Axis`. Raises CollectiveError on all ranks if a rank fails.
    """
    what = f"room in shared memory for {purpose}"
    file, fault = _create_file(nbytes, purpose) if rank == 0 else (None, "")
    with file or nullcontext():
        try:
            path, fault = gather(("" if file is None else file.name, fault), what)[0]
            if fault:
                raise CollectiveError(fault)
            memory = torch.empty(0, dtype=torch.uint8)
            try:
                memory = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
            except RuntimeError as error:
                fault = (
                    f"shared memory for {purpose}: rank {ranks[rank]} cannot map {path} "
                    f'({str(error).splitlines()[0]}). Set "communication": {{"transport": "sockets"}}.'
                )
            # Also a barrier: rank 0 removes the name only after every rank has mapped the file, or failed to.
            faults = gather(fault, what)
        finally:
            if file is not None:  # also if a rank is lost meanwhile
                os.unlink(file.name)
        if not any(faults):
            # Only now: nobody removes the file of a killed job.
            faults = gather("" if file is None else _reserve(file, nbytes, purpose), what)
    for fault in faults:
        if fault:
            raise CollectiveError(fault)
    return memory


def _size_limit_fault(nbytes: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY or limit >= nbytes:
        return ""
    return f"`ulimit -f` allows {limit:,} bytes in a file, and {nbytes:,} are needed"


def _create_file(nbytes: int, purpose: str) -> tuple[BinaryIO | None, str]:
    """Create a file of nbytes that takes no memory yet. Returns None and the fault if it is not possible."""
    # Asked before a file is made: the error of the reservation would blame the size of /dev/shm.
    if fault := _size_limit_fault(nbytes):
        return None, (
            f"shared memory for {purpose}: {fault}. Raise the limit, or set "
            '"communication": {"transport": "sockets"}.'
        )
    path = os.path.join(FOLDER, f"lowtide-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        file = open(path, "x+b", buffering=0, opener=_open_private)  # noqa: SIM115 (the caller closes it)
        file.truncate(nbytes)
        return file, ""
    except OSError as error:
        return None, (
            f"shared memory for {purpose}: cannot create a file in {FOLDER} ({error}). "
            'Set "communication": {"transport": "sockets"}.'
        )


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _reserve(file: BinaryIO, nbytes: int, purpose: str) -> str:
    """Take the memory of a file. Returns the fault, or ""."""
    try:
        # Now, so a full /dev/shm is an error here instead of a bus error at a later store.
        os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError:
        return (
            f"shared memory for {purpose}: expected {nbytes} free bytes in {FOLDER}, found {free_shared_bytes()}. "
            'Enlarge it (containers: --shm-size), or set "communication": {"transport": "sockets"}.'
        )
    return ""


class SharedCounters:
    """A row of growing counters for each rank. Only the rank writes its row. See [Note: ordering of stores]."""

    def __init__(
        self,
        memory: Tensor,
        rank: int,
        ranks: Sequence[int],
        pids: Sequence[int],
        timeout_seconds: float,
        channel: AxisRecorder,
    ) -> None:
        """memory: (size * COUNTERS_NUMEL,) int64, zero. rank, ranks: as in `Axis`. pids: of all ranks."""
        self._values = memory.numpy().reshape(len(ranks), COUNTERS_NUMEL)
        self._rank = rank
        self._ranks = ranks
        self._processes = [_process_of(pid) for pid in pids]
        self._timeout_seconds = timeout_seconds
        self._channel = channel
        # Runs in `close`, or at interpreter exit if the script has not closed its engine.
        # The arguments must not refer to self, which would then live until the exit.
        self._mark_left = weakref.finalize(self, _mark_left, self._values[rank], os.getpid())

    def store(self, counter: int, value: int) -> None:
        """Set a counter of this rank."""
        self._values[self._rank, counter] = value

    def has_come(self, counter: int, target: int) -> bool:
        """Return True if the counter of every rank has reached target."""
        return bool(self._values[:, counter].min() >= target)

    def wait_for(self, counter: int, target: int, what: str, sequence: int) -> None:
        """Wait until the counter of every rank has reached target. sequence: of the collective, for the progress
        record.

        Raises CollectiveError if a missing rank died, left, failed, or exceeds the timeout.
        """
        self._channel.recorder.note(what)
        # A view: each `min` reads the shared memory again.
        column = self._values[:, counter]
        for _ in range(200):  # most waits are short: yield before sleeping
            if column.min() >= target:
                return
            os.sched_yield()
        self._channel.wait(what, sequence)
        started = checked = time.monotonic()
        pause_seconds = 2e-5
        try:
            while column.min() < target:
                time.sleep(pause_seconds)
                pause_seconds = min(pause_seconds * 1.5, 1e-3)
                now = time.monotonic()
                if now - checked > _LIVENESS_SECONDS:
                    checked = now
                    self._check_peers(column, target, now - started, what)
        finally:
            self._channel.progress.end_wait()

    def close(self) -> None:
        """Tell the other ranks that this rank stores nothing more."""
        self._mark_left()

    def _check_peers(self, column: np.ndarray[Any, Any], target: int, waited_seconds: float, what: str) -> None:
        reasons = {rank: self._why_absent(rank) for rank in np.flatnonzero(column < target).tolist()}
        # Read again: since the first read a rank may have arrived and left.
        late = {self._ranks[rank]: reason for rank, reason in reasons.items() if column[rank] < target}
        here = f"rank {self._ranks[self._rank]} in {what}"
        for reason in (_DIED, _FAILED, _HAS_LEFT):  # the likely root cause first
            gone = ", ".join(str(rank) for rank, found in late.items() if found == reason)
            if gone:
                advice = f" {self._channel.error_broadcast.what_to_do}" if reason == _HAS_LEFT else ""
                raise CollectiveError(f"{here}: rank {gone} {reason}{advice}")
        if late and (found := self._channel.alone(list(late))):
            raise CollectiveError(f"{here}: {found}")
        if late and waited_seconds > self._timeout_seconds:
            raise CollectiveError(
                f"{here}: waited {waited_seconds:.0f} s for rank {', '.join(map(str, late))}, which is alive but not "
                "in this call. Do all ranks make the same calls of the engine in the same order? "
                f"A slow rank needs a larger communication.timeout_seconds. {self._channel.error_broadcast.what_to_do}"
                + self._channel.recorder.compare(list(late))
            )

    def _why_absent(self, rank: int) -> str:
        """Explain why a rank of the axis cannot arrive any more. Returns "" if it is alive and has not left."""
        if left := self._values[rank, _LEFT]:
            return _FAILED if left == _AFTER_ERROR else _HAS_LEFT
        return "" if _is_alive(self._processes[rank]) else _DIED


def _mark_left(counters: np.ndarray[Any, Any], pid: int) -> None:
    """Mark this rank's row of counters as left. Does nothing in a forked child process."""
    # A child, such as a worker of a DataLoader, inherits the finalizer and the mapped counters.
    if os.getpid() == pid:
        counters[_LEFT] = _AFTER_ERROR if _is_failing() else _WITHOUT_ERROR


def _is_failing() -> bool:
    """Return True if an exception ends this program, or the block that closes the engine."""
    # At exit no exception is active any more; the interpreter keeps the last unhandled exception in sys.last_value.
    # A script may also close its engine where its data end (`except StopIteration`), or leave by sys.exit(0).
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    is_end = isinstance(error, StopIteration) or (isinstance(error, SystemExit) and not error.code)
    return error is not None and not is_end


def _process_of(pid: int) -> psutil.Process | None:
    """Return the process, or None if it has ended already."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _is_alive(process: psutil.Process | None) -> bool:
    if process is None:
        return False
    try:
        # `is_running` compares the time of creation, so a new process with the same id does not count.
        # A dead rank stays a zombie until its parent, often the launcher, asks for its status.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class SharedMail:
    """Exchanges small values through shared memory. Every call is a barrier.

    A rank raises CollectiveError if another rank arrives with a different call.
    """

    def __init__(
        self, memory: Tensor, rank: int, ranks: Sequence[int], counters: SharedCounters, channel: AxisRecorder
    ) -> None:
        """memory: (size * MAIL_NUMEL,) int64. rank, ranks: as in `Axis`."""
        self._boxes = memory.view(2, len(ranks), _BOX_NUMEL)
        self._rank = rank
        self._ranks = ranks
        self._counters = counters
        self._channel = channel
        self._num_mailed = 0

    def sum(self, values: Tensor, what: str) -> Tensor:
        """Sum over the ranks. values: (n,) int64, at most LETTER_NUMEL."""
        return self._swap(values, what).sum(dim=0)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Gather a short picklable value from every rank."""
        written, room = pickle.dumps(value), 8 * LETTER_NUMEL
        if len(written) > room:
            raise ValueError(f"expected at most {room} bytes in {what}, found {len(written)}")
        # pickle ignores the spaces behind its last opcode, so the length need not be sent.
        everyone = self._swap(torch.frombuffer(bytearray(written.ljust(room)), dtype=torch.int64), what)
        return [pickle.loads(row.tobytes()) for row in everyone.numpy()]

    def _swap(self, values: Tensor, what: str) -> Tensor:
        """Gather (n,) int64 from all ranks into (ranks, n), valid until the next call but one."""
        sequence = self._channel.begin(what)
        box = self._boxes[self._num_mailed % 2]
        box[self._rank, : values.numel()].copy_(values)
        # crc32 is equal in all processes. `hash` of a string is not.
        box[self._rank, -1] = name = zlib.crc32(what.encode())
        self._num_mailed += 1
        # All ranks that write this box again have passed the next call, so this rank has read it by then.
        self._counters.store(MAILED, self._num_mailed)
        self._counters.wait_for(MAILED, self._num_mailed, what, sequence)
        if not bool((box[:, -1] == name).all()):
            others = [rank for rank, theirs in zip(self._ranks, box[:, -1].tolist(), strict=True) if theirs != name]
            raise CollectiveError(
                f"rank {self._ranks[self._rank]} in {what}: rank {', '.join(map(str, others))} made a different call "
                "of the engine. All ranks must make the same calls in the same order."
                + self._channel.recorder.compare(others)
            )
        return box[:, : values.numel()]
