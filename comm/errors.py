"""What a collective raises when a peer is gone, late, or somewhere else."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ALONE = (
    " It waits for parameters: a forward counts as a call of the engine. One rank alone may run it inside of "
    "`with engine.gathered():` (zero.GatheredParameters in lowtide.deepspeed), which all ranks enter."
)
UNEVEN = (
    "All ranks must make the same number of steps: where their data do not end together, put the loop into "
    "`with engine.join():`, let a DistributedSampler pad them, or end all ranks at the smallest number of batches."
)


class CollectiveError(RuntimeError):
    """A collective could not complete. Says which rank waited for which rank, in what, and for how long."""


def no_answer(
    rank: int, what: str, peers: Sequence[int], waited_seconds: float, error: RuntimeError, what_to_do: str = UNEVEN
) -> str:
    """For a backend that does not say whether the others died, left, or are late."""
    named = ", ".join(map(str, peers))
    cause = re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0]).split(". ")[0]  # without gloo's file and jokes
    return (
        f"rank {rank} in {what}: no answer from rank {named} after {waited_seconds:.1f} s ({cause}). "
        "A rank died, has left, or the ranks make different calls of the engine; a slow rank needs a larger "
        f"communication.timeout_seconds. {what_to_do}" + (_ALONE if what.startswith("gather of") else "")
    )
