"""Steps with parameters and states in files, in the plain order and layer by layer, interleaved.

One rank. `--drive-mb-per-second` simulates a slower drive, by waiting where blocks are read and written: a drive is as
fast beside a GPU as a slower one is beside a CPU. What is read and written is counted where the store is asked for it.

Example:

    python benchmarks/layered.py --folder /mnt/nvme --width 1024 --blocks 8 --microbatches 8
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _contenders import lowtide_config
from _harness import Parser, count
from _model import Stack
from torch import Tensor, nn

import lowtide
from lowtide.offload.file_store import FileStore


class Block(nn.Module):
    """A feed-forward part with a residual: four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.mlp(x)
        return made


def build(arguments: argparse.Namespace, folder: str, is_layered: bool) -> lowtide.Engine:
    file = {"device": "nvme", "nvme_path": folder}
    zero = {"stage": 3, "layered_gradient_accumulation": is_layered, "offload_param": file}
    if not arguments.states_in_memory:
        zero["offload_optimizer"] = file
    config = lowtide_config(
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=arguments.microbatches,
        zero_optimization=zero,
        activation_checkpointing={"every": 1},
    )
    torch.manual_seed(0)
    return lowtide.initialize(Stack(Block(arguments.width) for _ in range(arguments.blocks)), config)


@contextmanager
def slow_drive(bytes_per_second: float) -> Iterator[None]:
    """Let blocks that are read and written pass one after the other, and take their time."""
    load, save = FileStore._load_block, FileStore._save_block
    lock, free_at = threading.Lock(), 0.0

    def wait(nbytes: int) -> None:
        nonlocal free_at
        with lock:
            until = free_at = max(free_at, time.perf_counter()) + nbytes / bytes_per_second
        time.sleep(max(0.0, until - time.perf_counter()))

    def slow_load(store: FileStore, entry: Any, block: memoryview, *rest: Any) -> None:
        wait(block.nbytes)
        load(store, entry, block, *rest)

    def slow_save(store: FileStore, entry: Any, block: memoryview, *rest: Any) -> None:
        wait(block.nbytes)
        save(store, entry, block, *rest)

    with patch.object(FileStore, "_load_block", slow_load), patch.object(FileStore, "_save_block", slow_save):
        yield


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the bytes that are read and written inside."""
    found = Counter[str]()
    load, save = FileStore.load, FileStore.save

    def counted_load(store: FileStore, key: str, out: Tensor) -> Any:
        found["read"] += out.nbytes
        return load(store, key, out)

    def counted_save(store: FileStore, key: str, values: Tensor) -> Any:
        found["written"] += values.nbytes
        return save(store, key, values)

    with patch.object(FileStore, "load", counted_load), patch.object(FileStore, "save", counted_save):
        yield found


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="on the drive; default: a temporary one")
    parser.add_argument("--width", type=count(), default=1024)
    parser.add_argument("--blocks", type=count(), default=8)
    parser.add_argument("--microbatches", type=count(), default=8)
    parser.add_argument("--tokens", type=count(), default=16, help="of a microbatch")
    parser.add_argument("--rounds", type=count(), default=5)
    parser.add_argument("--states-in-memory", action="store_true")
    parser.add_argument("--drive-mb-per-second", type=float, help="simulate a drive that is no faster")
    arguments = parser.parse_args()
    speed = arguments.drive_mb_per_second
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        slow_drive(speed * 1e6) if speed else nullcontext(),
    ):
        run(arguments, folder)


def run(arguments: argparse.Namespace, folder: str) -> None:
    x = torch.randn(arguments.microbatches, arguments.tokens, arguments.width)
    num_bytes = 4 * arguments.blocks * sum(param.numel() for param in Block(arguments.width).parameters())
    engines = {name: build(arguments, folder, name == "layered") for name in ("plain", "layered")}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    print(
        f"{arguments.microbatches} microbatches of {arguments.tokens} tokens, {num_bytes / 1e6:,.0f} MB of parameters"
    )
    for name, engine in engines.items():
        engine.train_step(x)
        with counted() as found:
            engine.train_step(x)
        read, written = (found[what] / num_bytes for what in ("read", "written"))
        print(f"{name:>8}: a step reads {read:.2f} and writes {written:.2f} x the parameters")
    for _ in range(arguments.rounds):
        losses = set()
        for name, engine in engines.items():
            started = time.perf_counter()
            losses.add(engine.train_step(x).loss.item())
            seconds[name].append(time.perf_counter() - started)
        assert len(losses) == 1, "they compute the same"
    for engine in engines.values():
        engine.close()
    plain, layered = (statistics.median(values) for values in seconds.values())
    print(f"plain {plain:.3f} s, layered {layered:.3f} s a step: step rate {plain / layered:.2f} x by medians")


if __name__ == "__main__":
    main()
