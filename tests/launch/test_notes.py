"""What looks as if it were not meant is said at the start, by whoever notices it, once."""

from pathlib import Path

from tests.launch import fakes
from tests.launch.jobs import Job

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "a,b",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "28(x2)",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_GPUS_PER_NODE": "4",
    "CUDA_VISIBLE_DEVICES": "",
}


def said(folder: Path, *options: str) -> str:
    """stderr of a job in an allocation of two nodes with four accelerators each, of which none is there."""
    variables = fakes.install(folder / "bin", "srun", fakes.SRUN)
    status, _, err = Job(folder, "", *options, "--no-preflight", variables=SLURM | variables).finish()
    assert status == 0, err
    return err


def test_notes_of_the_plan_are_said_once(tmp_path: Path) -> None:
    err = said(tmp_path)
    for host in ("a", "b"):
        note = f"lowtide launch: {host}: the resource manager gives the job 4 accelerators, but a process can use 0\n"
        assert err.count(note) == 1


def test_notes_of_the_allocation_are_said_once(tmp_path: Path) -> None:
    err = said(tmp_path, "--hosts", "a:1,b:1")
    assert err.count("lowtide launch: ") == 1 and "SLURM" in err
