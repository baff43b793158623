"""What a checkpoint may not say, though all of its checksums fit: it is refused before anything is read."""

import copy
import json
import math
import os
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.checkpoint import writer
from lowtide.checkpoint.checkpoint import Checkpoint
from lowtide.checkpoint.chunk_view import ChunkView
from lowtide.checkpoint.files import MANIFEST, CheckpointError, check_model_file, check_weights_file
from tests.checkpoint.making import halves, resign, write

WORDS = "the index files do not fit together"


def tensors() -> dict[str, Tensor]:
    return {"w": torch.arange(20.0).view(4, 5), "n": torch.arange(6), "none": torch.zeros(3, 0), "one": torch.ones(())}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of one rank with several rows for each tensor."""
    monkeypatch.setattr(writer, "MAX_VALUES_BYTES", 32)
    files = {"config.json": {"width": 5}}
    write(tmp_path, tensors(), "a", halves(tensors(), 1), compute_dtypes={"w": torch.float32}, model_files=files)
    return tmp_path / "a"


def refusal(folder: Path) -> str:
    """The error with which it is opened for reading."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder).weights  # noqa: B018
    return str(caught.value)


def rows_of(content: Any, name: str) -> list[list[Any]]:
    return [row for row in content["rows"] if row[0] == f"model.{name}"]


def drop_row(content: Any) -> None:
    content["rows"].remove(rows_of(content, "w")[1])


def repeat_row(content: Any) -> None:
    content["rows"].append(rows_of(content, "w")[0])


def move_row(content: Any) -> None:
    """As many elements as before, but the first twice and others never."""
    first, second = rows_of(content, "w")[:2]
    second[1:] = first[1:]


def cut_end(content: Any) -> None:
    content["rows"].remove(rows_of(content, "w")[-1])


def square(content: Any) -> None:
    """Two by two elements in place of a row of five: the second row has two of them as well."""
    rows_of(content, "w")[0][2] = [2, 2]


def outside(content: Any) -> None:
    rows_of(content, "w")[-1][1] = [9, 0]


def flat(content: Any) -> None:
    rows_of(content, "w")[0][1:3] = [[0], [5]]


def foreign(content: Any) -> None:
    rows_of(content, "w")[0][0] = "model.x\x1b"


def beyond_file(content: Any) -> None:
    rows_of(content, "w")[0][3:6] = [1 << 40, 500, (1 << 40) + 100]


def before_archive(content: Any) -> None:
    rows_of(content, "w")[0][5] = 0
    rows_of(content, "w")[0][3] = 10


def beyond_archive(content: Any) -> None:
    row = rows_of(content, "w")[0]
    row[3:6] = [0, 600, 590]


INDEXES: dict[Callable[[Any], None], str] = {
    drop_row: "expected each element of 'model.w' once, found element 5 in none",
    repeat_row: "expected each element of 'model.w' once, found element 0 in two rows",
    move_row: "expected each element of 'model.w' once, found element 0 in two rows",
    cut_end: "expected each element of 'model.w' once, found element 15 in none",
    square: "expected each element of 'model.w' once, found element 5 in two rows",
    outside: "the index of rank 0 has a box of 'model.w' at (9, 0) of sizes (1, 5), which is no part of its shape",
    flat: "the index of rank 0 has a box of 'model.w' at (0,) of sizes (5,), which is no part of its shape",
    foreign: r"an index has rows of 'model.x\x1b', which the description does not name",
    beyond_file: "the index of rank 0 says that 20 bytes of 'model.w' are at 1099511627876, in an archive from",
    before_archive: "the index of rank 0 says that 20 bytes of 'model.w' are at 0, in an archive from 10 to",
    beyond_archive: "the index of rank 0 says that 20 bytes of 'model.w' are at 590, in an archive from 0 to 600, in a",
}


@pytest.mark.parametrize("change", INDEXES, ids=lambda change: change.__name__)
def test_rows_that_are_not_the_tensors_are_refused(folder: Path, change: Callable[[Any], None]) -> None:
    resign(folder, change, "rank0.json")
    text = refusal(folder)
    assert text.startswith(f"{folder}: {INDEXES[change]}") and text.endswith(WORDS)
    with pytest.raises(CheckpointError):
        Checkpoint(folder).verify()


def test_the_rows_of_a_shape_fit_no_other_of_as_many_elements(folder: Path) -> None:
    resign(folder, lambda content: content["tensors"].update({"model.w": ["float32", [5, 4]]}))
    assert "which is no part of its shape (5, 4)" in refusal(folder)


def put(key: str, value: Any) -> Callable[[Any], None]:
    return lambda content: content.update({key: value})


def files_with(index: int, **changes: Any) -> Callable[[Any], None]:
    return lambda content: content["files"][index].update(changes)


DESCRIPTIONS: dict[str, tuple[Callable[[Any], None], str]] = {
    "tag": (put("tag", "../a"), "tag: expected a folder name"),
    "tag of the terminal": (put("tag", "\x1b[2J"), r"found '\x1b[2J'"),
    "file above": (files_with(0, name="../../etc/passwd"), "found 3 files, of which these differ: [('../../etc"),
    "file elsewhere": (files_with(1, name="/dev/zero"), "('/dev/zero', True)"),
    "file twice": (lambda content: content["files"].append(content["files"][0]), "found 4 files"),
    "no files": (put("files", []), "found 0 files"),
    "file without checksum": (files_with(1, crc32=None), "('rank0.json', False)"),
    "values with checksum": (files_with(0, crc32=5), "('__0_0.distcp', True)"),
    "negative size": (files_with(0, nbytes=-1), "files.0.nbytes: Input should be greater than or equal to 0"),
    "size as text": (files_with(0, nbytes="1"), "files.0.nbytes: Input should be a valid integer, found '1'"),
    "many ranks": (lambda content: content["topology"].update(world_size=1 << 50), f"for {1 << 50} ranks"),
    "no ranks": (lambda content: content["topology"].update(world_size=0), "topology: expected"),
    "no stage": (lambda content: content["topology"].pop("stage"), "topology: expected"),
    "step": (put("step", True), "step: Input should be a valid integer, found True"),
    "moment": (put("saved_at", 1e300), "saved_at: Input should be less than"),
    "no moment": (put("saved_at", float("nan")), "saved_at: "),
    "no config": (put("config", [1]), "config: Input should be a valid dictionary, found [1]"),
    "no tensors": (put("tensors", None), "tensors: Input should be a valid dictionary, found None"),
    "shape": (
        lambda content: content["tensors"].update({"model.w": ["float32", [-4, -5]]}),
        "tensors.model.w.1.0: Input should be greater than or equal to 0, found -4",
    ),
    "dtype": (
        lambda content: content["tensors"].update({"model.w": ["load", [4, 5]]}),
        "'model.w': expected a dtype such as 'float32', found 'load'",
    ),
    "quantized": (lambda content: content["tensors"].update({"model.w": ["qint8", [4, 5]]}), "found 'qint8'"),
    "computed": (put("compute_dtypes", {"x": "float32"}), "expected names of tensors, found 'x'"),
    "alias": (put("aliases", {"x": "y"}), "expected names of tensors, found 'y'"),
    "format": (put("format", "1"), "format: Input should be a valid integer, found '1'"),
    "deep": (
        lambda content: put("config", {"a": json.loads("[" * 200 + "]" * 200)})(content),
        "training, config or model_files: expected at most 100 levels of nesting, found more",
    ),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_descriptions_that_cannot_be_are_refused(folder: Path, name: str) -> None:
    change, words = DESCRIPTIONS[name]
    resign(folder, change)
    text = refusal(folder)
    assert text.startswith(f"{folder / MANIFEST}: expected the description of a checkpoint; ") and words in text
    assert text.isprintable()


BAD_FILES = [
    "../x.json",
    "/x.json",
    "a/b.json",
    "a\\b.json",
    ".json",
    "..",
    "",
    "x",
    "x.json\n",
    "\x1b.json",
    "\0.json",
]


@pytest.mark.parametrize("name", [*BAD_FILES, "model.safetensors.index.json", "x" * 200 + ".json"])
def test_files_beside_an_export_lie_beside_it(folder: Path, name: str) -> None:
    resign(folder, lambda content: content["model_files"].update({name: {}}))
    assert "expected a file name that ends in .json, without slashes and without a leading dot, and not" in refusal(
        folder
    )
    check_model_file("config.json")


@pytest.mark.parametrize("name", ["../x.safetensors", "/x", "a/../../x", "..", "", "x\n", 3, None])
def test_an_index_of_safetensors_names_what_is_below_it(name: object) -> None:
    with pytest.raises(ValueError, match="expected names of files below the folder of the index, found"):
        check_weights_file(name)
    check_weights_file("part/model-00001-of-00002.safetensors")


@pytest.mark.parametrize("name", [MANIFEST, "rank0.json", "__0_0.distcp", ".metadata"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    text = refusal(folder)
    assert str(folder / name) in text and "expected a regular file, found a pipe" in text


def test_what_cannot_be_read_again_is_not_written(tmp_path: Path) -> None:
    refused: tuple[dict[str, Any], ...] = ({"model_files": {"../x.json": {}}}, {"topology": {"world_size": 2}})
    for changes in refused:
        with pytest.raises(ValueError):
            write(tmp_path, tensors(), "a", **changes)
    assert not (tmp_path / "a").exists()


def test_what_a_later_version_adds_is_left_out(folder: Path) -> None:
    resign(folder, put("colour", "red"))
    resign(folder, put("colour", "red"), "rank0.json")
    assert Checkpoint(folder).weights.tensors.keys() == tensors().keys()


# -- mutations of all kinds --------------------------------------------------------------------------------------------

MUTATIONS = 1000
JUNK: list[Any] = [
    None,
    True,
    0,
    1,
    -1,
    2,
    1 << 31,
    1 << 63,
    1 << 64,
    1 << 100,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "a",
    "../..",
    "/dev/zero",
    "\0",
    "\x1b[2J",
    "\ud800",
    "x" * 1000,
    [],
    [[]],
    [0],
    {},
    {"a": 1},
    {"$type": "tensor"},
    json.loads("[" * 150 + "]" * 150),
]


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


def damage(text: bytes, draw: random.Random) -> bytes:
    """As disks do it."""
    place = draw.randrange(len(text))
    way = draw.randrange(3)
    if way == 0:
        return text[:place]
    if way == 1:
        return text[:place] + bytes([draw.randrange(256)]) + text[place + 1 :]
    return text[:place] + text[draw.randrange(len(text)) :]


def test_many_mutations_load_what_was_saved_or_are_refused_and_change_nothing(folder: Path) -> None:
    """One error for all, before any value is read; but for rows of other bytes, which only their checksums tell."""
    intact = {name: (folder / name).read_bytes() for name in (MANIFEST, "rank0.json")}
    expected = {name: value.reshape(-1).view(torch.uint8) for name, value in tensors().items()}
    draw = random.Random(1)
    refused = late = loaded = 0
    for number in range(MUTATIONS):
        for name, text in intact.items():
            (folder / name).write_bytes(text)
        name = draw.choice(list(intact))
        if number % 4 == 0:
            (folder / name).write_bytes(damage(intact[name], draw))
        else:
            resign_mutated(folder, intact, name, draw)
        memory = {name: torch.full_like(value, 77) for name, value in expected.items()}
        try:
            checkpoint = Checkpoint(folder)
            source = checkpoint.weights
            checkpoint.own_state(0)
        except CheckpointError as error:
            refused += 1
            assert str(error).isprintable(), repr(str(error))
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


def resign_mutated(folder: Path, intact: dict[str, bytes], name: str, draw: random.Random) -> None:
    """Several mutations of one file, under checksums that fit."""
    outer = json.loads(intact[MANIFEST])
    content = outer["content"] if name == MANIFEST else json.loads(intact[name])
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        mutate(content, draw)
    if name != MANIFEST:
        text = json.dumps(content).encode()
        (folder / name).write_bytes(text)
        next(e for e in outer["content"]["files"] if e["name"] == name).update(nbytes=len(text), crc32=zlib.crc32(text))
    text = json.dumps(outer["content"], separators=(",", ":")).encode()
    (folder / MANIFEST).write_text(json.dumps({"crc32": zlib.crc32(text), "content": outer["content"]}))
