"""A training with delayed updates learns what one learns that waits for them."""

from pathlib import Path

from torch import Tensor

from tests.engine.saving import engine_for, run_steps
from tests.kit.models import short_gpt, token_batch
from tests.kit.training import Case
from tests.zero.test_delayed_update import delayed


def repeated_batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Eight batches again and again."""
    return token_batch(step % 8, rows)


def test_it_learns_what_a_run_that_waits_learns(tmp_path: Path) -> None:
    """Within 2 % of what is gained: as much as another seed moves it."""
    adamw = {"type": "adamw", "params": {"lr": 3e-3}}
    case = Case(short_gpt, repeated_batch, config={"optimizer": adamw})
    final = {}
    for overlap in ("none", "delayed"):
        engine = engine_for(delayed(case, 1, tmp_path, after=20, overlap=overlap), 1)
        losses = run_steps(engine, case, 0, 120).losses
        engine.close()
        final[overlap] = sum(losses[-8:]) / 8
    gained = losses[0] - final["none"]
    assert gained > 1.0 and final["none"] != final["delayed"]
    assert abs(final["delayed"] - final["none"]) < 0.02 * gained, final
