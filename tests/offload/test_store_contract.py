"""What every store does alike, wherever it keeps its bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.offload import AioOptions, FileStore, HostPool, HostStore, OffloadError, StagedStore, Store

SMALL_BLOCK = 8192
SIZES = [0, 1, 511, 512, 4095, 4096, 4097, SMALL_BLOCK, 3 * SMALL_BLOCK, 3 * SMALL_BLOCK + 4099, (1 << 20) + 1]

STORES: dict[str, Callable[[Path], Store]] = {
    "host": lambda folder: HostStore(),
    "file": lambda folder: FileStore(folder, 0),
    "file, small blocks": lambda folder: FileStore(folder, 0, AioOptions(block_size=SMALL_BLOCK, thread_count=4)),
    "file, page cache": lambda folder: FileStore(folder, 0, AioOptions(block_size=SMALL_BLOCK, direct=False)),
    "staged": lambda folder: StagedStore(FileStore(folder, 0), HostPool()),
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
    pool = HostPool(alignment=store.alignment_bytes)
    for nbytes in SIZES:
        values = pool.take(nbytes + skipped)[skipped:]
        values.copy_(random_bytes(nbytes, 1))
        store.save(f"{nbytes}", values).wait()
        whole = pool.take(nbytes + skipped + 64).fill_(77)
        store.load(f"{nbytes}", whole[skipped : skipped + nbytes]).wait()
        assert torch.equal(whole[skipped : skipped + nbytes], random_bytes(nbytes, 1)), nbytes
        beside = torch.cat([whole[:skipped], whole[skipped + nbytes :]])
        assert (beside == 77).all(), nbytes  # nothing beside it was touched
        assert torch.equal(values, random_bytes(nbytes, 1)), nbytes


def test_room_for_what_will_be_kept_can_be_asked_for(store: Store) -> None:
    store.reserve([5000, 1])
    store.save("key", random_bytes(5000, 2)).wait()
    assert torch.equal(loaded(store, "key", 5000), random_bytes(5000, 2))
    assert store.is_host_memory == isinstance(store, HostStore)


def test_what_was_saved_stays_when_its_tensor_changes(store: Store) -> None:
    values = random_bytes(5000, 2)
    store.save("key", values).wait()
    values.zero_()
    assert torch.equal(loaded(store, "key", 5000), random_bytes(5000, 2))
    assert torch.equal(loaded(store, "key", 5000), random_bytes(5000, 2))  # and a load takes nothing away


def test_many_keys_of_every_size_interleaved(store: Store) -> None:
    sizes = {f"layer.{index}": SIZES[index % len(SIZES)] + index for index in range(60)}
    values = {key: random_bytes(nbytes, len(key) + nbytes) for key, nbytes in sizes.items()}
    saves = [store.save(key, values[key]) for key in sizes]
    outs = {key: torch.empty(nbytes, dtype=torch.uint8) for key, nbytes in sizes.items()}
    transfers = []
    for index, key in enumerate(sizes):  # each load is asked for while saves of others, or its own, run
        transfers.append(store.load(key, outs[key]))
        if index % 3 == 0:
            values[key] = random_bytes(sizes[key], 1000 + index)
            transfers.append(store.save(key, values[key]))
            outs[key] = torch.empty(sizes[key], dtype=torch.uint8)
            transfers.append(store.load(key, outs[key]))
    for transfer in [*saves, *transfers]:
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
    for version, out in zip(versions, outs, strict=True):
        assert torch.equal(out, version)


def test_a_key_may_get_another_size(store: Store) -> None:
    for nbytes in (4096, 9000, 5, 0, 70000):
        store.save("other", random_bytes(100, nbytes)).wait()
        store.save("key", random_bytes(nbytes, nbytes)).wait()
        assert store.bytes_held == nbytes + 100
        assert torch.equal(loaded(store, "key", nbytes), random_bytes(nbytes, nbytes))
        assert torch.equal(loaded(store, "other", 100), random_bytes(100, nbytes))


def test_bytes_held_counts_what_was_saved_and_not_dropped(store: Store) -> None:
    assert store.bytes_held == 0
    for key, nbytes in {"a": 1000, "b": 4097, "c": 0}.items():
        store.save(key, random_bytes(nbytes, 3)).wait()
    assert store.bytes_held == 5097
    store.save("a", random_bytes(1000, 4)).wait()
    assert store.bytes_held == 5097
    store.drop("b")
    store.drop("c")
    assert store.bytes_held == 1000
    store.close()
    assert store.bytes_held == 0


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


def test_close_ends_what_runs_and_may_be_called_twice(store: Store) -> None:
    transfers = [store.save(str(index), random_bytes(100_000, index)) for index in range(20)]
    store.close()
    store.close()
    assert all(transfer.is_done for transfer in transfers)
    for transfer in transfers:
        transfer.wait()


@pytest.mark.parametrize("width", [384, 640, 896])
def test_updates_of_rows_that_are_no_multiple_of_a_sector(store: Store, width: int) -> None:
    """Ten rounds of load, add, save on fp32 rows of that width give what memory alone gives, to the bit."""
    states = [torch.randn(width * rows, generator=torch.Generator().manual_seed(rows)) for rows in (1, 3, 7)]
    expected = [state.clone() for state in states]
    for index, state in enumerate(states):
        store.save(str(index), state.view(torch.uint8)).wait()
    for step in range(10):
        for index, state in enumerate(expected):
            state.mul_(0.9).add_(step)
            buffer = loaded(store, str(index), state.nbytes)
            buffer.view(torch.float32).mul_(0.9).add_(step)
            store.save(str(index), buffer).wait()
    for index, state in enumerate(expected):
        assert torch.equal(loaded(store, str(index), state.nbytes).view(torch.float32), state)


# -- what callers do wrong ------------------------------------------------------------------------------------------


def test_unknown_keys_are_named(store: Store) -> None:
    message = "expected a saved key, found 'nothing', which was never saved or has been dropped"
    with pytest.raises(OffloadError, match=message):
        store.load("nothing", torch.empty(4, dtype=torch.uint8))
    store.save("nothing", random_bytes(4, 0)).wait()
    store.drop("nothing")
    with pytest.raises(OffloadError, match=message):
        store.drop("nothing")


def test_another_size_than_was_saved_is_refused(store: Store) -> None:
    store.save("key", random_bytes(4096, 0)).wait()
    with pytest.raises(ValueError, match="out: expected the 4,096 bytes saved under 'key', found 4,097"):
        store.load("key", torch.empty(4097, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (torch.zeros(4), r"found torch.float32 of shape \(4,\), contiguous"),
        (torch.zeros(2, 2, dtype=torch.uint8), r"found torch.uint8 of shape \(2, 2\), contiguous"),
        (torch.zeros(8, dtype=torch.uint8)[::2], r"found torch.uint8 of shape \(4,\), not contiguous"),
    ],
)
def test_anything_but_bytes_in_a_row_is_refused(store: Store, values: Tensor, found: str) -> None:
    with pytest.raises(ValueError, match=f"values: expected a contiguous tensor of uint8 with one dim, {found}"):
        store.save("key", values)
    store.save("key", random_bytes(4, 0)).wait()
    with pytest.raises(ValueError, match=f"out: expected a contiguous tensor of uint8 with one dim, {found}"):
        store.load("key", values)


def test_a_closed_store_says_so(store: Store) -> None:
    store.save("key", random_bytes(4, 0)).wait()
    store.close()
    for call in (
        lambda: store.save("key", random_bytes(4, 0)),
        lambda: store.load("key", random_bytes(4, 0)),
        lambda: store.drop("key"),
    ):
        with pytest.raises(OffloadError, match="expected an open store for 'key', found it closed"):
            call()
