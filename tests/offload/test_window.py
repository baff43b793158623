"""The window: order, number of buffers, overlap, and what is left when something fails."""

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.offload import (
    AioOptions,
    FileStore,
    HostPool,
    HostStore,
    Offloadable,
    OffloadError,
    Store,
    Transfer,
    Window,
)

SIZES = [5000, 1, 4096, 0, 9001, 4097, 12288, 777, 5000, 5000]
KEYS = [f"unit {index}" for index in range(len(SIZES))]


class SlowStore:
    """A HostStore whose transfers run one at a time, for `seconds`. Keeps a trail of what began, and what has ended."""

    alignment_bytes = 64
    is_host_memory = True

    def __init__(self, seconds: float = 0.0) -> None:
        self.inner = HostStore()
        self.seconds = seconds
        self.trail: list[str] = []
        self.ended: set[str] = set()
        self.allowed: set[str] | None = None  # what may end; None: everything
        self.failing: set[str] = set()  # "save KEY" or "load KEY"
        self.num_running = 0
        self._call_guard = threading.Lock()
        self._changed = threading.Condition()

    def is_ended(self, whats: set[str], seconds: float = 30.0) -> bool:
        """Waits until all of these transfers have."""
        with self._changed:
            return self._changed.wait_for(lambda: whats <= self.ended, seconds)

    def allow(self, whats: set[str]) -> None:
        """From now on these transfers may end, where not all may."""
        with self._changed:
            self.allowed = (self.allowed or set()) | whats
            self._changed.notify_all()

    def is_allowed(self, what: str, seconds: float = 20.0) -> bool:
        """Waits until this transfer may end."""
        with self._changed:
            return self._changed.wait_for(lambda: self.allowed is None or what in self.allowed, seconds)

    def reserve(self, sizes: Iterable[int]) -> None:
        pass

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
        with self._store._call_guard:
            time.sleep(self._store.seconds)
            if not self._store.is_allowed(self._what):
                self._error = OffloadError(f"{self._what} is waited for before the work that should hide it")
            elif self._what in self._store.failing:
                self._error = OffloadError(f"{self._what} failed")
            else:
                self._action()
        with self._store._changed:
            self._store.num_running -= 1
            self._store.ended.add(self._what)
            self._store._changed.notify_all()

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


def residents_in(store: Store, pool: HostPool, keys: list[str] = KEYS, sizes: list[int] = SIZES) -> list[Offloadable]:
    return [Offloadable.of(store, k, partial(pool.take, n), pool.give) for k, n in zip(keys, sizes, strict=True)]


def add_ten(index: int, buffer: Tensor) -> bool:
    assert (buffer == index).all()
    buffer.add_(10)
    return True


def run(offloadables: list[Offloadable], compute: Callable[[int, Tensor], bool], depth: int = 1) -> None:
    """Calls compute(index, buffer) for each in order; what it returns True for is saved."""
    with Window(depth) as window:
        window.expect(offloadables)
        for index, offloadable in enumerate(offloadables):
            with window.use(offloadable, changes=False) as buffer:
                if compute(index, buffer):
                    window.open(offloadable, changes=True)


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 20])
def test_each_is_worked_on_once_in_order_with_few_buffers(tmp_path: Path, depth: int) -> None:
    seen = []

    def compute(index: int, buffer: Tensor) -> bool:
        seen.append(index)
        assert len(buffer) == SIZES[index]
        return add_ten(index, buffer)

    for store in (HostStore(), FileStore(tmp_path, 0, AioOptions(block_size=4096))):
        pool = CountingPool()
        run(residents_in(filled(store), pool), compute, depth)
        assert pool.most_out <= depth + 2 and pool.num_out == 0 and pool.bytes_in_use == 0
        for number, out in enumerate(content(store)):
            assert (out == number + 10).all()
        store.close()
    assert seen == 2 * list(range(len(KEYS)))


def test_what_did_not_change_is_not_saved() -> None:
    store = SlowStore()
    filled(store)
    store.trail.clear()
    run(residents_in(store, HostPool()), lambda index, buffer: index % 2 == 1)
    assert [what for what in store.trail if what.startswith("save")] == [f"save {key}" for key in KEYS[1::2]]


def test_a_slot_has_one_load_and_one_save_beside_the_work() -> None:
    store = SlowStore()
    filled(store, KEYS[:4], [100] * 4)
    store.trail.clear()

    def compute(index: int, buffer: Tensor) -> bool:
        store.trail.append(f"WORK {index}")
        return add_ten(index, buffer)

    run(residents_in(store, HostPool(), KEYS[:4], [100] * 4), compute)
    assert [what.replace("unit ", "") for what in store.trail] == [
        *("load 0", "load 1", "WORK 0", "save 0"),
        *("load 2", "WORK 1", "save 1"),
        *("load 3", "WORK 2", "save 2"),
        *("WORK 3", "save 3"),
    ]


def test_transfers_are_hidden_behind_the_work() -> None:
    """The next load, and the save before, cannot end until this work has begun, and have ended before it ends."""
    store = SlowStore()
    filled(store)
    store.ended.clear()
    store.allow({f"load {KEYS[0]}", f"save {KEYS[-1]}"})  # the two that nothing hides
    hidden = []

    def compute(index: int, buffer: Tensor) -> bool:
        beside = {f"load {key}" for key in KEYS[index + 1 : index + 2]} | {f"save {key}" for key in KEYS[:index][-1:]}
        store.allow(beside)
        hidden.append(store.is_ended(beside))
        return True

    run(residents_in(store, HostPool()), compute)
    assert hidden == [True] * len(KEYS)


def test_a_pool_without_room_is_an_error_with_the_arithmetic() -> None:
    offloadables = residents_in(filled(HostStore()), HostPool(4999, 64))
    with pytest.raises(OffloadError, match=r"0 bytes in use \+ 5,056 wanted = 5,056 > limit 4,999"):
        run(offloadables, add_ten)


def test_a_depth_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="depth: expected 0 or more residents to load ahead, found -1"):
        Window(depth=-1)


@pytest.mark.parametrize("failing_index", [0, 1, 5, len(KEYS) - 1])
def test_an_exception_in_the_work_leaves_no_transfer_and_no_buffer(failing_index: int) -> None:
    store, pool = SlowStore(0.002), CountingPool()
    filled(store)

    def compute(index: int, buffer: Tensor) -> bool:
        buffer.add_(10)
        if index == failing_index:
            raise ZeroDivisionError("in compute")
        return True

    with pytest.raises(ZeroDivisionError, match="in compute"):
        run(residents_in(store, pool), compute, depth=2)
    assert store.num_running == 0 and pool.num_out == 0 and pool.bytes_in_use == 0
    for number, out in enumerate(content(store)):  # the key that failed is as it was
        assert (out == (number + 10 if number < failing_index else number)).all()


@pytest.mark.parametrize("failing", ["load unit 0", "load unit 4", "save unit 0", "save unit 4", "save unit 9"])
def test_a_failed_transfer_is_raised_and_leaves_no_transfer_and_no_buffer(failing: str) -> None:
    store, pool = SlowStore(), CountingPool()
    filled(store)
    store.failing = {failing}
    with pytest.raises(OffloadError, match=f"{failing} failed"):
        run(residents_in(store, pool), add_ten)
    assert store.num_running == 0 and pool.num_out == 0 and pool.bytes_in_use == 0


def test_a_store_that_refuses_a_key_leaves_no_buffer() -> None:
    pool = CountingPool()
    with pytest.raises(OffloadError, match="found 'unit 0', which was never saved"):
        run(residents_in(HostStore(), pool), add_ten)
    assert pool.num_out == 0


# -- in another order -----------------------------------------------------------------------------------------------


def test_a_wrong_guess_is_dropped_and_never_an_error() -> None:
    store, pool = SlowStore(), CountingPool()
    filled(store)
    offloadables = residents_in(store, pool)
    with Window(depth=1, max_leaving=0) as window:
        window.expect(offloadables)
        store.failing = {"load unit 1", "load unit 5"}
        for index in (0, 4, 2, 9):  # 1 and 5 were to come next; 2 was passed over before
            with window.use(offloadables[index]) as buffer:
                add_ten(index, buffer)
            assert pool.most_out <= 2
        window.expect([])
    assert pool.num_out == 0
    store.failing = set()
    assert [int(out[0]) for index, out in enumerate(content(store)) if index != 3] == [10, 1, 12, 14, 5, 6, 7, 8, 19]


def test_what_is_still_being_saved_is_saved_before_it_is_loaded_again() -> None:
    """As memory of its own may be the only place that it can come to."""
    store = SlowStore(0.001)
    only = torch.zeros(100, dtype=torch.uint8)
    is_taken: list[bool] = []

    def take() -> Tensor:
        assert not is_taken
        is_taken.append(True)
        return only

    offloadable = Offloadable.of(store, "a", take, lambda _: is_taken.clear())
    with Window(max_leaving=5) as window:
        for number in range(5):
            window.create(offloadable).fill_(number)
            window.release(offloadable)
            with window.use(offloadable, changes=False) as values:
                assert (values == number).all()
    assert not is_taken


def test_what_is_opened_stays_until_another_is_and_is_saved_if_anyone_changed_it() -> None:
    store, pool = SlowStore(), CountingPool()
    filled(store)
    first, second, third = residents_in(store, pool)[:3]
    with Window() as window:
        values = window.open(first)
        assert window.open(first, changes=True) is values and window.open(first) is values and window.holds(first)
        values.fill_(50)
        window.open(second)
        assert pool.num_out <= 2 and not window.holds(first)
        window.prefetch(third)
        assert not window.holds(second)
        window.open(third)
        window.put_back()
        assert not window.holds(third)
    assert [int(out[0]) for out in content(store)[:2]] == [50, 1]
    assert "save unit 1" not in store.trail[len(KEYS) :]


def test_what_is_opened_is_not_loaded_for_its_turn() -> None:
    store, pool = SlowStore(), CountingPool()
    filled(store)
    offloadables = residents_in(store, pool)[:2]
    store.trail.clear()
    with Window() as window:
        window.open(offloadables[0], changes=True).fill_(60)
        window.expect(offloadables)
        for index, offloadable in enumerate(offloadables):
            with window.use(offloadable, changes=False) as values:
                assert int(values[0]) == (60, 1)[index]
    assert store.trail == ["load unit 0", "load unit 1", "save unit 0"]


def test_what_is_held_is_not_loaded_for_its_next_user() -> None:
    store, pool = SlowStore(), CountingPool()
    filled(store)
    offloadable = residents_in(store, pool)[0]
    store.trail.clear()
    with Window() as window:
        window.acquire(offloadable)
        window.end_hold(offloadable)  # it is used
        window.hold(offloadable)
        with window.use(offloadable) as values, window.use(offloadable, changes=False) as again:
            assert again is values
            values.fill_(33)
        assert not window.holds(offloadable)
    assert store.trail == ["load unit 0", "save unit 0"]


def test_memory_is_given_back_whatever_was_not_released() -> None:
    store, pool = filled(SlowStore()), CountingPool()
    offloadables = residents_in(store, pool)
    with Window() as window:
        window.acquire(offloadables[0])
        window.prefetch(offloadables[2])
        window.create(offloadables[4])
        with pytest.raises(ValueError, match="expected an acquired resident, found 'unit 5', which is not in memory"):
            window.release(offloadables[5])
    assert pool.num_out == 0


# -- second versions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("takes_back", [False, True])
def test_a_second_version_is_kept_beside_the_first(takes_back: bool) -> None:
    store, pool = filled(HostStore()), CountingPool()
    offloadable = residents_in(store, pool)[1]
    for turn in range(3):
        with Window() as window:
            with window.use(offloadable) as values:
                old = offloadable.fork(values)
                assert old.nbytes == 0
                values.fill_(100 + turn)
            if takes_back:
                old.restore()
            with window.use(offloadable, changes=False) as values:
                assert int(values[0]) == (1 if takes_back else 100 + turn)


def test_what_is_worked_on_where_it_is_needs_no_transfer_and_a_copy_for_its_old_version() -> None:
    values = torch.arange(7.0)
    offloadable = Offloadable("here", lambda: values)
    with Window() as window:
        window.expect([offloadable])
        with window.use(offloadable) as found:
            assert found is values
            old = offloadable.fork(found)
            found.zero_()
    assert old.nbytes == values.nbytes
    old.restore()
    assert torch.equal(values, torch.arange(7.0))
