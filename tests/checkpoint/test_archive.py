"""A tensor as torch's own file format: `torch.load` and `zipfile` read it, and the values are where it says."""

import io
import math
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.checkpoint.archive import checksum_of, write_tensor
from lowtide.offload import SequentialFile

NAMES = """
    float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128
    int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool
"""
SHAPES = [(), (1,), (0,), (7,), (5, 3), (2, 0, 3), (1, 5, 1, 3), (70_000,)]


def bytes_of(value: Tensor) -> bytes:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes()


def written(file: SequentialFile, value: Tensor) -> tuple[int, int, int, int]:
    return write_tensor(file, memoryview(bytes_of(value)), value.dtype, tuple(value.shape))


@pytest.mark.parametrize("name", NAMES.split())
def test_each_of_several_in_one_file_is_where_it_is_said_to_be_and_as_torch_saves_it(tmp_path: Path, name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    values = [torch.arange(math.prod(shape)).reshape(shape).to(dtype) for shape in SHAPES]
    with SequentialFile(tmp_path / "all") as file:
        end = file.write(b"something before")
        places = [written(file, value) for value in values]
    content = (tmp_path / "all").read_bytes()
    for value, (offset, nbytes, values_offset, checksum) in zip(values, places, strict=True):
        assert offset == end
        end += nbytes
        data = content[values_offset : values_offset + value.nbytes]
        assert data == bytes_of(value) and checksum_of(memoryview(data)) == checksum
        part = io.BytesIO(content[offset:end])
        with zipfile.ZipFile(part) as archive:
            assert archive.testzip() is None and archive.read("archive/data/0") == data
            assert zlib.crc32(data) == archive.getinfo("archive/data/0").CRC
        part.seek(0)
        found = torch.load(part, weights_only=True)
        assert found.dtype == dtype and found.shape == value.shape and found.is_contiguous()
        assert bytes_of(found) == bytes_of(value) and not found.requires_grad
    assert end == len(content)
    with SequentialFile(tmp_path / "t.pt") as file:
        written(file, values[0])
    same = content[places[0][0] : places[1][0]]
    assert (tmp_path / "t.pt").read_bytes() == same  # the same tensor gives the same bytes
    assert torch.equal(torch.load(tmp_path / "t.pt", mmap=True, weights_only=True), values[0])
