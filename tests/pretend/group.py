"""A process group with NCCL's manners: what a job on GPUs would meet, found on processors.

    dist.init_process_group("pretend_nccl")

| NCCL                                                            | here                                              |
|-----------------------------------------------------------------|---------------------------------------------------|
| tensors of the CPU are refused                                  | so, unless PRETEND_NCCL_ON_CPU is set             |
| tags are ignored: messages match in the order of their start    | numbered by pair of ranks and direction           |
| a group's collectives run in the order of calls, on one stream  | a `Queue`, whose thread does one after the other  |
| a message outside of a batch has a stream for each pair of      | a `Queue` for each pair; PRETEND_NCCL_EAGER: the  |
| ranks; with eager connection that of the group's collectives    | group's                                           |
| it occupies the stream until its peer has come                  | both ends wait for each other                     |
| the first use of a communicator blocks the host until all come  | so                                                |
| work.wait() orders the stream, and does not block the host      | results appear in it, and not before              |
| work.wait(timeout) polls, and blocks the host                   | is noted in `HOST_WAITS`                          |
| a timeout or an error ends the process (the watchdog)           | `ProcessEnded` is raised                          |
| abort() frees the streams; results are garbage                  | waits return, what was to be written is NaN       |

Where NCCL would hang, `Hang` says which rank waits for what. What ranks send goes through the rendezvous store, so that
a thread never blocks where it cannot be called back.
"""

# torch calls these methods by position; its stubs have overloads for other callers.
# mypy: disable-error-code="override, assignment, call-arg"

import os
import pickle
import queue as queues
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .board import Board, Hang, Looking

BACKEND = "pretend_nccl"
HOST_WAITS: list[str] = []
"""The stacks of waits that block the host, since the list was cleared."""

_CHUNK = 4 << 20  # bytes of a value in the store
_LOOK = timedelta(seconds=0.5)  # a wait is looked at so often


class ProcessEnded(BaseException):
    """NCCL's watchdog would have ended the process."""


class _Aborted(Exception):
    pass


class Post:
    """Values that ranks leave for each other, through a connection of its own."""

    def __init__(self, who: str, group: "Group") -> None:
        """who: a queue, or the host."""
        self._who, self._group = who, group
        self._store: Any = dist.PrefixStore(group.prefix, group.board.store.clone())
        self._store.set_timeout(_LOOK)
        self._num_chunks: dict[str, int] = {}

    def put(self, key: str, value: Any) -> None:
        data = pickle.dumps(value)
        chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
        self._num_chunks[key] = len(chunks)
        for index, chunk in enumerate(chunks[1:], 1):
            self._store.set(f"{key}/{index}", chunk)
        self._store.set(key, bytes([len(chunks)]) + chunks[0])

    def take(self, key: str, looking: Looking | None = None) -> Any:
        """Waits for a value."""
        self._group.board.awaits(self._who, self._group.prefix + key)
        data = self._get(key, looking)
        self._group.board.awaits(self._who, None)
        self._num_chunks[key] = data[0]
        rest = [self._get(f"{key}/{index}", looking) for index in range(1, data[0])]
        return pickle.loads(b"".join([data[1:], *rest]))

    def drop(self, key: str) -> None:
        """Of what was put or taken here."""
        for index in range(1, self._num_chunks.pop(key)):
            self._store.delete_key(f"{key}/{index}")
        self._store.delete_key(key)

    def _get(self, key: str, looking: Looking | None) -> bytes:
        while True:
            try:
                return bytes(self._store.get(key))
            except dist.DistStoreError:
                if self._group.is_aborted.is_set():
                    raise _Aborted from None
                if looking is not None:
                    looking.look()


class Work(dist.Work):
    """A started operation. Its results are in the tensors from `wait` on, or once `is_completed` has said so."""

    def __init__(self, group: "Group", what: str, run: Callable[[Post], None], results: Callable[[], None]) -> None:
        super().__init__()
        self.what = what
        self._group = group
        self._run: Callable[[Post], None] | None = run
        self._results: Callable[[], None] | None = results
        self._started = time.monotonic()
        self._is_done = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def run(self, post: Post) -> None:
        """In the queue's thread."""
        try:
            assert self._run is not None
            self._run(post)
        except BaseException as error:
            self._error, self._results = error, None
        self._run = None
        self._is_done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.board.check()
        if timeout:
            HOST_WAITS.append("".join(traceback.format_stack(limit=12)))
        if timeout or _device() == "cpu":
            return self._wait(timeout)
        from tests.pretend import device

        device.issue(self._wait_on_stream)  # whoever needs what the stream has comes to wait for it
        return True

    def _wait_on_stream(self) -> None:
        try:
            self._wait(None)
        except BaseException as error:  # it has no way through the stream
            self._group.board.found = error

    def _wait(self, timeout: timedelta | None) -> bool:
        with self._group.board.host_waits(self.what) as looking:
            while not self._is_done.wait(0.02):
                looking.look()
                self._check_time(timeout)
        return self._finish()

    def is_completed(self) -> bool:
        return self._is_done.is_set() and (self._error is not None or self._finish())

    def is_success(self) -> bool:
        return self._is_done.is_set() and self._error is None

    def synchronize(self) -> None:
        self.wait()

    def _finish(self) -> bool:
        if isinstance(self._error, Hang):
            raise self._error
        if self._error is not None and not isinstance(self._error, _Aborted):
            raise ProcessEnded(f"{self.what}: {self._error}") from self._error
        with self._lock:
            results, self._results = self._results, None
        if results is not None:
            results()
        return True

    def _check_time(self, timeout: timedelta | None) -> None:
        waited = time.monotonic() - self._started
        if timeout and waited > timeout.total_seconds():
            raise dist.DistBackendError(f"Watchdog caught collective operation timeout: {self.what}")
        is_watched = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0"
        if is_watched and waited > self._group.timeout.total_seconds():
            raise ProcessEnded(f"{self.what}: watchdog, after {waited:.1f} s")


class Queue:
    """Does one operation after the other, as a stream of a communicator."""

    def __init__(self, name: str, board: Board, post: Post) -> None:
        self._name, self._board, self._post = name, board, post
        self._waiting: queues.SimpleQueue[Work | None] = queues.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"pretend {name}", daemon=True)
        self._thread.start()

    def add(self, work: Work) -> Work:
        self._waiting.put(work)
        return work

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (work := self._waiting.get()) is not None:
            self._board.at(self._name, work.what)
            work.run(self._post)
            self._board.at(self._name, None)


class Message:
    """One end of a message. Both have come before any data moves."""

    def __init__(self, key: str, what: str, tensor: Tensor, is_send: bool) -> None:
        self.what = what
        self.is_send = is_send
        self._key = key
        self._tensor = tensor
        self._arrived: Tensor | None = None

    def announce(self, post: Post) -> None:
        if not self.is_send:
            post.put(f"{self._key}/ready", _shape(self._tensor))

    def give(self, post: Post) -> None:
        if self.is_send:
            wanted = post.take(f"{self._key}/ready")
            if wanted != _shape(self._tensor):
                raise RuntimeError(f"{self.what} sends {_shape(self._tensor)}, the other rank receives {wanted}")
            post.put(f"{self._key}/data", read(self._tensor))

    def take(self, post: Post) -> None:
        if not self.is_send:
            self._arrived = post.take(f"{self._key}/data")
            post.drop(f"{self._key}/data")
            post.drop(f"{self._key}/ready")

    def result(self) -> None:
        if self._arrived is not None:
            write(self._tensor, self._arrived)


class Group(dist.ProcessGroup):
    """One communicator, and those of two ranks that its messages make; see the table above."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.board = _board_of(options)
        self.timeout: timedelta = options.timeout
        self._name = str(options.group_id)
        self._ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        # All groups' values are in one store, for the board to look at.
        self.prefix = f"{options.group_id}/"
        self.is_aborted = threading.Event()
        self._queues: dict[str, Queue] = {}
        self._counts: Counter[str] = Counter()
        self._batch: list[Message] | None = None
        self._posted: list[str] = []  # keys of this rank's collectives that some rank may not have read

    # -- what torch asks for ----------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(_device())]

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:
        batch, self._batch = self._batch, None
        assert batch
        return self._start_messages(self._queue("collectives", self._ranks), batch)

    def abort(self) -> None:
        """Ends what runs."""
        self.is_aborted.set()

    def shutdown(self) -> None:
        self.is_aborted.set()
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()

    # -- messages ---------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> Work | None:
        return self._message(tensors[0], rank, is_send=True)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> Work | None:
        work = self._message(tensors[0], rank, is_send=False)
        poison(tensors[0])
        return work

    def _message(self, tensor: Tensor, peer: int, is_send: bool) -> Work | None:
        self._check([tensor])
        settle()
        ends = (self.rank(), peer) if is_send else (peer, self.rank())
        is_batched = self._batch is not None or _is_eager()
        way = f"{'group' if is_batched else 'pair'} {ends[0]}>{ends[1]}"
        key = f"{way}/{self._counts[way]}"
        self._counts[way] += 1
        verb = "a send to" if is_send else "a receive from"
        message = Message(key, f"{verb} rank {self._ranks[peer]} of {tensor.numel()} elements", tensor, is_send)
        if self._batch is not None:
            self._batch.append(message)
            return None
        pair = [self._ranks[end] for end in sorted(ends)]
        queue = self._queue("collectives", self._ranks) if _is_eager() else self._queue(f"{pair[0]}-{pair[1]}", pair)
        return self._start_messages(queue, [message])

    def _start_messages(self, queue: Queue, messages: Sequence[Message]) -> Work:
        def run(post: Post) -> None:
            for part in (Message.announce, Message.give, Message.take):
                for message in messages:
                    part(message, post)

        def results() -> None:
            for message in messages:
                message.result()

        return queue.add(Work(self, " and ".join(message.what for message in messages), run, results))

    # -- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        (tensor,) = tensors
        operation = _OPERATIONS[_operation_of(opts)]
        return self._collective(
            f"all_reduce of {_shape(tensor)}", tensor, lambda parts: write(tensor, _folded(parts, operation)), tensor
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        operation = _OPERATIONS[_operation_of(opts)]

        def result(parts: list[Tensor]) -> None:
            mine = [part.reshape(-1).chunk(self.size())[self.rank()] for part in parts]
            write(output, _folded(mine, operation).view(output.shape))

        return self._collective(f"reduce_scatter of {_shape(input)}", input, result, output)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        def result(parts: list[Tensor]) -> None:
            write(output, torch.cat([part.reshape(-1) for part in parts]).view(output.shape))

        return self._collective(f"all_gather of {_shape(input)}", input, result, output)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        def result(parts: list[Tensor]) -> None:
            for output, part in zip(outputs[0], parts, strict=True):
                write(output, part.view(output.shape))

        return self._collective(f"all_gather of {_shape(inputs[0])}", inputs[0], result, *outputs[0])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        (tensor,), root = tensors, opts.rootRank
        what = f"broadcast of {_shape(tensor)} from rank {self._ranks[root]}"
        return self._collective(what, tensor, lambda parts: write(tensor, parts[root]), tensor)

    def barrier(self, opts: Any = None) -> Work:
        return self._collective("barrier", torch.zeros(0, device=_device()), lambda parts: None)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _collective(self, what: str, given: Tensor, result: Callable[[list[Tensor]], None], *outputs: Tensor) -> Work:
        self._check([given, *outputs])
        settle()
        key = f"collective {self._counts['collective']}"
        self._counts["collective"] += 1
        arrived: list[Tensor] = []
        for output in outputs:
            if output.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
                poison(output)

        def run(post: Post) -> None:
            post.put(f"{key}/{self.rank()}", (what, read(given)))
            for rank in range(self.size()):
                other, values = post.take(f"{key}/{rank}")
                if other != what:
                    raise Hang(
                        f"{key} of group {self._name}: rank {self._ranks[self.rank()]} is in {what}, "
                        f"rank {self._ranks[rank]} in {other}"
                    )
                arrived.append(values)
            # All have come to this one, so they have read what was left for the one before.
            for old in self._posted:
                post.drop(old)
            self._posted = [f"{key}/{self.rank()}"]

        return self._queue("collectives", self._ranks).add(
            Work(self, f"{what} over ranks {self._ranks}", run, lambda: result(arrived))
        )

    # -- pieces of it -----------------------------------------------------------------------------------------------

    def _queue(self, name: str, ranks: Sequence[int]) -> Queue:
        if name not in self._queues:
            self._connect(name, ranks)
            self._queues[name] = Queue(f"{name} of group {self._name}", self.board, Post(name, self))
        return self._queues[name]

    def _connect(self, name: str, ranks: Sequence[int]) -> None:
        """Makes a communicator: the host waits until all its ranks have come."""
        post = Post("host", self)
        own = self._ranks[self.rank()]
        post.put(f"connect {name}/{own}", None)
        others = [rank for rank in ranks if rank != own]
        with self.board.host_waits(f"the communicator {name} of group {self._name}, with ranks {others}") as looking:
            for rank in others:
                post.take(f"connect {name}/{rank}", looking)

    def _check(self, tensors: Sequence[Tensor]) -> None:
        self.board.check()
        if self.is_aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted")
        for tensor in tensors:
            if tensor.device.type != _device():
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")


def settle() -> None:
    """What the current stream was given is done: what starts now comes after it."""
    if _device() != "cpu":
        event = torch.Event(_device())
        event.record()
        event.query()


def opened(tensor: Tensor) -> Tensor:
    """Its memory, for the host."""
    if tensor.device.type == "cpu":
        return tensor.detach()
    from tests.pretend import device

    with _idle_stream(tensor.device):  # of this thread: opening waits for the current one, in whose midst this may be
        return device.open_for_host(tensor.detach())


def _idle_stream(device: torch.device) -> torch.Stream:
    if not hasattr(_OWN, "stream"):
        _OWN.stream = torch.Stream(device)
    stream: torch.Stream = _OWN.stream
    return stream


def read(tensor: Tensor) -> Tensor:
    return opened(tensor).clone()


def write(tensor: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        opened(tensor).copy_(values)


def poison(tensor: Tensor) -> None:
    """What is still to come is not there."""
    if tensor.is_floating_point():
        opened(tensor).fill_(float("nan"))


def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
    """torch's own, for which a group that is written in Python has no batches."""
    group: Any = operations[0].group or dist.group.WORLD
    if not isinstance(group, Group):
        return list(_torch_batch(operations))
    group._start_coalescing(operations[0].tensor.device)
    for one in operations:
        one.op(
            one.tensor,
            group=group,
            tag=one.tag,
            **{"group_dst" if one.op is dist.isend else "group_src": one.group_peer},
        )
    return [group._end_coalescing(operations[0].tensor.device)]


def _board_of(options: Any) -> Board:
    """That of the default group, which is the first that a process makes."""
    if dist.is_initialized() and isinstance(dist.group.WORLD, Group):
        return dist.group.WORLD.board
    return Board(options.store, options.group_rank, options.group_size)


def _device() -> str:
    return "cpu" if os.environ.get("PRETEND_NCCL_ON_CPU") else "pretend"


def _is_eager() -> bool:
    return bool(os.environ.get("PRETEND_NCCL_EAGER"))


def _shape(tensor: Tensor) -> str:
    return f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"


def _operation_of(opts: Any) -> str:
    return "SUM" if opts is None else opts.reduceOp.op.name if hasattr(opts.reduceOp, "op") else opts.reduceOp.name


def _folded(parts: Sequence[Tensor], operation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = operation(total, part)
    return total


_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "BOR": torch.bitwise_or,
}

_OWN = threading.local()
_torch_batch = dist.batch_isend_irecv


def register() -> None:
    """Makes the backend known to torch, once in a process."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            BACKEND, lambda options, _: Group(options), extended_api=True, devices=["cpu", "pretend"]
        )
        dist.batch_isend_irecv = batch_isend_irecv


def register_device() -> None:
    """In ranks of `pretend_ranks`: engines take this group for their device."""
    from tests.pretend import device

    device.load()
    register()


def join_on_cpu(is_eager: bool = False, timeout_seconds: float = 60.0) -> None:
    """Makes the default group, for tensors of the CPU. is_eager: as with a `device_id`: messages share a stream."""
    os.environ["PRETEND_NCCL_ON_CPU"] = "1"
    os.environ["PRETEND_NCCL_EAGER"] = "1" if is_eager else ""
    register()
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=timeout_seconds))
