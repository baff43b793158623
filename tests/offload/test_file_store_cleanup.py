"""A store's file never stays behind, and stores do not meet, whatever happens to their processes and their folder."""

import gc
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.offload import AioOptions, FileStore
from tests.engine.scripts import run_on_ranks
from tests.kit.ranks import RankError, in_a_new_process

SIZE = 1_000_003


def numbered(number: int) -> Tensor:
    return torch.full((SIZE,), number, dtype=torch.uint8)


def holds(store: FileStore, key: str, number: int) -> bool:
    out = torch.empty(SIZE, dtype=torch.uint8)
    store.load(key, out).wait()
    return torch.equal(out, numbered(number))


def open_files(folder: Path) -> list[str]:
    """Of this process, in the folder, with a name or without."""
    links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.islink(link)]
    return [name for name in names if name.startswith(str(folder))]


def disk_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lowtide disk")]


def save_and_be_killed(folder: Path) -> None:
    store = FileStore(folder, 0)
    store.save("key", numbered(1)).wait()
    (name,) = open_files(folder)
    assert name.endswith("-rank0.offload (deleted)")
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_of_a_process_that_was_killed(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        in_a_new_process(save_and_be_killed, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_process_may_end_while_transfers_run(tmp_path: Path) -> None:
    source = f"""
from lowtide.offload import AioOptions, FileStore
store = FileStore({str(tmp_path)!r}, 0, AioOptions(block_size=4096))
for index in range(20):
    store.save(str(index), torch.ones({SIZE}, dtype=torch.uint8))
"""
    (end,) = run_on_ranks(1, source, tmp_path)
    assert (end.status, end.err) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.err"]


def test_two_stores_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    stores = [FileStore(tmp_path, 0, AioOptions(block_size=65536)) for _ in range(2)]  # the same rank, even
    assert stores[0].path != stores[1].path
    for turn in range(3):
        transfers = [store.save("key", numbered(10 * turn + index)) for index, store in enumerate(stores)]
        for transfer in transfers:
            transfer.wait()
        assert all(holds(store, "key", 10 * turn + index) for index, store in enumerate(stores))
    stores[0].close()
    assert holds(stores[1], "key", 21)
    stores[1].close()


def test_a_folder_that_is_removed_takes_nothing_along(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "folder", 0)
    store.save("key", numbered(1)).wait()
    assert list((tmp_path / "folder").iterdir()) == []
    (tmp_path / "folder").rmdir()
    assert holds(store, "key", 1)
    store.reserve([4 * SIZE])
    store.save("other", numbered(2)).wait()
    assert holds(store, "other", 2) and holds(store, "key", 1)
    store.close()


def test_close_lets_go_of_file_and_threads(tmp_path: Path) -> None:
    before = set(disk_threads())
    store = FileStore(tmp_path, 0)
    assert len(open_files(tmp_path)) == 1 and len(set(disk_threads()) - before) == store.aio.thread_count
    store.save("key", numbered(1))
    store.close()
    assert open_files(tmp_path) == [] and set(disk_threads()) <= before


def test_a_store_that_nobody_has_any_more_lets_go_too(tmp_path: Path) -> None:
    before = set(disk_threads())
    store = FileStore(tmp_path, 0)
    store.save("key", numbered(1)).wait()
    mine = set(disk_threads()) - before
    del store
    gc.collect()
    for thread in mine:
        thread.join(timeout=10)
    assert open_files(tmp_path) == [] and not any(thread.is_alive() for thread in mine)


def test_room_of_keys_that_are_dropped_or_change_their_size_is_used_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 0)
    sizes = [SIZE, 5, 4096, 70_000]
    needed = 1_003_520 + 4096 + 4096 + 73_728
    store.reserve(sizes)
    for turn in range(5):
        for index, nbytes in enumerate(sizes):
            store.save(f"{turn} {index}", torch.zeros(nbytes - 1, dtype=torch.uint8)).wait()
            store.save(f"{turn} {index}", torch.ones(nbytes, dtype=torch.uint8)).wait()
        descriptor = os.open(f"/proc/self/fd/{descriptor_of(store)}", os.O_RDONLY)
        assert os.fstat(descriptor).st_size == needed
        os.close(descriptor)
        for index in range(len(sizes)):
            store.drop(f"{turn} {index}")
    store.close()


def descriptor_of(store: FileStore) -> int:
    links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return next(
        int(link.name) for link in links if os.path.islink(link) and os.readlink(link).startswith(str(store.path))
    )
