"""Notice ranks that finish no step for too long; report the waits between ranks, and Python stacks."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...watch.progress import RankProgress
from ...watch.waiting import stalled, who_waits_for_whom
from ..wire.loop import Loop
from ..wire.messages import ProgressReport, StackDump, Stacks
from .peers import Peers

_LOOK_SECONDS = 1.0
_STACK_SECONDS = 5.0
_ENDED = "ended with exit status 0"  # shown as an activity


class StallWatch:
    """Looks at the agents' reports each second.

    limit_seconds: of a step; None: as in the ranks' config. report: called with a text for the user, once for each
    stall. ended: called after it, and may stop the job.
    """

    def __init__(
        self,
        loop: Loop,
        peers: Peers,
        hosts: Mapping[int, str],
        limit_seconds: float | None,
        report: Callable[[str], None],
        ended: Callable[[Sequence[int]], None],
    ) -> None:
        self._loop = loop
        self._peers = peers
        self._hosts = hosts
        self._limit_seconds = limit_seconds
        self._report = report
        self._ended = ended
        # None until a rank reports. `who_waits_for_whom` shows that it has not come to `import lowtide`.
        self._newest: dict[int, RankProgress | None] = dict.fromkeys(hosts)
        self._left: dict[int, tuple[float, RankProgress]] = {}  # rank -> when it ended, and its last report
        self._reported: set[int] = set()
        self._stacks: dict[int, str] = {}
        self._awaited: set[int] = set()
        self._is_closed = False
        self._look()

    def progress(self, message: ProgressReport) -> None:
        """Take an agent's report."""
        self._newest.update({report.rank: report for report in message.ranks})

    def stack(self, message: StackDump) -> None:
        """Take an agent's answer."""
        self._stacks[message.rank] = message.text
        self._awaited.discard(message.rank)

    def gone(self, rank: int, has_ended: bool) -> None:
        """Note that a rank's process is gone. has_ended: with exit status 0; ranks may still wait for it."""
        report = self._newest.pop(rank, None)
        if report is not None and has_ended:
            self._left[rank] = time.monotonic(), replace(report, activity=_ENDED, unit="", microbatch=None, wait=None)
        self._awaited.discard(rank)

    def close(self) -> None:
        """Stop looking."""
        self._is_closed = True

    def _look(self) -> None:
        if self._is_closed:
            return
        self._loop.after(_LOOK_SECONDS, self._look)
        late = stalled(self._newest, self._limit_seconds)
        # A stall is over when each rank that was late has moved on. Only then may the next stall be reported.
        self._reported &= set(late)
        if late and not self._reported and not self._awaited:
            self._reported = set(late)
            self._ask(late)

    def _ask(self, late: Sequence[int]) -> None:
        many = len(set(self._hosts.values())) > 1
        now = time.monotonic()
        ended = {rank: replace(report, activity_seconds=now - clock) for rank, (clock, report) in self._left.items()}
        text = who_waits_for_whom({**self._newest, **ended}, self._hosts if many else None)
        longest = max(report.step_seconds or 0 for report in self._newest.values() if report is not None)
        self._report(f"no step for {longest:.0f} s:\n{_indented(text)}")
        self._stacks = {}
        self._awaited = set(self._newest)
        for peer in self._peers.all:
            # Every rank, not only the late ranks: the rank that they wait for may itself not be late.
            peer.send(Stacks(tuple(sorted(peer.running))))
        self._wait(late, _STACK_SECONDS)

    def _wait(self, late: Sequence[int], seconds_left: float) -> None:
        if self._is_closed:
            return
        if self._awaited and seconds_left > 0:
            self._loop.after(0.1, lambda: self._wait(late, seconds_left - 0.1))
            return
        self._awaited = set()
        for rank, text in sorted(self._stacks.items()):
            host = f" on host {self._hosts[rank]}" if len(set(self._hosts.values())) > 1 else ""
            self._report(f"Python stacks of rank {rank}{host}:\n{_indented(text)}")
        # Last, since it may stop the job: the report and the stacks must be shown before.
        self._ended(late)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
