"""What a pretend group does, one operation after the other: posts, operations, queues and messages.

Ranks that wait for each other for ever are found by the pool, whose timeout says where each of them is.
"""

# torch calls these methods by position; its stubs have overloads for other callers.
# mypy: disable-error-code="override"

import os
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from .values import device_name, read, shape_of, write

HOST_WAITS: list[str] = []
"""The stacks of waits that block the host, since the list was cleared."""

_CHUNK = 4 << 20  # bytes of a value in the store
_LOOK = timedelta(seconds=0.2)  # a wait is looked at so often


class ProcessEnded(BaseException):
    """NCCL's watchdog would have ended the process."""


class Aborted(Exception):
    """The communicator was."""


class Hang(BaseException):
    """Ranks are in different collectives, and would wait for ever."""


class OfProcess:
    """What all groups of a process have in common. found: an error that could not be raised where it was found."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.found: BaseException | None = None

    def check(self) -> None:
        if self.found is not None:
            raise self.found


class Communicator(Protocol):
    """What operations ask of their group."""

    of_process: OfProcess
    prefix: str
    timeout: timedelta
    is_aborted: threading.Event


class Post:
    """Values that ranks leave for each other, through a connection of its own."""

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self._store: Any = dist.PrefixStore(group.prefix, group.of_process.store.clone())
        self._store.set_timeout(_LOOK)
        self._num_chunks: dict[str, int] = {}

    def put(self, key: str, value: Any) -> None:
        data = pickle.dumps(value)
        chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
        self._num_chunks[key] = len(chunks)
        for index, chunk in enumerate(chunks[1:], 1):
            self._store.set(f"{key}/{index}", chunk)
        self._store.set(key, bytes([len(chunks)]) + chunks[0])

    def take(self, key: str) -> Any:
        """Waits for a value."""
        data = self._get(key)
        self._num_chunks[key] = data[0]
        rest = [self._get(f"{key}/{index}") for index in range(1, data[0])]
        return pickle.loads(b"".join([data[1:], *rest]))

    def drop(self, key: str) -> None:
        """Of what was put or taken here."""
        for index in range(1, self._num_chunks.pop(key)):
            self._store.delete_key(f"{key}/{index}")
        self._store.delete_key(key)

    def _get(self, key: str) -> bytes:
        while True:
            try:
                return bytes(self._store.get(key))
            except dist.DistStoreError:
                if self._group.is_aborted.is_set():
                    raise Aborted from None


class Work(dist.Work):
    """A started operation. Its results are in the tensors from `wait` on, or once `is_completed` has said so."""

    def __init__(
        self,
        group: Communicator,
        what: str,
        run: Callable[[Post], None],
        results: Callable[[], None],
        tensors: Sequence[Tensor],
    ) -> None:
        """tensors: held until the results are there, and not until the queue's thread lets go of them, at any time."""
        super().__init__()
        self._tensors: Sequence[Tensor] = tensors
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
        self._group.of_process.check()
        if timeout:
            HOST_WAITS.append("".join(traceback.format_stack(limit=12)))
        if timeout or device_name() == "cpu":
            return self._wait(timeout)
        from tests.pretend import device

        device.issue(self._wait_on_stream)  # whoever needs what the stream has comes to wait for it
        return True

    def _wait_on_stream(self) -> None:
        try:
            self._wait(None)
        except (
            BaseException
        ) as error:  # it has no way through the stream: what comes next may fail before it is asked for
            traceback.print_exc()
            self._group.of_process.found = error

    def _wait(self, timeout: timedelta | None) -> bool:
        while not self._is_done.wait(0.02):
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
        if self._error is not None and not isinstance(self._error, Aborted):
            raise ProcessEnded(f"{self.what}: {self._error}") from self._error
        with self._lock:  # until they are there: another thread that asks has not done before
            results, self._results = self._results, None
            if results is not None:
                results()
        self._tensors = ()
        return True

    def _check_time(self, timeout: timedelta | None) -> None:
        waited = time.monotonic() - self._started
        if timeout and waited > timeout.total_seconds():
            raise dist.DistBackendError(f"Watchdog caught collective operation timeout: {self.what}")
        is_watched = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0"
        if is_watched and waited > self._group.timeout.total_seconds():
            raise ProcessEnded(f"{self.what}: watchdog, after {waited:.1f} s")


class RecordedWork(dist.Work):
    """An operation in a graph, and the waits for it: each replay starts and awaits it."""

    def __init__(self, start: Callable[[], dist.Work]) -> None:
        super().__init__()
        from tests.pretend import torch_pretend

        self._record = torch_pretend.record
        self._work: dist.Work | None = None
        self._record(lambda: setattr(self, "_work", start()))

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:
            raise RuntimeError("operation not permitted while a graph is captured: the host waits for a collective")
        self._record(self._wait)
        return True

    def _wait(self) -> None:
        assert self._work is not None
        self._work.wait()

    def is_completed(self) -> bool:
        raise RuntimeError("operation not permitted while a graph is captured: a collective is asked for")

    def synchronize(self) -> None:
        self.wait()


class Queue:
    """Does one operation after the other, as a stream of a communicator."""

    def __init__(self, name: str, post: Post) -> None:
        self._post = post
        self._waiting: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
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
            work.run(self._post)


class Message:
    """One end of a message. Both have come before any data moves."""

    def __init__(self, key: str, what: str, tensor: Tensor, is_send: bool) -> None:
        self.what = what
        self.is_send = is_send
        self._key = key
        self.tensor = tensor
        self._arrived: Tensor | None = None

    def announce(self, post: Post) -> None:
        if not self.is_send:
            post.put(f"{self._key}/ready", shape_of(self.tensor))

    def give(self, post: Post) -> None:
        if self.is_send:
            wanted = post.take(f"{self._key}/ready")
            if wanted != shape_of(self.tensor):
                raise RuntimeError(f"{self.what} sends {shape_of(self.tensor)}, the other rank receives {wanted}")
            post.put(f"{self._key}/data", read(self.tensor))

    def take(self, post: Post) -> None:
        if not self.is_send:
            self._arrived = post.take(f"{self._key}/data")
            post.drop(f"{self._key}/data")
            post.drop(f"{self._key}/ready")

    def result(self) -> None:
        if self._arrived is not None:
            write(self.tensor, self._arrived)
