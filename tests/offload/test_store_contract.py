"""What every store does alike, wherever it keeps its bytes."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.offload import AioOptions, FileStore, HostPool, HostStore, OffloadError, StagedStore, Store, Transfer
from tests.kit.training import refusal
from tests.offload.held import bytes_held
from tests.offload.slow_store import SlowStore

SMALL_BLOCK = 8192
SIZES = [0, 1, 511, 512, 4095, 4096, 4097, SMALL_BLOCK, 3 * SMALL_BLOCK, 3 * SMALL_BLOCK + 4099, (1 << 20) + 1]


class LateSaves(FileStore):
    """A load that does not wait for the thread that saves its key overtakes it."""

    def save(self, key: str, values: Tensor) -> Transfer:
        time.sleep(0.01)
        return super().save(key, values)


STORES: dict[str, Callable[[Path], Store]] = {
    "host": lambda folder: HostStore(),
    "file, small blocks": lambda folder: FileStore(folder, 0, AioOptions(block_size=SMALL_BLOCK, thread_count=4)),
    "file, page cache": lambda folder: FileStore(folder, 0, AioOptions(block_size=SMALL_BLOCK, direct=False)),
    "staged": lambda folder: StagedStore(LateSaves(folder, 0), HostPool()),
    "file, unverified": lambda folder: FileStore(folder, 0, AioOptions(verify=False)),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = STORES[request.param](tmp_path)
    yield store
    store.close()


def random_bytes(nbytes: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def loaded(store: Store, key: str, nbytes: int) -> Tensor:
    out = torch.full((nbytes,), 99, dtype=torch.uint8)
    store.load(key, out).wait()
    return out


@pytest.mark.parametrize("skipped", [0, 1, 64], ids="address + {}".format)
def test_what_is_loaded_is_what_was_saved(store: Store, skipped: int) -> None:
    """Nothing beside it is touched; it stays when its tensor changes, and when it was loaded."""
    pool = HostPool(alignment=store.alignment_bytes)
    store.reserve(SIZES)
    assert store.is_host_memory == isinstance(store, HostStore)
    for nbytes in SIZES:
        values, expected = pool.take(nbytes + skipped)[skipped:], random_bytes(nbytes, 1)
        store.save("key", values.copy_(expected)).wait()
        assert torch.equal(values, expected), nbytes
        values.zero_()
        for _ in range(2):
            whole = pool.take(nbytes + skipped + 64).fill_(77)
            store.load("key", whole[skipped : skipped + nbytes]).wait()
            assert torch.equal(whole[skipped : skipped + nbytes], expected), nbytes
            assert (torch.cat([whole[:skipped], whole[skipped + nbytes :]]) == 77).all(), nbytes


def test_many_keys_of_every_size_interleaved(store: Store) -> None:
    sizes = {f"layer.{index}": SIZES[index % len(SIZES)] + index for index in range(60)}
    values = {key: random_bytes(nbytes, len(key) + nbytes) for key, nbytes in sizes.items()}
    transfers = [store.save(key, values[key]) for key in sizes]
    outs = {key: torch.empty(nbytes, dtype=torch.uint8) for key, nbytes in sizes.items()}
    for index, key in enumerate(sizes):  # each load is asked for while saves of others, or its own, run
        transfers.append(store.load(key, outs[key]))
        if index % 3 == 0:
            values[key], outs[key] = random_bytes(sizes[key], 1000 + index), torch.empty_like(outs[key])
            transfers += [store.save(key, values[key]), store.load(key, outs[key])]
    for transfer in transfers:
        transfer.wait()
        assert transfer.is_done
    for key in sizes:
        assert torch.equal(outs[key], values[key]), key


def test_transfers_of_one_key_keep_their_order(store: Store) -> None:
    versions = [random_bytes(SMALL_BLOCK * 9 + 5, seed) for seed in range(6)]
    outs = [torch.empty_like(version) for version in versions]
    transfers = []
    for version, out in zip(versions, outs, strict=True):
        transfers += [store.save("key", version), store.load("key", out)]
    for transfer in transfers:
        transfer.wait()
    assert all(map(torch.equal, outs, versions))


def test_a_key_may_get_another_size_and_bytes_held_counts_what_was_not_dropped(store: Store) -> None:
    for nbytes in (4096, 9000, 5, 0, 70000):
        store.save("other", random_bytes(100, nbytes)).wait()
        store.save("key", random_bytes(nbytes, nbytes)).wait()
        assert bytes_held(store) == nbytes + 100
        assert torch.equal(loaded(store, "key", nbytes), random_bytes(nbytes, nbytes))
        assert torch.equal(loaded(store, "other", 100), random_bytes(100, nbytes))
    store.drop("key")
    assert bytes_held(store) == 100
    store.close()
    assert bytes_held(store) == 0


def test_a_key_may_be_dropped_while_it_is_moved(store: Store) -> None:
    values, out = random_bytes(SMALL_BLOCK * 20, 5), torch.empty(SMALL_BLOCK * 20, dtype=torch.uint8)
    transfers = [store.save("key", values), store.load("key", out)]
    store.drop("key")
    others = [random_bytes(SMALL_BLOCK * 20, 50 + index) for index in range(4)]  # would take its place in a file
    transfers += [store.save(f"other {index}", other) for index, other in enumerate(others)]
    for transfer in transfers:
        transfer.wait()
    assert torch.equal(out, values)
    for index, other in enumerate(others):
        assert torch.equal(loaded(store, f"other {index}", len(other)), other)


# -- what callers do wrong --------------------------------------------------------------------------------------------


def test_keys_that_are_unknown_or_have_another_size_are_refused(store: Store) -> None:
    text = "expected a saved key, found 'nothing', which was never saved or has been dropped"
    assert text in refusal(store.load, "nothing", random_bytes(4, 0), kind=OffloadError)
    store.save("nothing", random_bytes(4, 0)).wait()
    store.drop("nothing")
    assert text in refusal(store.drop, "nothing", kind=OffloadError)
    store.save("key", random_bytes(4096, 0)).wait()
    text = refusal(store.load, "key", random_bytes(4097, 0))
    assert "out: expected the 4,096 bytes saved under 'key', found 4,097" in text


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (torch.zeros(4), "found torch.float32 of shape (4,), contiguous"),
        (torch.zeros(2, 2, dtype=torch.uint8), "found torch.uint8 of shape (2, 2), contiguous"),
        (torch.zeros(8, dtype=torch.uint8)[::2], "found torch.uint8 of shape (4,), not contiguous"),
    ],
)
def test_anything_but_bytes_in_a_row_is_refused(store: Store, values: Tensor, found: str) -> None:
    store.save("key", random_bytes(4, 0)).wait()
    for name, act in (("values", store.save), ("out", store.load)):
        text = refusal(act, "key", values)
        assert f"{name}: expected a contiguous tensor of uint8 with one dim, {found}" in text


def test_close_ends_what_runs_and_a_closed_store_says_so(store: Store) -> None:
    transfers = [store.save(str(index), random_bytes(100_000, index)) for index in range(20)]
    for _ in range(2):
        store.close()
    assert all(transfer.is_done for transfer in transfers)
    for transfer in transfers:
        transfer.wait()
    for act in (store.save, store.load):
        text = refusal(act, "0", random_bytes(100_000, 0), kind=OffloadError)
        assert "expected an open store for '0', found it closed" in text
    assert "expected an open store for '0', found it closed" in refusal(store.drop, "0", kind=OffloadError)


# -- a staged store ---------------------------------------------------------------------------------------------------


def test_the_callers_bytes_are_free_before_a_staged_store_has_them() -> None:
    store, given = StagedStore(SlowStore(0.2), HostPool()), random_bytes(10_000, 0)
    save = store.save("a", given)
    assert save.is_done
    save.wait()
    given.zero_()
    assert torch.equal(loaded(store, "a", 10_000), random_bytes(10_000, 0))
    store.close()


def test_a_staged_save_that_failed_later_is_told_on_load() -> None:
    inner, pool = SlowStore(), HostPool()
    inner.refusing.update(("save", "load"))
    store = StagedStore(inner, pool)
    store.save("a", random_bytes(10_000, 0))
    assert refusal(loaded, store, "a", 10_000, kind=OffloadError) == "the disk of the test is gone (load)"
    store.close()
    assert pool.bytes_in_use == 0
