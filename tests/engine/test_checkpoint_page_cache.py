"""A load leaves what one rank of a host reads out of the page cache, and what several read in it."""

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from tests.checkpoint.page_cache import forget, resident_pages, supports_direct
from tests.kit.ranks import RankPool

WIDTH = 512


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.layers(x), x)


def engine_at(stage: int) -> lowtide.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "adamw", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 0,
    }
    torch.manual_seed(0)
    return lowtide.initialize(Wide, config)


def save(folder: Path, stage: int) -> list[float]:
    engine = engine_at(stage)
    batch = (torch.ones(1, WIDTH),)
    engine.train_step(batch)
    engine.save_checkpoint(folder, "a")
    losses = [float(engine.train_step(batch).loss) for _ in range(2)]
    engine.close()
    return losses


def load(folder: Path, stage: int) -> list[float]:
    engine = engine_at(stage)
    engine.load_checkpoint(folder, "a")
    losses = [float(engine.train_step((torch.ones(1, WIDTH),)).loss) for _ in range(2)]
    engine.close()
    return losses


@pytest.mark.parametrize(("stage", "is_shared"), [(0, True), (1, False), (3, False)])
def test_what_replicas_read_stays_in_the_cache_and_the_rest_does_not(
    ranks: RankPool, tmp_path: Path, stage: int, is_shared: bool
) -> None:
    expected = ranks(2, save, tmp_path, stage)
    files = sorted((tmp_path / "a").glob("*.distcp"))
    assert len(files) == 2
    for path in files:
        forget(path)
        if not supports_direct(path):
            pytest.skip("the file system refuses O_DIRECT, or keeps files in memory")
    assert ranks(2, load, tmp_path, stage) == expected
    parts = [resident_pages(path) * mmap.PAGESIZE / path.stat().st_size for path in files]
    assert min(parts) > 0.9 if is_shared else parts == [0, 0], parts
