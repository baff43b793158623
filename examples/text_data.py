"""The text of Python's own standard library: real, on every machine, nothing to download."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
VALIDATION_EVERY = 20  # one file in twenty is kept for validation


def stdlib_files(folder: Path | None = None) -> list[Path]:
    """The .py files of the standard library in the order of their names, without tests and installed packages.

    Raises FileNotFoundError where a Python keeps no source files.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    found = {path.relative_to(folder): path for path in folder.rglob("*.py")}
    files = [path for name, path in sorted(found.items()) if SKIPPED_FOLDERS.isdisjoint(name.parts)]
    if len(files) < 2:
        raise FileNotFoundError(
            f"expected the .py files of Python's standard library in {folder}, found {len(files)}: "
            "use a Python that keeps its source files, or name a folder of .py files with --data FOLDER"
        )
    return files


@dataclass(frozen=True)
class Text:
    """The bytes to train on and, from other files, the bytes to validate on."""

    train: Tensor  # (num_bytes,) uint8
    validation: Tensor  # (num_bytes,) uint8

    @classmethod
    def from_files(cls, files: list[Path]) -> "Text":
        """Every twentieth file goes to validation whole, so that no validated text was seen in training."""
        kept = files[::VALIDATION_EVERY]
        trained = [path for number, path in enumerate(files) if number % VALIDATION_EVERY]
        return cls(train=read_bytes(trained), validation=read_bytes(kept))


def read_bytes(files: list[Path]) -> Tensor:
    """The files one after the other, as a tensor (num_bytes,) uint8."""
    joined = b"\n".join(path.read_bytes() for path in files)
    return torch.from_numpy(np.frombuffer(bytearray(joined), dtype=np.uint8))


def batches(
    text: Tensor,  # (num_bytes,) uint8
    *,
    context: int,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Gives random pieces of the text without end: tokens and, one byte later, targets, (batch_size, context) int64.

    The places are drawn for the global batch, and each rank takes its part: together the ranks read what one process
    with a batch of world_size x batch_size would read. Raises ValueError if the text is shorter than one piece.
    """
    if len(text) <= context:
        raise ValueError(f"the text has {len(text)} bytes, and one piece takes {context + 1}: use a smaller --context")
    generator = np.random.default_rng(seed)
    own = slice(rank * batch_size, (rank + 1) * batch_size)
    offsets = torch.arange(context + 1)
    while True:
        starts = generator.integers(len(text) - context, size=world_size * batch_size)[own]
        pieces = text[torch.from_numpy(starts)[:, None] + offsets].long()
        yield {"tokens": pieces[:, :-1], "targets": pieces[:, 1:]}
