"""A process group with NCCL's manners: what a job on GPUs would meet, found on processors.

    dist.init_process_group("pretend_nccl")

| NCCL                                                            | here                                              |
|-----------------------------------------------------------------|---------------------------------------------------|
| tensors of the CPU are refused                                  | so, unless PRETEND_NCCL_ON_CPU is set             |
| dtypes that it does not know are refused, as int16               | so                                                |
| tags are ignored: messages match in the order of their start    | numbered by pair of ranks and direction           |
| a group's collectives run in the order of calls, on one stream  | a `Queue`, whose thread does one after the other  |
| a message outside of a batch has a stream for each pair of      | a `Queue` for each pair; PRETEND_NCCL_EAGER: the  |
| ranks; with eager connection that of the group's collectives    | group's                                           |
| it occupies the stream until its peer has come                  | both ends wait for each other                     |
| the first use of a communicator blocks the host until all come  | so                                                |
| work.wait() orders the stream, and does not block the host      | results appear in it, and not before              |
| work.wait(timeout) polls, and blocks the host                   | is noted in `queues.HOST_WAITS`                   |
| a timeout or an error ends the process (the watchdog)           | `ProcessEnded` is raised                          |
| abort() frees the streams; results are garbage                  | waits return, what was to be written is NaN       |
| a graph holds collectives, and waits of streams for them        | `capturable`: done by each replay                 |

What ranks send goes through the rendezvous store, so that a thread never blocks where it cannot be called back.
"""

# torch calls these methods by position; its stubs have overloads for other callers.
# mypy: disable-error-code="override, assignment, call-arg"

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.pipe.split.trees import map_leaves

from .queues import Hang, Message, OfProcess, Post, Queue, RecordedWork, Work
from .values import device_name, is_capturing, poison, read, settle, shape_of, unowned, write

BACKEND = "pretend_nccl"


def capturable(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is done by each replay where a graph is captured, with tensors at the same addresses."""

    @functools.wraps(method)
    def start(self: "Group", *args: Any, **kwargs: Any) -> Any:
        if device_name() == "cpu" or not is_capturing():
            return method(self, *args, **kwargs)
        given, more = map_leaves(unowned, (args, kwargs))
        return RecordedWork(functools.partial(method, self, *given, **more))

    return start


class Group(dist.ProcessGroup):
    """One communicator, and those of two ranks that its messages make; see the table above."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.of_process = _of_process(options)
        self.timeout: timedelta = options.timeout
        self._name = str(options.group_id)
        self._ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        self.prefix = str(options.group_id)
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
        return [torch.device(device_name())]

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

    @capturable
    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> Work | None:
        return self._message(tensors[0], rank, is_send=True)

    @capturable
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

        what = " and ".join(message.what for message in messages)
        return queue.add(Work(self, what, run, results, [message.tensor for message in messages]))

    # -- collectives ------------------------------------------------------------------------------------------------

    @capturable
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        (tensor,) = tensors
        operation = _OPERATIONS[_operation_of(opts)]
        return self._collective(
            f"all_reduce of {shape_of(tensor)}", tensor, lambda parts: write(tensor, _folded(parts, operation)), tensor
        )

    @capturable
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        operation = _OPERATIONS[_operation_of(opts)]

        def result(parts: list[Tensor]) -> None:
            mine = [part.reshape(-1).chunk(self.size())[self.rank()] for part in parts]
            write(output, _folded(mine, operation).view(output.shape))

        return self._collective(f"reduce_scatter of {shape_of(input)}", input, result, output)

    @capturable
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        def result(parts: list[Tensor]) -> None:
            write(output, torch.cat([part.reshape(-1) for part in parts]).view(output.shape))

        return self._collective(f"all_gather of {shape_of(input)}", input, result, output)

    @capturable
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        def result(parts: list[Tensor]) -> None:
            for output, part in zip(outputs[0], parts, strict=True):
                write(output, part.view(output.shape))

        return self._collective(f"all_gather of {shape_of(inputs[0])}", inputs[0], result, *outputs[0])

    @capturable
    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Work:
        """received, sent: rows from and for each rank; none: the same number of each."""
        received = received or [output.shape[0] // self.size()] * self.size()
        sent = sent or [input.shape[0] // self.size()] * self.size()
        splits: list[list[int]] = []  # of all ranks

        def result(parts: list[Tensor]) -> None:
            width = output.shape[1:].numel()
            pieces = [
                torch.split(part.reshape(-1), [rows * width for rows in split])[self.rank()]
                for part, split in zip(parts, splits, strict=True)
            ]
            assert [piece.numel() for piece in pieces] == [rows * width for rows in received], "sizes do not fit"
            write(output, torch.cat(pieces).view(output.shape))

        return self._collective("all_to_all", input, result, output, note=list(sent), notes=splits)

    @capturable
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        (tensor,), root = tensors, opts.rootRank
        what = f"broadcast of {shape_of(tensor)} from rank {self._ranks[root]}"
        return self._collective(what, tensor, lambda parts: write(tensor, parts[root]), tensor)

    @capturable
    def barrier(self, opts: Any = None) -> Work:
        return self._collective("barrier", torch.zeros(0, device=device_name()), lambda parts: None)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _collective(
        self,
        what: str,
        given: Tensor,
        result: Callable[[list[Tensor]], None],
        *outputs: Tensor,
        note: Any = None,
        notes: list[Any] | None = None,
    ) -> Work:
        """note: goes with the values of this rank; notes: gets those of all."""
        self._check([given, *outputs])
        settle()
        key = f"collective {self._counts['collective']}"
        self._counts["collective"] += 1
        arrived: list[Tensor] = []
        for output in outputs:
            if output.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
                poison(output)

        def run(post: Post) -> None:
            post.put(f"{key}/{self.rank()}", (what, read(given), note))
            for rank in range(self.size()):
                other, values, theirs = post.take(f"{key}/{rank}")
                if other != what:
                    raise Hang(
                        f"{key} of group {self._name}: rank {self._ranks[self.rank()]} is in {what}, "
                        f"rank {self._ranks[rank]} in {other}"
                    )
                arrived.append(values)
                if notes is not None:
                    notes.append(theirs)
            # All have come to this one, so they have read what was left for the one before.
            for old in self._posted:
                post.drop(old)
            self._posted = [f"{key}/{self.rank()}"]

        return self._queue("collectives", self._ranks).add(
            Work(self, f"{what} over ranks {self._ranks}", run, lambda: result(arrived), [given, *outputs])
        )

    # -- pieces of it -----------------------------------------------------------------------------------------------

    def _queue(self, name: str, ranks: Sequence[int]) -> Queue:
        if name not in self._queues:
            self._connect(name, ranks)
            self._queues[name] = Queue(f"{name} of group {self._name}", Post(self))
        return self._queues[name]

    def _connect(self, name: str, ranks: Sequence[int]) -> None:
        """Makes a communicator: the host waits until all its ranks have come."""
        post, own = Post(self), self._ranks[self.rank()]
        post.put(f"connect {name}/{own}", None)
        for rank in ranks:
            if rank != own:
                post.take(f"connect {name}/{rank}")

    def _check(self, tensors: Sequence[Tensor]) -> None:
        self.of_process.check()
        if self.is_aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted")
        for tensor in tensors:
            if tensor.device.type != device_name():
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
            if tensor.dtype not in _DTYPES:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")


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


def _of_process(options: Any) -> OfProcess:
    """That of the default group, which is the first that a process makes."""
    if dist.is_initialized() and isinstance(dist.group.WORLD, Group):
        return dist.group.WORLD.of_process
    return OfProcess(options.store)


def _is_eager() -> bool:
    return bool(os.environ.get("PRETEND_NCCL_EAGER"))


def _operation_of(opts: Any) -> str:
    return "SUM" if opts is None else opts.reduceOp.op.name if hasattr(opts.reduceOp, "op") else opts.reduceOp.name


def _folded(parts: Sequence[Tensor], operation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = operation(total, part)
    return total


_DTYPES = {
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
}
_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "BOR": torch.bitwise_or,
}

_torch_batch = dist.batch_isend_irecv


def register() -> None:
    """Makes the backend known to torch, once in a process."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            BACKEND, lambda options, _: Group(options), extended_api=True, devices=["cpu", "pretend"]
        )
        dist.batch_isend_irecv = batch_isend_irecv


def register_device(is_eager: bool = False) -> None:
    """In ranks of `pretend_ranks`: engines take this group for their device. is_eager: as `join_on_cpu` has it."""
    os.environ["PRETEND_NCCL_EAGER"] = "1" if is_eager else ""
    register()


def join_on_cpu(is_eager: bool = False, timeout_seconds: float = 60.0) -> None:
    """Makes the default group, for tensors of the CPU. is_eager: as with a `device_id`: messages share a stream."""
    os.environ["PRETEND_NCCL_ON_CPU"] = "1"
    os.environ["PRETEND_NCCL_EAGER"] = "1" if is_eager else ""
    register()
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=timeout_seconds))
