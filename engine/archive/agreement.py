"""Spread errors to all ranks: if a rank fails, no rank continues."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ...checkpoint.files import CheckpointError
from ...comm import CollectiveError, World
from ...offload import OffloadError


@contextmanager
def all_or_none(world: World, what: str, hint: str | Callable[[], str] = "") -> Iterator[None]:
    """Wrap a block that every rank enters. If a rank fails, every rank raises CheckpointError, with all causes."""
    found: Exception | None = None
    try:
        yield
    # Not BaseException: after Ctrl-C this rank must not wait in a collective for the other ranks.
    except Exception as error:
        found = error
    raise_together(world, found, what, hint)


def raise_together(world: World, error: BaseException | None, what: str, hint: str | Callable[[], str] = "") -> None:
    """Raise CheckpointError on every rank if any rank has an error. A collective; CollectiveError if a rank is lost."""
    own = None if error is None else _text(error)
    try:
        causes = _causes(world.gather_objects(own))
    except CollectiveError as lost:
        # The fault of this rank may be why the other rank has left, so the text has both.
        raise CollectiveError(f"{what}: {lost}" + (f" On this rank it failed: {own}." if own else "")) from lost
    if causes:
        advice = hint if isinstance(hint, str) else hint()
        raise CheckpointError(f"{what} failed on {causes}" + (f". {advice}" if advice else "")) from error


@contextmanager
def no_rank_alone(world: World, what: str) -> Iterator[None]:
    """Wrap a block without collectives that every rank enters. If a rank fails, no rank continues.

    A rank that fails raises its error. The other ranks raise OffloadError if all causes are OffloadErrors, else
    RuntimeError, with the texts of the failed ranks.
    """
    found: Exception | None = None
    try:
        yield
    except Exception as error:
        found = error
    reports = world.gather_objects(None if found is None else (_text(found), isinstance(found, OffloadError)))
    if found is not None:
        raise found
    failed = [report for report in reports if report is not None]
    if failed:
        # OffloadError tells the caller that there is too little room. If any rank has another cause, more room does not
        # help.
        kind = OffloadError if all(is_offload for _, is_offload in failed) else RuntimeError
        raise kind(f"{what} failed on {_causes([report and report[0] for report in reports])}")


def _causes(texts: Iterable[str | None]) -> str:
    """Join the texts of failed ranks. texts: of each rank; None: it has not failed."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{_ranks(members)}: {text}" for text, members in ranks.items())


def display_path(path: str | os.PathLike[str]) -> str:
    """Return a path for messages."""
    return os.fspath(path) or '""'


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    is_clear = isinstance(error, (OSError, ValueError, CheckpointError, OffloadError))
    return str(error) if is_clear else f"{type(error).__name__}: {error}"


def _ranks(members: list[int]) -> str:
    return f"rank {members[0]}" if len(members) == 1 else f"ranks {', '.join(map(str, members))}"
