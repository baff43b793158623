"""The search for what a job has left on a host, and what the launcher says of it."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from lowtide.launch.agent import orphans
from lowtide.launch.job.launcher import Sweeps
from lowtide.launch.wire.loop import Loop

SLEEP = ["sleep", "600"]

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="this system does not tell")
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def job() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process of the job that is given, in a session of its own; what is left of them is killed at the end."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(identity: str, command: Sequence[str] = SLEEP) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, "LOWTIDE_JOB_ID": identity}
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        while not Path(f"/proc/{processes[-1].pid}/environ").read_bytes():  # in the middle of its exec
            time.sleep(0.001)
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_all_of_the_job_and_none_of_another_is_killed(start: Start, job: str) -> None:
    mine, others = [start(job), start(job)], [start(str(uuid.uuid4())), start(job + "0"), start("")]
    assert set(orphans.kill_orphans(job)) == {process.pid for process in mine}
    assert [process.wait(60) for process in mine] == [-9, -9]
    assert [process.poll() for process in others] == [None] * 3


def test_what_is_started_in_the_meantime_is_killed_too(start: Start, job: str, tmp_path: Path) -> None:
    """A chain of 30 processes: each starts the next one, and stays."""
    begun = tmp_path / "begun"
    link = "    if os.fork():\n        time.sleep(600)\n    time.sleep(0.002)\n"
    code = f"import os, time\nopen({str(begun)!r}, 'w')\nfor _ in range(29):\n{link}time.sleep(600)"
    process = start(job, [sys.executable, "-c", code])
    while not begun.exists():
        assert process.poll() is None
        time.sleep(0.001)
    assert process.pid in orphans.kill_orphans(job, seconds=10.0)
    time.sleep(0.1)
    assert orphans.kill_orphans(job) == {}


def test_a_process_that_has_no_environment_at_the_first_look_is_killed(
    start: Start, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the middle of its exec."""
    process, search, looks = start(job), orphans._processes_of, iter([False])
    monkeypatch.setattr(orphans, "_processes_of", lambda identity: search(identity) if next(looks, True) else [])
    assert set(orphans.kill_orphans(job)) == {process.pid} and process.wait(60) == -9


def test_the_answer_is_one_line_with_names(start: Start, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    process = start(job)
    name = Path(f"/proc/{process.pid}/comm").read_text().strip()
    for told in (f"{name} (process {process.pid})", ""):
        assert orphans.main([job]) == 0
        assert capsys.readouterr().out == f"=== lowtide orphans === {told}\n"
    for arguments in ([], [""], ["a", "b"]):
        assert orphans.main(arguments) == 2
        assert capsys.readouterr().err == f"lowtide orphans: expected the identity of a job, found {arguments}\n"


def prints(text: str, status: int = 0) -> list[str]:
    """A command that says this, and ends with `status`."""
    return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({status})"]


ASKED = "could not look for processes that the job left there: "
ADVICE = "\nIf that host is alive, find them there by `grep -lz LOWTIDE_JOB_ID=J /proc/*/environ`."
PYTHON = os.path.basename(sys.executable)


@pytest.mark.parametrize(
    ("commands", "told"),
    [
        (
            [
                prints(f"good morning\n{orphans.MAGIC} sleep (process 7)" + "\nbye" * 30),
                prints(f"hello\n{orphans.MAGIC} "),
                None,
            ],
            ["h0: killed what the job had left there: sleep (process 7)"],
        ),
        (
            [prints("ssh: No route to host", 255), ["/nowhere/ssh"]],
            [
                f"h0: {ASKED}{PYTHON} ended with exit status 255\n    ssh: No route to host{ADVICE}",
                f"h1: {ASKED}[Errno 2] No such file or directory: '/nowhere/ssh'{ADVICE}",
            ],
        ),
        ([SLEEP] * 12, [f"h{index}: {ASKED}no answer within 1 s{ADVICE}" for index in range(12)]),
    ],
    ids=["left", "not_reached", "silent"],
)
def test_hosts_with_something_left_or_that_are_not_reached_are_told(
    commands: list[list[str] | None], told: list[str]
) -> None:
    loop = Loop()
    said: list[str] = []
    transport = Mock(orphans_command=lambda index, identity: commands[index])
    sweeps = Sweeps(loop, transport, "J", said.append)
    is_silent = len(commands) == 12
    start = time.monotonic()
    for index in range(len(commands)):
        sweeps.begin(index, f"h{index}", was_silent=is_silent)
    sweeps.finish()
    assert sorted(said) == sorted(told)
    if is_silent:  # all have the same time
        assert 1.0 <= time.monotonic() - start < 10
    loop.close()
