"""Training over two hosts: the losses of one host, a line that is cut in the middle, a disk that is full."""

import json
from pathlib import Path

import pytest

from tests.launch.hosts_job import HostsJob
from tests.launch.jobs import LAUNCH
from tests.launch.network import Network

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SIZE = ["--layers", "2", "--heads", "2", "--width", "16", "--context", "16", "--batch-size-per-process", "4"]
NOTICED_SECONDS = 8.0  # after 4 to 5 s of silence, and what two busy cores need to end processes with torch in them
SAVE_EVERY = 3

# It goes on until it is ended.
SAVES = f"""
import os, pathlib
import torch
import lowtide

config = {{"zero_optimization": {{"stage": 3}}, "optimizer": {{"type": "adamw"}}, "steps_per_print": 0}}
model = torch.nn.Sequential(*[torch.nn.Linear(13, 13) for _ in range(3)])
with lowtide.initialize(model, config, loss_fn=lambda output, batch: output.square().mean()) as engine:
    while True:
        engine.train_step(torch.ones(1, 13))
        if engine.global_step % {SAVE_EVERY} == 0:
            engine.save_checkpoint("saved")
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


@pytest.mark.slow
def test_two_hosts_train_as_one_host_of_three_ranks(hosts: Network, tmp_path: Path) -> None:
    reports = []  # of three ranks: a sum of two is the same in any order
    for name, options in {"one": ["--hosts", "n1:3"], "two": ["--hosts", "n1:2,n2:1"]}.items():
        folder = tmp_path / name
        folder.mkdir()
        job = example(hosts, folder, *options)
        result = job.finish()
        assert result.status == 0, result
        job.wait_until_gone(1.0)
        reports.append(json.loads((folder / "report.json").read_text(encoding="utf-8")))
    one, two = reports
    assert one["processes"] == two["processes"] == 3
    assert one["final_loss"] < one["first_loss"]
    for name in ("first_loss", "final_loss", "validation_loss"):
        assert two[name] == one[name], name  # to the last bit, by other routes


def test_a_cut_line_in_the_middle_of_training_ends_it_in_time(hosts: Network, tmp_path: Path) -> None:
    job = HostsJob(hosts, tmp_path, SAVES, "--hosts", "n1,n2", environment={"OMP_NUM_THREADS": "1"})
    job.wait_for_files(f"saved-at-{SAVE_EVERY}")
    hosts["n2"].cut()
    job.wait_until_gone(NOTICED_SECONDS)
    result = job.finish()
    assert result.status == 1
    assert "lost host n2: nothing was heard from it for 4 s" in result.err


def test_a_full_disk_under_a_checkpoint_ends_the_job_and_is_told(hosts: Network, tmp_path: Path) -> None:
    with hosts["n2"].small_disk(tmp_path / "saved", "16k"):
        result = HostsJob(hosts, tmp_path, SAVES, "--hosts", "n2:1").finish()
    assert result.status == 1
    assert "rank 0 of 1 (host n2, " in result.err
    assert "saving checkpoint 'global_step3' to saved failed" in result.err
    assert "No space left on device" in result.err
