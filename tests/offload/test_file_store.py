"""A store's file: how it is divided among keys, what its checksums tell apart, and that it never stays behind."""

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.offload import AioOptions, FileStore, round_up
from lowtide.offload.block_file import SECTOR_BYTES, Checksum
from lowtide.offload.file_store import FileSpace
from tests.engine.scripts import run_on_ranks
from tests.kit.ranks import RankError, in_a_new_process

SIZE = 1_000_003

# -- regions, integers only -------------------------------------------------------------------------------------------


def test_regions_never_overlap_and_free_neighbours_become_one() -> None:
    regions, chance = FileSpace(4096), random.Random(0)
    taken: dict[int, int] = {}  # size by offset
    for _ in range(2000):
        if taken and chance.random() < 0.5:
            offset = chance.choice(sorted(taken))
            regions.give(offset, taken.pop(offset))
        else:
            nbytes = chance.randint(1, 40_000)
            offset = regions.take(nbytes)
            assert offset % 4096 == 0
            taken[offset] = nbytes
        ends = [offset + round_up(nbytes, 4096) for offset, nbytes in sorted(taken.items())]
        assert all(end <= offset for end, offset in zip(ends, sorted(taken)[1:], strict=False))
        assert regions.end == max(ends, default=0)
        assert sum(regions._sizes.values()) == regions.end - sum(round_up(nbytes, 4096) for nbytes in taken.values())
    for offset, nbytes in taken.items():
        regions.give(offset, nbytes)
    regions.give(regions.take(0), 0)
    assert regions.end == len(regions._sizes) == 0


def test_the_smallest_gap_that_suffices_is_used() -> None:
    regions = FileSpace(4096)
    offsets = {nbytes: regions.take(nbytes) for nbytes in (40960, 4096, 8192, 4095, 20480, 100)}
    for nbytes in (40960, 8192, 20480):
        regions.give(offsets[nbytes], nbytes)
    assert regions.take(8000) == offsets[8192]
    assert regions.take(8193) == offsets[20480]
    assert regions.take(8192) == offsets[20480] + 12288  # what that left
    assert regions.take(50_000) == offsets[100] + 4096  # at the end


# -- checksums --------------------------------------------------------------------------------------------------------

BLOCK_BYTES = 5 * SECTOR_BYTES + 803  # whole sectors, words beyond them, bytes beyond those


def test_any_byte_and_any_lost_or_misplaced_sector_that_changes_changes_the_checksum() -> None:
    checksum = Checksum(1 << 16)
    data, old = (bytearray(random.Random(seed).randbytes(BLOCK_BYTES)) for seed in (1, 2))
    expected = checksum.of(memoryview(data))
    for index in range(BLOCK_BYTES):
        data[index] ^= 1 << index % 8
        assert checksum.of(memoryview(data)) != expected
        data[index] ^= 1 << index % 8
    assert checksum.of(memoryview(data)) == expected
    sectors = [slice(start, start + SECTOR_BYTES) for start in range(0, 5 * SECTOR_BYTES, SECTOR_BYTES)]
    for here, there in zip(sectors, [*sectors[1:], sectors[0]], strict=True):
        for its, others in (
            (old[here], data[there]),
            (bytes(SECTOR_BYTES), data[there]),
            (data[there], data[there]),
            (data[there], data[here]),  # swapped
        ):
            changed = bytearray(data)
            changed[here], changed[there] = its, others
            assert checksum.of(memoryview(changed)) != expected


def test_the_checksum_does_not_depend_on_the_address() -> None:
    for nbytes in (0, 1, 7, 8, 9, 4095, 4096, 4097, 1 << 16):
        checksum, data = Checksum(1 << 16), random.Random(0).randbytes(nbytes)
        sums = {checksum.of(memoryview(bytearray(skipped) + data)[skipped:]) for skipped in (0, 1, 3, 8)}
        assert len(sums) == 1, nbytes


# -- the end of a file ------------------------------------------------------------------------------------------------


def numbered(number: int) -> Tensor:
    return torch.full((SIZE,), number, dtype=torch.uint8)


def holds(store: FileStore, key: str, number: int) -> bool:
    out = torch.empty(SIZE, dtype=torch.uint8)
    store.load(key, out).wait()
    return torch.equal(out, numbered(number))


def open_files(folder: Path) -> list[tuple[int, str]]:
    """(descriptor, name) of this process's in the folder, with a name or without."""
    links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    files = [(int(link.name), os.readlink(link)) for link in links if os.path.islink(link)]
    return [(number, name) for number, name in files if name.startswith(str(folder))]


def disk_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("lowtide disk")}


def save_and_be_killed(folder: Path) -> None:
    store = FileStore(folder, 0)
    store.save("key", numbered(1)).wait()
    ((_, name),) = open_files(folder)
    assert name.endswith("-rank0.offload (deleted)")
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_of_a_process_that_was_killed(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        in_a_new_process(save_and_be_killed, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_process_may_end_while_transfers_run(tmp_path: Path) -> None:
    source = f"""
from lowtide.offload import AioOptions, FileStore, round_up
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


def test_a_folder_is_made_and_one_that_is_removed_takes_nothing_along(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "folder", 0)
    store.save("key", numbered(1)).wait()
    (tmp_path / "folder").rmdir()  # it is empty
    assert holds(store, "key", 1)
    store.reserve([4 * SIZE])
    store.save("other", numbered(2)).wait()
    assert holds(store, "other", 2) and holds(store, "key", 1)
    store.close()


@pytest.mark.parametrize("closes", [True, False])
def test_a_store_that_is_closed_or_that_nobody_has_lets_go_of_file_and_threads(tmp_path: Path, closes: bool) -> None:
    before = disk_threads()
    store = FileStore(tmp_path, 0)
    save = store.save("key", numbered(1))
    mine = disk_threads() - before  # they are started as they are needed
    assert len(open_files(tmp_path)) == 1 and 0 < len(mine) <= store.aio.thread_count
    if closes:
        store.close()
    save.wait()
    del store, save  # the threads may hold the store for a moment longer
    for thread in mine if not closes else ():
        thread.join(timeout=10)
    assert open_files(tmp_path) == [] and not any(thread.is_alive() for thread in mine)


def test_room_of_keys_that_are_dropped_or_change_their_size_is_used_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 0)
    sizes = [SIZE, 5, 4096, 70_000]
    store.reserve(sizes)
    ((descriptor, _),) = open_files(tmp_path)
    for turn in range(5):
        for index, nbytes in enumerate(sizes):
            store.save(f"{turn} {index}", torch.zeros(nbytes - 1, dtype=torch.uint8)).wait()
            store.save(f"{turn} {index}", torch.ones(nbytes, dtype=torch.uint8)).wait()
        assert os.fstat(descriptor).st_size == 1_003_520 + 4096 + 4096 + 73_728
        for index in range(len(sizes)):
            store.drop(f"{turn} {index}")
    store.close()
