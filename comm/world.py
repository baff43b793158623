"""This process among all processes of the job: rank, device, and the exchange of small objects.

[Note: threads at exit]
The threads of a gloo group end when its last reference is dropped. If a thread lives into the interpreter's shutdown
and holds a tensor of a finished collective, it aborts the process. So `leave` must drop the last reference. Transports
drop their group in `close`. `torch.distributed.nn.functional` binds the default group as a default argument when it is
imported, so it is imported here, before the group exists.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from ..watch.progress import Activity, Progress
from ..watch.record import NUM_CHANNELS
from ..watch.watchdog import Watchdog
from .collective_watchdog import CollectiveWatchdog, leave_errors_to_us
from .errors import Begun, CollectiveError, ErrorBroadcast, no_answer
from .rendezvous import is_launched, launched_ranks, make_process_group

# How many worlds use a process group that `join` made. Global like the default process group, which ends with the last
# user. Weak, because a reference would keep the group's threads alive.
_USERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

# Process groups whose connections a failed collective has ended, and its error. Global like the groups.
_BROKEN: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

_LENGTH_BYTES = 8
_FIRST_BYTES = 256  # of each rank in the first collective: most objects are shorter
_NO_TAG = (1 << 31) - 1  # above the tags of messages
_CHANNEL = NUM_CHANNELS - 1  # of the progress record; the channels below belong to axes
_HOST_BACKENDS = ("gloo", "mpi", "fake")  # their `wait` blocks the host until the result is ready
_WITHOUT_FLOAT64 = {"mps"}


@dataclass(frozen=True)
class World:
    """This process and the default process group.

    `owns_process_group`: `join` made the default process group, and the last world to `leave` destroys it.
    `began_alone`: the group was made just now, without a launcher. `progress`: the record of this process, off unless a
    launcher or the config asks for it.
    """

    rank: int
    size: int
    device: torch.device
    backend: str
    owns_process_group: bool
    timeout_seconds: float
    began_alone: bool = False
    progress: Progress = field(default_factory=Progress, compare=False)
    watchdog: Watchdog = field(default_factory=Watchdog, compare=False)
    collective_watchdog: CollectiveWatchdog = field(default_factory=CollectiveWatchdog, compare=False)
    error_broadcast: ErrorBroadcast = field(default_factory=ErrorBroadcast, compare=False)

    @classmethod
    def join(cls, device: str = "auto", timeout_seconds: float = 300.0) -> World:
        """Use the existing default process group, or make it from the launcher's environment variables.

        Without both, make a group of this process only, without network. Raises ValueError if some of the launcher's
        variables are missing, CollectiveError if a rank does not arrive.
        """
        chosen = _choose_device(device)
        if chosen.type != "cpu":
            # `_gather_bytes` and NCCL use the current device. Else all ranks of a host would take device 0. Before the
            # group is made: a device that does not exist is an error here.
            torch.accelerator.set_device_index(chosen)
        progress = Progress.of_this_process()
        began_alone = not dist.is_initialized() and not is_launched()
        if dist.is_initialized():
            _refuse_broken(dist.group.WORLD)
        else:
            num_ranks = launched_ranks()[1]
            if chosen.type != "cpu":
                # Before the group is made: NCCL's process group reads the variable in its constructor.
                leave_errors_to_us()
            progress.identify(launched_ranks()[0], num_ranks)
            with progress.waiting("the meeting of all ranks at the start", _CHANNEL, num_ranks):
                make_process_group(chosen, timeout_seconds)
            _USERS[dist.group.WORLD] = 0
        # A group that the user made is not in _USERS, so no world destroys it.
        owned = dist.group.WORLD in _USERS
        if owned:
            _USERS[dist.group.WORLD] += 1
        rank, size = dist.get_rank(), dist.get_world_size()
        progress.identify(rank, size)
        world = cls(rank, size, chosen, str(dist.get_backend()), owned, timeout_seconds, began_alone, progress)
        if size > 1 and not world.waits_on_host:
            world.collective_watchdog.start(rank, chosen, timeout_seconds)
        return world

    def wait_for_device(self) -> None:
        """Wait until the device is idle. If a rank is lost meanwhile, `leave` raises."""
        if self.size > 1 and not self.waits_on_host and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def leave(self) -> None:
        """Destroy the default process group if `join` made it and no other world uses it. Call it once.

        Raises CollectiveError if a lost rank was found and not reported yet.
        """
        # Threads first: they use the store, which may end with the group.
        self.error_broadcast.close()
        self.watchdog.stop()
        self.progress.stop_clock(Activity.CLOSED)
        try:
            self.collective_watchdog.stop()
        finally:
            self._leave_group()

    def _leave_group(self) -> None:
        # The second condition: the user may have destroyed the group since `join`.
        if not self.owns_process_group or dist.group.WORLD not in _USERS:
            return
        _USERS[dist.group.WORLD] -= 1
        if not _USERS[dist.group.WORLD]:
            dist.destroy_process_group()

    @cached_property
    def waits_on_host(self) -> bool:
        """True if `wait` of the device's backend blocks the host. False if it orders a stream."""
        backends = dict(part.split(":", 1) for part in dist.get_backend_config().split(","))  # "cpu:gloo,cuda:nccl"
        return backends.get(self.device.type) in _HOST_BACKENDS

    @property
    def store(self) -> Any:
        """The rendezvous store that all ranks share."""
        return dist.distributed_c10d._get_default_store()

    @property
    def is_simulated(self) -> bool:
        """True under torch's fake process group: shapes and bytes are right, values are meaningless."""
        return self.backend == "fake"

    def gather_objects(self, value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Gather a small picklable object from every rank, by rank. For start-up and error paths.

        group: of all ranks; None: the default group.
        """
        if self.size == 1 or self.is_simulated:
            return [value] * self.size if self.size < 4096 else [value]
        with self.waiting("an exchange of objects", group):
            return gather_objects(value, group)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the object of rank `source` on every rank."""
        if self.size == 1 or self.is_simulated:
            return value
        values = [value]
        with self.waiting(f"a broadcast of rank {source}'s objects"):
            dist.broadcast_object_list(values, src=source)
        return values[0]

    def broadcast_tensor(self, value: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return the tensor of rank `source` on every rank, on `device`. All ranks pass the same shape and dtype."""
        if self.size == 1 or self.is_simulated:
            return value
        # A copy, since the argument may be expanded, strided, or the user's tensor.
        buffer = value.to(self.device, copy=True).contiguous()
        with self.waiting(f"a broadcast of rank {source}'s values"):
            dist.broadcast(buffer, src=source)
        return buffer

    def broadcast_tensors(self, values: Sequence[torch.Tensor], source: int = 0) -> list[torch.Tensor]:
        """Broadcast several tensors of the same dtype in a single message."""
        if len(values) == 1 or self.size == 1 or self.is_simulated:
            return [self.broadcast_tensor(value, source) for value in values]
        together = self.broadcast_tensor(torch.cat([value.flatten().to(self.device) for value in values]), source)
        parts = torch.split(together, [value.numel() for value in values])
        return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]

    def assemble(self, parts: torch.Tensor) -> torch.Tensor:
        """Combine disjoint parts of a tensor on every rank, bit by bit.

        parts: (n,) on `device`, with this rank's elements, and zero in all other places. Overwritten.
        """
        # As integers: a sum of floats would turn -0.0 into 0.0, and might change the bits of a NaN.
        # int32 or bytes, since gloo and NCCL do not sum int16. Nothing overflows: a single rank has a non-zero integer.
        self.sum(parts.view(torch.int32 if parts.element_size() % 4 == 0 else torch.uint8), "the parts of a tensor")
        return parts

    def sum(self, terms: torch.Tensor, what: str) -> torch.Tensor:
        """Sum a tensor on `device` over the ranks, in place."""
        if self.size > 1 and not self.is_simulated:
            with self.waiting(what):
                dist.all_reduce(terms)
        return terms

    def barrier(self) -> None:
        if self.size > 1:
            device_ids = None if self.waits_on_host else [self.device.index or 0]  # without it torch warns
            with self.waiting("a barrier"):
                dist.barrier(device_ids=device_ids)

    def watch(self, step_timeout_seconds: float | None) -> None:
        """Limit the time of a step. None: no limit.

        If a step exceeds it, the launcher that reads the records reports who waits for whom. Without a launcher this
        rank logs its activity.
        """
        self.progress.set_limit(step_timeout_seconds)
        if step_timeout_seconds is not None and not self.progress.is_on:
            self.progress.turn_on()
            # `identify` and `set_limit` have no effect on a record that is off, so they follow `turn_on`.
            self.progress.identify(self.rank, self.size)
            self.progress.set_limit(step_timeout_seconds)
            self.watchdog.start(self.progress, step_timeout_seconds)

    @contextmanager
    def waiting(self, what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Wrap a collective of the backend over all ranks: its errors name them. group: None: the default group."""
        started = time.monotonic()
        others = [rank for rank in range(self.size) if rank != self.rank]
        group = group or dist.group.WORLD
        _refuse_broken(group)
        self.collective_watchdog.begin(what, others, lambda _: "", waits=True)
        self._begun.count += 1
        self.error_broadcast.wait(self._begun, partial(break_connections, group, others, _NO_TAG))
        with self.progress.waiting(what, _CHANNEL, self.size):
            try:
                yield
            except RuntimeError as error:
                # First: if the watchdog aborted the communicator, its error names the cause and torch's error does not.
                self.collective_watchdog.check()
                note_broken(group, str(error))
                if found := self.error_broadcast.found or self.error_broadcast.alone(self._begun, others):
                    raise CollectiveError(f"rank {self.rank} in {what}: {found}") from error
                seconds = time.monotonic() - started
                text = no_answer(self.rank, what, others, seconds, error, self.error_broadcast.what_to_do)
                raise CollectiveError(text) from error
            finally:
                self.error_broadcast.end_wait()
                self.collective_watchdog.end()
        # An aborted collective may return without an error, and then its result is undefined.
        self.collective_watchdog.check()

    @cached_property
    def _begun(self) -> Begun:
        # The channels of axes have numbers from 0.
        return self.error_broadcast.channel(-1, range(self.size))

    @cached_property
    def hosts(self) -> list[str]:
        """The host of each rank, by boot id, /dev/shm and process namespace, since names of hosts may be equal."""
        return self.gather_objects(_host_identity())

    @property
    def num_hosts(self) -> int:
        return len(set(self.hosts))


def gather_objects(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather a small picklable object from every rank of the group, by rank.

    Takes a single collective if all objects are small, else two. `dist.all_gather_object` always takes two.
    """
    written = pickle.dumps(value)
    begins = len(written).to_bytes(_LENGTH_BYTES, "little") + written
    first = _gather_bytes(begins, _FIRST_BYTES, group)
    lengths = [_LENGTH_BYTES + int.from_bytes(one[:_LENGTH_BYTES], "little") for one in first]
    longest = max(lengths)
    whole = first if longest <= _FIRST_BYTES else _gather_bytes(begins, longest, group)
    return [pickle.loads(one[_LENGTH_BYTES:length]) for one, length in zip(whole, lengths, strict=True)]


def _gather_bytes(content: bytes, count: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """Gather `count` bytes of every rank's content, truncated or padded with zeros."""
    device = dist.distributed_c10d._get_object_coll_device(group)
    # A bytearray: torch.frombuffer warns if it cannot write to the memory, as with bytes.
    own = torch.frombuffer(bytearray(content[:count].ljust(count, b"\0")), dtype=torch.uint8).to(device)
    everyone = torch.empty(dist.get_world_size(group), count, dtype=torch.uint8, device=device)
    dist.all_gather(list(everyone), own, group=group)
    return [row.tobytes() for row in everyone.cpu().numpy()]


def _choose_device(device: str) -> torch.device:
    """Choose this rank's device: the CPU, or one of the accelerators that torch finds.

    device: auto, cpu, or an accelerator such as cuda or xpu. Raises ValueError if it is not available.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device == "cpu" or (device == "auto" and (accelerator is None or accelerator.type in _WITHOUT_FLOAT64)):
        return torch.device("cpu")
    if device != "auto":
        name, _, index = device.partition(":")
        if name in _WITHOUT_FLOAT64:
            raise ValueError(f'device: "{name}" has no float64, but norms need it. Set "device": "cpu".')
        if accelerator is None or name != accelerator.type:
            there = f'the CPU and "{accelerator.type}"' if accelerator is not None else "only the CPU"
            raise ValueError(f'device: expected a {name} device, but torch finds {there}. Set "device": "cpu".')
        if index:
            return torch.device(name, int(index))
    assert accelerator is not None
    return torch.device(accelerator.type, _device_index(accelerator.type, torch.accelerator.device_count()))


def _device_index(kind: str, num_visible: int) -> int:
    """Return the index of this rank's device among the devices that the process sees.

    The index is LOCAL_RANK, except if the process sees a single device. Raises ValueError if ranks outnumber devices.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if num_visible == 1:  # a mask has chosen it for this rank (srun --gpus-per-task=1)
        return 0
    if local_rank >= num_visible:
        mask = "CUDA_VISIBLE_DEVICES" if kind == "cuda" else "the device mask"
        raise ValueError(
            f"device: expected a {kind} device for local rank {local_rank}, but this process sees {num_visible} "
            f'devices. Start fewer ranks on each host, change {mask}, or set "device": "cpu".'
        )
    return local_rank


def note_broken(group: dist.ProcessGroup | None, why: str) -> None:
    """Mark a process group as broken: a collective of it has failed, and its connections are gone."""
    if group is not None:
        # The first error stays. Later errors follow from it: the connections are gone.
        _BROKEN.setdefault(group, why.splitlines()[0])


def _refuse_broken(group: dist.ProcessGroup | None) -> None:
    if group in _BROKEN:
        raise CollectiveError(
            f"rank {dist.get_rank()}: no engine can use the process group any more, because a collective of it has "
            f"failed ({_BROKEN[group]}). Restart the job from a checkpoint. If all ranks are alive, they can also "
            "close every engine, destroy the process group, and make a new group."
        )


def break_connections(group: dist.ProcessGroup | None, others: Sequence[int], tag: int) -> None:
    """End the connections of a gloo group, and so all waits on them. tag: unused by messages."""
    for peer in others:  # gloo closes a connection when a receive on it times out
        with suppress(RuntimeError):
            nothing = dist.irecv(torch.empty(1), peer, group, tag)
            if nothing is not None:
                nothing.wait(timedelta(milliseconds=1))


def _host_identity() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        # Containers of a host have the same boot id, but usually separate mounts of /dev/shm. With a common mount they
        # may still number their processes separately, and ranks on shared memory watch each other by process id.
        memory, processes = os.stat("/dev/shm"), os.readlink("/proc/self/ns/pid")
        return f"{boot}:{memory.st_dev}:{memory.st_ino}:{processes}"
    except OSError:
        return socket.gethostname()
