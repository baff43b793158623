"""Random numbers of split layers: other ones on each rank where heads and columns differ, the same ones elsewhere.

[Note: two streams]
Ranks that split layers draw from generators in the same state, so that dropout of what all of them have drops the same
elements. Between a column split and the row split behind it each has something else, and draws from a state that is
made of the common one (which goes on by one number) and of the rank's place. So whoever restores the common state, as
the recomputation of a checkpointed block does, has restored both.
Source: the two states of Megatron-LM, megatron/core/tensor_parallel/random.py, without a tracker to be saved.

[Note: random numbers that are the same]
In a stack each rank draws numbers of its own. A module that all ranks compute alike must draw the same ones on all of
them, and in its recomputation again. So it begins at a seed of its own, made of one that was drawn in front of the
stack, where ranks draw the same, and that is kept beside the length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ..comm import Collectives
from ..model.patches import ModelPatches

_MIX = 0x9E3779B97F4A7C15  # of 64 bits: the golden ratio, as splitmix64 has it


class Randomness:
    """Takes the generators from the common state to the rank's own, and back."""

    def __init__(self, exchange: Collectives, device: torch.device) -> None:
        """A collective: the state of the first rank is that of all from now on."""
        self._place = exchange.place
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._common: list[Tensor] | None = None  # while the rank's own is in use
        self._since: tuple[object, int] = (None, 0)
        self.restore([self._of_first(exchange, state) for state in self.states()])

    def begin(self) -> None:
        """A forward of the whole model begins: with the common state, however the last one has ended."""
        self._common = None

    def leave_common(self, of: object) -> None:
        """What comes is different on each rank. of: the module whose inside that is."""
        since = of, torch._C._current_graph_task_id()
        if self._common is not None and since == self._since:
            return
        # A recomputation may have ended inside of another block: its common state is restored by who recomputes.
        seed = int(torch.empty((), dtype=torch.int64).random_())
        self._common, self._since = self.states(), since
        self.seed(seed, self._place + 1)

    def seed(self, seed: int, number: int) -> None:
        """Both generators begin anew, at what is made of both numbers."""
        made = (seed ^ (_MIX * number)) & (1 << 63) - 1
        torch.default_generator.manual_seed(made)
        if self._module is not None:
            self._module.manual_seed(made)

    def return_to_common(self) -> None:
        """What comes is the same on each rank. Does nothing where it is so already."""
        if self._common is not None:
            self.restore(self._common)
            self._common = None

    def states(self) -> list[Tensor]:
        """Of the generators, as `restore` takes them."""
        own = [torch.get_rng_state()]
        return own if self._module is None else [*own, self._module.get_rng_state(self._device)]

    def restore(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._module is not None:
            self._module.set_rng_state(states[1], self._device)

    def _of_first(self, exchange: Collectives, state: Tensor) -> Tensor:
        given = state.to(self._device, torch.int32) * (exchange.place == 0)
        return exchange.sum(given, "the state of random generators").to("cpu", torch.uint8)


def draws(model: nn.Module) -> bool:
    """Whether a forward may draw random numbers: a rate of dropout is above 0."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if any("drop" in name and type(value) is float and value > 0 for name, value in module.__dict__.items()):
            return True
    return False


class CommonDraws:
    """Has each of them begin at a seed of its own, and the rank's own numbers go on behind it."""

    def __init__(self, randomness: Randomness, is_off: Callable[[], bool]) -> None:
        """is_off: whether blocks compute with all tokens, where all ranks draw alike anyway."""
        self._randomness, self._is_off = randomness, is_off
        self._num = 0
        self._own: list[Tensor] | None = None  # states of this rank's generators, while such a module runs

    def __len__(self) -> int:
        return self._num

    def put_on(self, module: nn.Module, seed: Callable[[], int], ledger: ModelPatches) -> None:
        """seed: of the stack's forward that runs, or is computed again."""
        self._num += 1
        ledger.hook(module.register_forward_pre_hook(partial(self._enter, self._num, seed)))
        ledger.hook(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, number: int, seed: Callable[[], int], module: nn.Module, args: object) -> None:
        if module.training and not self._is_off():
            self._own = self._randomness.states()
            self._randomness.seed(seed(), -number)

    def _leave(self, *_: object) -> None:
        if self._own is not None:
            self._randomness.restore(self._own)
            self._own = None
