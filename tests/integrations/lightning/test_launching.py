"""The example as a user starts it: by the Trainer on two ranks, then by `lowtide launch` from what they have saved."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
SCRIPT = str(CHECKOUT / "examples" / "lightning_train.py")
LAUNCH = ["-c", "import sys; from lowtide.bin.main import main; sys.exit(main())", "launch", "--nproc", "1"]
SIZE = ["--devices", "2", "--accelerator", "cpu", "--batch-size", "4", "--pieces", "40"]
SIZE += ["--layers", "2", "--width", "16", "--context", "16"]


def run(*command: str) -> str:
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, *command],
        env={**inherited, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_lowtide_launch_goes_on_from_what_the_trainer_has_launched(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(4):
        (source / f"file{number}.py").write_text("def f(x):\n    return x\n" * 40, encoding="utf-8")
    options = [*SIZE, "--data", str(source), "--out", str(tmp_path / "out")]
    first = run(SCRIPT, *options, "--epochs", "1")
    saved = str(tmp_path / "out" / "last.ckpt")
    alone = ["--devices", "1", "--batch-size", "8"]
    second = run(*LAUNCH, SCRIPT, *options, *alone, "--epochs", "2", "--resume", saved)
    (before,), (after,) = (
        re.findall(rf"step {step}: validation loss ([0-9.]+)", said) for step, said in ((5, first), (10, second))
    )
    assert float(after) < float(before)
