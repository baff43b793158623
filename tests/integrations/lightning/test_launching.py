"""The example as a user starts it: by the Trainer on two ranks, then on a launcher's from what they have saved."""

import contextlib
import io
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.kit.ranks import RankPool

EXAMPLES = Path(__file__).parents[3] / "examples"
SIZE = ["--devices", "2", "--accelerator", "cpu", "--batch-size", "4", "--pieces", "40"]
SIZE += ["--layers", "2", "--width", "16", "--context", "16"]


def launched_by_the_trainer(arguments: list[str]) -> str:
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "lightning_train.py"), *arguments],
        env={**inherited, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_a_rank(arguments: list[str]) -> str:
    """With the variables that tell Lightning of a launcher: `tests/launch` shows that ours sets them."""
    os.environ.update(TORCHELASTIC_RUN_ID="job", TORCHELASTIC_RESTART_COUNT="0")
    sys.path.insert(0, str(EXAMPLES))
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as said:
        warnings.simplefilter("ignore")  # they end no script
        import lightning_train

        lightning_train.main(arguments)
    return said.getvalue()


@pytest.mark.slow
def test_a_launched_rank_goes_on_from_what_the_trainer_has_launched(ranks: RankPool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(4):
        (source / f"file{number}.py").write_text("def f(x):\n    return x\n" * 40, encoding="utf-8")
    options = [*SIZE, "--data", str(source), "--out", str(tmp_path / "out")]
    first = launched_by_the_trainer([*options, "--epochs", "1"])
    saved = str(tmp_path / "out" / "last.ckpt")
    alone = ["--devices", "1", "--batch-size", "8", "--epochs", "2", "--resume", saved]
    (second,) = ranks(1, on_a_rank, [*options, *alone], process_group=False)
    (before,), (after,) = (
        re.findall(rf"step {step}: validation loss ([0-9.]+)", said) for step, said in ((5, first), (10, second))
    )
    assert float(after) < float(before)
