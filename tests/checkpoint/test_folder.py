"""A folder of checkpoints: tags, the latest, what is kept, and what dead jobs have left."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from lowtide.checkpoint.chunk_view import ChunkView
from lowtide.checkpoint.dcp import STEP
from lowtide.checkpoint.files import CheckpointError, NoCheckpointError, write_durably
from lowtide.checkpoint.folder import CheckpointFolder, WritingProcess
from lowtide.checkpoint.writer import write_part
from tests.checkpoint.making import NO_OPTIMIZER, manifest_of, read_all, resign, write
from tests.kit.training import refusal


def save(path: Path, tag: str, value: float, **options: Any) -> CheckpointFolder:
    return write(path, {"w": torch.full((5,), value)}, tag, world_size=1, **options)


def value_in(target: CheckpointFolder, tag: str | None = None) -> float:
    return read_all(target.open(tag).weights)["w"][0].item()


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


def test_a_disk_that_is_full_for_latest_leaves_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save(tmp_path, "a", 1)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_durably(tmp_path / "latest", b"b\n")
    assert target.latest() == "a" and names_in(tmp_path) == {"latest", "a"}


def test_two_runs_may_name_their_latest_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, sync = save(tmp_path, "a", 1), save(tmp_path, "b", 1), os.fsync

    def other_run(descriptor: int) -> None:
        monkeypatch.undo()
        second._write_latest("b")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", other_run)
    first._write_latest("a")
    assert first.latest() == "a" and names_in(tmp_path) == {"latest", "a", "b"}


def test_the_newest_are_kept_and_the_callers_own(tmp_path: Path) -> None:
    target = save(tmp_path, "own1", 0, has_own_tag=True)
    for step in range(5):
        save(tmp_path, f"step{step}", step, keep_last=2)
        save(tmp_path, f"mine{step}", step, keep_last=2, has_own_tag=True)
    assert target.tags() == ["own1", "mine0", "mine1", "mine2", "step3", "mine3", "step4", "mine4"]
    assert names_in(tmp_path) == {"latest", *target.tags()}


def test_the_checkpoint_that_a_restart_loads_is_kept(tmp_path: Path) -> None:
    for step in range(4):
        target = save(tmp_path, f"step{step}", step, keep_last=1, is_latest=step == 0)
    assert target.tags() == ["step0", "step3"] and value_in(target) == 0


def test_the_newest_are_those_saved_last_whatever_clocks_and_steps_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for number, step in enumerate((1, 2, 7, 8, 3, 4)):  # from 2 it has begun anew
        monkeypatch.setattr(time, "time", lambda number=number: now - 86400 * number)  # each clock is behind
        target = save(tmp_path, f"step{step}", step, keep_last=2, step=step)
        assert target.latest() == f"step{step}" and value_in(target) == step
    assert target.tags() == ["step3", "step4"]


BAD_TAGS = ["", ".", "..", ".a", "a/b", "/a", "a\\b", "latest", " a", "a ", "a\n", "a\nb", "a\0b", "\t", "a" * 201]
GOOD_TAGS = ["step 7", "best-loss=0.5", "\u00e9t\u00e9", "-a", "+b", "a.b", "latest2", "#"]


def test_a_tag_that_is_no_name_of_a_folder_is_refused(tmp_path: Path) -> None:
    target = CheckpointFolder(tmp_path)
    uses: list[Callable[[str], object]] = [target.begin, target.find, target.open]
    for tag, use in product([*BAD_TAGS, "\ud800"], uses):
        assert refusal(use, tag) == (
            "tag: expected a folder name of at most 200 bytes, without slashes, without a leading dot, without "
            f"spaces around it, and not 'latest'; found {tag[:100]!r}"
        )
    assert names_in(tmp_path) == set()


def test_other_tags_are_taken_and_replaced(tmp_path: Path) -> None:
    for number, tag in enumerate(GOOD_TAGS, 1):
        for value in (1, 2):
            target = save(tmp_path, tag, value)
        assert target.latest() == tag and target.tags() == GOOD_TAGS[:number] and value_in(target) == 2
    assert names_in(tmp_path) == {"latest", *GOOD_TAGS}


def test_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    def words(path: Path, tag: str | None = None, kind: type[Exception] = NoCheckpointError) -> str:
        with pytest.raises(CheckpointError) as caught:
            CheckpointFolder(path).open(tag)
        assert type(caught.value) is kind
        return str(caught.value)

    latest = "expected a file `latest` that names a checkpoint"
    tagged = "expected a checkpoint with the tag"
    assert words(tmp_path) == f"{tmp_path}: {latest}, found none and no checkpoint"
    assert words(tmp_path, "a") == f"{tmp_path}: {tagged} 'a', found none"
    save(tmp_path, "b", 1)
    target = save(tmp_path, "c", 2)
    assert words(tmp_path, "a") == f"{tmp_path}: {tagged} 'a', found b, c"
    parent = f"expected a folder with checkpoints, found a checkpoint. Pass its parent '{tmp_path}' and the tag 'b'."
    assert words(tmp_path / "b", kind=CheckpointError) == f"{tmp_path / 'b'}: {parent}"
    absent = tmp_path / "absent"
    assert words(absent) == f"{absent}: expected a folder with checkpoints, but it does not exist"
    for content, found in (("", "none"), ("\n", "none"), ("x", "'x' in it"), (None, "none")):
        (tmp_path / "latest").unlink()
        if content is not None:
            (tmp_path / "latest").write_text(content)
        hint = "Pass a `tag`: the folder has b, c."
        assert words(tmp_path, kind=CheckpointError) == f"{tmp_path}: {latest}, found {found}. {hint}"
    assert target.open("b").manifest.tag == "b"


def test_a_path_is_that_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert CheckpointFolder(tmp_path / "file").tags() == [] and CheckpointFolder(tmp_path / "file").latest() is None
    for path, kind in ((tmp_path / "file", FileExistsError), (tmp_path / "file" / "below", NotADirectoryError)):
        refusal(CheckpointFolder(path).begin, "a", kind=kind)
    for nothing in ("", "  "):
        text = f'expected the path of a folder ("." for the working directory), found {nothing!r}'
        assert refusal(CheckpointFolder, nothing) == text
    assert CheckpointFolder(".").path == Path(".")


# -- jobs that died ----------------------------------------------------------------------------------------------------


def test_what_a_dead_job_was_writing_is_cleared_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    target, this = save(tmp_path, "a", 1), WritingProcess.this().model_dump()
    owners = {
        "dead": {**this, "pid": 1 << 30},
        "given again": {**this, "started": psutil.Process().create_time() - 100},  # its number
        "living": this,
        "living, after the clock was set": {**this, "started": psutil.Process().create_time() - 1},
        "elsewhere": {"host": "another", "pid": 1, "started": 0.0},
        "odd": {"host": ["another"], "pid": {}, "started": None},
    }
    for tag, owner in owners.items():
        target.saving_folder(tag).mkdir()
        (tmp_path / f".owner-{tag}").write_text(json.dumps(owner))
        (target.saving_folder(tag) / "__0_0.distcp").write_bytes(b"half")
    assert target.unfinished() == sorted(owners) and target.tags() == ["a"]
    save(tmp_path, "b", 2)
    assert target.unfinished() == ["elsewhere", "living", "living, after the clock was set", "odd"]
    assert (target.saving_folder("living") / "__0_0.distcp").exists()
    assert names_in(tmp_path) == {"latest", "a", "b"} | {
        f"{kind}{tag}" for tag in target.unfinished() for kind in (".saving-", ".owner-")
    }


def test_a_tag_that_another_living_process_saves_is_refused(tmp_path: Path) -> None:
    other = psutil.Process(os.getppid())
    target, this = save(tmp_path, "a", 1), WritingProcess.this()
    target.begin("a")  # an interrupted save of this process is none of another
    owner = WritingProcess(host=this.host, pid=other.pid, started=other.create_time())
    (tmp_path / ".owner-a").write_text(owner.model_dump_json())
    text = refusal(target.begin, "a", kind=FileExistsError)
    assert f"found that process {other.pid} saves 'a' into it now; give each run a folder or a tag of its own" in text
    target.begin("b")
    assert target.saving_folder("a").exists()
    moved = this.model_copy(update={"started": this.started + 1})  # the clock was set since
    assert not moved.is_dead and not moved.is_another


@pytest.mark.parametrize("content", ["", '{"host": "x'])
def test_an_owner_that_died_before_it_made_its_folder_is_cleared(tmp_path: Path, content: str) -> None:
    (tmp_path / ".owner-a").write_text(content)
    save(tmp_path, "b", 1)
    assert names_in(tmp_path) == {"latest", "b"}


def test_a_process_of_another_container_is_not_taken_for_dead() -> None:
    """It has a boot in common with this one, but not the numbers of its processes."""
    this = WritingProcess.this()
    boot, numbering = this.host.split()
    assert WritingProcess(host=this.host, pid=1 << 30, started=0.0).is_dead and not this.is_dead
    assert numbering.startswith("pid:[")
    assert not WritingProcess(host=f"{boot} pid:[1]", pid=1 << 30, started=0.0).is_dead


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs."""


@pytest.mark.parametrize(("tag", "keep_last"), [("b", None), ("c", 1)])
def test_whatever_step_a_job_dies_before_the_latest_loads_and_the_next_save_clears_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str, keep_last: int | None
) -> None:
    """Every call that changes the folder in turn is the last one that never happens."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nothing dies but the process: it would only be slow
    calls: list[tuple[object, str]] = [(Path, "write_text"), (shutil, "rmtree")]
    calls += [(os, name) for name in ("rename", "replace", "fsync", "unlink", "mkdir")]
    save(tmp_path / "before", "a", 1)
    save(tmp_path / "before", "b", 2)
    step, died = 0, True
    while died:
        path = shutil.copytree(tmp_path / "before", tmp_path / str(step))
        target, left, died = CheckpointFolder(path), step, False
        with monkeypatch.context() as patch:
            for module, name in calls:

                def dying(*args: object, _real: object = getattr(module, name), **options: object) -> object:
                    nonlocal left
                    if left == 0:
                        raise Killed
                    left -= 1
                    return _real(*args, **options)  # type: ignore[operator]

                patch.setattr(module, name, dying)
            try:
                save(path, tag, 3, keep_last=keep_last)
            except Killed:
                died = True
        latest = target.latest()
        assert latest in ("b", tag)
        assert value_in(target) in ((2, 3) if died else (3,)), (step, latest)
        before = {other: value_in(target, other) for other in target.tags()}
        for owner in path.glob(".owner-*"):
            owner.write_text(json.dumps({**WritingProcess.this().model_dump(), "started": 0.0}))
        save(path, "d", 4, keep_last=keep_last)
        kept = {"d"} if keep_last else {"d", "a", "b"} | ({tag} & set(target.tags()))
        assert names_in(path) == {"latest", *kept}, step
        expected = {"d": 4} if keep_last else {**before, "d": 4}
        assert {other: value_in(target, other) for other in target.tags()} == expected, step
        step += 1
    assert step > 13


def test_options_of_a_hundred_thousand_parameters_are_kept(tmp_path: Path) -> None:
    """The names of a group are a single value for other readers, larger than any chunk of a tensor."""
    target, names = save(tmp_path, "a", 1), "optim.param_groups.0.params"
    write_part(target.begin("b"), 0, [ChunkView(STEP, (), 0, torch.ones(1))], [(names, bytes(9 << 20))], None)
    target.commit(manifest_of({}, "b", 1), NO_OPTIMIZER, None)
    target.open("b").verify()


def test_a_part_that_is_missing_is_not_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save(tmp_path, "a", 1)
    target.begin("b")
    one, two = (manifest_of({"w": torch.ones(5)}, "b", world_size) for world_size in (1, 2))
    refusal(target.commit, two, NO_OPTIMIZER, None, kind=FileNotFoundError)
    write_part(target.saving_folder("b"), 0, [], [], None)
    text = refusal(target.commit, one, NO_OPTIMIZER, None)
    assert "expected each element of 'model.w' once, found element 0 in none" in text
    assert target.latest() == "a" and target.tags() == ["a"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", lambda *_, **__: os.open("/", os.O_WRONLY))  # as NFS, if a file is open elsewhere
        target.discard("b")
    assert target.unfinished() == ["b"] and (tmp_path / ".owner-b").exists()  # a later job clears it
    target.discard("b")
    assert names_in(tmp_path) == {"latest", "a"}


# -- neighbours --------------------------------------------------------------------------------------------------------


MANIFESTS: dict[str, Callable[[Path], object]] = {  # what is in the place of a description
    "bytes": lambda path: path.write_bytes(b"{"),
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "nesting": lambda path: path.write_text("[" * 100_000),
}


@pytest.mark.parametrize("kind", [*MANIFESTS, "an odd value"])
def test_a_damaged_neighbour_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    for step in range(3):
        save(tmp_path, f"step{step}", step)
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("x")
    path = tmp_path / "step0" / "lowtide.json"
    if kind in MANIFESTS:
        path.unlink()
        MANIFESTS[kind](path)
    else:
        resign(tmp_path / "step0", lambda content: content.update(saved_at="yesterday"))
    target = save(tmp_path, "step3", 3, keep_last=2)
    assert target.tags() == ["step2", "step3"] and value_in(target) == 3
    assert names_in(tmp_path) == {"latest", "step0", "step2", "step3", "notes", "file"}
    assert target.alternative_to("step3") == "step2"
    refusal(target.open, "step0", kind=CheckpointError)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    start = f"a checkpoint in {tmp_path} is damaged and ignored: {path}: "
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


def test_latest_may_name_nothing_but_a_checkpoint_beside_it(tmp_path: Path) -> None:
    target = save(tmp_path / "run", "a", 1)
    save(tmp_path, "a", 2)
    for content in ("../a", "/etc", "..", "a/b", "a\0b", ".saving-a", "x" * 300, "\x1b[2J"):
        (target.path / "latest").write_text(content)
        with pytest.raises(CheckpointError) as caught:
            target.open()
        assert not isinstance(caught.value, NoCheckpointError)
        assert str(caught.value).startswith(f"{target.path / 'latest'}: tag: expected a folder name of at most 200")
        assert str(caught.value).endswith(f"found {content[:100]!r}. Pass the `tag` of a checkpoint.")
    assert save(tmp_path / "run", "b", 3).latest() == "b"


def test_latest_that_is_no_text_is_not_read(tmp_path: Path) -> None:
    target, latest = save(tmp_path, "a", 1), tmp_path / "latest"
    kinds: list[tuple[Callable[[Path], object], str]] = [
        (os.mkfifo, "expected a regular file, found a pipe. Pass the `tag` of a checkpoint."),
        (os.mkdir, "expected a regular file, found a folder. Pass the `tag` of a checkpoint."),
        (lambda path: path.write_bytes(b"\xff"), "codec can't decode byte 0xff"),
    ]
    for make, words in kinds:
        latest.rmdir() if latest.is_dir() else latest.unlink()
        make(latest)
        text = refusal(target.open, kind=CheckpointError)
        assert text.startswith(f"{latest}: ") and words in text
    assert value_in(target, "a") == 1
