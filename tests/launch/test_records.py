"""The folders for the records of ranks' progress: none is left, whoever is killed."""

import errno
import fcntl
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

from lowtide.launch.agent.host_ranks import HostRanks
from lowtide.launch.hosts.host import LaunchError
from lowtide.launch.hosts.plan import HostPlan
from lowtide.launch.wire.loop import Loop
from lowtide.launch.wire.messages import Job as JobMessage
from lowtide.launch.wire.messages import Start
from lowtide.watch.record import PREFIX, RecordFolder, memory_folder, remove_dead_folders
from tests.launch.jobs import Job
from tests.launch.test_failures import SECONDS, records, started


def test_a_folder_is_the_callers_until_it_is_removed(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path)
    assert os.listdir(tmp_path) == [os.path.basename(folder.path)] and os.path.basename(folder.path).startswith(PREFIX)
    Path(folder.path, "rank0").touch()
    remove_dead_folders(tmp_path)
    assert os.listdir(folder.path) == ["rank0"]
    folder.remove()
    assert os.listdir(tmp_path) == []


def test_a_dead_folder_is_removed_by_the_next_one_and_others_stay(tmp_path: Path) -> None:
    dead, other = tmp_path / f"{PREFIX}abc", tmp_path / "lowtide-123-of-something-else"
    for path in (dead, other):
        path.mkdir()
        (path / "rank0").touch()
    alive, new = RecordFolder(tmp_path), RecordFolder(tmp_path)
    assert set(os.listdir(tmp_path)) == {other.name, os.path.basename(alive.path), os.path.basename(new.path)}
    alive.remove()
    new.remove()


def test_a_folder_dies_with_its_process(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        RecordFolder(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(os.listdir(tmp_path)) == 1
    remove_dead_folders(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_locked_is_an_error_and_not_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_locks(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError, match="No locks available"):
        RecordFolder(tmp_path)
    assert os.listdir(tmp_path) == []


def test_ranks_without_a_place_for_records_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lowtide.launch.agent.host_ranks.RecordFolder", full)
    start = Start(HostPlan("a", 0, ()), JobMessage("id", ("true",), "/", {}), {}, {})
    loop = Loop()
    with pytest.raises(LaunchError, match=r"cannot make a folder for their records in .*No space left on device. Free"):
        HostRanks(loop, start, Mock(), Mock(), Mock())
    loop.close()


def test_records_are_in_memory_where_there_is_a_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path == "/dev/shm")
    assert memory_folder() == Path("/dev/shm")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert memory_folder() == tmp_path


def test_no_folder_is_left_behind_a_signal(tmp_path: Path) -> None:
    """Nor where one of the job's own processes is killed: `test_failures.py`."""
    job = started(tmp_path)
    folder = records(job)
    job.process.send_signal(signal.SIGTERM)
    job.process.communicate(timeout=SECONDS)
    assert job.survivors(wait=SECONDS) == [] and not folder.exists()


def test_what_is_left_when_all_are_killed_goes_with_the_next_job(tmp_path: Path) -> None:
    job = started(tmp_path)
    folder, everyone = records(job), job.survivors()
    for process in everyone:
        process.suspend()
    for process in everyone:
        process.kill()
    job.process.communicate(timeout=SECONDS)
    assert job.survivors(wait=SECONDS) == [] and folder.is_dir()
    (tmp_path / "next").mkdir()
    assert Job(tmp_path / "next", "", "--nproc", "1").finish()[0] == 0
    assert not folder.exists()
