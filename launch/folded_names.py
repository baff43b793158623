"""Many host names in few words, as `host_names.expand` reads them: node1, node2, node3, login -> node[1-3],login."""

import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"(\D*(?:\d+\D+)*)(\d+)(\D*)")


def folded(names: Iterable[str]) -> str:
    """The names in their order, with neighbours that count up by one made into a range. A width of `01` is kept."""
    runs: list[tuple[str, str, list[str]]] = []  # what stands before and behind the last number, and the numbers
    for name in names:
        match = _NUMBERED.fullmatch(name)
        before, number, behind = match.groups() if match else (name, "", "")
        if runs and number and (before, behind) == runs[-1][:2] and number == _next(runs[-1][2][-1]):
            runs[-1][2].append(number)
        else:
            runs.append((before, behind, [number]))
    words: list[str] = []
    for before, behind, numbers in runs:
        span = numbers[0] if len(numbers) == 1 else f"[{numbers[0]}-{numbers[-1]}]"
        words.append(f"{before}{span}{behind}")
    return ",".join(words)


def _next(number: str) -> str:
    return str(int(number) + 1).zfill(len(number)) if number else ""
