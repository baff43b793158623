"""The order in which a module's forward uses its attributes, read from its source text."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

# What is read of a tensor or a list without a use of its values.
_METADATA = frozenset(("dtype", "device", "shape", "size", "dim", "ndim", "numel", "requires_grad", "is_cuda"))
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


@dataclass(frozen=True)
class Mention:
    """`self.name` in a forward. loops: those in whose body it stands.

    strong: it is called, or looped over: `self.name(...)`, `self.name[0](...)`, `for x in self.name`.
    """

    name: str
    strong: bool
    loops: frozenset[int]


def mentions(module: nn.Module) -> list[Mention]:
    """Every `self.name` in the module's forward and in the methods that it calls, in the order of execution.

    Both branches of an `if` count. Empty where the source text is not to be had.
    """
    reader = _Reader(module)
    reader.read("forward")
    return reader.found


class _Reader:
    def __init__(self, module: nn.Module) -> None:
        self.found: list[Mention] = []
        self._module = module
        self._methods: set[str] = set()  # being read or read: each once
        self._loops: list[int] = []
        self._functions: dict[str, ast.AST] = {}  # defined in the method that is read, by name

    def read(self, method: str) -> None:
        """Reads one method of the class, once."""
        if method in self._methods:
            return
        self._methods.add(method)
        tree = _source_of(getattr(type(self._module), method, None))
        if tree is not None and tree.args.args:
            for statement in tree.body:
                self._visit(statement, tree.args.args[0].arg)

    def _visit(self, node: ast.AST, me: str) -> None:
        if isinstance(node, ast.FunctionDef):
            self._functions[node.name] = node  # runs where it is called, or given to another function
        elif isinstance(node, ast.Call):
            self._visit_call(node, me)
        elif isinstance(node, _LOOPS):
            self._visit_loop(node, me)
        elif isinstance(node, (ast.Attribute, ast.Subscript)):
            self._visit_chain(node, me, strong=False)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            self._visit_all([node.value, *getattr(node, "targets", [getattr(node, "target", None)])], me)
        else:
            self._visit_all(ast.iter_child_nodes(node), me)

    def _visit_all(self, nodes: Iterable[ast.AST | None], me: str) -> None:
        for node in nodes:
            if node is not None:
                self._visit(node, me)

    def _visit_call(self, node: ast.Call, me: str) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("len", "hasattr", "isinstance"):
            return
        given = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
        functions = [part.id for part in given if isinstance(part, ast.Name) and part.id in self._functions]
        lambdas = [part.body for part in given if isinstance(part, ast.Lambda)]
        arguments = [part for part in given[1:] if not isinstance(part, ast.Lambda)]
        called_first = any(isinstance(inner, ast.Call) for inner in ast.walk(node.func))
        if called_first:
            self._visit_chain(node.func, me, strong=True)
        self._visit_all(arguments, me)
        if not called_first:
            self._visit_chain(node.func, me, strong=True)
        for body in [*lambdas, *(part for name in functions for part in ast.iter_child_nodes(self._functions[name]))]:
            self._visit(body, me)

    def _visit_chain(self, node: ast.AST, me: str, strong: bool) -> None:
        """`self.a.b[i].c`, called if strong."""
        path: list[str] = []
        indexed = False
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            if isinstance(node, ast.Attribute):
                path.append(node.attr)
            else:
                self._visit(node.slice, me)
                indexed = True
            node = node.value
        if not (isinstance(node, ast.Name) and node.id == me and path):
            self._visit(node, me)
            return
        name = path[-1]
        if strong and len(path) == 1 and inspect.isfunction(getattr(type(self._module), name, None)):
            self.read(name)
        elif not _METADATA & set(path[:-1]):
            is_module = indexed or isinstance(_attribute(self._module, reversed(path)), nn.Module)
            self.found.append(Mention(name, strong and is_module, frozenset(self._loops)))

    def _visit_loop(self, node: ast.AST, me: str) -> None:
        generators = [part.iter for part in getattr(node, "generators", [])]
        for iterated in [*generators, *([node.iter] if isinstance(node, ast.For) else [])]:
            begin = len(self.found)
            self._visit(iterated, me)
            self.found[begin:] = [Mention(found.name, True, found.loops | {id(node)}) for found in self.found[begin:]]
        self._loops.append(id(node))
        skipped = {id(part) for part in (*generators, getattr(node, "iter", None))}
        parts = [part for part in ast.iter_child_nodes(node) if id(part) not in skipped]
        self._visit_all([part for part in parts if not isinstance(part, ast.comprehension)], me)
        for part in parts:
            if isinstance(part, ast.comprehension):
                self._visit_all(part.ifs, me)
        self._loops.pop()


def _attribute(value: object, path: Iterable[str]) -> object:
    for name in path:
        value = getattr(value, name, None)
    return value


def _source_of(function: Callable[..., object] | None) -> ast.FunctionDef | None:
    if function is None:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    first = tree.body[0] if tree.body else None
    return first if isinstance(first, ast.FunctionDef) else None
