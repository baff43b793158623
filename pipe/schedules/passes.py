"""Passes over schedules: merge backwards, add messages, gathers and reductions.

`complete` makes the list that the executor runs.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from .costs import Costs
from .schedule import COMPUTE_OPS, SEND_OPS, Action, Op, Schedule, ScheduleError
from .simulator import TimeSlot, simulate

_WHOLE = (Op.B, Op.W)  # ops that complete the weight gradients of a microbatch
_MESSAGES = {Op.F: (Op.SEND_F, Op.RECV_F), Op.B: (Op.SEND_B, Op.RECV_B), Op.I: (Op.SEND_B, Op.RECV_B)}


def complete(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    gathers: bool = False,
    budget: float | None = None,
) -> Schedule:
    """Make the full list of actions from a schedule of F, B, I and W, as the executor runs it.

    If it has no messages, merges halves of backwards at no cost (`merge_backward`) and adds messages (`add_messages`).
    Adds gathers within `budget` (`add_gathers`) if `gathers`, and reductions (`add_reduces`).
    """
    if not schedule.has_messages:
        schedule = add_messages(merge_backward(schedule, costs or Costs.uniform(schedule.num_stages)), costs)
    if gathers:
        sizes = None if costs is None else costs.parameter_bytes
        schedule = add_gathers(schedule, budget, sizes)
    return schedule if schedule.is_forward_only else add_reduces(schedule)


def merge_backward(
    schedule: Schedule, costs: Costs | None = None, starts: Mapping[Action, float] | None = None
) -> Schedule:
    """Replace an I that is directly followed by its W by a B, which walks the autograd graph once and not twice.

    The previous stage then gets its gradient later, after W. With `costs`, merges only if this delays no action of
    `simulate`'s timeline, so the makespan does not change. starts: of the actions in that timeline, if known.
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
    """Find every I whose gradient would still arrive in time after its W."""
    free = set()
    for action, start in starts.items():
        if action.op is not Op.I:
            continue
        stage, microbatch = action.stage, action.microbatch
        users = [starts.get(Action(op, stage - 1, microbatch)) for op in (Op.I, Op.B)]
        latency = costs.send if stage > 0 and schedule.crosses(stage - 1) else 0.0
        ready = start + costs.backward[stage] + latency
        # Measured costs may say that a B takes longer than I and W together: then a merge delays this rank.
        longer = costs.backward[stage] > costs.input_backward[stage] + costs.weight_backward[stage]
        # Times are sums of rounded numbers.
        if not longer and all(user is None or ready <= user * (1 + 1e-9) for user in users):
            free.add(action)
    return free


def add_messages(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Add a SEND directly after the action that makes a message, and a RECV on the rank that uses it.

    [Note: an order that cannot deadlock] The actions of all ranks are put in a total order: by their end in
    `simulate`'s timeline under `costs`. SEND and RECV come directly after the action that made the message, RECV in the
    receiver's list, before all actions that end later there. Each rank's list is a subsequence of the total order, and
    an action comes after everything that it waits for. So the first action that is not done can always be done, even
    if SEND and RECV block until the peer comes. Two ranks send and receive in the same order. A receive is posted
    before the action that runs while the message is made.
    """
    if schedule.has_messages:
        raise ScheduleError(f"schedule {schedule.name}: expected no sends and receives, found some")
    placed: list[list[tuple[float, int, int, Action]]] = [[] for _ in range(schedule.num_ranks)]
    for rank, slots in enumerate(simulate(schedule, costs).timeline):
        for slot in slots:
            placed[rank].append((slot.end, slot.order, 0, slot.action))
            for owner, message in _messages_of(schedule, rank, slot):
                placed[owner].append((slot.end, slot.order, 1, message))
    # Actions have no order, so they are no part of the key.
    return schedule.replace_actions(
        [action for *_, action in sorted(row, key=lambda entry: entry[:3])] for row in placed
    )


def _messages_of(schedule: Schedule, rank: int, slot: TimeSlot) -> list[tuple[int, Action]]:
    """List (rank, action) of both ends of the message that an action makes; empty if its output stays on the rank."""
    op, stage, microbatch = slot.action.op, slot.action.stage, slot.action.microbatch
    if op not in _MESSAGES:
        return []
    send = Action(_MESSAGES[op][0], stage, microbatch)
    peer = send.peer_stage
    if not 0 <= peer < schedule.num_stages or schedule.rank_of_stage[peer] == rank:
        return []
    return [(rank, send), (schedule.rank_of_stage[peer], Action(_MESSAGES[op][1], peer, microbatch))]


def add_reduces(schedule: Schedule) -> Schedule:
    """Add a REDUCE of each stage when its weight gradients are complete, after the following send and release."""
    if schedule.has_any(Op.REDUCE):
        return schedule
    lists = []
    for actions in schedule.actions:
        left = Counter(action.stage for action in actions if action.op in _WHOLE)
        row: list[Action] = []
        complete_stages: list[int] = []
        for action in actions:
            # Sends first, as another rank waits for them. Releases too, as they make room.
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


def add_gathers(schedule: Schedule, budget: float | None = None, sizes: Sequence[float] | None = None) -> Schedule:
    """Add GATHER before a stage computes and RELEASE after it, for ZeRO stage 3.

    budget: gathered parameters of a rank at a time, in the unit of `sizes`; None: gather each stage once, from its
    first to its last use. sizes: (num_stages,) full parameters of each stage; None: 1 each.
    If room is needed, the stage with the latest next use is released, directly after its previous use. With stages of
    equal size, no order needs fewer gathers (Belady 1966). A stage is gathered an action early, to overlap the gather
    with that action, unless this would release the stage of that action.
    """
    if schedule.has_any(Op.GATHER, Op.RELEASE):
        raise ScheduleError(f"schedule {schedule.name}: expected no gathers and releases, found some")
    weights = [1.0] * schedule.num_stages if sizes is None else list(sizes)
    limit = float("inf") if budget is None else budget
    for stage, weight in enumerate(weights):
        if weight > limit:
            raise ScheduleError(
                f"schedule {schedule.name}: expected parameters of stage {stage} within the budget for gathered "
                f"parameters, {limit:g}, found {weight:g}; raise the budget, or split the model over more stages"
            )
    return schedule.replace_actions(_with_gathers(actions, weights, limit) for actions in schedule.actions)


def _with_gathers(actions: Sequence[Action], sizes: Sequence[float], limit: float) -> list[Action]:
    """Add gathers and releases to the list of a rank, with gathered stages of at most `limit` in total."""
    uses = [index for index, action in enumerate(actions) if action.op in COMPUTE_OPS]
    next_use = _next_uses(actions, uses)
    last_use: dict[int, int] = {}  # gathered stage -> index of its last use so far
    gathers: dict[int, list[int]] = defaultdict(list)  # index -> stages to gather before this action
    releases: dict[int, list[int]] = defaultdict(list)  # index -> stages to release after this action

    def release(stage: int) -> None:
        index = last_use.pop(stage)
        while index + 1 < len(actions) and actions[index + 1].op in SEND_OPS:  # a rank waits for this message
            index += 1
        releases[index].append(stage)

    def gather(stage: int, index: int, ahead_of: int | None) -> None:
        """Gather `stage` before action `index`, unless this would release stage `ahead_of`, which is used there."""
        if stage in last_use:
            return
        held = sum(sizes[gathered] for gathered in last_use)
        victims: list[int] = []
        by_next_use = sorted(last_use, key=lambda gathered: next_use[last_use[gathered]], reverse=True)
        while held + sizes[stage] > limit:
            victim = by_next_use.pop(0)
            if victim == ahead_of:
                return
            victims.append(victim)
            held -= sizes[victim]
        for victim in victims:
            release(victim)
        gathers[index].append(stage)
        last_use[stage] = index  # of a stage gathered early: until the next action, which uses it

    for index, following in zip(uses, [*uses[1:], None], strict=True):
        stage = actions[index].stage
        gather(stage, index, ahead_of=None)
        last_use[stage] = index
        if following is not None:
            gather(actions[following].stage, index, ahead_of=stage)
        if next_use[index] == float("inf"):
            release(stage)
    row: list[Action] = []
    for index, action in enumerate(actions):
        row += [Action(Op.GATHER, stage) for stage in gathers[index]]
        row.append(action)
        row += [Action(Op.RELEASE, stage) for stage in releases[index]]
    return row


def _next_uses(actions: Sequence[Action], uses: Sequence[int]) -> dict[int, float]:
    """Map each use to the index of its stage's next use; infinity after the last."""
    following: dict[int, int] = {}
    found: dict[int, float] = {}
    for index in reversed(uses):
        stage = actions[index].stage
        found[index] = following.get(stage, float("inf"))
        following[stage] = index
    return found
