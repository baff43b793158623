"""A staged store moves any tensor through the buffers of a pool, into a store that takes host memory only."""

from pathlib import Path

import torch
from torch import Tensor

from lowtide.offload import FileStore, HostPool, OffloadError, StagedStore
from tests.kit.training import refusal
from tests.offload.held import bytes_held
from tests.offload.slow_store import SlowStore

NBYTES = 10_000


def values(seed: int) -> Tensor:
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def loaded(store: StagedStore, key: str) -> Tensor:
    out = torch.empty(NBYTES, dtype=torch.uint8)
    store.load(key, out).wait()
    return out


def test_bytes_come_back_and_memory_is_the_pools(tmp_path: Path) -> None:
    pool = HostPool()
    store = StagedStore(FileStore(tmp_path, 0), pool)
    saves = [store.save(str(seed), values(seed)) for seed in range(10)]
    for save in saves:
        save.wait()
    assert bytes_held(store) == 10 * NBYTES
    outs = [torch.empty(NBYTES, dtype=torch.uint8) for _ in range(10)]
    loads = [store.load(str(seed), out) for seed, out in enumerate(outs)]
    for seed, load in enumerate(loads):
        load.wait()
        assert load.is_done and torch.equal(outs[seed], values(seed))
    store.close()
    assert pool.bytes_in_use == 0


def test_the_callers_bytes_are_free_before_the_store_has_them() -> None:
    store, given = StagedStore(SlowStore(0.2), HostPool()), values(0)
    save = store.save("a", given)
    assert save.is_done
    save.wait()
    given.zero_()
    assert torch.equal(loaded(store, "a"), values(0))
    store.close()


def test_a_save_that_failed_later_is_told_on_load() -> None:
    inner, pool = SlowStore(), HostPool()
    inner.refusing.update(("save", "load"))
    store = StagedStore(inner, pool)
    store.save("a", values(0))
    assert refusal(loaded, store, "a", kind=OffloadError) == "the disk of the test is gone (load)"
    store.close()
    assert pool.bytes_in_use == 0
