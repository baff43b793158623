"""Reads a file, a preset or a dictionary to plain JSON values, and reports all faults of form at once.

[Note: bounded] A file may be the wrong file, or written by a program. So costs are bounded before the work: the bytes
of a file, the separators in its text (a Python call each), the number of values and their depth.
"""

import base64
import binascii
import difflib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...configs.comments import without_comments
from ...configs.section import MAX_INTEGER
from .errors import ConfigError, Fault, FaultKind, printable, quoted


def decoded(text: str) -> str | None:
    """Decode a JSON object in (URL-safe) base64 from a command line, or return None."""
    if len(text) < 4 or len(text) % 4 or not re.fullmatch(r"[A-Za-z0-9+/_-]+={0,2}", text):
        return None
    try:
        # DeepSpeed takes URL-safe base64. b64decode would skip its characters - and _ in silence.
        found = base64.b64decode(text.replace("-", "+").replace("_", "/")).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    # A name can be base64 too. Only text that begins as an object or a comment is a config.
    return found if found.lstrip().startswith(("{", "/", "#")) else None


MAX_BYTES = 4 << 20
MAX_SEPARATORS = 20_000  # also those within comments
MAX_VALUES = 2_000
MAX_DEPTH = 20
OR_NEVER = ("steps_per_print",)  # keys that also take null and Infinity; Accelerate writes Infinity

PRESETS = Path(__file__).resolve().parents[2] / "configs"


def preset_names() -> list[str]:
    """Return the preset names that `Config.load` finds, such as "zero3"."""
    return sorted(path.stem for path in PRESETS.glob("*.json") if path.stem != "schema")


def is_comment(key: str) -> bool:
    """Return whether a key is a comment: it begins with `_` or `//`, or is the `$schema` that editors read."""
    return key.startswith(("_", "//")) or key == "$schema"


class _Repeating(dict[str, object]):
    """A JSON object with the list of its duplicate keys."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        counts = Counter(key for key, _ in pairs if not is_comment(key))
        self.repeated = [key for key, count in counts.items() if count > 1]


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    # A dict is enough for almost every object: only `_Form` looks for duplicates.
    return values if len(values) == len(pairs) else _Repeating(pairs)


def _integer(text: str) -> int:
    return int(text[:400])  # still above MAX_INTEGER; Python does not parse more than 4,300 digits


def read(source: str | os.PathLike[str] | Mapping[str, object]) -> tuple[dict[str, object], str | None]:
    """Return the config as plain values without comments, and the file name (None for a dictionary). Raises
    ConfigError.
    """
    if isinstance(source, Mapping):
        raw: object = source
        name = None
    elif isinstance(source, str | os.PathLike):
        text = decoded(source) if isinstance(source, str) else None
        # A file that exists wins over a name that happens to be base64.
        if text is not None and not os.path.exists(source):
            name = "base64 text"
            raw = _loads(text, name)
        else:
            path = _find(source)
            name = printable(str(path))
            raw = _parse(path)
    else:
        message = f"expected a path, the name of a preset or a dictionary, found {type(source).__name__}"
        raise ConfigError([Fault("", "type", message)])
    if not isinstance(raw, Mapping):
        raise ConfigError([Fault("", "syntax", f"expected a JSON object, found {quoted(raw)}")], name)
    form = _Form(name)
    clean = form.clean(raw, "", 0)
    if form.faults:
        raise ConfigError(form.faults, name)
    assert isinstance(clean, dict)
    return clean, name


def _find(source: str | os.PathLike[str]) -> Path:
    """Return the file: a path that exists, or a preset with `-` or `_` between its words."""
    text = os.fspath(source)
    path = Path(text)
    try:
        if path.is_file():
            return path
    except OSError as error:  # for example a name that is too long, because it is the JSON text
        hint = "pass JSON text as json.loads(text), a dictionary"
        fault = Fault("", "file", f"cannot be read: {error.strerror}: {quoted(text)}; {hint}")
        raise ConfigError([fault], quoted(text)) from error
    names = preset_names()
    by_spelling = {name.replace("_", "-"): name for name in names}
    # A Path is always a file: a caller who makes a Path does not mean a preset.
    if isinstance(source, str) and text.replace("_", "-") in by_spelling:
        return PRESETS / f"{by_spelling[text.replace('_', '-')]}.json"
    shown = printable(text) or '""'  # an unset variable of a shell
    what = "is a folder, not a file" if text and path.is_dir() else "no such file"
    beside = [str(other) for other in path.parent.glob("*.json")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(text, beside, n=3) + difflib.get_close_matches(path.stem, names, n=3)
    hint = "; did you mean " + " or ".join(f'"{printable(item)}"' for item in near) if near else ""
    fault = Fault("", "file", f"{what}: {shown}{hint}; the presets are {', '.join(names)}")
    raise ConfigError([fault], shown)


def _parse(path: Path) -> object:
    try:
        size = path.stat().st_size
        # utf-8-sig: editors on Windows begin a file with a byte order mark, and JSON does not allow it.
        text = path.read_text(encoding="utf-8-sig") if size <= MAX_BYTES else ""
    except UnicodeDecodeError as error:
        raise _unreadable(printable(str(path)), "file", f"expected text in UTF-8: {error}") from error
    except OSError as error:
        raise _unreadable(printable(str(path)), "file", f"cannot be read: {error.strerror}") from error
    if size > MAX_BYTES:
        message = f"expected at most {MAX_BYTES:,} bytes, found {size:,}; is it a config?"
        raise _unreadable(printable(str(path)), "file", message)
    return _loads(text, printable(str(path)))


def _loads(text: str, name: str) -> object:
    """Parse JSON text, with or without comments."""
    # Counted in C before the parser, since the parser calls Python for each object: see [Note: bounded].
    if sum(map(text.count, ",{[")) > MAX_SEPARATORS:
        raise _unreadable(name, "syntax", f"expected at most {MAX_VALUES:,} values, found many more; is it a config?")
    try:
        try:
            # NaN and Infinity pass the parser. `_Form` refuses them, with their path.
            return json.loads(text, object_pairs_hook=_object, parse_int=_integer)
        except json.JSONDecodeError:
            return json.loads(without_comments(text), object_pairs_hook=_object, parse_int=_integer)
    except json.JSONDecodeError as error:
        start, end = text.rfind("\n", 0, error.pos) + 1, text.find("\n", error.pos)
        line = text[start : end if end >= 0 else None].strip()
        where = f"line {error.lineno}, column {error.colno}: {quoted(line)}" if line else f"line {error.lineno}"
        hint = "Comments (// # /* */) and a comma behind the last item are allowed; names and text need quotes"
        raise _unreadable(name, "syntax", f"not valid JSON: {error.msg} at {where}. {hint}") from error
    # MAX_SEPARATORS allows 20,000 open brackets, more than the parser's stack can hold.
    except RecursionError as error:
        raise _unreadable(name, "syntax", "not valid here: nested too deeply") from error


def _unreadable(name: str, kind: FaultKind, message: str) -> ConfigError:
    """Return the error for the file as a whole."""
    return ConfigError([Fault("", kind, printable(message))], name)


class _Form:
    """Checks the form of values and collects the faults, regardless of their meaning."""

    def __init__(self, source: str | None) -> None:
        self.faults: list[Fault] = []
        self._source = source
        self._num_values = 0

    def clean(self, value: object, path: str, depth: int) -> object:
        """Return the value without comments and add faults to `faults`. Raises ConfigError if there are too many
        values.
        """
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            message = f"expected at most {MAX_VALUES:,} values, found more; is it a config?"
            raise ConfigError([Fault("", "value", message)], self._source)
        # The walk is recursive, so deeper values are not visited.
        if depth > MAX_DEPTH:
            self._fault(path, "value", f"nested too deeply: expected at most {MAX_DEPTH} levels")
            return None
        if isinstance(value, Mapping):
            return self._clean_object(value, path, depth)
        if isinstance(value, list | tuple):
            return [self.clean(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        self._check(value, path)
        return value

    def _clean_object(self, value: Mapping[object, object], path: str, depth: int) -> dict[str, object]:
        repeated = value.repeated if isinstance(value, _Repeating) else []
        for name in repeated:
            self._fault(join(path, name), "duplicate", "the key occurs twice in an object; remove one of them")
        clean: dict[str, object] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                self._fault(path, "type", f"expected a string as a key, found {quoted(key)}")
            elif not is_comment(key):
                here = join(path, key)
                # A key can have half of a surrogate pair as well, and could not be written again.
                self._check(key, here)
                clean[key] = self.clean(item, here, depth + 1)
        return clean

    def _check(self, value: object, path: str) -> None:
        """Report a value that JSON cannot hold or write again."""
        if isinstance(value, float) and not math.isfinite(value):
            # -Infinity and NaN are faults everywhere.
            if path not in OR_NEVER or value != math.inf:
                self._fault(path, "value", f"expected a finite number, found {value}")
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
            self._fault(path, "value", f"expected an integer of at most 64 bits, found {quoted(value)}")
        elif isinstance(value, str) and not _is_unicode(value):
            self._fault(path, "value", f"expected Unicode text, found half of a surrogate pair in {quoted(value)}")
        elif value is not None and not isinstance(value, str | bool | int | float):
            self._fault(path, "type", f"expected a JSON value, found {type(value).__name__} {quoted(value)}")

    def _fault(self, path: str, kind: FaultKind, message: str) -> None:
        self.faults.append(Fault(path, kind, message))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def join(path: str, key: str) -> str:
    """Return the JSON path of a key in the object at `path`. A key that is not a plain word is quoted."""
    is_plain = len(key) <= 80 and (key.isidentifier() or key.replace("-", "_").isidentifier())
    name = key if is_plain else quoted(key)
    return f"{path}.{name}" if path else name


def items_of(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (path, value) of all sections and keys at any depth, as written, a section before its keys."""
    for key, value in section.items():
        here = join(path, key)
        yield here, value
        if isinstance(value, Mapping):
            yield from items_of(value, here)


def leaves(values: Mapping[str, Any]) -> dict[str, object]:
    """Return path -> value of each key that is no section, at any depth."""
    return {path: value for path, value in items_of(values) if not isinstance(value, Mapping) or not value}
