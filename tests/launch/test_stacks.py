"""Stacks of a rank that hangs anywhere, and a sentence where there are none; nobody else is ever signalled."""

import errno
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowtide.watch import stacks

Start = Callable[[str], subprocess.Popen[str]]
HANGS = """
import threading, {imports}
import lowtide
is_there = threading.Event()
def in_a_thread():
    is_there.set()
    threading.Event().wait()
def hang_here():
    is_there.wait()
    print("ready", flush=True)
    {hang}
threading.Thread(target=in_a_thread, daemon=True).start()
hang_here()
"""
SLEEPS = HANGS.format(imports="time", hang="time.sleep(60)")
BYSTANDER = "import time; print('ready', flush=True); time.sleep(60)"
NONE = "(no stack: the process has ended, or it has not imported lowtide)"


def test_a_path_that_could_not_be_claimed_for_lack_of_room_is_claimed_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not taken for the path of another process: `initialize` tries again, and warns."""

    def full(*given: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            stacks.claim(str(path))
    assert stacks.claim(str(path)) and stacks.owner(str(path)) == os.getpid()
    faulthandler.unregister(stacks.SIGNAL)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank0"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """Starts a script as rank 0, whose path is `path`; returns when it has printed a line."""
    started = []

    def run(code: str) -> subprocess.Popen[str]:
        environment = os.environ | {"LOWTIDE_PROGRESS_FILE": str(path)}
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.1)  # most often it hangs by then, and not only is in the function that will
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def collected(path: Path, timeout_seconds: float = 60.0) -> str:
    return stacks.collect_stacks({0: str(path)}, timeout_seconds=timeout_seconds)[0]


@pytest.mark.parametrize(
    ("imports", "hang"),
    [
        ("time", "time.sleep(60)"),
        ("itertools", "sum(itertools.repeat(1))"),  # in C, with the interpreter's lock
    ],
)
def test_the_functions_that_hang_are_in_the_stack_and_the_rank_goes_on(
    start: Start, path: Path, imports: str, hang: str
) -> None:
    process = start(HANGS.format(imports=imports, hang=hang))
    for _ in range(2):
        text = collected(path)
        assert text.count("in hang_here") == 1 and "most recent call first" in text and "in in_a_thread" in text
    assert process.poll() is None


def test_a_rank_that_has_not_imported_lowtide_is_not_signalled(start: Start, path: Path) -> None:
    bystander = start(BYSTANDER)
    assert stacks.owner(str(path)) is None and stacks.request_stack(str(path)) is None
    assert collected(path) == NONE
    path.with_name("rank0.stacks").write_text(f"{bystander.pid} 1\n")  # an earlier process had this number
    assert stacks.owner(str(path)) is None and collected(path) == NONE
    assert bystander.poll() is None


def test_a_rank_that_executes_another_program_is_signalled_when_that_has_imported_lowtide(
    start: Start, path: Path
) -> None:
    execs = "import lowtide, os, sys; os.execv(sys.executable, [sys.executable, '-c', {!r}])"
    process = start(execs.format(BYSTANDER))
    assert collected(path) == NONE and process.poll() is None
    stacks.remove([str(path)])
    start(execs.format(SLEEPS))
    assert "in hang_here" in collected(path)


def test_a_rank_that_is_stopped_is_named_so(start: Start, path: Path) -> None:
    process = start(SLEEPS)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    expected = f"(no stack: process {process.pid} did not answer in 0.3 s; it is stopped, by SIGSTOP or a debugger)"
    assert collected(path, timeout_seconds=0.3) == expected


def test_a_rank_that_has_ended_gives_no_stack_and_its_files_can_go(start: Start, path: Path) -> None:
    start("import lowtide; print('ready', flush=True)").wait()
    assert stacks.request_stack(str(path)) is None
    assert path.with_name("rank0.stacks").exists()
    stacks.remove([str(path)])
    assert list(path.parent.iterdir()) == []


def test_a_path_has_one_owner_and_the_claim_costs_an_import_next_to_nothing(path: Path) -> None:
    assert stacks.claim(str(path)) and stacks.claim(str(path)) and stacks.owner(str(path)) == os.getpid()
    code = f"""
import signal, sys, lowtide
from lowtide.watch import stacks
modules, calls = set(sys.modules), []
sys.setprofile(lambda frame, event, argument: calls.append(event))
claims = [stacks.claim({str(path)!r}), stacks.claim({str(path) + "other"!r})]
sys.setprofile(None)
print(claims, len(calls), sorted(set(sys.modules) - modules - {{"encodings.ascii"}}), sep=";")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    claims, num_calls, modules = done.stdout.split(";")
    assert claims == "[False, True]"
    assert 0 < int(num_calls) < 2000 and modules == "[]\n", done.stdout  # a tenth of a millisecond
