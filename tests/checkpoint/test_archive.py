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

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]
SHAPES = [(), (1,), (0,), (7,), (5, 3), (2, 0, 3), (1, 5, 1, 3)]


class Sink(io.BytesIO):
    """What bytes are appended to."""

    @property
    def nbytes(self) -> int:
        return self.tell()


def bytes_of(value: Tensor) -> bytes:
    return bytes(value.reshape(-1).view(torch.uint8).tolist())


def written(sink: Sink, value: Tensor) -> ArchivePlace:
    return write_tensor(sink, memoryview(bytes_of(value)), value.dtype, tuple(value.shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_loads_it_without_pickled_code(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        value = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        sink = Sink()
        place = written(sink, value)
        found = torch.load(io.BytesIO(sink.getvalue()[place.offset :]), weights_only=True)
        assert found.dtype == dtype and found.shape == value.shape and found.is_contiguous()
        assert bytes_of(found) == bytes_of(value)
        assert not found.requires_grad


def test_several_in_one_file_are_where_they_are_said_to_be() -> None:
    values = [
        torch.randn(3, 4),
        torch.randn(1000).bfloat16(),
        torch.tensor(True),
        torch.randn(0, 2),
        torch.randn(70000),
    ]
    sink = Sink(b"something before")
    sink.seek(0, io.SEEK_END)
    places = [written(sink, value) for value in values]
    content = sink.getvalue()
    end = len(b"something before")
    for value, place in zip(values, places, strict=True):
        assert place.offset == end
        end += place.nbytes
        data = content[place.values_offset : place.values_offset + value.nbytes]
        assert data == bytes_of(value) and checksum_of(memoryview(data)) == place.values_checksum
        part = io.BytesIO(content[place.offset : end])
        with zipfile.ZipFile(part) as archive:
            assert archive.testzip() is None
            assert archive.read("archive/data/0") == data
            assert zlib.crc32(data) == archive.getinfo("archive/data/0").CRC
        part.seek(0)
        assert torch.equal(torch.load(part, weights_only=True), value)
    assert end == len(content)


def test_the_same_tensor_gives_the_same_bytes() -> None:
    first, second = Sink(), Sink()
    written(first, torch.arange(5.0))
    written(second, torch.arange(5.0))
    assert first.getvalue() == second.getvalue()


def test_torch_maps_it(tmp_path: Path) -> None:
    sink = Sink()
    written(sink, torch.arange(5.0))
    (tmp_path / "t.pt").write_bytes(sink.getvalue())
    assert torch.load(tmp_path / "t.pt", mmap=True, weights_only=True).tolist() == [0, 1, 2, 3, 4]


def test_a_flipped_byte_is_seen_by_the_zip(tmp_path: Path) -> None:
    sink = Sink()
    place = written(sink, torch.arange(5.0))
    content = bytearray(sink.getvalue())
    content[place.values_offset + 3] ^= 1
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as archive:
        assert archive.testzip() == "archive/data/0"
