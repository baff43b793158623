"""Children that are forked: what they have of their parent, and how they end. Each in a process of one thread."""

import subprocess
import sys

import pytest

BEGIN = """
import os, signal, subprocess, sys, time
from lowtide.launch.agent.process_tree import adopt_orphans, be_called, forked, kill_descendants, reap_all, reaped
"""
DESCRIPTORS = """
kept, other = os.pipe()
os.set_inheritable(other, True)
def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
def work():
    return 5 if [fd for fd in (0, 1, 2, kept, other) if is_open(fd)] == [0, 1, 2, kept] else 6
print(reaped(forked(work, (kept,)), 60))
os.fstat(other)
"""
SIGNALS = """
signal.signal(signal.SIGTERM, lambda *_: print("the parent's handler", flush=True))
def work():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    return 3
print(reaped(forked(work, ()), 60))
"""
RUNS_ON = """
pid = forked(lambda: time.sleep(600) or 0, ())
start = time.monotonic()
print(reaped(pid, 0.2), 0.2 <= time.monotonic() - start < 60)
kill_descendants()
print(reaped(pid, 60))
"""
ORPHANS = """
adopt_orphans()
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
how = "start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
code = f"import subprocess; print(subprocess.Popen({sleep}, {how}).pid)"
orphan = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
os.kill(orphan, 0)
kill_descendants()
reap_all(60)
try:
    os.kill(orphan, 0)
except ProcessLookupError:
    print("gone")
"""
THREADS = """
import threading
threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
forked(lambda: 0, ())
"""


@pytest.mark.parametrize(
    ("code", "status", "out", "err"),
    [
        ("print('once'); print(reaped(forked(lambda: print('child') or 7, ()), 60))", 0, "once\nchild\n7\n", ""),
        ("print(reaped(forked(lambda: 1 // 0, ()), 60))", 0, "70\n", "ZeroDivisionError: integer division or modulo"),
        (DESCRIPTORS, 0, "5\n", ""),
        (SIGNALS, 0, "3\n", ""),
        (RUNS_ON, 0, "None True\n-9\n", ""),
        pytest.param(ORPHANS, 0, "gone\n", "", marks=pytest.mark.skipif(sys.platform != "linux", reason="on Linux")),
        (THREADS, 1, "", "AssertionError"),
    ],
    ids=["status", "exception", "kept_descriptors", "no_signals", "runs_on", "orphans", "threads_are_refused"],
)
def test_a_forked_child(code: str, status: int, out: str, err: str) -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, sorted(done.stdout)) == (status, sorted(out)), done.stderr
    assert err in done.stderr and done.stderr.count("Traceback") == bool(err)
