"""Write plain weights as safetensors files (`ExportFolder`).

The files grow in a subfolder. When all are complete they move to their names, the index last.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..offload import allocate_host
from .chunk_view import ChunkView, TensorInfo, TensorSource
from .files import INDEX, folder_path, sync_folder
from .safetensors_files import CHUNK_BYTES, WeightsPlan, pieces_in

DEFAULT_SHARD_BYTES = 5_000_000_000
READ_BYTES = 16 << 20  # of a source at a time: several of its 4 MiB chunks, since edge chunks are read twice
UNFINISHED = ".unfinished-export"  # the subfolder in which the files grow
_OF_AN_EXPORT = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

Advance = Callable[[int], None]
"""Called with the number of bytes written since the last call."""


def parse_bytes(value: int | str) -> int:
    """Parse a size in bytes: a number, or a text such as "500MB" (10^6 bytes each) or "5GB" (10^9)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B)?\s*", str(value), re.IGNORECASE)
    unit = (match[2] or "").upper() if match else ""
    unit = "" if unit == "B" else unit
    count = int(float(match[1]) * _UNITS[unit]) if match else 0
    if isinstance(value, bool) or count < 1:
        raise ValueError(f'shard_bytes: expected a positive number of bytes, or "500MB", "5GB"; found {value!r}')
    return count


def parse_dtype(value: str | torch.dtype | None) -> torch.dtype | None:
    """Parse the dtype of exported floating-point tensors. None: each tensor keeps its dtype."""
    dtype = DTYPES.get(value) if isinstance(value, str) else value
    if (value is None) != (dtype is None) or (dtype is not None and dtype not in DTYPES.values()):
        names = ", ".join(f'"{name}"' for name in DTYPES)
        raise ValueError(f"dtype: expected one of {names}, a torch dtype of these, or None; found {value!r}")
    return dtype


def exported_infos(
    tensors: Mapping[str, TensorInfo], dtype: torch.dtype | None, own: Mapping[str, torch.dtype]
) -> dict[str, TensorInfo]:
    """Return shapes and dtypes as exported: floating-point tensors as `dtype`, or if that is None as `own` says."""
    infos = {}
    for name, info in tensors.items():
        wanted = own.get(name, info.dtype) if dtype is None or not info.dtype.is_floating_point else dtype
        infos[name] = TensorInfo(info.shape, wanted)
    return infos


class ExportFolder:
    """A folder that gets new weights.

    create (a single process) -> write (each process with values) -> publish (a single process), or discard. The files
    grow in a subfolder, and an earlier export stays unchanged until `publish`.
    """

    def __init__(self, folder: str | os.PathLike[str], plan: WeightsPlan) -> None:
        self.folder = folder_path(folder)
        self._unfinished = self.folder / UNFINISHED
        self._plan = plan
        self._places = plan.places
        self._made_folder = False

    def create(self, model_files: Mapping[str, Any]) -> None:
        """Create the files with headers and room for the tensors. model_files: further files, name -> JSON content."""
        self._made_folder = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._unfinished, ignore_errors=True)  # left by a killed export
        self._unfinished.mkdir()
        for file in self._plan.files:
            path = self._unfinished / file.name
            with _named(path), path.open("wb") as opened:
                opened.write(file.header)
                # The whole length: ranks write their tensors at offsets, in any order.
                opened.truncate(file.nbytes)
        contents = dict(model_files)
        if self._plan.index is not None:
            contents[INDEX] = self._plan.index
        for name, content in contents.items():
            path = self._unfinished / name
            with _named(path), path.open("w", encoding="utf-8") as opened:
                json.dump(content, opened, indent=2)
                opened.write("\n")
                opened.flush()
                os.fsync(opened.fileno())

    def write(self, chunk_views: Iterable[ChunkView], advance: Advance) -> None:
        """Write values, cast to the dtypes of the plan. They are on the disk when this returns.

        Each view is written before the next is requested. Order the views by file, since a file is synced when the next
        begins. Raises OSError with the path of the file.
        """
        staging = allocate_host(CHUNK_BYTES)  # takes memory only when written
        # Only neighbours are grouped: views that are not ordered by file would open and sync a file again and again.
        for file, group in groupby(chunk_views, lambda chunk_view: self._places[chunk_view.name].file):
            path = self._unfinished / file
            with _opened(path) as descriptor:
                for chunk_view in group:
                    place = self._places[chunk_view.name]
                    with _named(path):
                        for values, written, offset in pieces_in(place, chunk_view, staging):
                            if written is not values:
                                written.copy_(values)
                            _write_all(descriptor, written, offset)
                            advance(written.nbytes)

    def publish(self) -> None:
        """Move the files to their names, the index last, and remove files of an earlier export."""
        files = [file.name for file in self._plan.files]
        others = sorted({path.name for path in self._unfinished.iterdir()} - {*files, INDEX})
        last = [] if self._plan.index is None else [INDEX]
        is_model = any(_OF_AN_EXPORT.fullmatch(name) for name in files)
        # A file with another name (`WeightsPlan.of_one`) lies beside a model. The model stays.
        old = {path.name for path in self.folder.iterdir() if is_model and _OF_AN_EXPORT.fullmatch(path.name)}
        # The moves are not one atomic step. If they are interrupted, the old index must not name new files. Without an
        # index, readers refuse numbered files (`_find_in_folder`).
        if INDEX in old and old.intersection(files):
            (self.folder / INDEX).unlink()
            old.discard(INDEX)
        for name in [*others, *files, *last]:
            os.replace(self._unfinished / name, self.folder / name)
        # The index goes before the files that it names.
        for name in sorted(old - {*files, *last}, key=lambda name: name != INDEX):
            (self.folder / name).unlink()
        self._unfinished.rmdir()
        sync_folder(self.folder)

    def discard(self) -> None:
        """Remove everything that `create` and `write` have made."""
        shutil.rmtree(self._unfinished, ignore_errors=True)
        if self._made_folder:
            with suppress(OSError):  # it has other files, or cannot be changed now: the error of the export counts
                self.folder.rmdir()


def export_source(
    source: TensorSource,
    folder: str | os.PathLike[str],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    model_files: Mapping[str, Any] | None = None,
) -> WeightsPlan:
    """Copy tensors from files into a folder of safetensors, 16 MiB at a time. Returns the written plan.

    dtype: of all floating-point tensors. Without it `dtypes` names the dtype of a tensor, and other tensors keep
    theirs. model_files: further files, name -> JSON content. Raises OSError. The folder is
    then unchanged, unless the moves at the end failed.
    """
    infos = exported_infos(source.tensors, dtype, dtypes or {})
    plan = WeightsPlan.of(infos, shard_bytes)
    target = ExportFolder(folder, plan)
    try:
        target.create(model_files or {})
        with progress(plan.total_bytes) as advance:
            target.write(_values(source, plan), advance)
        target.publish()
    except BaseException:
        target.discard()
        raise
    return plan


@contextmanager
def progress(total_bytes: int, wanted: bool = True) -> Iterator[Advance]:
    """Show a progress bar on a terminal while weights are written."""
    if not wanted or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("export"), BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("export", total=total_bytes)
        yield lambda nbytes: bar.advance(task, nbytes)


def _values(source: TensorSource, plan: WeightsPlan) -> Iterator[ChunkView]:
    """Yield all tensors in chunks, in the order of the files. Each chunk overwrites the one before."""
    memory = allocate_host(READ_BYTES)
    for name, place in plan.places.items():
        numel, dtype = math.prod(place.info.shape), place.info.dtype
        step = READ_BYTES // dtype.itemsize
        for low in range(0, numel, step):
            count = min(step, numel - low)
            chunk_view = ChunkView(name, place.info.shape, low, memory[: count * dtype.itemsize].view(dtype))
            source.read([chunk_view])
            yield chunk_view


def _write_all(descriptor: int, chunk: Tensor, offset: int) -> None:
    memory = chunk.view(torch.uint8).numpy().data
    while memory:
        # A write may be short: a signal ends it early, or the disk is full.
        count = os.pwrite(descriptor, memory, offset)
        memory, offset = memory[count:], offset + count


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open for writing. Syncs at the end."""
    with _named(path):
        descriptor = os.open(path, os.O_WRONLY)
    try:
        yield descriptor
        with _named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the path to an OSError of writing."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
