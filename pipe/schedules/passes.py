"""Schedule in, schedule out: whole backwards, messages, reduces, steps, the forward alone; and see `gathers`."""

from collections import Counter
from collections.abc import Mapping

from .action import SEND_OPS, Action, Op
from .costs import Costs
from .errors import ScheduleError
from .gathers import add_gathers
from .schedule import Schedule
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
