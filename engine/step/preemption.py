"""Checkpoints at the end of steps: every few steps, and when SIGTERM or Ctrl-C ends the training."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import ClassVar, Self
from weakref import WeakValueDictionary

from ...checkpoint.files import CheckpointError
from ...watch.log import logger
from .features import StepFeature, StepResult
from .parts import Parts

_REQUESTS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Notes SIGTERM and SIGINT while it is armed. A second signal has its usual effect.

    A process that ignores SIGINT, like background jobs of a shell, still ignores it.
    """

    def __init__(self) -> None:
        self.noted: int | None = None
        """The signal that has come."""
        self._before: dict[int, signal._HANDLER] = {}
        self._is_armed = False
        self._says_so = False
        self._is_leaving = False

    def arm(self, says_so: bool = False) -> None:
        """Take the signals. says_so: write a line to standard error when a signal comes: the step may take a while.

        Raises ValueError outside of the main thread: Python allows no signal handlers there.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "checkpoint.on_sigterm: expected lowtide.initialize in the main thread, which alone gets signals, "
                f"found '{threading.current_thread().name}'"
            )
        self._says_so = says_so
        earlier = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if isinstance(earlier, Preemption) and earlier._is_armed and says_so:
            logger.warning(
                "checkpoint.on_sigterm: another open engine of this process has it too; a signal saves the newest "
                "alone, so set it in the config of a single engine, and save the others with it"
            )
        for number in _REQUESTS:
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        self._is_armed = True

    def leave(self) -> None:
        """Prepare to leave after the signal reached some rank: the signal of this rank may still come.

        It is noted whenever it comes, and ignored while the interpreter ends; else a launcher would see a killed rank.
        """
        if self._is_armed:
            self._says_so, self._is_leaving = False, True
            atexit.register(self._ignore)

    def disarm(self) -> None:
        """Give the signals back to their earlier handlers, unless somebody has taken them since."""
        if self._is_armed and not self._is_leaving:
            self._is_armed = False
            # In another thread Python sets no handler: `_note` stays, and passes each signal on.
            is_main = threading.current_thread() is threading.main_thread()
            for number, before in self._before.items() if is_main else ():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_DFL if before is None else before)

    def _ignore(self) -> None:
        """Ignore the signals: at exit the interpreter removes its handlers, but keeps ignored signals."""
        if self._is_armed:
            for number in self._before:
                signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if self._is_armed:
            self.noted = number
            # `disarm` does nothing while the process leaves, but a second signal must reach the handler of before.
            self._is_leaving = False
            self.disarm()
            if self._says_so:  # not the logger, which may be in the middle of a line
                name = signal.Signals(number).name
                os.write(2, f"lowtide: {name}: this step ends, then it is saved; a second one acts at once\n".encode())
        elif callable(before):  # another handler has called us
            before(number, frame)
        # Python's name for the default action is no function. So the default is set, and the signal is sent again.
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class DueCheckpoints(StepFeature):
    """Saves the checkpoints of the `checkpoint` section at the end of a step. All ranks decide alike."""

    _by_folder: ClassVar[WeakValueDictionary[Path, DueCheckpoints]] = WeakValueDictionary()  # of open engines

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._folder = Path(parts.config.checkpoint.folder or "").resolve()
        saves_into_it = parts.config.checkpoint.folder is not None and parts.mesh.world.rank == 0
        if saves_into_it and self._by_folder.setdefault(self._folder, self) is not self:
            logger.warning(
                "checkpoint.folder: another open engine of this process saves into %s too, and the later checkpoint of "
                "a step replaces the earlier; give each engine a folder of its own",
                self._folder,
            )
        self._stop = Preemption()
        self._counts: Sequence[int] = ()
        if parts.config.checkpoint.on_sigterm:
            self._stop.arm(says_so=parts.mesh.world.rank == 0)

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        wanted = parts.config.checkpoint
        return cls(parts) if wanted.every_steps or wanted.on_sigterm or wanted.asynchronous else None

    def events(self) -> Sequence[bool]:
        """Return: a background save has failed; this rank must end; Ctrl-C ends it, so its launcher must stop too."""
        noted = self._stop.noted
        return self._parts.archive.checkpoints.has_failed, noted is not None, noted == signal.SIGINT

    def on_events(self, counts: Sequence[int]) -> None:
        self._counts = counts

    def after_step(self, step: int, result: StepResult) -> None:
        wanted = self._parts.config.checkpoint
        save_failed, is_preempted, is_interrupted = self._counts
        if save_failed:
            try:
                # A collective: the sum of the step has counted the failure, so all ranks come here.
                self._parts.archive.checkpoints.wait()  # raises the error of the background save
            except CheckpointError as error:
                if not is_preempted:
                    raise
                logger.error("%s", error)  # not raised: the last save is tried all the same
        is_due = wanted.every_steps and step % wanted.every_steps == 0
        if wanted.folder is not None and (is_due or is_preempted):
            save = self._parts.save()
            assert save is not None
            save(wanted.folder)
        if is_preempted:
            self._parts.archive.checkpoints.wait()  # the line below is true also with `async`
            self._stop.leave()
            name = "SIGINT" if is_interrupted else "SIGTERM"
            logger.info("%s: step %d is saved in %s, leaving", name, step, wanted.folder)
            # 0 after SIGTERM, since the training can continue from the checkpoint. 130 after Ctrl-C, as a shell
            # expects.
            raise SystemExit(128 + signal.SIGINT if is_interrupted else 0)

    def close(self) -> None:
        self._stop.disarm()
        if self._by_folder.get(self._folder) is self:
            del self._by_folder[self._folder]
