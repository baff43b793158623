"""Two ranks are killed at random moments of saving: what `latest` names loads, and is the newest complete one."""

from pathlib import Path

import pytest

from tests.checkpoint.crashing import KEPT, killed
from tests.kit.ranks import in_a_new_process

KILLS = 18  # each pair of stage and way to save three times


@pytest.mark.slow
def test_no_kill_loses_what_a_save_has_promised(tmp_path: Path) -> None:
    """Each job loads what the one before it has left, as two ranks, and goes on. Each checkpoint is read as a whole."""
    deaths = in_a_new_process(killed, tmp_path / "run", KILLS, 1, timeout=120)
    assert len(deaths) == KILLS
    for number, death in enumerate(deaths):
        # Between the return of a save and the kill another one may have been completed.
        assert death.promised_step <= death.found_step <= death.promised_step + 2, (number, death)
        assert death.num_saves > 0, (number, death)
        assert death.num_automatic <= KEPT + 2, (number, death)
    assert sum(death.was_saving for death in deaths) > KILLS / 5  # kills did hit a save
    found = [death.found_step for death in deaths]
    assert found == sorted(found) and found[-1] > KILLS / 4
