"""Where the parameters and states of shards are between updates, and the ways by which they come to one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..offload import Window
from .gradient import GroupGradient
from .host_update import HostUpdate
from .offloaded_states import OffloadedStates
from .shard_rest import ShardRest
from .shard_state import Kept, ShardState
from .widened_states import WidenedStates


class ShardHomes:
    """What all shards of a rank share.

    | part      | what                                      | None                                |
    |-----------|-------------------------------------------|-------------------------------------|
    | offloaded | chunks of states, in a store or on a host |                                     |
    | rest      | parameters, in a store                    | they are in memory                  |
    | host      | copies of what a host updates of a device | the update is where parameters are  |
    """

    def __init__(self, offloaded: OffloadedStates, rest: ShardRest | None, host: HostUpdate | None) -> None:
        self._offloaded = offloaded
        self._rest = rest
        self._host = host
        self._widened = WidenedStates()
        self.window = Window() if rest is None else rest.window
        """Of parameters, on their way to the update."""

    def make_shards(
        self, gradients: Sequence[GroupGradient], options_index_of: Mapping[int, int], kept: Kept
    ) -> list[ShardState]:
        """Takes memory for masters and states of groups; arguments as of `ShardState`. Raises OffloadError."""
        numels = self._offloaded.plan.resident_numels([one.group.layout.shard_numel for one in gradients])
        shards = [
            ShardState(gradient, numel, options_index_of, kept, self._widened, self._offloaded, self._rest, self._host)
            for gradient, numel in zip(gradients, numels, strict=True)
        ]
        self._offloaded.reserve()
        return shards

    @property
    def keeps_parameters(self) -> bool:
        """Whether parameters rest in a store."""
        return self._rest is not None

    def are_where_computed(self, shards: Iterable[ShardState]) -> bool:
        """Whether all of them rest where they are computed with, their states too."""
        return self._rest is None and not any(shard.is_apart or shard.chunks for shard in shards)

    def expect(self, order: Iterable[ShardState]) -> None:
        """The chunks of these shards in one order: that of the next shard is read while this one is updated."""
        self._offloaded.window.expect([chunk.resident for shard in order for chunk in shard.chunks])

    def put_back(self) -> None:
        """What was opened goes back, with what was changed in it."""
        self._widened.settle()
        self.window.put_back()
        self._offloaded.window.put_back()

    def settle(self) -> None:
        """8-bit states that were opened as wider ones have what was changed in these."""
        self._widened.settle()

    def wait(self) -> None:
        """Returns when states are where they rest. Raises the error of a drive."""
        self._offloaded.window.wait()

    @property
    def offloaded_bytes(self) -> int:
        """Of states and master weights that are not with the parameters."""
        return self._offloaded.nbytes

    def close(self) -> None:
        """Gives back what is in stores and buffers."""
        if self._rest is None:  # else it is the rest's, which closes it
            self.window.close()
        for place in (self._host, self._offloaded, self._rest):
            if place is not None:
                place.close()
