"""When the full parameters of a stage are made and freed, within a budget: ZeRO stage 3 under a pipeline."""

from collections.abc import Sequence

from .action import COMPUTE_OPS, SEND_OPS, Action, Op
from .errors import ScheduleError
from .schedule import Schedule


def add_gathers(schedule: Schedule, budget: float | None = None, sizes: Sequence[float] | None = None) -> Schedule:
    """GATHER before a stage computes, RELEASE after; at most `budget` gathered at a time on each rank.

    `sizes`: (num_stages,) bytes of each stage's full parameters, with `budget` in bytes; without them each stage
    counts 1, so that `budget=1` gathers once for each run of uses. None gathers each stage once: before its first
    use, until its last. When room is needed, the stage goes that is used again last, which needs the fewest gathers
    there can be where stages are of one size (Belady 1966), and it goes right after the use that it had. A stage is
    gathered one action ahead, so that its gather runs beside that action, if this throws out no stage which else
    could stay.
    """
    if schedule.has_any(Op.GATHER, Op.RELEASE):
        raise ScheduleError(f"schedule {schedule.name} has gathers and releases already")
    weights = [1.0] * schedule.num_stages if sizes is None else list(sizes)
    limit = float("inf") if budget is None else budget
    for stage, weight in enumerate(weights):
        if weight > limit:
            raise ScheduleError(
                f"schedule {schedule.name}: stage {stage} has {weight:g} of parameters, more than the budget for "
                f"gathered parameters ({limit:g}); raise the budget or split the model over more stages"
            )
    return schedule.replace_actions(_Cache(actions, weights, limit).actions() for actions in schedule.actions)


class _Cache:
    """The gathered stages of one rank, along its list."""

    def __init__(self, actions: Sequence[Action], weights: Sequence[float], limit: float) -> None:
        self._actions = actions
        self._weights = weights
        self._limit = limit
        self._uses = [index for index, action in enumerate(actions) if action.op in COMPUTE_OPS]
        self._next_use = self._next_uses()
        self._last_use: dict[int, int] = {}  # stage: index in the list; the keys are the gathered stages
        self._gathers: dict[int, list[int]] = {}  # index in the list: stages to gather before it
        self._releases: dict[int, list[int]] = {}  # and to release after it

    def _next_uses(self) -> dict[int, float]:
        """Of each use, where its stage is used next; infinity after the last."""
        following: dict[int, int] = {}
        found: dict[int, float] = {}
        for index in reversed(self._uses):
            stage = self._actions[index].stage
            found[index] = following.get(stage, float("inf"))
            following[stage] = index
        return found

    def actions(self) -> list[Action]:
        """The list with gathers and releases in it."""
        for position, index in enumerate(self._uses):
            stage = self._actions[index].stage
            self._make_room(stage, index, ahead_of=None)
            self._last_use[stage] = index
            if position + 1 < len(self._uses):
                following = self._actions[self._uses[position + 1]].stage
                self._make_room(following, index, ahead_of=stage)
            if self._next_use[index] == float("inf"):
                self._release(stage)
        row: list[Action] = []
        for index, action in enumerate(self._actions):
            row += [Action(Op.GATHER, stage) for stage in self._gathers.get(index, [])]
            row.append(action)
            row += [Action(Op.RELEASE, stage) for stage in self._releases.get(index, [])]
        return row

    def _make_room(self, stage: int, index: int, ahead_of: int | None) -> None:
        """Gathers `stage` before `index`, unless this would have to throw out `ahead_of`, which is used there."""
        if stage in self._last_use:
            return
        held = sum(self._weights[other] for other in self._last_use)
        victims: list[int] = []
        by_next_use = sorted(self._last_use, key=self._when_used_next, reverse=True)
        while held + self._weights[stage] > self._limit:
            victim = by_next_use.pop(0)
            if victim == ahead_of:
                return
            victims.append(victim)
            held -= self._weights[victim]
        for victim in victims:
            self._release(victim)
        self._gathers.setdefault(index, []).append(stage)
        self._last_use[stage] = index  # for a stage gathered ahead: until the next action, which uses it

    def _when_used_next(self, stage: int) -> float:
        return self._next_use[self._last_use[stage]]

    def _release(self, stage: int) -> None:
        """Frees `stage` after its last use, and after the send of what that made, for which another rank waits."""
        index = self._last_use.pop(stage)
        while index + 1 < len(self._actions) and self._actions[index + 1].op in SEND_OPS:
            index += 1
        self._releases.setdefault(index, []).append(stage)
