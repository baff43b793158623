"""Ranges of a file come the same out of the page cache and past it; what the cache has not is not brought there."""

import errno
import mmap
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from lowtide.checkpoint import data_file
from lowtide.checkpoint.data_file import Blocks, DataFile, EndOfFileError, FileChunk
from tests.checkpoint.page_cache import forget, resident_pages

BLOCK_BYTES = data_file._BLOCK_BYTES
FILE_BYTES = 3 * BLOCK_BYTES + 12_345
NEEDS_DIRECT = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no O_DIRECT")


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(1).randbytes(FILE_BYTES)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    """The file, on the disk and out of the page cache (where the file system has a cache, and lets go of it)."""
    path = tmp_path / "file"
    path.write_bytes(content)
    forget(path)
    return path


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in the page cache, as far as a reader sees."""
    monkeypatch.setattr(data_file, "_is_cached", lambda pages, low, high: False)


def read(file: DataFile, *ranges: tuple[int, int]) -> list[bytes]:
    memories = [bytearray(high - low) for low, high in ranges]
    file.read([FileChunk(low, memoryview(memory)) for (low, _), memory in zip(ranges, memories, strict=True)])
    return [bytes(memory) for memory in memories]


class Calls:
    """os.preadv: whether its descriptors had O_DIRECT. O_DIRECT may be refused at two places."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_open: int = 0, at_read: int = 0) -> None:
        self.direct: list[bool] = []
        self._refusals = at_open, at_read
        self._directs: set[int] = set()
        self._open, self._preadv = os.open, os.preadv
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "preadv", self.preadv)

    def open(self, path: str | Path, flags: int, mode: int = 0o777) -> int:
        is_direct = bool(flags & data_file._DIRECT)
        if is_direct and self._refusals[0]:
            raise OSError(self._refusals[0], os.strerror(self._refusals[0]))
        descriptor = self._open(path, flags & ~data_file._DIRECT if self._refusals[1] else flags, mode)
        (self._directs.add if is_direct else self._directs.discard)(descriptor)
        return descriptor

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.direct.append(descriptor in self._directs)
        if self.direct[-1] and self._refusals[1]:
            raise OSError(self._refusals[1], os.strerror(self._refusals[1]))
        return self._preadv(descriptor, buffers, offset)


RANGES = [
    [(0, 1)],
    [(0, FILE_BYTES)],
    [(4095, 8193)],
    [(FILE_BYTES - 1, FILE_BYTES)],
    [(BLOCK_BYTES - 7, BLOCK_BYTES + 5)],
    [(17, 400), (400, 401), (5000, BLOCK_BYTES + 3), (BLOCK_BYTES + 3, FILE_BYTES)],
    [(100, 9000), (100, 9000), (200, 300)],  # the same bytes for several
    [(5, 5), (5, 6)],
]


@pytest.mark.parametrize("past_cache", [False, True])
def test_any_ranges_are_what_the_file_has_there(path: Path, content: bytes, past_cache: bool) -> None:
    for ranges in RANGES:
        forget(path)
        file = DataFile(path, Blocks(1) if past_cache else None)
        assert read(file, *ranges) == [content[low:high] for low, high in ranges], ranges
        file.close()


def test_what_is_read_past_the_cache_does_not_come_into_it(path: Path, content: bytes) -> None:
    forget(path, must=True)
    file = DataFile(path, Blocks(2))
    assert read(file, (0, FILE_BYTES)) == [content]
    assert resident_pages(path) == 0
    file.close()
    found = []  # several times, because a kernel that is short of memory drops pages whenever it likes
    for _ in range(5):
        file = DataFile(path)
        assert read(file, (0, FILE_BYTES)) == [content]
        found.append(resident_pages(path))
        file.close()
    assert -(-FILE_BYTES // mmap.PAGESIZE) in found


@NEEDS_DIRECT
@pytest.mark.parametrize("blocks", [Blocks(1), None], ids=["in the cache", "without blocks"])
def test_what_is_in_the_cache_is_read_there_and_without_blocks_everything(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, blocks: Blocks | None
) -> None:
    if blocks is not None:
        path.read_bytes()
    calls = Calls(monkeypatch)
    file = DataFile(path, blocks)
    assert read(file, (5, FILE_BYTES)) == [content[5:]]
    assert calls.direct == [False]
    file.close()


@NEEDS_DIRECT
@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize(
    ("place", "number"), [("at_read", errno.EINVAL), ("at_read", errno.EOPNOTSUPP), ("at_open", errno.EINVAL)]
)
def test_a_file_system_that_refuses_is_read_through_the_cache(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, place: str, number: int
) -> None:
    calls = Calls(monkeypatch, **{place: number})
    file = DataFile(path, Blocks(1))
    assert read(file, (5, 90), (100, 2 * BLOCK_BYTES)) == [content[5:90], content[100 : 2 * BLOCK_BYTES]]
    assert calls.direct == [True, False, False] if place == "at_read" else [False, False]
    file.close()


@NEEDS_DIRECT
@pytest.mark.usefixtures("cold")
def test_other_errors_are_not_refusals(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        Calls(patch, at_read=errno.EIO)
        file = DataFile(path, Blocks(1))
        for _ in range(2):  # the block came back
            with pytest.raises(OSError, match="Input/output error"):
                read(file, (5, 90))
        file.close()
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    with monkeypatch.context() as patch:
        Calls(patch, at_open=errno.EMFILE)
        with pytest.raises(OSError, match="Too many open files"):
            DataFile(path, Blocks(1))
    assert before == (os.listdir("/proc/self/fd") if before else []), "the other descriptor was not closed"


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("past_cache", [False, True])
def test_the_end_of_a_file_is_said_with_its_place(path: Path, content: bytes, past_cache: bool) -> None:
    for file_nbytes in (0, 4096, 5000, BLOCK_BYTES, BLOCK_BYTES + 77):
        path.write_bytes(content[:file_nbytes])
        file = DataFile(path, Blocks(1) if past_cache else None)
        with pytest.raises(EndOfFileError) as caught:
            read(file, (0, 10), (10, FILE_BYTES))
        assert caught.value.file_nbytes == file_nbytes
        file.close()
