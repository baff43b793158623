"""What each microbatch of a step has of its own, where all of them go through a block before the next block does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from ...offload import ActivationOffload
from ...pipe.schedules.schedule import Action
from ...pipe.split.random_streams import RandomStreams


class MicrobatchTurns:
    """Random numbers that go on where the microbatch has left off, and activations in the order of the backward."""

    def __init__(self, device: torch.device, activations: ActivationOffload | None) -> None:
        """activations: what saves them elsewhere."""
        self.streams = RandomStreams(device)
        self._activations = activations
        self._num_microbatches = 0

    @contextmanager
    def of_step(self, num_microbatches: int) -> Iterator[None]:
        """Around all forwards and backwards of a step."""
        self._num_microbatches = num_microbatches
        self.streams.begin(num_microbatches)
        try:
            with self._activations or nullcontext():
                yield
        finally:
            self.streams.end()

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Around the forward of a microbatch through a stage. The backward comes to the last stage first, and there to
        microbatch 0."""
        assert action.microbatch is not None
        if self._activations is not None:
            self._activations.begin_block()
            self._activations.begin_part((action.stage + 1) * self._num_microbatches - action.microbatch)
        with self.streams.of(action.microbatch):
            yield
