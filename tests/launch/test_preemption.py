"""SIGTERM to the launcher, with `checkpoint.on_sigterm`."""

import signal
from pathlib import Path

import pytest

from tests.engine.test_preemption import assert_goes_on
from tests.launch.jobs import Job

SCRIPT = """
import gc, pathlib, time
from tests.engine.saving import engine_for, run_steps
from tests.kit.models import mlp, vector_batch
from tests.kit.training import Case

gc.freeze()  # an end that need not go through all of torch is a second shorter
checkpoint = {"folder": "run", "on_sigterm": True, "async": True}
case = Case(mlp, vector_batch, 3, config={"checkpoint": checkpoint})
engine = engine_for(case, 1)
for step in range(2000):
    run_steps(engine, case, step, 1)
    if step == 2:
        pathlib.Path("trains").touch()
    time.sleep(0.05)
"""


def test_a_signal_to_the_launcher_ends_the_job_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved in the background: it is waited for."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    job = Job(tmp_path, SCRIPT, "--nproc", "1")
    job.wait_for_files("trains")
    job.process.send_signal(signal.SIGTERM)
    status, out, err = job.finish(60)
    assert status == 0, out + err
    assert_goes_on(tmp_path / "run")
