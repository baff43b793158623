"""Checkpoints and weights of an engine on the pretended device: those of one on the CPU."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine.archive import checkpoint
from tests.kit.models import FEATURES, Chain
from tests.kit.ranks import on_device
from tests.kit.training import settings
from tests.pretend.group import register


def engine_on(device: str, **sections: Any) -> lowtide.Engine:
    """Its losses say where the random generators are."""
    torch.manual_seed(0)
    dropping = Chain(*(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.3)) for _ in range(2)))
    return lowtide.initialize(dropping, settings(3, device=device, train_micro_batch_size_per_gpu=4, **sections))


def steps(engine: lowtide.Engine, numbers: range) -> list[float]:
    batches = [torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(number)) for number in numbers]
    return [engine.train_step((batch,)).loss.item() for batch in batches]


@pytest.mark.parametrize(
    ("world_size", "is_async", "save_on", "load_on"),
    [
        (1, False, "pretend", "pretend"),
        (2, True, "pretend", "pretend"),
        (2, False, "pretend", "cpu"),
        (1, True, "cpu", "pretend"),
    ],
)
@on_device("world_size")
def test_training_goes_on(tmp_path: Path, world_size: int, is_async: bool, save_on: str, load_on: str) -> None:
    register()
    folder = str(tmp_path)
    config: dict[str, Any] = {"checkpoint": {"async": is_async}}
    file = {"device": "nvme", "nvme_path": folder}
    in_files = {"zero_optimization": {"stage": 3, "offload_optimizer": file, "offload_param": file}}
    first = engine_on(save_on, **config, **(in_files if is_async else {}))
    steps(first, range(2))
    first.save_checkpoint(folder)
    saved = first.state_dict()
    expected = steps(first, range(2, 4))
    first.close()
    second = engine_on(load_on, **config, **({} if is_async else in_files))
    second.load_checkpoint(folder)
    assert all(torch.equal(value, saved[name]) for name, value in second.state_dict().items())
    if save_on == load_on:  # else the generators are others
        assert steps(second, range(2, 4)) == expected
    second.close()


@on_device()
def test_a_save_that_fails_gives_its_pinned_memory_back(tmp_path: Path) -> None:
    register()
    with engine_on("pretend", checkpoint={"async": True}) as engine:
        with patch.object(checkpoint, "write_part", side_effect=OSError("no space left")):
            engine.save_checkpoint(tmp_path)
            with pytest.raises(lowtide.CheckpointError, match="no space left"):
                engine.save_checkpoint(tmp_path)  # which waits for the first
        pool = engine._archive.checkpoints._pool
        assert pool is not None and pool.bytes_in_use == 0
