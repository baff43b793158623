"""Training over two hosts: the losses of one host, until a line is cut in the middle of it."""

import os
from pathlib import Path

from tests.kit.ranks import RankPool
from tests.launch.hosts_job import HostsJob
from tests.launch.network import Network

NOTICED_SECONDS = 8.0  # after 4 to 5 s of silence, and what two busy cores need to end processes with torch in them
SAVED_STEP = 3
TRAINS = f"""
import pathlib
import torch
import lowtide

torch.manual_seed(0)
config = {{"zero_optimization": {{"stage": 3}}, "optimizer": {{"type": "adamw"}}, "steps_per_print": 0}}
model = torch.nn.Sequential(*[torch.nn.Linear(13, 13) for _ in range(3)])
with lowtide.initialize(model, config, loss_fn=lambda output, batch: output.square().mean()) as engine:
    while engine.global_step < STEPS:
        loss = engine.train_step(torch.arange(13.0)[None] * (1 + engine.rank)).loss.item()
        if engine.rank == 0 and engine.global_step <= {SAVED_STEP}:
            with open("losses", "a") as file:
                print(loss.hex(), file=file)
        if engine.global_step == {SAVED_STEP}:
            engine.save_checkpoint("saved")
            pathlib.Path(f"saved{{engine.rank}}").touch()
"""


def train_here(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    exec(TRAINS, {"STEPS": SAVED_STEP})


def test_two_hosts_train_as_one_of_three_ranks_until_the_line_is_cut(
    hosts: Network, ranks: RankPool, tmp_path: Path
) -> None:
    ranks(3, train_here, tmp_path / "one", process_group=False)  # a sum of two has one order
    endless = f"STEPS = 1 << 30\n{TRAINS}"
    job = HostsJob(hosts, tmp_path, endless, "--hosts", "n1:2,n2:1", environment={"OMP_NUM_THREADS": "1"})
    job.wait_for_files("saved0", "saved1", "saved2")
    hosts["n2"].cut()
    job.wait_until_gone(NOTICED_SECONDS)
    result = job.finish()
    assert result.status == 1
    assert "lost host n2: nothing was heard from it for 4 s" in result.err
    one, two = ((folder / "losses").read_text().split() for folder in (tmp_path / "one", tmp_path))
    assert one == two and len(set(one)) == SAVED_STEP  # to the last bit, by other routes
