"""A folder of checkpoints: tags, the latest, what is kept, and what dead jobs have left."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from lowtide.checkpoint import folder as folder_module
from lowtide.checkpoint.errors import CheckpointError, NoCheckpointError
from lowtide.checkpoint.folder import CheckpointFolder
from tests.checkpoint.making import NO_OPTIMIZER, halves, manifest_of, read_whole, write


def save(path: Path, tag: str, value: float, **options: object) -> CheckpointFolder:
    tensors = {"w": torch.full((5,), value)}
    return write(path, tensors, tag, halves(tensors, 1), **options)  # type: ignore[arg-type]


def value_in(target: CheckpointFolder, tag: str | None = None) -> float:
    return read_whole(target, "w", tag)[0].item()


def names_in(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_the_latest_is_the_newest(tmp_path: Path) -> None:
    target = CheckpointFolder(tmp_path / "new" / "below")
    assert target.latest() is None and target.tags() == []
    save(target.path, "b", 1)
    save(target.path, "a", 2)
    assert target.latest() == "a" and target.tags() == ["b", "a"]
    assert value_in(target) == 2 and value_in(target, "b") == 1
    assert target.alternative_to("a") == "b" and target.alternative_to("b") == "a"
    assert names_in(target.path) == {"latest", "a", "b"}


def test_a_tag_is_replaced(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        target = save(tmp_path, "a", value)
        save(tmp_path, "b", value + 10)
    assert value_in(target, "a") == 3 and value_in(target) == 13
    assert names_in(tmp_path) == {"latest", "a", "b"} and target.tags() == ["a", "b"]


def test_the_newest_are_kept_and_the_callers_own(tmp_path: Path) -> None:
    target = save(tmp_path, "own1", 0, has_own_tag=True)
    for step in range(5):
        save(tmp_path, f"step{step}", step, keep_last=2)
        save(tmp_path, f"mine{step}", step, keep_last=2, has_own_tag=True)
    assert target.tags() == ["own1", "mine0", "mine1", "mine2", "step3", "mine3", "step4", "mine4"]
    assert names_in(tmp_path) == {"latest", *target.tags()}


def test_the_one_just_saved_is_kept_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    for step in range(4):
        monkeypatch.setattr(time, "time", lambda step=step: now - 3600 * step)  # each machine's clock is behind
        target = save(tmp_path, f"step{step}", step, keep_last=2)
        assert target.latest() == f"step{step}" and value_in(target) == step
    assert set(target.tags()) == {"step0", "step3"}


def test_a_damaged_older_one_stops_no_save(tmp_path: Path) -> None:
    target = save(tmp_path, "step0", 0, keep_last=2)
    (tmp_path / "step0" / "__0_0.distcp").write_bytes(b"")
    save(tmp_path, "step1", 1, keep_last=2)
    save(tmp_path, "step2", 2, keep_last=2)
    assert target.tags() == ["step1", "step2"] and value_in(target) == 2


@pytest.mark.parametrize(
    "tag", ["", ".", "..", ".a", "a/b", "/a", "a\\b", "latest", " a", "a ", "a\n", "a\nb", "a\0b", "\t"]
)
def test_a_tag_that_is_no_name_of_a_folder_is_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ValueError) as caught:
        CheckpointFolder(tmp_path).begin(tag)
    assert str(caught.value) == (
        "tag: expected a name for a folder, without slashes, with no dot in front and no space around, and not "
        f"'latest'; found {tag!r}"
    )
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("tag", ["step 7", "best-loss=0.5", "\u00e9t\u00e9", "-a", "+b", "a.b", "latest2", "#"])
def test_other_tags_are_taken(tmp_path: Path, tag: str) -> None:
    save(tmp_path, tag, 1)
    target = save(tmp_path, tag, 2)
    assert target.latest() == tag and target.tags() == [tag] and value_in(target) == 2


def test_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    target = CheckpointFolder(tmp_path)
    with pytest.raises(NoCheckpointError) as caught:
        target.open()
    assert str(caught.value) == (
        f"{tmp_path}: expected a file `latest` that names a checkpoint, found none and no checkpoint"
    )
    with pytest.raises(NoCheckpointError, match="expected a checkpoint with the tag 'a', found none"):
        target.open("a")
    save(tmp_path, "b", 1)
    save(tmp_path, "c", 2)
    with pytest.raises(NoCheckpointError, match="expected a checkpoint with the tag 'a', found b, c"):
        target.open("a")
    for content in ("", "\n", None):
        (tmp_path / "latest").unlink()
        if content is not None:
            (tmp_path / "latest").write_text(content)
        with pytest.raises(NoCheckpointError, match="found none; there are b, c: name one of them as `tag`"):
            target.open()
    assert target.open("b").tag == "b"


def test_a_regular_file_in_the_way_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert CheckpointFolder(tmp_path / "file").tags() == [] and CheckpointFolder(tmp_path / "file").latest() is None
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises((FileExistsError, NotADirectoryError)):
            CheckpointFolder(path).begin("a")


# -- jobs that died ----------------------------------------------------------------------------------------------------


def dead_owner() -> str:
    """What a process has written that is gone now."""
    code = "from lowtide.checkpoint import folder; import json; print(json.dumps(folder._this_process()))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_what_a_dead_job_was_writing_is_cleared_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    target = save(tmp_path, "a", 1)
    dead, living, other_host = (target.saving_folder(tag) for tag in ("dead", "living", "elsewhere"))
    for path, owner in ((dead, dead_owner()), (living, json.dumps(folder_module._this_process()))):
        path.mkdir()
        (path / "owner.json").write_text(owner)
        (path / "__0_0.distcp").write_bytes(b"half")
    other_host.mkdir()
    (other_host / "owner.json").write_text(json.dumps({"boot": "another", "pid": 1, "started": 0.0}))
    assert target.unfinished() == ["dead", "elsewhere", "living"] and target.tags() == ["a"]
    save(tmp_path, "b", 2)
    assert target.unfinished() == ["elsewhere", "living"]
    assert (living / "__0_0.distcp").exists()


def test_the_number_of_a_process_that_was_given_again_is_seen(tmp_path: Path) -> None:
    target = CheckpointFolder(tmp_path)
    path = target.saving_folder("a")
    path.mkdir()
    owner = {**folder_module._this_process(), "started": psutil.Process().create_time() - 100}
    (path / "owner.json").write_text(json.dumps(owner))
    save(tmp_path, "b", 1)
    assert target.unfinished() == []


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs."""


@pytest.mark.parametrize(("tag", "keep_last"), [("a", None), ("b", None), ("b", 1), ("c", 1)])
def test_whatever_step_a_job_dies_before_the_latest_loads_and_the_next_save_clears_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str, keep_last: int | None
) -> None:
    """Every call that changes the folder in turn is the last one that never happens."""
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: None
    )  # nothing dies here but the process: it would only be slow
    calls = [(os, "rename"), (os, "replace"), (os, "fsync"), (os, "unlink"), (os, "mkdir"), (shutil, "rmtree")]
    save(tmp_path / "before", "a", 1)
    save(tmp_path / "before", "b", 2)
    step = 0
    while True:
        path = shutil.copytree(tmp_path / "before", tmp_path / str(step))
        target = CheckpointFolder(path)
        left = step
        with monkeypatch.context() as patch:
            for module, name in calls:

                def dying(*args: object, _real: object = getattr(module, name), **options: object) -> object:
                    nonlocal left
                    if left == 0:
                        raise Killed
                    left -= 1
                    return _real(*args, **options)  # type: ignore[operator]

                patch.setattr(module, name, dying)
            died = False
            try:
                save(path, tag, 3, keep_last=keep_last)
            except Killed:
                died = True
        latest = target.latest()
        assert latest in ("b", tag)
        target.open().verify()
        found = value_in(target)
        assert found == 3 if not died else found in (2, 3), (step, latest)
        for other in target.tags():
            target.open(other).verify()
        for owner in path.glob(".saving-*/owner.json"):
            owner.write_text(json.dumps({**folder_module._this_process(), "started": 0.0}))
        save(path, "d", 4, keep_last=keep_last)
        kept = {"d"} if keep_last else {"d", "a", "b"} | ({tag} & set(target.tags()))
        assert names_in(path) - {"latest.new"} == {"latest", *kept}, step
        assert value_in(target) == 4
        if not died:
            break
        step += 1
    assert step > 12


def test_an_interrupted_replacement_is_undone_by_the_next_save(tmp_path: Path) -> None:
    target = save(tmp_path, "a", 1)
    os.rename(tmp_path / "a", tmp_path / ".replaced-a")
    assert target.tags() == ["a"] and value_in(target) == 1
    save(tmp_path, "b", 2)
    assert names_in(tmp_path) == {"latest", "a", "b"} and value_in(target, "a") == 1


def test_a_replaced_one_that_was_not_deleted_is(tmp_path: Path) -> None:
    target = save(tmp_path, "a", 1)
    shutil.copytree(tmp_path / "a", tmp_path / ".replaced-a")
    save(tmp_path / "other", "b", 2)
    os.rename(tmp_path / "other" / "b", tmp_path / "b")
    save(tmp_path / "other", "a", 3)
    shutil.rmtree(tmp_path / "a")
    os.rename(tmp_path / "other" / "a", tmp_path / "a")
    assert target.tags() == ["b", "a"] and value_in(target, "a") == 3  # not as old as what it has replaced
    save(tmp_path, "c", 4)
    assert ".replaced-a" not in names_in(tmp_path) and value_in(target, "a") == 3


def test_a_rename_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save(tmp_path, "a", 1)
    real = os.rename

    def failing(source: Path, destination: Path) -> None:
        if ".saving-" in str(source):
            raise OSError(28, "No space left on device")
        real(source, destination)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, "a", 2)
    target.discard("a")
    assert names_in(tmp_path) == {"latest", "a"} and value_in(target) == 1


def test_a_part_that_is_missing_is_not_completed(tmp_path: Path) -> None:
    target = save(tmp_path, "a", 1)
    target.begin("b")
    with pytest.raises(FileNotFoundError):
        target.commit(manifest_of({"w": torch.ones(5)}, "b", 2), NO_OPTIMIZER, None)
    assert target.latest() == "a" and target.tags() == ["a"]
    target.discard("b")
    assert target.unfinished() == []


def test_what_is_not_a_checkpoint_is_left_out(tmp_path: Path) -> None:
    target = save(tmp_path, "a", 1, keep_last=1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "lowtide.json").write_text("{")
    assert target.tags() == ["a"] and target.alternative_to("a") is None
    with pytest.raises(CheckpointError, match="truncated or altered"):
        target.open("broken")
    save(tmp_path, "b", 2, keep_last=1)
    assert names_in(tmp_path) == {"latest", "b", "notes", "file", "broken"}
