"""A tensor as torch's own file format: `torch.load` and `zipfile` read it, and the values are where it says."""

import io
import math
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.checkpoint.archive import ArchivePlace, checksum_of, write_tensor

NAMES = """
    float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128
    int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool
"""
SHAPES = [(), (1,), (0,), (7,), (5, 3), (2, 0, 3), (1, 5, 1, 3), (70_000,)]


class Sink(io.BytesIO):
    """What bytes are appended to."""

    @property
    def nbytes(self) -> int:
        return self.tell()


def bytes_of(value: Tensor) -> bytes:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes()


def written(sink: Sink, value: Tensor) -> ArchivePlace:
    return write_tensor(sink, memoryview(bytes_of(value)), value.dtype, tuple(value.shape))


@pytest.mark.parametrize("name", NAMES.split())
def test_each_of_several_in_one_file_is_where_it_is_said_to_be_and_as_torch_saves_it(tmp_path: Path, name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    values = [torch.arange(math.prod(shape)).reshape(shape).to(dtype) for shape in SHAPES]
    sink, again = Sink(b"something before"), Sink()
    end = sink.seek(0, io.SEEK_END)
    places = [written(sink, value) for value in values]
    content = sink.getvalue()
    for value, place in zip(values, places, strict=True):
        assert place.offset == end
        end += place.nbytes
        data = content[place.values_offset : place.values_offset + value.nbytes]
        assert data == bytes_of(value) and checksum_of(memoryview(data)) == place.values_checksum
        part = io.BytesIO(content[place.offset : end])
        with zipfile.ZipFile(part) as archive:
            assert archive.testzip() is None and archive.read("archive/data/0") == data
            assert zlib.crc32(data) == archive.getinfo("archive/data/0").CRC
        part.seek(0)
        found = torch.load(part, weights_only=True)
        assert found.dtype == dtype and found.shape == value.shape and found.is_contiguous()
        assert bytes_of(found) == bytes_of(value) and not found.requires_grad
    assert end == len(content)
    written(again, values[0])
    assert again.getvalue() == content[places[0].offset : places[1].offset]  # the same tensor gives the same bytes
    (tmp_path / "t.pt").write_bytes(again.getvalue())
    assert torch.equal(torch.load(tmp_path / "t.pt", mmap=True, weights_only=True), values[0])
