"""Random generators that stay as they are while an engine is restored: trainers keep their own states of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def same_random_state() -> Iterator[None]:
    """Python's, numpy's and torch's generators are at its end where they were at its beginning."""
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)
