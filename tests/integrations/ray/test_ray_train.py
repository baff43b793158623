"""Ray Train on a real cluster of this machine: the example, of which a worker is killed."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install 'lowtide[ray]'")

EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_train.py"
SECONDS = 500.0  # a cluster starts some ten processes, each worker imports torch, and all of that twice
LEAN = {  # actors that this run has no use for, each a process that imports ray; and a look every half second, not 2
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_worker_niceness": "0",  # workers of niceness 15, Ray's own choice, get nothing done beside other tests
}


@pytest.mark.slow
def test_a_killed_worker_makes_all_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    options = ["--steps", "5", "--save-every", "2", "--kill-worker-at", "3", "--layers", "2"]
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options, "--storage", str(tmp_path)],
        env={
            **{name: value for name, value in os.environ.items() if name not in unset},
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            **LEAN,
        },
        text=True,
        capture_output=True,
        timeout=SECONDS,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert (tmp_path / "killed").exists()
    assert "goes on at step 2" in said
    (saved,) = re.findall(r"^step 5: loss .* saved in (.*)$", done.stdout, re.MULTILINE)
    assert (Path(saved) / "latest").read_text().strip() == "global_step5"
    left = sorted(path.name for path in (tmp_path / "lowtide").iterdir() if path.name.startswith(".lowtide"))
    assert left == []


class _Engine:
    global_step = 3
    rank = 0

    def __init__(self, is_async: bool) -> None:
        self.config = SimpleNamespace(checkpoint=SimpleNamespace(asynchronous=is_async))

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is to be saved")


@pytest.mark.parametrize(
    ("is_async", "kind", "text"),
    [
        (True, "local", "checkpoint.async: expected false with lowtide.ray.report"),
        (False, "s3", 'expected a storage_path that is a folder every worker sees, found "s3"'),
    ],
)
def test_what_ray_could_not_take_up_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_async: bool, kind: str, text: str
) -> None:
    import ray.train

    from lowtide.ray import report

    storage = SimpleNamespace(storage_filesystem=SimpleNamespace(type_name=kind), experiment_fs_path="/nowhere")
    monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(get_storage=lambda: storage))
    with pytest.raises(ValueError, match=re.escape(text)):
        report(_Engine(is_async), {})  # type: ignore[arg-type]
