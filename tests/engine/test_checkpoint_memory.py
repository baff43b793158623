"""No rank holds more than its shard and a few blocks while it saves, loads, exports: measured on two ranks."""

import mmap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import lowtide
from lowtide.checkpoint.safetensors_files import CHUNK_BYTES
from tests.checkpoint.page_cache import forget, resident_pages
from tests.kit.models import Chain
from tests.kit.ranks import RankPool
from tests.kit.resident import peak_growth
from tests.kit.training import settings

WIDTH, LAYERS = 1024, 8  # 8 matrices of 4 MiB, their two moments: 96 MiB, 48 on each of 2 ranks
MIB = 1 << 20
SHARD_BYTES = 48 * MIB
LIMIT_BYTES = 24 * MIB  # three blocks of 4 MiB to write; one to read; thread stacks, indexes and what a heap keeps
SOCKETS = {"transport": "sockets"}  # no shared pages in the count, and what is released is really gone


def matrices(inputs: int, outputs: int, count: int) -> nn.Module:
    return Chain(*(nn.Linear(inputs, outputs, bias=False) for _ in range(count)))


def engine_of(model: nn.Module, stage: int, **config: Any) -> lowtide.Engine:
    return lowtide.initialize(model, settings(stage, train_micro_batch_size_per_gpu=1, **config))


# -- checkpoints -----------------------------------------------------------------------------------------------------


def measure(folder: Path, stage: int, asynchronous: bool) -> dict[str, int]:
    """Bytes above what was resident before, at the highest."""
    model = matrices(WIDTH, WIDTH, LAYERS)
    engine = engine_of(model, stage, communication=SOCKETS, checkpoint={"async": asynchronous})
    for _ in range(2):
        engine.train_step((torch.ones(1, WIDTH),))

    def save() -> None:
        engine.save_checkpoint(folder, "a")
        if asynchronous:
            engine.load_checkpoint(folder, "a")  # waits for the writing

    found = {"save": peak_growth(save), "load": peak_growth(lambda: engine.load_checkpoint(folder, "a"))}
    engine.close()
    return found


@pytest.mark.parametrize(("stage", "asynchronous"), [(1, False), (3, True)])
def test_a_checkpoint_takes_a_few_blocks_and_in_the_background_a_copy_of_the_shard(
    ranks: RankPool, tmp_path: Path, stage: int, asynchronous: bool
) -> None:
    for found in ranks(2, measure, tmp_path, stage, asynchronous):
        copied = found["save"] - SHARD_BYTES if asynchronous else found["save"]
        assert copied > -0.1 * SHARD_BYTES, found
        assert copied < LIMIT_BYTES and found["load"] < LIMIT_BYTES, found


NARROW = 512


def save_and_train(folder: Path, stage: int, loads: bool) -> list[float]:
    torch.manual_seed(0)
    with engine_of(matrices(NARROW, NARROW, 4), stage) as engine:
        batch = (torch.ones(1, NARROW),)
        if loads:
            engine.load_checkpoint(folder, "a")
        else:
            engine.train_step(batch)
            engine.save_checkpoint(folder, "a")
        return [engine.train_step(batch).loss.item() for _ in range(2)]


@pytest.mark.parametrize(("stage", "is_shared"), [(0, True), (3, False)])
def test_what_replicas_read_stays_in_the_page_cache_and_the_rest_does_not(
    ranks: RankPool, tmp_path: Path, stage: int, is_shared: bool
) -> None:
    expected = ranks(2, save_and_train, tmp_path, stage, False)
    files = sorted((tmp_path / "a").glob("*.distcp"))
    assert len(files) == 2
    for path in files:
        forget(path, must=True)
    assert ranks(2, save_and_train, tmp_path, stage, True) == expected
    parts = [resident_pages(path) * mmap.PAGESIZE / path.stat().st_size for path in files]
    assert min(parts) > 0.9 if is_shared else parts == [0, 0], parts


# -- plain weights ---------------------------------------------------------------------------------------------------


def peaks_of_weights(folder: Path) -> list[int]:
    """Of loading weights in bf16, and of exports in both types: two layers of 32 MiB."""
    with engine_of(matrices(4096, 2048, 2), 3, communication=SOCKETS, optimizer={"type": "sgd"}) as engine:
        loading = peak_growth(lambda: engine.load_weights(folder / "x.safetensors"))
        exports = [partial(engine.export, folder / "out", dtype=dtype) for dtype in ("fp32", "bf16")]
        return [loading, *map(peak_growth, exports)]


def test_plain_weights_take_a_chunk(ranks: RankPool, tmp_path: Path) -> None:
    values = torch.ones(2048, 4096, dtype=torch.bfloat16)
    save_file({f"blocks.{index}.weight": values.clone() for index in range(2)}, tmp_path / "x.safetensors")
    for peaks in ranks(2, peaks_of_weights, tmp_path):
        assert max(peaks) <= CHUNK_BYTES + 2 * MIB  # and what the rest of Python takes
