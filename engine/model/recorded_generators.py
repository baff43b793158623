"""Generators of random numbers, while the operations that draw from them are written down.

[Note: seeds that a constructor sets]
On the meta device nothing is drawn, so the generator stays where it is; and a constructor may set it (`manual_seed`),
or keep its state and set that again (`fork_rng`). So the generator gets a state of its own after each operation that
draws: a state that is found there later, and is one of these, is that of then; any other one was made from a seed. That
holds for each generator that a constructor draws from.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .recorded_operations import RecordedOperation

_OUR_SEEDS = range(0x10_77_1D_E0_00_00_00_00, 0x10_77_1D_E1_00_00_00_00)
_next_seed = partial(next, iter(_OUR_SEEDS))  # no two generators have one


class RecordedGenerator:
    """A generator from which nothing is drawn while operations are recorded. See [Note: seeds that ...]."""

    def __init__(self, generator: torch.Generator, operations: list[RecordedOperation]) -> None:
        self.generator, self.first = generator, generator.get_state()
        self._operations = operations
        self._told = generator.initial_seed()  # what it would be where it draws
        self._places: dict[int, tuple[int, int]] = {}  # a seed of ours -> before which operation it was, and that
        self.take_seed()

    def take_seed(self) -> None:
        """What was recorded last would have drawn."""
        self._seed = _next_seed()
        self._places[self._seed] = len(self._operations), self._told
        self.generator.manual_seed(self._seed)

    def go_on(self) -> None:
        """With what is recorded later."""
        self.generator.manual_seed(self._seed)

    def note_state(self) -> None:
        """Writes down that the generator was set since."""
        seed = self.generator.initial_seed()
        if seed == self._seed:  # nothing draws here
            return
        if seed in self._places:
            place, self._told = self._places[seed]
            setting = RecordedOperation.of(restore, (self.generator, place), {}, [])
        else:
            check_seed(seed)
            self._told = seed
            setting = RecordedOperation.of(set_state, (self.generator, self.generator.get_state()), {}, [])
        self._operations.append(setting)
        self.take_seed()

    def told_seed(self) -> int:
        """In the place of torch.initial_seed."""
        self.note_state()
        return self._told


def check_seed(seed: int) -> None:
    """Of a generator that was set. Raises ValueError where that is a state of ours."""
    if seed in _OUR_SEEDS:
        raise ValueError(
            "the model builder gives a generator the state of another from which it has drawn (set_state, deepcopy), "
            "where nothing is drawn yet: give it a seed, or pass the constructed module to initialize in its place"
        )


def identity_of(generator: Any) -> int:
    """Of what draws: torch makes another object of Python for it in each call."""
    return int(generator._cdata)


TORCHS = identity_of(torch.default_generator)


def set_state(generator: torch.Generator, state: Tensor) -> None:
    """An operation: the generator was set."""
    generator.set_state(state)


def restore(generator: torch.Generator, place: int) -> None:
    """Stands for: the generator has again the state that it had before the operation of this number."""
