"""Faults and notes of a config: what is wrong or has no effect, where, and what to write instead.

[Note: sections] Each section is a class that has its fields, its `faults` (what it lacks or contradicts) and its
`notes` (settings that are not the default and have no effect with the rest of the config). `Config` asks all of them in
a loop.
"""

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...configs.section import Section

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


MAX_FAULTS = 20  # in a message; looking for what was meant takes a while for each
_NEAR = 0.6  # of difflib's ratio


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
    """The value as JSON on one line of plain ASCII, cut at 80 characters; 5e8 as 500000000. For use in messages."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1000:
        value = int(value)
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to write more than 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    try:
        text = json.dumps(value[:80] if isinstance(value, str) else value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def printable(text: str) -> str:
    """The text on one line: control characters and whatever else a terminal may obey are written as escapes."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean "stage"?` for the nearest of the known words, or an empty string."""
    by_lower = {name.lower(): name for name in sorted(known)}
    if len(word) > 2 * max(map(len, by_lower), default=0):
        return ""
    matcher = difflib.SequenceMatcher(b=word.lower())
    bounds = {}
    for name in by_lower:
        matcher.set_seq1(name)
        if matcher.real_quick_ratio() >= _NEAR:
            bounds[name] = matcher.quick_ratio()
    nearest, best = "", _NEAR
    for name, bound in sorted(bounds.items(), key=lambda item: -item[1]):
        if bound < best:  # ratio() costs much more, and is never above quick_ratio()
            break
        matcher.set_seq1(name)
        if (ratio := matcher.ratio()) >= best:
            nearest, best = name, ratio
    return f'; did you mean "{by_lower[nearest]}"?' if nearest else ""


def unknown_key(path: str, key: str, known: Sequence[str]) -> Fault:
    """The fault of a key that does not exist at `path`. Without a near match it lists the keys that do, if few."""
    listed = f"the keys here are {', '.join(sorted(known))}" if len(known) <= 20 else "docs/config.md lists the keys"
    hint = did_you_mean(key, known) or f"; {listed}"
    return Fault(path, "unknown", f"unknown key {shown(key)}{hint}")


def no_effect(path: str, value: object, reason: str) -> str:
    """The note on a setting without effect."""
    return f"{path}: {shown(value)} has no effect here: {reason}"


class ConfigSection(Section):
    """A section of `Config`: see [Note: sections]. In its methods `config` is the whole `Config`."""

    path: ClassVar[str] = ""
    """Where it stands in a file."""

    def faults(self, config: Any) -> list[Fault]:
        return []

    def notes(self, config: Any) -> list[str]:
        return []

    def idle(self, reason: str, but: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> list[str]:
        """A note for each key that is not the default, or for some of the keys."""
        return [
            no_effect(f"{self.path}.{key}", getattr(self, key), reason)
            for key, field in type(self).model_fields.items()
            if getattr(self, key) != field.default and key not in but and (not only or key in only)
        ]
