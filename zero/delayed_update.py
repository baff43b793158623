"""An update that runs while the next step computes, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor


class DelayedUpdate:
    """The update with the gradients of step t, made during step t + 1, which computes with the parameters before it.

        training   | forward, backward t | take over t-1 | forward, backward t+1 | take over t | forward, ...
        thread     |      update t-1     |               |       update t        |             |  update t+1

    | state   | from         | to          | what is where                                                |
    |---------|--------------|-------------|--------------------------------------------------------------|
    | none    | `end`        | `start`     | parameters are those of the last update                      |
    | pending | `start`      | `end`       | the thread alone may touch states and master weights, until  |
    |         |              |             | `wait`; what parameters become is beside them                |

    On a device the thread has a stream of its own, which begins with what the training's stream was given until
    `start`; what that is given after `wait` comes after the update.

    Source: ZeRO-Offload, arXiv 2101.06840, section 5.2, "one-step delayed parameter update".
    """

    def __init__(self, device: torch.device) -> None:
        """device: of the model."""
        self._device = device
        self._thread = ThreadPoolExecutor(1, "lowtide update", partial(_use, device))
        self._stream: torch.Stream | None = None  # made with the first update
        self._running: Future[torch.Event | None] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether an update was started whose result was not taken over."""
        return self._running is not None

    def start(self, update: Callable[[], None], uses: Iterable[Tensor] = ()) -> None:
        """Begins to run `update`, which nobody else may hinder until `wait` has returned.

        uses: tensors that it lets go of.
        """
        assert self._running is None
        begun = None
        if self._device.type != "cpu":
            self._stream = self._stream or torch.Stream(self._device)
            begun = torch.accelerator.current_stream(self._device).record_event()
            for tensor in uses:
                if tensor.device == self._device:
                    tensor.record_stream(self._stream)
        self._running = self._thread.submit(self._run, update, begun)

    def wait(self) -> BaseException | None:
        """Returns when no update runs: the error that has ended it, if any."""
        if self._running is None:
            return None
        error = self._running.exception()
        if error is None:
            ended = self._running.result()
            if ended is not None:
                torch.accelerator.current_stream(self._device).wait_event(ended)
        return error

    def _run(self, update: Callable[[], None], begun: torch.Event | None) -> torch.Event | None:
        if begun is None or self._stream is None:
            update()
            return None
        begun.synchronize()  # this thread may write to host memory that the device was still to read
        with self._stream:
            update()
            return self._stream.record_event()

    def end(self) -> None:
        """The result was taken over, or does not matter any more."""
        self.wait()
        self._running = None

    def close(self) -> None:
        """Waits for what runs, and ends the thread."""
        self._thread.shutdown()


def _use(device: torch.device) -> None:
    """A thread begins with device 0 as the current one."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
