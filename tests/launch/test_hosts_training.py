"""Training over two hosts: the losses of one host, a line that is cut in the middle, a disk that is full."""

import json
import sys
from pathlib import Path

import pytest

from tests.launch.hosts_job import HostsJob
from tests.launch.jobs import LAUNCH
from tests.launch.network import Network
from tests.ranks import RankPool

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


def arguments_of_example(folder: Path) -> list[str]:
    """Of examples/train_gpt.py, tiny, under stage 3."""
    data = folder / "data"
    data.mkdir(parents=True)
    for number in range(3):
        (data / f"file{number}.py").write_text("def f(x):\n    return x\n" * 40, encoding="utf-8")
    size = [*SIZE, "--data", str(data), "--steps", "8", "--sample-bytes", "0"]
    return [*size, "--out", str(folder / "out"), "--report", str(folder / "report.json"), "--config", "zero3"]


def train_here(arguments: list[str]) -> None:
    sys.path.insert(0, str(EXAMPLE.parent))
    import train_gpt

    train_gpt.main(arguments)


@pytest.mark.slow
def test_two_hosts_train_as_one_host_of_three_ranks(hosts: Network, ranks: RankPool, tmp_path: Path) -> None:
    ranks(3, train_here, arguments_of_example(tmp_path / "one"), process_group=False)  # a sum of two has one order
    command = [*LAUNCH, "--hosts", "n1:2,n2:1", str(EXAMPLE), *arguments_of_example(tmp_path / "two")]
    job = HostsJob.of_command(hosts, tmp_path / "two", command, environment={"OMP_NUM_THREADS": "1"})
    result = job.finish()
    assert result.status == 0, result
    job.wait_until_gone(1.0)
    one, two = (json.loads((tmp_path / name / "report.json").read_text(encoding="utf-8")) for name in ("one", "two"))
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
