"""Values for what a file leaves open: its "auto" keys, as trainers fill them, and text where a value belongs.

[Note: text for a value] YAML 1.1 reads 1e-3 as text, and templates write every value as text. Where a key takes a
number, text that is wholly a finite number means this number; where it takes true or false, "true" and "false" do. The
value then has to fit its key as if it had stood there without quotes: "5e8" is an integer, "3.5" is none. All other
text stays, for the key to take or to refuse: "yes" and "1" are no flags, "true" is no number.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, get_args

from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError

from ...configs.section import MAX_INTEGER, Section
from ...optimizers import OPTIMIZERS
from .deepspeed import RULES
from .errors import ConfigError, Fault, did_you_mean, shown
from .read import join
from .scheduler import SCHEDULER_PARAMS
from .translate import ALIASES, BF16_MASTERS, BF16_STATES, CPU_SWITCHES, FLOPS_WORDS, MICS, PIN_SWITCH, QUANTIZED

Fill = Mapping[str, object]
"""Path of a key, in this project's words or DeepSpeed's -> its value where the file says "auto"."""

READ = ': read "'
"""In a note on text that was read as a value."""
_Whole = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]  # beyond it, as JSON: a float
_NUMBER = TypeAdapter[int | float](_Whole | FiniteFloat)


def canonical(path: str) -> str:
    """The path with the one name that a key, and each section above it, has here."""
    parts: list[str] = []
    for part in path.split("."):
        here = ".".join([*parts, part])
        parts = ALIASES.get(here, here).split(".")
    return ".".join(parts)


def filled(raw: dict[str, object], fill: Fill, fields: type[Section]) -> tuple[dict[str, object], list[str]]:
    """The plain values with those of `fill` for "auto", and with values for text, and a note for each of these.

    A key that says something else keeps it, as does one that the file leaves out. fields: of a whole config.
    Raises ConfigError for a path that no config has. See [Note: text for a value].
    """
    values = {canonical(path): value for path, value in fill.items()}
    known = _known_keys(fields)
    faults = [
        Fault(path, "unknown", f"fill: no config has such a key{did_you_mean(path, known)}")
        for path in fill
        if canonical(path) not in known
    ]
    if faults:
        raise ConfigError(faults)
    notes: list[str] = []
    return _with(raw, "", values, known, notes), notes


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


def _with(
    section: dict[str, object], path: str, values: Fill, known: Mapping[str, set[type]], notes: list[str]
) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in section.items():
        here = join(path, key)
        here = ALIASES.get(here, here)
        if isinstance(value, dict):
            result[key] = _with(value, here, values, known, notes)
            continue
        if value == "auto" and here in values:
            value = values[here]
            notes.append(f'{here}: "auto" is {shown(value)}: it was given as `fill`')
        kinds = known.get(here, {bool} if key == "enabled" else set())
        result[key] = _value(value, here, kinds, notes)
    return result


def _value(value: object, path: str, kinds: set[type], notes: list[str]) -> object:
    """The value that text stands for where a key takes these kinds of values; all else as it is."""
    if isinstance(value, list):
        return [_value(item, path, kinds, notes) for item in value]
    if not isinstance(value, str) or str in kinds:
        return value
    found: object = value
    if bool in kinds and value in ("true", "false"):
        found = value == "true"
    elif kinds & {int, float}:
        try:
            found = _NUMBER.validate_python(value)
        except ValidationError:
            return value
    if found is not value:
        notes.append(f"{path}: read {shown(value)} as {shown(found)}")
    return found


@cache
def _known_keys(fields: type[Section]) -> dict[str, set[type]]:
    """Every key that a config may have, by the name that it has here, and what it takes: bool, int, float or str."""
    switches = {*CPU_SWITCHES, PIN_SWITCH, BF16_MASTERS, BF16_STATES, *QUANTIZED, "optimizer.params.adam_w_mode"}
    of_rules: dict[str, set[type]] = {"true or false": {bool}, "an integer": {int}, "a number": {float}}
    known = {path: of_rules.get(rule.expected, {str}) for path, rule in RULES.items()} | _kinds(fields, "")
    known |= {path: {bool} for path in (*switches, "zero_optimization")}
    known |= {path: {int} for path in (MICS, "tiles", *(f"flops_profiler.{word}" for word in FLOPS_WORDS))}
    known |= {"optimizer.type": {str}, "scheduler.type": {str}, "optimizer.params.muon_lr": {float}}
    for kind, sections in (
        ("optimizer", [one.params for one in OPTIMIZERS.values()]),
        ("scheduler", list(SCHEDULER_PARAMS.values())),
    ):
        for section in sections:
            for path, kinds in _kinds(section, f"{kind}.params").items():
                known[path] = known.get(path, set()) | kinds
    return known


def _kinds(section: type[BaseModel], path: str) -> dict[str, set[type]]:
    found: dict[str, set[type]] = {}
    for name, field in section.model_fields.items():
        here, kind = join(path, field.alias or name), field.annotation
        is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
        found |= _kinds(kind, here) if is_section else {here: _leaves(kind)}  # type: ignore[arg-type]  # it is one
    return found


def _leaves(kind: object) -> set[type]:
    """The types that an annotation names, and those of a Literal's values but for its words: `str` is any text."""
    if parts := get_args(kind):
        return set[type]().union(*map(_leaves, parts))
    return {kind} if isinstance(kind, type) else {type(kind)} - {str}
