"""Restarts: how often, on which hosts, and when there is none; and training that goes on after the loss of a host."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import lowtide
from tests.kit.ranks import RankPool
from tests.launch import fakes
from tests.launch.jobs import Job

SAYS = """
import os, pathlib, signal, sys, time
attempt, host, first = os.environ["LOWTIDE_RESTART_COUNT"], os.environ.get("FAKE_HOST", ""), "LOWTIDE_FIRST_WORLD_SIZE"
assert attempt == os.environ["TORCHELASTIC_RESTART_COUNT"] and os.environ["TORCHELASTIC_RUN_ID"]
with open("said", "a") as file:
    file.write(f"{attempt} {host} {os.environ['RANK']} of {os.environ['WORLD_SIZE']} first {os.environ[first]}\\n")
"""
B_IS_LOST = "if host == 'b': os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60 if attempt == '0' else 0)"
ONE = ("--nproc", "1")


def on_hosts(folder: Path, source: str, hosts: str, *options: str, ssh: str = fakes.SSH) -> Job:
    """On hosts that are all this machine, by an ssh that is none."""
    variables = fakes.install(folder / "bin", "ssh", ssh)
    options = ("--hosts", hosts, "--transport", "ssh", "--no-preflight", *options)
    return Job(folder, SAYS + source, *options, variables=variables)


def said(folder: Path) -> set[str]:
    return {line.partition(" first ")[0] for line in (folder / "said").read_text().splitlines()}


def test_a_failed_job_starts_again_as_often_as_allowed(tmp_path: Path) -> None:
    status, _, err = Job(tmp_path, SAYS + "sys.exit(4)", *ONE, "--max-restarts", "2").finish()
    assert status == 4 and said(tmp_path) == {"0  0 of 1", "1  0 of 1", "2  0 of 1"}
    assert "restart 1 of 2 on " in err and "restart 2 of 2 on " in err and err.count("failed with exit status 4") == 3


def test_a_signal_starts_nothing_again(tmp_path: Path) -> None:
    job = Job(tmp_path, SAYS + "pathlib.Path('ready').touch(); time.sleep(60)", *ONE, "--max-restarts", "2")
    job.wait_for_files("ready")
    job.launcher.terminate()
    assert job.finish().status == 128 + signal.SIGTERM and said(tmp_path) == {"0  0 of 1"}


@pytest.mark.parametrize(
    ("source", "hosts", "options", "expected", "has_said"),
    [
        (
            B_IS_LOST,
            "a:1,b:1",
            ("--max-restarts", "1", "--min-hosts", "1"),
            (0, ["lost host b", "restart 1 of 1 on a\n"]),
            {"0 a 0 of 2", "0 b 1 of 2", "1 a 0 of 1"},
        ),
        (
            B_IS_LOST,
            "a:1,b:1",
            ("--max-restarts", "3"),
            (1, ["no restart: 1 hosts are left, the job needs at least 2"]),
            {"0 a 0 of 2", "0 b 1 of 2"},
        ),
        (
            B_IS_LOST,
            "a:1,b:1,c:1",
            ("--max-restarts", "1", "--max-hosts", "2"),
            (0, []),
            {"0 a 0 of 2", "0 b 1 of 2", "1 a 0 of 2", "1 c 1 of 2"},
        ),
        (
            "if host == 'b': sys.exit(6)\ntime.sleep(60 if int(attempt) < 2 else 0)",
            "a:1,b:1",
            ("--max-restarts", "2", "--min-hosts", "1"),
            (0, ["restart 1 of 2 on a, b\n", "b is excluded: the first failure was on it 2 times in a row"]),
            {"0 a 0 of 2", "0 b 1 of 2", "1 a 0 of 2", "1 b 1 of 2", "2 a 0 of 1"},
        ),
    ],
    ids=["lost_is_left_out", "all_are_needed", "reserve", "fails_twice"],
)
def test_a_job_goes_on_with_the_hosts_that_are_left(
    tmp_path: Path,
    source: str,
    hosts: str,
    options: tuple[str, ...],
    expected: tuple[int, list[str]],
    has_said: set[str],
) -> None:
    status, _, err = on_hosts(tmp_path, source, hosts, *options).finish()
    assert status == expected[0] and all(text in err for text in expected[1]), err
    assert said(tmp_path) <= has_said and max(said(tmp_path)) == max(has_said)  # who is killed may have said nothing


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_host_that_cannot_be_reached_any_more_is_left_out_of_restarts_only(tmp_path: Path, restarts: str) -> None:
    gone = fakes.SSH.replace('host == "gone"', 'host == "b" and os.path.exists("said")')
    options = ("--min-hosts", "1", "--max-restarts", restarts)
    status, _, err = on_hosts(tmp_path, "sys.exit(attempt == '0')", "a:1,b:1", *options, ssh=gone).finish()
    assert status == (1 if restarts == "0" else 0), err
    assert ("The restart continues without b." in err) == (restarts == "1")


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
    result = on_hosts(tmp_path, source, "a:2,b:1", "--max-restarts", "2", "--min-hosts", "1").finish()
    assert result.status == 0, result
    told = [line.split() for line in (tmp_path / "said").read_text().splitlines()]
    assert {(line[0], line[4], line[6]) for line in told} == {("0", "3", "3"), ("1", "2", "3"), ("2", "2", "3")}


# -- training: with the global batch, the data and the losses of a run that lost no host -----------------------------

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, SAVE_EVERY, LOST_AFTER = 8, 3, 5  # what was done after step 3 is lost with the host


Found = tuple[dict[int, float], tuple[int | None, int, int]]
"""Losses by step; of the last one the global batch, the ranks and the rows of this rank."""


class LostError(Exception):
    """What ends a training in place of the loss of a host."""


def train_example(folder: Path, arguments: list[str], lost_after: int, variables: dict[str, str]) -> Found:
    """The example on this rank, until it is lost after a step, as an attempt of the launcher."""
    losses: dict[int, float] = {}
    batches, train_step = [], lowtide.Engine.train_step

    def watched(engine: lowtide.Engine, batch: Any) -> lowtide.StepResult:
        result = train_step(engine, batch)
        losses[engine.global_step] = result.loss.item()
        batches.append((engine.config.train_batch_size, engine.world_size, len(batch["tokens"])))
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
    return losses, batches[-1]


def test_the_example_goes_on_without_a_lost_host_as_if_nothing_had_happened(
    ranks: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With what the launcher tells every attempt."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        (data / f"file{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 40, encoding="utf-8")
    arguments = f"--layers 1 --heads 2 --width 16 --context 16 --checkpoints saved --save-every {SAVE_EVERY}".split()
    arguments += f"--steps {STEPS} --sample-bytes 0 --out out --report report.json --data".split()
    arguments += [str(data), "--batch-size-per-process"]
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"

    def attempt(num_ranks: int, folder: Path, rows: int, lost_after: int, first: int) -> Found:
        variables = {"LOWTIDE_FIRST_WORLD_SIZE": str(first)}
        given = (folder, [*arguments, str(rows)], lost_after, variables)
        found: list[Found] = ranks(num_ranks, train_example, *given, process_group=False)
        return found[0]

    expected, _ = attempt(1, calm, 8, 0, 1)
    before, batch_before = attempt(2, stormy, 4, LOST_AFTER, 2)
    capfd.readouterr()
    after, batch_after = attempt(1, stormy, 4, 0, 2)
    assert (
        "config: train_batch_size: stays 8 on 1 rank, as the job began on 2: microbatch x accumulation x data-parallel "
        "ranks is now 4 x 2 x 1, was 4 x 1 x 2"
    ) in "".join(capfd.readouterr())
    assert [batch_before, batch_after] == [(8, 2, 4), (8, 1, 8)]
    assert (list(before), list(after)) == ([1, 2, 3, 4, 5], [4, 5, 6, 7, 8])  # from the newest checkpoint on
    for losses in (before, after):
        assert losses == pytest.approx({step: expected[step] for step in losses}, abs=1e-5)
    reports = [json.loads((folder / "report.json").read_text(encoding="utf-8")) for folder in (calm, stormy)]
    assert reports[1]["validation_loss"] == pytest.approx(reports[0]["validation_loss"], abs=1e-5)
