"""Programs that stand in for ssh, srun and mpirun, and really run what they are given."""

import sys
from pathlib import Path

# A host that is named "gone" cannot be reached. The remote shell talks before it runs the command.
SSH = """
import os, subprocess, sys
host, command = sys.argv[sys.argv.index("--") + 1 :]
if host == "gone":
    print("ssh: connect to host gone port 22: No route to host", file=sys.stderr)
    sys.exit(255)
print(f"Welcome to {host}", flush=True)
os.environ["FAKE_HOST"] = host
os.execvp("sh", ["sh", "-c", command])
"""

SRUN = """
import os, subprocess, sys
words = sys.argv[1:]
options = dict(word.lstrip("-").partition("=")[::2] for word in words if word.startswith("--") and "=" in word)
start = words.index(sys.executable)
hosts = options["nodelist"].split(",")
assert options["ntasks-per-node"] == "1" and int(options["nodes"]) == len(hosts)
tasks = []
for index, host in enumerate(hosts):
    environ = {**os.environ, "SLURMD_NODENAME": host, "SLURM_PROCID": str(index), "FAKE_HOST": host}
    tasks.append(subprocess.Popen(words[start:], env=environ))
sys.exit(max(task.wait() for task in tasks))
"""

MPIRUN = """
import os, subprocess, sys
if sys.argv[1:] == ["--version"]:
    print("mpirun (Open MPI) 5.0.3")
    sys.exit()
words = sys.argv[1:]
hosts = [entry.split(":")[0] for entry in words[words.index("--host") + 1].split(",")]
passed = {name: os.environ[name] for name in ("PATH", "HOME", words[words.index("-x") + 1])}  # nothing else travels
start = words.index(sys.executable)
tasks = []
for index, host in enumerate(hosts):
    environ = {**passed, "OMPI_COMM_WORLD_RANK": str(index), "LSB_HOSTNAME": host, "FAKE_HOST": host}
    tasks.append(subprocess.Popen(words[start:], env=environ))
sys.exit(max(task.wait() for task in tasks))
"""

PROGRAMS = {"ssh": SSH, "srun": SRUN, "mpirun": MPIRUN}


def install(folder: Path, name: str, source: str) -> dict[str, str]:
    """Makes the program `name`; gives the variables with which it is found before any other of that name."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}
