"""Trains a small model on the workers of Ray Train, which goes on by itself when one of them is lost.

    python examples/ray_train.py --workers 2 --config zero3

Each worker is a rank of lowtide. Every few steps they save a checkpoint together, and Ray keeps it: where a worker is
killed, Ray starts all again, and they go on from the last one.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn

import lowtide
from lowtide.ray import report, restore

FEATURES = 16


class Model(nn.Module):
    """A regression; its output is the loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(layers))
        self.last = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.mse_loss(self.last(x), y)


def batch_of(step: int, rank: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows whose second entry is the mean of the first; others for each step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, FEATURES, generator=generator)
    return x, x.mean(1, keepdim=True)


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    torch.manual_seed(0)
    engine = lowtide.initialize(Model(config["layers"]), config["engine"])
    if restore(engine) is not None and engine.rank == 0:
        print(f"goes on at step {engine.global_step}", flush=True)
    while engine.global_step < config["steps"]:
        step = engine.global_step
        if step == config["killed_at"] and engine.rank == 1 and not Path(config["mark"]).exists():
            Path(config["mark"]).touch()
            ray.train.get_all_reported_checkpoints()  # until Ray has taken up what was reported, some seconds later
            os.kill(os.getpid(), signal.SIGKILL)
        result = engine.train_step(batch_of(step, engine.data_rank, config["rows"]))
        saves = engine.global_step % config["save_every"] == 0 or engine.global_step == config["steps"]
        report(engine, {"loss": result.loss.item(), "step": engine.global_step}, saves=saves)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="zero3", help="a JSON file or the name of a preset (default: zero3)")
    parser.add_argument("--workers", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: 40)")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints (default: 10)")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch of each worker (default: 8)")
    parser.add_argument("--layers", type=int, default=4, help="layers (default: 4)")
    parser.add_argument(
        "--storage", type=Path, default=Path("runs/ray"), help="folder; a run in it goes on (default: runs/ray)"
    )
    parser.add_argument("--kill-worker-at", type=int, help="kill a worker at this step, to see the others go on")
    arguments = parser.parse_args()

    storage = arguments.storage.resolve()
    storage.mkdir(parents=True, exist_ok=True)
    engine = lowtide.Config.load(arguments.config).as_dict()
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "engine": engine,
            "layers": arguments.layers,
            "steps": arguments.steps,
            "rows": arguments.rows,
            "save_every": arguments.save_every,
            "killed_at": arguments.kill_worker_at,
            "mark": str(storage / "killed"),
        },
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name="lowtide",
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=2),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    assert result.metrics is not None and result.checkpoint is not None
    print(f"step {result.metrics['step']}: loss {result.metrics['loss']:.4f}, saved in {result.checkpoint.path}")


if __name__ == "__main__":
    if not ray.is_initialized() and "RAY_ADDRESS" not in os.environ:
        ray.init(num_cpus=max(4, os.cpu_count() or 1), include_dashboard=False, object_store_memory=80 << 20)
    main()
