"""Writes docs/api.md from the docstrings of the public names:  python docs/reference.py"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import lowtide

_WIDTH = 100
API = Path(__file__).with_name("api.md")
HEAD = """# Python API

All that `import lowtide` offers, made from the docstrings by `python docs/reference.py`. The keys of the JSON file are
in [config.md](config.md), the commands in [commands.md](commands.md).
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


if __name__ == "__main__":
    API.write_text(reference())
