"""Random numbers of split layers: different on each rank for split heads and columns, equal on all ranks elsewhere.

[Note: two streams]
Ranks that split layers keep their generators in the same state, so dropout of a replicated tensor drops the same
elements on all ranks. Between a column split and the row split behind it, each rank holds different elements and draws
from a second state. That state is computed from a number drawn from the common stream and the rank's coordinate. Code
that restores the common state, such as the recomputation of a checkpointed block, therefore restores both.
Source: the two states of Megatron-LM, megatron/core/tensor_parallel/random.py. We need no tracker that is saved.

[Note: equal random numbers in a stack]
Within a stack of blocks each rank draws different numbers. A module that all ranks compute alike must draw equal
numbers on all ranks, and the same numbers again in its recomputation. It therefore starts from its module number and a
seed that was drawn before the stack, while the ranks were in the common state. `RegionStarts` keeps that seed with the
length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..comm import Collectives
from ..model.patches import ModelPatches
from ..model.random_states import random_states, seed_generators, set_random_states

_MIX = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits, from splitmix64


class Randomness:
    """Switches the generators between the common stream and the rank's private stream."""

    def __init__(self, exchange: Collectives, device: torch.device) -> None:
        """Copy the generator states of the first rank to all ranks. A collective."""
        self._place = exchange.place
        self._device = device
        self._common: list[Tensor] | None = None  # the common state, while the rank's private stream is in use
        self._since: tuple[object, int] = (None, 0)
        self._num_alike = 0
        self._private: list[Tensor] | None = None  # the private state, while a module that draws alike runs
        self.restore([_state_of_first(exchange, device, state) for state in self.states()])

    def begin(self) -> None:
        """Start a forward of the whole model in the common stream, even if the last forward ended in an error."""
        self._common = None

    def leave_common(self, of: object) -> None:
        """Switch to the rank's private stream. of: the module whose inside each rank computes differently."""
        # The graph task tells a recomputation of this module from its forward.
        since = of, torch._C._current_graph_task_id()
        if self._common is not None and since == self._since:
            return
        # A recomputation may have ended inside another block. The code that recomputes restores its common state.
        seed = int(torch.empty((), dtype=torch.int64).random_())
        self._common, self._since = self.states(), since
        # + 1: the number 0 would leave the seed unmixed.
        self.seed(seed, self._place + 1)

    def seed(self, seed: int, number: int) -> None:
        """Seed all generators from both numbers."""
        # The product may be negative, or longer than the 64 bits that `manual_seed` takes.
        seed_generators(self._device, (seed ^ (_MIX * number)) & (1 << 63) - 1)

    def return_to_common(self) -> None:
        """Switch back to the common stream. Does nothing if it is in use."""
        if self._common is not None:
            self.restore(self._common)
            self._common = None

    def states(self) -> list[Tensor]:
        """Return the states of the generators, for `restore`."""
        return random_states(self._device)

    def restore(self, states: list[Tensor]) -> None:
        """Set the generators to states that `states` returned."""
        set_random_states(self._device, states)

    def draw_alike(
        self, module: nn.Module, seed: Callable[[], int], is_off: Callable[[], bool], patches: ModelPatches
    ) -> None:
        """Let a module in a stack draw equal numbers on all ranks. See [Note: equal random numbers in a stack].

        seed: returns the seed of the stack's forward that runs or is recomputed. is_off: whether blocks compute with
        all tokens, so that ranks draw alike anyway.
        """
        self._num_alike += 1
        number = self._num_alike

        def enter(module: nn.Module, args: object) -> None:
            if module.training and not is_off():
                self._private = self.states()
                # Negative, since the private streams of ranks have the positive numbers.
                self.seed(seed(), -number)

        def leave(*_: object) -> None:
            if self._private is not None:
                self.restore(self._private)
                self._private = None

        patches.hook(module.register_forward_pre_hook(enter))
        patches.hook(module.register_forward_hook(leave, always_call=True))


def _state_of_first(exchange: Collectives, device: torch.device, state: Tensor) -> Tensor:
    given = state.to(device, torch.int32) * (exchange.place == 0)  # a sum with zeros is a broadcast
    return exchange.sum(given, "the state of random generators").to("cpu", torch.uint8)


def draws(model: nn.Module) -> bool:
    """Return whether a forward may draw random numbers: some dropout rate is above 0."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        # Code that calls functional.dropout keeps its rate as an attribute, for example attention_dropout.
        if any("drop" in name and type(value) is float and value > 0 for name, value in module.__dict__.items()):
            return True
    return False
