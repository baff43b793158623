"""The ZeRO stages as three booleans. No other file knows stages by number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroPolicy:
    """The sharding of a stage, and the times at which it moves gradients and parameters.

    | stage | shards_states | reduces_every_backward | frees_parameters |
    |-------|---------------|------------------------|------------------|
    | 0     | no            | no                     | no               |
    | 1     | yes           | no                     | no               |
    | 2     | yes           | yes                    | no               |
    | 3     | yes           | yes                    | yes              |

    Source: ZeRO, arXiv 1910.02054, section 5.
    """

    shards_states: bool  # optimizer state and master weights are divided over the shard axis
    reduces_every_backward: bool  # full gradients live for a unit's backward, else until the accumulation boundary
    frees_parameters: bool  # full parameters are released after each use

    @classmethod
    def from_stage(cls, stage: int) -> ZeroPolicy:
        return cls(shards_states=stage >= 1, reduces_every_backward=stage >= 2, frees_parameters=stage >= 3)

    def shard_size(self, world_size: int, requested: int | None) -> int:
        """Return the number of ranks on the shard axis: 1 if nothing is sharded, else `requested` or the world size."""
        if not self.shards_states:
            return 1
        return requested or world_size
