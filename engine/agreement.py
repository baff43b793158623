"""Errors that all ranks hear of: what one rank cannot do, none goes on from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..checkpoint.errors import CheckpointError
from ..comm import CollectiveError, World


@contextmanager
def all_or_none(world: World, what: str, hint: str = "") -> Iterator[None]:
    """A block that every rank enters. Where it fails on any, every rank raises CheckpointError, with all causes."""
    found: Exception | None = None
    try:
        yield
    except Exception as error:
        found = error
    raise_together(world, found, what, hint)


def raise_together(world: World, error: BaseException | None, what: str, hint: str = "") -> None:
    """Raises CheckpointError on every rank where any has an error. A collective; CollectiveError where one is lost."""
    own = None if error is None else _text(error)
    try:
        texts = world.gather_objects(own)
    except RuntimeError as lost:  # the backend speaks of sockets
        here = f" On this rank it failed: {own}." if own is not None else ""
        raise CollectiveError(
            f"{what}: rank {world.rank} asked the others whether they could, and one is gone: it died, or left "
            f"({lost}).{here}"
        ) from lost
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks.setdefault(text, []).append(rank)
    if not ranks:
        return
    lines = "; ".join(f"{_ranks(members)}: {text}" for text, members in ranks.items())
    raise CheckpointError(f"{what} failed on {lines}" + (f". {hint}" if hint else "")) from error


def shown(path: str | os.PathLike[str]) -> str:
    """A path as messages have it; the caller's own, before anything is known of it."""
    return os.fspath(path) or '""'


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    is_clear = isinstance(error, (OSError, ValueError, CheckpointError))
    return str(error) if is_clear else f"{type(error).__name__}: {error}"


def _ranks(members: list[int]) -> str:
    return f"rank {members[0]}" if len(members) == 1 else f"ranks {', '.join(map(str, members))}"
