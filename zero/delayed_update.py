"""An update that runs while the next step computes, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class DelayedUpdate:
    """The update with the gradients of step t, made during step t + 1, which computes with the parameters before it.

        training   | forward, backward t | take over t-1 | forward, backward t+1 | take over t | forward, ...
        thread     |      update t-1     |               |       update t        |             |  update t+1

    | state   | from         | to          | what is where                                                |
    |---------|--------------|-------------|--------------------------------------------------------------|
    | none    | `end`        | `start`     | parameters are those of the last update                      |
    | pending | `start`      | `end`       | the thread alone may touch states and master weights, until  |
    |         |              |             | `wait`; what parameters become is beside them                |

    Source: ZeRO-Offload, arXiv 2101.06840, section 5.2, "one-step delayed parameter update".
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lowtide update")
        self._running: Future[None] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether an update was started whose result was not taken over."""
        return self._running is not None

    def start(self, update: Callable[[], None]) -> None:
        """Begins to run `update`, which nobody else may hinder until `wait` has returned."""
        assert self._running is None
        self._running = self._thread.submit(update)

    def wait(self) -> BaseException | None:
        """Returns when no update runs: the error that has ended it, if any."""
        return None if self._running is None else self._running.exception()

    def end(self) -> None:
        """The result was taken over, or does not matter any more."""
        self.wait()
        self._running = None

    def close(self) -> None:
        """Waits for what runs, and ends the thread."""
        self._thread.shutdown()
