"""The pretended device has the manners of a GPU: what these tests do wrong would go wrong there."""

import ctypes
import faulthandler
import os
import signal
import tempfile
import threading

import pytest
import torch
from torch import nn

from tests.kit.ranks import RankError, RankPool
from tests.pretend.device import host_waits, issue, open_for_host


def ordinary_work() -> None:
    """What models, optimizers and programs do with a device gives the CPU's numbers, and waits for nothing."""
    assert str(torch.accelerator.current_accelerator()) == "pretend" and torch.accelerator.device_count() == 8
    ours, theirs = (make_model().to(device) for device in ("pretend", "cpu"))
    batch = torch.randn(4, 5)
    on_device = batch.to("pretend")
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in (ours, theirs)]
    with host_waits() as waits:
        torch.manual_seed(1)
        for _ in range(2):
            loss = ours(on_device).square().mean()
            loss.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
    assert waits == []
    torch.manual_seed(1)
    for _ in range(2):
        expected = theirs(batch).square().mean()
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert torch.equal(loss.cpu(), expected)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.detach().cpu(), other.detach())


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Dropout(0.5), nn.Linear(7, 3))


def test_a_model_trains_as_on_the_cpu(pretend_ranks: RankPool) -> None:
    pretend_ranks(1, ordinary_work, process_group=False)


def backward_thread() -> tuple[int, int]:
    threads = []
    weight = torch.ones(3, device="pretend", requires_grad=True)
    weight.register_hook(lambda _: threads.append(threading.get_ident()))
    weight.sum().backward()
    return threads[0], threading.get_ident()


def test_backward_runs_in_a_thread_of_its_own(pretend_ranks: RankPool) -> None:
    [(backward, main)] = pretend_ranks(1, backward_thread, process_group=False)
    assert backward != main


def copy_in(waits: bool) -> list[float]:
    pinned = torch.full((3,), 7.0).pin_memory()
    on_device, side = torch.empty(3, device="pretend"), torch.Stream("pretend")
    with side:
        on_device.copy_(pinned, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    try:
        return (on_device + 0).tolist()
    finally:
        side.synchronize()


def copy_out(waits: bool) -> list[float]:
    pinned = torch.zeros(3).pin_memory()
    on_device = torch.full((3,), 7.0, device="pretend")
    pinned.copy_(on_device, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().record_event().synchronize()
    result = pinned.tolist()
    torch.accelerator.synchronize()
    return result


def test_a_copy_is_there_when_it_was_waited_for(pretend_ranks: RankPool) -> None:
    assert pretend_ranks(1, copy_in, True, process_group=False) == [[7.0] * 3]
    assert pretend_ranks(1, copy_out, True, process_group=False) == [[7.0] * 3]
    assert pretend_ranks(1, copy_out, False, process_group=False) == [[0.0] * 3]
    with pytest.raises(RankError, match=r"add on stream 0 reads memory that stream .* writes, and has not waited for"):
        pretend_ranks(1, copy_in, False, process_group=False)


def read_what_is_being_written(waits: bool) -> None:
    values, side = torch.zeros(3, device="pretend"), torch.Stream("pretend")
    values.add_(1)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        doubled = values * 2
    torch.accelerator.current_stream().wait_stream(side)
    assert doubled.tolist() == [2.0] * 3


def test_a_stream_waits_for_what_it_reads(pretend_ranks: RankPool) -> None:
    pretend_ranks(1, read_what_is_being_written, True, process_group=False)
    with pytest.raises(
        RankError, match=r"mul on stream .* reads memory that stream 0 writes, and has not waited for it"
    ):
        pretend_ranks(1, read_what_is_being_written, False, process_group=False)


def free_before_a_copy(record: bool) -> None:
    pinned, side = torch.zeros(3).pin_memory(), torch.Stream("pretend")
    on_device = torch.empty(3, device="pretend")
    with side:
        on_device.copy_(pinned, non_blocking=True)
    if record:
        on_device.record_stream(side)
    before = torch.accelerator.memory_allocated()
    del on_device
    assert torch.accelerator.memory_allocated() == before - (0 if record else 12)
    side.synchronize()
    assert torch.accelerator.memory_allocated() == before - 12


def test_memory_stays_until_the_streams_that_use_it_were_told(pretend_ranks: RankPool) -> None:
    pretend_ranks(1, free_before_a_copy, True, process_group=False)
    with pytest.raises(RankError, match=r"a copy on stream .* uses memory of the pretend device that was freed before"):
        pretend_ranks(1, free_before_a_copy, False, process_group=False)


def free_during_a_copy() -> int:
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
    return int((pinned != 1).sum())


def test_memory_stays_until_a_copy_in_another_thread_has_ended(pretend_ranks: RankPool) -> None:
    assert pretend_ranks(1, free_during_a_copy, process_group=False) == [0]


def touch(freed: bool) -> tuple[int, str]:
    """How a process ends that does it, and what it has said."""
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
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return status, said.read().decode()


@pytest.mark.parametrize("freed", [False, True])
def test_the_host_cannot_touch_its_memory(pretend_ranks: RankPool, freed: bool) -> None:
    [(status, said)] = pretend_ranks(1, touch, freed, process_group=False)
    assert status == -signal.SIGSEGV and "in touch" in said


def all_waits() -> list[str]:
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
    assert all("all_waits" in str(wait) for wait in waits)
    return [wait.why for wait in waits]


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


def test_waits_of_the_host_are_told(pretend_ranks: RankPool) -> None:
    assert pretend_ranks(1, all_waits, process_group=False) == [WAITS]


def wait_where_none_may_be() -> None:
    with host_waits(raises=True):
        torch.ones(3, device="pretend").sum().item()


def mix_devices() -> None:
    torch.ones(3, device="pretend").add(torch.ones(3))


@pytest.mark.parametrize(
    ("does", "text"),
    [
        (wait_where_none_may_be, "the host waits for the pretend device: a value is read by the host"),
        (mix_devices, "Expected all tensors to be on the same device"),
    ],
)
def test_errors_are_told(pretend_ranks: RankPool, does: object, text: str) -> None:
    assert callable(does)
    with pytest.raises(RankError, match=text):
        pretend_ranks(1, does, process_group=False)


def count_memory() -> tuple[int, int, int]:
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    kept = torch.zeros(100, device="pretend")
    del kept
    kept = torch.zeros(7, device="pretend")
    now = torch.accelerator.memory_allocated()
    return now - before, torch.accelerator.max_memory_allocated() - before, kept.numel()


def test_memory_is_counted_to_the_byte(pretend_ranks: RankPool) -> None:
    assert pretend_ranks(1, count_memory, process_group=False) == [(28, 400, 7)]


def tasks() -> list[str]:
    done: list[str] = []
    first, second = torch.Stream("pretend"), torch.Stream("pretend")
    issue(lambda: done.append("first"), first)
    second.wait_stream(first)
    issue(lambda: done.append("second"), second)
    done.append("host")
    second.synchronize()
    return done


def test_tasks_run_late_and_in_order(pretend_ranks: RankPool) -> None:
    assert pretend_ranks(1, tasks, process_group=False) == [["host", "first", "second"]]


def test_this_process_does_not_see_it(pretend_ranks: RankPool) -> None:
    assert not torch.accelerator.is_available() or torch.accelerator.current_accelerator() != torch.device("pretend")
