"""Faults and notes of a config: the key, the reason, and the correction.

[Note: sections] Each section is a class with its fields, its `faults` (missing or contradicting settings) and its
`notes` (settings that differ from the default and have no effect here). `Config` asks all sections in a loop.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, ClassVar, Literal

from ...configs.section import Bool, Section

FaultKind = Literal[
    "file",  # the file is missing or cannot be read
    "syntax",  # the text is not a JSON object
    "duplicate",  # a key occurs twice in an object
    "unknown",  # the key does not exist
    "type",  # the value has the wrong type
    "value",  # the type is right, but the value is not allowed
    "missing",  # a required value is missing
    "conflict",  # two settings contradict each other
    "unsupported",  # the key is known, but this engine does not support it
]


MAX_FAULTS = 20  # in a message; the search for a near key takes time for each


@dataclass(frozen=True)
class Fault:
    """A single error of a config: its JSON path ("" for the whole config), its kind and a message."""

    path: str
    kind: FaultKind
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """A config with errors. The message lists all faults, in the order of the file.

    `faults` holds them as data; `source` is the file name, or None for a dictionary.
    """

    def __init__(self, faults: Iterable[Fault], source: str | None = None) -> None:
        self.faults = tuple(faults)
        self.source = source
        count = len(self.faults)
        where = f" in {source}" if source is not None else ""
        lines = [f"{count} fault{'s' if count != 1 else ''}{where}:"]
        lines += [f"  {fault}" for fault in self.faults]
        super().__init__("\n".join(lines))

    # By default pickle calls `ConfigError(text)`, and each character of the text would be a fault.
    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Fault, ...], str | None]]:
        return ConfigError, (self.faults, self.source)


def quoted(value: object) -> str:
    """Quote a value in a message: a line of ASCII JSON of at most 80 characters; 5e8 as 500000000."""
    # YAML and templates write sizes as 5e8. From 1e16 on Python would print an exponent.
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1000:
        value = int(value)
    if isinstance(value, int) and value.bit_length() > 1000:  # Python does not print more than 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    try:
        # A text may have megabytes. A message shows 80 characters.
        text = json.dumps(value[:80] if isinstance(value, str) else value)
    except (TypeError, ValueError):
        # The caller's dictionary may hold any object, also objects without a JSON form.
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def printable(text: str) -> str:
    """Return the text on a single line, with control characters as escapes, so that a terminal does not obey them."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean "stage"?` for the nearest known word, or an empty string."""
    by_lower = {name.lower(): name for name in sorted(known)}
    # A key may have megabytes. difflib would index each of its characters.
    if len(word) > 2 * max(map(len, by_lower), default=0):
        return ""
    # First with a high cutoff: difflib then compares few of the words letter by letter.
    near = partial(difflib.get_close_matches, word.lower(), by_lower, n=1)
    nearest = near(cutoff=0.85) or near()
    return f'; did you mean "{by_lower[nearest[0]]}"?' if nearest else ""


def unknown_key(path: str, key: str, known: Sequence[str]) -> Fault:
    """Return the fault of an unknown key, with the nearest key or, if they are few, all keys."""
    listed = f"the keys here are {', '.join(sorted(known))}" if len(known) <= 20 else "docs/config.md lists the keys"
    hint = did_you_mean(key, known) or f"; {listed}"
    return Fault(path, "unknown", f"unknown key {quoted(key)}{hint}")


def type_in(section: Mapping[str, object], path: str, known: Iterable[str]) -> str | Fault:
    """Return the `type` of an optimizer or scheduler as written, or the fault that it is missing or no text."""
    expected = f"expected one of {', '.join(known)}"
    if "type" not in section:
        return Fault(f"{path}.type", "missing", expected)
    written = section["type"]
    if isinstance(written, str):
        return written
    return Fault(f"{path}.type", "type", f"{expected}, found {quoted(written)}")


def no_effect(path: str, value: object, reason: str) -> str:
    """Return the note on a setting without effect."""
    return f"{path}: {quoted(value)} has no effect here: {reason}"


def value_at(config: Any, path: str) -> object:
    """Return the value of a key of a `Config`."""
    # By Python's names: `checkpoint.async` would not be found, since its field is `asynchronous`.
    return reduce(getattr, path.split("."), config)


Wanted = dict[str, tuple[tuple[object, ...], str]]
"""Path of a key -> values of it that another setting accepts, and why these alone."""


def needs(what: str, wanted: Wanted, config: Any) -> list[Fault]:
    """Return a fault for each key whose value `what` does not accept."""
    found = [(path, value_at(config, path), *of_key) for path, of_key in wanted.items()]
    return [
        Fault(path, "conflict", f"{what} needs {' or '.join(map(quoted, accepted))}, found {quoted(value)}: {why}")
        for path, value, accepted, why in found
        if value not in accepted
    ]


class ConfigSection(Section):
    """A section of `Config`: see [Note: sections]. `config` in its methods is the whole `Config`."""

    path: ClassVar[str] = ""
    """The path of the section in a file. `config.py` sets it for each section of `Config`."""

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any]]]:
        # Pickled as values: the class of `params` is made of a table (`section_of`), and pickle would not find it. Only
        # the given ones: some defaults do more if they are written.
        return type(self).model_validate, (self.model_dump(exclude_unset=True),)

    def faults(self, config: Any) -> list[Fault]:
        return []

    def notes(self, config: Any) -> list[str]:
        """Return notes on keys without effect."""
        return []

    def idle(self, reason: str, but: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> list[str]:
        """Return a note for each key that differs from its default; `but` excludes keys and `only` selects them."""
        return [
            no_effect(f"{self.path}.{key}", getattr(self, key), reason)
            # A written default gets no note, since the training is the same without the key.
            for key, field in type(self).model_fields.items()
            if getattr(self, key) != field.default and key not in but and (not only or key in only)
        ]


class SwitchedSection(ConfigSection):
    """A section that does nothing unless it is on."""

    enabled: Bool = False
    """Turns it on."""

    def notes(self, config: Any) -> list[str]:
        return [] if self.enabled else self.idle(f"{self.path}.enabled is false")
