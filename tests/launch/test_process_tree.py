"""Children that are forked: what they have of their parent, and how they end. Each in a process of one thread."""

import subprocess
import sys

import pytest

BEGIN = """
import os, signal, sys, time
from lowtide.launch.agent.process_tree import be_called, forked, kill_descendants, reap_all, reaped
"""


def outcome(code: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the code."""
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout, done.stderr


def test_the_child_gives_its_status_and_text_is_not_written_twice() -> None:
    code = "print('once'); pid = forked(lambda: print('child') or 7, ()); print(reaped(pid, 10))"
    status, out, err = outcome(code)
    assert (status, err) == (0, "") and out.count("once") == 1 and out.splitlines()[-1] == "7"


def test_an_exception_in_the_child_is_shown() -> None:
    status, out, err = outcome("pid = forked(lambda: 1 // 0, ()); print(reaped(pid, 10))")
    assert (status, out) == (0, "70\n")
    assert err.startswith("Traceback") and err.endswith("ZeroDivisionError: integer division or modulo by zero\n")
    assert err.count("Traceback") == 1


def test_the_child_has_only_the_descriptors_that_are_kept() -> None:
    code = """
kept, other = os.pipe()
os.set_inheritable(other, True)
def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
def work():
    return 5 if [fd for fd in (0, 1, 2, kept, other) if is_open(fd)] == [0, 1, 2, kept] else 6
print(reaped(forked(work, (kept,)), 10))
os.fstat(other)
"""
    assert outcome(code) == (0, "5\n", "")


def test_signals_do_nothing_until_the_child_wants_them() -> None:
    code = """
signal.signal(signal.SIGTERM, lambda *_: print("the parent's handler", flush=True))
def work():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    return 3
print(reaped(forked(work, ()), 10))
"""
    assert outcome(code) == (0, "3\n", "")


def test_a_child_that_runs_on_has_no_status_yet() -> None:
    code = """
pid = forked(lambda: time.sleep(600) or 0, ())
start = time.monotonic()
print(reaped(pid, 0.2), 0.2 <= time.monotonic() - start < 60)
kill_descendants()
print(reaped(pid, 10))
"""
    assert outcome(code) == (0, "None True\n-9\n", "")


def test_forking_beside_other_threads_is_refused() -> None:
    code = """
import threading
threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
forked(lambda: 0, ())
"""
    status, _, err = outcome(code)
    assert status == 1 and "AssertionError" in err


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has orphans adopted")
def test_orphans_are_found_and_killed() -> None:
    code = """
import subprocess
from lowtide.launch.agent.process_tree import adopt_orphans
adopt_orphans()
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
how = "start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
code = f"import subprocess; print(subprocess.Popen({sleep}, {how}).pid)"
orphan = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
os.kill(orphan, 0)
kill_descendants()
reap_all(10)
try:
    os.kill(orphan, 0)
except ProcessLookupError:
    print("gone")
"""
    assert outcome(code) == (0, "gone\n", "")
