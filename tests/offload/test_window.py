"""The window: order, number of buffers, overlap, and what is left when something fails."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.offload import AioOptions, FileStore, HostPool, HostStore, Offloadable, OffloadError, Store, Window
from tests.kit.training import refusal
from tests.offload.slow_store import SlowStore

SIZES = [5000, 1, 4096, 0, 9001, 4097, 12288, 777, 5000, 5000]
KEYS = [f"unit {index}" for index in range(len(SIZES))]


class CountingPool(HostPool):
    """Notes how many buffers were out at once."""

    def __init__(self) -> None:
        super().__init__(64)
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


def filled(store: Store) -> Store:
    """Each key has its number in every byte."""
    for number, (key, nbytes) in enumerate(zip(KEYS, SIZES, strict=True)):
        store.save(key, torch.full((nbytes,), number, dtype=torch.uint8)).wait()
    return store


def slow(seconds: float = 0.0) -> SlowStore:
    store = SlowStore(seconds)
    filled(store)
    store.trail.clear()
    store.ended.clear()
    return store


def values_in(store: Store) -> list[int | None]:
    """The number of each key."""
    found: list[int | None] = []
    for key, nbytes in zip(KEYS, SIZES, strict=True):
        out = torch.empty(nbytes, dtype=torch.uint8)
        store.load(key, out).wait()
        found.append(int(out[0]) if nbytes else None)
        assert nbytes == 0 or (out == out[0]).all()
    return found


def numbers(added: Callable[[int], int] = lambda index: 0) -> list[int | None]:
    return [index + added(index) if nbytes else None for index, nbytes in enumerate(SIZES)]


def residents_in(store: Store, pool: HostPool) -> list[Offloadable]:
    return [Offloadable.of(store, key, partial(pool.take, n), pool.give) for key, n in zip(KEYS, SIZES, strict=True)]


def add_ten(index: int, buffer: Tensor) -> bool:
    assert (buffer == index).all()
    buffer.add_(10)
    return True


@contextmanager
def opened(max_leaving: int = 1) -> Iterator[Window]:
    """A window that is closed afterwards. Its saves are waited for, except after an error."""
    with closing(Window(max_leaving)) as window:
        yield window
        window.wait()


def run(offloadables: list[Offloadable], compute: Callable[[int, Tensor], bool]) -> None:
    """Calls compute(index, buffer) for each in order; what it returns True for is saved."""
    with opened() as window:
        window.expect(offloadables)
        for index, offloadable in enumerate(offloadables):
            with window.use(offloadable, changes=False) as buffer:
                if compute(index, buffer):
                    window.open(offloadable, changes=True)


def test_each_is_worked_on_once_in_order_with_few_buffers(tmp_path: Path) -> None:
    seen = []

    def compute(index: int, buffer: Tensor) -> bool:
        seen.append(index)
        assert len(buffer) == SIZES[index]
        return add_ten(index, buffer) and index % 2 == 1

    for store in (HostStore(), FileStore(tmp_path, 0, AioOptions(block_size=4096)), slow()):
        pool = CountingPool()
        run(residents_in(filled(store), pool), compute)
        assert pool.most_out <= 3 and pool.num_out == 0 and pool.bytes_in_use == 0
        assert values_in(store) == numbers(lambda index: index % 2 * 10)  # what did not change is not saved
        store.close()
    assert seen == 3 * list(range(len(KEYS)))


def test_a_slot_has_one_load_and_one_save_beside_the_work() -> None:
    store = slow()

    def compute(index: int, buffer: Tensor) -> bool:
        store.trail.append(f"WORK {index}")
        return True

    run(residents_in(store, HostPool())[:4], compute)
    assert [what.replace("unit ", "") for what in store.trail] == [
        *("load 0", "load 1", "WORK 0", "save 0"),
        *("load 2", "WORK 1", "save 1"),
        *("load 3", "WORK 2", "save 2"),
        *("WORK 3", "save 3"),
    ]


def test_transfers_are_hidden_behind_the_work() -> None:
    """The next load, and the save before, cannot end until this work has begun, and have ended before it ends."""
    store = slow()
    store.allow({f"load {KEYS[0]}", f"save {KEYS[-1]}"})  # the two that nothing hides
    hidden = []

    def compute(index: int, buffer: Tensor) -> bool:
        beside = {f"load {key}" for key in KEYS[index + 1 : index + 2]} | {f"save {key}" for key in KEYS[:index][-1:]}
        store.allow(beside)
        hidden.append(store.have_ended(beside))
        return True

    run(residents_in(store, HostPool()), compute)
    assert hidden == [True] * len(KEYS)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing_index", [0, 1, 5, len(KEYS) - 1])
def test_an_exception_in_the_work_leaves_no_transfer_and_no_buffer(failing_index: int) -> None:
    store, pool = slow(0.002), CountingPool()

    def compute(index: int, buffer: Tensor) -> bool:
        if index == failing_index:
            raise ZeroDivisionError("in compute")
        return add_ten(index, buffer)

    assert refusal(run, residents_in(store, pool), compute, kind=ZeroDivisionError) == "in compute"
    assert store.num_running == 0 and pool.num_out == 0 and pool.bytes_in_use == 0
    assert values_in(store) == numbers(lambda index: 10 * (index < failing_index))  # what failed is as it was


@pytest.mark.parametrize("failing", ["load unit 0", "load unit 4", "save unit 0", "save unit 4", "save unit 9"])
def test_a_failed_transfer_is_raised_and_leaves_no_transfer_and_no_buffer(failing: str) -> None:
    store, pool = slow(), CountingPool()
    store.failing = {failing}
    text = refusal(run, residents_in(store, pool), add_ten, kind=OffloadError)
    assert text == f"the disk of the test is full ({failing.split()[0]})"
    assert store.num_running == 0 and pool.num_out == 0 and pool.bytes_in_use == 0


def test_a_store_that_refuses_a_key_leaves_no_buffer() -> None:
    pool = CountingPool()
    text = refusal(run, residents_in(HostStore(), pool), add_ten, kind=OffloadError)
    assert "found 'unit 0', which was never saved" in text and pool.num_out == 0


# -- in another order -------------------------------------------------------------------------------------------------


def test_a_wrong_guess_is_dropped_and_never_an_error() -> None:
    store, pool = slow(), CountingPool()
    offloadables = residents_in(store, pool)
    used = (0, 4, 2, 9)
    with opened(0) as window:
        window.expect(offloadables)
        store.failing = {"load unit 1", "load unit 5"}
        for index in used:  # 1 and 5 were to come next; 2 was passed over before
            with window.use(offloadables[index]) as buffer:
                add_ten(index, buffer)
            assert pool.most_out <= 2
        window.expect([])
    assert pool.num_out == 0
    store.failing = set()
    assert values_in(store) == numbers(lambda index: 10 * (index in used))


def test_what_is_still_being_saved_is_saved_before_it_is_loaded_again() -> None:
    """As memory of its own may be the only place that it can come to."""
    only = torch.zeros(100, dtype=torch.uint8)
    is_taken: list[bool] = []

    def take() -> Tensor:
        assert not is_taken
        is_taken.append(True)
        return only

    offloadable = Offloadable.of(SlowStore(0.001), "a", take, lambda _: is_taken.clear())
    with opened(5) as window:
        for number in range(5):
            window.create(offloadable).fill_(number)
            window.release(offloadable)
            with window.use(offloadable, changes=False) as values:
                assert (values == number).all()
    assert not is_taken


def test_what_is_opened_stays_until_another_is_and_is_saved_if_anyone_changed_it() -> None:
    store, pool = slow(), CountingPool()
    first, second, third = residents_in(store, pool)[:3]
    with opened() as window:
        values = window.open(first)
        assert (
            window.open(first, changes=True) is values and window.open(first) is values and window.is_in_memory(first)
        )
        values.fill_(50)
        window.open(second)
        assert pool.num_out <= 2 and not window.is_in_memory(first)
        window.prefetch(third)
        assert not window.is_in_memory(second)
        window.open(third)
        window.release_idle()
        assert not window.is_in_memory(third)
    assert "save unit 1" not in store.trail and values_in(store)[:2] == [50, 1]


def test_what_is_opened_is_not_loaded_for_its_turn() -> None:
    store = slow()
    offloadables = residents_in(store, HostPool())[:2]
    with opened() as window:
        window.open(offloadables[0], changes=True).fill_(60)
        window.expect(offloadables)
        for offloadable, value in zip(offloadables, (60, 1), strict=True):
            with window.use(offloadable, changes=False) as values:
                assert int(values[0]) == value
    assert store.trail == ["load unit 0", "load unit 1", "save unit 0"]


def test_what_is_held_is_not_loaded_for_its_next_user() -> None:
    store = slow()
    offloadable = residents_in(store, HostPool())[0]
    with opened() as window:
        window.acquire(offloadable)
        window.end_hold(offloadable)  # it is used
        window.hold(offloadable)
        with window.use(offloadable) as values, window.use(offloadable, changes=False) as again:
            assert again is values
        assert not window.is_in_memory(offloadable)
    assert store.trail == ["load unit 0", "save unit 0"]


def test_memory_is_given_back_whatever_was_not_released() -> None:
    pool = CountingPool()
    offloadables = residents_in(slow(), pool)
    with opened() as window:
        window.acquire(offloadables[0])
        window.prefetch(offloadables[2])
        window.create(offloadables[4])
        text = refusal(window.release, offloadables[5])
        assert "expected an acquired resident, found 'unit 5', which is not in memory" in text
    assert pool.num_out == 0


@pytest.mark.parametrize("takes_back", [False, True])
def test_a_second_version_is_kept_beside_the_first(takes_back: bool) -> None:
    offloadable = residents_in(filled(HostStore()), HostPool())[1]
    for turn in range(3):
        with opened() as window:
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
    with opened() as window:
        window.expect([offloadable])
        with window.use(offloadable) as found:
            assert found is values
            old = offloadable.fork(found)
            found.zero_()
    assert old.nbytes == values.nbytes
    old.restore()
    assert torch.equal(values, torch.arange(7.0))
