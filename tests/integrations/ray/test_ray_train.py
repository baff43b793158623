"""Ray Train: the example on ranks of the pool with Ray's own storage; and, where it is asked for, on a real cluster."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.kit.ranks import RankPool

pytest.importorskip("ray", reason="ray is not installed: pip install 'lowtide[ray]'")

EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_train.py"
CLUSTER = "LOWTIDE_RAY_CLUSTER"


def worker(storage_path: Path, steps: int, killed_at: int | None, last: str | None) -> tuple[list[dict[str, Any]], str]:
    """The example's `train` on this rank, as a worker of Ray; what it reports, and where its last checkpoint is.

    The functions of `ray.train` and the storage are Ray's. last: the checkpoint from which the run goes on.
    """
    from ray.train import Checkpoint
    from ray.train.v2._internal.execution import train_fn_utils
    from ray.train.v2._internal.execution.storage import StorageContext

    import lowtide

    storage = StorageContext(storage_path, "lowtide")
    reported: list[dict[str, Any]] = []

    functions: Any = train_fn_utils.LocalTrainFnUtils("lowtide")

    def take(metrics: dict[str, Any], checkpoint: Any, **how: Any) -> None:
        reported.append(metrics)
        if checkpoint is not None:
            functions.last = storage.persist_current_checkpoint(checkpoint, f"checkpoint_{metrics['step']}")
            assert how["delete_local_checkpoint_after_upload"]
            shutil.rmtree(checkpoint.path)
        dist.barrier()  # Ray waits for all workers

    functions.report = take
    functions.last = None if last is None else Checkpoint(last)
    functions.get_checkpoint = lambda: functions.last
    functions.get_context().get_storage = lambda: storage
    train_fn_utils.set_train_fn_utils(functions)
    sys.path.insert(0, str(EXAMPLE.parent))
    import ray_train

    config = {"engine": lowtide.Config.load("zero3").as_dict(), "layers": 2, "rows": 4, "save_every": 2}
    ray_train.train({**config, "steps": steps, "killed_at": killed_at, "mark": str(storage_path / "killed")})
    return reported, "" if functions.last is None else functions.last.path


def test_workers_go_on_from_the_last_checkpoint_when_one_is_killed(
    ranks: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, _ = ranks(2, worker, tmp_path / "whole", 5, None, None)[0]
    _, killed = ranks.fails(2, worker, tmp_path, 5, 3, None)
    assert killed.kind == "Died" and (tmp_path / "killed").exists()
    last = tmp_path / "lowtide" / "checkpoint_2"
    capfd.readouterr()
    rest, saved = ranks(2, worker, tmp_path, 5, 3, str(last))[0]
    assert "goes on at step 2" in "".join(capfd.readouterr())
    assert [metrics["step"] for metrics in rest] == [3, 4, 5] and rest == whole[2:]
    assert (Path(saved) / "latest").read_text().strip() == "global_step5"
    assert not list((tmp_path / "lowtide").glob(".lowtide*"))


LEAN = {  # actors that this run has no use for, each a process that imports ray; and a look every half second, not 2
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_prestart_worker_first_driver": "0",  # workers of no task, as many as cores
    "RAY_worker_niceness": "0",  # workers of niceness 15, Ray's own choice, get nothing done beside other tests
}


@pytest.mark.skipif(os.environ.get(CLUSTER) != "1", reason=f"its ten processes take 100 s of CPU time: {CLUSTER}=1")
def test_on_a_cluster_a_killed_worker_makes_all_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    options = ["--steps", "5", "--save-every", "2", "--kill-worker-at", "3", "--layers", "2"]
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options, "--storage", str(tmp_path)],
        env={**inherited, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **LEAN},
        text=True,
        capture_output=True,
        timeout=500.0,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert (tmp_path / "killed").exists() and "goes on at step 2" in said
    (saved,) = re.findall(r"^step 5: loss .* saved in (.*)$", done.stdout, re.MULTILINE)
    assert (Path(saved) / "latest").read_text().strip() == "global_step5"
    assert not list((tmp_path / "lowtide").glob(".lowtide*"))


class _Engine:
    global_step = 3
    rank = 0

    def __init__(self, is_async: bool) -> None:
        self.config = SimpleNamespace(checkpoint=SimpleNamespace(asynchronous=is_async))

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is to be saved")


@pytest.mark.parametrize(
    ("is_async", "kind", "folder", "text"),
    [
        (True, "local", None, "checkpoint.async: expected false with lowtide.ray.report"),
        (False, "s3", None, 'expected a storage_path that is a folder every worker sees, found "s3"'),
        (False, "local", "", "expected the path of a folder"),
    ],
)
def test_what_ray_could_not_take_up_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_async: bool, kind: str, folder: str | None, text: str
) -> None:
    import ray.train

    from lowtide.ray import report

    storage = SimpleNamespace(storage_filesystem=SimpleNamespace(type_name=kind), experiment_fs_path="/nowhere")
    monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(get_storage=lambda: storage))
    with pytest.raises(ValueError, match=re.escape(text)):
        report(_Engine(is_async), {}, folder=folder)  # type: ignore[arg-type]
