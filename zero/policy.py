"""What a ZeRO stage is: three booleans. The only place that knows stages by number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroPolicy:
    """What is sharded and when it is moved.

    | stage | shards_states | reduces_every_backward | frees_parameters |
    |-------|---------------|------------------------|------------------|
    | 0     | no            | no                     | no               |
    | 1     | yes           | no                     | no               |
    | 2     | yes           | yes                    | no               |
    | 3     | yes           | yes                    | yes              |

    Source: ZeRO, arXiv 1910.02054, section 5.
    """

    shards_states: bool  # optimizer state and master weights are divided over the shard axis
    reduces_every_backward: bool  # full gradients live for one unit; otherwise until the accumulation boundary
    frees_parameters: bool  # full parameters are released after each use

    @classmethod
    def from_stage(cls, stage: int) -> ZeroPolicy:
        return cls(shards_states=stage >= 1, reduces_every_backward=stage >= 2, frees_parameters=stage >= 3)

    def shard_size(self, world_size: int, requested: int | None) -> int:
        """Ranks on the shard axis: one where nothing is sharded, else `requested` or the whole world."""
        if not self.shards_states:
            return 1
        return requested or world_size
