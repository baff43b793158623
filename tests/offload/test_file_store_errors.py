"""What can go wrong with a file: each is an error that names file, rank, key and cause; none passes in silence."""

import errno
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lowtide.offload import AioOptions, FileStore, HostPool, OffloadError, StagedStore
from tests.kit.training import logged, refusal
from tests.offload.test_file_store import open_files

BLOCK = 8192
MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore(tmp_path, 3, AioOptions(block_size=BLOCK, thread_count=2))
    yield store
    store.close()


def some_bytes(nbytes: int) -> Tensor:
    return torch.arange(nbytes).remainder(251).to(torch.uint8)


def save(store: FileStore, key: str, values: Tensor) -> None:
    store.save(key, values).wait()


def loaded(store: FileStore, key: str, nbytes: int) -> Tensor:
    out = torch.empty(nbytes, dtype=torch.uint8)
    store.load(key, out).wait()
    return out


def error_of(act: Callable[..., object], *given: Any) -> str:
    return refusal(act, *given, kind=OffloadError)


# -- bytes that are not what they were --------------------------------------------------------------------------------


def spoil(store: FileStore, offset: int) -> None:
    """By another descriptor of the store's file, which has no name."""
    descriptor = os.open(f"/proc/self/fd/{open_files(store.path)[0][0]}", os.O_RDWR)
    os.pwrite(descriptor, bytes([255]), offset)
    os.close(descriptor)


@pytest.mark.parametrize("index", [0, 5000, BLOCK, 3 * BLOCK - 1, 3 * BLOCK + 99])
def test_a_corrupted_byte_is_found(store: FileStore, index: int) -> None:
    save(store, "before", some_bytes(100))
    save(store, "weights.exp_avg", some_bytes(3 * BLOCK + 100))
    spoil(store, 4096 + index)
    begin = index // BLOCK * BLOCK
    end = min(begin + BLOCK, 3 * BLOCK + 100)
    transfer = store.load("weights.exp_avg", some_bytes(3 * BLOCK + 100))
    for _ in range(2):
        assert re.fullmatch(
            rf"{re.escape(str(store.path))}: rank 3 could not load 'weights.exp_avg', bytes {begin:,} to {end:,} of "
            r"24,676: expected the saved checksum [0-9a-f]{16}, found [0-9a-f]{16}: the disk or the memory is "
            r"faulty, or another program wrote to the file. Check the machine, and continue from a checkpoint\.",
            error_of(transfer.wait),
        )
    assert torch.equal(loaded(store, "before", 100), some_bytes(100))  # others are as they were


def test_verification_can_be_turned_off(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 0, AioOptions(verify=False))
    save(store, "key", some_bytes(5000))
    spoil(store, 7)
    assert loaded(store, "key", 5000)[7] == 255
    store.close()


@pytest.mark.parametrize("size", [0, 4096, 2 * BLOCK, 2 * BLOCK + 5])
def test_a_file_that_was_cut_is_a_short_read(store: FileStore, size: int) -> None:
    save(store, "key", some_bytes(3 * BLOCK))
    os.truncate(f"/proc/self/fd/{open_files(store.path)[0][0]}", size)
    assert re.search(
        r"could not load 'key', bytes [0-9,]+ to [0-9,]+ of 24,576: expected [0-9,]+ bytes at offset [0-9,]+, "
        rf"found \d+ in a file of {size:,}: the file was truncated and its data are lost. Continue from a checkpoint.",
        error_of(loaded, store, "key", 3 * BLOCK),
    )


# -- no room ----------------------------------------------------------------------------------------------------------


def fail_writes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Lets one write pass, then none."""
    real, calls = os.pwritev, []

    def pwritev(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) > 1:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", pwritev)


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.ENOSPC, "No space left on device: the disk or its quota is full: free space, or choose another"),
        (errno.EDQUOT, "Disk quota exceeded: the disk or its quota is full: free space, or choose another"),
        (errno.EFBIG, "File too large: the file would be too large: raise `ulimit -f`"),
        (errno.EIO, "Input/output error: the device or its connection is faulty: see the system log"),
    ],
)
def test_what_could_not_be_saved_cannot_be_loaded(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, number: int, cause: str
) -> None:
    """Part of the key is new by then, part of it old: neither may be given out."""
    save(store, "key", some_bytes(3 * BLOCK))
    with monkeypatch.context() as patch:
        fail_writes(patch, number)
        failing = store.save("key", some_bytes(3 * BLOCK))
        out = torch.empty(3 * BLOCK, dtype=torch.uint8)
        for transfer in (store.load("key", out), store.load("key", out)):
            text = error_of(transfer.wait)
            assert "rank 3 cannot load 'key', because saving it failed: " in text and cause in text
        prefix = rf"^{re.escape(str(store.path))}: rank 3 could not save 'key', bytes [0-9,]+ to [0-9,]+ of 24,576: "
        assert failing.is_done and re.match(prefix + re.escape(cause), error_of(failing.wait))
    save(store, "key", some_bytes(3 * BLOCK))  # once there is room again
    assert torch.equal(loaded(store, "key", 3 * BLOCK), some_bytes(3 * BLOCK))


def test_a_transfer_that_no_thread_takes_is_an_error(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of the user that goes on when the main thread has ended. It waited forever."""
    save(store, "key", some_bytes(BLOCK + 1))
    with monkeypatch.context() as patch:
        ended = RuntimeError("cannot schedule new futures after shutdown")
        patch.setattr(ThreadPoolExecutor, "submit", Mock(side_effect=ended))
        for verb in ("load", "save"):
            transfer = getattr(store, verb)("key", some_bytes(BLOCK + 1))
            assert transfer.is_done and error_of(transfer.wait) == (
                f"{store.path}: rank 3 expected a thread to {verb} 'key', found {ended}; let the main thread wait for "
                "the training, and let this user start more threads (`ulimit -u`)"
            )
    assert "because saving it failed" in error_of(loaded, store, "key", BLOCK + 1)


def test_a_thread_that_the_system_refuses_is_an_error(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks stay in the pool's queue: later threads pass over them."""
    refused = RuntimeError("can't start new thread")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=refused))
        transfer = store.save("key", some_bytes(3 * BLOCK))
        assert transfer.is_done
        assert f"rank 3 expected a thread to save 'key', found {refused}; let" in error_of(transfer.wait)
    save(store, "key", some_bytes(3 * BLOCK))
    assert torch.equal(loaded(store, "key", 3 * BLOCK), some_bytes(3 * BLOCK))


def test_a_refused_thread_ends_no_transfer_that_another_thread_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its block was counted twice, and the memory given back while the first block was still written."""
    store = FileStore(tmp_path, 3, AioOptions(block_size=BLOCK, thread_count=3))
    go = {offset: threading.Event() for offset in (0, BLOCK)}
    real, starts = os.pwritev, [threading.Thread.start] * 2

    def pwritev(descriptor: int, parts: Any, offset: int) -> int:
        assert go[offset].wait(60)
        return real(descriptor, parts, offset)

    def start(thread: threading.Thread) -> None:
        if not starts:
            raise RuntimeError("can't start new thread")
        starts.pop()(thread)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", pwritev)
        patch.setattr(threading.Thread, "start", start)
        transfer = store.save("key", some_bytes(3 * BLOCK))
        go[BLOCK].set()
        time.sleep(0.2)  # the second thread comes to the third block, which was refused
        assert not transfer.is_done
        go[0].set()
        assert "can't start new thread" in error_of(transfer.wait)
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "lowtide-test", str(tmp_path)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("this user cannot mount a small file system")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_room_is_checked_and_taken_beforehand(small_disk: Path) -> None:
    store, other = FileStore(small_disk, 1), FileStore(small_disk, 2)
    assert error_of(store.reserve, [6 * MIB]) == (
        f"{small_disk}: rank 1 needs 6,291,456 bytes for {store.path.name}: 0 allocated + 4,194,304 free = "
        "4,194,304 < 6,291,456. Free 2,097,152 bytes, choose another folder, or offload less."
    )
    store.reserve([3 * MIB])
    store.reserve([3 * MIB])  # what it has counts
    text = error_of(other.reserve, [2 * MIB])
    assert "rank 2 needs 2,097,152 bytes " in text and " 0 allocated + 1,048,576 free =" in text
    store.reserve([0])
    save(store, "key", some_bytes(3 * MIB))
    for one in (store, other):
        one.close()


def test_more_than_the_disk_has_is_refused_with_the_numbers(store: FileStore) -> None:
    for reserve in (store.reserve, StagedStore(store, HostPool()).reserve):
        assert re.search(
            r"rank 3 needs 1,152,921,504,606,846,976 bytes for lowtide-.*: 0 allocated \+ [0-9,]+ free = [0-9,]+ < 1,",
            error_of(reserve, [1 << 60]),
        )


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EFBIG])
def test_room_is_only_checked_where_it_cannot_be_taken(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """But a file that may not grow is an error."""

    def posix_fallocate(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    if number == errno.EFBIG:
        text = error_of(store.reserve, [MIB])
        assert re.search(r"rank 3 needs 1,048,576 bytes for .*, and cannot allocate them, with .*ulimit -f", text)
    else:
        store.reserve([MIB])
        save(store, "key", some_bytes(MIB))


def test_a_folder_that_cannot_be_made_or_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cases = {
        tmp_path
        / "missing"
        / "below": "No such file or directory: choose a folder that exists, or that has an existing",
        tmp_path / "file": "File exists: choose a folder that exists",
        tmp_path / "file" / "below": "Not a directory: choose a folder that exists",
        Path(
            "/proc/self"
        ): "(No such file or directory|Operation not permitted|Permission denied): choose a folder that",
    }
    for folder, cause in cases.items():
        message = f"{folder}: rank 7 expected a writable folder, and cannot create a file there: {cause}"
        assert re.match(message, error_of(FileStore, folder, 7))


# -- a file system that refuses O_DIRECT ------------------------------------------------------------------------------


@pytest.mark.parametrize("refused_at", ["open", "write"])
def test_where_o_direct_is_refused_the_page_cache_is_used_and_the_log_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_at: str
) -> None:
    real_open, real_write = os.open, os.pwritev
    direct: set[int] = set()

    def open_file(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT and refused_at == "open":
            os.close(real_open(path, flags & ~os.O_DIRECT, *rest, **named))  # Linux makes the file all the same
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        descriptor = real_open(path, flags, *rest, **named)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def write(descriptor: int, *rest: Any) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_write(descriptor, *rest)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "pwritev", write)
    with logged() as messages:
        store = FileStore(tmp_path, 5, AioOptions(block_size=BLOCK))
        for nbytes in (1, BLOCK, 3 * BLOCK + 77):
            save(store, "key", some_bytes(nbytes))
            assert torch.equal(loaded(store, "key", nbytes), some_bytes(nbytes))
        store.close()
    assert messages == [
        f"{tmp_path}: rank 5: the file system refuses O_DIRECT. Offload goes through the page cache, which is slower "
        "and takes memory. Choose a folder on a local disk."
    ]
    assert not store.is_direct and list(tmp_path.iterdir()) == []


def test_o_direct_is_used_where_the_file_system_has_it(tmp_path: Path) -> None:
    (tmp_path / "probe").touch()
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the tests refuses O_DIRECT")
    with logged() as messages:
        for direct in (True, False):
            store = FileStore(tmp_path, 0, AioOptions(direct=direct))
            assert store.is_direct == direct
            store.close()
    assert messages == []


# -- settings and values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"block_size": 5000}, "block_size: expected a multiple of 4096 bytes, found 5000; the next multiple is 8192"),
        ({"block_size": 0}, "block_size: expected a multiple of 4096 bytes, found 0; the next multiple is 4096"),
        ({"thread_count": 0}, "thread_count: expected 1 or more threads, found 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], text: str) -> None:
    assert text in refusal(AioOptions, **settings)


def test_tensors_that_are_not_in_host_memory_are_refused(store: FileStore) -> None:
    values = torch.empty(4096, dtype=torch.uint8, device="meta")
    save(store, "key", some_bytes(4096))
    for name, act in (("values", store.save), ("out", store.load)):
        text = refusal(act, "key", values)
        assert f"{name}: expected host memory, found meta. Copy it into a buffer of a HostPool" in text
