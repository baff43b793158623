"""The search for what a job has left on a host, and what the launcher says of it."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lowtide.launch.agent import orphans
from lowtide.launch.job.launcher import Sweeps
from lowtide.launch.wire.loop import Loop
from tests.launch.fakes import ScriptedTransport

SLEEP = ["sleep", "600"]

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="this system does not tell")
Start = Callable[..., "subprocess.Popen[bytes]"]


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


def test_all_of_the_job_and_none_of_another_is_killed(start: Start) -> None:
    job, other = str(uuid.uuid4()), str(uuid.uuid4())
    mine, others = [start(job), start(job)], [start(other), start(job + "0"), start("")]
    assert set(orphans.kill_orphans(job)) == {process.pid for process in mine}
    assert [process.wait(60) for process in mine] == [-9, -9]
    assert [process.poll() for process in others] == [None] * 3


def test_what_is_started_in_the_meantime_is_killed_too(start: Start, tmp_path: Path) -> None:
    """A chain of 30 processes: each starts the next one, and stays."""
    begun = tmp_path / "begun"
    link = "    if os.fork():\n        time.sleep(600)\n    time.sleep(0.002)\n"
    code = f"import os, time\nopen({str(begun)!r}, 'w')\nfor _ in range(29):\n{link}time.sleep(600)"
    job = str(uuid.uuid4())
    process = start(job, [sys.executable, "-c", code])
    while not begun.exists():
        assert process.poll() is None
        time.sleep(0.001)
    assert process.pid in orphans.kill_orphans(job, seconds=10.0)
    time.sleep(0.1)
    assert orphans.kill_orphans(job) == {}


def test_a_process_that_has_no_environment_at_the_first_look_is_killed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the middle of its exec."""
    process, search, looks = start(job := str(uuid.uuid4())), orphans._processes_of, iter([False])
    monkeypatch.setattr(orphans, "_processes_of", lambda identity: search(identity) if next(looks, True) else [])
    assert set(orphans.kill_orphans(job)) == {process.pid} and process.wait(60) == -9


def test_the_answer_is_one_line_with_names(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(uuid.uuid4())
    process = start(job)
    name = Path(f"/proc/{process.pid}/comm").read_text().strip()
    assert orphans.main([job]) == 0
    assert capsys.readouterr().out == f"=== lowtide orphans === {name} (process {process.pid})\n"
    assert orphans.main([job]) == 0
    assert capsys.readouterr().out == "=== lowtide orphans === \n"


@pytest.mark.parametrize("arguments", [[], [""], ["a", "b"]])
def test_no_identity_kills_nothing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert orphans.main(arguments) == 2
    assert capsys.readouterr().err == f"lowtide orphans: expected the identity of a job, found {arguments}\n"


class Ways(ScriptedTransport):
    """A transport with these second ways to its hosts."""

    def __init__(self, *commands: list[str] | None) -> None:
        super().__init__(lambda host, message: None)
        self._commands = commands

    def orphans_command(self, index: int, identity: str) -> list[str] | None:
        """See Transport."""
        return self._commands[index]


def swept(*commands: list[str] | None, was_silent: bool = False) -> tuple[list[str], float]:
    """What is said of the hosts h0, h1 and so on, and how long it took."""
    loop = Loop()
    said: list[str] = []
    sweeps = Sweeps(loop, Ways(*commands), "J", said.append)
    start = time.monotonic()
    for index in range(len(commands)):
        sweeps.begin(index, f"h{index}", was_silent)
    sweeps.finish()
    seconds = time.monotonic() - start
    loop.close()
    return said, seconds


def prints(text: str, status: int = 0) -> list[str]:
    """A command that says this, and ends with `status`."""
    return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({status})"]


def test_only_hosts_with_something_left_are_told() -> None:
    found = prints(f"good morning\n{orphans.MAGIC} sleep (process 7)")
    said, _ = swept(found, prints(f"good morning\n{orphans.MAGIC} "), None)
    assert said == ["h0: killed what the job had left there: sleep (process 7)"]


def test_a_host_that_is_not_reached_is_told_with_the_reason() -> None:
    said, _ = swept(prints("ssh: No route to host", 255), ["/nowhere/ssh"])
    program = os.path.basename(sys.executable)
    advice = "\nIf that host is alive, find them there by `grep -lz LOWTIDE_JOB_ID=J /proc/*/environ`."
    assert sorted(said) == [
        "h0: could not look for processes that the job left there: "
        f"{program} left with exit status 255\n    ssh: No route to host{advice}",
        "h1: could not look for processes that the job left there: "
        f"[Errno 2] No such file or directory: '/nowhere/ssh'{advice}",
    ]


@pytest.mark.parametrize(("was_silent", "limit"), [(True, 1.0), (False, 3.0)])
def test_all_hosts_have_the_same_time(was_silent: bool, limit: float) -> None:
    said, seconds = swept(*[SLEEP] * 12, was_silent=was_silent)
    assert limit <= seconds < 10 * limit  # of twelve one after the other
    assert len(said) == 12 and all(f"no answer within {limit:g} s" in line for line in said)
