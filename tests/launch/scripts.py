"""What ranks run in tests of the launcher."""

WRITES_ENVIRONMENT = """
import json, os, pathlib, sys
environ = {**os.environ, "cores": sorted(os.sched_getaffinity(0))}
pathlib.Path("rank" + os.environ["RANK"]).write_text(json.dumps([environ, sys.argv[1:]]))
"""

# Each rank starts a child that has a child of its own in a new session, and the middle one ends: an orphan.
HAS_DESCENDANTS = """
import os, pathlib, subprocess, sys, time
rank = os.environ["RANK"]
subprocess.run(["setsid", "--fork", "sleep", "600"])
subprocess.Popen(["sleep", "600"])
pathlib.Path("ready" + rank).touch()
"""

SLEEPS = HAS_DESCENDANTS + "time.sleep(600)\n"

WAITS_FOR_THE_OTHER = """
while not os.path.exists(f"ready{1 - int(rank)}"):
    time.sleep(0.01)
"""

HEARS_SIGTERM = """
import os, pathlib, signal, time
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda number, frame: pathlib.Path("heard" + rank).touch())
pathlib.Path("ready" + rank).touch()
time.sleep(600)
"""

SAVES_ON_SIGNAL = """
import os, pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path("saved" + os.environ["RANK"]).write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready" + os.environ["RANK"]).touch()
time.sleep(600)
"""

# At a terminal: Ctrl-C goes to everyone in the foreground.
COUNTS_SIGNALS = """
import os, pathlib, signal, subprocess, sys, time
count = 0
def handle(number, frame):
    global count
    count += 1
signal.signal(signal.SIGINT, handle)
rank = os.environ["RANK"]
pathlib.Path("ready" + rank).touch()
while not count:
    time.sleep(0.01)
time.sleep(0.5)
pathlib.Path("count" + rank).write_text(str(count))
if rank == "0":
    subprocess.run(["stty", "-echo"])
"""
