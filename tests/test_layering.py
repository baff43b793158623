"""Who may import whom: the table of the architecture, read from the source text."""

import ast
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]

LAUNCH = {f"launch/{room}" for room in ("hosts", "allocation", "wire", "agent", "transports", "job")}
ENGINE = {
    "engine",
    *(f"engine/{room}" for room in ("archive", "blueprint", "config", "model", "step", "plan", "report")),
}
PIPE = {"pipe", "pipe/schedules", "pipe/split"}
BELOW_PLANS = {*PIPE - {"pipe"}, "zero", "parallel", "comm", "kernels", "model", "offload", "optimizers", "watch"}

# A room is a package. A module belongs to the innermost one of its name that stands here.
MAY_IMPORT: dict[str, set[str]] = {
    "lowtide": {*ENGINE, "watch", "checkpoint", "comm", "offload", "zero"},  # the last four: errors alone
    # files and parts without an engine, layers that are blocks, which stage has them, names of optimizers
    "deepspeed": {"lowtide", *ENGINE, "checkpoint", "comm", "model", "offload", "optimizers", "pipe/split", "zero"},
    # where tensors lie in files, how many ranks there are, whether a model has blocks
    "huggingface": {"lowtide", *ENGINE, "checkpoint", "comm", "model"},
    "lightning": {"lowtide", *ENGINE, "checkpoint", "watch"},  # it reads its checkpoints without an engine too
    "ray": {"lowtide", *ENGINE, "checkpoint"},
    "bin": {
        *ENGINE,
        "engine/plan/measuring",
        *PIPE,
        *LAUNCH,
        "configs",
        "checkpoint",
        "deepspeed",  # a command reads its checkpoints
        "kernels",
        "offload",
        "watch",
    },
    "engine": {*ENGINE, "zero", "parallel", "comm", "kernels", "model", "checkpoint", "offload", "watch"},
    "engine/report": {*ENGINE - {"engine", "engine/report"}, "checkpoint", "zero", "comm", "offload", "watch"},
    "engine/plan/measuring": {"engine", "engine/plan", "engine/blueprint", "engine/config", *BELOW_PLANS},
    "engine/plan": {*(f"engine/{room}" for room in ("step", "model", "blueprint", "config")), *BELOW_PLANS},
    "engine/step": {
        *(f"engine/{room}" for room in ("model", "blueprint", "archive", "config")),
        *PIPE,
        "checkpoint",  # its error, where a save that was due has failed
        "zero",
        "parallel",
        "comm",
        "kernels",
        "model",
        "offload",
        "watch",
    },
    "engine/model": {
        "engine/archive",
        "engine/blueprint",
        "engine/config",
        "zero",
        "parallel",
        "pipe/split",
        "comm",
        "kernels",
        "model",
        "offload",
        "watch",
    },
    "engine/blueprint": {
        "engine/archive",
        "engine/config",
        "pipe/schedules",
        "pipe/split",
        "zero",
        "parallel",
        "comm",
        "kernels",
        "offload",
        "optimizers",
    },
    "engine/archive": {"engine/config", "zero", "comm", "checkpoint", "offload", "optimizers", "watch"},
    "engine/config": {"pipe/schedules", "configs", "optimizers"},
    "checkpoint": {"offload", "optimizers"},
    "zero": {"comm", "kernels", "model", "offload", "optimizers", "watch"},
    "parallel": {"pipe/split", "comm", "kernels", "model", "offload"},
    "pipe": {"pipe/schedules", "pipe/split", "comm", "kernels", "model"},
    "pipe/split": {"model"},
    "pipe/schedules": set(),
    "comm": {"watch"},
    "kernels": {"model", "optimizers"},
    "optimizers": {"configs"},
    "model": set(),
    "offload": {"model"},  # what a compiler must not trace
    "configs": set(),
    "launch": set(),
    "launch/job": {*LAUNCH, "watch"},
    "launch/transports": {"launch/agent", "launch/wire", "launch/hosts"},
    "launch/agent": {"launch/wire", "launch/hosts", "watch"},
    "launch/wire": {"launch/hosts", "watch"},
    "launch/allocation": {"launch/hosts"},
    "launch/hosts": {"configs", "watch"},  # comments in JSON
    "watch": set(),
}
# (importing module, imported module) of imports against the order: one line of a function each, for files that need it.
LAZY = {
    ("lowtide.engine.config.translate", "lowtide.deepspeed.dialect"),
    ("lowtide.kernels.dispatch", "lowtide.kernels.operators"),  # for compiled code alone
}
# Folders of tests/ whose tests `bin/test core` leaves out.
SATELLITE_TESTS = {"integrations", "launch", "plan", "benchmarks", "bin", "examples"}
SATELLITES = {"deepspeed", "huggingface", "lightning", "ray", "launch", "bin", "engine/plan"}

_SETUPTOOLS = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDER_OF: dict[str, str] = _SETUPTOOLS["package-dir"]
FOLDERS = {folder.split("/")[0] for folder in FOLDER_OF.values()}
PACKAGE_OF = {folder: package for package, folder in FOLDER_OF.items()}
FILES = [path for folder in sorted(FOLDERS) for path in sorted((CHECKOUT / folder).rglob("*.py"))]


def naming(tree: ast.AST) -> list[ast.AST]:
    """What of a file may name a module."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute)]


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return naming(ast.parse(path.read_text(), str(path)))


def module_name(path: Path) -> str:
    """`zero/group.py` -> `lowtide.zero.group`; `integrations/ray/__init__.py` -> `lowtide.ray`."""
    package = PACKAGE_OF[str(path.parent.relative_to(CHECKOUT))]
    return package if path.name == "__init__.py" else f"{package}.{path.stem}"


def imports(path: Path, nodes: Sequence[ast.AST]) -> set[str]:
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


def room_of(module: str) -> str:
    """`lowtide.engine.config.read` -> `engine/config`: the innermost room that holds the module, or a name in it."""
    _, *parts = module.split(".")
    rooms = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((room for room in rooms if room in MAY_IMPORT), "lowtide")


def imported_rooms(path: Path) -> set[str]:
    """The rooms of ours that a file imports at any time, for type checkers too; `lowtide` is the public API."""
    names = imports(path, nodes_of(path))
    ours = {name for name in names if name.split(".")[0] == "lowtide"}
    lazy = {name for importing, name in LAZY if importing == module_name(path)}
    return {room_of(name) for name in ours if not {name, name.rpartition(".")[0]} & lazy}


def is_satellite(name: str) -> bool:
    """Of a module, or a name in one, of the product or of the tests."""
    root, *parts = name.split(".")
    if root != "lowtide":
        return root == "benchmarks" or (root == "tests" and parts[0] in SATELLITE_TESTS)
    return any("/".join(parts).startswith(f"{satellite}/") for satellite in SATELLITES)


def uses_distributed(nodes: Sequence[ast.AST], path: Path) -> bool:
    names = imports(path, nodes)
    if path.parent.name == "checkpoint":  # its file format is that of torch.distributed.checkpoint
        names = {name for name in names if not name.startswith("torch.distributed.checkpoint.")}
    attributes = any(
        isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        for node in nodes
    )
    return attributes or any((name + ".").startswith("torch.distributed.") for name in names)


def name_of(path: Path) -> str:
    return str(path.relative_to(CHECKOUT))


def test_every_package_is_in_the_table() -> None:
    rooms = {package.removeprefix("lowtide.").split(".")[0] for package in FOLDER_OF}
    assert rooms == {room.split("/")[0] for room in MAY_IMPORT}
    assert {str(path.parent.relative_to(CHECKOUT)) for path in FILES} == set(PACKAGE_OF)


def test_imports_point_downward() -> None:
    """One test for all files: a case of its own costs pytest more than what it looks at."""
    wrong = []
    for path in FILES:
        room = room_of(module_name(path))
        if forbidden := imported_rooms(path) - {room} - MAY_IMPORT[room]:
            wrong.append(f"{name_of(path)}: {room}/ may import {sorted(MAY_IMPORT[room])}, found {sorted(forbidden)}")
    assert wrong == []


def test_the_table_itself_points_downward() -> None:
    assert first_cycle({room: set(below) - {room} for room, below in MAY_IMPORT.items()}) is None


def test_no_test_of_the_core_imports_a_satellite() -> None:
    tests = CHECKOUT / "tests"
    found = []
    for path in tests.rglob("*.py"):
        if path.relative_to(tests).parts[0] in SATELLITE_TESTS:
            continue
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [f"{name_of(path)}: {name}" for name in names if is_satellite(f"{name}.")]
    assert found == []


# The files of the core that import a satellite, each in one function; the public API does so at first use.
WAYS = {"engine/planner.py": "planner", "engine/config/translate.py": "deepspeed"}


def test_the_core_imports_a_satellite_by_two_functions_alone() -> None:
    found = {
        name_of(path)
        for path in FILES
        if not is_satellite(f"{module_name(path)}.")
        and any(is_satellite(f"{name}.") for name in imports(path, nodes_of(path)))
    }
    assert found == {*WAYS, "lowtide/__init__.py"}
    for file, function in WAYS.items():
        path, tree = CHECKOUT / file, ast.parse((CHECKOUT / file).read_text())
        (way,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
        inside, whole = (
            [name for name in imports(path, nodes) if is_satellite(f"{name}.")] for nodes in (naming(way), naming(tree))
        )
        assert inside == whole != []


def test_the_script_leaves_out_the_tests_of_satellites() -> None:
    said = re.search(r"satellites='\^tests/\((.*)\)/'", (CHECKOUT / "bin/test").read_text())
    assert said is not None and set(said[1].split("|")) == SATELLITE_TESTS


def test_only_comm_names_torch_distributed() -> None:
    assert [
        name_of(path) for path in FILES if uses_distributed(nodes_of(path), path) and path.parent.name != "comm"
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
    assert uses_distributed(naming(ast.parse(source)), CHECKOUT / "zero/example.py")


@pytest.mark.parametrize("folder", ["launch", "watch"])
def test_what_starts_ranks_imports_no_torch(folder: str) -> None:
    for path in (CHECKOUT / folder).rglob("*.py"):
        roots = {name.split(".")[0] for name in imports(path, nodes_of(path))}
        assert not roots & {"torch", "numpy", "pydantic"}, name_of(path)


def test_each_public_class_has_a_name_of_its_own() -> None:
    """A reader who searches for a class finds one."""
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name_of(path))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


# A reader of FSDP2 or DeepSpeed looks for flush, register, reload, gather: docs/glossary.md has the pairs of verbs.
HOUSE_VERBS = re.compile("_*(settle|take_up|take_back|hear|tell|meet|let_go|go_on|stand_in|be_at_hand)s?(_.*)?")


def test_functions_of_the_core_are_named_by_verbs_of_the_field() -> None:
    folders = ("engine/", "zero/", "comm/", "offload/", "pipe/", "parallel/")
    found = [
        f"{name_of(path)}: {node.name}"
        for path in FILES
        if name_of(path).startswith(folders)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and HOUSE_VERBS.fullmatch(node.name)
    ]
    assert found == []


@pytest.mark.parametrize("name", ["settle", "_take_back", "hears", "go_on", "_tell_listener", "let_go"])
def test_a_verb_of_the_house_is_seen(name: str) -> None:
    assert HOUSE_VERBS.fullmatch(name)


def test_no_import_cycles() -> None:
    modules = {module_name(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        wanted = imports(path, nodes_of(path))
        targets = {name if name in modules else name.rpartition(".")[0] for name in wanted}
        graph[module] = {one for one in (targets & set(modules)) - {module} if (module, one) not in LAZY}
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


PAGES = [
    CHECKOUT / folder / "README.md"
    for folder in sorted({*FOLDERS - {"lowtide"}, *(one for one in PACKAGE_OF if re.fullmatch("engine/[a-z]+", one))})
]
MAP = CHECKOUT / "docs/architecture.md"


def test_every_room_has_a_page_and_the_map_fits() -> None:
    longest = {MAP: 160, **dict.fromkeys(PAGES, 45)}
    lengths = {name_of(page): len(page.read_text().splitlines()) for page in longest}
    assert {name: length for name, length in lengths.items() if length > longest[CHECKOUT / name]} == {}


def test_pages_name_files_that_exist() -> None:
    folders = [CHECKOUT / folder for folder in (*FOLDERS, "tests", "docs", "benchmarks")]
    ends = {
        "/".join(path.parts[start:])
        for folder in folders
        for path in (found.relative_to(CHECKOUT) for found in folder.rglob("*.*"))
        for start in range(len(path.parts))
    }
    wrong = {
        (name_of(page), name)
        for page in (*PAGES, MAP, CHECKOUT / "CONTRIBUTING.md", CHECKOUT / "tests/pretend/README.md")
        for name in re.findall(r"[\w/-]*\w\.(?:py|cpp|h|md|txt|json|sh)\b", page.read_text())
        if "NAME" not in name and name.lstrip("/") not in {*ends, "CONTRIBUTING.md", "CHANGELOG.md"}
    }
    assert wrong == set()
