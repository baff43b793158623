"""What scripts import as `deepspeed.utils.logger`, `log_dist` and the like; what is raised where DeepSpeed asserts."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..engine.config.errors import ConfigError
from . import comm
from .accelerator import get_accelerator

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("lowtide.deepspeed")
LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks alone; [-1]: on all. Without a process group it always does, and without `ranks` never."""
    text = _of_rank(message, ranks)
    if text is not None:
        logger.log(level, text)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """As `log_dist`, by print."""
    text = _of_rank(message, ranks)
    if text is not None:
        print(text)


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    if not comm.is_initialized() or comm.get_rank() == 0:
        print(message)


@functools.cache
def _log_once(message: str, ranks: tuple[int, ...], level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    _log_once(message, tuple(ranks or ()), level)


@functools.cache
def warning_once(message: str) -> None:
    logger.warning(message)


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | None = None) -> None:
    """Writes the message, with the rank in it, to a file on these ranks."""
    if path is not None and _of_rank("", ranks) is not None:
        rank = comm.get_rank() if comm.is_initialized() else -1
        Path(path).write_text(json.dumps({**message, "rank": rank}), encoding="utf-8")


def _of_rank(message: str, ranks: Sequence[int] | None) -> str | None:
    if not comm.is_initialized():
        return f"[Rank -1] {message}"
    rank = comm.get_rank()
    is_meant = ranks is not None and len(ranks) > 0 and (ranks[0] == -1 or rank in ranks)
    return f"[Rank {rank}] {message}" if is_meant else None


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Raises ValueError for a word that is no level."""
    if log_level_str.lower() not in LEVELS:
        raise ValueError(f"log level: expected one of {', '.join(LEVELS)}, found {log_level_str!r}")
    (custom_logger or logger).setLevel(LEVELS[log_level_str.lower()])


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs the device's memory on rank 0, with `force`."""
    if not force or (comm.is_initialized() and comm.get_rank() != 0):
        return
    device = get_accelerator()
    gib = 1 << 30
    logger.info(
        "%s: %.2f GiB allocated, %.2f GiB at most",
        message,
        device.memory_allocated() / gib,
        device.max_memory_allocated() / gib,
    )


def set_random_seed(seed: int) -> None:
    """Python's generator, NumPy's, and those of torch."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def instrument_w_nvtx(function: F) -> F:
    """The function as it is: profile it by torch.profiler."""
    return function


class UsageError(ValueError, AssertionError):
    """A call that DeepSpeed answers with an AssertionError, by which scripts may know it; here it says what to do."""


DeepSpeedConfigError = ConfigError
"""The name by which scripts catch errors of a config."""
