"""How an attempt has ended."""

from dataclasses import dataclass

from .obituary import Failure, first_of
from .stop_signals import StopSignals


@dataclass(frozen=True)
class JobOutcome:
    """status: for the shell. failure: the first, None where none was, or where a signal stopped the job.

    lost_hosts: whose agents were lost. was_started: whether ranks ran. ended: those that had ended with exit status 0
    before the failure.
    """

    status: int
    failure: Failure | None = None
    stopped_by: int | None = None
    lost_hosts: tuple[str, ...] = ()
    was_started: bool = False
    ended: tuple[int, ...] = ()


class Endings:
    """What has come to an end so far, in the order in which it was heard of."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []
        self._lost_hosts: list[str] = []
        self._ended: list[int] = []  # ranks, with exit status 0 before any failure

    @property
    def has_failure(self) -> bool:
        return bool(self._failures)

    def add_failure(self, failure: Failure) -> None:
        """One that ends the attempt."""
        self._failures.append(failure)

    def add_lost_host(self, name: str) -> None:
        """Its agent is lost, whether or not the attempt goes on without it."""
        self._lost_hosts.append(name)

    def add_done(self, rank: int) -> None:
        """It has ended with exit status 0."""
        if not self._failures:
            self._ended.append(rank)

    def outcome(self, stop: StopSignals, was_started: bool) -> JobOutcome:
        """What becomes of it, if nothing more is heard of."""
        failure = first_of(self._failures)
        lost = tuple(self._lost_hosts)
        # Where the clocks do not tell which came first, a rank has ended because it was told to.
        latest = float("inf") if failure is None else failure.clock + failure.uncertainty
        if stop.number is not None and latest > stop.time and (failure is not None or not was_started):
            return JobOutcome(128 + stop.number, None, stop.number, lost, was_started)
        status = 0 if failure is None else failure.exit_status
        return JobOutcome(status, failure, None, lost, was_started, tuple(self._ended))
