"""The pool of host buffers: exact sizes, used again, never above the highest use."""

import gc
import platform
import resource
import threading
from itertools import product
from typing import Any

import pytest
import torch

from lowtide.offload import HostPool, HostStore, OffloadError, host_memory, keep_heap
from tests.kit.ranks import in_a_new_process
from tests.kit.resident import own_bytes
from tests.kit.training import refusal
from tests.offload.held import bytes_held

MIB = 1 << 20


def test_buffers_have_their_exact_size_at_aligned_addresses() -> None:
    for alignment, nbytes in product([1, 64, 4096, 1 << 16], [0, 1, 4095, 4096, 4097, 3 * MIB + 5]):
        pool = HostPool(alignment)
        buffers = [pool.take(nbytes) for _ in range(3)]
        for number, buffer in enumerate(buffers):
            assert buffer.shape == (nbytes,) and buffer.dtype == torch.uint8 and buffer.is_contiguous()
            assert buffer.data_ptr() % alignment == 0
            buffer.fill_(number)
        assert all((buffer == number).all() for number, buffer in enumerate(buffers))
        assert pool.bytes_in_use == 3 * -(-nbytes // alignment) * alignment
        for buffer in buffers:
            pool.give(buffer)
        assert pool.bytes_in_use == 0


def test_a_buffer_is_used_again_for_the_same_size() -> None:
    pool = HostPool()
    first = pool.take(10_000)
    address = first.data_ptr()
    pool.give(first)
    assert pool.take(12_000).data_ptr() == address  # both take 12,288 bytes
    assert pool.take(12_000).data_ptr() != address


def test_the_pool_never_holds_more_than_its_highest_use() -> None:
    pool = HostPool()
    sizes = torch.randint(1, 30, (200,), generator=torch.Generator().manual_seed(0)).mul(4096).tolist()
    in_use: list[torch.Tensor] = []
    highest = 0
    for size in sizes:
        in_use.append(pool.take(size))
        highest = max(highest, sum(map(len, in_use)))
        if len(in_use) > 4:
            pool.give(in_use.pop(0))
        assert pool.bytes_in_use == sum(map(len, in_use))
        assert pool.bytes_in_use + pool._kept_bytes <= pool.peak_bytes == highest


def test_a_store_in_host_memory_keeps_a_key_once() -> None:
    store = HostStore(HostPool(64))
    store.save("a", torch.ones(6000, dtype=torch.uint8)).wait()
    store.save("a", torch.ones(9000, dtype=torch.uint8)).wait()  # in place of the first, not beside it
    store.drop("a")
    store.save("b", torch.ones(1000, dtype=torch.uint8)).wait()
    assert bytes_held(store) == 1000 and store.pool.peak_bytes == 9024
    store.close()
    assert store.pool.bytes_in_use == 0


def test_close_gives_the_memory_back_to_the_system_but_for_buffers_in_use() -> None:
    pool = HostPool()
    kept, buffer = pool.take(5000).fill_(3), pool.take(64 * MIB)
    before = own_bytes()
    buffer.fill_(1)
    pool.give(buffer)
    del buffer
    assert own_bytes() - before > 60 * MIB
    pool.close()
    gc.collect()
    assert own_bytes() - before < 4 * MIB
    assert pool.peak_bytes == 64 * MIB + 8192
    del pool
    gc.collect()
    assert (kept == 3).all()


def test_what_is_not_the_pools_is_not_taken_back() -> None:
    pool = HostPool()
    buffer = pool.take(4096)
    pool.give(buffer)
    for other in (buffer, HostPool().take(4096)):
        assert "expected a buffer that this pool has lent, found 4,096 bytes at 0x" in refusal(pool.give, other)


def test_threads_may_share_a_pool() -> None:
    pool = HostPool()
    faults: list[int] = []

    def work(number: int) -> None:
        for turn in range(300):
            buffer = pool.take(4096 * (1 + (turn + number) % 5)).fill_(number)
            if not bool((buffer == number).all()):
                faults.append(number)
            pool.give(buffer)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [] and pool.bytes_in_use == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"alignment": 48}, "alignment: expected a power of two, found 48"),
        ({"alignment": 0}, "alignment: expected a power of two, found 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], text: str) -> None:
    assert text in refusal(HostPool, **settings)


def test_memory_that_the_system_refuses_is_an_error() -> None:
    with pytest.raises(OffloadError, match=r"expected 1,1\d\d(,\d\d\d){4} bytes of host memory, but the"):
        HostPool().take(1 << 50)


# -- pinned memory ----------------------------------------------------------------------------------------------------


class FakeDriver:
    """Registers host memory as CUDA's runtime does."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(host_memory, "_has_driver", lambda: True)
    monkeypatch.setattr(host_memory, "_cudart", lambda: driver)
    return driver


def test_pinned_memory_is_registered_at_its_exact_size_and_unregistered(driver: FakeDriver) -> None:
    pool = HostPool(4096, pinned=True)
    buffer = pool.take(5000)
    assert driver.registered == {buffer.data_ptr(): 8192}
    pool.give(buffer)
    pool.close()
    del buffer
    gc.collect()
    assert driver.registered == {}


def test_memory_that_cannot_be_pinned_is_an_error(driver: FakeDriver) -> None:
    driver.code = 2
    message = r"expected to pin 8,192 bytes of host memory, but the driver refuses \(error 2\)\. .* raise `ulimit -l`"
    with pytest.raises(OffloadError, match=message):
        HostPool(4096, pinned=True).take(5000)


def test_sizes_that_vary_come_to_an_end_of_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    allocate_host = host_memory.allocate_host

    def allocate(nbytes: int, alignment: int, _: bool) -> torch.Tensor:
        pinned.append(nbytes)
        return allocate_host(nbytes, alignment)

    monkeypatch.setattr(host_memory, "allocate_host", allocate)
    pool = HostPool(64, pinned=True)
    for round_number in range(40):
        buffers = [pool.take(64 * (1 + (7 * number + 5 * round_number) % 13)) for number in range(3)]
        for buffer in buffers:
            pool.give(buffer)
        if round_number == 19:
            pinned.clear()
    assert not pinned and pool.bytes_in_use + pool._kept_bytes == pool.peak_bytes


# -- the heap ---------------------------------------------------------------------------------------------------------


def faults() -> int:
    """Of a round, the median of twelve."""
    keep_heap()
    counts = []
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.empty(100 << 10, dtype=torch.uint8).fill_(1) for _ in range(160)]
        del blocks
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return sorted(counts)[len(counts) // 2]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library")
def test_memory_that_is_freed_at_the_end_of_the_heap_is_faulted_in_once() -> None:
    """160 blocks of 100 KiB are 4000 pages: below what is mapped by itself, above what is given back at once.

    Without the call the count is 2000 to 4000, unless the imports have freed a large block before.
    """
    assert in_a_new_process(faults) < 100
