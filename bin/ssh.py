"""`lowtide ssh`: one command on all hosts at once, through OpenSSH.

[Note: no command is left behind]
Without a terminal, sshd leaves a command running when its client goes. So each is run below a shell that reads the
connection's input, to which nothing is ever written: when that ends (Ctrl-C, --timeout, this process killed), the shell
ends its process group, which sshd has made for this session alone.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..launch.allocation.allocation import AllocationRequest, find_allocation
from ..launch.hosts.host import LaunchError
from ..launch.hosts.names import folded
from ..launch.transports.ssh import SshOptions
from .arguments import Parser

HELP = "run a command on all hosts at once"
_EPILOG = """examples:
  lowtide ssh --hosts 'node[1-4]' -- nvidia-smi -L
  lowtide ssh --hostfile hosts.txt --exclude node3 -- sh -c 'df -h /nvme | tail -1'
  lowtide ssh -- uptime                 in a SLURM or LSF job: on all its hosts

The words of the command arrive unchanged; for pipes and variables of the hosts write sh -c '...'. Lines that several
hosts have said alike are shown once. The exit status is 0, or that of the first host, in their order, that failed:
255 where ssh could not reach it, 124 after --timeout.
"""
Take = Callable[[bytes], None]
"""Is given one line, without its end."""

_UNREACHED, _TIMED_OUT, _INTERRUPTED = 255, 124, 130
_KILL_SECONDS = 2
# See [Note: no command is left behind]. The command has no input.
_GUARD = (
    'exec 3<&0; "$@" </dev/null 3<&- & command=$!; exec 2>/dev/null; '
    f"( trap '' TERM; cat <&3 >/dev/null 2>&1; kill -TERM 0; sleep {_KILL_SECONDS}; kill -KILL 0 ) >/dev/null 2>&1 & "
    "guard=$!; wait $command; status=$?; kill -KILL $guard; exit $status"
)


@dataclass
class Answer:
    """What a host has said, and how its command ended. status: as a shell gives it; None: not ended."""

    host: str
    out: list[bytes]
    err: list[bytes]
    status: int | None = None

    @property
    def reason(self) -> str:
        """The last line that it said, where it failed."""
        lines = [line for line in (*self.out, *self.err) if line.strip()]
        return lines[-1].decode(errors="replace").strip() if lines else "it said nothing"


def main(argv: Sequence[str]) -> int:
    """Runs the command; see _EPILOG for the status."""
    command_line = parser()
    options = command_line.parse_args(argv)
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        command_line.error("expected a command after --, found none; such as: lowtide ssh --hosts a,b -- uptime")
    request = AllocationRequest(
        hostfile=options.hostfile, hosts=options.hosts, include=options.include, exclude=options.exclude
    )
    try:
        allocation = find_allocation(request, os.environ)
    except LaunchError as error:
        command_line.error(str(error))
    hosts = [host.name for host in allocation.hosts]
    if allocation.transport == "local" and options.hosts is None and options.hostfile is None:
        command_line.error("expected hosts, found none; name them with --hosts or --hostfile")
    ssh = SshOptions(options.ssh_port, tuple(options.ssh_option))
    everywhere = Everywhere(ssh, words, options.timeout, options.stream)
    try:
        answers = everywhere.run(hosts, options.at_once)
    except FileNotFoundError:
        command_line.error("expected OpenSSH's client `ssh` in the path, found none; install it")
    if not options.stream:
        _show(answers)
    return _verdict(answers, everywhere.is_stopped)


class _Run:
    """One client of ssh, and the end of its input that stays open as long as the command may run."""

    def __init__(self, command: Sequence[str]) -> None:
        input_end, kept_end = os.pipe()
        self._kept_end: int | None = kept_end
        try:
            self._process = subprocess.Popen(
                command, stdin=input_end, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
            )
        except BaseException:
            os.close(kept_end)
            raise
        finally:
            os.close(input_end)
        self._lock = threading.Lock()
        self._timers: list[threading.Timer] = []
        self.is_late = False

    def finish(self, out: Take, err: Take, timeout_seconds: float | None) -> int:
        """Hands every line to `out` or `err`; the exit status as Popen has it. is_late: it was stopped for its time."""
        if timeout_seconds is not None:
            self._after(timeout_seconds, self._time_out)
        assert self._process.stdout is not None and self._process.stderr is not None
        with self._process:
            reader = threading.Thread(target=_pump, args=(self._process.stderr, err), daemon=True)
            reader.start()
            _pump(self._process.stdout, out)
            reader.join()
            status = self._process.wait()
        with self._lock:
            for timer in self._timers:
                timer.cancel()
        self._close_input()
        return status

    def stop(self) -> None:
        """Ends the command through its guard, and the client after it where the host does not answer."""
        self._close_input()
        self._after(2 * _KILL_SECONDS, self._process.kill)

    def _time_out(self) -> None:
        self.is_late = True
        self.stop()

    def _close_input(self) -> None:
        with self._lock:
            if self._kept_end is not None:
                os.close(self._kept_end)
                self._kept_end = None

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        with self._lock:
            self._timers.append(timer)
        timer.start()


class Everywhere:
    """Runs `words` on hosts. timeout_seconds: for each; None: no limit. is_streamed: lines are shown as they come."""

    def __init__(self, ssh: SshOptions, words: Sequence[str], timeout_seconds: float | None, is_streamed: bool) -> None:
        self._ssh = ssh
        self._remote = ["sh", "-c", _GUARD, "lowtide", *words]
        self._timeout_seconds = timeout_seconds
        self._is_streamed = is_streamed
        self._running: set[_Run] = set()
        self._lock = threading.Lock()
        self.is_stopped = False  # by Ctrl-C

    def run(self, hosts: Sequence[str], at_once: int) -> list[Answer]:
        """An answer for each host, in their order. Raises FileNotFoundError where there is no ssh."""
        with ThreadPoolExecutor(max_workers=min(at_once, len(hosts))) as pool:
            futures = [pool.submit(self._run_on, host) for host in hosts]
            try:
                self._wait(futures)
            except KeyboardInterrupt:
                self._stop()
            except BaseException:
                self._stop()
                raise
        return [future.result() for future in futures]

    @staticmethod
    def _wait(futures: Sequence["Future[Answer]"]) -> None:
        for future in as_completed(futures):
            future.result()

    def _stop(self) -> None:
        with self._lock:
            self.is_stopped = True
            running = list(self._running)
        for run in running:
            run.stop()

    def _run_on(self, host: str) -> Answer:
        answer = Answer(host, [], [])
        with self._lock:
            if self.is_stopped:
                return answer
            run = _Run(self._ssh.command(host, self._remote))
            self._running.add(run)
        out = self._taker(answer.out, sys.stdout.buffer, host)
        err = self._taker(answer.err, sys.stderr.buffer, host)
        status = run.finish(out, err, self._timeout_seconds)
        with self._lock:
            self._running.discard(run)
        if run.is_late:
            err(f"no end within {self._timeout_seconds:g} s".encode())
            answer.status = _TIMED_OUT
        elif not self.is_stopped:
            answer.status = 128 - status if status < 0 else status
        return answer

    def _taker(self, kept: list[bytes], shown: IO[bytes], host: str) -> Take:
        if not self._is_streamed:
            return kept.append

        def take(line: bytes) -> None:
            kept[:] = [line]  # the last one is all that the end may ask for
            with self._lock:
                _write(shown, host, [line])

        return take


def parser() -> Parser:
    """The command line of `lowtide ssh`."""
    result = Parser(
        prog="lowtide ssh",
        usage="lowtide ssh [options] -- COMMAND ...",
        description=HELP[0].upper() + HELP[1:] + ", in parallel, with its name before each line.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("--hosts", metavar="a,b", help="hosts, also as node[01-16]")
    add("--hostfile", type=Path, metavar="FILE", help="a line a host, as for `lowtide launch`")
    add("--include", metavar="a@b", help="of the hosts, only these")
    add("--exclude", metavar="c", help="of the hosts, all but these")
    add("--ssh-port", type=int, metavar="PORT", help="of ssh on the hosts")
    add(
        "--ssh-option",
        action="append",
        default=[],
        metavar="OPTION",
        help='for ssh, any number of times: Name=Value, or --ssh-option="-F FILE"',
    )
    add("--timeout", type=_seconds, metavar="SECONDS", help="end the command on a host after this time")
    add("--at-once", type=_positive, default=64, metavar="N", help="so many hosts at a time (default: %(default)s)")
    add("--stream", action="store_true", help="show lines as they come, each host's own; else when all have ended")
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run, word by word")
    return result


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f'expected a number of seconds above 0, found "{text}"')


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'expected a whole number of at least 1, found "{text}"')
    return int(text)


def _pump(source: IO[bytes], take: Take) -> None:
    for line in source:
        take(line.rstrip(b"\r\n"))


def _show(answers: Iterable[Answer]) -> None:
    """Every output once, with all hosts that have it, in the order of the first of them."""
    groups: dict[tuple[bytes, bytes], list[str]] = {}
    for answer in answers:
        groups.setdefault((b"\n".join(answer.out), b"\n".join(answer.err)), []).append(answer.host)
    for (out, err), hosts in groups.items():
        for text, shown in ((out, sys.stdout.buffer), (err, sys.stderr.buffer)):
            if text:
                _write(shown, folded(hosts), text.split(b"\n"))


def _write(shown: IO[bytes], prefix: str, lines: Iterable[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        shown.write(b"".join(f"[{prefix}] ".encode() + line + b"\n" for line in lines))
        shown.flush()


def _verdict(answers: Sequence[Answer], is_stopped: bool) -> int:
    """The exit status; says on stderr which hosts have failed, and why."""
    unended = [answer.host for answer in answers if answer.status is None]
    failed = [answer for answer in answers if answer.status]
    if failed:
        print(f"lowtide ssh: {len(failed)} of {len(answers)} hosts failed:", file=sys.stderr)
        width = max(len(answer.host) for answer in failed)
        for answer in failed:
            what = "no connection" if answer.status == _UNREACHED else f"exit status {answer.status}"
            print(f"  {answer.host:<{width}}  {what:<15}  {answer.reason}", file=sys.stderr)
    if is_stopped:
        print(f"lowtide ssh: stopped by Ctrl-C before the end on {folded(unended) or 'no host'}", file=sys.stderr)
        return _INTERRUPTED
    return next((answer.status for answer in failed if answer.status), 0)
