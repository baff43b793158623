"""SLURM itself on this machine: a controller, and two nodes of two cores that are both this host."""

import contextlib
import os
import platform
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.kit.ranks import free_port

_COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
_SYSTEM_PATH = "/usr/sbin:/sbin"
_STARTED_SECONDS = 30.0

_CONFIG = """
ClusterName=lowtide
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def require_slurm() -> None:
    """Skips the test that calls it where SLURM cannot be started."""
    path = f"{os.environ['PATH']}:{_SYSTEM_PATH}"
    if missing := [command for command in _COMMANDS if shutil.which(command, path=path) is None]:
        pytest.skip(f"SLURM is not here, {missing[0]} is missing: apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid():
        pytest.skip("SLURM's daemons are started by root alone")


class SlurmCluster:
    """Started when it is made. `run` gives SLURM's commands its configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
            "PATH": f"{os.environ['PATH']}:{_SYSTEM_PATH}",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }
        munge = folder / "munge"
        for made in (folder, folder / "state", munge):
            made.mkdir(exist_ok=True)
        ports = [free_port() for _ in range(3)]
        text = _CONFIG.format(host=platform.node().split(".")[0], ports=ports, folder=folder)
        (folder / "slurm.conf").write_text(text)
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        try:
            self.run("munged", "--force", *(f"--{name}={munge / file}" for name, file in files.items()))
            self.run("slurmctld", "-c")
            for node in ("n1", "n2"):
                self.run("slurmd", "-N", node)
            self._wait_for_nodes()
        except BaseException:
            self.close()
            raise

    def run(self, *command: str, folder: Path | None = None, checks: bool = True) -> subprocess.CompletedProcess[str]:
        """A command with the cluster's configuration. checks: raises AssertionError where it fails."""
        done = subprocess.run(
            command, env=self.environment, cwd=folder or self.folder, text=True, capture_output=True, timeout=180
        )
        assert not checks or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED ... of a job."""
        shown = self.run("scontrol", "show", "job", job).stdout
        return next(word.partition("=")[2] for word in shown.split() if word.startswith("JobState="))

    def is_idle(self) -> bool:
        """Whether no job is on the nodes, also none that ends."""
        return self.run("sinfo", "--noheader", "--format=%T %D", checks=False).stdout.split() == ["idle", "2"]

    def close(self) -> None:
        """Ends all jobs and daemons."""
        if (self.folder / "slurmctld.pid").exists():
            self.run("scancel", "--user=root", checks=False)
        names = ("slurmd-n1.pid", "slurmd-n2.pid", "slurmctld.pid", "munge/pid")
        for path in [self.folder / name for name in names]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + _STARTED_SECONDS
        while time.monotonic() < deadline:
            if self.is_idle():
                return
            time.sleep(0.2)
        logs = "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))
        raise RuntimeError(f"SLURM's nodes were not idle within {_STARTED_SECONDS:g} s\n{logs}")
