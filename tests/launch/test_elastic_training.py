"""Training goes on after the loss of a host, with the global batch, the data and the losses of a run that lost none."""

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import lowtide
from tests.kit.ranks import RankPool
from tests.launch import fakes
from tests.launch.jobs import Job

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, SAVE_EVERY, LOST_AFTER = 8, 3, 5  # what was done after step 3 is lost with the host
SAYS = """
import os, pathlib, signal, sys, time
attempt, host, rank = (os.environ.get(name, "") for name in ("LOWTIDE_RESTART_COUNT", "FAKE_HOST", "RANK"))
with open("said", "a") as file:
    print(attempt, rank, "of", os.environ["WORLD_SIZE"], "first", os.environ["LOWTIDE_FIRST_WORLD_SIZE"], file=file)
"""


@dataclass
class Found:
    """Losses by step; of the last one the global batch, the ranks and the rows of this rank."""

    losses: dict[int, float] = field(default_factory=dict)
    batch: tuple[int | None, int, int] = (None, 0, 0)


class LostError(Exception):
    """What ends a training in place of the loss of a host."""


def train_example(folder: Path, arguments: list[str], lost_after: int, variables: dict[str, str]) -> Found:
    """The example on this rank, until it is lost after a step, as an attempt of the launcher."""
    found, train_step = Found(), lowtide.Engine.train_step

    def watched(engine: lowtide.Engine, batch: Any) -> lowtide.StepResult:
        result = train_step(engine, batch)
        found.losses[engine.global_step] = result.loss.item()
        found.batch = (engine.config.train_batch_size, engine.world_size, len(batch["tokens"]))
        if engine.global_step == lost_after:
            raise LostError
        return result

    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    with (
        patch.object(lowtide.Engine, "train_step", watched),
        patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        patch.dict(os.environ, variables),
        suppress(LostError),
    ):
        import train_gpt

        train_gpt.main(arguments)
    return found


def on_hosts(folder: Path, source: str, hosts: str, *options: str) -> Job:
    """On hosts that are all this machine, by an ssh that is none."""
    variables = fakes.install(folder / "bin", "ssh", fakes.SSH)
    return Job(folder, source, "--hosts", hosts, "--transport", "ssh", "--no-preflight", *options, variables=variables)


def test_every_attempt_is_told_how_many_ranks_the_first_one_had(tmp_path: Path) -> None:
    source = """
if host == "b":
    while len(pathlib.Path("said").read_text().splitlines()) < 3:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGKILL)
if attempt == "0":
    signal.pause()
sys.exit(attempt == "1")
"""
    job = on_hosts(tmp_path, SAYS + source, "a:2,b:1", "--max-restarts", "2", "--min-hosts", "1")
    status, _, err = job.finish()
    assert status == 0, err
    said = {line[:1] + line[3:] for line in (tmp_path / "said").read_text().splitlines()}  # without the rank
    assert said == {"0 of 3 first 3", "1 of 2 first 3", "2 of 2 first 3"}


def test_the_example_goes_on_without_a_lost_host_as_if_nothing_had_happened(
    ranks: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With what the launcher tells every attempt."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        (data / f"file{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 40, encoding="utf-8")
    size = ("--layers", "1", "--heads", "2", "--width", "16", "--context", "16")
    saving = ("--checkpoints", "saved", "--save-every", str(SAVE_EVERY), "--steps", str(STEPS))
    arguments = [*size, *saving, "--data", str(data), "--sample-bytes", "0", "--out", "out", "--report", "report.json"]
    arguments += ["--batch-size-per-process"]
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"

    def attempt(num_ranks: int, folder: Path, rows: int, lost_after: int, first: int) -> Found:
        variables = {"LOWTIDE_FIRST_WORLD_SIZE": str(first)}
        found: list[Found] = ranks(
            num_ranks, train_example, folder, [*arguments, str(rows)], lost_after, variables, process_group=False
        )
        return found[0]

    expected = attempt(1, calm, 8, 0, 1)
    before = attempt(2, stormy, 4, LOST_AFTER, 2)
    capfd.readouterr()
    after = attempt(1, stormy, 4, 0, 2)
    assert (
        "config: train_batch_size: stays 8 on 1 rank, as the job began on 2: microbatch x accumulation x data-parallel "
        "ranks is now 4 x 2 x 1, was 4 x 1 x 2"
    ) in "".join(capfd.readouterr())

    assert list(expected.losses) == list(range(1, STEPS + 1))
    assert list(before.losses) == list(range(1, LOST_AFTER + 1))
    assert list(after.losses) == list(range(SAVE_EVERY + 1, STEPS + 1))  # from the newest checkpoint on
    for found in (before, after):
        assert found.losses == pytest.approx({step: expected.losses[step] for step in found.losses}, abs=1e-5)
    assert [before.batch, after.batch] == [(8, 2, 4), (8, 1, 8)]
    reports = [json.loads((folder / "report.json").read_text(encoding="utf-8")) for folder in (calm, stormy)]
    assert reports[1]["validation_loss"] == pytest.approx(reports[0]["validation_loss"], abs=1e-5)
