"""Writing plain weights: a folder of safetensors files that appears as a whole, or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..offload import allocate_host
from .chunk_view import ChunkView, TensorInfo, TensorSource
from .files import INDEX, folder_path
from .safetensors_files import CHUNK_BYTES, WeightsPlan

DEFAULT_SHARD_BYTES = 5_000_000_000
READ_BYTES = 16 << 20  # of a source at a time; a checkpoint is read in whole boxes of 4 MiB, of which two are at edges
UNFINISHED = ".unfinished-export"  # the folder in the folder in which the files grow
_OF_AN_EXPORT = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

Advance = Callable[[int], None]
"""Called with the number of bytes that were written since the last call."""


def parse_bytes(value: int | str) -> int:
    """A size in bytes: a number, or a text such as "500MB" (10^6 bytes each) or "5GB" (10^9)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B)?\s*", str(value), re.IGNORECASE)
    unit = (match[2] or "").upper() if match else ""
    unit = "" if unit == "B" else unit
    count = int(float(match[1]) * _UNITS[unit]) if match else 0
    if isinstance(value, bool) or count < 1:
        raise ValueError(f'shard_bytes: expected a positive number of bytes, or "500MB", "5GB"; found {value!r}')
    return count


def parse_dtype(value: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that floating-point tensors are cast to; None: each keeps its own."""
    dtype = _DTYPES.get(value) if isinstance(value, str) else value
    if (value is None) != (dtype is None) or (dtype is not None and dtype not in _DTYPES.values()):
        names = ", ".join(f'"{name}"' for name in _DTYPES)
        raise ValueError(f"dtype: expected one of {names}, the torch dtype of one, or None; found {value!r}")
    return dtype


def exported_infos(
    tensors: Mapping[str, TensorInfo], dtype: torch.dtype | None, own: Mapping[str, torch.dtype]
) -> dict[str, TensorInfo]:
    """The tensors as they are written: floating-point ones as `dtype`, or where that is None as `own` says."""
    infos = {}
    for name, info in tensors.items():
        wanted = own.get(name, info.dtype) if dtype is None or not info.dtype.is_floating_point else dtype
        infos[name] = TensorInfo(info.shape, wanted)
    return infos


class ExportFolder:
    """A folder that gets new weights.

    create (one process) -> write (all that hold values) -> publish (one process), or discard. The files grow in a
    folder of their own inside; until `publish`, an earlier export beside it stays as it was.
    """

    def __init__(self, folder: str | os.PathLike[str], plan: WeightsPlan) -> None:
        self.folder = folder_path(folder)
        self._unfinished = self.folder / UNFINISHED
        self._plan = plan
        self._places = plan.places
        self._made_folder = False

    def create(self, model_files: Mapping[str, Any]) -> None:
        """Makes the files: headers, and room for the tensors. model_files: further files, name -> JSON content."""
        self._made_folder = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._unfinished, ignore_errors=True)  # of an export that was killed
        self._unfinished.mkdir()
        for file in self._plan.files:
            path = self._unfinished / file.name
            with _named(path), path.open("wb") as opened:
                opened.write(file.header)
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
        """Writes the fragments' values, cast to the dtypes of the plan; they are on the disk when this returns.

        Each is written before the next is asked for. Those of one file should follow each other, since a file is
        synced when another one comes. Raises OSError, with the path of the file.
        """
        staging = allocate_host(CHUNK_BYTES)  # takes memory where it is written to
        for file, group in groupby(chunk_views, lambda chunk_view: self._places[chunk_view.name].file):
            path = self._unfinished / file
            with _opened(path) as descriptor:
                for chunk_view in group:
                    with _named(path):
                        self._write_chunk_view(descriptor, chunk_view, staging, advance)

    def publish(self) -> None:
        """Moves the files to their names, what readers begin with last, and removes what an earlier export left."""
        files = [file.name for file in self._plan.files]
        others = sorted({path.name for path in self._unfinished.iterdir()} - {*files, INDEX})
        last = [] if self._plan.index is None else [INDEX]
        is_model = any(_OF_AN_EXPORT.fullmatch(name) for name in files)
        old = {path.name for path in self.folder.iterdir() if is_model and _OF_AN_EXPORT.fullmatch(path.name)}
        if INDEX in old and old.intersection(files):
            # The old index must not name new files, should this be interrupted.
            (self.folder / INDEX).unlink()
            old.discard(INDEX)
        for name in [*others, *files, *last]:
            os.replace(self._unfinished / name, self.folder / name)
        for name in sorted(old - {*files, *last}, key=lambda name: name != INDEX):
            (self.folder / name).unlink()
        self._unfinished.rmdir()
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def discard(self) -> None:
        """Takes away what `create` and `write` have made."""
        shutil.rmtree(self._unfinished, ignore_errors=True)
        if self._made_folder and self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _write_chunk_view(self, descriptor: int, chunk_view: ChunkView, staging: Tensor, advance: Advance) -> None:
        """staging: (CHUNK_BYTES,) uint8, for what cannot be written as it lies in the fragment."""
        place = self._places[chunk_view.name]
        dtype = place.info.dtype
        values = chunk_view.values.detach()
        is_direct = values.dtype == dtype and values.device.type == "cpu"
        step = CHUNK_BYTES // dtype.itemsize
        done = 0
        for start, end in chunk_view.flat_ranges():
            for low in range(start, end, step):
                chunk = values[done : done + min(step, end - low)]
                done += chunk.numel()
                if not is_direct:
                    chunk = staging.view(dtype)[: chunk.numel()].copy_(chunk)
                _write_all(descriptor, chunk, place.offset + low * dtype.itemsize)
                advance(chunk.nbytes)


def export_source(
    source: TensorSource,
    folder: str | os.PathLike[str],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    model_files: Mapping[str, Any] | None = None,
) -> WeightsPlan:
    """Copies the tensors of files into a folder of safetensors, 16 MiB at a time; what was written.

    dtype: of all floating-point tensors; without it `dtypes` says the dtype of a tensor, and what it does not name
    keeps its own. model_files: further files, name -> JSON content. Raises OSError, and leaves the folder as it was.
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
    """A bar on a terminal while weights are written; elsewhere, or where it is not wanted, nothing."""
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
    """All tensors in the order of the files, in chunks; each is overwritten by the next."""
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
        count = os.pwrite(descriptor, memory, offset)
        memory, offset = memory[count:], offset + count


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor to write to; what was written is synced at the end."""
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
    """Errors of writing carry the path, which the system does not add by itself."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
