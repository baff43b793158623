"""activation_checkpointing.offload gives the numbers of the run without it, and keeps to its budget."""

from pathlib import Path
from typing import Any

import lowtide
from lowtide.offload import ActivationOffload
from tests.kit.models import TinyGPT, token_batch
from tests.kit.ranks import RankPool
from tests.kit.training import settings, share_of


def peak_of_saved(config: dict[str, Any]) -> tuple[int, int]:
    """(highest bytes of saved activations in memory, bytes that were moved) of three steps."""
    with lowtide.initialize(TinyGPT(width=64, layers=8), config) as engine:
        for step in range(3):
            engine.train_step(share_of(token_batch(step, 8 * engine.world_size)))
        offload = engine._parts.activations
        assert isinstance(offload, ActivationOffload)
        return offload.peak_resident_bytes, offload.offloaded_bytes


def test_the_peak_stays_under_the_budget(ranks: RankPool, tmp_path: Path) -> None:
    budget = 256 << 10
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "min_bytes": 1024, "budget_bytes": budget}
    config = settings(3, train_micro_batch_size_per_gpu=8, activation_checkpointing={"offload": offload})
    for peak, moved in ranks(2, peak_of_saved, config):
        assert 0 < peak <= budget
        assert moved > 4 * budget
