"""A file written from its beginning to its end: what was written is there, and errors come through."""

import errno
import fcntl
import os
import random
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

from lowtide.offload import sequential_file
from lowtide.offload.sequential_file import BLOCK_BYTES, SequentialFile

SIZES = [0, 1, 4095, 4096, 4097, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 5 * BLOCK_BYTES + 4099]


def content_of(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


@pytest.fixture(params=["direct", "cached"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """cached: a file system that knows no O_DIRECT."""
    if request.param == "cached":
        refuse_direct_open(monkeypatch)
    return tmp_path


def refuse_direct_open(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gives the list of the flags with which files are opened."""
    real, seen = os.open, []

    def refusing(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        seen.append(flags)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refusing)
    return seen


def writer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lowtide file writer"]


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_in_the_file(folder: Path, nbytes: int) -> None:
    content = content_of(nbytes)
    with SequentialFile(folder / "file") as file:
        assert file.write(content) == nbytes
        assert file.nbytes == nbytes
    assert (folder / "file").read_bytes() == content
    assert writer_threads() == []


def test_pieces_of_any_length_follow_each_other(folder: Path) -> None:
    content = content_of(2 * BLOCK_BYTES + 12345)
    draw, start = random.Random(1), 0
    with SequentialFile(folder / "file") as file:
        while start < len(content):
            end = start + draw.choice((0, 1, 100, 70001, BLOCK_BYTES // 2))
            piece = bytearray(content[start:end])
            file.write(memoryview(piece))
            piece[:] = bytes(len(piece))  # they may be changed at once
            start = end
        assert file.nbytes == len(content)
        file.flush()
    assert (folder / "file").read_bytes() == content


def test_values_of_other_types_are_taken_as_their_bytes(tmp_path: Path) -> None:
    with SequentialFile(tmp_path / "file") as file:
        assert file.write(memoryview(b"abcdefgh").cast("d")) == 8
    assert (tmp_path / "file").read_bytes() == b"abcdefgh"


def test_a_longer_file_of_the_same_name_is_replaced(folder: Path) -> None:
    (folder / "file").write_bytes(bytes(3 * BLOCK_BYTES))
    with SequentialFile(folder / "file") as file:
        file.write(b"short")
    assert (folder / "file").read_bytes() == b"short"


def test_a_file_system_without_direct_writes_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = refuse_direct_open(monkeypatch)
    with SequentialFile(tmp_path / "file") as file:
        file.write(b"abc")
    first, second = seen
    assert first & os.O_DIRECT and second == first & ~os.O_DIRECT
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_direct_writes_that_are_refused_later_go_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems take the flag and refuse the write."""
    real = os.pwrite

    def refusing(descriptor: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    content = content_of(BLOCK_BYTES + 5)
    with SequentialFile(tmp_path / "file") as file:
        file.write(content)
    assert (tmp_path / "file").read_bytes() == content


def test_short_writes_are_continued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, counts = os.pwrite, [100, 4096, 5000, 1]

    def short(descriptor: int, data: Any, offset: int) -> int:
        if counts and not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            data = data[: counts.pop(0)]
        elif counts:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)  # the kernel itself may write a part that is not aligned
            data = data[: counts.pop(0)]
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", short)
    content = content_of(BLOCK_BYTES + 5)
    with SequentialFile(folder / "file") as file:
        file.write(content)
    assert not counts and (folder / "file").read_bytes() == content


def fail_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    real, calls = os.pwrite, []

    def failing(descriptor: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) > count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)


@pytest.mark.parametrize("nbytes", [5, BLOCK_BYTES, 9 * BLOCK_BYTES + 1])
def test_a_full_disk_is_an_error_at_a_later_call(folder: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    fail_after(monkeypatch, 0)
    with pytest.raises(OSError, match="No space left on device"), SequentialFile(folder / "file") as file:
        file.write(content_of(nbytes))
    assert writer_threads() == []


def test_an_error_of_the_last_block_is_not_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_after(monkeypatch, 2)
    file = SequentialFile(folder / "file")
    file.write(content_of(2 * BLOCK_BYTES + 1))
    with pytest.raises(OSError, match="No space left on device"):
        file.close()
    file.close()  # a second time is fine
    assert writer_threads() == []


def test_the_limit_of_a_process_is_an_error_too(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES + 1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"), SequentialFile(folder / "file") as file:
            file.write(content_of(2 * BLOCK_BYTES))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_error_of_the_caller_ends_the_thread_and_keeps_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), SequentialFile(tmp_path / "file") as file:
        file.write(content_of(BLOCK_BYTES))
        raise KeyError("mine")
    assert writer_threads() == []


@pytest.mark.parametrize(("name", "kind"), [("absent/file", FileNotFoundError), (".", IsADirectoryError)])
def test_a_file_that_cannot_be_made_is_an_error_at_once(folder: Path, name: str, kind: type[OSError]) -> None:
    with pytest.raises(kind):
        SequentialFile(folder / name)
    assert writer_threads() == []


def test_the_file_is_on_the_disk_when_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_write, real_sync, real_cut = os.pwrite, os.fsync, os.ftruncate

    def noted(name: str, real: Any) -> Any:
        def call(*args: Any) -> Any:
            order.append(name)
            return real(*args)

        return call

    monkeypatch.setattr(os, "pwrite", noted("write", real_write))
    monkeypatch.setattr(os, "ftruncate", noted("cut", real_cut))
    monkeypatch.setattr(os, "fsync", noted("sync", real_sync))
    with SequentialFile(tmp_path / "file") as file:
        file.write(b"abc")
    assert order == ["write", "cut", "sync"]


def test_the_blocks_are_what_direct_writes_need() -> None:
    assert BLOCK_BYTES % sequential_file._ALIGNMENT_BYTES == 0
