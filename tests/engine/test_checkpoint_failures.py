"""What goes wrong while saving or loading: every rank hears of it, what was there stays, and training goes on."""

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowtide.checkpoint import folder as folder_module
from lowtide.checkpoint import index as index_module
from lowtide.checkpoint.files import CheckpointError, NoCheckpointError
from lowtide.checkpoint.folder import CheckpointFolder
from tests.checkpoint.making import resign
from tests.engine.saving import engine_for, load_and_go_on, run_steps, save_and_go_on, saved_tensors
from tests.kit.models import mlp, short_gpt, tiny_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, rank_and_world

GPT = Case(short_gpt, token_batch, 3)
DEEP = Case(tiny_gpt, token_batch, 3)  # in the middle of each of its files are values
INTACT = "What was saved before is as it was, and training can go on."


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def no_room_for_data(rank: int) -> Iterator[None]:
    real = os.pwrite

    def failing(*args: object) -> int:
        raise no_space()

    if rank == 1:
        os.pwrite = failing
    try:
        yield
    finally:
        os.pwrite = real


@contextlib.contextmanager
def no_room_for(owner: object, name: str, on_rank: int, rank: int) -> Iterator[None]:
    real = getattr(owner, name)

    def failing(*args: object) -> None:
        raise no_space()

    if rank == on_rank:
        setattr(owner, name, failing)
    try:
        yield
    finally:
        setattr(owner, name, real)


@contextlib.contextmanager
def limited(rank: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


WAYS: dict[str, tuple[Callable[[int], contextlib.AbstractContextManager[None]], str]] = {
    "data": (no_room_for_data, "rank 1: No space left on device"),
    "index": (
        lambda rank: no_room_for(index_module.RankIndex, "write", 1, rank),
        "rank 1: No space left on device",
    ),
    "description": (
        lambda rank: no_room_for(index_module.Manifest, "write", 0, rank),
        "rank 0: No space left on device",
    ),
    "metadata": (lambda rank: no_room_for(folder_module, "write_durably", 0, rank), "rank 0: No space left on device"),
    "begin": (lambda rank: no_room_for(os, "mkdir", 0, rank), "rank 0: No space left on device"),
    "limit": (limited, "ranks 0, 1: File too large"),
}


def save_without_room(folder: Path, way: str, asynchronous: bool) -> tuple[str, list[float], list[float]]:
    """Trains on after the failure; the text, and the losses before and after a way back."""
    case = GPT.at(3, config={"checkpoint": {"async": asynchronous}})
    engine = engine_for(case, 2)
    run_steps(engine, case, 0, 1)
    engine.save_checkpoint(folder)
    run_steps(engine, case, 1, 1)
    block, text = WAYS[way][0](engine.rank), ""
    with block:
        try:
            engine.save_checkpoint(folder, "global_step1" if way == "data" else "b")
            if asynchronous:
                run_steps(engine, case, 2, 1)
                engine.close()
        except CheckpointError as error:
            text = str(error)
    first = run_steps(engine, case, 2, 2).losses
    engine.save_checkpoint(folder, "c")
    engine.load_checkpoint(folder, "global_step1")
    run_steps(engine, case, 1, 1)
    second = run_steps(engine, case, 2, 2).losses
    engine.close()
    return text, first, second


@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_training_goes_on(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    for text, first, second in ranks(2, save_without_room, tmp_path, way, False):
        tag = "global_step1" if way == "data" else "b"
        assert text == f"saving checkpoint '{tag}' to {tmp_path} failed on {WAYS[way][1]}. {INTACT}"
        assert first == second
    assert {path.name for path in tmp_path.iterdir()} - {"latest.new"} == {"latest", "global_step1", "c"}
    for tag in ("global_step1", "c"):
        CheckpointFolder(tmp_path).open(tag).verify()


@contextlib.contextmanager
def mounted(path: Path, *options: str) -> Iterator[Path]:
    """A small file system of its own; skips the test where this user may not mount one."""
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "none", path], capture_output=True)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def save_until_full(folder: Path) -> tuple[int, str]:
    """The number of checkpoints that found room, and the error of the next."""
    engine = engine_for(GPT, 2)
    run_steps(engine, GPT, 0, 1)
    for number in range(100):
        try:
            engine.save_checkpoint(folder, f"{number}")
        except CheckpointError as error:
            run_steps(engine, GPT, 1, 1)
            engine.close()
            return number, str(error)
    raise AssertionError("the disk was not full")


def test_a_file_system_that_is_really_full(ranks: RankPool, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=2m") as disk:
        outcomes = ranks(2, save_until_full, disk)
        target = CheckpointFolder(disk)
        for number, text in outcomes:
            assert text.startswith(f"saving checkpoint '{number}' to {disk} failed on rank")
            assert ": No space left on device" in text and text.endswith(INTACT)
            assert number > 0 and target.tags() == [f"{tag}" for tag in range(number)]
        assert target.latest() == f"{outcomes[0][0] - 1}"
        target.open().verify()
        assert target.unfinished() == []


def save_where_not_possible(folder: Path) -> str:
    engine = engine_for(GPT, 2)
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, "a")
    run_steps(engine, GPT, 0, 1)
    engine.close()
    return str(caught.value)


def test_a_folder_that_cannot_be_written_is_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder, words in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "below", "Not a directory")):
        for text in ranks(2, save_where_not_possible, folder):
            assert text == f"saving checkpoint 'a' to {folder} failed on rank 0: {words}: {folder}. {INTACT}"


def test_a_file_system_without_permission_to_write(ranks: RankPool, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ro") as disk:
        for text in ranks(2, save_where_not_possible, disk / "new"):
            assert f"failed on rank 0: Read-only file system: {disk / 'new'}. {INTACT}" in text


def save_to_two_places(folder: Path) -> str:
    engine = engine_for(GPT, 2)
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder / str(engine.rank), "a")
    engine.close()
    return str(caught.value)


def test_ranks_that_see_different_folders_are_told_so(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks(2, save_to_two_places, tmp_path):
        assert f"failed on rank 1: {tmp_path}/1/.saving-a is not there; all ranks must see one folder, for" in text
    assert list((tmp_path / "0").iterdir()) == []


# -- loading ---------------------------------------------------------------------------------------------------------


def two_checkpoints(folder: Path) -> None:
    engine = engine_for(DEEP, 2)
    for step in range(2):
        run_steps(engine, DEEP, step, 1)
        engine.save_checkpoint(folder, f"good{step}")
    engine.close()


def load_damaged(folder: Path) -> tuple[str, int]:
    """The error, and the step of the checkpoint that it offers."""
    engine = engine_for(DEEP, rank_and_world()[1])
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    engine.load_checkpoint(folder, tag="good0")
    run_steps(engine, DEEP, engine.global_step, 1)
    engine.close()
    return str(caught.value), engine.global_step


def flip(path: Path) -> None:
    """A byte inside of values: the largest part of each file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_damage_is_named_on_every_rank_and_the_other_checkpoint_offered(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, two_checkpoints, tmp_path)
    good = tmp_path / "good1"
    offer = "The newest other checkpoint is 'good0': load_checkpoint(folder, tag=\"good0\"). "
    unchanged, changed = offer + "Nothing was changed.", offer + "Parameters were read in part: load another checkpoint"
    found = {name: (good / name).read_bytes() for name in ("__1_0.distcp", "rank1.json", "lowtide.json")}
    for name, damage, words, end in (
        ("__1_0.distcp", cut, "the file is truncated", unchanged),
        ("__1_0.distcp", flip, "(the checksum differs): the file is altered", changed),
        ("rank1.json", cut, "the file is truncated", unchanged),
        ("rank1.json", flip, "found it altered (the CRC-32 differs)", unchanged),
        ("lowtide.json", cut, "found it truncated or altered", unchanged),
        ("lowtide.json", flip, "found it truncated or altered", unchanged),
    ):
        damage(good / name)
        for text, step in ranks(2, load_damaged, tmp_path):
            assert text.startswith(f"loading checkpoint 'good1' from {tmp_path} failed on "), text
            assert f"{good / name}: expected " in text and words in text and end in text, text
            assert step == 2
        (good / name).write_bytes(found[name])
    CheckpointFolder(tmp_path).open("good1").verify()


def test_metadata_for_other_readers_is_not_needed_and_verified_on_demand(tmp_path: Path) -> None:
    save_and_go_on(Case(mlp, vector_batch), tmp_path, 1, "a")
    flip(tmp_path / "a" / ".metadata")
    with engine_for(Case(mlp, vector_batch), 1) as engine:
        engine.load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"a/\.metadata: expected the file as written, found it altered"):
        CheckpointFolder(tmp_path).open().verify()


def load_what_is_not_there(folder: Path) -> list[str]:
    engine = engine_for(GPT, 2)
    texts = []
    for tag in (None, "a"):
        with pytest.raises(NoCheckpointError) as caught:
            engine.load_checkpoint(folder, tag)
        texts.append(str(caught.value))
    engine.save_checkpoint(folder / "some", "b")
    run_steps(engine, GPT, 0, 1)  # nobody is still saving
    (folder / "some" / "latest").unlink(missing_ok=True)
    run_steps(engine, GPT, 1, 1)
    for tag in (None, "a"):
        with pytest.raises(NoCheckpointError) as caught:
            engine.load_checkpoint(folder / "some", tag)
        texts.append(str(caught.value))
    engine.close()
    return texts


def test_no_checkpoint_at_all_is_an_error_of_its_own(ranks: RankPool, tmp_path: Path) -> None:
    latest, other = "expected a file `latest` that names a checkpoint, found none", "expected a checkpoint with the tag"
    for texts in ranks(2, load_what_is_not_there, tmp_path):
        assert texts == [
            f"{tmp_path}: {latest} and no checkpoint",
            f"{tmp_path}: {other} 'a', found none",
            f"{tmp_path}/some: {latest}. Pass a `tag`: the folder has b.",
            f"{tmp_path}/some: {other} 'a', found b",
        ]


def test_a_checkpoint_of_an_island_loads_from_its_own_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As earlier versions have saved it: what they had agreed on is left there, with a warning."""
    case = Case(mlp, vector_batch)
    expected = save_and_go_on(case, tmp_path / "island0", 1, "a")
    outer = {"island": 0, "fragments": 2, "arrived": [1]}
    resign(tmp_path / "island0" / "a", lambda content: content["training"].update(outer=outer))
    where = "; the folder has islands, a feature of earlier versions: load a subfolder, such as island0"
    with engine_for(case, 1) as engine, pytest.raises(NoCheckpointError, match=where):
        engine.load_checkpoint(tmp_path)
    assert "of an island" not in caplog.text
    assert load_and_go_on(case, tmp_path / "island0", 1, "a").differences(expected) == []
    assert "the checkpoint is of an island, a feature of earlier versions: its parameters and" in caplog.text


def test_values_survive_a_failed_save_of_the_same_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(mlp, vector_batch)
    before = save_and_go_on(case, tmp_path, 1, "a").restored
    with engine_for(case, 1) as engine:
        monkeypatch.setattr(folder_module, "metadata_bytes", lambda *args: (_ for _ in ()).throw(no_space()))
        with pytest.raises(CheckpointError, match="No space left on device"):
            engine.save_checkpoint(tmp_path, "a")
        monkeypatch.undo()
    after = saved_tensors(tmp_path, "a")
    assert all((after[name] == value).all() for name, value in before.items())
