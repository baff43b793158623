"""Values for what a file leaves to the script: its "auto" keys, as trainers fill them from their own arguments."""

from collections.abc import Mapping

from pydantic import BaseModel

from ...configs.section import Section
from ...optimizers.table import OPTIMIZERS
from .deepspeed import RULES
from .errors import ConfigError, Fault, did_you_mean, shown
from .read import join
from .scheduler import SCHEDULER_PARAMS
from .translate import ALIASES, BF16_MASTERS, BF16_STATES, CPU_SWITCHES, MICS, PIN_SWITCH, QUANTIZED

Fill = Mapping[str, object]
"""Path of a key, in this project's words or DeepSpeed's -> its value where the file says "auto"."""


def canonical(path: str) -> str:
    """The path with the one name that a key, and each section above it, has here."""
    parts: list[str] = []
    for part in path.split("."):
        here = ".".join([*parts, part])
        parts = ALIASES.get(here, here).split(".")
    return ".".join(parts)


def filled(raw: dict[str, object], fill: Fill, fields: type[Section]) -> tuple[dict[str, object], list[str]]:
    """The plain values with every "auto" that has a value in `fill`, and a note for each of these.

    A key that says something else keeps it, as does one that the file leaves out. fields: of a whole config.
    Raises ConfigError for a path that no config has.
    """
    values = {canonical(path): value for path, value in fill.items()}
    known = _known_paths(fields)
    faults = [
        Fault(path, "unknown", f"fill: no config has such a key{did_you_mean(path, known)}")
        for path in fill
        if canonical(path) not in known
    ]
    if faults:
        raise ConfigError(faults)
    notes: list[str] = []
    return _with(raw, "", values, notes), notes


def value_of(raw: Mapping[str, object], path: str) -> object:
    """What the plain values have for a key, by any of its names; None where they leave it out."""
    return _find(raw, "", canonical(path))


def _find(section: Mapping[str, object], path: str, wanted: str) -> object:
    for key, value in section.items():
        here = canonical(join(path, key))
        if here == wanted:
            return value
        if isinstance(value, Mapping) and wanted.startswith(f"{here}."):
            return _find(value, here, wanted)
    return None


def _with(section: dict[str, object], path: str, values: Fill, notes: list[str]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in section.items():
        here = canonical(join(path, key))
        if isinstance(value, dict):
            value = _with(value, here, values, notes)
        elif value == "auto" and here in values:
            value = values[here]
            notes.append(f'{here}: "auto" is {shown(value)}: it was given as `fill`')
        result[key] = value
    return result


def _known_paths(fields: type[Section]) -> set[str]:
    """Every key that a config may have, by the name that it has here."""
    switches = {*CPU_SWITCHES, PIN_SWITCH, MICS, BF16_MASTERS, BF16_STATES, *QUANTIZED}
    paths = {*_paths(fields, ""), *RULES, *switches, "optimizer.params.adam_w_mode"}
    for kind, sections in (
        ("optimizer", [one.params for one in OPTIMIZERS.values()]),
        ("scheduler", list(SCHEDULER_PARAMS.values())),
    ):
        paths |= {f"{kind}.type", *(f"{kind}.params.{key}" for one in sections for key in one.json_keys())}
    return paths


def _paths(section: type[BaseModel], path: str) -> set[str]:
    found: set[str] = set()
    for name, field in section.model_fields.items():
        here, kind = join(path, field.alias or name), field.annotation
        is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
        found |= _paths(kind, here) if is_section else {here}  # type: ignore[arg-type]  # a section: see is_section
    return found
