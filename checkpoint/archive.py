"""Write a tensor in the format of `torch.save`: a zip archive of a small pickle and the values.

`torch.save` copies the values several times and does not say where they are in the file. With a known place a reader
reads the values directly into their destination.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ..offload import Checksum, SequentialFile

MAX_VALUES_BYTES = 4 << 20
"""Limit of an archive. Its checksum covers all values, so a reader of a part must read all of them."""

_FOLDER = "archive"
_CHECKSUM = Checksum(MAX_VALUES_BYTES, seed=0)
_NO_HOOKS: OrderedDict[str, Any] = OrderedDict()
_OLDEST_DATE = (1980, 1, 1, 0, 0, 0)  # a fixed date: equal states give equal files


def write_tensor(
    file: SequentialFile, values: memoryview, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[int, int, int, int]:
    """Append a contiguous tensor. values: its bytes.

    Returns the archive's offset in the file and its bytes, the offset of the values, and their checksum.
    """
    offset = file.nbytes
    # The file has no `tell`, so zipfile counts the archive's offsets from here, whatever is before it in the file.
    with zipfile.ZipFile(file, "w") as archive:
        _write_entry(archive, "data.pkl", _pickled_tensor(dtype, shape))
        _write_entry(archive, "byteorder", b"little")
        _write_entry(archive, "version", b"3\n")
        entry = _write_entry(archive, "data/0", values)
    values_offset = offset + entry.header_offset + len(entry.FileHeader())
    # A checksum of our own: the CRC-32 of the zip takes three times as long to verify.
    return offset, file.nbytes - offset, values_offset, checksum_of(values)


def checksum_of(values: memoryview) -> int:
    """Compute the checksum of bytes. Equal in every process."""
    pieces = (values[low : low + MAX_VALUES_BYTES] for low in range(0, len(values), MAX_VALUES_BYTES))
    return sum(map(_CHECKSUM.of, pieces)) % 2**64


def _write_entry(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(f"{_FOLDER}/{name}", _OLDEST_DATE)
    with archive.open(entry, "w") as file:
        file.write(data)
    return entry


class _TensorPickler(pickle.Pickler):
    """Pickles a tensor without values as torch's call that rebuilds it from the bytes beside the pickle."""

    def persistent_id(self, value: Any) -> Any:
        is_storage = isinstance(value, torch.UntypedStorage)
        return ("storage", torch.UntypedStorage, "0", "cpu", value.nbytes()) if is_storage else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        shape = tuple(value.shape)
        arguments = (value.untyped_storage(), 0, shape, value.stride(), False, _NO_HOOKS, value.dtype)
        # v3 takes the dtype as an argument. v2 needs a typed storage, and newer dtypes have none.
        return torch._utils._rebuild_tensor_v3, arguments


def _pickled_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    # On meta: the values are beside the pickle. Protocol 2 is that of `torch.save`.
    _TensorPickler(buffer, protocol=2).dump(torch.empty(shape, dtype=dtype, device="meta"))
    return buffer.getvalue()
