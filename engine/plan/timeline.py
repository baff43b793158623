"""Computing and collectives of one rank, in time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["compute", "gather", "reduce"]


@dataclass(frozen=True)
class SimulatedSpan:
    """Something that ran, from start to end in seconds."""

    kind: Kind
    name: str
    start: float
    end: float


@dataclass
class SimulatedTimeline:
    """Two lines in order: computing, and one queue of collectives, as one communicator has it.

    A collective starts when the queue is free and the computing that was launched before it is done; the host takes no
    time. Exposed is the time in which the computing waits for a collective. overlaps: False where what computes is also
    what sends, so that all of a collective is waited for where it starts.
    """

    spans: list[SimulatedSpan] = field(default_factory=list)
    exposed: dict[str, float] = field(default_factory=dict)  # seconds by "kind, phase"
    now: float = 0.0  # of the computing
    _free: float = 0.0  # of the queue
    phase: str = "forward"
    overlaps: bool = True

    def compute(self, name: str, seconds: float) -> None:
        self.spans.append(SimulatedSpan("compute", name, self.now, self.now + seconds))
        self.now += seconds

    def start(self, kind: Kind, name: str, seconds: float) -> SimulatedSpan:
        """Queues a collective."""
        begin = max(self._free, self.now)
        self._free = begin + seconds
        span = SimulatedSpan(kind, name, begin, self._free)
        self.spans.append(span)
        if not self.overlaps:
            self.wait(span)
        return span

    def wait(self, span: SimulatedSpan) -> None:
        """What is computed from now on comes after it."""
        key = f"{span.kind}, {self.phase}"
        self.exposed[key] = self.exposed.get(key, 0.0) + max(0.0, span.end - self.now)
        self.now = max(self.now, span.end)

    @property
    def computed(self) -> float:
        """Seconds of computing."""
        return self.now - self.exposed_seconds

    @property
    def exposed_seconds(self) -> float:
        return sum(self.exposed.values())

    @property
    def hidden_seconds(self) -> float:
        """Of collectives, beside what computes."""
        sent = sum(span.end - span.start for span in self.spans if span.kind != "compute")
        return max(0.0, sent - self.exposed_seconds)

    @property
    def exposed_share(self) -> float:
        return self.exposed_seconds / self.now
