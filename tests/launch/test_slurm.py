"""`lowtide launch` in jobs of SLURM itself: `slurm_cluster.py`. What it reads of them: test_allocation.py."""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.scripts import SAVES_ON_SIGNAL
from tests.launch.slurm_cluster import SlurmCluster, require_slurm

CHECKOUT = Path(__file__).parents[2]
JOB_SECONDS = 120.0

TELL = """
import json, os, pathlib, sys, time
told = {name: os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "SLURMD_NODENAME")}
written = pathlib.Path(f"written{os.environ['RANK']}")
written.write_text(json.dumps(told))
written.rename(f"told{os.environ['RANK']}")
if len(sys.argv) > 1 and os.environ["RANK"] == sys.argv[1]:  # the others are stopped then
    while len(list(pathlib.Path().glob("told?"))) < int(told["WORLD_SIZE"]):
        time.sleep(0.05)
    sys.exit(int(sys.argv[2]))
"""

# As a training with checkpoint.on_sigterm does, which tests/engine/test_preemption.py asks; without torch.
TRAINS = """
import os, pathlib, sys
if pathlib.Path("saved" + os.environ["RANK"]).exists():
    print("goes on")
    sys.exit()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    require_slurm()
    started = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    # `lowtide` of this checkout, as it would be in the path of a job.
    command = started.folder / "bin" / "lowtide"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom lowtide.bin.main import main\nsys.exit(main())\n")
    command.chmod(0o755)
    started.environment["PATH"] = f"{command.parent}:{started.environment['PATH']}"
    yield started
    started.close()


def wait_for(path: Path, text: str = "") -> None:
    deadline = time.monotonic() + JOB_SECONDS
    while time.monotonic() < deadline:
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"expected {text!r}, found {path.read_text() if path.exists() else 'no output'}")


def test_a_batch_job_runs_on_its_nodes_and_has_the_status_of_its_rank(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    options = ("--wait", "--nodes=2", "--output=out", "--wrap")
    line = "exec lowtide launch --no-preflight --nproc 2 tell.py 3 7"
    done = cluster.run("sbatch", *options, line, folder=tmp_path, checks=False)
    said = (tmp_path / "out").read_text()
    assert done.returncode == 7, said
    assert "rank 3 of 4 (host n2" in said
    for rank in range(4):
        told = json.loads((tmp_path / f"told{rank}").read_text())
        assert told == {"LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "SLURMD_NODENAME": f"n{rank // 2 + 1}"}


def test_each_task_of_srun_is_a_rank(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    tasks = ("--nodes=2", "--ntasks-per-node=2", "--cpu-bind=none")
    done = cluster.run("srun", *tasks, "lowtide", "launch", "tell.py", folder=tmp_path)
    assert "srun has started 4 tasks" in done.stderr
    names = [json.loads((tmp_path / f"told{rank}").read_text())["SLURMD_NODENAME"] for rank in range(4)]
    assert names == ["n1", "n1", "n2", "n2"]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["a requeue", "the end of its time"])
def test_a_job_saves_and_goes_on_where_it_was(cluster: SlurmCluster, tmp_path: Path, by: str) -> None:
    (tmp_path / "train.py").write_text(TRAINS + SAVES_ON_SIGNAL)
    shutil.copy(CHECKOUT / "examples" / "slurm.sbatch", tmp_path)
    options = ("--parsable", "--nodes=2", "--output=out")
    job = cluster.run("sbatch", *options, "slurm.sbatch", "--nproc=1", "train.py", folder=tmp_path).stdout.strip()
    for rank in range(2):
        wait_for(tmp_path / f"ready{rank}")
    if by == "a requeue":
        cluster.run("scontrol", "requeue", job)
    else:  # what --signal=B:TERM sends before
        cluster.run("scancel", "--batch", "--signal=TERM", job)
    for rank in range(2):
        wait_for(tmp_path / f"saved{rank}")
    deadline = time.monotonic() + JOB_SECONDS
    while cluster.state(job) != "COMPLETED" and time.monotonic() < deadline:
        if cluster.state(job) == "PENDING" and cluster.is_idle():  # it would wait for two minutes
            # Nodes refuse a job that was made ready in the second in which they ended it before.
            cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")
            wait_for(tmp_path / "out", "goes on")
        time.sleep(0.5)
    assert cluster.state(job) == "COMPLETED", (tmp_path / "out").read_text()
    assert "goes on" in (tmp_path / "out").read_text()
