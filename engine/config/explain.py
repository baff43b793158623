"""What every key of a config does, which value it has, and why; and where two configs ask for different things."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from ...configs.section import Section
from .config import Config
from .deepspeed import RULES
from .errors import ConfigError, Fault, shown
from .read import join, read
from .translate import ALIASES, BATCH_KEYS, CPU_SWITCHES, PIN_SWITCH, translate

Source = str | os.PathLike[str] | Mapping[str, object]
Origin = Literal["set", "default", "auto", "derived", "no effect", "fault"]
_NOT_KNOWN = "not known before the faults are gone"
_OF_THE_RANKS = "follows from the number of ranks: --world-size N"
_PLANNED = "chosen from the model and the machine when the engine is built; `lowtide plan` says beforehand"
_ABSENT = "absent"


@dataclass(frozen=True)
class Explained:
    """One key. value: as JSON has it, what the engine takes; of a key that has no effect or a fault, what was found.

    origin: "auto" and "derived" are values that follow from others, of a key that says "auto" or nothing.
    """

    path: str
    value: object
    origin: Origin
    why: str
    effect: str

    @property
    def is_silent(self) -> bool:
        """Whether the file does not say it, and nothing is to be said of it."""
        return self.origin in ("default", "derived") and not self.why

    def __str__(self) -> str:
        return f"{self.path} = {shown(self.value)}  ({self.origin}{': ' if self.why else ''}{self.why})"


@dataclass(frozen=True)
class Explanation:
    """All keys, in the order of docs/config.md, then those of the file that are none of ours; and the faults."""

    keys: tuple[Explained, ...]
    faults: tuple[Fault, ...]
    source: str | None


def explain(source: Source, world_size: int | None = None) -> Explanation:
    """Each key of a config, of ours or DeepSpeed's. world_size: None: not resolved.

    Raises ConfigError only where there is no JSON object; faults of its keys are part of the result.
    """
    raw, name = read(source)
    config, faults = _loaded(raw, world_size)
    given = dict(_written(raw))
    said = _said(config.notes if config is not None else translate(raw).notes)
    said |= dict.fromkeys(config.planned_keys if config is not None else (), _PLANNED)
    found = list(_fields(Config, config, given, said, faults))
    known = {one.path for one in found}
    found += [_foreign(path, value, said, faults) for path, value in given.items() if path not in known]
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


def _written(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """(path, value) of what a file says, by the name that the key has here."""
    for key, value in section.items():
        here = join(path, key)
        here = ALIASES.get(here, here)
        if isinstance(value, Mapping) and value and here not in RULES:
            yield from _written(value, here)
        else:
            yield here, value
            if here in CPU_SWITCHES and value is True:
                yield f"{CPU_SWITCHES[here]}.device", value


def _said(notes: Sequence[str]) -> dict[str, str]:
    """path -> the sentences of its notes."""
    said: dict[str, str] = {}
    for note in notes:
        path, _, text = note.partition(": ")
        said[path] = f"{said[path]}; {text}" if path in said else text
    return said


def _fields(
    section: type[BaseModel],
    values: BaseModel | None,
    given: Mapping[str, object],
    said: Mapping[str, str],
    faults: list[Fault],
    path: str = "",
) -> Iterator[Explained]:
    """values: of the section; None: of a config with faults, of which only what is written is known."""
    for name, field in section.model_fields.items():
        here = join(path, field.alias or name)
        value = getattr(values, name) if values is not None else None
        inner = type(value) if isinstance(value, Section) else field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _fields(inner, value if isinstance(value, Section) else None, given, said, faults, here)
            continue
        effect = " ".join((field.description or "").split())
        is_known = values is not None
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        found = "auto" if said.get(here) == _PLANNED else _plain(value if is_known else given.get(here, default))
        origin, why = _origin(here, found, is_known, given, said, faults)
        yield Explained(here, found, origin, why, effect)


def _plain(value: object) -> object:
    """As JSON has it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def _origin(
    path: str, value: object, is_known: bool, given: Mapping[str, object], said: Mapping[str, str], faults: list[Fault]
) -> tuple[Origin, str]:
    """Where a value of ours comes from."""
    messages = [fault.message for fault in faults if fault.path == path or fault.path.startswith(f"{path}[")]
    note = said.get(path, "")
    if messages:
        return "fault", "; ".join(messages)
    if path not in given:
        if path in BATCH_KEYS and is_known:
            return "derived", "" if value is not None else _OF_THE_RANKS
        return "default", note
    if given[path] == "auto":
        return "auto", note.partition(": ")[2] or note or (_OF_THE_RANKS if is_known else _NOT_KNOWN)
    if "has no effect here: " in note:
        return "no effect", note.partition(" has no effect here: ")[2]
    switch = next((key for key, section in CPU_SWITCHES.items() if path == f"{section}.device" and key in given), None)
    return "set", note or (f"by {switch}" if switch is not None else "")


def _foreign(path: str, value: object, said: Mapping[str, str], faults: list[Fault]) -> Explained:
    """A key that is DeepSpeed's, or nobody's."""
    messages = [fault.message for fault in faults if _is_within(fault.path, path) or _is_within(path, fault.path)]
    if messages:
        return Explained(path, value, "fault", "; ".join(messages), "")
    if path in CPU_SWITCHES and value is True:
        return Explained(path, value, "set", f'{CPU_SWITCHES[path]} with device "cpu"', "")
    if path == PIN_SWITCH and path not in said:
        return Explained(path, value, "set", "pin_memory of what cpu_offload and cpu_offload_params offload", "")
    note = said.get(path, "").partition(" has no effect here: ")[2] or said.get(path, "")
    rule = RULES.get(path)
    return Explained(path, value, "no effect", note or (rule.reason if rule is not None else ""), "")


def _is_within(path: str, section: str) -> bool:
    return path == section or (section != "" and path.startswith((f"{section}.", f"{section}[")))


# -- two configs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A key with another value in each; "absent" where only one of two optimizers or schedulers has it."""

    path: str
    first: object
    second: object
    first_origin: str
    second_origin: str

    @property
    def sides(self) -> tuple[str, str]:
        """`2 (set)`, of each."""
        values = ((self.first, self.first_origin), (self.second, self.second_origin))
        first, second = (_ABSENT if value == _ABSENT else f"{shown(value)} ({origin})" for value, origin in values)
        return first, second


def difference(first: Source, second: Source, world_size: int | None = None) -> list[Difference]:
    """Where two configs ask for different things, with defaults, translated, and resolved for so many ranks.

    Raises ConfigError for one with faults.
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
    """(values, origins) by path."""
    found = explain(source, world_size)
    if found.faults:
        raise ConfigError(found.faults, found.source)
    config, _ = _loaded(read(source)[0], world_size)
    assert config is not None
    values = dict(_leaves(config.as_dict())) | dict.fromkeys(config.planned_keys, "auto")
    return values, {one.path: one.origin for one in found.keys}


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, join(path, key))
        else:
            yield join(path, key), value
