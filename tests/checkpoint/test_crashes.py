"""Two ranks are killed at random moments of saving: what `latest` names loads, and is the newest complete one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.crashing import KEPT

KILLS = 18  # each pair of stage and way to save three times


@pytest.mark.slow
def test_no_kill_loses_what_a_save_has_promised(tmp_path: Path) -> None:
    """Each job loads what the one before it has left, as two ranks, and goes on. Each checkpoint is read as a whole."""
    command = [sys.executable, "-m", "tests.checkpoint.crashing", str(tmp_path / "run"), str(KILLS), "1"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    deaths = json.loads(done.stdout.splitlines()[-1])
    assert len(deaths) == KILLS
    for number, death in enumerate(deaths):
        # Between the return of a save and the kill another one may have been completed.
        assert death["promised_step"] <= death["found_step"] <= death["promised_step"] + 2, (number, death)
        assert death["num_saves"] > 0, (number, done.stderr[-3000:])
        assert death["num_automatic"] <= KEPT + 2, (number, death)
    assert sum(death["was_saving"] for death in deaths) > KILLS / 5  # kills did hit a save
    found = [death["found_step"] for death in deaths]
    assert found == sorted(found) and found[-1] > KILLS / 4
