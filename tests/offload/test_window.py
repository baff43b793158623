"""The window: order, number of buffers, overlap, and what is left when something fails."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.offload import (
    AioOptions,
    FileStore,
    HostPool,
    HostStore,
    OffloadError,
    Store,
    Transfer,
    Window,
    run_window,
)

SIZES = [5000, 1, 4096, 0, 9001, 4097, 12288, 777, 5000, 5000]
KEYS = [f"unit {index}" for index in range(len(SIZES))]


class SlowStore:
    """A HostStore whose one thread needs `seconds` for a transfer. Keeps a trail of what began and ended."""

    alignment_bytes = 64

    def __init__(self, seconds: float = 0.0) -> None:
        self.inner = HostStore()
        self.seconds = seconds
        self.trail: list[str] = []
        self.failing: set[str] = set()  # "save KEY" or "load KEY"
        self.num_running = 0
        self._turn = threading.Lock()
        self._count = threading.Lock()

    def save(self, key: str, values: Tensor) -> Transfer:
        return SlowTransfer(self, f"save {key}", lambda: self.inner.save(key, values))

    def load(self, key: str, out: Tensor) -> Transfer:
        return SlowTransfer(self, f"load {key}", lambda: self.inner.load(key, out))

    def drop(self, key: str) -> None:
        self.inner.drop(key)

    def close(self) -> None:
        self.inner.close()

    @property
    def bytes_held(self) -> int:
        return self.inner.bytes_held


class SlowTransfer:
    def __init__(self, store: SlowStore, what: str, action: Callable[[], Transfer]) -> None:
        self._store = store
        self._what = what
        self._action = action
        self._error: OffloadError | None = None
        store.num_running += 1
        store.trail.append(what)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._store._turn:
            time.sleep(self._store.seconds)
            if self._what in self._store.failing:
                self._error = OffloadError(f"{self._what} failed")
            else:
                self._action()
        with self._store._count:
            self._store.num_running -= 1

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


class CountingPool(HostPool):
    """Notes how many buffers were out at once."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes, 64)
        self.num_out = 0
        self.most_out = 0

    def take(self, nbytes: int) -> Tensor:
        buffer = super().take(nbytes)
        self.num_out += 1
        self.most_out = max(self.most_out, self.num_out)
        return buffer

    def give(self, buffer: Tensor) -> None:
        super().give(buffer)
        self.num_out -= 1


def filled(store: Store, keys: list[str] = KEYS, sizes: list[int] = SIZES) -> Store:
    for number, (key, nbytes) in enumerate(zip(keys, sizes, strict=True)):
        store.save(key, torch.full((nbytes,), number, dtype=torch.uint8)).wait()
    return store


def content(store: Store, keys: list[str] = KEYS, sizes: list[int] = SIZES) -> list[Tensor]:
    outs = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in sizes]
    for key, out in zip(keys, outs, strict=True):
        store.load(key, out).wait()
    return outs


def add_ten(index: int, buffer: Tensor) -> bool:
    assert (buffer == index).all()
    buffer.add_(10)
    return True


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 20])
def test_every_key_is_worked_on_once_in_order_with_few_buffers(tmp_path: Path, depth: int) -> None:
    seen = []

    def compute(index: int, buffer: Tensor) -> bool:
        seen.append(index)
        assert len(buffer) == SIZES[index]
        return add_ten(index, buffer)

    for store in (HostStore(), FileStore(tmp_path, 0, AioOptions(block_size=4096))):
        pool = CountingPool()
        run_window(KEYS, SIZES, filled(store), pool, compute, depth)
        assert pool.most_out <= depth + 2 and pool.num_out == 0 and pool.bytes_in_use == 0
        for number, out in enumerate(content(store)):
            assert (out == number + 10).all()
        store.close()
    assert seen == 2 * list(range(len(KEYS)))


def test_no_keys_is_no_work() -> None:
    run_window([], [], HostStore(), HostPool(), lambda index, buffer: pytest.fail("nothing to work on"))


def test_what_did_not_change_is_not_saved() -> None:
    store = SlowStore()
    filled(store)
    store.trail.clear()
    run_window(KEYS, SIZES, store, HostPool(), lambda index, buffer: index % 2 == 1)
    assert [what for what in store.trail if what.startswith("save")] == [f"save {key}" for key in KEYS[1::2]]


def test_a_slot_has_one_load_and_one_save_beside_the_work() -> None:
    store = SlowStore()
    filled(store, KEYS[:4], [100] * 4)
    store.trail.clear()

    def compute(index: int, buffer: Tensor) -> bool:
        store.trail.append(f"WORK {index}")
        return add_ten(index, buffer)

    run_window(KEYS[:4], [100] * 4, store, HostPool(), compute)
    assert [what.replace("unit ", "") for what in store.trail] == [
        *("load 0", "load 1", "WORK 0", "save 0"),
        *("load 2", "WORK 1", "save 1"),
        *("load 3", "WORK 2", "save 2"),
        *("WORK 3", "save 3"),
    ]


def test_transfers_are_hidden_behind_the_work() -> None:
    store = SlowStore()
    keys, sizes = [str(index) for index in range(10)], [100] * 10
    filled(store, keys, sizes)
    store.seconds = 0.02

    def compute(index: int, buffer: Tensor) -> bool:
        time.sleep(0.04)
        return True

    begin = time.perf_counter()
    run_window(keys, sizes, store, HostPool(), compute)
    took = time.perf_counter() - begin
    serial, ideal = 10 * (0.02 + 0.04 + 0.02), 10 * 0.04 + 0.02 + 0.02
    assert ideal <= took < (serial + ideal) / 2


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_a_pool_with_room_for_few_buffers_slows_the_window_and_breaks_nothing(num_buffers: int) -> None:
    keys, sizes = [str(index) for index in range(10)], [640] * 10
    store = SlowStore(0.001)
    filled(store, keys, sizes)
    pool = CountingPool(num_buffers * 640)
    run_window(keys, sizes, store, pool, add_ten, depth=3)
    assert pool.most_out == num_buffers and pool.peak_bytes == num_buffers * 640
    assert [int(out[0]) for out in content(store, keys, sizes)] == list(range(10, 20))


def test_a_pool_without_room_for_one_buffer_is_an_error_with_the_arithmetic() -> None:
    store = filled(HostStore())
    with pytest.raises(OffloadError, match=r"0 bytes in use \+ 5,056 wanted = 5,056 > limit 4,999"):
        run_window(KEYS, SIZES, store, HostPool(4999, 64), add_ten)


def test_keys_given_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="keys: expected each once, found a, c more often"):
        run_window(["a", "b", "a", "c", "c"], [1] * 5, HostStore(), HostPool(), add_ten)


def test_a_depth_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="depth: expected 0 or more keys to load ahead, found -1"):
        Window(HostStore(), HostPool(), {}, depth=-1)


@pytest.mark.parametrize("failing_index", [0, 1, 5, len(KEYS) - 1])
def test_an_exception_in_compute_leaves_no_transfer_and_no_buffer(failing_index: int) -> None:
    store, pool = SlowStore(0.002), CountingPool()
    filled(store)

    def compute(index: int, buffer: Tensor) -> bool:
        buffer.add_(10)
        if index == failing_index:
            raise ZeroDivisionError("in compute")
        return True

    with pytest.raises(ZeroDivisionError, match="in compute"):
        run_window(KEYS, SIZES, store, pool, compute, depth=2)
    assert store.num_running == 0 and pool.num_out == 0 and pool.bytes_in_use == 0
    for number, out in enumerate(content(store)):  # the key that failed is as it was
        assert (out == (number + 10 if number < failing_index else number)).all()


@pytest.mark.parametrize("failing", ["load unit 0", "load unit 4", "save unit 0", "save unit 4", "save unit 9"])
def test_a_failed_transfer_is_raised_and_leaves_no_transfer_and_no_buffer(failing: str) -> None:
    store, pool = SlowStore(), CountingPool()
    filled(store)
    store.failing = {failing}
    with pytest.raises(OffloadError, match=f"{failing} failed"):
        run_window(KEYS, SIZES, store, pool, add_ten)
    assert store.num_running == 0 and pool.num_out == 0 and pool.bytes_in_use == 0


def test_a_store_that_refuses_a_key_leaves_no_buffer() -> None:
    pool = CountingPool()
    with pytest.raises(OffloadError, match="found 'unit 0', which never was"):
        run_window(KEYS, SIZES, HostStore(), pool, add_ten)
    assert pool.num_out == 0


# -- keys in another order ------------------------------------------------------------------------------------------


def test_a_wrong_guess_is_dropped_and_never_an_error() -> None:
    store, pool = SlowStore(), CountingPool()
    filled(store)
    store.failing = {"load unit 1"}
    with Window(store, pool, dict(zip(KEYS, SIZES, strict=True)), depth=1) as window:
        assert window.prefetch(KEYS[1]) and window.prefetch(KEYS[2]) and window.prefetch(KEYS[2])
        assert window.prefetch(KEYS[4])
        assert not window.prefetch(KEYS[5])  # three buffers are coming
        assert (window.acquire(KEYS[0]) == 0).all()
        assert window.num_buffers == 3
        window.release(KEYS[0], changed=False)
        assert (window.acquire(KEYS[4]) == 4).all()
        window.release(KEYS[4], changed=False)
    assert pool.num_out == 0 and pool.most_out == 3


def test_what_is_still_being_saved_is_not_loaded_again() -> None:
    """As activations are used: last in, first out."""
    store = SlowStore(0.001)
    sizes: dict[str, int] = {}
    with Window(store, HostPool(), sizes) as window:
        for number in range(5):
            sizes[str(number)] = 100
            window.create(str(number)).fill_(number)
            window.release(str(number), changed=True)
        for number in reversed(range(5)):
            assert (window.acquire(str(number)) == number).all()
            if number:
                window.prefetch(str(number - 1))
            window.release(str(number), changed=False)
    assert [what for what in store.trail if what.startswith("load")] == ["load 1", "load 0"]


def test_creating_a_key_anew_forgets_what_it_was() -> None:
    store = filled(HostStore())
    sizes = dict(zip(KEYS, SIZES, strict=True))
    with Window(store, HostPool(), sizes) as window:
        window.prefetch(KEYS[0])
        sizes[KEYS[0]] = 6000
        window.create(KEYS[0]).fill_(200)
        window.release(KEYS[0], changed=True)
        window.create(KEYS[0]).fill_(201)
        window.release(KEYS[0], changed=True)
    assert (content(store, KEYS[:1], [6000])[0] == 201).all()


def test_more_keys_at_once_than_buffers_is_an_error() -> None:
    store, pool = filled(HostStore()), CountingPool()
    with Window(store, pool, dict(zip(KEYS, SIZES, strict=True)), depth=0) as window:
        window.acquire(KEYS[0])
        window.acquire(KEYS[1])
        message = r"a buffer for 'unit 2': 2 acquired \('unit 0', 'unit 1'\) \+ 1 > depth \+ 2 = 2; release one of them"
        with pytest.raises(OffloadError, match=message):
            window.acquire(KEYS[2])
    assert pool.num_out == 0  # closing gives back also what nobody released


def test_a_key_is_acquired_once_at_a_time() -> None:
    with Window(filled(HostStore()), HostPool(), dict(zip(KEYS, SIZES, strict=True))) as window:
        window.acquire(KEYS[0])
        with pytest.raises(ValueError, match="expected 'unit 0' to be acquired once and then released"):
            window.acquire(KEYS[0])
        with pytest.raises(ValueError, match="expected 'unit 0' to be released before it is made anew"):
            window.create(KEYS[0])
        with pytest.raises(ValueError, match="expected a key that was acquired, found 'unit 1'"):
            window.release(KEYS[1], changed=True)


def test_work_on_a_key_goes_on_as_another_and_the_first_stays_what_it_was() -> None:
    store, pool = filled(HostStore()), CountingPool()
    sizes = {**dict(zip(KEYS, SIZES, strict=True)), "new": SIZES[0]}
    (before,) = content(store, KEYS[:1], SIZES[:1])
    with Window(store, pool, sizes, depth=0) as window:
        assert torch.equal(window.acquire(KEYS[0]), before)
        window.fork(KEYS[0], "new").fill_(100)
        assert pool.num_out == 1  # the same buffer
        with pytest.raises(ValueError, match="expected a key that was acquired, found 'unit 0'"):
            window.fork(KEYS[0], "new")
        window.acquire(KEYS[0])
        with pytest.raises(ValueError, match="expected 'new' to be released before it is made anew"):
            window.fork(KEYS[0], "new")
        window.release(KEYS[0], changed=False)
        window.release("new", changed=True)
        window.acquire(KEYS[0])
        window.fork(KEYS[0], "new").add_(1)  # what is still being saved counts no more
        window.release("new", changed=True)
    assert torch.equal(content(store, KEYS[:1], SIZES[:1])[0], before)
    assert torch.equal(content(store, ["new"], SIZES[:1])[0], before + 1)
