"""A folder of checkpoints: tags, the latest, what is kept, and what dead jobs have left."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from lowtide.checkpoint.files import CheckpointError, NoCheckpointError
from lowtide.checkpoint.folder import CheckpointFolder, WritingProcess
from lowtide.checkpoint.writer import write_part
from tests.checkpoint.making import NO_OPTIMIZER, halves, manifest_of, read_whole, resign, write


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


def test_the_newest_are_those_saved_last_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for step in range(4):
        monkeypatch.setattr(time, "time", lambda step=step: now - 86400 * step)  # each machine's clock is behind
        target = save(tmp_path, f"step{step}", step, keep_last=2)
        assert target.latest() == f"step{step}" and value_in(target) == step
    assert target.tags() == ["step2", "step3"]


def test_a_training_that_has_gone_back_keeps_what_it_saved_last(tmp_path: Path) -> None:
    for step in (1, 2, 7, 8, 3, 4):  # from 2 it has begun anew
        target = save(tmp_path, f"step{step}", step, keep_last=2, step=step)
    assert target.tags() == ["step3", "step4"]


def test_checkpoints_of_one_moment_go_by_step_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tag, step in (("c", 2), ("b", 2), ("a", 3), ("d", 1)):
        monkeypatch.setattr(CheckpointFolder, "_next_moment", lambda self: 5.0)
        target = save(tmp_path, tag, 0, step=step)
    assert target.tags() == ["d", "b", "c", "a"]


def test_a_damaged_older_one_stops_no_save(tmp_path: Path) -> None:
    target = save(tmp_path, "step0", 0, keep_last=2)
    (tmp_path / "step0" / "__0_0.distcp").write_bytes(b"")
    save(tmp_path, "step1", 1, keep_last=2)
    save(tmp_path, "step2", 2, keep_last=2)
    assert target.tags() == ["step1", "step2"] and value_in(target) == 2


@pytest.mark.parametrize(
    "tag",
    ["", ".", "..", ".a", "a/b", "/a", "a\\b", "latest", " a", "a ", "a\n", "a\nb", "a\0b", "\t", "a" * 201, "\ud800"],
)
def test_a_tag_that_is_no_name_of_a_folder_is_refused(tmp_path: Path, tag: str) -> None:
    target = CheckpointFolder(tmp_path)
    for use in (target.begin, target.find, target.open):
        with pytest.raises(ValueError) as caught:
            use(tag)
        assert str(caught.value) == (
            "tag: expected a folder name of at most 200 bytes, without slashes, without a leading dot, without "
            f"spaces around it, and not 'latest'; found {tag[:100]!r}"
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
    words = "expected a folder with checkpoints, found a checkpoint. Pass its parent '.*' and the tag 'b'"
    with pytest.raises(NoCheckpointError, match=words):
        CheckpointFolder(tmp_path / "b").open()
    with pytest.raises(NoCheckpointError, match="absent: expected a folder with checkpoints, but it does not"):
        CheckpointFolder(tmp_path / "absent").open()
    for content in ("", "\n", None):
        (tmp_path / "latest").unlink()
        if content is not None:
            (tmp_path / "latest").write_text(content)
        with pytest.raises(NoCheckpointError, match=r"found none\. Pass a `tag`: the folder has b, c\."):
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
    code = (
        "from lowtide.checkpoint.folder import WritingProcess; import json;"
        "print(json.dumps(WritingProcess.this().as_dict()))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_what_a_dead_job_was_writing_is_cleared_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    target = save(tmp_path, "a", 1)
    owners = {
        "dead": dead_owner(),
        "living": json.dumps(WritingProcess.this().as_dict()),
        "elsewhere": json.dumps({"host": "another", "pid": 1, "started": 0.0}),
        "odd": json.dumps({"host": ["another"], "pid": {}, "started": None}),
    }
    for tag, owner in owners.items():
        target.saving_folder(tag).mkdir()
        (tmp_path / f".owner-{tag}").write_text(owner)
        (target.saving_folder(tag) / "__0_0.distcp").write_bytes(b"half")
    assert target.unfinished() == ["dead", "elsewhere", "living", "odd"] and target.tags() == ["a"]
    save(tmp_path, "b", 2)
    assert target.unfinished() == ["elsewhere", "living", "odd"]
    assert (target.saving_folder("living") / "__0_0.distcp").exists()
    assert names_in(tmp_path) == {"latest", "a", "b"} | {
        f"{kind}{tag}" for tag in target.unfinished() for kind in (".saving-", ".owner-")
    }


@pytest.mark.parametrize("content", ["", '{"host": "x', dead_owner])
def test_an_owner_that_died_before_it_made_its_folder_is_cleared(
    tmp_path: Path, content: str | Callable[[], str]
) -> None:
    (tmp_path / ".owner-a").write_text(content if isinstance(content, str) else content())
    save(tmp_path, "b", 1)
    assert names_in(tmp_path) == {"latest", "b"}


@pytest.mark.parametrize(("owner", "name"), [(Path, "write_text"), (os, "mkdir")])
def test_no_room_for_the_first_files_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    target = save(tmp_path, "a", 1)
    real = getattr(owner, name)

    def without_room(path: Path, *args: object, **options: object) -> None:
        if name == "write_text":
            real(path, "")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, name, without_room)
    with pytest.raises(OSError, match="No space left on device"):
        target.begin("b")
    assert names_in(tmp_path) == {"latest", "a"}


def test_a_process_of_another_container_is_not_taken_for_dead() -> None:
    """It has a boot in common with this one, but not the numbers of its processes."""
    this = WritingProcess.this()
    boot, numbering = this.host.split()
    assert WritingProcess(this.host, 1 << 30, 0.0).is_dead and not this.is_dead
    assert numbering.startswith("pid:[")
    assert not WritingProcess(f"{boot} pid:[1]", 1 << 30, 0.0).is_dead


def test_the_number_of_a_process_that_was_given_again_is_seen(tmp_path: Path) -> None:
    target = CheckpointFolder(tmp_path)
    path = target.saving_folder("a")
    path.mkdir()
    owner = {**WritingProcess.this().as_dict(), "started": psutil.Process().create_time() - 100}
    (tmp_path / ".owner-a").write_text(json.dumps(owner))
    save(tmp_path, "b", 1)
    assert target.unfinished() == []


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs."""


@pytest.mark.parametrize(("tag", "keep_last"), [("a", None), ("b", 1), ("c", 1)])
def test_whatever_step_a_job_dies_before_the_latest_loads_and_the_next_save_clears_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str, keep_last: int | None
) -> None:
    """Every call that changes the folder in turn is the last one that never happens."""
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: None
    )  # nothing dies here but the process: it would only be slow
    calls: list[tuple[object, str]] = [(Path, "write_text"), (shutil, "rmtree")]
    calls += [(os, name) for name in ("rename", "replace", "fsync", "unlink", "mkdir")]
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
        for owner in path.glob(".owner-*"):
            owner.write_text(json.dumps({**WritingProcess.this().as_dict(), "started": 0.0}))
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
    write_part(target.saving_folder("b"), 0, [], [], None)
    with pytest.raises(ValueError, match=r"expected each element of 'model\.w' once, found element 0 in none"):
        target.commit(manifest_of({"w": torch.ones(5)}, "b", 1), NO_OPTIMIZER, None)
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


# -- neighbours --------------------------------------------------------------------------------------------------------


def spoil_with_bytes(path: Path) -> None:
    (path / "lowtide.json").write_bytes(b"{")


def spoil_with_a_pipe(path: Path) -> None:
    (path / "lowtide.json").unlink()
    os.mkfifo(path / "lowtide.json")


def spoil_with_a_folder(path: Path) -> None:
    (path / "lowtide.json").unlink()
    (path / "lowtide.json").mkdir()


def spoil_with_nesting(path: Path) -> None:
    (path / "lowtide.json").write_text("[" * 100_000)


def spoil_with_an_odd_value(path: Path) -> None:
    resign(path, lambda content: content.update(saved_at="yesterday"))


@pytest.mark.parametrize(
    "spoil", [spoil_with_bytes, spoil_with_a_pipe, spoil_with_a_folder, spoil_with_nesting, spoil_with_an_odd_value]
)
def test_a_damaged_neighbour_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    for step in range(3):
        save(tmp_path, f"step{step}", step)
    spoil(tmp_path / "step0")
    target = save(tmp_path, "step3", 3, keep_last=2)
    assert target.tags() == ["step2", "step3"] and value_in(target) == 3
    assert names_in(tmp_path) == {"latest", "step0", "step2", "step3"}
    assert target.alternative_to("step3") == "step2"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    start = f"a checkpoint in {tmp_path} is damaged and ignored: {tmp_path / 'step0' / 'lowtide.json'}: "
    assert len(said) == 2 and all(line.startswith(start) for line in said)


def test_what_cannot_be_deleted_stays_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, "a", 1)
    save(tmp_path, "b", 2)
    os.rename(tmp_path / "a", tmp_path / ".replaced-a")
    real = os.rename

    def failing(source: Path, target: Path) -> None:
        if {"a", ".replaced-a", "b"} & {Path(source).name}:
            raise OSError(1, "Operation not permitted")
        real(source, target)

    monkeypatch.setattr(os, "rename", failing)
    target = save(tmp_path, "c", 3, keep_last=1)
    assert target.latest() == "c" and value_in(target) == 3 and value_in(target, "b") == 2
    said = [record.getMessage() for record in caplog.records]
    stays = "could not be removed and stays: Operation not permitted"
    assert said.count(f"{tmp_path / '.replaced-a'} {stays}") == 1 and said.count(f"{tmp_path / 'b'} {stays}") == 1


# -- a hostile `latest` ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["../a", "/etc", "..", "a/b", "a\0b", ".saving-a", "x" * 300, "\x1b[2J"])
def test_latest_may_name_nothing_but_a_checkpoint_beside_it(tmp_path: Path, content: str) -> None:
    target = save(tmp_path / "run", "a", 1)
    save(tmp_path, "a", 2)
    (target.path / "latest").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        target.open()
    assert not isinstance(caught.value, NoCheckpointError)
    assert str(caught.value).startswith(f"{target.path / 'latest'}: tag: expected a folder name of at most 200")
    assert str(caught.value).endswith(f"found {content[:100]!r}. Pass the `tag` of a checkpoint.")
    assert save(tmp_path / "run", "b", 3).latest() == "b"


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "pipe"), (os.mkdir, "folder")])
def test_latest_that_is_no_file_is_not_read(tmp_path: Path, make: Callable[[Path], None], kind: str) -> None:
    target = save(tmp_path, "a", 1)
    (tmp_path / "latest").unlink()
    make(tmp_path / "latest")
    with pytest.raises(CheckpointError) as caught:
        target.open()
    assert str(caught.value) == (
        f"{tmp_path / 'latest'}: expected a regular file, found a {kind}. Pass the `tag` of a checkpoint."
    )
    assert value_in(target, "a") == 1


def test_latest_that_is_no_text(tmp_path: Path) -> None:
    target = save(tmp_path, "a", 1)
    (tmp_path / "latest").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="codec can't decode byte 0xff"):
        target.open()


@pytest.mark.parametrize("path", ["", "  "])
def test_a_path_of_nothing_is_not_the_working_directory(path: str) -> None:
    with pytest.raises(ValueError) as caught:
        CheckpointFolder(path)
    assert str(caught.value) == f'expected the path of a folder ("." for the working directory), found {path!r}'
    assert CheckpointFolder(".").path == Path(".")
