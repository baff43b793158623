"""Faults of a config: what is wrong, where, and what to write instead."""

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal[
    "file",  # the file is missing or cannot be read
    "syntax",  # the text is not one JSON object
    "duplicate",  # a key stands twice in one object
    "unknown",  # no such key
    "type",  # the value has the wrong type
    "value",  # the type is right, the value is not allowed
    "missing",  # a value that must be given is not there
    "conflict",  # two settings contradict each other
    "unsupported",  # the key is understood, this engine does not do it
]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: its JSON path ("" for the whole config), its kind, and one or two sentences."""

    path: str
    kind: FaultKind
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """A config that cannot be used. It lists every fault at once, in the order of their paths in the file.

    `faults` holds them as data; `source` is the file name, or None if the config was a dictionary.
    """

    def __init__(self, faults: Iterable[Fault], source: str | None = None) -> None:
        self.faults = tuple(faults)
        self.source = source
        count = len(self.faults)
        where = f" in {source}" if source is not None else ""
        lines = [f"{count} fault{'s' if count != 1 else ''}{where}:"]
        lines += [f"  {fault}" for fault in self.faults]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Fault, ...], str | None]]:
        return ConfigError, (self.faults, self.source)


def shown(value: object) -> str:
    """The value as JSON, cut at 80 characters; 5e8 as 500000000. For use in messages."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1000:
        value = int(value)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean "stage"?` for the nearest of the known words, or an empty string."""
    by_lower = {name.lower(): name for name in sorted(known)}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f'; did you mean "{by_lower[near[0]]}"?' if near else ""


def unknown_key(path: str, key: str, known: Sequence[str]) -> Fault:
    """The fault of a key that does not exist at `path`. Without a near match it lists the keys that do, if few."""
    listed = f"the keys here are {', '.join(sorted(known))}" if len(known) <= 20 else "docs/config.md lists the keys"
    hint = did_you_mean(key, known) or f"; {listed}"
    return Fault(path, "unknown", f'unknown key "{key}"{hint}')
