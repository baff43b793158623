"""No rank ever holds more than its shard and a few blocks: measured on 2 ranks with 96 MiB of state."""

import re
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from tests.kit.ranks import RankPool

WIDTH, LAYERS = 1024, 8  # 8 matrices of 4 MiB, their two moments: 96 MiB, 48 on each of 2 ranks
MIB = 1 << 20
SHARD_BYTES = 48 * MIB
LIMIT_BYTES = 24 * MIB  # three blocks of 4 MiB to write; one to read; thread stacks, indexes and what a heap keeps


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.layers(x), x)


def resident_bytes(field: str) -> int:
    """VmRSS: now; VmHWM: the most since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(folder: Path, stage: int, asynchronous: bool) -> dict[str, int]:
    """Bytes above what was resident before, at the highest."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "adamw", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        "communication": {"transport": "sockets"},  # no shared pages in the count
        "checkpoint": {"async": asynchronous},
        "steps_per_print": 0,
    }
    torch.manual_seed(0)
    engine = lowtide.initialize(Wide, config)
    batch = (torch.ones(1, WIDTH),)
    engine.train_step(batch)
    engine.train_step(batch)
    found = {}
    engine.save_checkpoint(folder, "warm")  # what is imported and allocated once is not what is measured
    engine.load_checkpoint(folder, "warm")
    for name, call in (("save", engine.save_checkpoint), ("load", engine.load_checkpoint)):
        forget_peak()
        before = resident_bytes("VmRSS")
        call(folder, "a")
        if name == "save" and asynchronous:
            engine.load_checkpoint(folder, "warm")  # waits for the writing
        found[name] = resident_bytes("VmHWM") - before
    engine.close()
    return found


def test_saving_and_loading_take_a_few_blocks_beside_the_shard(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks(2, measure, tmp_path, 1, False):
        assert found["save"] < LIMIT_BYTES and found["load"] < LIMIT_BYTES, found


def test_saving_in_the_background_takes_a_copy_of_the_shard_and_gives_it_back(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks(2, measure, tmp_path, 3, True):
        assert 0.9 * SHARD_BYTES < found["save"] < SHARD_BYTES + LIMIT_BYTES, found
        assert found["load"] < LIMIT_BYTES, found
