"""The agent of a host: the only parent of its ranks. It starts, watches and ends them for the launcher.

    python -P -m lowtide.launch.agent.agent (--stdio | --connect HOST:PORT,...) [--index I]

The launcher forks the agent of its host: see `serve`.

[Note: backpressure]
The agent sends only WINDOW_BYTES of output beyond what the launcher has shown. So a slow terminal makes the agent stop
reading the ranks' pipes, and a rank that prints more waits: memory stays bounded, and no line is lost. Beats and the
remaining messages are not delayed. A rank's last output is sent in any case, so that its end can be reported.
"""

import argparse
import contextlib
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ...watch import stacks
from ..hosts.facts import run_checks
from ..hosts.host import LaunchError
from ..hosts.reach import HeldPort, own_addresses, reachable
from ..hosts.report import report_host
from ..wire.channel import MAGIC, Channel
from ..wire.handshake import Seal, connected
from ..wire.loop import Loop
from ..wire.messages import (
    Check,
    Checked,
    Held,
    Hello,
    Hold,
    Leave,
    Message,
    Note,
    Output,
    ProgressReport,
    Reach,
    Reached,
    Shown,
    Signal,
    StackDump,
    Stacks,
    Start,
    Started,
    Welcome,
)
from .host_ranks import HostRanks
from .process_tree import KILLED_SECONDS, guarded, kill_descendants, reap_all

# The launcher acknowledges every _SHOWN_BYTES (display.py). This must be larger, or the agent would wait for ever.
WINDOW_BYTES = 1 << 18
SILENCE_SECONDS = 4.0  # until a peer is lost; its processes then have a second, to be gone within five
TOKEN_VARIABLE = "LOWTIDE_TOKEN"
_PROGRESS_SECONDS = 1.0
_FLUSH_SECONDS = 5.0


class Agent:
    """Serves a launcher from its Welcome to its Leave, or until it is lost. Then nothing of the job is left here."""

    def __init__(
        self,
        loop: Loop,
        read_fd: int,
        write_fd: int,
        silence_seconds: float | None,
        seal: Seal | None = None,
        index: int | None = None,
        names: tuple[str, ...] = (),
    ) -> None:
        self._loop = loop
        self._index = index
        self._names = names
        self._ranks: HostRanks | None = None
        self._held: HeldPort | None = None
        self._may_send = WINDOW_BYTES
        self._status: int | None = None
        self._channel = Channel(
            loop, read_fd, write_fd, self._take, self._lose, silence_seconds, sends_beats=False, seal=seal
        )
        for number in (signal.SIGINT, signal.SIGHUP):  # the terminal sends them to the launcher too
            loop.on_signal(number, lambda: None)
        loop.on_signal(signal.SIGTERM, lambda: self._channel.send(Signal(signal.SIGTERM)))

    def run(self) -> int:
        """Serve, and return the exit status: that of the job, or 1 if the launcher was lost."""
        self._loop.run(lambda: self._status is not None)
        if self._channel.is_open:
            # The launcher still reads: it waits for the end of this channel before it closes its side.
            self._loop.run(lambda: self._channel.is_flushed or not self._channel.is_open, timeout=_FLUSH_SECONDS)
            self._channel.close()
        return self._status or 0

    def lose_guard(self) -> None:
        """End the job here: without its guard, nothing would end it if this process were killed."""
        self._channel.send(Note("the guard of the agent was killed, so the agent ends"))
        self._end(1)

    def _printed(self, rank: int, shown: bytes) -> None:
        """Send a rank's output, and stop reading if the launcher is behind."""
        if not shown:
            return
        self._channel.send(Output(rank, shown.decode("latin-1")))
        self._may_send -= len(shown)
        # It is None while HostRanks is made: if the start fails, its `close` passes on output of started ranks.
        if self._ranks is not None:
            self._ranks.pause(self._may_send <= 0)

    def _note(self, text: str) -> None:
        """Send a line for the user."""
        self._channel.send(Note(text))

    def _lose(self, reason: str) -> None:
        self._end(1)

    def _end(self, status: int) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        if self._held is not None:
            self._held.release()
        # The launcher takes the end of the channel as the end of the job on this host, so all must be gone before.
        kill_descendants()
        reap_all(KILLED_SECONDS)
        self._status = status

    def _take(self, message: Message) -> None:
        match message:
            case Welcome():
                # `nvidia-smi` may take longer than the launcher bears silence.
                self._in_thread(lambda: self._hello(message), lambda hello: hello)
            case Hold():
                self._hold(message)
            case Reach(addresses, port):
                self._in_thread(lambda: reachable(addresses, port), Reached)
            case Check(request):
                self._in_thread(lambda: run_checks(request), lambda results: Checked(tuple(results)))
            case Start():
                self._start(message)
            case Signal(signal.SIGKILL):
                kill_descendants()
            case Signal(number):
                if self._ranks is not None:
                    self._ranks.send_signal(number)
            case Stacks(ranks):
                self._dump_stacks(ranks)
            case Shown(nbytes):
                self._may_send += nbytes
                if self._ranks is not None:
                    self._ranks.pause(self._may_send <= 0)
            case Leave(status):
                self._end(status)

    def _hello(self, welcome: Welcome) -> Hello:
        return Hello(
            index=self._index,
            names=self._names,
            pid=os.getpid(),
            addresses=own_addresses(os.environ) if welcome.wants_addresses else (),
            report=report_host(),
        )

    def _hold(self, message: Hold) -> None:
        try:
            if self._held is not None:
                self._held.release()
            self._held = HeldPort(message.port, message.is_local)
        except LaunchError as error:
            self._channel.send(Held(0, str(error)))
        else:
            self._channel.send(Held(self._held.port))

    def _in_thread(self, work: Callable[[], Any], answer: Callable[[Any], Message]) -> None:
        """Run slow work in a thread. It ends before Start comes: the launcher waits for the answer."""

        def call() -> None:
            try:
                message = answer(work())
            except Exception as error:
                self._loop.post(partial(_fail, error))  # the launcher would wait for ever
            else:
                self._loop.post(lambda: self._channel.send(message))

        threading.Thread(target=call, daemon=True).start()

    def _start(self, message: Start) -> None:
        if self._held is not None:
            # Rank 0 binds this port at once. The release also ends the port's thread before the ranks are forked.
            self._held.release()
            self._held = None
        try:
            self._ranks = HostRanks(self._loop, message, self._printed, self._channel.send, self._note)
        except LaunchError as error:
            self._channel.send(Started((), str(error)))
            return
        self._channel.send(Started(self._ranks.pids))
        self._loop.after(_PROGRESS_SECONDS, self._report_progress)

    def _report_progress(self) -> None:
        if self._ranks is None or not self._ranks.are_running:
            return
        if progress := self._ranks.progress():
            self._channel.send(ProgressReport(progress))
        self._loop.after(_PROGRESS_SECONDS, self._report_progress)

    def _dump_stacks(self, ranks: tuple[int, ...]) -> None:
        if self._ranks is None:
            return
        # Reading the stacks takes up to two seconds. In this thread that would delay beats and the ranks' output.
        paths = self._ranks.stack_paths(ranks)

        def call() -> None:
            try:
                found = stacks.collect_stacks(paths)
            except OSError:  # the ranks have ended, and their records are gone
                return
            for rank, text in found.items():
                self._loop.post(lambda rank=rank, text=text: self._channel.send(StackDump(rank, text)))  # type: ignore[misc]

        threading.Thread(target=call, daemon=True).start()


def main(argv: list[str] | None = None) -> int:
    """Run the command line above, and return the exit status of `serve`."""
    parser = argparse.ArgumentParser(prog="lowtide agent", allow_abbrev=False)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--stdio", action="store_true", help="use stdin and stdout, after a line that marks the beginning")
    way.add_argument("--connect", metavar="HOST:PORT", help="where the launcher listens")
    parser.add_argument("--index", type=int, help="index of this host in the job")
    parser.add_argument("--silence", type=float, default=SILENCE_SECONDS, help="seconds after which the peer is lost")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to try to connect")
    options = parser.parse_args(argv)
    if options.stdio:
        return serve(_take_stdin(), _take_stdout(), options.silence, options.index)
    try:
        fd, seal = connected(options.connect, os.environ.get(TOKEN_VARIABLE, ""), options.wait, _say)
    except LaunchError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:  # a user need not wait for the launcher
        return 128 + signal.SIGINT
    # A selector registers a descriptor once. So the channel needs a second number for the direction to the launcher.
    return serve(fd, os.dup(fd), options.silence, options.index, seal)


def serve(
    read_fd: int,
    write_fd: int,
    silence_seconds: float | None,
    index: int | None = None,
    seal: Seal | None = None,
) -> int:
    """Be the agent until the job has ended, and return the exit status of `Agent.run`. Call it in the main thread.

    read_fd, write_fd: of the channel to the launcher. silence_seconds: None on the launcher's host: the end of the
    channel is enough there, and Ctrl-Z may stop both. seal: None if nobody else can write to the channel.
    """
    os.environ.pop(TOKEN_VARIABLE, None)  # ranks inherit this environment, and their scripts may print it

    def work(guard_alive: int, signs_of_life: int) -> int:
        loop = Loop()
        agent = Agent(loop, read_fd, write_fd, silence_seconds, seal, index, _names())
        loop.on_readable(guard_alive, lambda: _lose_guard(loop, guard_alive, agent))
        _give_signs(loop, signs_of_life)
        return agent.run()

    return guarded(work, (read_fd, write_fd), silence_seconds)


def _lose_guard(loop: Loop, fd: int, agent: Agent) -> None:
    loop.forget(fd)
    agent.lose_guard()


def _fail(error: Exception) -> None:
    raise error


def _give_signs(loop: Loop, fd: int) -> None:
    with contextlib.suppress(OSError):  # the guard is gone, which its pipe tells
        os.write(fd, b".")
    loop.after(1.0, lambda: _give_signs(loop, fd))


def _take_stdin() -> int:
    """Return the channel's read end, and replace stdin by an empty file."""
    taken = os.dup(0)
    # A rank that reads stdin would otherwise take messages of the launcher.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return taken


def _take_stdout() -> int:
    """Return the channel's write end, after the mark of its beginning, and send prints to stderr instead."""
    taken = os.dup(1)
    # A print of a library would otherwise come between two messages and break the channel.
    os.dup2(2, 1)
    # The first newline ends a line that a remote shell may have left open.
    os.write(taken, b"\n" + MAGIC + b"\n")
    return taken


def _say(text: str) -> None:
    print(f"lowtide launch: {text}", file=sys.stderr, flush=True)


def _names() -> tuple[str, ...]:
    """Return the names that a launcher may use for this host."""
    # The manager's names come first: a node's name in SLURM need not be its host name (NodeHostname in slurm.conf).
    told = [os.environ.get(name) for name in ("SLURMD_NODENAME", "LSB_HOSTNAME")]
    found = [*told, platform.node(), socket.gethostname(), platform.node().split(".")[0]]
    return tuple(dict.fromkeys(name for name in found if name))


if __name__ == "__main__":
    sys.exit(main())
