"""A rank's activities as spans on lanes, for a trace, and as seconds by phase.

Computation has a lane, and so has each kind of wait. Times are of the host: on an accelerator a phase ends
when all its work is queued, and only waits of the host are visible.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict

from .progress import Activity, Progress

COMPUTE, GATHER, REDUCE, OFFLOAD, WAIT = LANES = ("compute", "gather", "reduce", "offload", "wait")
_PHASES = {
    Activity.DATA_LOADING: "data",
    Activity.FORWARD: "forward",
    Activity.BACKWARD: "backward",
    Activity.PIPELINE: "pipeline",
    Activity.UPDATE: "update",
}


Span = tuple[str, str, int, int]
"""(lane, name, begin, end), the last two of time.perf_counter_ns()."""


def lane_of(what: str) -> str:
    """Choose the lane of a wait by its operation: "gather of layers.7", "reduction of head"."""
    kind = what.partition(" ")[0]
    # The names come from group.py and gradient_reducer.py in `zero`, and from `wait_for` in offload/store.py.
    return {"gather": GATHER, "reduction": REDUCE, "transfer": OFFLOAD}.get(kind, WAIT)


class Timeline:
    """Records the progress of this process until `stop`."""

    def __init__(self, progress: Progress, keeps_spans: bool = True) -> None:
        """keeps_spans: if False, record only seconds by phase."""
        self.spans: list[Span] = []
        self.collectives: Counter[str] = Counter()  # begun, by name
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._keeps = keeps_spans
        self._phase = (time.perf_counter_ns(), "", "")  # (begin, phase, unit)
        self._wait: tuple[int, str] | None = None
        progress.turn_on()
        self._stop = progress.listen(self._enter, self._begin, self.begin_wait, self.end_wait)

    def stop(self) -> None:
        """End the open span and stop recording."""
        self._stop()
        self.end_wait()
        self._enter(Activity.BETWEEN_STEPS, "")

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds by phase, and the seconds of waits in them, since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def _enter(self, activity: Activity, unit: str) -> None:
        now = time.perf_counter_ns()
        since, phase, of = self._phase
        if phase:
            self._seconds[phase] += (now - since) / 1e9
            if self._keeps:
                self.spans.append((COMPUTE, f"{phase} of {of}" if of else phase, since, now))
        # An activity outside of a step has no phase: its time is neither a span nor counted.
        self._phase = (now, _PHASES.get(activity, ""), unit)

    def _begin(self, what: str) -> None:
        self.collectives[what] += 1

    def begin_wait(self, what: str) -> None:
        """Record that the host waits from now on, for a collective or anything else."""
        self._wait = (time.perf_counter_ns(), what)

    def end_wait(self) -> None:
        if self._wait is None:
            return
        (since, what), self._wait = self._wait, None
        now = time.perf_counter_ns()
        self._seconds[WAIT] += (now - since) / 1e9
        if self._keeps:
            self.spans.append((lane_of(what), what, since, now))
