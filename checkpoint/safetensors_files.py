"""Safetensors: the layout of such files, and reading ranges from them.

    8 bytes        header_nbytes                          tensors without gaps
    [header_nbytes][{"name": {"dtype", "shape", ...}, ...}][tensor|tensor|tensor...............]
                                                            ^data_offsets count from here

Source of the format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..offload import allocate_host
from .chunk_view import ChunkView, TensorInfo
from .files import INDEX, SINGLE, check_weights_file

CHUNK_BYTES = 4 << 20  # of values converted at a time
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_NUMBERED = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in a file."""

    file: str
    info: TensorInfo
    offset: int  # bytes from the start of the file


# -- writing: the layout --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilePlan:
    """The layout of a file: header, size, and places of its tensors."""

    name: str
    header: bytes
    nbytes: int
    places: Mapping[str, TensorPlace]

    @classmethod
    def of(cls, name: str, tensors: Mapping[str, TensorInfo]) -> FilePlan:
        """Lay out a file. Wide dtypes come first, so every tensor is aligned to its items, which readers rely on.

        Raises ValueError for a dtype that safetensors does not have.
        """
        unknown = [f"{name} ({info.dtype})" for name, info in tensors.items() if info.dtype not in DTYPE_NAMES]
        if unknown:
            raise ValueError(f"safetensors lacks the dtype of {', '.join(unknown)}. Export with another dtype.")
        order = sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        ends, end = {}, 0
        for key in order:
            info = tensors[key]
            start, end = end, end + info.nbytes
            entries[key] = {
                "dtype": DTYPE_NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [start, end],
            }
            ends[key] = end
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        # Spaces at the end are still JSON. They align the first tensor to 8 bytes in the file.
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        places = {key: TensorPlace(name, tensors[key], len(header) + ends[key] - tensors[key].nbytes) for key in order}
        return cls(name, header, len(header) + end, places)


@dataclass(frozen=True)
class WeightsPlan:
    """The files of a whole model: a single file, or several files with an index."""

    files: tuple[FilePlan, ...]
    index: Mapping[str, Any] | None  # the content of the index file

    @classmethod
    def of(cls, tensors: Mapping[str, TensorInfo], shard_bytes: int) -> WeightsPlan:
        """Lay out the files of a model. tensors: in the order of the model.

        shard_bytes: limit of the tensors in a file; a larger tensor gets a file alone. The files equal those of Hugging
        Face's `save_pretrained` with max_shard_size=shard_bytes. Raises ValueError for a dtype that safetensors does
        not have.
        """
        parts = _parts(tensors, shard_bytes)
        if len(parts) == 1:
            return cls((FilePlan.of(SINGLE, parts[0]),), None)
        names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
        index = {
            "metadata": {"total_size": sum(info.nbytes for info in tensors.values())},
            "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part},
        }
        return cls(tuple(map(FilePlan.of, names, parts)), index)

    @classmethod
    def of_one(cls, name: str, tensors: Mapping[str, TensorInfo]) -> WeightsPlan:
        """Lay out a single file with a given name."""
        return cls((FilePlan.of(name, tensors),), None)

    @property
    def places(self) -> dict[str, TensorPlace]:
        """Every tensor, in the order of the files."""
        return {name: place for file in self.files for name, place in file.places.items()}

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(place.info.nbytes for place in self.places.values())


def _parts(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[dict[str, TensorInfo]]:
    """Group the tensors into files. Source: `split_state_dict_into_shards_factory` of huggingface_hub."""
    parts: list[dict[str, TensorInfo]] = []
    current: dict[str, TensorInfo] = {}
    held = 0
    for name, info in tensors.items():
        # A large tensor gets its file at once, before the open part: Hugging Face's order.
        if info.nbytes > shard_bytes:
            parts.append({name: info})
            continue
        if held + info.nbytes > shard_bytes:
            parts.append(current)
            current, held = {}, 0
        current[name] = info
        held += info.nbytes
    return [*parts, current] if current or not parts else parts


# -- reading --------------------------------------------------------------------------------------------------------


class SafetensorsSource:
    """The tensors of a safetensors file or of a folder of such files. A `TensorSource`.

    Headers are read in the constructor. `read` reads only the requested ranges.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """path: a file, or a folder with model.safetensors, an index file, or any .safetensors files.

        Raises FileNotFoundError if there is none of these, ValueError if a file is damaged.
        """
        self._places = _find(Path(path))
        self.bytes_read = 0

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: place.info for name, place in self._places.items()}

    def read(self, chunk_views: Sequence[ChunkView]) -> None:
        """Fill each view in chunks, cast to its dtype. Raises OSError if a file ends early."""
        by_file: dict[str, list[ChunkView]] = {}
        for chunk_view in chunk_views:
            place = self._places[chunk_view.name]
            assert chunk_view.shape == place.info.shape, chunk_view.name
            by_file.setdefault(place.file, []).append(chunk_view)
        staging = allocate_host(CHUNK_BYTES)  # takes memory only when written
        for file in sorted(by_file):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                for chunk_view in sorted(by_file[file], key=lambda f: (self._places[f.name].offset, f.start)):
                    self._fill(descriptor, chunk_view, staging)
            finally:
                os.close(descriptor)

    def _fill(self, descriptor: int, chunk_view: ChunkView, staging: Tensor) -> None:
        """Read the values of a view. staging: (CHUNK_BYTES,) uint8, for values that cannot be read directly into it."""
        place = self._places[chunk_view.name]
        for part, target, offset in pieces_in(place, chunk_view, staging):
            self.bytes_read += _read_into(descriptor, target, place.file, offset)
            if target is not part:
                part.copy_(target)


def pieces_in(place: TensorPlace, chunk_view: ChunkView, staging: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield each contiguous piece of a view in a file, of at most CHUNK_BYTES: values, the same memory in the form of
    the file, and its offset in the file.

    The second is `staging` if the values have another dtype or are on a device: (CHUNK_BYTES,) uint8.
    """
    dtype, values, done = place.info.dtype, chunk_view.values.detach(), 0
    is_direct = values.dtype == dtype and values.device.type == "cpu"
    step = CHUNK_BYTES // dtype.itemsize
    for start, end in chunk_view.flat_ranges():
        for low in range(start, end, step):
            part = values[done : done + min(step, end - low)]
            done += part.numel()
            yield part, part if is_direct else staging.view(dtype)[: part.numel()], place.offset + low * dtype.itemsize


def _read_into(descriptor: int, target: Tensor, file: str, offset: int) -> int:
    """Fill a CPU tensor with the bytes from `offset`. Returns the number of bytes."""
    memory = target.view(torch.uint8).numpy().data
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if not count:
            raise OSError(f"'{file}' was truncated: it ends at byte {offset + done}, inside a tensor")
        done += count
    return done


def _find(path: Path) -> dict[str, TensorPlace]:
    if path.is_dir():
        return _find_in_folder(path)
    if not path.exists():
        raise FileNotFoundError(f"expected a safetensors file or a folder of such files, found nothing at '{path}'")
    return read_header(path)


def _find_in_folder(folder: Path) -> dict[str, TensorPlace]:
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    indices = [folder / INDEX] if (folder / INDEX).exists() else sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return _find_by_index(indices[0])
    files = sorted(folder.glob("*.safetensors"))
    if len(indices) > 1 or not files:
        found = ", ".join(index.name for index in indices) or ", ".join(sorted(os.listdir(folder))[:10]) or "nothing"
        raise FileNotFoundError(f"'{folder}': expected {SINGLE}, one index file or .safetensors files, found {found}")
    numbered = [file.name for file in files if _NUMBERED.search(file.name)]
    if numbered:
        raise FileNotFoundError(
            f"'{folder}': expected an index file beside {', '.join(numbered)}, found none. After an interrupted export "
            "the files may belong to two models: export again."
        )
    places: dict[str, TensorPlace] = {}
    for file in files:
        header = read_header(file)
        twice = sorted(places.keys() & header.keys())
        if twice:
            others = sorted({Path(places[name].file).name for name in twice})
            raise ValueError(
                f"'{folder}': expected each tensor once, found {', '.join(twice)} in {file.name} and in "
                f"{', '.join(others)}. Give the path of a single file."
            )
        places.update(header)
    return places


def _find_by_index(index: Path) -> dict[str, TensorPlace]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        for file in weight_map.values():
            check_weights_file(file)
        files = dict.fromkeys(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"'{index}': expected JSON with a weight_map from tensors to files; {error!r}") from error
    absent = [file for file in files if not (index.parent / file).is_file()]
    if absent:
        raise FileNotFoundError(f"'{index}' names missing files: {', '.join(absent)}")
    headers = {file: read_header(index.parent / file) for file in files}
    lost = [f"{name} ({file})" for name, file in weight_map.items() if name not in headers[file]]
    if lost:
        raise ValueError(f"'{index}' names tensors that are missing in their files: {', '.join(lost)}")
    return {name: headers[file][name] for name, file in weight_map.items()}


def read_header(file: Path) -> dict[str, TensorPlace]:
    """Read the places of a file's tensors. Raises ValueError with the file name if the header is not sound."""
    # To open a pipe would wait for a writer.
    if not file.is_file():
        raise ValueError(f"'{file}' is not a safetensors file: expected a regular file, found a pipe or a device")
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        # Before the header is read: a damaged length would take any amount of memory.
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"'{file}' ({size} bytes) is not a safetensors file, or is truncated: expected a header length of at "
                f"most {max(size - 8, 0)} in its first 8 bytes, found {length if len(start) == 8 else start!r}"
            )
        text = opened.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        found = {
            name: (str(entry["dtype"]), tuple(entry["shape"]), tuple(entry["data_offsets"]))
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"'{file}' is not a safetensors file: its header cannot be read; {error!r}") from error
    places = {name: _place(file, name, *entry, data_start=8 + length) for name, entry in found.items()}
    _check_size(file, size, places.values())
    return places


def _place(
    file: Path, name: str, dtype_name: str, shape: tuple[Any, ...], offsets: tuple[Any, ...], data_start: int
) -> TensorPlace:
    dtype = _DTYPES.get(dtype_name)
    if dtype is None:
        raise ValueError(f"'{file}': tensor {name} has dtype {dtype_name}; expected one of {', '.join(_DTYPES)}")
    # A negative offset would read before the tensors. JSON may also have 1.0, which is no size.
    if len(offsets) != 2 or not all(isinstance(number, int) and number >= 0 for number in (*shape, *offsets)):
        raise ValueError(
            f"'{file}': tensor {name}: expected whole numbers of at least 0, found shape {list(shape)} and "
            f"data_offsets {' to '.join(map(str, offsets))} in the header"
        )
    start, end = offsets
    info = TensorInfo(shape, dtype)
    if end - start != info.nbytes:
        raise ValueError(
            f"'{file}': tensor {name}: expected {math.prod(shape)} x {dtype.itemsize} = {info.nbytes} bytes, found "
            f"data_offsets {start} to {end} in the header"
        )
    return TensorPlace(str(file), info, data_start + start)


def _check_size(file: Path, size: int, places: Iterable[TensorPlace]) -> None:
    expected = max((place.offset + place.info.nbytes for place in places), default=0)
    if size < expected:
        raise ValueError(f"'{file}' is truncated: expected {expected} bytes by its header, found {size}")
