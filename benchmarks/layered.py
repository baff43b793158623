"""Steps with parameters and states in files, in the plain order and layer by layer, interleaved.

Example:

    python benchmarks/layered.py --folder /mnt/nvme --width 1024 --blocks 8 --microbatches 8

One rank. A drive is as fast beside a GPU as a slower one is beside a CPU: `--drive-mb-per-second` makes it so, by
waiting where blocks are read and written. The ratio of step rates is that of medians; each round has a step of both,
one after the other. What is read and written is counted where the store is asked for it.
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
from _harness import Parser, count
from torch import Tensor, nn

import lowtide
from lowtide.offload.file_store import FileStore


class Block(nn.Module):
    """A feed-forward part with a residual: four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return made


class Blocks(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def config_of(arguments: argparse.Namespace, folder: str, is_layered: bool) -> dict[str, Any]:
    file = {"device": "nvme", "nvme_path": folder}
    zero = {"stage": 3, "layered_gradient_accumulation": is_layered, "offload_param": file}
    if not arguments.states_in_memory:
        zero["offload_optimizer"] = file
    return {
        "device": "cpu",
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": arguments.microbatches,
        "steps_per_print": 0,
        "optimizer": {"type": "adamw", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "activation_checkpointing": {"every": 1},
    }


class Drive:
    """A drive of a given speed: blocks that are read and written pass one after the other, and take their time."""

    def __init__(self, bytes_per_second: float) -> None:
        self._speed = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        load, save = FileStore._load_block, FileStore._save_block

        def slow_load(store: FileStore, entry: Any, block: memoryview, *rest: Any) -> None:
            self._pass(block.nbytes)
            load(store, entry, block, *rest)

        def slow_save(store: FileStore, entry: Any, block: memoryview, *rest: Any) -> None:
            self._pass(block.nbytes)
            save(store, entry, block, *rest)

        with patch.object(FileStore, "_load_block", slow_load), patch.object(FileStore, "_save_block", slow_save):
            yield

    def _pass(self, nbytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self._speed
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))


class Traffic:
    """Bytes that a step reads and writes."""

    def __init__(self) -> None:
        self.found = Counter[str]()

    def during(self, step: Any) -> None:
        load, save = FileStore.load, FileStore.save

        def counted_load(store: FileStore, key: str, out: Tensor) -> Any:
            self.found["read"] += out.nbytes
            return load(store, key, out)

        def counted_save(store: FileStore, key: str, values: Tensor) -> Any:
            self.found["written"] += values.nbytes
            return save(store, key, values)

        with patch.object(FileStore, "load", counted_load), patch.object(FileStore, "save", counted_save):
            step()


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
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        speed = arguments.drive_mb_per_second
        with Drive(speed * 1e6).in_use() if speed else nullcontext():
            run(arguments, folder)


def run(arguments: argparse.Namespace, folder: str) -> None:
    x = torch.randn(arguments.microbatches, arguments.tokens, arguments.width)
    engines, traffic = {}, {}
    for name in ("plain", "layered"):
        torch.manual_seed(0)
        model = Blocks(arguments.width, arguments.blocks)
        num_bytes = 4 * sum(param.numel() for param in model.parameters())
        engines[name] = lowtide.initialize(model, config_of(arguments, folder, name == "layered"))
        traffic[name] = Traffic()
        engines[name].train_step(x)
        traffic[name].during(lambda engine=engines[name]: engine.train_step(x))
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    losses = {}
    for _ in range(arguments.rounds):
        for name, engine in engines.items():
            started = time.perf_counter()
            losses[name] = engine.train_step(x).loss.item()
            seconds[name].append(time.perf_counter() - started)
    assert losses["plain"] == losses["layered"], "they compute the same"
    shown = f"{arguments.microbatches} microbatches of {arguments.tokens} tokens"
    print(f"{shown}, {num_bytes / 1e6:,.0f} MB of parameters")
    for name, engine in engines.items():
        found = traffic[name].found
        print(
            f"{name:>8}: median {statistics.median(seconds[name]):.3f} s, least {min(seconds[name]):.3f} s a step; "
            f"reads {found['read'] / num_bytes:.2f} and writes {found['written'] / num_bytes:.2f} x the parameters"
        )
        engine.close()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    of_rounds = [plain / layered for plain, layered in zip(seconds["plain"], seconds["layered"], strict=True)]
    print(
        f"step rate: {medians['plain'] / medians['layered']:.2f} x by medians, "
        f"{statistics.median(of_rounds):.2f} x by the median of rounds"
    )


if __name__ == "__main__":
    main()
