"""`deepspeed.utils.logger`, `log_dist` and similar names, and `UsageError` for DeepSpeed's assertions."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..engine.config.errors import ConfigError
from . import comm
from .accelerator import get_accelerator

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("lowtide.deepspeed")
LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; [-1]: all ranks. Without a process group it always logs, and without `ranks` never."""
    text = _of_rank(message, ranks)
    if text is not None:
        logger.log(level, text)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print on these ranks, as `log_dist` logs."""
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


def note_frozen_are_kept(call: str) -> None:
    """Warn, once for a call, that its `exclude_frozen_parameters=True` has no effect."""
    warning_once(
        f"{call}: exclude_frozen_parameters=True has no effect; with checkpoint.exclude_frozen_parameters in the "
        "config, checkpoints are saved without frozen parameters"
    )


def _of_rank(message: str, ranks: Sequence[int] | None) -> str | None:
    if not comm.is_initialized():
        return f"[Rank -1] {message}"
    rank = comm.get_rank()
    is_meant = ranks is not None and len(ranks) > 0 and (ranks[0] == -1 or rank in ranks)
    return f"[Rank {rank}] {message}" if is_meant else None


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set a logger's level. Raises ValueError for an unknown word."""
    if log_level_str.lower() not in LEVELS:
        raise ValueError(f"log level: expected one of {', '.join(LEVELS)}, found {log_level_str!r}")
    (custom_logger or logger).setLevel(LEVELS[log_level_str.lower()])


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the device's memory on rank 0, if `force`."""
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
    """Seed the generators of Python, NumPy and torch."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def instrument_w_nvtx(function: F) -> F:
    """Return the function unchanged: profile it by torch.profiler."""
    return function


class UsageError(ValueError, AssertionError):
    """A wrong call. Scripts may catch it as AssertionError, as DeepSpeed raises."""


DeepSpeedConfigError = ConfigError  # DeepSpeed's name
