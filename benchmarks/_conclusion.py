"""How a comparison ends: its failures on the screen, its numbers in a file, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console


class Named(Protocol):
    """A contender, as far as it matters here."""

    @property
    def name(self) -> str: ...


class Judged(Protocol):
    """The row of a contender; `failure` is why it has no numbers, or none that count."""

    failure: str | None

    @property
    def contender(self) -> Named: ...


def failures(rows: Iterable[Judged]) -> list[str]:
    """One line for each contender that failed."""
    return [f"{row.contender.name} FAILED: {row.failure}" for row in rows if row.failure]


def conclude(console: Console, rows: Iterable[Judged], numbers: dict[str, Any], path: Path | None) -> int:
    """Prints `failures`, writes the numbers to `path` as JSON; 1 where a contender failed, else 0."""
    lines = failures(rows)
    for line in lines:
        console.print(line, style="red", markup=False, highlight=False)
    if path:
        path.write_text(json.dumps(numbers, indent=1) + "\n")
    return 1 if lines else 0
