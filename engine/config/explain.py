"""Explains the value, origin and effect of every key of a config, and compares two configs."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from ...configs.section import Section
from .batch import BATCH_KEYS
from .config import Config
from .errors import ConfigError, Fault, quoted
from .read import join, leaves, read
from .translate import ALIASES, deepspeed, filled, translate

Source = str | os.PathLike[str] | Mapping[str, object]
Origin = Literal["set", "default", "auto", "derived", "no effect", "fault"]
_NOT_KNOWN = "unknown until the faults are corrected"
_OF_THE_RANKS = "follows from the number of ranks: --world-size N"
_PLANNED = "chosen from the model and the machine when the engine is built; `lowtide plan` shows it"
_ABSENT = "absent"


@dataclass(frozen=True)
class Explained:
    """A key of a config. value: the value of the engine as JSON; the found value for a key with a fault or without
    effect.

    origin: "auto" and "derived" values follow from other keys; "auto" is written in the file.
    """

    path: str
    value: object
    origin: Origin
    why: str
    effect: str

    @property
    def is_silent(self) -> bool:
        """Whether the file does not give the key, and no remark on it exists."""
        return self.origin in ("default", "derived") and not self.why

    def __str__(self) -> str:
        return f"{self.path} = {quoted(self.value)}  ({self.origin}{': ' if self.why else ''}{self.why})"


@dataclass(frozen=True)
class Explanation:
    """All keys in the order of docs/config.md, then unknown keys of the file; and the faults."""

    keys: tuple[Explained, ...]
    faults: tuple[Fault, ...]
    source: str | None


def explain(source: Source, world_size: int | None = None) -> Explanation:
    """Explain each key of a config, also in DeepSpeed's words. world_size: None: not resolved.

    Raises ConfigError only for a source without a JSON object. Faults of keys are part of the result.
    """
    raw, name = read(source)
    config, faults = _loaded(raw, world_size)
    # `Config.load` has done this too. Here the file's values are needed even if `load` fails.
    raw, text_notes = filled(raw, {}, Config)
    size = raw.get("tiles", {})
    # The keys of the table are those of the section, so a number in its place is written out.
    if not isinstance(size, Mapping) and not any(fault.path == "tiles" for fault in faults):
        raw["tiles"] = {"mlp": size, "loss": size}  # see TilesConfig
    # A config with faults has no notes. Those of the translation are known all the same.
    notes = _by_path(config.notes if config is not None else [*text_notes, *translate(raw, deepspeed()).notes])
    notes |= dict.fromkeys(config.planned_keys if config is not None else (), _PLANNED)
    file = _File.of(raw, notes, faults)
    # `dict` keeps sections as objects. A dump would lose the class of the params.
    found = list(_fields(Config, dict(config) if config is not None else _apart(raw), file))
    ours = [one.path for one in found]
    others = {path: value for path, value in file.given.items() if not any(_is_within(path, one) for one in ours)}
    found += [file.foreign(path, value) for path, value in others.items()]
    return Explanation(tuple(found), tuple(faults), name)


def _loaded(raw: dict[str, object], world_size: int | None) -> tuple[Config | None, list[Fault]]:
    try:
        config = Config.load(raw)
    except ConfigError as error:
        return None, list(error.faults)
    if world_size is None or config.planned_keys:
        return config, []
    try:
        return config.resolve(world_size), []
    except ConfigError as error:
        return config, list(error.faults)


def _apart(raw: dict[str, object]) -> dict[str, object]:
    """Return optimizer and scheduler of a config with faults. Their keys depend only on their type."""
    values, found = translate(raw, deepspeed()).values, dict[str, object]()
    # The keys of `params` follow from the type, so each section is checked by itself, without its faulty neighbours.
    for name in {"optimizer", "scheduler"} & values.keys():
        with suppress(ValidationError):
            found[name] = getattr(Config.model_validate({name: values[name]}), name)
    return found


def _written(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (path, value) of the keys in a file, by our name of each key."""
    for key, value in section.items():
        here = _named(path, key)
        # A section that DeepSpeed knows and we do not has a single reason, so it is a single line.
        if isinstance(value, Mapping) and value and here not in deepspeed().REASONS:
            yield from _written(value, here)
        else:
            yield here, value


def _part(section: Mapping[str, Any], is_in_it: Callable[[str], bool], at: str = "") -> dict[str, object]:
    """Return the keys of a file with paths that pass the test."""
    kept: dict[str, object] = {}
    for key, value in section.items():
        here = _named(at, key)
        if isinstance(value, Mapping) and value:
            kept[key] = _part(value, is_in_it, here)
        elif is_in_it(here):
            kept[key] = value
    return kept


def _translated(raw: dict[str, object]) -> dict[str, object]:
    """Return path -> value of our keys."""
    return {path: value for path, value in leaves(translate(raw, deepspeed()).values).items() if value != {}}


def _named(section: str, key: str) -> str:
    path = join(section, key)
    return ALIASES.get(path, path)


def _by_path(notes: Sequence[str]) -> dict[str, str]:
    """Return path -> text of its notes."""
    said: dict[str, str] = {}
    for note in notes:
        path, _, text = note.partition(": ")
        said[path] = f"{said[path]}; {text}" if path in said else text
    return said


@dataclass(frozen=True)
class _File:
    """The keys of a file, and the remarks on them.

    given: path -> value. meant: a key with a different name here -> path -> value that follows from it. notes: path ->
    text.
    """

    given: Mapping[str, object]
    meant: Mapping[str, Mapping[str, object]]
    notes: Mapping[str, str]
    faults: Sequence[Fault]

    @classmethod
    def of(cls, raw: dict[str, object], notes: Mapping[str, str], faults: Sequence[Fault]) -> "_File":
        read_keys = deepspeed().without_unread(raw)[0]
        given, values = dict(_written(raw)), _translated(read_keys)
        meant = {}
        for key in [key for key in given if key not in values]:
            # Several keys may give a value together, or each alone. So a value belongs to a key if it is lost without
            # the key, or comes from the key alone.
            rest, alone = (_translated(_part(read_keys, is_in_it)) for is_in_it in (key.__ne__, key.__eq__))
            meant[key] = {
                path: value
                for path, value in values.items()
                if rest.get(path, _ABSENT) != value or alone.get(path, _ABSENT) == value
            }
        return cls(given, meant, notes, faults)

    def value(self, path: str, default: object) -> object:
        """Return the value of a key of ours from the file, for a file that makes no config."""
        translated = {here: value for values in self.meant.values() for here, value in values.items()}
        return self.given.get(path, translated.get(path, default))

    def origin(self, path: str, value: object, is_known: bool) -> tuple[Origin, str]:
        """Return the origin of a value of ours, and the reason."""
        messages = [fault.message for fault in self.faults if _is_at(fault, path)]
        note = self.notes.get(path, "")
        if messages:
            return "fault", "; ".join(messages)
        sources = [key for key, values in self.meant.items() if path in values and path not in self.given]
        if path not in self.given and not sources and not self.within(path):
            if path in BATCH_KEYS and is_known:
                return "derived", "" if value is not None else _OF_THE_RANKS
            return "default", note
        # Before "no effect": an "auto" says why it has its value, not that it does nothing.
        if self.given.get(path) == "auto":
            return "auto", note.partition(": ")[2] or note or (_OF_THE_RANKS if is_known else _NOT_KNOWN)
        if "has no effect here: " in note:
            return "no effect", note.partition(" has no effect here: ")[2]
        return "set", note or (f"by {' and '.join(sources)}" if sources else "")

    def within(self, path: str) -> dict[str, object]:
        """Return the keys of an object that is a single value here."""
        return {key: value for key, value in self.given.items() if key.startswith(f"{path}.")}

    def foreign(self, path: str, value: object) -> Explained:
        """Explain a key of DeepSpeed, or an unknown key."""
        faults = self.faults
        messages = [one.message for one in faults if _is_within(one.path, path) or _is_within(path, one.path)]
        if messages:
            return Explained(path, value, "fault", "; ".join(messages), "")
        if meant := self.meant[path]:
            return Explained(path, value, "set", ", ".join(f"{key} {quoted(one)}" for key, one in meant.items()), "")
        note = self.notes.get(path, "").partition(" has no effect here: ")[2] or self.notes.get(path, "")
        why = note or deepspeed().REASONS.get(path, "it changes nothing")
        return Explained(path, value, "no effect", why, "")


def _fields(section: type[BaseModel], values: Mapping[str, object], file: _File, path: str = "") -> Iterator[Explained]:
    """Explain the fields of a section. values: by field; after a fault few or none, and the file's values are used."""
    for name, field in section.model_fields.items():
        here = join(path, field.alias or name)
        value, is_known = values.get(name), name in values
        inner = type(value) if isinstance(value, Section) else field.annotation
        # An optional section has a class only if it has a value: its annotation is a union with None.
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _fields(inner, dict(value) if isinstance(value, Section) else {}, file, here)
            continue
        within = file.within(here)
        if within and not is_known:  # a section of unknown type
            yield from (Explained(key, one, *file.origin(key, one, False), "") for key, one in within.items())
            continue
        params = type(values.get("params")) if name == "type" else None  # the class of the params describes a type
        effect = " ".join((field.description or (params and params.__doc__) or "").split())
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        is_planned = file.notes.get(here) == _PLANNED
        found = "auto" if is_planned else _plain(value if is_known else file.value(here, default))
        yield Explained(here, found, *file.origin(here, found, is_known), effect)


def _plain(value: object) -> object:
    """Return the value as JSON has it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def _is_at(fault: Fault, path: str) -> bool:
    # A list is a single key here, so the faults of its items are its faults.
    return fault.path == path or fault.path.startswith(f"{path}[")


def _is_within(path: str, section: str) -> bool:
    return path == section or (section != "" and path.startswith((f"{section}.", f"{section}[")))


# -- two configs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A key with a different value in each config; "absent" if only one of two optimizers or schedulers has the key."""

    path: str
    first: object
    second: object
    first_origin: str
    second_origin: str

    @property
    def sides(self) -> tuple[str, str]:
        """Text for each side, such as `2 (set)`."""
        values = ((self.first, self.first_origin), (self.second, self.second_origin))
        first, second = (_ABSENT if value == _ABSENT else f"{quoted(value)} ({origin})" for value, origin in values)
        return first, second


def difference(first: Source, second: Source, world_size: int | None = None) -> list[Difference]:
    """Return the keys with different values, after defaults, translation, and resolution for `world_size` ranks.

    Raises ConfigError for a config with faults.
    """
    sides = [_whole(source, world_size) for source in (first, second)]
    paths = list(dict.fromkeys(path for values, _ in sides for path in values))
    found = []
    for path in paths:
        one, other = (side.get(path, _ABSENT) for side, _ in sides)
        if one != other:
            found.append(Difference(path, one, other, *(origins.get(path, "default") for _, origins in sides)))
    return found


def _whole(source: Source, world_size: int | None) -> tuple[dict[str, object], dict[str, str]]:
    """Return the values and the origins by path."""
    found = explain(source, world_size)
    if found.faults:
        raise ConfigError(found.faults, found.source)
    # The config again: an explanation also has keys of DeepSpeed and unknown keys, but no config has these.
    config, _ = _loaded(read(source)[0], world_size)
    assert config is not None
    values = leaves(config.as_dict()) | dict.fromkeys(config.planned_keys, "auto")
    return values, {one.path: one.origin for one in found.keys}
