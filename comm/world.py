"""This process among all processes of the job: rank, device, small objects, and what ends with an engine.

[Note: threads at exit]
The threads of a gloo group end when its last reference goes. One that lives on into the interpreter's shutdown, with a
tensor of a finished collective in its hands, aborts the process. So `leave` must drop the last reference: routes let go
of their group in `close`, and `torch.distributed.nn.functional`, which binds the default group as a default argument
when it is imported, is imported here, before there is one.
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

# How many worlds use a process group that `join` made. As global as the default process group itself, whose end it
# decides; weak, because a last reference would keep the group's threads alive.
_USERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

# The process groups whose connections a failed collective has ended, and its error. As global as these groups.
_BROKEN: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

_LENGTH_BYTES = 8
_FIRST_BYTES = 256  # of each rank in the first collective; most of what ranks tell each other is shorter
_NO_TAG = (1 << 31) - 1  # that no message has
_CHANNEL = NUM_CHANNELS - 1  # of the record of the progress; the others are those of axes
_HOST_BACKENDS = ("gloo", "mpi", "fake")  # whose `wait` returns when the result is there
_WITHOUT_FLOAT64 = {"mps"}


@dataclass(frozen=True)
class World:
    """Who this process is.

    `owns_process_group` says whether the default process group is one that `join` made; the last to `leave` ends it.
    `began_alone`: it was made without a launcher, just now. `progress` is the record of what this process does; off,
    where neither a launcher nor the config asks for it.
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
    overdue: CollectiveWatchdog = field(default_factory=CollectiveWatchdog, compare=False)
    raised: ErrorBroadcast = field(
        default_factory=ErrorBroadcast, compare=False
    )  # what ranks tell each other of errors in a call

    @classmethod
    def join(cls, device: str = "auto", timeout_seconds: float = 300.0) -> World:
        """Uses the default process group that exists, or makes one from the launcher's environment variables.

        With neither it is a world of one, for which a process group without network is made.
        Raises ValueError where some of the launcher's variables are set and others are missing, CollectiveError where
        another rank does not come.
        """
        chosen = _choose_device(device)
        progress = Progress.of_this_process()
        began_alone = not dist.is_initialized() and not is_launched()
        if dist.is_initialized():
            _refuse_broken(dist.group.WORLD)
        else:
            num_ranks = launched_ranks()[1]
            if chosen.type != "cpu":
                leave_errors_to_us()
            progress.identify(launched_ranks()[0], num_ranks)
            with progress.waiting("the meeting of all ranks at the start", _CHANNEL, num_ranks):
                make_process_group(chosen, timeout_seconds)
            _USERS[dist.group.WORLD] = 0
        owned = dist.group.WORLD in _USERS
        if owned:
            _USERS[dist.group.WORLD] += 1
        if chosen.type != "cpu":
            torch.accelerator.set_device_index(chosen)
        rank, size = dist.get_rank(), dist.get_world_size()
        progress.identify(rank, size)
        world = cls(rank, size, chosen, str(dist.get_backend()), owned, timeout_seconds, began_alone, progress)
        if size > 1 and not world.waits_on_host:
            world.overdue.start(rank, chosen, timeout_seconds)
        return world

    def settle(self) -> None:
        """Returns when the device has done what it was given. A rank that is lost meanwhile is told of in `leave`."""
        if self.size > 1 and not self.waits_on_host and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def leave(self) -> None:
        """Destroys the default process group where `join` made it and nobody else is in it. To be called once.

        Raises CollectiveError where a rank was found lost and nobody was told.
        """
        self.raised.close()
        self.watchdog.stop()
        self.progress.stop_clock(Activity.CLOSED)
        try:
            self.overdue.stop()
        finally:
            self._leave_group()

    def _leave_group(self) -> None:
        if not self.owns_process_group or dist.group.WORLD not in _USERS:
            return
        _USERS[dist.group.WORLD] -= 1
        if not _USERS[dist.group.WORLD]:
            dist.destroy_process_group()

    @cached_property
    def waits_on_host(self) -> bool:
        """Whether `wait` of the backend for `device` returns when the result is there; else it orders a stream."""
        backends = dict(part.split(":", 1) for part in dist.get_backend_config().split(","))
        return backends.get(self.device.type) in _HOST_BACKENDS

    @property
    def store(self) -> Any:
        """The rendezvous store that all ranks share."""
        return dist.distributed_c10d._get_default_store()

    @property
    def is_simulated(self) -> bool:
        """True under torch's fake process group: shapes and bytes are right, values are meaningless."""
        return self.backend == "fake"

    def gather_objects(self, value: object) -> list[Any]:
        """The value of every rank, by rank. For start-up and error paths: small picklable objects."""
        if self.size == 1 or self.is_simulated:
            return [value] * self.size if self.size < 4096 else [value]
        with self._waiting("an exchange of objects"):
            return gather_objects(value)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """One rank's value on every rank."""
        if self.size == 1 or self.is_simulated:
            return value
        values = [value]
        with self._waiting(f"a broadcast of rank {source}'s objects"):
            dist.broadcast_object_list(values, src=source)
        return values[0]

    def broadcast_tensor(self, value: torch.Tensor, source: int = 0) -> torch.Tensor:
        """One rank's values on every rank, on `device`; every rank passes a tensor of the same shape and dtype."""
        if self.size == 1 or self.is_simulated:
            return value
        # A copy: what is passed may be expanded, strided, or the user's own.
        buffer = value.to(self.device, copy=True).contiguous()
        with self._waiting(f"a broadcast of rank {source}'s values"):
            dist.broadcast(buffer, src=source)
        return buffer

    def broadcast_tensors(self, values: Sequence[torch.Tensor], source: int = 0) -> list[torch.Tensor]:
        """As `broadcast_tensor` of each, of one dtype, in one message."""
        if len(values) == 1 or self.size == 1 or self.is_simulated:
            return [self.broadcast_tensor(value, source) for value in values]
        together = self.broadcast_tensor(torch.cat([value.flatten().to(self.device) for value in values]), source)
        parts = torch.split(together, [value.numel() for value in values])
        return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]

    def assemble(self, parts: torch.Tensor) -> torch.Tensor:
        """What all ranks have together, on every rank, bit by bit.

        parts: (n,) on `device`, what this rank has, and zero elsewhere; it is written to. No element is on two ranks.
        """
        self.sum(parts.view(torch.int32 if parts.element_size() % 4 == 0 else torch.uint8), "the parts of a tensor")
        return parts

    def sum(self, terms: torch.Tensor, what: str) -> torch.Tensor:
        """Of a tensor on `device` of each rank, which is written to."""
        if self.size > 1 and not self.is_simulated:
            with self._waiting(what):
                dist.all_reduce(terms)
        return terms

    def barrier(self) -> None:
        if self.size > 1:
            device_ids = None if self.waits_on_host else [self.device.index or 0]  # torch warns where it has to guess
            with self._waiting("a barrier"):
                dist.barrier(device_ids=device_ids)

    def watch(self, step_timeout_seconds: float | None) -> None:
        """How long a step may take; None: no limit.

        Past it a launcher that keeps a record says who waits for whom; without one this rank says what it does.
        """
        self.progress.set_limit(step_timeout_seconds)
        if step_timeout_seconds is not None and not self.progress.is_on:
            self.progress.turn_on()
            self.progress.identify(self.rank, self.size)
            self.progress.set_limit(step_timeout_seconds)
            self.watchdog.start(self.progress, step_timeout_seconds)

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        others = [rank for rank in range(self.size) if rank != self.rank]
        group = dist.group.WORLD
        _refuse_broken(group)
        self.overdue.begin(what, others, lambda _: "", waits=True)
        self._begun.count += 1
        self.raised.wait(self._begun, partial(break_connections, group, others, _NO_TAG))
        with self.progress.waiting(what, _CHANNEL, self.size):
            try:
                yield
            except RuntimeError as error:
                self.overdue.check()
                note_broken(group, str(error))
                if found := self.raised.found or self.raised.alone(self._begun, others):
                    raise CollectiveError(f"rank {self.rank} in {what}: {found}") from error
                seconds = time.monotonic() - started
                text = no_answer(self.rank, what, others, seconds, error, self.raised.what_to_do)
                raise CollectiveError(text) from error
            finally:
                self.raised.go_on()
                self.overdue.end()
        self.overdue.check()

    @cached_property
    def _begun(self) -> Begun:
        return self.raised.channel(-1, range(self.size))

    @cached_property
    def hosts(self) -> list[str]:
        """By rank, the host that it is on: told apart by boot identity and memory namespace, not only by name."""
        return self.gather_objects(_host_identity())

    @property
    def num_hosts(self) -> int:
        return len(set(self.hosts))


def gather_objects(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every rank of the group, by rank: small picklable objects.

    One collective where all of them are small, else a second one; `dist.all_gather_object` has two, one of sizes.
    """
    written = pickle.dumps(value)
    begins = len(written).to_bytes(_LENGTH_BYTES, "little") + written
    first = _gather_bytes(begins, _FIRST_BYTES, group)
    lengths = [_LENGTH_BYTES + int.from_bytes(one[:_LENGTH_BYTES], "little") for one in first]
    longest = max(lengths)
    whole = first if longest <= _FIRST_BYTES else _gather_bytes(begins, longest, group)
    return [pickle.loads(one[_LENGTH_BYTES:length]) for one, length in zip(whole, lengths, strict=True)]


def _gather_bytes(content: bytes, count: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """So many bytes of every rank's content, which is filled with zeros, or cut off."""
    device = dist.distributed_c10d._get_object_coll_device(group)
    own = torch.frombuffer(bytearray(content[:count].ljust(count, b"\0")), dtype=torch.uint8).to(device)
    everyone = torch.empty(dist.get_world_size(group), count, dtype=torch.uint8, device=device)
    dist.all_gather(list(everyone), own, group=group)
    return [row.tobytes() for row in everyone.cpu().numpy()]


def _choose_device(device: str) -> torch.device:
    """The device of this rank: the CPU, or its own among those of the accelerator that torch knows here.

    device: auto, cpu, or an accelerator's name, such as cuda or xpu. Raises ValueError for one that is not there.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device == "cpu" or (device == "auto" and (accelerator is None or accelerator.type in _WITHOUT_FLOAT64)):
        return torch.device("cpu")
    if device != "auto":
        name, _, index = device.partition(":")
        if name in _WITHOUT_FLOAT64:
            raise ValueError(f'device: expected one with float64, in which norms are summed, found "{name}"; set "cpu"')
        if accelerator is None or name != accelerator.type:
            there = f'only the CPU and "{accelerator.type}"' if accelerator is not None else "none beside the CPU"
            raise ValueError(f'device: expected a {name} device, found {there} that torch can use; set "device": "cpu"')
        if index:
            return torch.device(name, int(index))
    assert accelerator is not None
    return torch.device(accelerator.type, _device_index(accelerator.type, torch.accelerator.device_count()))


def _device_index(kind: str, num_visible: int) -> int:
    """The number of this rank's own device among those that the process sees.

    It is LOCAL_RANK, unless the process sees one device alone: then that was chosen for it by whoever has set its mask
    (srun --gpus-per-task=1). Raises ValueError where there are fewer devices than ranks.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if num_visible == 1:
        return 0
    if local_rank >= num_visible:
        mask = "CUDA_VISIBLE_DEVICES" if kind == "cuda" else "the mask of its devices"
        raise ValueError(
            f"device: expected a {kind} device for local rank {local_rank}, found {num_visible} devices that this "
            f'process may use; start fewer ranks on each host, change {mask}, or set "device": "cpu"'
        )
    return local_rank


def note_broken(group: dist.ProcessGroup | None, why: str) -> None:
    """A collective of the group has failed: its connections are gone."""
    if group is not None:
        _BROKEN.setdefault(group, why.splitlines()[0])


def _refuse_broken(group: dist.ProcessGroup | None) -> None:
    if group in _BROKEN:
        raise CollectiveError(
            f"rank {dist.get_rank()}: the process group is broken for good, since a collective of it has failed "
            f"({_BROKEN[group]}); no engine can use it any more. Start the job again from a checkpoint; or, if all "
            "ranks are alive, close every engine, destroy the process group, and make another one on all ranks"
        )


def break_connections(group: dist.ProcessGroup | None, others: Sequence[int], tag: int) -> None:
    """Ends those of a gloo group, and what waits for them: gloo does so after a wait in vain. tag: of no message."""
    for peer in others:
        with suppress(RuntimeError):
            nothing = dist.irecv(torch.empty(1), peer, group, tag)
            if nothing is not None:
                nothing.wait(timedelta(milliseconds=1))


def _host_identity() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.stat("/dev/shm")
        return f"{boot}:{namespace.st_dev}:{namespace.st_ino}"
    except OSError:
        return socket.gethostname()
