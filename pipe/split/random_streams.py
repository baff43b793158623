"""Random numbers of microbatches that run interleaved on the same device (`RandomStreams`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...model.random_states import random_states, seed_generators, set_random_states

_States = list[Tensor]  # of the CPU's generator and, with another device, of its generator


class RandomStreams:
    """Gives each microbatch the random numbers of a forward of the whole model.

    Microbatch 0 draws the numbers that it would draw alone, and the generators continue after it. Every later
    microbatch draws the numbers of a forward after `torch.manual_seed(seed)`, with a seed from `seeds_behind` the state
    at the begin of the step. Each stage replays the forward: after a skipped block it restores the state that the block
    left when it was computed, so code outside the blocks draws the same numbers on every stage.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: list[_States | int] = []  # by microbatch: state or seed at the begin of its forward
        self._behind: dict[tuple[int, int], _States] = {}  # state after (microbatch, block)
        self._last: _States | None = None  # state after the latest stage's forward of microbatch 0
        self._microbatch: int | None = None

    def begin(self, num_microbatches: int) -> None:
        """Begin a step: choose the first state or seed of each microbatch."""
        states = random_states(self._device)
        self._first = [states, *seeds_behind(states[0], num_microbatches - 1)]

    def end(self) -> None:
        """End a step, or give it up: continue the generators after microbatch 0."""
        if self._last is not None:
            set_random_states(self._device, self._last)
        self._first, self._behind, self._last = [], {}, None

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Draw the numbers of a microbatch within the context."""
        self._microbatch = microbatch
        try:
            yield
            # Only after a forward that did not raise.
            if microbatch == 0:
                self._last = random_states(self._device)
        finally:
            self._microbatch = None

    # -- calls of a stage -------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Set the generators to the begin of the microbatch's forward."""
        if self._microbatch is None:
            return
        first = self._first[self._microbatch]
        if isinstance(first, int):
            seed_generators(self._device, first)
        else:
            set_random_states(self._device, first)

    def computed(self, block: int) -> None:
        """Keep the state after a block that was computed."""
        if self._microbatch is not None:
            self._behind[self._microbatch, block] = random_states(self._device)

    def skipped(self, block: int) -> None:
        """Restore the state after a block that this stage skips."""
        if self._microbatch is not None and (self._microbatch, block) in self._behind:
            set_random_states(self._device, self._behind[self._microbatch, block])


def seeds_behind(state: Tensor, count: int) -> list[int]:
    """Draw `count` seeds from a copy of the CPU generator's state."""
    # A copy of the generator: drawing seeds must not change the numbers of the step.
    generator = torch.Generator()
    generator.set_state(state)
    return [int(torch.empty((), dtype=torch.int64).random_(generator=generator)) for _ in range(count)]
