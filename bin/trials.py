"""One process of `lowtide tune`: a job of the project's own launcher, with a limit of time, whatever becomes of it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from ..engine.report.memory_report import reports_in
from ..engine.trial import VARIABLE, TrialRequest
from ..watch.stacks import end_with_parent

State = Literal["measured", "out of memory", "time limit", "failed"]
_LAUNCH = (sys.executable, "-c", "import sys; from lowtide.bin.main import main; sys.exit(main())", "launch")
_GRACE_SECONDS = 5.0  # of a rank that is asked to stop
_STOP_SECONDS = 20.0  # of the launcher, with all of its ranks
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|MemoryError|out of memory|not enough memory|an't allocate memory|annot allocate memory"
)
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_FRAME = re.compile(r"^(?:[│┌└─]+ ?|\[rank ?\d+\]:? ?)+")
_LAUNCHER = "lowtide launch: "


@dataclass(frozen=True)
class TrialOutcome:
    """What became of a trial. seconds: of all of it. words: its last ones, or why it was not measured.

    result: what the trial has written, of one that was not measured perhaps a part of it.
    """

    state: State
    seconds: float
    words: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, request: TrialRequest, limit: float) -> "TrialOutcome | None":
        """Of the same trial that was made before; None of one that was not, or whose end may be another one now."""
        try:
            if TrialRequest.read(folder / "request.json") != request:
                return None
            known = cls(**json.loads((folder / "outcome.json").read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):  # none, or what another version has written
            return None
        is_over = known.state != "failed" and (known.state != "time limit" or known.seconds >= limit)
        return known if is_over else None


def run(request: TrialRequest, folder: Path, words: Sequence[str], limit: float, key: str) -> TrialOutcome:
    """Runs `lowtide launch` with these words as a trial in `folder`, unless that was done. limit: in seconds.

    key: of the result, without which there is none. An interruption ends the job, and leaves the trial to be made. One
    that failed is made again, since the script may be another now, and one whose time ended, where there is more.
    """
    if (known := TrialOutcome.read(folder, request, limit)) is not None:
        return known
    folder.mkdir(parents=True, exist_ok=True)
    for left in (folder / "outcome.json", Path(request.result), *folder.glob("memory-rank*.json")):
        left.unlink(missing_ok=True)
    asked = folder / "request.json"
    request.write(asked)
    begun = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process: subprocess.Popen[bytes] | None = None
        try:
            with _interruptions_later():  # when it is known what is to be stopped
                process = subprocess.Popen(
                    [*_LAUNCH, "--grace", f"{_GRACE_SECONDS:g}", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, VARIABLE: str(asked.resolve())},
                    start_new_session=True,  # Ctrl-C is ours to pass on
                    preexec_fn=end_with_parent,
                )
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process is not None:
                _stop(process)
    outcome = _judged(request, folder, status, time.monotonic() - begun, limit, key)
    part = folder / "outcome.json.part"
    part.write_text(json.dumps(asdict(outcome), indent=2) + "\n", encoding="utf-8")
    part.replace(folder / "outcome.json")
    return outcome


@contextlib.contextmanager
def _interruptions_later() -> Iterator[None]:
    """What a signal that ends the command does, it does at the end of the context."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread alone
        return
    came: list[tuple[int, FrameType | None]] = []
    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda *args: came.append(args))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came[:1]:
            handlers[number](number, frame)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _judged(
    request: TrialRequest, folder: Path, status: int | None, seconds: float, limit: float, key: str
) -> TrialOutcome:
    text = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    result = _result_of(request)
    is_whole = (
        status == 0 or result.get("num_steps") == request.warmup + request.steps
    )  # else an error came after some timed steps
    if result.get(key) is not None and is_whole:
        return TrialOutcome("measured", seconds, result={**result, "peak_bytes": _peak_of(folder)})
    state, words = _unmeasured(request, result, text, status, limit)
    return TrialOutcome(state, seconds, words, result)


def _unmeasured(
    request: TrialRequest, result: Mapping[str, Any], text: str, status: int | None, limit: float
) -> tuple[State, str]:
    """How a trial ended that has no result, and its last words."""
    if status is None:
        return "time limit", f"no end after {limit:.0f} s; {_last_words(text) or 'it said nothing'}"
    if "failure" in result:
        return "failed", result["failure"]
    if _NO_MEMORY.search(text):
        lines = [line for line in text.splitlines() if _NO_MEMORY.search(line)]
        return "out of memory", _FRAME.sub("", lines[-1]).strip()
    if status in _KILLED:
        return "out of memory", "killed by SIGKILL, as the kernel does where memory ends"
    if status:
        return "failed", f"exit status {status}: {_last_words(text)}"
    if "num_steps" in result:
        words = f"ended after {result['num_steps']} steps; expected at least {request.warmup + 1}, of which "
        return "failed", f"{words}{request.warmup} are not timed: train for longer, or lower --warmup"
    return "failed", "the script ended without a call of lowtide.initialize that has an optimizer"


def _result_of(request: TrialRequest) -> dict[str, Any]:
    """What the trial has written; {} where it has not."""
    with contextlib.suppress(FileNotFoundError):
        return dict(json.loads(Path(request.result).read_text(encoding="utf-8")))
    return {}


def _peak_of(folder: Path) -> int | None:
    """Of the fullest rank, where a step was recorded."""
    with contextlib.suppress(ValueError, OSError):
        return max(one.peak_bytes or 0 for one in reports_in(folder))
    return None


def _last_words(text: str) -> str:
    """Of the script; of the launcher where it has said nothing."""
    lines = [_FRAME.sub("", line).strip() for line in text.splitlines()]
    said = [line for line in lines if line]
    return next((line for line in reversed(said) if not line.startswith(_LAUNCHER)), said[-1] if said else "")
