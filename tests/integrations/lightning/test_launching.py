"""The example on the ranks of a launcher, then on one from what they have saved; and who starts the ranks."""

import contextlib
import io
import os
import re
import sys
import warnings
from pathlib import Path
from unittest import mock

from tests.integrations.lightning.modules import lightning
from tests.kit.ranks import RankPool, on_ranks

EXAMPLES = Path(__file__).parents[3] / "examples"
SIZE = ["--accelerator", "cpu", "--pieces", "40", "--layers", "2", "--width", "16", "--context", "16"]


def on_a_rank(arguments: list[str]) -> str:
    """With the variables that tell Lightning of a launcher: `tests/launch` shows that ours sets them."""
    os.environ.update(TORCHELASTIC_RUN_ID="job", TORCHELASTIC_RESTART_COUNT="0")
    sys.path.insert(0, str(EXAMPLES))
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as said:
        warnings.simplefilter("ignore")  # they end no script
        import lightning_train

        lightning_train.main(arguments)
    return said.getvalue()


def test_the_example_goes_on_with_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(4):
        (source / f"file{number}.py").write_text("def f(x):\n    return x\n" * 40, encoding="utf-8")
    options = [*SIZE, "--data", str(source), "--out", str(tmp_path / "out")]
    two = ["--devices", "2", "--batch-size", "4", "--epochs", "1"]
    one = ["--devices", "1", "--batch-size", "8", "--epochs", "2", "--resume", str(tmp_path / "out" / "last.ckpt")]
    first, second = (
        ranks(number, on_a_rank, [*options, *how], process_group=False)[0] for number, how in ((2, two), (1, one))
    )
    (before,), (after,) = (
        re.findall(rf"step {step}: validation loss ([0-9.]+)", said) for step, said in ((5, first), (10, second))
    )
    assert float(after) < float(before)


@on_ranks(1)
def test_without_a_launcher_the_trainer_starts_the_ranks_itself() -> None:
    pl = lightning()
    own = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID")}
    with mock.patch.dict(os.environ, own, clear=True):
        runner = pl.Trainer(accelerator="cpu", devices=2, strategy="lowtide_stage_3", logger=False)
        assert type(runner.strategy.launcher).__name__ == "_SubprocessScriptLauncher"
