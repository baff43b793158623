"""The pretended device has the manners of a GPU: what these tests do wrong would go wrong there."""

import ctypes
import faulthandler
import os
import signal
import tempfile
import threading
from typing import Any

import pytest
import torch

from tests.kit.ranks import RankError, RankPool, on_device
from tests.pretend.device import host_waits, issue, open_for_host


@on_device()
def test_backward_runs_in_a_thread_of_its_own() -> None:
    threads: list[int] = []
    weight = torch.ones(3, device="pretend", requires_grad=True)
    weight.register_hook(lambda _: threads.append(threading.get_ident()))
    weight.sum().backward()
    assert threads[0] != threading.get_ident()


def copy_in(waits: bool) -> None:
    pinned = torch.full((3,), 7.0).pin_memory()
    on_device, side = torch.empty(3, device="pretend"), torch.Stream("pretend")
    with side:
        on_device.copy_(pinned, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    try:
        assert (on_device + 0).tolist() == [7.0] * 3
    finally:
        side.synchronize()


def copy_out(waits: bool) -> None:
    pinned = torch.zeros(3).pin_memory()
    on_device = torch.full((3,), 7.0, device="pretend")
    pinned.copy_(on_device, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().record_event().synchronize()
    assert pinned.tolist() == [7.0 if waits else 0.0] * 3
    torch.accelerator.synchronize()


def read_what_is_being_written(waits: bool) -> None:
    values, side = torch.zeros(3, device="pretend"), torch.Stream("pretend")
    values.add_(1)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        doubled = values * 2
    torch.accelerator.current_stream().wait_stream(side)
    assert doubled.tolist() == [2.0] * 3


def free_before_a_copy(records: bool) -> None:
    pinned, side = torch.zeros(3).pin_memory(), torch.Stream("pretend")
    on_device = torch.empty(3, device="pretend")
    with side:
        on_device.copy_(pinned, non_blocking=True)
    if records:
        on_device.record_stream(side)
    before = torch.accelerator.memory_allocated()
    del on_device
    assert torch.accelerator.memory_allocated() == before - (0 if records else 12)
    side.synchronize()
    assert torch.accelerator.memory_allocated() == before - 12


@on_device()
def test_what_was_waited_for_is_there() -> None:
    for act in (copy_in, copy_out, read_what_is_being_written, free_before_a_copy):
        act(True)
    copy_out(False)


@on_device()
def test_memory_stays_until_a_copy_in_another_thread_has_ended() -> None:
    """How many of the copied values are wrong, where another thread runs the copy."""
    values = torch.ones(1 << 25, dtype=torch.uint8, device="pretend")
    pinned, side, begun = (
        torch.zeros(1 << 25, dtype=torch.uint8, pin_memory=True),
        torch.Stream("pretend"),
        threading.Event(),
    )
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        issue(begun.set)
        pinned.copy_(values, non_blocking=True)
    torch.accelerator.current_stream().wait_stream(side)
    waiter = threading.Thread(target=side.synchronize)
    waiter.start()
    begun.wait()
    del values
    waiter.join()
    assert bool((pinned == 1).all())


@pytest.mark.parametrize("freed", [False, True])
@on_device()
def test_the_host_cannot_touch_its_memory(freed: bool) -> None:
    values = torch.zeros(3, device="pretend")
    address = values.data_ptr()
    assert open_for_host(values).tolist() == [0.0] * 3
    if freed:
        del values
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            faulthandler.enable(said)
            ctypes.string_at(address, 4)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
        said.seek(0)
        assert b"in test_the_host_cannot_touch" in said.read()


WAITS = [
    "a value is read by the host",
    "a copy to the host that blocks",
    "a copy from memory that is not pinned",
    "a copy from the host that blocks",
    "the host must know what aten::index finds",
    "the host must know what aten::nonzero finds",
    "the host must know what aten::equal finds",
    "the device is synchronized",
    "a stream is synchronized",
    "an event is synchronized",
]


@on_device()
def test_waits_of_the_host_are_told() -> None:
    values = torch.arange(3.0, device="pretend")
    pinned = torch.zeros(3).pin_memory()
    pinned_int = torch.zeros(1, dtype=torch.long).pin_memory()
    with host_waits() as waits:
        torch.cat([values * 2, values.neg().clamp(min=0)]).norm()  # nothing
        pinned.copy_(values, non_blocking=True), values.copy_(pinned, non_blocking=True)
        values[pinned_int.to("pretend", non_blocking=True)] = 1.0
        torch.accelerator.current_stream().record_event().query()
        assert not waits
        values.sum().item()
        values.cpu()
        values.copy_(torch.zeros(3), non_blocking=True)
        values.copy_(pinned)
        values[values > 1]
        values.nonzero()
        torch.equal(values, values)
        torch.accelerator.synchronize()
        torch.accelerator.current_stream().synchronize()
        torch.accelerator.current_stream().record_event().synchronize()
    assert all("test_waits_of_the_host_are_told" in str(wait) for wait in waits)
    assert [wait.why for wait in waits] == WAITS


def wait_where_none_may_be() -> None:
    with host_waits(raises=True):
        torch.ones(3, device="pretend").sum().item()


def mix_devices() -> None:
    torch.ones(3, device="pretend").add(torch.ones(3))


STREAMS = "memory that stream .* writes, and has not waited for"


@pytest.mark.parametrize(
    ("does", "given", "text"),
    [
        (wait_where_none_may_be, (), "the host waits for the pretend device: a value is read by the host"),
        (mix_devices, (), "Expected all tensors to be on the same device"),
        (copy_in, (False,), f"add on stream 0 reads {STREAMS}"),
        (read_what_is_being_written, (False,), f"mul on stream .* reads {STREAMS} it"),
        (free_before_a_copy, (False,), "a copy on stream .* uses memory of the pretend device that was freed before"),
    ],
)
def test_errors_are_told(pretend_ranks: RankPool, does: Any, given: tuple[bool, ...], text: str) -> None:
    with pytest.raises(RankError, match=text):
        pretend_ranks(1, does, *given, process_group=False)


@on_device()
def test_memory_is_counted_to_the_byte() -> None:
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    kept = torch.zeros(100, device="pretend")
    del kept
    kept = torch.zeros(7, device="pretend")
    assert torch.accelerator.memory_allocated() - before == kept.nbytes == 28
    assert torch.accelerator.max_memory_allocated() - before == 400


@on_device()
def test_tasks_run_late_and_in_order() -> None:
    done: list[str] = []
    first, second = torch.Stream("pretend"), torch.Stream("pretend")
    issue(lambda: done.append("first"), first)
    second.wait_stream(first)
    issue(lambda: done.append("second"), second)
    done.append("host")
    second.synchronize()
    assert done == ["host", "first", "second"]


def test_this_process_does_not_see_it(pretend_ranks: RankPool) -> None:
    assert not torch.accelerator.is_available() or torch.accelerator.current_accelerator() != torch.device("pretend")
