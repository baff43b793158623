"""A staged store moves any tensor through the buffers of a pool, into a store that takes host memory only."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowtide.offload import HostPool, OffloadError
from lowtide.offload.file_store import FileStore
from lowtide.offload.staged_store import StagedStore
from tests.offload.activation_stores import MemoryStore, assert_same_bits, gradients, offload_for

NBYTES = 10_000
BUFFER = 12_288  # that many bytes, rounded up to pages


def values(seed: int, nbytes: int = NBYTES) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_bytes_come_back_and_memory_is_the_pools(tmp_path: Path) -> None:
    pool = HostPool(2 * BUFFER)
    store = StagedStore(FileStore(tmp_path, 0), pool)
    saves = [store.save(str(seed), values(seed)) for seed in range(10)]
    for save in saves:
        save.wait()
    assert store.bytes_held == 10 * NBYTES
    outs = [torch.empty(NBYTES, dtype=torch.uint8) for _ in range(10)]
    loads = [store.load(str(seed), out) for seed, out in enumerate(outs)]
    for seed, load in enumerate(loads):
        load.wait()
        assert load.is_done and torch.equal(outs[seed], values(seed))
    store.close()
    store.close()
    assert pool.peak_bytes == 2 * BUFFER and pool.bytes_in_use == 0


def test_transfers_of_a_key_are_in_order() -> None:
    """Though saves are not waited for."""
    store, out = StagedStore(MemoryStore(0.002), HostPool()), torch.empty(NBYTES, dtype=torch.uint8)
    for seed in range(5):
        store.save("a", values(seed))
    store.load("a", out).wait()
    assert torch.equal(out, values(4))
    store.drop("a")
    store.save("a", values(9))
    store.load("a", out).wait()
    assert torch.equal(out, values(9))
    store.close()


def test_the_callers_bytes_are_free_before_the_store_has_them() -> None:
    inner = MemoryStore(0.2)
    store, given, out = StagedStore(inner, HostPool()), values(0), torch.empty(NBYTES, dtype=torch.uint8)
    save = store.save("a", given)
    assert save.is_done
    save.wait()
    given.zero_()
    store.load("a", out).wait()
    assert torch.equal(out, values(0))
    store.close()


def test_a_save_that_failed_later_is_told_on_load() -> None:
    inner = MemoryStore()
    inner.refusing.update(("save", "load"))
    pool = HostPool()
    store = StagedStore(inner, pool)
    store.save("a", values(0))
    with pytest.raises(OffloadError, match=r"^the disk of the test is gone \(load\)$"):
        store.load("a", torch.empty(NBYTES, dtype=torch.uint8)).wait()
    store.close()
    assert pool.bytes_in_use == 0


def test_a_pool_without_room_says_so() -> None:
    store = StagedStore(MemoryStore(), HostPool(BUFFER - 1))
    with pytest.raises(OffloadError, match=f"0 bytes in use \\+ 12,288 wanted = 12,288 > limit {BUFFER - 1:,}"):
        store.save("a", values(0))
    store.close()


def test_errors_are_those_of_every_store() -> None:
    store, out = StagedStore(MemoryStore(), HostPool()), torch.empty(NBYTES, dtype=torch.uint8)
    with pytest.raises(OffloadError, match="expected a saved key, found 'a'"):
        store.load("a", out)
    with pytest.raises(OffloadError, match="expected a saved key, found 'a'"):
        store.drop("a")
    store.save("a", values(0))
    with pytest.raises(ValueError, match="out: expected the 10,000 bytes saved under 'a', found 9,999"):
        store.load("a", out[1:])
    with pytest.raises(ValueError, match="values: expected a contiguous tensor of uint8 with one dim"):
        store.save("b", out.view(2, -1))
    store.close()
    for call in (lambda: store.save("a", out), lambda: store.load("a", out), lambda: store.drop("a")):
        with pytest.raises(OffloadError, match="expected an open store for 'a', found it closed"):
            call()


def test_training_through_it_is_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)))
    x = torch.randn(64, 32)
    pool = HostPool(4 * 8192)
    store = StagedStore(FileStore(tmp_path, 0), pool)
    offload = offload_for(model, store, 3 * 8192)
    expected = gradients(model, lambda: model(x).square().mean())
    for _ in range(3):
        assert_same_bits(gradients(model, lambda: model(x).square().mean(), offload), expected)
    offload.close()
    assert store.bytes_held == 0 < offload.offloaded_bytes
    store.close()
    assert pool.bytes_in_use == 0 and pool.peak_bytes <= 4 * 8192
