"""Writes docs/api.md from docstrings, and the tables of docs/config.md from the schema:  python docs/reference.py"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import lowtide
from lowtide.engine.config.schema import json_schema
from lowtide.engine.config.translate import ALIASES

_WIDTH = 100
API, CONFIG = (Path(__file__).with_name(name) for name in ("api.md", "config.md"))
NO_EFFECT, UNSUPPORTED = "No effect here: ", "Not supported yet: "
SWITCH = "Turns it on."
HEAD = """# Python API

All that `import lowtide` offers. See also [config keys](config.md) and [commands](commands.md).
"""


def reference() -> str:
    """The page, as Markdown."""
    objects = {name: getattr(lowtide, name) for name in lowtide.__all__}
    functions = [name for name, found in objects.items() if inspect.isfunction(found)]
    errors = [name for name, found in objects.items() if isinstance(found, type) and issubclass(found, Exception)]
    classes = [name for name in objects if name not in {*functions, *errors}]
    parts = [HEAD]
    parts += [f"## lowtide.{name}\n\n{_described(name, objects[name])}" for name in functions]
    for name in classes:
        is_record = is_dataclass(objects[name])
        text = f"```python\n{_fields_of(objects[name])}\n```" if is_record else _docstring(objects[name])
        parts.append(f"## lowtide.{name}\n\n{text}")
        members = _members(objects[name], with_methods=not is_record)
        parts += [f"### {name}.{member}\n\n{text}" for member, text in members]
    parts.append("## Errors")
    parts += [f"- **lowtide.{name}** ({_bases(objects[name])}): {_one_line(objects[name])}" for name in errors]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _fields_of(record: type) -> str:
    """The source of a dataclass without its methods, which the library itself calls."""
    source = inspect.getsource(record)
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef)
    last = max(one.end_lineno or 0 for one in node.body if not isinstance(one, ast.FunctionDef))
    return "\n".join(source.splitlines()[:last])


def _members(cls: type, with_methods: bool) -> Iterator[tuple[str, str]]:
    """Properties, and public methods, of the class and of its bases in the same folder, in the order of the source."""
    folder = cls.__module__.rpartition(".")[0]
    owners = [one for one in cls.__mro__ if one.__module__.rpartition(".")[0] == folder]
    for owner, name, value in ((one, *item) for one in owners for item in vars(one).items()):
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if name.startswith("_") or not inspect.isfunction(function) or function.__module__ != owner.__module__:
            continue
        if isinstance(value, property):
            kind = _annotation(inspect.signature(function).return_annotation)
            yield name, f"```python\n{name}: {kind}\n```\n\n{_docstring(value)}"
        elif with_methods:
            yield name, _described(name, inspect.unwrap(function))


def _described(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    shown, last = [], None
    for param in signature.parameters.values():
        if param.kind is inspect.Parameter.KEYWORD_ONLY and last not in (param.kind, inspect.Parameter.VAR_POSITIONAL):
            shown.append("*")
        last = param.kind
        if param.name not in ("self", "cls"):
            bare = str(param.replace(annotation=inspect.Parameter.empty))
            written, *default = bare.split("=", 1)
            shown.append(f"{written}: {_annotation(param.annotation)}" + (f" = {default[0]}" if default else ""))
    returns = f" -> {_annotation(signature.return_annotation)}"
    text = f"{name}({', '.join(shown)}){returns}"
    if len(text) > _WIDTH:
        text = f"{name}(\n" + "".join(f"    {param},\n" for param in shown) + f"){returns}"
    return f"```python\n{text}\n```\n\n{_docstring(function)}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _docstring(found: object) -> str:
    """Indented parts of a docstring are drawings and tables: they keep their form."""
    text = inspect.getdoc(found) or ""
    blocks = text.split("\n\n")
    return "\n\n".join(f"```\n{block}\n```" if block.startswith("    ") else block for block in blocks)


def _one_line(found: object) -> str:
    return " ".join((inspect.getdoc(found) or "").split())


def _bases(cls: type) -> str:
    return ", ".join(base.__name__ for base in cls.__bases__)


def config_page(page: str) -> str:
    """The page with each table behind a marker, `<!-- keys: PATH -->` and so on, made anew."""
    makers = {"keys": _keys_table, "types": _types_table, "params": _params_table, "reasons": _reasons_table}
    schema = json_schema()

    def filled(found: re.Match[str]) -> str:
        return f"{found[0].splitlines()[0]}\n\n{makers[found[1]](schema, found[2])}\n\n"

    return re.sub(r"<!-- (\w+): (.*) -->\n\n(?:\|.*\n)*\n?", filled, page).rstrip("\n") + "\n"


def _keys_table(schema: Any, path: str) -> str:
    """Keys of a section that have an effect, without aliases. path: `zero_optimization.offload_param`, or `top`."""
    section = _section(schema, path)
    aliases = {alias.rpartition(".")[2] for alias in ALIASES if alias.rpartition(".")[0] == path}
    rows = [
        f"| `{key}` | {_kind(schema, one)} | {_default(section, key, one)} | {_meaning(schema, section, one)} |"
        for key, one in section["properties"].items()
        if _works(one) and key not in aliases and not (path == "top" and _is_section(schema, one))
    ]
    return "\n".join(["| key | values | default | meaning |", "|---|---|---|---|", *rows])


def _types_table(schema: Any, path: str) -> str:
    """A row for each type of `optimizer` or `scheduler`, with its params and their defaults."""
    rows = []
    for name, params in _types(schema, path):
        keys = [
            f"`{key}` {_default(params, key, one)}".rstrip() for key, one in params["properties"].items() if _works(one)
        ]
        rows.append(f"| `{name}` | {', '.join(keys)} | {_text(params).removeprefix('Keyword arguments of ')} |")
    formula = "keyword arguments of" if path == "optimizer" else "formula"
    return "\n".join([f"| type | params and defaults | {formula} |", "|---|---|---|", *rows])


def _params_table(schema: Any, path: str) -> str:
    """A row for each key of any type: the meaning of most types, then others behind the types that have them."""
    meanings: dict[str, dict[str, list[str]]] = {}
    for name, params in _types(schema, path):
        for key, one in params["properties"].items():
            if _works(one):
                meanings.setdefault(key, {}).setdefault(_text(one), []).append(f"`{name}`")
    rows = []
    for key, texts in meanings.items():
        first, *rest = sorted(texts, key=lambda text: -len(texts[text]))
        rows.append(f"| `{key}` | {' '.join([first, *(', '.join(texts[text]) + ': ' + text for text in rest)])} |")
    return "\n".join(["| key | meaning |", "|---|---|", *rows])


def _reasons_table(schema: Any, kind: str) -> str:
    """Keys without an effect, or with a single value that is taken, by the reason."""
    start = {"no effect": NO_EFFECT, "not supported": UNSUPPORTED}[kind]
    reasons: dict[str, list[str]] = {}
    for path, one in _all_keys(schema, schema, "", set()):
        if one.get("description", "").startswith(start):
            fine = f" ({_values(one['enum'])})" if "enum" in one and start == UNSUPPORTED else ""
            reasons.setdefault(_text(one).removeprefix(start), []).append(f"`{path}`{fine}")
    rows = [f"| {', '.join(dict.fromkeys(keys))} | {reason} |" for reason, keys in reasons.items()]
    return "\n".join(["| keys | reason |", "|---|---|", *rows])


def _all_keys(schema: Any, section: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Every key below a section with its path; a section with two names has the first."""
    if id(section) in seen:
        return
    seen.add(id(section))
    for key, one in section.get("properties", {}).items():
        yield path + key, one
        for inner in _alternatives(schema, one):
            yield from _all_keys(schema, inner, f"{path}{key}.", seen)


def _alternatives(schema: Any, one: Any) -> list[Any]:
    """What a value may be, with references to sections followed."""
    if "$ref" in one:
        return [schema["$defs"][one["$ref"].rpartition("/")[2]]]
    options = [option for word in ("anyOf", "oneOf", "allOf") for option in one.get(word, ())]
    return [found for option in options for found in _alternatives(schema, option)] or [one]


def _section(schema: Any, path: str) -> Any:
    section = schema
    for key in () if path == "top" else path.split("."):
        options = _alternatives(schema, section["properties"][key])
        section = next(option for option in options if "properties" in option)
    return section


def _types(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    for option in _alternatives(schema, schema["properties"][path]):
        if "properties" in option:
            kind = option["properties"]["type"]
            yield json.dumps(kind["default"]), _section_of_params(schema, option)


def _section_of_params(schema: Any, option: Any) -> Any:
    found = next(one for one in _alternatives(schema, option["properties"]["params"]) if "properties" in one)
    return {"description": option.get("description", ""), **found}


def _works(one: Any) -> bool:
    return not one.get("description", "").startswith((NO_EFFECT, UNSUPPORTED))


def _is_section(schema: Any, one: Any) -> bool:
    return any("properties" in option for option in _alternatives(schema, one))


def _kind(schema: Any, one: Any) -> str:
    kinds = []
    for option in _alternatives(schema, one):
        if "properties" in option:
            kinds.append("section")
        elif "const" in option or "enum" in option:
            kinds.append(_values(option.get("enum", [option.get("const")])))
        elif isinstance(kind := option.get("type", "any"), list):
            kinds += [str({"null": "null", "boolean": "true, false"}.get(name, name)) for name in kind]
        else:
            bounds = [
                f"{sign} {option[word]}"
                for word, sign in (
                    ("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"),
                )
                if word in option
            ]  # fmt: skip
            name = {"array": "list", "boolean": "true, false", "object": "section", "integer": "int"}.get(kind, kind)
            kinds.append(" ".join([name, *bounds]))
    return ", ".join(dict.fromkeys(kinds))


def _values(values: list[Any]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


def _default(section: Any, key: str, one: Any) -> str:
    if key in section.get("required", ()):
        return "required"
    default = one.get("default")
    return "" if isinstance(default, dict) else f"`{json.dumps(default)}`"


def _meaning(schema: Any, section: Any, one: Any) -> str:
    """The text of a key; that of the section for a key that turns it on, and for a key that holds a section."""
    if "description" in one:
        return _text(section) if one["description"] == SWITCH else _text(one)
    return next((_text(option) for option in _alternatives(schema, one) if "properties" in option), "")


def _text(one: Any) -> str:
    return " ".join(one.get("description", "").split()).replace("|", "\\|")


if __name__ == "__main__":
    API.write_text(reference())
    CONFIG.write_text(config_page(CONFIG.read_text()))
