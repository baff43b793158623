"""Run a trial of `lowtide tune`: a `lowtide launch` process with a time limit, whose end is always recorded."""

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
_GRACE_SECONDS = 5.0  # for a rank to stop
_STOP_SECONDS = 20.0  # for the launcher to stop with all ranks
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|MemoryError|out of memory|not enough memory|an't allocate memory|annot allocate memory"
)
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_FRAME = re.compile(r"^(?:[│┌└─]+ ?|\[rank ?\d+\]:? ?)+")
_LAUNCHER = "lowtide launch: "


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of a trial. seconds: total time. words: the last line of output, or why nothing was measured.

    result: the JSON that the trial wrote, possibly incomplete unless state is "measured".
    """

    state: State
    seconds: float
    words: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, request: TrialRequest, limit: float) -> "TrialOutcome | None":
        """Read the outcome of an earlier run of the same trial. Return None if it must run again.

        A failed trial runs again, since the script may have changed, and a timed-out trial does if `limit` is higher.
        """
        try:
            if TrialRequest.read(folder / "request.json") != request:
                return None
            known = cls(**json.loads((folder / "outcome.json").read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):  # no file, or a file of another version
            return None
        is_over = known.state != "failed" and (known.state != "time limit" or known.seconds >= limit)
        return known if is_over else None


def run(request: TrialRequest, folder: Path, words: Sequence[str], limit: float, key: str) -> TrialOutcome:
    """Run `lowtide launch` with these words as a trial in `folder`, or return the outcome of an earlier run.

    limit: seconds. key: the result counts as measured if it has this key. If interrupted, the job is stopped and no
    outcome is written, so that the trial runs again.
    """
    if (known := TrialOutcome.read(folder, request, limit)) is not None:
        return known
    folder.mkdir(parents=True, exist_ok=True)
    for left in (folder / "outcome.json", Path(request.result), *folder.glob("memory-rank*.json")):
        left.unlink(missing_ok=True)
    request_path = folder / "request.json"
    request.write(request_path)
    begun = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process: subprocess.Popen[bytes] | None = None
        try:
            with _delayed_interrupts():  # a signal before `process` is assigned would leave the job running
                process = subprocess.Popen(
                    [*_LAUNCH, "--grace", f"{_GRACE_SECONDS:g}", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, VARIABLE: str(request_path.resolve())},
                    start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the job
                    preexec_fn=end_with_parent,
                )
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process is not None:
                _stop(process)
    outcome = _outcome_of(request, folder, status, time.monotonic() - begun, limit, key)
    part = folder / "outcome.json.part"
    part.write_text(json.dumps(asdict(outcome), indent=2) + "\n", encoding="utf-8")
    # Whole or absent: an interrupted `tune` must not find half a file.
    part.replace(folder / "outcome.json")
    return outcome


@contextlib.contextmanager
def _delayed_interrupts() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM until the end of the context."""
    # A mask of this thread would not hold them back: one of torch's threads would take the signal, and Python runs the
    # handler in the main thread all the same.
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
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


def _outcome_of(
    request: TrialRequest, folder: Path, status: int | None, seconds: float, limit: float, key: str
) -> TrialOutcome:
    text = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    result = _result_of(request)
    # With an exit status, a partial result means that an error ended the timed steps.
    is_whole = status == 0 or result.get("num_steps") == request.warmup + request.steps
    if result.get(key) is not None and is_whole:
        return TrialOutcome("measured", seconds, result={**result, "peak_bytes": _peak_of(folder)})
    state, words = _unmeasured(request, result, text, status, limit)
    return TrialOutcome(state, seconds, words, result)


def _unmeasured(
    request: TrialRequest, result: Mapping[str, Any], text: str, status: int | None, limit: float
) -> tuple[State, str]:
    """Return how a trial without a result ended, and why."""
    if status is None:
        return "time limit", f"not done after {limit:.0f} s; {_last_words(text) or 'no output'}"
    if "failure" in result:
        return "failed", result["failure"]
    if _NO_MEMORY.search(text):
        lines = [line for line in text.splitlines() if _NO_MEMORY.search(line)]
        return "out of memory", _FRAME.sub("", lines[-1]).strip()
    # 137 is a shell's or the launcher's form of the same.
    if status in _KILLED:
        return "out of memory", "killed by SIGKILL, as the kernel does if memory runs out"
    if status:
        return "failed", f"exit status {status}: {_last_words(text)}"
    if "num_steps" in result:
        words = f"expected at least {request.warmup + 1} steps, found {result['num_steps']}"
        return "failed", f"{words}; the first {request.warmup} are not timed: train for longer, or lower --warmup"
    return "failed", "the script ended without a call of lowtide.initialize with an optimizer"


def _result_of(request: TrialRequest) -> dict[str, Any]:
    """Read the JSON that the trial wrote; {} if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return dict(json.loads(Path(request.result).read_text(encoding="utf-8")))
    return {}


def _peak_of(folder: Path) -> int | None:
    """Return the peak of the fullest rank, or None if no step was recorded."""
    with contextlib.suppress(ValueError, OSError):
        return max(report.peak_bytes or 0 for report in reports_in(folder))
    return None


def _last_words(text: str) -> str:
    """Return the script's last line of output, or the launcher's if the script printed nothing."""
    lines = [_FRAME.sub("", line).strip() for line in text.splitlines()]
    said = [line for line in lines if line]
    return next((line for line in reversed(said) if not line.startswith(_LAUNCHER)), said[-1] if said else "")
