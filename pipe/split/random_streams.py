"""Random numbers of microbatches that take turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_States = list[Tensor]  # of the CPU's generator, and of the device's


class RandomStreams:
    """A stream for each microbatch, with the numbers of one forward of the whole model.

    Microbatch 0 draws what it would draw if it were alone, and the generators go on behind it. Each other one draws
    what a forward draws behind `torch.manual_seed(seed)`, with a seed that is made of the state in which the step began
    (`seeds_behind`). Each stage goes through the forward anew: a block that it skips leaves the state that it left when
    it was computed, so code outside of blocks draws the same on every stage.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        self._first: list[_States | int] = []  # by microbatch, where its forward begins; a number: its seed
        self._behind: dict[tuple[int, int], _States] = {}  # (microbatch, block)
        self._last: _States | None = None  # behind the forward of microbatch 0, as far as it has come
        self._microbatch: int | None = None

    def begin(self, num_microbatches: int) -> None:
        """A step begins."""
        states = self._now()
        self._first = [states, *seeds_behind(states[0], num_microbatches - 1)]

    def end(self) -> None:
        """All microbatches have gone forward, or none will any more."""
        if self._last is not None:
            self._restore(self._last)
        self._first, self._behind, self._last = [], {}, None

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """What is computed in the context is of that microbatch."""
        self._microbatch = microbatch
        try:
            yield
            if microbatch == 0:
                self._last = self._now()
        finally:
            self._microbatch = None

    # -- what a stage calls ---------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """It goes through the forward from its beginning."""
        if self._microbatch is None:
            return
        first = self._first[self._microbatch]
        if isinstance(first, int):
            self._seed(first)
        else:
            self._restore(first)

    def computed(self, block: int) -> None:
        if self._microbatch is not None:
            self._behind[self._microbatch, block] = self._now()

    def skipped(self, block: int) -> None:
        if self._microbatch is not None and (self._microbatch, block) in self._behind:
            self._restore(self._behind[self._microbatch, block])

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _now(self) -> _States:
        own = [torch.get_rng_state()]
        return own if self._module is None else [*own, self._module.get_rng_state(self._device)]

    def _seed(self, seed: int) -> None:
        """As `torch.manual_seed`, which also writes down a stack for each kind of device that is not there."""
        torch.default_generator.manual_seed(seed)
        if self._module is not None:
            self._module.manual_seed(seed)

    def _restore(self, states: _States) -> None:
        torch.set_rng_state(states[0])
        if self._module is not None:
            self._module.set_rng_state(states[1], self._device)


def seeds_behind(state: Tensor, count: int) -> list[int]:
    """So many numbers that a generator of the CPU draws next, which stays where it is."""
    generator = torch.Generator()
    generator.set_state(state)
    return [int(torch.empty((), dtype=torch.int64).random_(generator=generator)) for _ in range(count)]
