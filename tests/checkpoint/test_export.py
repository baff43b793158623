"""A folder of exported weights: complete or as it was before, readable by the library, written in small memory."""

import io
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.checkpoint.chunk_view import ChunkView
from lowtide.checkpoint.export import READ_BYTES, UNFINISHED, ExportFolder, export_source, parse_bytes, parse_dtype
from lowtide.checkpoint.safetensors_files import CHUNK_BYTES, SafetensorsSource, WeightsPlan
from tests.kit.ranks import RankPool
from tests.kit.resident import lasting_growth, peak_growth

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


def loaded(folder: Path) -> dict[str, Tensor]:
    """All tensors in the folder's safetensors files, by the library."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors_torch.load_file(file)
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in expected.items()
    )


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [SHARDED, SINGLE])
def test_the_library_reads_what_was_written(tmp_path: Path, shard_bytes: int) -> None:
    expected = tensors()
    plan = export_source(source_of(expected, tmp_path / "in"), tmp_path / "out", shard_bytes=shard_bytes)
    assert same(loaded(tmp_path / "out"), expected)
    assert len(plan.files) == (3 if shard_bytes == SHARDED else 1)
    for file in plan.files:
        with safetensors_torch.safe_open(tmp_path / "out" / file.name, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    if plan.index is not None:
        index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
        assert index == plan.index and index["weight_map"].keys() == expected.keys()


def test_only_floating_point_tensors_are_cast(tmp_path: Path) -> None:
    values = tensors()
    export_source(source_of(values, tmp_path / "in"), tmp_path / "out", dtype=torch.float16)
    expected = {name: value.half() if value.is_floating_point() else value for name, value in values.items()}
    assert same(loaded(tmp_path / "out"), expected)


def test_each_tensor_may_have_a_dtype_of_its_own(tmp_path: Path) -> None:
    values = tensors()
    export_source(source_of(values, tmp_path / "in"), tmp_path / "out", dtypes={"a": torch.bfloat16})
    assert same(loaded(tmp_path / "out"), values | {"a": values["a"].bfloat16()})


def test_further_files_lie_beside_the_weights(tmp_path: Path) -> None:
    source = source_of(tensors(), tmp_path / "in")
    export_source(source, tmp_path / "deep/out", model_files={"config.json": {"width": 3}})
    assert json.loads((tmp_path / "deep/out/config.json").read_text()) == {"width": 3}
    assert names_in(tmp_path / "deep/out") == {"config.json", "model.safetensors"}


def growth_in_export(folder: str) -> tuple[int, int]:
    """Bytes by which memory grew at most, and for good, while 64 MiB in two tensors were written as bfloat16."""
    path = Path(folder)
    safetensors_torch.save_file({name: torch.ones(8 << 20) for name in ("a", "b")}, path / "source.safetensors")
    source = SafetensorsSource(path / "source.safetensors")

    def write() -> None:
        export_source(source, path / "out", dtype=torch.bfloat16)

    return peak_growth(write), lasting_growth(write)


def test_memory_is_that_of_a_few_chunks(ranks: RankPool, tmp_path: Path) -> None:
    peak, lasting = ranks(1, growth_in_export, str(tmp_path), process_group=False)[0]
    # What is written at a time, a chunk as it was read, and what the rest of Python takes.
    assert peak <= READ_BYTES + CHUNK_BYTES + (2 << 20) < 64 << 20
    assert lasting <= 2 << 20


# -- an earlier export ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [SHARDED, 300, SINGLE])
@pytest.mark.parametrize("second", [SHARDED, 300, SINGLE])
def test_nothing_of_an_earlier_export_is_left(tmp_path: Path, first: int, second: int) -> None:
    out, clean = tmp_path / "out", tmp_path / "clean"
    export_source(source_of(tensors(1), tmp_path / "old"), out, shard_bytes=first)
    (out / "model_adapter.safetensors").touch()  # the user's own
    (out / UNFINISHED).mkdir()  # of an export that was killed
    (out / UNFINISHED / "model.safetensors").touch()
    source = source_of(tensors(2), tmp_path / "new")
    export_source(source, out, shard_bytes=second)
    export_source(source, clean, shard_bytes=second)
    (out / "model_adapter.safetensors").unlink()
    assert names_in(out) == names_in(clean)
    assert all((out / name).read_bytes() == (clean / name).read_bytes() for name in names_in(clean))


@pytest.mark.parametrize("first", [SHARDED, SINGLE])
@pytest.mark.parametrize("second", [SHARDED, SINGLE])
@pytest.mark.parametrize("call", ["replace", "unlink"])
def test_an_interrupted_change_is_old_or_new_or_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, second: int, call: str
) -> None:
    old, new = tensors(1), tensors(2)
    old_source, new_source = source_of(old, tmp_path / "old"), source_of(new, tmp_path / "new")
    real: Callable[..., None] = getattr(os, call)
    outcomes = set()
    for allowed in range(5):
        out = tmp_path / f"out{allowed}"
        export_source(old_source, out, shard_bytes=first)
        done: list[object] = []

        def fail_later(
            path: object, *args: object, done: list[object] = done, allowed: int = allowed, **options: int
        ) -> None:
            if Path(str(path)).parent.name.startswith(("out", UNFINISHED)):  # those of `publish`
                if len(done) >= allowed:
                    raise OSError(5, "Input/output error")
                done.append(path)
            real(path, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail_later)
            try:
                export_source(new_source, out, shard_bytes=second)
            except OSError:
                outcome = "failed"
            else:
                outcome = "complete"
        try:
            found = read_all(SafetensorsSource(out))
        except (ValueError, FileNotFoundError):
            outcomes.add("unreadable")
            continue
        is_old, is_new = same(found, old), same(found, new)
        assert is_old or is_new
        assert is_new or outcome == "failed"
        outcomes.add("new" if is_new else "old")
    assert "new" in outcomes


def read_all(source: SafetensorsSource) -> dict[str, Tensor]:
    found = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([ChunkView(name, tuple(values.shape), 0, values.view(-1)) for name, values in found.items()])
    return found


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


def test_a_full_disk_leaves_the_earlier_export(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_source(source_of(tensors(1), tmp_path / "old"), out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    source = source_of({"w": torch.ones(100_000)}, tmp_path / "new")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/out/.unfinished-export/model.safetensors'"):
            export_source(source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file/out"):
        export_source(source_of(tensors(), tmp_path / "in"), tmp_path / "file/out")


def test_a_source_that_fails_is_not_taken_for_the_target(tmp_path: Path) -> None:
    source = source_of(tensors(), tmp_path / "in")
    os.truncate(tmp_path / "in/source.safetensors", 8)
    with pytest.raises(OSError, match=r"source.safetensors' was truncated"):
        export_source(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_discard_keeps_what_others_have_put_there(tmp_path: Path) -> None:
    target = ExportFolder(tmp_path / "out", WeightsPlan.of(source_of(tensors(), tmp_path / "in").tensors, SINGLE))
    target.create({})
    (tmp_path / "out/notes.txt").touch()
    target.discard()
    assert names_in(tmp_path / "out") == {"notes.txt"}


# -- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [(7, 7), (5e9, 5 * 10**9), ("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("1.5KB", 1500), ("2TB", 2 * 10**12)],
)
def test_sizes_are_numbers_or_texts_with_units(value: int | str, expected: int) -> None:
    assert parse_bytes(value) == expected


@pytest.mark.parametrize("value", [0, -1, True, "many", "5GiB", "", "0MB"])
def test_other_sizes_are_refused(value: int | str) -> None:
    with pytest.raises(ValueError, match='shard_bytes: expected a positive number of bytes, or "500MB", "5GB"; found'):
        parse_bytes(value)


def test_dtypes_go_by_name_or_are_those_of_torch() -> None:
    assert parse_dtype("bf16") == parse_dtype(torch.bfloat16) == torch.bfloat16
    assert parse_dtype("fp16") == torch.float16 and parse_dtype("fp32") == torch.float32
    assert parse_dtype(None) is None


@pytest.mark.parametrize("value", ["half", torch.int8, torch.float8_e4m3fn, 16])
def test_other_dtypes_are_refused(value: str | torch.dtype) -> None:
    with pytest.raises(ValueError, match=r'dtype: expected one of "fp32", "bf16", "fp16", "fp64".* or None; found'):
        parse_dtype(value)
