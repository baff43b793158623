"""Who may import whom: the table of the architecture, read from the source text."""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]

MAY_IMPORT: dict[str, set[str]] = {
    "lowtide": {"engine", "launch", "checkpoint", "comm", "offload", "zero"},  # the last four: errors alone
    "bin": {"engine", "launch", "configs", "checkpoint", "pipe", "kernels", "offload"},
    "engine": {"zero", "pipe", "comm", "kernels", "configs", "checkpoint", "offload", "model"},
    "checkpoint": {"offload"},
    "zero": {"comm", "kernels", "offload", "model"},
    "pipe": {"comm", "kernels", "model"},
    "comm": {"launch"},
    "kernels": {"model"},
    "offload": set(),
    "model": set(),
    "configs": set(),
    "launch": set(),
}
SHARED_WITH_THE_LAUNCHER = {"progress", "record", "stacks"}  # what a rank says of itself
FILES = [path for folder in MAY_IMPORT for path in sorted((CHECKOUT / folder).rglob("*.py"))]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node except what only type checkers read (`if TYPE_CHECKING:`)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from runtime_nodes(other)
            continue
        yield child
        yield from runtime_nodes(child)


def module_name(path: Path) -> str:
    """`zero/group.py` -> `lowtide.zero.group`; `lowtide/__init__.py` -> `lowtide`."""
    parts = path.relative_to(CHECKOUT).with_suffix("").parts
    parts = parts if parts[0] == "lowtide" else ("lowtide", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, nodes: Iterator[ast.AST]) -> set[str]:
    """Absolute names of all modules, and names in modules, that the import statements among `nodes` ask for."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{source}.{alias.name}" for alias in node.names}
    return found


def our_folders(path: Path) -> set[str]:
    """The folders of ours that a file imports at any time, for type checkers too; `lowtide` is the public API."""
    found = set()
    for name in imports(path, ast.walk(tree_of(path))):
        first, *rest = name.split(".")
        if first == "lowtide":
            found.add(rest[0] if rest and rest[0] in MAY_IMPORT else "lowtide")
    return found


def uses_distributed(tree: ast.Module, path: Path) -> bool:
    names = imports(path, ast.walk(tree))
    if path.parent.name == "checkpoint":  # its file format is that of torch.distributed.checkpoint
        names = {name for name in names if not name.startswith("torch.distributed.checkpoint.")}
    attributes = any(
        isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        for node in ast.walk(tree)
    )
    return attributes or any((name + ".").startswith("torch.distributed.") for name in names)


def name_of(path: Path) -> str:
    return str(path.relative_to(CHECKOUT))


def test_every_package_is_in_the_table() -> None:
    packages = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {package.removeprefix("lowtide.").split(".")[0] for package in packages} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_downward(path: Path) -> None:
    folder = path.relative_to(CHECKOUT).parts[0]
    forbidden = our_folders(path) - {folder} - MAY_IMPORT[folder]
    assert not forbidden, f"{folder}/ may import {sorted(MAY_IMPORT[folder])}, found also {sorted(forbidden)}"


def test_only_comm_names_torch_distributed() -> None:
    assert [
        name_of(path) for path in FILES if uses_distributed(tree_of(path), path) and path.parent.name != "comm"
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.device_mesh import DeviceMesh",
        "def f():\n    import torch.distributed",
        "import torch\ntorch.distributed.get_rank()",
    ],
)
def test_every_way_to_name_torch_distributed_is_seen(source: str) -> None:
    assert uses_distributed(ast.parse(source), CHECKOUT / "zero/example.py")


def test_launch_imports_no_torch() -> None:
    for path in (CHECKOUT / "launch").rglob("*.py"):
        roots = {name.split(".")[0] for name in imports(path, ast.walk(tree_of(path)))}
        assert not roots & {"torch", "numpy", "pydantic"}, name_of(path)


def test_ranks_know_nothing_of_the_launcher_but_the_record_that_it_reads() -> None:
    for path in (path for folder in ("comm", "lowtide") for path in (CHECKOUT / folder).rglob("*.py")):
        names = imports(path, ast.walk(tree_of(path)))
        modules = {name.split(".")[2] for name in names if name.startswith("lowtide.launch.")}
        assert modules <= SHARED_WITH_THE_LAUNCHER, name_of(path)


def test_no_import_cycles() -> None:
    modules = {module_name(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        wanted = imports(path, runtime_nodes(tree_of(path)))
        targets = {name if name in modules else name.rpartition(".")[0] for name in wanted}
        graph[module] = (targets & set(modules)) - {module}
    assert first_cycle(graph) is None, " -> ".join(first_cycle(graph) or [])


def first_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """A path of modules that comes back to its start, or None."""
    finished: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str] | None:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in finished:
            return None
        for target in sorted(graph[node]):
            if cycle := visit(target, [*trail, node]):
                return cycle
        finished.add(node)
        return None

    return next((cycle for node in sorted(graph) if (cycle := visit(node, []))), None)


def test_a_cycle_is_found() -> None:
    assert first_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert first_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
