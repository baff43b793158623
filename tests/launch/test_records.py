"""The folders for the records of ranks' progress: none is left, whoever is killed. Those of jobs: `test_jobs.py`."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from lowtide.launch.agent.host_ranks import HostRanks
from lowtide.launch.hosts.host import LaunchError
from lowtide.launch.hosts.plan import HostPlan
from lowtide.launch.wire.loop import Loop
from lowtide.launch.wire.messages import Start
from lowtide.watch.record import PREFIX, RecordFolder, memory_folder, remove_dead_folders


def test_a_folder_lives_until_it_is_removed_and_a_dead_one_goes_with_the_next(tmp_path: Path) -> None:
    dead, other = tmp_path / f"{PREFIX}abc", tmp_path / "lowtide-123-of-something-else"
    for path in (dead, other):
        path.mkdir()
        (path / "rank0").touch()
    alive, new = RecordFolder(tmp_path), RecordFolder(tmp_path)
    names = {os.path.basename(folder.path) for folder in (alive, new)}
    assert set(os.listdir(tmp_path)) == {other.name, *names} and all(name.startswith(PREFIX) for name in names)
    Path(alive.path, "rank0").touch()
    remove_dead_folders(tmp_path)
    assert os.listdir(alive.path) == ["rank0"]
    alive.remove()
    new.remove()
    assert os.listdir(tmp_path) == [other.name]


def test_a_folder_dies_with_its_process(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        RecordFolder(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(os.listdir(tmp_path)) == 1
    remove_dead_folders(tmp_path)
    assert os.listdir(tmp_path) == []


def fails(number: int) -> Mock:
    return Mock(side_effect=OSError(number, os.strerror(number)))


def test_a_folder_that_cannot_be_made_is_an_error_and_not_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fcntl, "flock", fails(errno.ENOLCK))
    with pytest.raises(OSError, match="No locks available"):
        RecordFolder(tmp_path)
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr("lowtide.launch.agent.host_ranks.RecordFolder", fails(errno.ENOSPC))
    start = Start(HostPlan("a", 0, ()), "id", ("true",), "/", {})
    loop = Loop()
    with pytest.raises(LaunchError, match=r"cannot make a folder for their records in .*No space left on device. Free"):
        HostRanks(loop, start, Mock(), Mock(), Mock())
    loop.close()


def test_a_command_that_cannot_start_is_told_without_its_secrets() -> None:
    start = Start(HostPlan("a", 0, ()), "id", ("/no/python", "--hf-token", "hf_secret", "two words"), "/", {})
    text = HostRanks._why_not(Mock(_start=start), FileNotFoundError(errno.ENOENT, "No such file", "/no/python"))
    assert "/no/python --hf-token " in text and " 'two words' must exist on every host" in text
    assert "hf_secret" not in text


# In a process of its own: `HostRanks` kills and reaps all descendants.
RANK_1_CANNOT_START = """
import os, sys
from lowtide.launch.agent.host_ranks import HostRanks
from lowtide.launch.hosts.host import LaunchError
from lowtide.launch.hosts.plan import HostPlan, RankPlan
from lowtide.launch.wire.loop import Loop
from lowtide.launch.wire.messages import Start
host = HostPlan("a", 0, tuple(RankPlan(rank, rank, None, (), {}) for rank in range(2)))
start = Start(host, "id", ("sleep", "600"), sys.argv[1], {}, log_folder="logs")
loop, ended = Loop(), []
before = os.listdir("/proc/self/fd")
try:
    HostRanks(loop, start, print, ended.append, print)
except LaunchError as error:
    print(error)
loop.run(lambda: bool(ended), timeout=0.3)
print(ended, os.listdir("/proc/self/fd") == before)
"""


def test_a_rank_that_cannot_start_leaves_nothing_and_is_the_only_failure(tmp_path: Path) -> None:
    (tmp_path / "logs" / "rank1.log").mkdir(parents=True)  # no file: rank 1 cannot start, when rank 0 has
    command = [sys.executable, "-c", RANK_1_CANNOT_START, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert (
        "--log-dir logs: expected a folder that every host can write" in said
        and "Is a directory" in said
        and said.endswith("\n[] True\n")
    )


def test_records_are_in_memory_where_there_is_a_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for has_memory, folder in ((True, Path("/dev/shm")), (False, tmp_path)):
        monkeypatch.setattr(os, "access", lambda path, mode, yes=has_memory: yes and path == "/dev/shm")
        assert memory_folder() == folder
