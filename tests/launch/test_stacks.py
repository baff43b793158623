"""Stacks of a rank that hangs anywhere, and a sentence where there are none; nobody else is ever signalled."""

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
import {imports}
import lowtide
def hang_here():
    print("ready", flush=True)
    {hang}
hang_here()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a script as rank 0, whose path is tmp_path/rank0; returns when it has printed a line."""
    started = []

    def run(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"LOWTIDE_PROGRESS_FILE": str(tmp_path / "rank0")},
        )
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


@pytest.mark.parametrize(
    ("imports", "hang"),
    [
        ("time", "time.sleep(60)"),
        ("threading", "threading.Lock().acquire(); lock = threading.Lock(); lock.acquire(); lock.acquire()"),
        ("socket", "socket.create_server(('127.0.0.1', 0)).accept()"),
        ("itertools", "sum(itertools.repeat(1))"),  # in C, with the interpreter's lock
    ],
)
def test_the_function_that_hangs_is_in_the_stack_and_the_rank_goes_on(
    start: Start, tmp_path: Path, imports: str, hang: str
) -> None:
    process = start(HANGS.format(imports=imports, hang=hang))
    for _ in range(2):
        text = stacks.collect_stacks({0: str(tmp_path / "rank0")})[0]
        assert "hang_here" in text and "most recent call first" in text and text.count("hang_here") == 1
    assert process.poll() is None


def test_all_threads_are_shown(start: Start, tmp_path: Path) -> None:
    code = """
import threading, time, lowtide
is_there = threading.Event()
def in_a_thread():
    is_there.set()
    time.sleep(60)
def in_the_main_thread():
    is_there.wait()
    print("ready", flush=True)
    time.sleep(60)
threading.Thread(target=in_a_thread, daemon=True).start()
in_the_main_thread()
"""
    start(code)
    text = stacks.collect_stacks({0: str(tmp_path / "rank0")})[0]
    assert "in_a_thread" in text and "in_the_main_thread" in text


def test_a_rank_that_has_not_imported_lowtide_is_not_signalled(start: Start, tmp_path: Path) -> None:
    process = start("import time; print('ready', flush=True); time.sleep(60)")
    path = str(tmp_path / "rank0")
    assert stacks.owner(path) is None and stacks.request_stack(path) is None
    assert stacks.collect_stacks({0: path}) == {0: "(no stack: the process has ended, or it has not imported lowtide)"}
    assert process.poll() is None


def test_a_rank_that_is_stopped_is_named_so(start: Start, tmp_path: Path) -> None:
    process = start(HANGS.format(imports="time", hang="time.sleep(60)"))
    process.send_signal(signal.SIGSTOP)
    text = stacks.collect_stacks({0: str(tmp_path / "rank0")}, timeout_seconds=0.3)[0]
    assert text == (
        f"(no stack: process {process.pid} did not answer in 0.3 s; it is stopped, by SIGSTOP or a debugger)"
    )


def test_the_number_of_a_dead_rank_is_not_taken_for_another_process(start: Start, tmp_path: Path) -> None:
    bystander = start("import time; print('ready', flush=True); time.sleep(60)")
    path = tmp_path / "rank0"
    path.with_name("rank0.stacks").write_text(f"{bystander.pid} 1\n")  # an earlier process had it
    assert stacks.owner(str(path)) is None
    assert stacks.collect_stacks({0: str(path)})[0].startswith("(no stack: the process has ended")
    assert bystander.poll() is None


def test_a_rank_that_has_ended_gives_no_stack_and_its_files_can_go(start: Start, tmp_path: Path) -> None:
    path = str(tmp_path / "rank0")
    process = start("import lowtide; print('ready', flush=True)")
    process.wait()
    assert stacks.request_stack(path) is None
    assert (tmp_path / "rank0.stacks").exists()
    stacks.remove([path])
    assert list(tmp_path.iterdir()) == []


def test_a_path_has_one_owner(tmp_path: Path) -> None:
    path = str(tmp_path / "rank0")
    assert stacks.claim(path) and stacks.claim(path) and stacks.owner(path) == os.getpid()
    code = f"from lowtide.watch import stacks; print(stacks.claim({path!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"


def test_the_claim_costs_the_import_of_lowtide_next_to_nothing(tmp_path: Path) -> None:
    code = f"""
import signal, sys, lowtide
from lowtide.watch import stacks
modules, calls = set(sys.modules), []
sys.setprofile(lambda frame, event, argument: calls.append(event))
stacks.claim({str(tmp_path / "rank")!r})
sys.setprofile(None)
print(len(calls), sorted(set(sys.modules) - modules - {{"encodings.ascii"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    num_calls, _, modules = done.stdout.partition(" ")
    assert 0 < int(num_calls) < 2000 and modules == "[]\n", done.stdout  # a tenth of a millisecond


def test_an_import_where_no_file_can_be_made_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import lowtide; print('imported')"],
        env=os.environ | {"LOWTIDE_PROGRESS_FILE": str(tmp_path / "gone" / "rank0")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("imported\n", "")
