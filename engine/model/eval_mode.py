"""What is tried with a model between its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...model.buffers import BufferValues


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Without gradients, in eval mode; each part, and its buffers, are as they were behind it."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with BufferValues(module), torch.no_grad():
            yield
    finally:
        for part, was_training in modes:
            part.training = was_training
