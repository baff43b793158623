"""An update on the host, or one that is late, goes on beside the device's work."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lowtide.checkpoint.chunk_view import ChunkView
from lowtide.checkpoint.writer import Snapshot
from lowtide.comm.collective_watchdog import CollectiveWatchdog
from lowtide.engine.step.step_sums import SummedStep
from lowtide.offload import FileStore, HostCopies, HostPool, StagedStore
from lowtide.zero.gradient import GroupGradient
from lowtide.zero.host_update import HostUpdate
from lowtide.zero.optimizer import ShardedOptimizer
from lowtide.zero.versions import UpdateThread
from tests.kit.ranks import on_device
from tests.pretend import device as pretend
from tests.pretend.host_order import Event, check_order
from tests.pretend.test_host_waits import PRECISIONS, WIDTH, make_engine, net, train_step

NUM = 4
NAMES = [f"blocks.{index}" for index in range(NUM)]
PATIENCE = 30.0  # seconds


class Told(Tensor):
    """Calls `before` when a copy into it begins."""

    before: Callable[[], object]

    def copy_(self, *given: Any, **options: Any) -> Tensor:
        self.before()
        return super().copy_(*given, **options)


@on_device()
def test_two_threads_copy_at_once() -> None:
    """As the training, whose gradients leave, and the thread that updates speculatively.

    The second begins within the copy of the first, and ends after it.
    """
    device, current = torch.device("pretend", 0), torch.accelerator.current_stream
    copies, values = HostCopies(device), torch.ones(3, device=device)
    has_begun, may_end = threading.Event(), threading.Event()

    def copied(before: Callable[[], object]) -> list[float]:
        stream = current(device)
        out: Any = torch.empty(3, pin_memory=True).as_subclass(Told)
        out.before = before
        copies.to_host(values, out).synchronize()
        assert current(device) == stream
        return list(out.tolist())

    def begin() -> None:
        has_begun.set()
        may_end.wait(PATIENCE)

    def in_another_thread() -> list[float]:
        torch.accelerator.set_stream(torch.Stream(device))
        return copied(begin)

    def begin_both() -> None:
        second.append(thread.submit(in_another_thread))
        has_begun.wait(PATIENCE)

    with ThreadPoolExecutor(1) as thread:
        second: list[Future[list[float]]] = []
        first = copied(begin_both)
        may_end.set()
        assert first == second[0].result() == [1.0] * 3


def keep_in_a_file(values: Tensor, folder: Path) -> None:
    store = StagedStore(FileStore(folder, 0), HostPool(pinned=True))
    store.save("key", values).wait()
    store.load("key", values).wait()
    store.close()


def write_a_checkpoint(values: Tensor, folder: Path) -> None:
    snapshots = [Snapshot([ChunkView("values", (3,), 0, values)], HostPool(pinned=True), values.device)]

    def write() -> None:
        snapshot = snapshots.pop()  # the thread frees its event
        snapshot.wait()
        snapshot.drop()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(write).result()


def watch(values: Tensor, folder: Path) -> None:
    watchdog = CollectiveWatchdog()
    watchdog.start(1, values.device, 0.8)
    watchdog.begin("gather of unit (root)", [0], lambda others: "", waits=True)
    watchdog.end()
    deadline = time.monotonic() + PATIENCE
    while watchdog._asked is None and time.monotonic() < deadline:
        time.sleep(0.01)
    watchdog.stop()


@on_device()
def test_the_watchdog_asks_for_no_event_of_a_capture() -> None:
    module: Any = torch.get_device_module("pretend")
    watchdog = CollectiveWatchdog()
    watchdog.start(0, torch.device("pretend", 0), 0.2)
    with module.graph(module.CUDAGraph()):
        watchdog.begin("gather of unit (root)", [1], lambda others: "", waits=True)
        watchdog.end()
        time.sleep(0.5)
    assert "lowtide overdue" in {thread.name for thread in threading.enumerate()}
    watchdog.stop()


@pytest.mark.parametrize("act", [keep_in_a_file, write_a_checkpoint, watch])
@on_device()
def test_a_thread_takes_no_memory_of_another_device(act: Callable[[Tensor, Path], None], tmp_path: Path) -> None:
    """It begins with device 0, which is that of another rank."""
    with torch.accelerator.device_index(1):
        values = torch.ones(3, dtype=torch.uint8, device="pretend:1")
        pretend.opened()
        act(values, tmp_path)
        assert pretend.opened() <= {1}


class Record:
    """Events of a training. Others can wait for them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def note(self, what: str, name: str = "") -> None:
        with self._changed:
            self.events.append((what, name))
            self._changed.notify_all()

    def await_event(self, what: str, name: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: (what, name) in self.events, PATIENCE), (what, name, self.events)


def unit_of(name: str) -> str:
    return next(unit for unit in NAMES if unit in name)


def steps_with(zero: dict[str, Any], precision: str, must: Callable[[Record, str, str], None]) -> list[Event]:
    """Events of a step and the next forward. must: called before an event is noted; may wait for others."""
    record = Record()
    leave, change, put_back, read = (
        GroupGradient._leave,
        ShardedOptimizer._change,
        HostUpdate.put_back,
        SummedStep.read,
    )
    current: list[str] = []

    def leaves(self: GroupGradient, is_final: bool) -> None:
        must(record, "leaves", unit_of(self.group.plan.name))
        leave(self, is_final)
        record.note("leaves", unit_of(self.group.plan.name))

    def updates(self: ShardedOptimizer, shard: Any, *others: Any) -> None:
        current[:] = [unit_of(shard.group.plan.name)]
        must(record, "update", current[0])
        change(self, shard, *others)

    def returns(self: HostUpdate, values: Tensor, out: Tensor) -> Any:
        record.note("update", current[0])
        copy = put_back(self, values, out)
        record.note("returns", current[0])
        return copy

    def reads(self: SummedStep) -> Any:
        sums = read(self)
        if ("norm", "") not in record.events:
            record.note("norm")
        return sums

    with (
        make_engine(net(NUM), {"zero_optimization": zero, "gradient_clipping": 1e6, **PRECISIONS[precision]}) as engine,
        patch.object(GroupGradient, "_leave", leaves),
        patch.object(ShardedOptimizer, "_change", updates),
        patch.object(HostUpdate, "put_back", returns),
        patch.object(SummedStep, "read", reads),
    ):
        train_step(engine, torch.randn(2, WIDTH))
        for name in NAMES:
            block = engine.module.get_submodule(name)
            block.register_forward_pre_hook(lambda module, args, name=name: record.note("forward", name))
        engine.eval_step((torch.randn(2, WIDTH),))
    return record.events


@pytest.mark.parametrize(("overlap", "precision"), [("none", "bf16"), ("none", "fp32"), ("speculative", "bf16")])
@on_device()
def test_each_unit_waits_for_its_own_update_alone(overlap: str, precision: str) -> None:
    def must(record: Record, what: str, name: str) -> None:
        index = NAMES.index(name)
        if overlap == "none" and what == "update" and index:  # it waits for no update but its own
            record.await_event("forward", NAMES[index - 1])
        if overlap == "speculative" and what == "leaves" and index < NUM - 1:  # the backward goes on beside updates
            record.await_event("update", NAMES[index + 1])

    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "overlap": overlap}}
    check_order(steps_with(zero, precision, must), NAMES, overlap == "speculative")


def explode(gradient: Tensor) -> None:
    raise RuntimeError("boom")


def trained(overlap: str, fails: bool) -> list[Tensor]:
    """The weights after a step, before which a backward fails when three of four gradients have left."""
    torch.manual_seed(0)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "overlap": overlap, **_LATE[overlap]}}
    with make_engine(net(NUM), {"zero_optimization": zero, **PRECISIONS["bf16"]}) as engine:
        batch = torch.randn(2, WIDTH)
        train_step(engine, batch)
        if fails:
            first = engine.module.get_submodule(NAMES[0])
            hook = first.register_forward_hook(lambda module, args, output: output.register_hook(explode) and None)
            with pytest.raises(RuntimeError, match="boom"):
                train_step(engine, batch)
            hook.remove()
        train_step(engine, batch)
        return list(engine.state_dict().values())


_LATE: dict[str, dict[str, int]] = {"none": {}, "speculative": {}, "delayed": {"delay_after_steps": 0}}


@on_device()
def test_an_error_while_gradients_leave_changes_nothing() -> None:
    for overlap in _LATE:
        fine, failed = trained(overlap, False), trained(overlap, True)
        assert all(torch.equal(a, b) for a, b in zip(fine, failed, strict=True)), overlap


@on_device()
def test_an_update_is_between_what_was_given_before_and_after_it() -> None:
    """What comes after a delayed update has what it wrote; what it reads, it has from before.

    Of a parameter on the device, from a gradient that the training's stream writes late.
    """
    device = torch.device("pretend", 0)
    parameter, gradient = torch.zeros(3, device=device), torch.zeros(3, device=device)
    torch.accelerator.synchronize()

    def update() -> None:
        parameter.copy_(gradient, non_blocking=True)

    delayed = UpdateThread(device)
    gradient.copy_(torch.full((3,), 7.0).pin_memory(), non_blocking=True)
    delayed.start(update, [gradient])
    assert delayed.wait() is None
    after = parameter * 2  # the training goes on with it
    delayed.end()
    delayed.close()
    assert after.tolist() == [14.0] * 3


@on_device()
def test_a_training_may_move_to_another_stream() -> None:
    for stage in (0, 3):
        with make_engine(net(2), {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2}) as engine:
            default, side = torch.accelerator.current_stream(), torch.Stream("pretend")
            for before, now in ((side, default), (default, side), (side, default)):
                now.wait_stream(before)
                with now:
                    for _ in range(2):
                        engine.train_step((torch.randn(4, WIDTH),))
