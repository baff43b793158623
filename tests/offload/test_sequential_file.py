"""A file written from its beginning to its end: what was written is there, and errors come through."""

import errno
import fcntl
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lowtide.offload.sequential_file import BLOCK_BYTES, SequentialFile

SIZES = [0, 1, 4095, 4096, 4097, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 5 * BLOCK_BYTES + 4099]


def content_of(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture(params=["direct", "cached", "after the script"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """cached: a file system that knows no O_DIRECT. after the script: no thread can be started. No thread is left."""
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        return real(path, flags, *rest, **options)

    if request.param == "cached":
        monkeypatch.setattr(os, "open", refusing)
    if request.param == "after the script":
        refused = RuntimeError("can't create new thread at interpreter shutdown")
        monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=refused))
    yield tmp_path / "file"
    assert not any(thread.name == "lowtide file writer" for thread in threading.enumerate())


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_in_the_file(path: Path, nbytes: int) -> None:
    """And nothing of a longer one of that name."""
    path.write_bytes(bytes(6 * BLOCK_BYTES))
    content = content_of(nbytes)
    with SequentialFile(path) as file:
        assert file.write(content) == file.nbytes == nbytes
    assert path.read_bytes() == content


def test_pieces_of_any_length_and_type_follow_each_other(path: Path) -> None:
    content = content_of(2 * BLOCK_BYTES + 12345)
    draw, start = random.Random(1), 0
    with SequentialFile(path) as file:
        while start < len(content):
            end = start + draw.choice((0, 1, 100, 70001, BLOCK_BYTES // 2))
            piece = bytearray(content[start:end])
            file.write(memoryview(piece))
            piece[:] = bytes(len(piece))  # they may be changed at once
            start = end
        assert file.nbytes == len(content)
        file.flush()
        assert file.write(memoryview(b"abcdefgh").cast("d")) == 8
    assert path.read_bytes() == content + b"abcdefgh"


def write_as(monkeypatch: pytest.MonkeyPatch, path: Path, change: Any) -> None:
    """change: of (descriptor, bytes) before they are written; the file must have all in the end."""
    real = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda descriptor, data, offset: real(descriptor, change(descriptor, data), offset)
    )
    content = content_of(BLOCK_BYTES + 5)
    with SequentialFile(path) as file:
        file.write(content)
    assert path.read_bytes() == content


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_direct_writes_that_are_refused_later_go_through_the_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Some file systems take the flag and refuse the write."""

    def refuse(descriptor: int, data: Any) -> Any:
        if is_direct(descriptor):
            raise OSError(number, os.strerror(number))
        return data

    write_as(monkeypatch, path, refuse)


def test_short_writes_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [100, 4096, 5000, 1]

    def shorten(descriptor: int, data: Any) -> Any:
        if counts and is_direct(descriptor):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)  # the kernel itself may write a part that is not aligned
        return data[: counts.pop(0)] if counts else data

    write_as(monkeypatch, path, shorten)
    assert not counts


def fail_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    real, calls = os.pwrite, []

    def failing(descriptor: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) > count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)


@pytest.mark.parametrize("nbytes", [5, BLOCK_BYTES, 9 * BLOCK_BYTES + 1])
def test_a_full_disk_is_an_error_at_a_later_call(path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    fail_after(monkeypatch, 0)
    with pytest.raises(OSError, match="No space left on device"), SequentialFile(path) as file:
        file.write(content_of(nbytes))


def test_an_error_of_the_last_block_is_not_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_after(monkeypatch, 2)
    file = SequentialFile(path)
    file.write(content_of(2 * BLOCK_BYTES + 1))
    with pytest.raises(OSError, match="No space left on device"):
        file.close()
    file.close()  # a second time is fine


def test_an_error_of_the_caller_keeps_its_own_name(path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), SequentialFile(path) as file:
        file.write(content_of(BLOCK_BYTES))
        raise KeyError("mine")


@pytest.mark.parametrize(("name", "kind"), [("absent/file", FileNotFoundError), (".", IsADirectoryError)])
def test_a_file_that_cannot_be_made_is_an_error_at_once(path: Path, name: str, kind: type[OSError]) -> None:
    with pytest.raises(kind):
        SequentialFile(path.parent / name)


def test_the_file_is_on_the_disk_when_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noted(name: str, real: Any) -> Any:
        def call(*args: Any) -> Any:
            order.append(name)
            return real(*args)

        return call

    for name in ("pwrite", "ftruncate", "fsync"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    with SequentialFile(tmp_path / "file") as file:
        file.write(b"abc")
    assert order == ["pwrite", "ftruncate", "fsync"]
