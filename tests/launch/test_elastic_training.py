"""Training goes on after the loss of a host, with the global batch, the data and the losses of a run that lost none."""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import lowtide
from tests.launch import fakes
from tests.launch.jobs import Job
from tests.ranks import RankPool

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, SAVE_EVERY, LOST_AFTER = 8, 3, 5  # what was done after step 3 is lost with the host
HANG_SECONDS = 150.0  # where two cores are busy with other things, a process with torch takes seconds to start
SAYS = """
import os, pathlib, signal, sys, time
attempt, host, rank = (os.environ.get(name, "") for name in ("LOWTIDE_RESTART_COUNT", "FAKE_HOST", "RANK"))
with open("said", "a") as file:
    print(attempt, rank, "of", os.environ["WORLD_SIZE"], "first", os.environ["LOWTIDE_FIRST_WORLD_SIZE"], file=file)
"""
# The example as it is, watched: losses go to a file, and the host that is named in LOSES is lost after a step.
WATCHED_EXAMPLE = f"""
import os, pathlib, signal, sys, time, types
sys.path.insert(0, {str(EXAMPLES)!r})
import lowtide, train_gpt
sys.modules["loss_curve"] = types.SimpleNamespace(draw_loss_curve=lambda *_: None)  # matplotlib starts for a second
attempt, train_step = os.environ["LOWTIDE_RESTART_COUNT"], lowtide.Engine.train_step

def watched(engine, batch):
    result = train_step(engine, batch)
    if engine.rank == 0:
        rows = [engine.config.train_batch_size, engine.world_size, len(batch["tokens"])]
        with open(f"losses{{attempt}}", "a") as file:
            print(engine.global_step, result.loss.item().hex(), *rows, file=file)
    if engine.global_step == {LOST_AFTER} and attempt == "0" and os.environ["FAKE_HOST"] == os.environ["LOSES"]:
        while pathlib.Path("losses0").read_text().count("\\n") < {LOST_AFTER}:  # rank 0 is to finish this step too
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return result

lowtide.Engine.train_step = watched
train_gpt.main()
"""


def on_hosts(folder: Path, source: str, hosts: str, *options: str, loses: str, arguments: tuple[str, ...] = ()) -> Job:
    """On hosts that are all this machine, by an ssh that is none."""
    folder.mkdir(exist_ok=True)
    variables = {**fakes.install(folder / "bin", "ssh", fakes.SSH), "LOSES": loses, "OMP_NUM_THREADS": "1"}
    where = ("--hosts", hosts, "--transport", "ssh", "--no-preflight")
    return Job(folder, source, *where, *options, arguments=arguments, variables=variables)


def train_calmly(folder: Path, arguments: list[str]) -> dict[int, float]:
    """The example on this rank, of which no host is lost: its losses by step."""
    found, train_step = dict[int, float](), lowtide.Engine.train_step

    def watched(engine: lowtide.Engine, batch: Any) -> lowtide.StepResult:
        result = train_step(engine, batch)
        found[engine.global_step] = result.loss.item()
        return result

    folder.mkdir()
    os.chdir(folder)
    with patch.object(lowtide.Engine, "train_step", watched), patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        import train_gpt

        train_gpt.main(arguments)
    return found


def losses(file: Path) -> dict[int, float]:
    """By step."""
    return {
        int(step): float.fromhex(loss)
        for step, loss, *_ in map(str.split, file.read_text(encoding="utf-8").splitlines())
    }


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
    job = on_hosts(tmp_path, SAYS + source, "a:2,b:1", "--max-restarts", "2", "--min-hosts", "1", loses="b")
    status, _, err = job.finish()
    assert status == 0, err
    said = {line[:1] + line[3:] for line in (tmp_path / "said").read_text().splitlines()}  # without the rank
    assert said == {"0 of 3 first 3", "1 of 2 first 3", "2 of 2 first 3"}


def test_the_example_goes_on_without_a_lost_host_as_if_nothing_had_happened(ranks: RankPool, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        (data / f"file{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 40, encoding="utf-8")
    size = ("--layers", "1", "--heads", "2", "--width", "16", "--context", "16")
    saving = ("--checkpoints", "saved", "--save-every", str(SAVE_EVERY), "--steps", str(STEPS))
    arguments = (*size, *saving, "--data", str(data), "--sample-bytes", "0", "--out", "out", "--report", "report.json")
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    batch = "--batch-size-per-process"
    (expected,) = ranks(1, train_calmly, calm, [*arguments, batch, "8"], process_group=False)
    elastic = ("--max-restarts", "1", "--min-hosts", "1")
    job = on_hosts(stormy, WATCHED_EXAMPLE, "a:1,b:1", *elastic, loses="b", arguments=(*arguments, batch, "4"))
    status, out, err = job.finish(HANG_SECONDS)
    assert status == 0, err
    assert "lost host b" in err and "restart 1 of 1 on a\n" in err
    assert (
        "config: train_batch_size: stays 8 on 1 rank, as the job began on 2: microbatch x accumulation x data-parallel "
        "ranks is now 4 x 2 x 1, was 4 x 1 x 2"
    ) in out

    before, after = losses(stormy / "losses0"), losses(stormy / "losses1")
    assert list(expected) == list(range(1, STEPS + 1))
    assert list(before) == list(range(1, LOST_AFTER + 1))
    assert list(after) == list(range(SAVE_EVERY + 1, STEPS + 1))  # from the newest checkpoint on
    for found in (before, after):
        assert found == pytest.approx({step: expected[step] for step in found}, abs=1e-5)
    ends = [line.split()[2:] for file in ("losses0", "losses1") for line in (stormy / file).read_text().splitlines()]
    assert [ends[0], ends[-1]] == [["8", "2", "4"], ["8", "1", "8"]]  # global batch, ranks, rows of this rank
    reports = [json.loads((folder / "report.json").read_text(encoding="utf-8")) for folder in (calm, stormy)]
    assert reports[1]["validation_loss"] == pytest.approx(reports[0]["validation_loss"], abs=1e-5)
