"""Files of a host's shared memory, which the CPU ranks of one axis map.

A file is unlinked as soon as every rank has mapped it: nothing is left behind, whatever kills the job.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import CollectiveError

FOLDER = "/dev/shm"
_PAGE_BYTES = 4096
Gather = Callable[[Any, str], list[Any]]
"""A value, and what it is of in errors -> every rank's, in the order of the ranks; a barrier too."""


def page_aligned(nbytes: int) -> int:
    """nbytes rounded up to whole pages."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def free_shared_bytes() -> int:
    """Bytes that can still be taken from shared memory on this host; 0 where it has none."""
    try:
        stat = os.statvfs(FOLDER)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def shared_memory_fault(nbytes: int) -> str:
    """Why nbytes cannot be taken from shared memory by this process; "" where they can."""
    free = free_shared_bytes()
    if free <= nbytes:
        return f"{FOLDER} has {free:,} bytes free, and {nbytes:,} are needed"
    path, fault = _create_file(_PAGE_BYTES, "a first page")  # it may be read-only
    if path:
        os.unlink(path)
    return fault


def map_together(nbytes: int, purpose: str, rank: int, ranks: Sequence[int], gather: Gather) -> Tensor:
    """(nbytes,) uint8, zero-filled, that all ranks have. A collective. Raises CollectiveError on all if one cannot.

    rank, ranks: as of `Axis`.
    """
    what = f"room in shared memory for {purpose}"
    path, fault = _create_file(nbytes, purpose) if rank == 0 else ("", "")
    path, fault = gather((path, fault), what)[0]
    if fault:
        raise CollectiveError(fault)
    memory = torch.empty(0, dtype=torch.uint8)
    try:
        memory = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        fault = (
            f"shared memory for {purpose}: rank {ranks[rank]} cannot map {path} "
            f"({str(error).splitlines()[0]}); use the sockets route"
        )
    faults = [fault for fault in gather(fault, what) if fault]
    if rank == 0:
        os.unlink(path)
    if faults:
        raise CollectiveError(faults[0])
    return memory


def _create_file(nbytes: int, purpose: str) -> tuple[str, str]:
    path = os.path.join(FOLDER, f"lowtide-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        return "", f"shared memory for {purpose}: cannot create a file in {FOLDER} ({error}); use the sockets route"
    try:
        # Reserves the pages now: a full /dev/shm is an error here, and not a bus error at some later store.
        os.posix_fallocate(handle, 0, nbytes)
    except OSError:
        os.unlink(path)
        return "", (
            f"shared memory for {purpose}: expected {nbytes} free bytes in {FOLDER}, found {free_shared_bytes()}. "
            'Enlarge it (containers: --shm-size), or set "communication": {"route": "sockets"}.'
        )
    finally:
        os.close(handle)
    return path, ""
