"""The safetensors format: read and laid out as the library of that name does, and every damage is named."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.checkpoint.chunk_view import ChunkView, TensorInfo
from lowtide.checkpoint.files import INDEX
from lowtide.checkpoint.safetensors_files import CHUNK_BYTES, DTYPE_NAMES, SafetensorsSource, WeightsPlan
from tests.checkpoint.making import read_all
from tests.kit.training import differences, refusal

safetensors_torch = pytest.importorskip("safetensors.torch")


def write(path: Path, **tensors: Tensor) -> None:
    safetensors_torch.save_file(tensors, path)


# -- reading --------------------------------------------------------------------------------------------------------


def test_every_dtype_and_shape_is_read_as_the_library_has_written_it(tmp_path: Path) -> None:
    expected = {name: torch.randint(0, 2, (3, 5)).to(dtype) for dtype, name in DTYPE_NAMES.items()}
    expected |= {"a": torch.randn(5, 123, 3), "c": torch.tensor(1.5), "d": torch.empty(0, 3)}
    write(tmp_path / "all.safetensors", **expected)
    found = read_all(SafetensorsSource(tmp_path / "all.safetensors"))
    kinds = [{name: (value.dtype, value.shape) for name, value in values.items()} for values in (found, expected)]
    assert kinds[0] == kinds[1]
    bits = [{name: value.view(-1).view(torch.uint8) for name, value in values.items()} for values in (found, expected)]
    assert differences(*bits) == []


def test_a_range_costs_its_own_bytes_alone_and_is_cast(tmp_path: Path) -> None:
    values = torch.randn(11, 13)
    write(tmp_path / "x.safetensors", w=values, other=torch.randn(1000))
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
    write(tmp_path / "x.safetensors", w=values)
    found = torch.empty(numel, dtype=torch.int64)  # another dtype: by way of a chunk
    source = SafetensorsSource(tmp_path / "x.safetensors")
    source.read([ChunkView("w", (numel,), 0, found)])
    assert torch.equal(found, values.long()) and source.bytes_read == 4 * numel


def test_a_folder_is_read_by_its_single_file_its_index_or_all_files(tmp_path: Path) -> None:
    a, b = torch.ones(2), torch.ones(3)
    write(tmp_path / "part0.safetensors", a=a)
    write(tmp_path / "part1.safetensors", b=b)
    assert differences(read_all(SafetensorsSource(tmp_path)), {"a": a, "b": b}) == []
    (tmp_path / "adapter.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "part1.safetensors"}}))
    assert differences(read_all(SafetensorsSource(tmp_path)), {"b": b}) == []
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "part0.safetensors"}}))
    assert differences(read_all(SafetensorsSource(str(tmp_path))), {"a": a}) == []
    write(tmp_path / "model.safetensors", c=torch.ones(4))
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
    write(path, w=torch.ones(100))
    source = SafetensorsSource(path)
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(OSError, match=r"x.safetensors' was truncated: it ends at byte \d+, inside a tensor"):
        read_all(source)


W = {"w": torch.ones(1)}
ABSENT_FILE = json.dumps({"weight_map": {"w": "model-1.safetensors"}})
ABSENT_TENSOR = json.dumps({"weight_map": {"w": "x.safetensors", "v": "x.safetensors"}})
FOLDERS: list[tuple[dict[str, str | dict[str, Tensor]], type[Exception], str]] = [
    (
        {"notes.txt": ""},
        FileNotFoundError,
        "expected model.safetensors, one index file or .safetensors files, found notes.txt",
    ),
    (
        {"a.safetensors.index.json": "", "b.safetensors.index.json": ""},
        FileNotFoundError,
        "found a.safetensors.index.json, b.safetensors.index.json",
    ),
    ({INDEX: ABSENT_FILE}, FileNotFoundError, "index.json' names missing files: model-1.safetensors"),
    (
        {INDEX: ABSENT_TENSOR, "x.safetensors": W},
        ValueError,
        "index.json' names tensors that are missing in their files: v (x.safetensors)",
    ),
    (
        {"model-00001-of-00002.safetensors": W},
        FileNotFoundError,
        "an index file beside model-00001-of-00002.safetensors, found none. After an",
    ),
    ({INDEX: '{"weights": 1}'}, ValueError, "expected JSON with a weight_map from tensors to files; KeyError"),
    (
        {"one.safetensors": W, "two.safetensors": W},
        ValueError,
        "expected each tensor once, found w in two.safetensors and in one.safetensors",
    ),
]


@pytest.mark.parametrize(("files", "kind", "text"), FOLDERS, ids=range(len(FOLDERS)))
def test_a_folder_that_cannot_be_meant_is_refused(
    tmp_path: Path, files: dict[str, str | dict[str, Tensor]], kind: type[Exception], text: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content) if isinstance(content, str) else write(tmp_path / name, **content)
    found = refusal(SafetensorsSource, tmp_path, kind=kind)
    assert text in found and str(tmp_path) in found


def test_a_path_of_nothing_is_refused(tmp_path: Path) -> None:
    text = refusal(SafetensorsSource, tmp_path / "absent", kind=FileNotFoundError)
    assert f"expected a safetensors file or a folder of such files, found nothing at '{tmp_path / 'absent'}'" in text


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


def test_a_dtype_that_the_format_lacks_is_named() -> None:
    text = refusal(WeightsPlan.of, {"w": TensorInfo((3,), torch.complex128)}, 10**9)
    assert "safetensors lacks the dtype of w (torch.complex128)" in text
