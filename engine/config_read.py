"""From a file, the name of a preset or a dictionary to plain JSON values, with every fault of form at once."""

import difflib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from .config_errors import ConfigError, Fault, shown

PRESETS = Path(__file__).resolve().parent.parent / "configs"


def preset_names() -> list[str]:
    """The names that `Config.load` finds by themselves, such as "zero3"."""
    return sorted(path.stem for path in PRESETS.glob("*.json") if path.stem != "schema")


def is_comment(key: str) -> bool:
    """Keys that begin with `_` or `//` are comments, at every level; so is the `$schema` that editors read."""
    return key.startswith(("_", "//")) or key == "$schema"


class _Object(dict[str, object]):
    """A JSON object that remembers the keys that stood in it more than once."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        names = [key for key, _ in pairs if not is_comment(key)]
        self.repeated = [key for key in dict.fromkeys(names) if names.count(key) > 1]


def read(source: str | os.PathLike[str] | Mapping[str, object]) -> tuple[dict[str, object], str | None]:
    """The config as plain values without comments, and the file name (None for a dictionary). Raises ConfigError."""
    if isinstance(source, Mapping):
        raw: object = source
        name = None
    elif isinstance(source, str | os.PathLike):
        path = _find(source)
        name = str(path)
        raw = _parse(path)
    else:
        message = f"expected a path, the name of a preset or a dictionary, found {type(source).__name__}"
        raise ConfigError([Fault("", "type", message)])
    if not isinstance(raw, Mapping):
        raise ConfigError([Fault("", "syntax", f"expected a JSON object, found {shown(raw)}")], name)
    faults: list[Fault] = []
    clean = _clean(raw, "", faults)
    if faults:
        raise ConfigError(faults, name)
    assert isinstance(clean, dict)
    return clean, name


def _find(source: str | os.PathLike[str]) -> Path:
    """The file that is meant: a path that exists, or a preset's name, with `-` or `_` between its words."""
    text = os.fspath(source)
    path = Path(text)
    if path.is_file():
        return path
    names = preset_names()
    by_spelling = {name.replace("_", "-"): name for name in names}
    if isinstance(source, str) and text.replace("_", "-") in by_spelling:
        return PRESETS / f"{by_spelling[text.replace('_', '-')]}.json"
    what = "is a folder, not a file" if path.is_dir() else "no such file"
    beside = [str(other) for other in path.parent.glob("*.json")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(text, beside, n=3) + difflib.get_close_matches(path.stem, names, n=3)
    hint = f"; did you mean {' or '.join(shown(item) for item in near)}" if near else ""
    fault = Fault("", "file", f"{what}: {text}{hint}; the presets are {', '.join(names)}")
    raise ConfigError([fault], text)


def _parse(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Fault("", "file", f"cannot be read: {error}")], str(path)) from error
    try:
        return json.loads(text, object_pairs_hook=_Object)
    except json.JSONDecodeError as error:
        lines = text.splitlines()
        line = lines[error.lineno - 1].strip() if error.lineno <= len(lines) else ""
        where = f"line {error.lineno}, column {error.colno}: {shown(line)}" if line else f"line {error.lineno}"
        hint = "JSON has no comments (a key that begins with // is one here) and no comma after the last item"
        fault = Fault("", "syntax", f"not valid JSON: {error.msg} at {where}. {hint}")
        raise ConfigError([fault], str(path)) from error
    except RecursionError as error:
        raise ConfigError([Fault("", "syntax", "not valid here: nested too deeply")], str(path)) from error


def _clean(value: object, path: str, faults: list[Fault]) -> object:
    """The value without comments; repeated keys, NaN and what is no JSON value are added to the faults."""
    if isinstance(value, Mapping):
        repeated = value.repeated if isinstance(value, _Object) else []
        twice = "the key stands twice in one object; keep one"
        faults.extend(Fault(join(path, key), "duplicate", twice) for key in repeated)
        clean: dict[str, object] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                faults.append(Fault(path, "type", f"keys are strings, found {shown(key)}"))
            elif not is_comment(key):
                clean[key] = _clean(item, join(path, key), faults)
        return clean
    if isinstance(value, list | tuple):
        return [_clean(item, f"{path}[{index}]", faults) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        faults.append(Fault(path, "value", f"expected a finite number, found {value}"))
    elif value is not None and not isinstance(value, str | bool | int | float):
        faults.append(Fault(path, "type", f"expected a JSON value, found {type(value).__name__} {shown(value)}"))
    return value


def join(path: str, key: str) -> str:
    """The JSON path of a key in the object at `path`."""
    return f"{path}.{key}" if path else key
