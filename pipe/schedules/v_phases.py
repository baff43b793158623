"""Schedules on V placements, written as phases: a pattern of ops, and how often it comes."""

from collections import deque
from collections.abc import Sequence

from .action import Action, Op
from .schedule import Schedule


class VPhases:
    """One rank's list, built phase by phase from words such as `F0` and `I1`: op and chunk.

    Chunk 0 is the stage on the way down the V (stage r), chunk 1 that on the way up (stage 2p - 1 - r). Each word
    takes the next microbatch of its op on that chunk. The word `W` takes the oldest I whose weights are not done.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        self._next_forward = [0, 0]  # by chunk
        self._next_backward = [0, 0]
        self._late: deque[tuple[int, int]] = deque()  # (chunk, microbatch) of each I that W has not followed
        self._actions: list[Action] = []

    def repeat(self, count: int, pattern: str) -> None:
        """Appends `pattern` as often as `count` says; a W for which no I is left is passed over."""
        words = pattern.split()
        for _ in range(count):
            for word in words:
                self._append(word)

    def append_late_weights(self) -> None:
        """Appends the weight halves that are left, those of chunk 1 first."""
        for chunk, _ in sorted(self._late, reverse=True):
            self._append(f"W{chunk}")

    def actions(self, num_microbatches: int) -> tuple[Action, ...]:
        """The list so far, without microbatches of `num_microbatches` and above."""
        return tuple(action for action in self._actions if (action.microbatch or 0) < num_microbatches)

    def _append(self, word: str) -> None:
        op = Op[word[0]]
        if op is Op.W:
            waiting = [late for late in self._late if word in ("W", f"W{late[0]}")]
            if waiting:
                self._late.remove(waiting[0])
                self._add(op, *waiting[0])
            return
        chunk = int(word[1])
        counters = self._next_forward if op is Op.F else self._next_backward
        if op is Op.I:
            self._late.append((chunk, counters[chunk]))
        self._add(op, chunk, counters[chunk])
        counters[chunk] += 1

    def _add(self, op: Op, chunk: int, microbatch: int) -> None:
        self._actions.append(Action(op, self._stages[chunk], microbatch))


def v_placement(name: str, num_ranks: int, num_microbatches: int, actions: Sequence[tuple[Action, ...]]) -> Schedule:
    """The schedule of `actions`, with stages r and 2p - 1 - r on rank r."""
    down = tuple(range(num_ranks))
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=2 * num_ranks,
        num_microbatches=num_microbatches,
        rank_of_stage=down + down[::-1],
        actions=tuple(actions),
    )
