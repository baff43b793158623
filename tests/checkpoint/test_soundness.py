"""What a checkpoint may not say, though all of its checksums fit: it is refused before anything is read."""

import copy
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.checkpoint import writer
from lowtide.checkpoint.checkpoint import Checkpoint
from lowtide.checkpoint.chunk_view import ChunkView, TensorSource
from lowtide.checkpoint.files import MANIFEST, CheckpointError, check_model_file, check_weights_file
from tests.checkpoint.making import put, resign, write
from tests.kit.training import refusal

WORDS = "the index files do not fit together"


def tensors() -> dict[str, Tensor]:
    return {"w": torch.arange(20.0).view(4, 5), "n": torch.arange(6), "none": torch.zeros(3, 0), "one": torch.ones(())}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of one rank with several rows for each tensor."""
    monkeypatch.setattr(writer, "MAX_VALUES_BYTES", 32)
    files = {"config.json": {"width": 5}}
    write(tmp_path, tensors(), world_size=1, compute_dtypes={"w": torch.float32}, model_files=files)
    return tmp_path / "a"


@contextmanager
def changed(folder: Path, change: Callable[[Any], None], name: str = MANIFEST) -> Iterator[None]:
    """A file of the checkpoint says something else meanwhile, and all checksums fit."""
    intact = {file: (folder / file).read_bytes() for file in {MANIFEST, name}}
    resign(folder, change, name)
    yield
    for file, content in intact.items():
        (folder / file).write_bytes(content)


def words_of(folder: Path) -> str:
    """The error with which it is opened for reading."""
    return refusal(lambda: Checkpoint(folder).weights, kind=CheckpointError)


def rows_of(content: Any) -> list[list[Any]]:
    return [row for row in content["rows"] if row[0] == "model.w"]


def in_row(number: int, **values: Any) -> Callable[[Any], None]:
    """Puts values into a row of `w`: name, offsets, sizes, and the three of its place."""

    def change(content: Any) -> None:
        row = rows_of(content)[number]
        for key, value in values.items():
            row[["name", "offsets", "sizes", "archive", "nbytes", "values"].index(key)] = value

    return change


def without_row(number: int) -> Callable[[Any], None]:
    return lambda content: content["rows"].remove(rows_of(content)[number])


ONCE = "expected each element of 'model.w' once, found element"
CHUNK, NO_PART = "the index of rank 0 has a chunk of 'model.w' at", "which is no part of its shape"
PLACE = "the index of rank 0 says that 20 bytes of 'model.w' are at"
FOREIGN = r"an index has rows of 'model.x\x1b', which the description does not name"
INDEXES: dict[str, tuple[Callable[[Any], None], str]] = {
    "dropped": (without_row(1), f"{ONCE} 5 in none"),
    "repeated": (lambda content: content["rows"].append(rows_of(content)[0]), f"{ONCE} 0 in two rows"),
    "moved": (in_row(1, offsets=[0, 0]), f"{ONCE} 0 in two rows"),  # as many elements as before
    "cut end": (without_row(-1), f"{ONCE} 15 in none"),
    # Two by two elements in place of a row of five: the second row has two of them as well.
    "square": (in_row(0, sizes=[2, 2]), f"{ONCE} 5 in two rows"),
    "outside": (in_row(-1, offsets=[9, 0]), f"{CHUNK} (9, 0) of sizes (1, 5), {NO_PART}"),
    "flat": (in_row(0, offsets=[0], sizes=[5]), f"{CHUNK} (0,) of sizes (5,), {NO_PART}"),
    "foreign": (in_row(0, name="model.x\x1b"), FOREIGN),
    "beyond file": (
        in_row(0, archive=1 << 40, nbytes=500, values=(1 << 40) + 100),
        f"{PLACE} 1099511627876, in an archive from",
    ),
    "before archive": (in_row(0, archive=10, values=0), f"{PLACE} 0, in an archive from 10 to"),
    "beyond archive": (
        in_row(0, archive=0, nbytes=600, values=590),
        f"{PLACE} 590, in an archive from 0 to 600, in a",
    ),
}


def test_rows_that_are_not_the_tensors_are_refused(folder: Path) -> None:
    for name, (change, words) in INDEXES.items():
        with changed(folder, change, "rank0.json"):
            text = words_of(folder)
            assert text.startswith(f"{folder}: {words}") and text.endswith("the index files do not fit together"), name
            refusal(lambda: Checkpoint(folder).verify(), kind=CheckpointError)


DESCRIPTIONS: dict[str, tuple[Callable[[Any], None], str]] = {
    "tag": (put("tag", "../a"), "tag: expected a folder name"),
    "tag of the terminal": (put("tag", "\x1b[2J"), r"found '\x1b[2J'"),
    "file above": (put("files", 0, "name", "../../etc/passwd"), "found 3 files; these differ: [('../../etc"),
    "file elsewhere": (put("files", 1, "name", "/dev/zero"), "('/dev/zero', True)"),
    "file twice": (lambda content: content["files"].append(content["files"][0]), "found 4 files"),
    "no files": (put("files", []), "found 0 files"),
    "file without checksum": (put("files", 1, "crc32", None), "('rank0.json', False)"),
    "values with checksum": (put("files", 0, "crc32", 5), "('__0_0.distcp', True)"),
    "negative size": (put("files", 0, "nbytes", -1), "files.0.nbytes: Input should be greater than or equal to 0"),
    "size as text": (put("files", 0, "nbytes", "1"), "files.0.nbytes: Input should be a valid integer, found '1'"),
    "many ranks": (put("topology", "world_size", 1 << 50), f"for {1 << 50} ranks"),
    "no ranks": (put("topology", "world_size", 0), "topology: expected"),
    "no stage": (lambda content: content["topology"].pop("stage"), "topology: expected"),
    "step": (put("step", True), "step: Input should be a valid integer, found True"),
    "moment": (put("saved_at", 1e300), "saved_at: Input should be less than"),
    "no moment": (put("saved_at", float("nan")), "saved_at: "),
    "no config": (put("config", [1]), "config: Input should be a valid dictionary, found [1]"),
    "no tensors": (put("tensors", None), "tensors: Input should be a valid dictionary, found None"),
    "shape": (
        put("tensors", "model.w", ["float32", [-4, 5]]),
        "tensors.model.w.shape.0: Input should be greater than or equal to 0, found -4",
    ),
    "dtype": (
        put("tensors", "model.w", ["load", [4, 5]]),
        "tensors.model.w.dtype: expected a dtype such as 'float32', found 'load'",
    ),
    "quantized": (put("tensors", "model.w", ["qint8", [4, 5]]), "found 'qint8'"),
    "computed": (put("compute_dtypes", {"x": "float32"}), "expected names of tensors, found 'x'"),
    "alias": (put("aliases", {"x": "y"}), "expected names of tensors, found 'y'"),
    "format": (put("format", "1"), "format: Input should be a valid integer, found '1'"),
    "deep": (
        put("config", {"a": json.loads("[" * 200 + "]" * 200)}),
        "training, config or model_files: expected at most 100 levels of nesting, found more",
    ),
}


def test_descriptions_that_cannot_be_are_refused(folder: Path) -> None:
    for name, (change, words) in DESCRIPTIONS.items():
        with changed(folder, change):
            text = words_of(folder)
        assert text.startswith(f"{folder / MANIFEST}: expected the description of a checkpoint; "), name
        assert words in text and text.isprintable(), (name, text)


BAD_FILES = ["../x.json", "/x.json", "a\\b.json", ".json", "..", "", "x", "x.json\n", "\x1b.json", "\0.json"]
BAD_FILES += ["model.safetensors.index.json", "x" * 200 + ".json"]
BAD_WEIGHTS: list[object] = ["../x.safetensors", "/x", "a/../../x", "..", "", "x\n", 3, None]


def test_files_beside_an_export_lie_beside_it(folder: Path) -> None:
    words = "expected a file name that ends in .json, without slashes and without a leading dot, and not"
    for name in BAD_FILES:
        with changed(folder, put("model_files", name, {})):
            assert words in words_of(folder), name
    check_model_file("config.json")


def test_an_index_of_safetensors_names_what_is_below_it() -> None:
    for name in BAD_WEIGHTS:
        assert "expected names of files below the folder of the index, found" in refusal(check_weights_file, name), name
    check_weights_file("part/model-00001-of-00002.safetensors")


@pytest.mark.parametrize("name", [MANIFEST, "rank0.json", "__0_0.distcp", ".metadata"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    text = words_of(folder)
    assert str(folder / name) in text and "expected a regular file, found a pipe" in text


def test_what_cannot_be_read_again_is_not_written(tmp_path: Path) -> None:
    refused: tuple[dict[str, Any], ...] = ({"model_files": {"../x.json": {}}}, {"topology": {"world_size": 2}})
    for changes in refused:
        refusal(write, tmp_path, tensors(), **changes)
    assert not (tmp_path / "a").exists()


def test_what_a_later_version_adds_is_left_out(folder: Path) -> None:
    resign(folder, put("colour", "red"))
    resign(folder, put("colour", "red"), "rank0.json")
    assert Checkpoint(folder).weights.tensors.keys() == tensors().keys()


# -- mutations of all kinds --------------------------------------------------------------------------------------------

MUTATIONS = 200
NUMBERS: list[Any] = [True, 0, 1, -1, 2, 1 << 31, 1 << 63, 1 << 64, 1 << 100, 0.5, -0.0, 1e308, math.nan, math.inf]
TEXTS: list[Any] = ["", "a", "../..", "/dev/zero", "\0", "\x1b[2J", "\ud800", "x" * 1000]
NESTED: list[Any] = [[], [[]], [0], {}, {"a": 1}, {"$type": "tensor"}, json.loads("[" * 150 + "]" * 150)]
JUNK: list[Any] = [None, *NUMBERS, *TEXTS, *NESTED]


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key or index in it."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, item in items:
        yield value, key
        yield from places_in(item)


def mutate(content: Any, draw: random.Random) -> None:
    """Changes one place of a JSON value: other values, none, twice, one of elsewhere, a little more or less."""
    places = list(places_in(content))
    (owner, key), (other, other_key) = draw.choice(places), draw.choice(places)
    way = draw.randrange(6)
    if way == 0:
        owner[key] = copy.deepcopy(draw.choice(JUNK))
    elif way == 1:
        del owner[key]
    elif way == 2:
        owner[key] = copy.deepcopy(other[other_key])
    elif way == 3 and isinstance(owner, list):
        owner.insert(draw.randrange(len(owner) + 1), copy.deepcopy(owner[key]))
    elif way == 4 and isinstance(owner, dict):
        owner[str(draw.choice(["", "a", "model.w", "optim.param_groups.0.lr", "../x", other_key]))] = owner.pop(key)
    elif isinstance(owner[key], (int, float)):
        owner[key] += draw.choice([-1, 1, -4, 4, 8, 64])


def mutate_often(content: Any, draw: random.Random) -> None:
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        mutate(content, draw)


def opened(folder: Path) -> TensorSource | CheckpointError:
    try:
        checkpoint = Checkpoint(folder)
        source = checkpoint.weights
        checkpoint.own_state(0)
    except CheckpointError as error:
        return error
    return source


def test_many_mutations_load_what_was_saved_or_are_refused_and_change_nothing(folder: Path) -> None:
    """One error for all, before any value is read; but for rows of other bytes, which only their checksums tell."""
    expected = {name: value.reshape(-1).view(torch.uint8) for name, value in tensors().items()}
    draw = random.Random(1)
    refused = late = loaded = 0
    for _ in range(MUTATIONS):
        memory = {name: torch.full_like(value, 77) for name, value in expected.items()}
        with changed(folder, partial(mutate_often, draw=draw), draw.choice([MANIFEST, "rank0.json"])):
            source = opened(folder)
        if isinstance(source, CheckpointError):
            refused += 1
            assert str(source).isprintable(), repr(str(source))
            continue
        found = {key: info for key, info in source.tensors.items() if key in memory}
        made = (ChunkView(key, info.shape, 0, memory[key].view(info.dtype)) for key, info in found.items())
        chunk_views = [chunk_view for chunk_view in made if chunk_view.numel == math.prod(chunk_view.shape)]
        try:
            source.read(chunk_views)
        except CheckpointError as error:
            late += 1
            assert "the checksum differs" in str(error)
            continue
        loaded += 1
        for chunk_view in chunk_views:
            assert torch.equal(memory[chunk_view.name], expected[chunk_view.name])
    assert refused > 0.5 * MUTATIONS and late > 0 and loaded > 0.05 * MUTATIONS
