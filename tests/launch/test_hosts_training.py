"""Training over two hosts: the losses of one host, a line that is cut in the middle, a host that is lost for good."""

import json
from pathlib import Path

import pytest

from tests.launch.hosts_job import HostsJob
from tests.launch.jobs import LAUNCH
from tests.launch.network import Network

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SIZE = ["--layers", "2", "--heads", "2", "--width", "16", "--context", "16", "--batch-size-per-process", "4"]
NOTICED_SECONDS = 8.0  # after 4 to 5 s of silence, and what two busy cores need to end processes with torch in them
STEPS = 12
SAVE_EVERY = 3

# A job whose global batch is told, not that of a rank; each step's loss goes to losses<attempt>.txt. It is slowed down,
# or has no end, where a file of that name is there.
ELASTIC = f"""
import os, pathlib, time
import torch
import lowtide

config = {{
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {{"stage": 3}},
    "optimizer": {{"type": "adamw", "params": {{"lr": 0.01}}}},
    "seed": 0,
    "steps_per_print": 0,
}}

def model():
    return torch.nn.Sequential(*[torch.nn.Linear(13, 13) for _ in range(3)])

def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 13, generator=generator)

class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = model()
    def forward(self, x):
        return (self.layers(x) - x.roll(1, 1)).square().mean()

attempt = os.environ["LOWTIDE_RESTART_COUNT"]
with lowtide.initialize(Wrapped, config) as engine:
    try:
        engine.load_checkpoint("saved")
    except lowtide.NoCheckpointError:
        pass
    if engine.rank == 0:
        pathlib.Path(f"world{{attempt}}").write_text(str(engine.world_size))
        losses = open(f"losses{{attempt}}.txt", "a", buffering=1)
    share = 16 // engine.data_size
    while engine.global_step < {STEPS} or pathlib.Path("endless").exists():
        if pathlib.Path("slow").exists() and engine.global_step >= {STEPS // 2}:
            time.sleep(0.5)
        step = engine.global_step
        mine = batch(step)[engine.data_rank * share : (engine.data_rank + 1) * share]
        loss = engine.train_step(mine).loss.item()
        if engine.rank == 0:
            print(step, loss.hex(), file=losses)
        if engine.global_step % {SAVE_EVERY} == 0:
            engine.save_checkpoint("saved")
            if engine.rank == 0:
                pathlib.Path(f"saved-at-{{engine.global_step}}").touch()
"""


def example(hosts: Network, folder: Path, *options: str) -> HostsJob:
    """examples/train_gpt.py, tiny, under stage 3."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    for number in range(3):
        (data / f"file{number}.py").write_text("def f(x):\n    return x\n" * 40, encoding="utf-8")
    arguments = [*SIZE, "--data", str(data), "--steps", "20", "--sample-bytes", "0"]
    files = ["--out", str(folder / "out"), "--report", str(folder / "report.json")]
    command = [*LAUNCH, *options, str(EXAMPLE), *arguments, *files, "--config", "zero3"]
    return HostsJob.of_command(hosts, folder, command, environment={"OMP_NUM_THREADS": "1"})


def losses(folder: Path) -> dict[int, float]:
    """By step: those of the newest attempt that took it."""
    found = {}
    for path in sorted(folder.glob("losses*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            step, loss = line.split()
            found[int(step)] = float.fromhex(loss)
    return found


@pytest.mark.slow
def test_two_hosts_of_two_ranks_train_as_one_host_of_four(hosts: Network, tmp_path: Path) -> None:
    reports = []
    for name, options in {"one": ["--hosts", "n1:4"], "two": ["--hosts", "n1:2,n2:2"]}.items():
        folder = tmp_path / name
        folder.mkdir()
        job = example(hosts, folder, *options)
        result = job.finish()
        assert result.status == 0, result
        job.wait_until_gone(1.0)
        reports.append(json.loads((folder / "report.json").read_text(encoding="utf-8")))
    one, two = reports
    assert one["processes"] == two["processes"] == 4
    assert one["final_loss"] < one["first_loss"]
    for name in ("first_loss", "final_loss", "validation_loss"):
        assert two[name] == one[name], name  # to the last bit, by other routes


def test_a_cut_line_in_the_middle_of_training_ends_it_in_time(hosts: Network, tmp_path: Path) -> None:
    (tmp_path / "endless").touch()
    job = HostsJob(hosts, tmp_path, ELASTIC, "--hosts", "n1,n2", environment={"OMP_NUM_THREADS": "1"})
    job.wait_for_files(f"saved-at-{SAVE_EVERY}")
    hosts["n2"].cut()
    job.wait_until_gone(NOTICED_SECONDS)
    result = job.finish()
    assert result.status == 1
    assert "lost host n2: nothing was heard from it for 4 s" in result.err


@pytest.mark.slow
def test_a_job_goes_on_from_the_newest_checkpoint_on_the_hosts_that_are_left(hosts: Network, tmp_path: Path) -> None:
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    for folder in (calm, stormy):
        folder.mkdir()
    environment = {"OMP_NUM_THREADS": "1"}
    assert HostsJob(hosts, calm, ELASTIC, "--hosts", "n1:1", environment=environment).finish().status == 0
    (stormy / "slow").touch()
    options = ["--hosts", "n1,n2", "--max-restarts", "1", "--min-hosts", "1", "--lost-after", "2"]
    job = HostsJob(hosts, stormy, ELASTIC, *options, environment=environment)
    job.wait_for_files(f"saved-at-{STEPS // 2}")
    hosts["n2"].kill()
    (stormy / "slow").unlink()
    result = job.finish()
    assert result.status == 0, result
    assert "lost host n2" in result.err
    assert (stormy / "world0").read_text() == "2" and (stormy / "world1").read_text() == "1"
    first, *_ = (stormy / "losses1.txt").read_text().split()
    assert int(first) >= STEPS // 2  # it did not begin anew
    expected, found = losses(calm), losses(stormy)
    assert list(expected) == list(found) == list(range(STEPS))
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-6)


def test_a_full_disk_under_a_checkpoint_ends_the_job_and_is_told(hosts: Network, tmp_path: Path) -> None:
    with hosts["n2"].small_disk(tmp_path / "saved", "16k"):
        result = HostsJob(hosts, tmp_path, ELASTIC, "--hosts", "n2:1").finish()
    assert result.status == 1
    assert "rank 0 of 1 (host n2, " in result.err
    assert "saving checkpoint 'global_step3' to saved failed" in result.err
    assert "No space left on device" in result.err
