"""A folder of exported weights: complete or as it was before, readable by the library, written in small memory."""

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.checkpoint.export import READ_BYTES, UNFINISHED, export_source, parse_bytes, parse_dtype
from lowtide.checkpoint.safetensors_files import CHUNK_BYTES, SafetensorsSource
from tests.checkpoint.making import read_all, read_by_library
from tests.kit.ranks import RankPool
from tests.kit.resident import lasting_growth, peak_growth
from tests.kit.training import differences, refusal

safetensors_torch = pytest.importorskip("safetensors.torch")
SHARDED = 100  # bytes a file, which gives three
SINGLE = 10**9


def tensors(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "b": torch.randn(5, 7),
        "flag": torch.tensor([True, False, True]),
        "a": torch.randn(10, 4),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "steps": torch.tensor([1, 2, 3]),
        "half": torch.randn(9).bfloat16(),
    }


def source_of(values: dict[str, Tensor], folder: Path) -> SafetensorsSource:
    folder.mkdir()
    safetensors_torch.save_file(values, folder / "source.safetensors")
    return SafetensorsSource(folder / "source.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [SHARDED, SINGLE])
def test_the_library_reads_what_was_written(tmp_path: Path, shard_bytes: int) -> None:
    expected, out = tensors(), tmp_path / "deep/out"
    source = source_of(expected, tmp_path / "in")
    plan = export_source(source, out, shard_bytes=shard_bytes, model_files={"config.json": {"width": 3}})
    assert differences(read_by_library(out), expected) == []
    assert len(plan.files) == (3 if shard_bytes == SHARDED else 1)
    for file in plan.files:
        with safetensors_torch.safe_open(out / file.name, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    beside: dict[str, Any] = {"config.json": {"width": 3}}
    if plan.index is not None:
        assert plan.index["weight_map"].keys() == expected.keys()
        beside["model.safetensors.index.json"] = dict(plan.index)
    assert {name: json.loads(text) for name, text in contents(out).items() if name.endswith(".json")} == beside


def test_floating_point_tensors_are_cast_all_or_each(tmp_path: Path) -> None:
    values = tensors()
    source = source_of(values, tmp_path / "in")
    export_source(source, tmp_path / "all", dtype=torch.float16)
    halves = {name: value.half() if value.is_floating_point() else value for name, value in values.items()}
    assert differences(read_by_library(tmp_path / "all"), halves) == []
    export_source(source, tmp_path / "one", dtypes={"a": torch.bfloat16})
    assert differences(read_by_library(tmp_path / "one"), values | {"a": values["a"].bfloat16()}) == []


def growth_in_export(folder: str) -> tuple[int, int]:
    """Bytes by which memory grew at most, and for good, while 64 MiB in two tensors were written as bfloat16."""
    source = source_of({name: torch.ones(8 << 20) for name in ("a", "b")}, Path(folder) / "in")

    def write() -> None:
        export_source(source, Path(folder) / "out", dtype=torch.bfloat16)

    return peak_growth(write), lasting_growth(write)


def test_memory_is_that_of_a_few_chunks(ranks: RankPool, tmp_path: Path) -> None:
    peak, lasting = ranks(1, growth_in_export, str(tmp_path), process_group=False)[0]
    # What is written at a time, a chunk as it was read, and what the rest of Python takes.
    assert peak <= READ_BYTES + CHUNK_BYTES + (2 << 20) < 64 << 20
    assert lasting <= 2 << 20


# -- an earlier export ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(SHARDED, 300), (SHARDED, SINGLE), (SINGLE, SHARDED)])
def test_nothing_of_an_earlier_export_is_left(tmp_path: Path, first: int, second: int) -> None:
    out, clean = tmp_path / "out", tmp_path / "clean"
    export_source(source_of(tensors(1), tmp_path / "old"), out, shard_bytes=first)
    (out / "model_adapter.safetensors").touch()  # the user's own
    (out / UNFINISHED).mkdir()  # of an export that was killed
    (out / UNFINISHED / "model.safetensors").touch()
    source = source_of(tensors(2), tmp_path / "new")
    for folder in (out, clean):
        export_source(source, folder, shard_bytes=second)
    assert contents(out) == {**contents(clean), "model_adapter.safetensors": b""}


@pytest.mark.parametrize("first", [SHARDED, SINGLE])
@pytest.mark.parametrize("second", [SHARDED, SINGLE])
@pytest.mark.parametrize("call", ["replace", "unlink"])
def test_an_interrupted_change_is_old_or_new_or_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, second: int, call: str
) -> None:
    old, new = tensors(1), tensors(2)
    old_source, new_source = source_of(old, tmp_path / "old"), source_of(new, tmp_path / "new")
    real: Callable[..., None] = getattr(os, call)
    left = 0

    def fail_later(path: Path, *args: object, **options: int) -> None:
        nonlocal left
        if Path(path).parent.name.startswith(("out", UNFINISHED)):  # those of `publish`
            if left == 0:
                raise OSError(5, "Input/output error")
            left -= 1
        real(path, *args, **options)

    became_new = False
    for allowed in range(5):
        out, has_failed = tmp_path / f"out{allowed}", False
        export_source(old_source, out, shard_bytes=first)
        left = allowed
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail_later)
            try:
                export_source(new_source, out, shard_bytes=second)
            except OSError:
                has_failed = True
        try:
            found = read_all(SafetensorsSource(out))
        except (ValueError, FileNotFoundError):
            continue
        is_new = differences(found, new) == []
        assert is_new or (has_failed and differences(found, old) == [])
        became_new |= is_new
    assert became_new


# -- progress -------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_shown"), [(Terminal, True), (io.StringIO, False)])
def test_progress_is_shown_on_a_terminal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], is_shown: bool
) -> None:
    source = source_of({"w": torch.ones(1000, 100)}, tmp_path / "in")
    monkeypatch.setenv("TERM", "xterm")
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    export_source(source, tmp_path / "out")
    text = stderr.getvalue()
    assert ("export" in text and "400.0/400.0 kB" in text) if is_shown else text == ""


# -- errors ---------------------------------------------------------------------------------------------------------


def test_a_source_that_fails_is_not_taken_for_the_target(tmp_path: Path) -> None:
    source = source_of(tensors(), tmp_path / "in")
    (tmp_path / "file").touch()
    export_source(source_of(tensors(1), tmp_path / "old"), tmp_path / "out")
    (tmp_path / "out/notes.txt").touch()  # somebody else's
    before = contents(tmp_path / "out")
    assert "file/out" in refusal(export_source, source, tmp_path / "file/out", kind=NotADirectoryError)
    os.truncate(tmp_path / "in/source.safetensors", 8)
    assert "source.safetensors' was truncated" in refusal(export_source, source, tmp_path / "out", kind=OSError)
    assert contents(tmp_path / "out") == before


# -- settings -------------------------------------------------------------------------------------------------------


def test_settings_are_numbers_or_names() -> None:
    sizes: dict[Any, int] = {
        7: 7,
        5e9: 5 * 10**9,
        "5GB": 5 * 10**9,
        "500 mb": 5 * 10**8,
        "1.5KB": 1500,
        "2TB": 2 * 10**12,
    }
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtypes: dict[Any, torch.dtype] = {**names, torch.bfloat16: torch.bfloat16}
    assert {value: parse_bytes(value) for value in sizes} == sizes
    assert {value: parse_dtype(value) for value in dtypes} == dtypes and parse_dtype(None) is None


SIZE = 'shard_bytes: expected a positive number of bytes, or "500MB", "5GB"; found'
DTYPE = 'dtype: expected one of "fp32", "bf16", "fp16", "fp64", a torch dtype of these, or None; found'


def test_other_settings_are_refused() -> None:
    for size in (0, -1, True, "many", "5GiB", "", "0MB"):
        assert refusal(parse_bytes, size) == f"{SIZE} {size!r}"
    for dtype in ("half", torch.int8, torch.float8_e4m3fn, 16):
        assert refusal(parse_dtype, dtype) == f"{DTYPE} {dtype!r}"
