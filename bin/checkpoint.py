"""`lowtide checkpoint`: list, inspect, verify and import checkpoints."""

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table
from rich.text import Text

from ..checkpoint.checkpoint import MODEL, Checkpoint
from ..checkpoint.files import (
    DCP_METADATA,
    MANIFEST,
    CheckpointError,
    NoCheckpointError,
    check_tag,
    data_name,
    folder_path,
)
from ..checkpoint.folder import CheckpointFolder
from ..checkpoint.index import Manifest
from ..engine.archive.run_state import read_training
from ..engine.config.config import Config
from .arguments import Parser, console_of, numbers, reports, size_of, three_figures

EPILOG = """examples:
  lowtide checkpoint show runs/gpt
  lowtide checkpoint show runs/gpt --verify
  lowtide checkpoint show runs/gpt --tag global_step100
  lowtide checkpoint import runs/with-deepspeed runs/gpt

The exit status is 1 if a checkpoint is damaged or `latest` names a missing checkpoint, and 2 for a wrong command line.
An unfinished checkpoint is no damage.
"""
_NUM_LARGEST = 8
_STYLES = {"complete": "green", "verified": "bold green", "damaged": "bold red", "unfinished": "yellow"}

Advance = Callable[[int], None]
"""Takes the number of bytes verified since the last call."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint on disk. health: "complete", "verified", "damaged" or "unfinished"."""

    tag: str
    health: str
    manifest: Manifest | None = None  # None if it cannot be read
    path: Path | None = None
    reason: str = ""  # the damaged file, and its fault


def main(argv: Sequence[str]) -> int:
    """Run the command; EPILOG lists the exit status."""
    command_line, show, importing = _parsers()
    arguments = command_line.parse_args(argv)
    if arguments.action == "import":
        return _import(arguments, importing)
    if arguments.action is None:
        command_line.print_help()
        return 2
    try:
        folder, tag = _place(folder_path(arguments.folder), arguments.tag)
        if not folder.path.is_dir():
            show.error(f"expected a folder of checkpoints, found no folder {folder.path}")
        entries = find_entries(folder, arguments.verify, tag)
    except (NoCheckpointError, ValueError) as error:
        show.error(str(error))
    if not entries:
        show.error(f"{folder.path}: expected a folder of checkpoints, found no checkpoint in it")
    latest, fault = _latest(folder)
    if tag is None and latest is not None and latest not in [entry.tag for entry in entries if entry.path]:
        fault = f"{folder.path}: `latest` names '{latest}', which is missing; pass another tag to load it"
    console = console_of(160)
    if tag is None:
        console.print(list_table(folder, entries, latest))
    else:
        print_details(console, entries[0], entries[0].tag == latest)
    for entry in entries:
        if entry.reason:
            console.print(Text(f"{entry.tag} is damaged: {entry.reason}", _STYLES["damaged"]), soft_wrap=True)
    if fault:
        console.print(Text(fault, _STYLES["damaged"]), soft_wrap=True)
    elif tag is None and latest is None:
        console.print(Text(f"{folder.path} has no file `latest`; pass a tag to load a checkpoint"), soft_wrap=True)
    return 1 if fault or any(entry.health == "damaged" for entry in entries) else 0


# -- find -----------------------------------------------------------------------------------------------------------


def find_entries(folder: CheckpointFolder, verifies: bool, tag: str | None = None) -> list[FoundCheckpoint]:
    """List the checkpoints of a folder: the oldest first, then undated and unfinished ones.

    verifies: read every value and compare checksums, with a progress bar on a terminal. tag: list this checkpoint
    alone; raises NoCheckpointError if it is missing.
    """
    if tag is not None:
        tags, unfinished = [folder.find(tag)], []
    else:
        known = folder.tags()
        tags, unfinished = known + _undated(folder, known), folder.unfinished()
    entries = [_entry(folder, tag) for tag in tags]
    if verifies:
        with _progress(sum(entry.manifest.nbytes for entry in entries if entry.manifest)) as advance:
            entries = [_verified(entry, advance) if entry.health == "complete" else entry for entry in entries]
    return entries + [FoundCheckpoint(tag, "unfinished") for tag in unfinished]


def _latest(folder: CheckpointFolder) -> tuple[str | None, str]:
    """Return the tag in the file `latest`, and the file's fault."""
    try:
        return folder.latest(), ""
    except CheckpointError as error:
        return None, str(error)


def _undated(folder: CheckpointFolder, known: Sequence[str]) -> list[str]:
    """Return folders that have files of a checkpoint, but no readable manifest."""
    files = (MANIFEST, DCP_METADATA, data_name(0))
    return sorted(
        path.name
        for path in folder.path.iterdir()
        if _is_tag(path.name) and path.name not in known and any(os.path.lexists(path / file) for file in files)
    )


def _is_tag(name: str) -> bool:
    try:
        check_tag(name)
    except ValueError:
        return False
    return True


def _entry(folder: CheckpointFolder, tag: str) -> FoundCheckpoint:
    try:
        checkpoint = folder.open(tag)
        # `open` does not decode this part. A load would, and find the damage.
        read_training(checkpoint.manifest.training)
    except (CheckpointError, OSError, ValueError) as error:
        return _damaged(folder.path / tag, tag, error)
    return FoundCheckpoint(tag, "complete", checkpoint.manifest, checkpoint.path)


def _verified(entry: FoundCheckpoint, advance: Advance) -> FoundCheckpoint:
    assert entry.path is not None
    try:
        Checkpoint(entry.path).verify(advance)
    except (CheckpointError, OSError) as error:
        return _damaged(entry.path, entry.tag, error)
    return replace(entry, health="verified")


def _damaged(path: Path, tag: str, error: Exception) -> FoundCheckpoint:
    manifest = None
    # Even then the table shows steps and sizes, if the manifest can be read.
    with contextlib.suppress(CheckpointError, ValueError):
        found = Manifest.read(path / MANIFEST)
        read_training(found.training)
        manifest = found
    return FoundCheckpoint(tag, "damaged", manifest, path, str(error))


def _place(path: Path, tag: str | None) -> tuple[CheckpointFolder, str | None]:
    """Return the folder of checkpoints and the tag, which is None unless given or `path` is a checkpoint itself."""
    # lexists: a link to a missing file belongs to a damaged checkpoint, not to a folder of checkpoints.
    if tag is None and os.path.lexists(path / MANIFEST):
        # The name is the tag, and a path like `.` or a link has another name.
        path = path.resolve()
        return CheckpointFolder(path.parent), path.name
    return CheckpointFolder(path), tag


# -- print ----------------------------------------------------------------------------------------------------------


def list_table(folder: CheckpointFolder, entries: Sequence[FoundCheckpoint], latest: str | None) -> Table:
    """Make a table with a row for each checkpoint."""
    table = Table(
        "tag",
        *numbers("step"),
        "saved",
        "ranks x stage",
        *numbers("parameters", "size"),
        "health",
        title=Text(f"checkpoints in {folder.path}"),
    )
    for entry in entries:
        is_latest = entry.tag == latest and entry.path is not None
        tag = Text(_printable(entry.tag) + (" (latest)" if is_latest else ""), "bold" if is_latest else "")
        health = Text(entry.health, _STYLES[entry.health])
        table.add_row(tag, *(Text(cell) for cell in _cells(entry.manifest)), health)
    return table


def _cells(manifest: Manifest | None) -> tuple[str, str, str, str, str]:
    if manifest is None:
        return ("-",) * 5
    return (
        str(manifest.step),
        _moment(manifest.saved_at),
        _topology(manifest),
        _count(_num_parameters(manifest)),
        size_of(manifest.nbytes),
    )


def print_details(console: Console, entry: FoundCheckpoint, is_latest: bool) -> None:
    """Print a checkpoint's metadata, its largest tensors and its files."""
    if entry.manifest is None:
        return
    manifest = entry.manifest
    table = Table(title=Text(f"checkpoint {entry.tag}" + (" (latest)" if is_latest else "")), show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _facts(manifest, entry.path).items():
        table.add_row(name, Text(_printable(value)))
    table.add_row("health", Text(entry.health, _STYLES[entry.health]))
    console.print(table)
    console.print(_tensor_table(manifest))
    console.print(_file_table(manifest))


def _facts(manifest: Manifest, path: Path | None) -> dict[str, str]:
    training = read_training(manifest.training)
    groups = training["learning_rates"]["options"]
    buffers = sum(name.startswith(MODEL) for name in manifest.tensors) - len(manifest.compute_dtypes)
    dtypes = sorted({str(dtype).removeprefix("torch.") for dtype in manifest.compute_dtypes.values()})
    return {
        "folder": str(path),
        "step": f"{manifest.step} ({training['num_steps']} updates of the optimizer)",
        "saved": _moment(manifest.saved_at),
        "written by": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()),
        "ranks x stage": _topology(manifest),
        "parameters": f"{_num_parameters(manifest):,} in {len(manifest.compute_dtypes)} tensors, "
        f"computed in {', '.join(dtypes)}; {buffers} buffers"
        + (f"; {len(manifest.left_out)} frozen tensors left out" if manifest.left_out else ""),
        "optimizer": "\n".join([training["optimizer"], *map(_as_text, groups)]),
        "config": "\n".join(_differences(manifest.config, Config.load({}).as_dict())) or "all defaults",
        "size": size_of(manifest.nbytes),
    }


def _differences(values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return a line for each key whose value is not the default."""
    lines = []
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            lines += _differences(value, default, f"{prefix}{key}.")
        elif value != default:
            lines.append(f"{prefix}{key}: {json.dumps(value)}")
    return lines


def _tensor_table(manifest: Manifest) -> Table:
    largest = sorted(manifest.tensors.items(), key=lambda item: -item[1].nbytes)[:_NUM_LARGEST]
    title = f"the largest of {len(manifest.tensors)} tensors"
    table = Table(Column("tensor", overflow="fold"), "shape", "dtype", *numbers("size"), title=title)
    for name, info in largest:
        shape = " x ".join(map(str, info.shape)) or "scalar"
        table.add_row(Text(_printable(name)), shape, str(info.dtype).removeprefix("torch."), size_of(info.nbytes))
    return table


def _file_table(manifest: Manifest) -> Table:
    table = Table("file", *numbers("size"), title=f"{len(manifest.files)} files beside {MANIFEST}")
    for entry in manifest.files:
        table.add_row(Text(entry.name), size_of(entry.nbytes))
    return table


@contextlib.contextmanager
def _progress(total_bytes: int) -> Iterator[Advance]:
    """Yield a function that advances a progress bar; without a terminal it does nothing."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    columns = (TextColumn("verifying"), BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verifying", total=total_bytes)
        yield lambda nbytes: bar.advance(task, nbytes)


def _topology(manifest: Manifest) -> str:
    """Return "4 x stage 3", with replicas "4 x stage 3 (shard size 2, 2 replicas)"."""
    world_size, stage, shard_size, replicas = (
        manifest.topology[key] for key in ("world_size", "stage", "shard_size", "replicas")
    )
    copies = f" (shard size {shard_size}, {replicas} replicas)" if replicas > 1 else ""
    pipeline = manifest.topology.get("pipeline", 1)  # missing in older checkpoints
    stages = f", pipeline {pipeline}" if pipeline > 1 else ""
    return f"{world_size} x stage {stage}{copies}{stages}"


def _num_parameters(manifest: Manifest) -> int:
    return sum(math.prod(manifest.tensors[MODEL + name].shape) for name in manifest.compute_dtypes)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _as_text(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items())


def _printable(text: str) -> str:
    """Escape control characters of text from a file, so that it cannot steer the terminal. Newlines stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _count(number: int) -> str:
    """Return three figures and a unit: 713, 85.5M, 7.5B."""
    return three_figures(number, ("", "K", "M", "B", "T"))


def parser() -> Parser:
    """Return the command line of `lowtide checkpoint`."""
    return _parsers()[0]


@reports("checkpoint import", CheckpointError, OSError)
def _import(arguments: argparse.Namespace, parser: Parser) -> int:
    """Convert a DeepSpeed checkpoint to a lowtide checkpoint, or the output of `zero_to_fp32` to safetensors."""
    from ..deepspeed.checkpoint_import import import_deepspeed, import_weights, is_folder_of_weights

    source = folder_path(arguments.source)
    if not source.is_dir():
        parser.error(f"expected a folder, found no folder {source}")
    try:
        if arguments.tag is None and is_folder_of_weights(source):
            path, notes = import_weights(source, arguments.target), list[str]()
        else:
            path, notes = import_deepspeed(source, arguments.target, arguments.tag)
    except NoCheckpointError as error:
        parser.error(str(error))
    for note in notes:
        print(f"note: {note}")
    print(f"imported to {path}")
    return 0


def _parsers() -> tuple[Parser, Parser, Parser]:
    """Return the command line of `lowtide checkpoint`, and those of its actions `show` and `import`."""
    result = Parser.of("checkpoint", EPILOG)
    actions = result.add_subparsers(dest="action", metavar="ACTION")
    show = actions.add_parser("show", help="list the checkpoints of a folder, or show one in detail")
    show.add_argument("folder", metavar="FOLDER", help="a folder of checkpoints, or a checkpoint in it")
    show.add_argument("--verify", action="store_true", help="read all values and compare their checksums")
    show.add_argument("--tag", help="show this checkpoint alone, in detail")
    importing = actions.add_parser(
        "import",
        help="convert a DeepSpeed checkpoint, or weights that zero_to_fp32 wrote, to lowtide's format",
    )
    importing.add_argument("source", metavar="SOURCE", help="a folder of DeepSpeed checkpoints, or a checkpoint in it")
    importing.add_argument("target", metavar="TARGET", help="a folder for lowtide checkpoints, created if missing")
    importing.add_argument("--tag", help="import this checkpoint (default: the latest)")
    return result, show, importing
