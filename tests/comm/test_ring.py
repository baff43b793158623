"""Islands exchange one mean or none: whoever dies, wherever in it, those that are left decide alike."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from lowtide.comm import CollectiveError, LeftOutError, island_links, votes
from lowtide.comm import ring as ring_module
from lowtide.comm.island_messages import InDtype
from lowtide.comm.islands import Islands, gone_key
from lowtide.comm.ring import Combine, Ring

COUNT, SIZE = 3, 2  # islands, and ranks of each
NUMEL = 1001
FP32 = InDtype(torch.float32)
PLACES = [(island, rank) for island in range(COUNT) for rank in range(SIZE)]
Told = dict[tuple[int, int], Any]


class Died(Exception):
    """In the place of a process's end."""


def values_of(island: int, rank: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * island + rank))


def on_all(work: Callable[[Ring, int, int], Any], store: Any = None) -> Told:
    """What `work` gives in a thread for each rank of each island, or its error."""
    store = HashStore() if store is None else store

    def run(place: tuple[int, int]) -> Any:
        island, rank = place
        ring = Ring(Islands(island, COUNT, SIZE, store, store, "127.0.0.1"), rank, 60.0)
        try:
            return work(ring, island, rank)
        except Exception as error:
            return error
        finally:
            ring.leave("it has ended")

    with ThreadPoolExecutor(len(PLACES)) as pool:
        return dict(zip(PLACES, pool.map(run, PLACES), strict=True))


def wait_until(holds: Callable[[], bool]) -> None:
    """For what others do meanwhile: where they have failed, this fails too, and no thread is left behind."""
    deadline = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < deadline, "what is waited for does not come"
        time.sleep(0.001)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_all_islands_have_the_mean_of_their_ranks_bit_by_bit(wire: torch.dtype) -> None:
    found = on_all(lambda ring, island, rank: ring.start(values_of(island, rank), InDtype(wire)).result())
    for rank in range(SIZE):
        terms = [values_of(island, rank).to(wire).float() for island in range(COUNT)]
        expected = ((terms[0] + terms[1] + terms[2]) / COUNT).to(wire).float()
        assert all(torch.equal(found[island, rank].values, expected) for island in range(COUNT))


def test_the_first_island_gives_its_values_to_the_others() -> None:
    found = on_all(lambda ring, island, rank: ring.start(values_of(island, rank), FP32, Combine.FIRST).result())
    assert all(torch.equal(found[island, rank].values, values_of(0, rank)) for island, rank in PLACES)


@pytest.mark.parametrize("count", [0, 1, COUNT - 1])
def test_few_values_are_exchanged_too(count: int) -> None:
    found = on_all(lambda ring, island, rank: ring.start(torch.full((count,), float(island)), FP32).result())
    assert all(torch.equal(one.values, torch.full((count,), 1.0)) for one in found.values())


def test_what_is_sent_is_what_the_arithmetic_says() -> None:
    def work(ring: Ring, island: int, rank: int) -> int:
        ring.start(torch.zeros(3 * 40), InDtype(torch.bfloat16)).result()
        return ring.bytes_sent

    assert set(on_all(work).values()) == {2 * (COUNT - 1) * 2 * 40}  # 2 (k - 1) / k of 120 numbers


def die_at(ring: Ring, moment: str) -> None:
    """The exchange that is made next ends so."""
    calls = {"swaps": 0}
    inner_swap, inner_exchange = ring._links.swap, ring._exchange

    def swap(*arguments: Any) -> None:
        calls["swaps"] += 1
        if moment == f"swap {calls['swaps']}":
            raise Died
        inner_swap(*arguments)

    def exchange(*arguments: Any) -> Tensor:
        if moment == "before":
            raise Died
        result = inner_exchange(*arguments)
        if moment == "vote":
            raise Died
        return result

    vars(ring._links).update(swap=swap)
    vars(ring).update(_exchange=exchange)


@pytest.mark.parametrize("moment", ["before", "swap 1", "swap 2", "vote"])
@pytest.mark.parametrize("is_first", [True, False])
def test_those_that_are_left_decide_alike_wherever_one_dies(moment: str, is_first: bool) -> None:
    """Rank 1 of island 1 dies, and its island is given up, as the launcher does it."""

    def work(ring: Ring, island: int, rank: int) -> Any:
        if not is_first:
            ring.start(values_of(island, rank), FP32).result()
        if (island, rank) != (1, 1):
            return ring.start(values_of(island, rank), FP32).result()
        die_at(ring, moment)
        with pytest.raises(Died):
            ring.start(values_of(island, rank), FP32).result()
        ring._links.close()  # as the kernel does it
        ring.islands.store.set(gone_key(1), "rank 3 was ended by SIGKILL")
        return None

    found = on_all(work)
    assert isinstance(found[1, 0], LeftOutError)
    for rank in range(SIZE):
        expected = (values_of(0, rank) + values_of(2, rank)) / 2
        for island in (0, 2):
            assert found[island, rank].members == (0, 2)
            assert torch.equal(found[island, rank].values, expected)


def test_an_island_that_has_left_is_not_waited_for() -> None:
    def work(ring: Ring, island: int, rank: int) -> Any:
        ring.start(torch.zeros(1), FP32).result()
        return None if island == 0 else ring.start(torch.full((5,), float(island)), FP32).result()

    found = on_all(work)
    assert all(found[island, rank].members == (1, 2) for island in (1, 2) for rank in range(SIZE))
    assert torch.equal(found[1, 0].values, torch.full((5,), 1.5))


def test_what_is_told_is_known_to_all_alike() -> None:
    """Or to those that were there in time, as the first that has waited long enough says."""
    all_know = threading.Barrier(len(PLACES))  # an island of which a rank has left is gone, for who still waits for it

    def tell(ring: Ring, island: int, rank: int) -> Any:
        told = ring.tell([island, rank])
        all_know.wait(60.0)
        return told

    found = on_all(tell)
    assert all(found[island, rank] == {other: [other, rank] for other in range(COUNT)} for island, rank in PLACES)
    store = HashStore()
    store.set(gone_key(2), "it has ended")
    early, late = (
        Ring(Islands(island, COUNT, 1, store, store, "127.0.0.1"), 0, timeout)
        for island, timeout in [(0, 0.0), (1, 60.0)]
    )
    assert early.tell("a") == {0: "a"}
    with pytest.raises(LeftOutError, match=r"island 1: the others \(0\) load a checkpoint without it, .* within 60 s"):
        late.tell("b")
    for ring in (early, late):
        ring.leave("it has ended")


def test_who_leaves_waits_for_no_verdict() -> None:
    """Which does not come here: of two ranks each, those of number 1 never vote. The time for silence is an hour."""
    store = HashStore()
    islands = [Islands(island, 2, 2, store, store, "127.0.0.1") for island in range(2)]
    rings = [Ring(one, 0, 3600.0) for one in islands]
    found = [ring.start(torch.ones(3), FP32) for ring in rings]
    wait_until(lambda: store.add("0.0/done", 0) == len(rings))  # both have everything, and wait
    for ring in rings:
        ring.leave("it has ended")
    for future in found:
        with pytest.raises((CollectiveError, LeftOutError)):
            future.result(0.0)  # the thread has ended


def test_the_last_island_goes_on_alone() -> None:
    def work(ring: Ring, island: int, rank: int) -> Any:
        return None if island else ring.start(values_of(island, rank), FP32).result()

    found = on_all(work)
    assert found[0, 0].members == (0,) and torch.equal(found[0, 1].values, values_of(0, 1))


def test_an_island_that_does_not_come_is_left_out_after_the_time_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says that island 2 is gone: its first rank does not come. The clock is the test's."""
    now, late, store = [0.0], threading.Event(), HashStore()
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    for module in (votes, island_links, ring_module):
        monkeypatch.setattr(module, "time", clock)

    def is_called() -> bool:
        """Time stands still for those that are there, and have still to say so."""
        there = [store.add(f"0.1.roll/there/{island}", 0) for island in (0, 1)]
        return store.check(["0.0/verdict"]) and there != [SIZE, SIZE]

    def work(ring: Ring, island: int, rank: int) -> Any:
        if (island, rank) == (2, 0):
            while not store.check(["0.1.roll/members"]) and not late.is_set():
                now[0] += 0.0 if is_called() else 20.0  # and passes for all others, however late they begin
                time.sleep(0.001)
            late.wait()
        try:
            return ring.start(values_of(island, rank), FP32).result()
        finally:
            late.set()

    found = on_all(work, store=store)
    assert {found[island, rank].members for island in (0, 1) for rank in range(SIZE)} == {(0, 1)}
    assert isinstance(found[2, 0], LeftOutError) and isinstance(found[2, 1], LeftOutError)
    assert "the others (0, 1) go on without it, since not all of its ranks came within 60 s" in str(found[2, 0])


def test_islands_that_differ_are_told() -> None:
    found = on_all(lambda ring, island, rank: ring.check_alike(f"{island // 2} of something"))
    texts = {str(error) for error in found.values() if error is not None}
    assert texts and all("expected the same model, config and ranks on all islands" in text for text in texts)


def test_an_island_that_makes_another_call_than_the_others_is_told() -> None:
    def work(ring: Ring, island: int, rank: int) -> Any:
        ring.start(torch.zeros(1), FP32).result()
        if island == 2:  # after the others
            wait_until(lambda: bool(ring.islands.store.check([f"1/call/{rank}"])))
        return ring.start(torch.zeros(5 + island // 2), FP32).result()

    found = on_all(work)
    assert {found[island, rank].members for island in (0, 1) for rank in range(SIZE)} == {(0, 1)}
    text = "expected the same calls on all islands (steps, load_weights, load_checkpoint), found mean of 6 numbers in "
    assert all(isinstance(found[2, rank], CollectiveError) and text in str(found[2, rank]) for rank in range(SIZE))


def test_a_slow_link_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes later than the last by most of the time that is given: the exchange takes many times that."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(island_links, "time", clock)
    told: list[float] = []
    watch = island_links.Watch(lambda: False, lambda: told.append(now[0]), 60.0)
    for _ in range(10):
        now[0] += 50.0
        watch.look("late")
        watch.moved()
    assert len(told) == 10 and watch.seconds_left == 60.0
    now[0] += 61.0
    with pytest.raises(island_links.LinkError, match="late"):
        watch.look("late")


def test_who_has_everything_waits_for_those_that_still_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    now, store = [0.0], HashStore()
    monkeypatch.setattr(votes, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: others()))
    found = [votes.Votes(Islands(island, 2, 1, store, store, "127.0.0.1"), "0.0", (0, 1), 60.0) for island in (0, 1)]
    steps = iter(range(20))

    def others() -> None:
        now[0] += 50.0
        found[1].tell_moved() if next(steps) < 9 else store.set("0.0/verdict", "done")

    assert found[0].cast(has_all=True) and now[0] == 500.0


def test_strangers_at_the_door_hold_nobody_up() -> None:
    """One says nothing, one a part of what is asked, one something else: none is waited for, however slow it is."""
    store = HashStore()
    rings = [Ring(Islands(island, 2, 1, store, store, "127.0.0.1"), 0, 60.0) for island in range(2)]
    address, port, token = store.get(rings[0]._links._key(0)).decode().split()
    header = island_links._HEADER.pack(bytes.fromhex(token), b"0.0", 1)
    said = [b"", header[:-1], b"?" * len(header)]
    strangers = [socket.create_connection((address, int(port))) for _ in said]
    try:
        for stranger, words in zip(strangers, said, strict=True):
            stranger.sendall(words)
        for number in range(2):
            found = [ring.start(torch.full((3,), float(island)), FP32) for island, ring in enumerate(rings)]
            assert [one.result(60.0).values.tolist() for one in found] == [[0.5] * 3] * 2, number
        links = rings[0]._links
        assert len(links._unheard) == 2  # silence, and a part
        strangers[2].settimeout(60.0)
        with contextlib.suppress(ConnectionResetError):
            assert not strangers[2].recv(1)  # it was turned away
    finally:
        for stranger in strangers:
            stranger.close()
        for ring in rings:
            ring.leave("it has ended")


def test_who_does_not_say_who_it_is_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    links = island_links.Links(Islands(0, 2, 1, store, store, "127.0.0.1"), 0)
    address, port, _ = store.get(links._key(0)).decode().split()
    with socket.create_connection((address, int(port))) as silent:
        while not links._unheard:
            links._accept()
        monkeypatch.setattr(island_links, "_HEADER_SECONDS", -1.0)
        links._accept()
        assert not links._unheard
        silent.settimeout(60.0)
        assert not silent.recv(1)
    links.close()
