"""What a rank did and when, from what it says of itself: spans of lanes, for a trace and for seconds by phase.

A lane for what is computed, one for each kind of wait. Times are the host's: on an accelerator a phase ends when all of
it is given to the device, and only a wait of the host is seen as one.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass

from .progress import Activity, Progress

COMPUTE, GATHER, REDUCE, OFFLOAD, WAIT = LANES = ("compute", "gather", "reduce", "offload", "wait")
_PHASES = {
    Activity.DATA_LOADING: "data",
    Activity.FORWARD: "forward",
    Activity.BACKWARD: "backward",
    Activity.PIPELINE: "pipeline",
    Activity.UPDATE: "update",
}


@dataclass(frozen=True)
class Span:
    """begin, end: of time.perf_counter_ns()."""

    lane: str
    name: str
    begin: int
    end: int


def lane_of(what: str) -> str:
    """Of a wait, by what it is for: "gather of layers.7", "reduction of head"."""
    kind = what.partition(" ")[0]
    return {"gather": GATHER, "reduction": REDUCE, "transfer": OFFLOAD}.get(kind, WAIT)


class Timeline:
    """Listens to the progress of this process until it is stopped."""

    def __init__(self, progress: Progress, keeps_spans: bool = True) -> None:
        """keeps_spans: False: only seconds by phase."""
        self.spans: list[Span] = []
        self.collectives: Counter[str] = Counter()  # begun, by what they are for
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._keeps = keeps_spans
        self._phase = (time.perf_counter_ns(), "", "")  # since when, which, of which unit
        self._wait: tuple[int, str] | None = None
        progress.turn_on()
        self._stop = progress.listen(self._enter, self._begin, self.begin_wait, self.end_wait)

    def stop(self) -> None:
        """What is under way ends now."""
        self._stop()
        self.end_wait()
        self._enter(Activity.BETWEEN_STEPS, "")

    def take_seconds(self) -> dict[str, float]:
        """Seconds by phase, and of them those waited for others, since this was asked last."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def _enter(self, activity: Activity, unit: str) -> None:
        now = time.perf_counter_ns()
        since, phase, of = self._phase
        if phase:
            self._seconds[phase] += (now - since) / 1e9
            if self._keeps:
                self.spans.append(Span(COMPUTE, f"{phase} of {of}" if of else phase, since, now))
        self._phase = (now, _PHASES.get(activity, ""), unit)

    def _begin(self, what: str) -> None:
        self.collectives[what] += 1

    def begin_wait(self, what: str) -> None:
        """The host waits from now on; also for what is no collective."""
        self._wait = (time.perf_counter_ns(), what)

    def end_wait(self) -> None:
        if self._wait is None:
            return
        (since, what), self._wait = self._wait, None
        now = time.perf_counter_ns()
        self._seconds[WAIT] += (now - since) / 1e9
        if self._keeps:
            self.spans.append(Span(lane_of(what), what, since, now))
