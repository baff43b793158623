"""Where a device is idle in a profiler's trace, block by block: arithmetic on the trace's events.

A kernel belongs to the call of the host that launched it (the same "correlation"), and that call to the operation
around it on its thread. An operation of a forward pass lies in the range of a block; autograd's call of a node has the
"Sequence number" of the operation of the forward that it differentiates (other operations have numbers that mean
nothing). What belongs to no block (collectives, copies, the update) fills gaps, and has none of its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BLOCK = "block "
"""A range whose name begins so is a block's, such as "block 3"."""

Event = Mapping[str, Any]
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_NODE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Kernel:
    """Of the device. block: such as "block 3"; "" for none. Times in microseconds."""

    name: str
    start: float
    end: float
    block: str
    is_backward: bool


@dataclass(frozen=True)
class Gaps:
    """From the first kernel of a block in one direction to the first of what comes next. Microseconds."""

    block: str
    is_backward: bool
    duration: float
    idle: float
    number: int  # of the idle times
    largest: float


def kernels_of(events: Sequence[Event], *, host_as_device: bool = False) -> list[Kernel]:
    """Those of a Chrome trace, by their start. host_as_device: the host's own operations stand for kernels."""
    complete = [event for event in events if event.get("ph") == "X"]
    operations = _Operations([event for event in complete if event.get("cat") == "cpu_op"], complete)
    if host_as_device:
        found = [_kernel(event, *operations.block_of(event)) for event in operations.outermost]
        return sorted(found, key=lambda kernel: kernel.start)
    launches = {
        event["args"]["correlation"]: event
        for event in complete
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    found = []
    for event in complete:
        if event.get("cat") in _ON_DEVICE:
            launch = launches.get(event.get("args", {}).get("correlation"))
            found.append(_kernel(event, *(("", False) if launch is None else operations.block_of(launch))))
    return sorted(found, key=lambda kernel: kernel.start)


def host_waits_of(events: Sequence[Event], within: str) -> list[str]:
    """What the host called that waits for the device, in ranges of that name, by the names in CUDA's runtime."""
    ranges = [one for one in events if one.get("cat") == "user_annotation" and one.get("name") == within]
    calls = [one for one in events if one.get("cat") in _LAUNCHES and _waits(one["name"])]
    return [
        str(call["name"]) for call in calls if any(one["ts"] <= call["ts"] < one["ts"] + one["dur"] for one in ranges)
    ]


def _waits(name: str) -> bool:
    return "Synchronize" in name or name == "cudaMemcpy"


def _kernel(event: Event, block: str, is_backward: bool) -> Kernel:
    return Kernel(event["name"], event["ts"], event["ts"] + event["dur"], block, is_backward)


class _Operations:
    """The host's operations, thread by thread."""

    def __init__(self, operations: Sequence[Event], complete: Sequence[Event]) -> None:
        ranges = [one for one in complete if one.get("cat") == "user_annotation" and one["name"].startswith(BLOCK)]
        self._ranges = _Nested(ranges)
        self._nested = _Nested(operations)
        self.outermost = [one for one in operations if self._nested.depth(one) == 0]
        self._forward: dict[int, str] = {}
        for operation in operations:
            number = _sequence_number(operation)
            if number >= 0 and not operation["name"].startswith(_NODE) and (block := self._range(operation)):
                self._forward.setdefault(number, block)

    def _range(self, event: Event) -> str:
        around = self._ranges.around(event)
        return str(around[-1]["name"]) if around else ""

    def block_of(self, event: Event) -> tuple[str, bool]:
        """The block that an event of the host belongs to, and whether it is in the backward."""
        if block := self._range(event):
            return block, False
        for operation in self._nested.around(event):
            if operation["name"].startswith(_NODE):
                return self._forward.get(_sequence_number(operation), ""), True
        return "", False


def _sequence_number(operation: Event) -> int:
    return int(operation.get("args", {}).get("Sequence number", -1))


class _Nested:
    """Events of threads, on each of which they lie side by side or one within another."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._threads: dict[Any, list[Event]] = {}
        for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
            self._threads.setdefault(event["tid"], []).append(event)
        self._starts = {tid: [one["ts"] for one in found] for tid, found in self._threads.items()}
        self._parents: dict[int, Event | None] = {}
        for found in self._threads.values():
            stack: list[Event] = []
            for event in found:
                while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                    stack.pop()
                self._parents[id(event)] = stack[-1] if stack else None
                stack.append(event)

    def around(self, event: Event) -> list[Event]:
        """Those in which an event of the same thread begins, the innermost first; of its own kind, itself too."""
        tid, start = event["tid"], event["ts"]
        if tid not in self._threads:
            return []
        index = bisect.bisect_right(self._starts[tid], start) - 1
        found: list[Event] = []
        one = self._threads[tid][index] if index >= 0 else None
        while one is not None:
            if one["ts"] + one["dur"] > start or one is event:
                found.append(one)
            one = self._parents[id(one)]
        return found

    def depth(self, event: Event) -> int:
        return len([one for one in self.around(event) if one is not event])


def idle_times(kernels: Sequence[Kernel], start: float, end: float) -> list[float]:
    """How long no kernel ran, each time, between two times; sorted by their start."""
    found, busy_until = [], start
    for kernel in kernels:
        if kernel.start >= end:
            break
        if kernel.start > busy_until:
            found.append(kernel.start - busy_until)
        busy_until = max(busy_until, kernel.end)
    if end > busy_until:
        found.append(end - busy_until)
    return found


def gaps_of(kernels: Sequence[Kernel]) -> list[Gaps]:
    """Of each run of a block's kernels, in the order of time; the last run ends with its own last kernel."""
    windows: list[tuple[Kernel, float]] = []  # the first kernel of a run, the end of its last
    for kernel in kernels:
        if not kernel.block:
            continue
        if windows and (windows[-1][0].block, windows[-1][0].is_backward) == (kernel.block, kernel.is_backward):
            windows[-1] = (windows[-1][0], max(windows[-1][1], kernel.end))
        else:
            windows.append((kernel, kernel.end))
    found = []
    for number, (first, last_end) in enumerate(windows):
        follows = number + 1 < len(windows) and windows[number + 1][0].is_backward == first.is_backward
        end = windows[number + 1][0].start if follows else last_end
        idle = idle_times(kernels, first.start, max(end, first.start))
        duration = max(end - first.start, 0.0)
        found.append(Gaps(first.block, first.is_backward, duration, sum(idle), len(idle), max(idle, default=0.0)))
    return found
