"""A machine of a job, and the local devices or places for processes that the job may use there."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """name: as ssh, the resource manager or the name service knows it.

    slots: local indexes, one rank each, (0, 1, 2, 3) for `slots=4`; None: as many as the host has accelerators, one
    where it has none.
    """

    name: str
    slots: tuple[int, ...] | None = None
