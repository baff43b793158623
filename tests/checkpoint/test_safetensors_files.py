"""The safetensors format: read and laid out as the library of that name does, and every damage is named."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.checkpoint.chunk_view import ChunkView, TensorInfo
from lowtide.checkpoint.files import INDEX
from lowtide.checkpoint.safetensors_files import CHUNK_BYTES, DTYPE_NAMES, SafetensorsSource, WeightsPlan

safetensors_torch = pytest.importorskip("safetensors.torch")


def whole(name: str, values: Tensor, shape: tuple[int, ...]) -> ChunkView:
    return ChunkView(name, shape, 0, values.view(-1))


def read_all(source: SafetensorsSource) -> dict[str, Tensor]:
    found = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([whole(name, values, tuple(values.shape)) for name, values in found.items()])
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype
        and found[name].shape == value.shape
        and torch.equal(found[name].view(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
        for name, value in expected.items()
    )


def of_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return (torch.randint(0, 2, shape) if dtype == torch.bool else torch.randint(0, 100, shape)).to(dtype)


def some_tensors() -> dict[str, Tensor]:
    return {"a": torch.randn(5, 123, 3), "b": torch.randn(7).bfloat16(), "c": torch.tensor(1.5), "d": torch.empty(0, 3)}


# -- reading --------------------------------------------------------------------------------------------------------


def test_every_dtype_is_read_as_the_library_has_written_it(tmp_path: Path) -> None:
    expected = {str(dtype): of_dtype(dtype, (3, 5)) for dtype in DTYPE_NAMES}
    safetensors_torch.save_file(expected, tmp_path / "all.safetensors", {"format": "pt"})
    assert same(read_all(SafetensorsSource(tmp_path / "all.safetensors")), expected)


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    expected = some_tensors()
    safetensors_torch.save_file(expected, tmp_path / "x.safetensors")
    assert same(read_all(SafetensorsSource(tmp_path / "x.safetensors")), expected)


def test_a_range_costs_its_own_bytes_alone_and_is_cast(tmp_path: Path) -> None:
    values = torch.randn(11, 13)
    safetensors_torch.save_file({"w": values, "other": torch.randn(1000)}, tmp_path / "x.safetensors")
    source = SafetensorsSource(tmp_path / "x.safetensors")
    assert source.bytes_read == 0
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64), 1):
        part = torch.empty(20, dtype=dtype)
        source.read([ChunkView("w", (11, 13), 17, part)])
        assert torch.equal(part, values.view(-1)[17:37].to(dtype))
        assert source.bytes_read == number * 20 * 4


def test_a_tensor_of_several_chunks_is_read_whole(tmp_path: Path) -> None:
    numel = 2 * CHUNK_BYTES // 4 + 7
    values = torch.arange(numel, dtype=torch.int32)
    safetensors_torch.save_file({"w": values}, tmp_path / "x.safetensors")
    found = torch.empty(numel, dtype=torch.int64)  # another dtype: by way of a chunk
    source = SafetensorsSource(tmp_path / "x.safetensors")
    source.read([whole("w", found, (numel,))])
    assert torch.equal(found, values.long()) and source.bytes_read == 4 * numel


def test_a_folder_is_read_by_its_single_file_its_index_or_all_files(tmp_path: Path) -> None:
    parts = [{"a": torch.ones(2)}, {"b": torch.ones(3)}]
    for number, part in enumerate(parts):
        safetensors_torch.save_file(part, tmp_path / f"part{number}.safetensors")
    assert same(read_all(SafetensorsSource(tmp_path)), parts[0] | parts[1])
    weight_map = {"b": "part1.safetensors"}
    (tmp_path / "adapter.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same(read_all(SafetensorsSource(tmp_path)), parts[1])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "part0.safetensors"}}))
    assert same(read_all(SafetensorsSource(str(tmp_path))), parts[0])
    safetensors_torch.save_file({"c": torch.ones(4)}, tmp_path / "model.safetensors")
    assert list(SafetensorsSource(tmp_path).tensors) == ["c"]


# -- errors ---------------------------------------------------------------------------------------------------------


def header_of(entries: Any) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", r"\(0 bytes\) is not a safetensors file, or is truncated.* found b''"),
        (b"PK\x03\x04" + b"x" * 60, "is not a safetensors file, or is truncated: .*a header length of at most 56"),
        (header_of(entry())[:20], "is not a safetensors file, or is truncated"),
        (header_of(b"{nonsense"), "its header cannot be read; JSONDecodeError"),
        (header_of(17), "its header cannot be read; AttributeError"),
        (header_of({"w": {"dtype": "F32"}}), "its header cannot be read; KeyError"),
        (header_of(entry("F4")), "tensor w has dtype F4; expected one of BF16, F16, F32"),
        (
            header_of(entry(shape=(3,))) + bytes(8),
            r"tensor w: expected 3 x 4 = 12 bytes, found data_offsets 0 to 8 in the header",
        ),
        (header_of(entry(offsets=(8, 0))) + bytes(8), "found data_offsets 8 to 0"),
        (header_of(entry(shape=(-1, -2))) + bytes(8), r"expected whole numbers of at least 0, found shape \[-1, -2\]"),
        (header_of(entry()) + bytes(7), r"is truncated: expected \d+ bytes by its header, found \d+"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=text) as caught:
        SafetensorsSource(path)
    assert f"'{path}'" in str(caught.value)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors_torch.save_file({"w": torch.ones(100)}, path)
    source = SafetensorsSource(path)
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(OSError, match=r"x.safetensors' was truncated: it ends at byte \d+, inside a tensor"):
        read_all(source)


def nothing(folder: Path) -> Path:
    return folder / "absent"


def empty(folder: Path) -> Path:
    (folder / "notes.txt").touch()
    return folder


def two_indices(folder: Path) -> Path:
    for name in ("a", "b"):
        (folder / f"{name}.safetensors.index.json").touch()
    return folder


def absent_file(folder: Path) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    return folder


def absent_tensor(folder: Path) -> Path:
    safetensors_torch.save_file({"w": torch.ones(1)}, folder / "x.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "x.safetensors", "v": "x.safetensors"}}))
    return folder


def no_index(folder: Path) -> Path:
    safetensors_torch.save_file({"w": torch.ones(1)}, folder / "model-00001-of-00002.safetensors")
    return folder


def broken_index(folder: Path) -> Path:
    (folder / INDEX).write_text('{"weights": 1}')
    return folder


def twice(folder: Path) -> Path:
    for name in ("one", "two"):
        safetensors_torch.save_file({"w": torch.ones(1)}, folder / f"{name}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (nothing, FileNotFoundError, "expected a safetensors file or a folder of such files, found nothing at"),
        (empty, FileNotFoundError, "expected model.safetensors, one index file or .safetensors files, found notes.txt"),
        (two_indices, FileNotFoundError, "found a.safetensors.index.json, b.safetensors.index.json"),
        (absent_file, FileNotFoundError, "index.json' names missing files: model-1.safetensors"),
        (absent_tensor, ValueError, r"index.json' names tensors that are missing in their files: v \(x.safetensors\)"),
        (
            no_index,
            FileNotFoundError,
            "an index file beside model-00001-of-00002.safetensors, found none. After an",
        ),
        (broken_index, ValueError, "expected JSON with a weight_map from tensors to files; KeyError"),
        (twice, ValueError, "expected each tensor once, found w in two.safetensors and in one.safetensors"),
    ],
)
def test_a_folder_that_cannot_be_meant_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        SafetensorsSource(make(tmp_path))
    assert str(tmp_path) in str(caught.value)


# -- the layout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [1, 16, 100, 250, 400, 1000, 10**9])
def test_files_hold_what_those_of_hugging_face_hold(shard_bytes: int) -> None:
    hub = pytest.importorskip("huggingface_hub")
    sizes = [3, 40, 2, 5, 100, 1, 7, 7, 30, 0, 60, 2]
    tensors = {f"t{number}": torch.zeros(size) for number, size in enumerate(sizes)}
    expected = hub.split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes
    )
    plan = WeightsPlan.of({name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}, shard_bytes)
    assert {file.name: sorted(file.places) for file in plan.files} == {
        name: sorted(names) for name, names in expected.filename_to_tensors.items()
    }
    if expected.is_sharded:
        assert plan.index is not None
        assert plan.index["weight_map"] == expected.tensor_to_filename
        assert plan.index["metadata"] == {"total_size": plan.total_bytes} == {"total_size": 4 * sum(sizes)}
    else:
        assert plan.index is None


def test_every_tensor_is_aligned_to_its_items() -> None:
    dtypes = [torch.bool, torch.float32, torch.uint8, torch.bfloat16, torch.int64, torch.bool, torch.float64]
    plan = WeightsPlan.of({str(number): TensorInfo((3,), dtype) for number, dtype in enumerate(dtypes)}, 10**9)
    places = plan.places
    assert len(places) == len(dtypes)
    assert all(place.offset % place.info.dtype.itemsize == 0 for place in places.values())


def test_a_dtype_that_the_format_lacks_is_named() -> None:
    with pytest.raises(ValueError, match=r"safetensors lacks the dtype of w \(torch.complex64\)"):
        WeightsPlan.of({"w": TensorInfo((3,), torch.complex64)}, 10**9)
