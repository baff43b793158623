"""Schedule in, schedule out: whole backwards, messages, reduces, steps, gathers, the forward alone."""

from collections import Counter
from collections.abc import Mapping, Sequence

from .costs import Costs
from .schedule import COMPUTE_OPS, SEND_OPS, Action, Op, Schedule, ScheduleError
from .simulator import TimeSlot, simulate

_WHOLE = (Op.B, Op.W)  # after it the microbatch's weight gradients are there
_MESSAGES = {Op.F: (Op.SEND_F, Op.RECV_F), Op.B: (Op.SEND_B, Op.RECV_B), Op.I: (Op.SEND_B, Op.RECV_B)}


def complete(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    gathers: bool = False,
    budget: float | None = None,
    step: bool = False,
) -> Schedule:
    """All that a rank has to do, from a schedule of F, B, I and W: what the executor runs.

    Merges the halves of backwards that need not be apart (`merge_backward`), adds messages unless they are there
    (`add_messages`), gathers within `budget` (`add_gathers`) if `gathers`, REDUCE, and STEP if `step`.
    """
    if not schedule.has_messages:
        schedule = add_messages(merge_backward(schedule, costs or Costs.uniform(schedule.num_stages)), costs)
    if gathers:
        sizes = None if costs is None else costs.parameter_bytes
        schedule = add_gathers(schedule, budget, sizes)
    if not schedule.is_forward_only:
        schedule = add_reduces(schedule)
        if step:
            schedule = add_steps(schedule)
    return schedule


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule in their order, with the messages and gathers that they need: for evaluation."""
    if schedule.has_any(Op.GATHER):
        raise ScheduleError(f"schedule {schedule.name}: take forward_only of a schedule before add_gathers, not after")
    ops = (Op.F, Op.SEND_F, Op.RECV_F)
    return schedule.replace_actions([action for action in actions if action.op in ops] for actions in schedule.actions)


def merge_backward(
    schedule: Schedule, costs: Costs | None = None, starts: Mapping[Action, float] | None = None
) -> Schedule:
    """One B in place of each I that its own W follows at once: one walk through the graph in place of two.

    The stage before then gets its gradient later, after W. With `costs` only those are merged where this does not
    delay it, because in `simulate`'s timeline it starts later anyway: the makespan stays what it was. starts: of the
    actions in that timeline, where they are known.
    """
    if costs is not None and starts is None:
        starts = {slot.action: slot.start for slots in simulate(schedule, costs).timeline for slot in slots}
    may_merge = None if costs is None or starts is None else _free_merges(schedule, costs, starts)
    lists = []
    for actions in schedule.actions:
        merged: list[Action] = []
        for action in actions:
            previous = merged[-1] if merged else None
            half = Action(Op.I, action.stage, action.microbatch)
            if action.op is Op.W and previous == half and (may_merge is None or half in may_merge):
                merged[-1] = Action(Op.B, action.stage, action.microbatch)
            else:
                merged.append(action)
        lists.append(merged)
    return schedule.replace_actions(lists)


def _free_merges(schedule: Schedule, costs: Costs, starts: Mapping[Action, float]) -> set[Action]:
    """Every I whose gradient is used no earlier than it would be there if W came first."""
    free = set()
    for action, start in starts.items():
        if action.op is not Op.I:
            continue
        stage, microbatch = action.stage, action.microbatch
        users = [starts.get(Action(op, stage - 1, microbatch)) for op in (Op.I, Op.B)]
        latency = costs.send if stage > 0 and schedule.crosses(stage - 1) else 0.0
        ready = start + costs.backward[stage] + latency
        longer = costs.backward[stage] > costs.input_backward[stage] + costs.weight_backward[stage]
        if not longer and all(user is None or ready <= user * (1 + 1e-9) for user in users):
            free.add(action)
    return free


def add_messages(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """SEND right after what makes it, RECV on the rank that uses it; nothing between stages of one rank.

    [Note: an order that cannot deadlock] The actions of all ranks are put in one order: by the time at which they
    end in `simulate`'s timeline under `costs`. A message has its place right after the action that made it, and so
    has its RECV, in the list of the other rank: before all that ends later there. Each rank's list is a part of
    this one order, and what an action waits for stands before it in the order. So the first action that is not yet
    done can always be done, even if SEND and RECV block until the other side has come; two ranks send and receive
    in the same order; and a receive is posted no later than before the action that runs while its message is made.
    """
    if schedule.has_messages:
        raise ScheduleError(f"schedule {schedule.name} has sends and receives already")
    placed: list[list[tuple[float, int, int, Action]]] = [[] for _ in range(schedule.num_ranks)]
    for rank, slots in enumerate(simulate(schedule, costs).timeline):
        for slot in slots:
            placed[rank].append((slot.end, slot.order, 0, slot.action))
            for owner, message in _messages_of(schedule, rank, slot):
                placed[owner].append((slot.end, slot.order, 1, message))
    return schedule.replace_actions(
        [action for *_, action in sorted(row, key=lambda entry: entry[:3])] for row in placed
    )


def _messages_of(schedule: Schedule, rank: int, slot: TimeSlot) -> list[tuple[int, Action]]:
    """What the end of an action sends: (rank, its action) of both ends; empty if it stays on the rank."""
    op, stage, microbatch = slot.action.op, slot.action.stage, slot.action.microbatch
    if op not in _MESSAGES:
        return []
    send = Action(_MESSAGES[op][0], stage, microbatch)
    peer = send.peer_stage
    if not 0 <= peer < schedule.num_stages or schedule.rank_of_stage[peer] == rank:
        return []
    return [(rank, send), (schedule.rank_of_stage[peer], Action(_MESSAGES[op][1], peer, microbatch))]


def add_reduces(schedule: Schedule) -> Schedule:
    """REDUCE of each stage when the weight gradients of its last microbatch are there, after its send and release."""
    if schedule.has_any(Op.REDUCE):
        return schedule
    lists = []
    for actions in schedule.actions:
        left = Counter(action.stage for action in actions if action.op in _WHOLE)
        row: list[Action] = []
        complete_stages: list[int] = []
        for action in actions:
            if action.op not in (*SEND_OPS, Op.RELEASE):
                row += [Action(Op.REDUCE, stage) for stage in complete_stages]
                complete_stages = []
            row.append(action)
            if action.op in _WHOLE:
                left[action.stage] -= 1
                if not left[action.stage]:
                    complete_stages.append(action.stage)
        lists.append(row + [Action(Op.REDUCE, stage) for stage in complete_stages])
    return schedule.replace_actions(lists)


def add_steps(schedule: Schedule) -> Schedule:
    """STEP of each stage at the end of its rank's list, when every stage has its gradients: the norm is of all."""
    if schedule.has_any(Op.STEP):
        return schedule
    return schedule.replace_actions(
        [*actions, *(Action(Op.STEP, stage) for stage in schedule.stages_of_rank(rank))]
        for rank, actions in enumerate(schedule.actions)
    )


def add_gathers(schedule: Schedule, budget: float | None = None, sizes: Sequence[float] | None = None) -> Schedule:
    """GATHER before a stage computes, RELEASE after: ZeRO stage 3. At most `budget` gathered at a time on each rank.

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
