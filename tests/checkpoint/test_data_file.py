"""Ranges of a file come the same out of the page cache and past it; what the cache has not is not brought there."""

import errno
import mmap
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from lowtide.checkpoint import data_file
from lowtide.checkpoint.data_file import Blocks, DataFile, EndOfFileError, FileChunk
from tests.checkpoint.page_cache import forget, resident_pages, supports_direct

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


def read(file: DataFile, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    memories = [bytearray(high - low) for low, high in ranges]
    file.read([FileChunk(low, memoryview(memory)) for (low, _), memory in zip(ranges, memories, strict=True)])
    return [bytes(memory) for memory in memories]


class Calls:
    """os.preadv, with the flag of the descriptors that it was called with, True for O_DIRECT, and what it gave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusal: int | None = None) -> None:
        self.direct: list[bool] = []
        self.nbytes: list[int] = []
        self.refusal = refusal  # the error of every read with O_DIRECT
        self._directs: set[int] = set()
        self._open, self._preadv = os.open, os.preadv
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "preadv", self.preadv)

    def open(self, path: str | Path, flags: int, mode: int = 0o777) -> int:
        descriptor = self._open(path, flags & ~data_file._DIRECT if self.refusal else flags, mode)
        (self._directs.add if flags & data_file._DIRECT else self._directs.discard)(descriptor)
        return descriptor

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        is_direct = descriptor in self._directs
        self.direct.append(is_direct)
        if is_direct and self.refusal is not None:
            raise OSError(self.refusal, os.strerror(self.refusal))
        count = self._preadv(descriptor, buffers, offset)
        self.nbytes.append(count)
        return count


RANGES = [
    [(0, 1)],
    [(0, FILE_BYTES)],
    [(4096, 8192)],
    [(4095, 8193)],
    [(FILE_BYTES - 1, FILE_BYTES)],
    [(BLOCK_BYTES - 7, BLOCK_BYTES + 5)],
    [(17, 400), (400, 401), (5000, BLOCK_BYTES + 3), (BLOCK_BYTES + 3, FILE_BYTES)],
    [(100, 9000), (100, 9000), (200, 300)],  # the same bytes for several
    [(5, 5), (5, 6)],
]


@pytest.mark.parametrize("ranges", RANGES, ids=str)
@pytest.mark.parametrize("past_cache", [False, True])
def test_any_ranges_are_what_the_file_has_there(
    path: Path, content: bytes, past_cache: bool, ranges: list[tuple[int, int]]
) -> None:
    file = DataFile(path, Blocks(1) if past_cache else None)
    assert read(file, ranges) == [content[low:high] for low, high in ranges]
    file.close()


def test_what_is_read_past_the_cache_does_not_come_into_it(path: Path, content: bytes) -> None:
    if not supports_direct(path):
        pytest.skip("the file system refuses O_DIRECT, or keeps files in memory")
    file = DataFile(path, Blocks(2))
    assert read(file, [(0, FILE_BYTES)]) == [content]
    assert resident_pages(path) == 0
    file.close()
    found = []  # several times, because a kernel that is short of memory drops pages whenever it likes
    for _ in range(5):
        file = DataFile(path)
        assert read(file, [(0, FILE_BYTES)]) == [content]
        found.append(resident_pages(path))
        file.close()
    assert -(-FILE_BYTES // mmap.PAGESIZE) in found


@NEEDS_DIRECT
def test_what_is_in_the_cache_is_read_there(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    path.read_bytes()
    calls = Calls(monkeypatch)
    file = DataFile(path, Blocks(1))
    assert read(file, [(5, FILE_BYTES)]) == [content[5:]]
    assert calls.direct == [False]
    file.close()


def test_without_blocks_everything_goes_through_the_cache(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    file = DataFile(path)
    assert read(file, [(5, FILE_BYTES)]) == [content[5:]]
    assert set(calls.direct) == {False}
    file.close()


@NEEDS_DIRECT
def test_requests_past_the_cache_fit_a_block_and_none_is_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(path)
    if not supports_direct(path):
        pytest.skip("the file system refuses O_DIRECT, or keeps files in memory")
    calls = Calls(monkeypatch)
    file = DataFile(path, Blocks(1))
    for begin, count in ((0, 2), (1, 3), (4095, 3), (4096, 2), (5000, 3)):
        calls.direct.clear()
        calls.nbytes.clear()
        read(file, [(begin, begin + 2 * BLOCK_BYTES)])
        assert calls.direct == [True] * count
        assert max(calls.nbytes) <= BLOCK_BYTES and max(calls.nbytes) - min(calls.nbytes) <= count * 4096
    file.close()


@NEEDS_DIRECT
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_only_the_read_is_read_through_the_cache(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(data_file, "_is_cached", lambda pages, low, high: False)
    calls = Calls(monkeypatch, refusal=number)
    file = DataFile(path, Blocks(1))
    assert read(file, [(5, 90), (100, 2 * BLOCK_BYTES)]) == [content[5:90], content[100 : 2 * BLOCK_BYTES]]
    assert calls.direct == [True, False, False]
    file.close()


@NEEDS_DIRECT
def test_a_file_system_that_refuses_to_open_is_read_through_the_cache(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_file, "_is_cached", lambda pages, low, high: False)
    monkeypatch.setattr(os, "open", failing_direct_open(errno.EINVAL))
    file = DataFile(path, Blocks(1))
    assert read(file, [(5, FILE_BYTES)]) == [content[5:]]
    file.close()


def failing_direct_open(number: int) -> Callable[..., int]:
    original = os.open

    def open_or_fail(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & data_file._DIRECT:
            raise OSError(number, os.strerror(number))
        return original(path, flags, mode)

    return open_or_fail


@NEEDS_DIRECT
def test_other_errors_are_not_refusals(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "_is_cached", lambda pages, low, high: False)
    with monkeypatch.context() as patch:
        Calls(patch, refusal=errno.EIO)
        file = DataFile(path, Blocks(1))
        for _ in range(2):  # the block came back
            with pytest.raises(OSError, match="Input/output error"):
                read(file, [(5, 90)])
        file.close()
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing_direct_open(errno.EMFILE))
        with pytest.raises(OSError, match="Too many open files"):
            DataFile(path, Blocks(1))
    assert before == (os.listdir("/proc/self/fd") if before else []), "the other descriptor was not closed"


@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("file_nbytes", [0, 4096, 5000, BLOCK_BYTES, BLOCK_BYTES + 77])
def test_the_end_of_a_file_is_said_with_its_place(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, past_cache: bool, file_nbytes: int
) -> None:
    monkeypatch.setattr(data_file, "_is_cached", lambda pages, low, high: False)
    path.write_bytes(content[:file_nbytes])
    file = DataFile(path, Blocks(1) if past_cache else None)
    with pytest.raises(EndOfFileError) as caught:
        read(file, [(0, 10), (10, FILE_BYTES)])
    assert caught.value.file_nbytes == file_nbytes
    file.close()


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DataFile(tmp_path / "none", Blocks(1))


def test_residency_asks_and_brings_nothing(path: Path) -> None:
    if not supports_direct(path):
        pytest.skip("the file system refuses O_DIRECT, or keeps files in memory")
    with path.open("rb") as file:
        pages = data_file._mapped(file.fileno())
        is_cached = partial(data_file._is_cached, pages)
        assert not is_cached(0, FILE_BYTES)
        assert resident_pages(path) == 0
        assert is_cached(FILE_BYTES + 1, FILE_BYTES + 2), "nothing to read past the cache there"
        file.seek(0)
        path.read_bytes()
        assert is_cached(0, FILE_BYTES) and is_cached(FILE_BYTES - 1, FILE_BYTES)
        os.posix_fadvise(file.fileno(), 2 << 20, 0, os.POSIX_FADV_DONTNEED)
        assert is_cached(0, 1 << 20) and not is_cached(0, FILE_BYTES)


def test_blocks_are_lent_one_at_a_time_and_do_not_overlap() -> None:
    blocks = Blocks(3)
    with blocks.lend() as first, blocks.lend() as second, blocks.lend() as third:
        for value, block in enumerate((first, second, third)):
            assert len(block) == BLOCK_BYTES
            block[:] = bytes([value]) * BLOCK_BYTES
        assert [block[0] for block in (first, second, third)] == [0, 1, 2]
        assert [block[-1] for block in (first, second, third)] == [0, 1, 2]
    with blocks.lend() as again:
        assert len(again) == BLOCK_BYTES
