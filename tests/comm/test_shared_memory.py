"""Too little shared memory: an error on every rank where that transport was asked for, sockets where none was.

And whoever waits for counters of others learns who will not come.
"""

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lowtide.comm import CollectiveError, Mesh, ParallelDims, World
from lowtide.comm.shared_segment import COUNTERS_NUMEL, POSTED, SharedCounters, map_together, shared_memory_fault
from tests.kit.ranks import RankPool
from tests.kit.training import logged, refusal

SEGMENT = "lowtide.comm.shared_segment"
REAL_OPEN = os.open


@dataclass(frozen=True)
class Raises:
    """A function that fails; ranks get it by value."""

    error: Exception

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise self.error


def is_read_only(path: str, *args: Any) -> int:
    if path.startswith("/dev/shm/lowtide-"):
        raise OSError(errno.EROFS, "Read-only file system")
    return REAL_OPEN(path, *args)


HAS_NO_ROOM = Raises(OSError(errno.ENOSPC, "No space left on device"))
MAY_NOT_CREATE = Raises(OSError(errno.EACCES, "Permission denied"))
CANNOT_MAP = Raises(RuntimeError("unable to open file: Permission denied (13)"))


def create(transport: str, ranks: tuple[int, ...], patched: str, by: Any, later: bool) -> tuple[str, str, list[str]]:
    """(transport of the mesh, error, what was logged), with one function replaced on these ranks.

    later: when the mesh is there and gets its slots.
    """
    here: Any = mock.patch(patched, by) if int(os.environ["RANK"]) in ranks else nullcontext()
    before, dims = set(os.listdir("/dev/shm")), ParallelDims((("shard", 2),), data=("shard",))
    with logged("WARNING") as said:
        try:
            with nullcontext() if later else here:
                mesh = Mesh.create(World.join("cpu", 20.0), dims, transport, 1 << 20, "shard")
            if later:
                with here:
                    mesh.axes["shard"].transport.reserve_slots(4096, 2)
            return mesh.axes["shard"].transport.name, "", said
        except CollectiveError as error:
            left = set(os.listdir("/dev/shm")) - before
            assert later or not any(name.startswith(f"lowtide-{os.getpid()}-") for name in left)
            return "", str(error), said


MAPPING = "rank 1 cannot map /dev/shm/lowtide-"
SOCKETS = 'or set "communication": {"transport": "sockets"}'


@pytest.mark.parametrize(
    ("patched", "by", "on", "later", "start", "texts"),
    [
        (
            f"{SEGMENT}.os.posix_fallocate",
            HAS_NO_ROOM,
            (0, 1),
            False,
            "counters: expected ",
            [" free bytes in /dev/shm, found ", f"--shm-size), {SOCKETS}"],
        ),
        (f"{SEGMENT}.os.open", MAY_NOT_CREATE, (0, 1), False, "", ["cannot create a file in /dev/shm", "Permission d"]),
        (
            "torch.from_file",
            CANNOT_MAP,
            (1,),
            False,
            f"counters: {MAPPING}",
            ['(unable to open file: Permission denied (13)). Set "communication": {"transport": "sockets"}.'],
        ),
        # What is mapped after the counters.
        ("os.posix_fallocate", HAS_NO_ROOM, (0,), True, "gradients: expected 16384 free bytes in /dev/shm, found", []),
        ("torch.from_file", CANNOT_MAP, (1,), True, f"gradients: {MAPPING}", []),
    ],
)
def test_shared_memory_that_one_rank_does_not_get_is_an_error_on_every_rank(
    ranks: RankPool, patched: str, by: Any, on: tuple[int, ...], later: bool, start: str, texts: list[str]
) -> None:
    found = [text for _, text, _ in ranks(2, create, "shared_memory", on, patched, by, later)]
    for text in found:
        assert text.startswith(f"shared memory for {start}") and all(part in text for part in texts)
    assert not later or found[0] == found[1]


@pytest.mark.parametrize(
    ("patched", "by", "why"),
    [
        ("free_shared_bytes", int, "/dev/shm has 0 bytes free, and 1,048,576 are needed"),
        ("FOLDER", "/nowhere", "/nowhere has 0 bytes free, and 1,048,576 are needed"),
        (
            "os.open",
            is_read_only,
            "shared memory for a first page: cannot create a file in /dev/shm ([Errno 30] Read-o",
        ),
        (
            "os.posix_fallocate",
            HAS_NO_ROOM,
            "shared memory for a first page: expected 4096 free bytes in /dev/shm, found",
        ),
    ],
)
def test_auto_takes_sockets_on_all_ranks_where_one_gets_no_shared_memory(
    ranks: RankPool, patched: str, by: Any, why: str
) -> None:
    found = ranks(2, create, "auto", (1,), f"{SEGMENT}.{patched}", by, False)
    assert [name for name, *_ in found] == ["sockets", "sockets"]
    assert [len(said) for *_, said in found] == [1, 0]
    assert found[0][2][0].startswith(f'communication.transport: "auto" uses sockets, because on rank 1 {why}')


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_of_the_size_of_files_is_not_taken_for_a_full_folder() -> None:
    def mapped(nbytes: int) -> int:
        return map_together(nbytes, "gradients", 0, [0], lambda value, what: [value]).numel()

    with files_of_at_most(65536):
        assert mapped(65536) == 65536 and shared_memory_fault(65536) == ""
        fault, text = shared_memory_fault(65537), refusal(mapped, 65537, kind=CollectiveError)
    assert fault == "`ulimit -f` allows 65,536 bytes in a file, and 65,537 are needed"
    assert text == f"shared memory for gradients: {fault}. Raise the limit, {SOCKETS}."


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_file_takes_no_memory_while_it_has_a_name_and_a_lost_rank_leaves_none(number: int) -> None:
    """A killed rank leaves what is there when it waits for the other ranks."""
    seen: list[list[int]] = []

    def files() -> list[Path]:
        return list(Path("/dev/shm").glob(f"lowtide-{os.getpid()}-*"))

    def gather(value: Any, what: str) -> list[Any]:
        seen.append([path.stat().st_blocks for path in files()])
        if len(seen) == number:
            raise CollectiveError("rank 1 died.")
        return [value]

    assert refusal(map_together, 1 << 20, "gradients", 0, [0], gather, kind=CollectiveError) == "rank 1 died."
    assert seen == [[0], [0], []][:number] and not files()


def test_a_rank_that_died_before_the_others_looked_is_named() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    memory = torch.zeros(2 * COUNTERS_NUMEL, dtype=torch.int64)
    here = SharedCounters(memory, 0, (0, 1), [os.getpid(), process.pid], 20.0, mock.Mock())
    here.store(POSTED, 1)
    with pytest.raises(CollectiveError, match=r"^rank 0 in a gather: rank 1 died"):
        here.wait_for(POSTED, 1, "a gather", 0)
    here.close()


def test_a_rank_that_has_come_and_gone_while_it_was_looked_at_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(2 * COUNTERS_NUMEL, dtype=torch.int64)
    here, there = (SharedCounters(memory, rank, (0, 1), [os.getpid()] * 2, 20.0, mock.Mock()) for rank in range(2))
    plain = SharedCounters._why_absent

    def come_and_go(self: SharedCounters, rank: int) -> object:
        there.close()
        fate = plain(self, rank)
        there.store(POSTED, 3)
        return fate

    here.store(POSTED, 3)
    monkeypatch.setattr(SharedCounters, "_why_absent", come_and_go)
    here.wait_for(POSTED, 3, "a gather", 0)
    here.store(POSTED, 4)
    with pytest.raises(CollectiveError, match=r"^rank 0 in a gather: rank 1 "):
        here.wait_for(POSTED, 4, "a gather", 1)
    here.close()
