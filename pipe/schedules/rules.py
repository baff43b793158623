"""What every schedule must obey, looked at list by list: the simulator runs none that does not.

That no rank waits for ever is not seen in one list: `simulator` finds it.
"""

from collections import defaultdict
from collections.abc import Mapping

from .schedule import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op, Schedule, ScheduleError

_REACH = 4  # actions that `excerpt` shows on each side
_MOST_RANKS = 16


def check_rules(schedule: Schedule) -> None:
    """Raises ScheduleError, the failing cell marked, unless all of this holds.

    Every action is of a stage that its rank has and of a microbatch that there is. Each stage does each microbatch
    once: F, then B or I and W; or F alone, everywhere. If there are messages, each that is needed is there once,
    sent after it is made and received before it is used, and two ranks send and receive in the same order. If there
    are gathers, a stage computes only while it is gathered, and is released at the end. REDUCE and STEP come once
    and after the stage's last backward.
    """
    _check_shape(schedule)
    for rank in range(schedule.num_ranks):
        _RankCheck(schedule, rank).run()
    if schedule.has_messages:
        _check_order_of_messages(schedule)


def fail(schedule: Schedule, rank: int, index: int, message: str) -> None:
    """Raises the error about the action at `index` of the rank's list, which is its end if `index` is past it."""
    actions = schedule.actions[rank]
    what = f"action {index} ({actions[index]})" if index < len(actions) else "end of its list"
    picture = excerpt(schedule, {rank: index})
    raise ScheduleError(f"schedule {schedule.name}, rank {rank}, {what}: {message}\n{picture}")


def _check_shape(schedule: Schedule) -> None:
    """The counts agree with the lengths, and every rank has a stage."""
    for what, expected, found in (
        ("rank_of_stage", schedule.num_stages, len(schedule.rank_of_stage)),
        ("actions", schedule.num_ranks, len(schedule.actions)),
    ):
        if found != expected:
            raise ScheduleError(f"schedule {schedule.name}: expected {expected} entries in {what}, found {found}")
    for stage, rank in enumerate(schedule.rank_of_stage):
        if not 0 <= rank < schedule.num_ranks:
            raise ScheduleError(
                f"schedule {schedule.name}: stage {stage} is placed on rank {rank}, "
                f"expected one below {schedule.num_ranks}"
            )
    idle = set(range(schedule.num_ranks)) - set(schedule.rank_of_stage)
    if idle:
        raise ScheduleError(f"schedule {schedule.name}: rank {min(idle)} has no stage; give it one or use fewer ranks")


class _RankCheck:
    """Goes through one rank's list and remembers what has been done."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._schedule = schedule
        self._rank = rank
        self._has_messages = schedule.has_messages
        self._has_gathers = schedule.has_any(Op.GATHER, Op.RELEASE)
        self._is_forward_only = schedule.is_forward_only
        self._done: dict[Action, int] = {}  # where each action stands
        self._gathered: dict[int, int] = {}  # stage: where its GATHER stands
        self._num_finished: dict[int, int] = defaultdict(int)  # stage: B and W so far

    def run(self) -> None:
        for index, action in enumerate(self._schedule.actions[self._rank]):
            if problem := self._problem(action):
                fail(self._schedule, self._rank, index, problem)
            self._done[action] = index
            if action.op in (Op.B, Op.W):
                self._num_finished[action.stage] += 1
            elif action.op is Op.GATHER:
                self._gathered[action.stage] = index
            elif action.op is Op.RELEASE:
                del self._gathered[action.stage]
        self._check_end()

    def _problem(self, action: Action) -> str | None:
        """What forbids `action` here, or None."""
        schedule, stage, microbatch = self._schedule, action.stage, action.microbatch
        if not 0 <= stage < schedule.num_stages:
            return f"there is no stage {stage}, expected one below {schedule.num_stages}"
        if schedule.rank_of_stage[stage] != self._rank:
            return f"stage {stage} is on rank {schedule.rank_of_stage[stage]}"
        if microbatch is not None and not 0 <= microbatch < schedule.num_microbatches:
            return f"there is no microbatch {microbatch}, expected one below {schedule.num_microbatches}"
        if action in self._done and action.op not in (Op.GATHER, Op.RELEASE):
            return f"it is done at action {self._done[action]} already"
        if action.op in COMPUTE_OPS:
            return self._compute_problem(action)
        if action.op in SEND_OPS or action.op in RECV_OPS:
            return self._message_problem(action)
        return self._stage_problem(action)

    def _compute_problem(self, action: Action) -> str | None:
        stage, microbatch = action.stage, action.microbatch
        if action.op in (Op.B, Op.I):
            if not self._has(Op.F, stage, microbatch):
                return f"the backward comes before {stage}F{microbatch}"
            other = Op.I if action.op is Op.B else Op.B
            if self._has(other, stage, microbatch):
                return f"{stage}{other.value}{microbatch} has done this backward; B stands for I and W"
        if action.op is Op.W and not self._has(Op.I, stage, microbatch):
            return f"the weight half comes before the input half, {stage}I{microbatch}"
        if self._has_gathers and stage not in self._gathered:
            return f"the parameters of stage {stage} are not gathered; put {stage}GATHER before"
        if self._has_messages and action.op is not Op.W:
            receive = Action(Op.RECV_F if action.op is Op.F else Op.RECV_B, stage, microbatch)
            if self._is_message(receive) and receive not in self._done:
                return f"its input is not received; put {receive} before"
        return None

    def _message_problem(self, action: Action) -> str | None:
        stage, microbatch = action.stage, action.microbatch
        if not self._is_message(action):
            peer = action.peer_stage
            if not 0 <= peer < self._schedule.num_stages:
                return f"stage {stage} is the {'first' if stage == 0 else 'last'} one and has no such neighbour"
            return f"stage {peer} is on this rank too, no message is needed"
        if action.op is Op.RECV_B and self._is_forward_only:
            return "nothing goes backward in this schedule"
        if action.op is Op.SEND_F and not self._has(Op.F, stage, microbatch):
            return f"it is sent before it is made by {stage}F{microbatch}"
        if action.op is Op.SEND_B and not (self._has(Op.B, stage, microbatch) or self._has(Op.I, stage, microbatch)):
            return f"it is sent before it is made by {stage}B{microbatch} or {stage}I{microbatch}"
        return None

    def _stage_problem(self, action: Action) -> str | None:
        stage = action.stage
        if action.op is Op.GATHER:
            if stage in self._gathered:
                return f"stage {stage} is gathered at action {self._gathered[stage]} and not released"
        elif action.op is Op.RELEASE:
            if stage not in self._gathered:
                return f"stage {stage} is not gathered"
        elif self._num_finished[stage] < self._schedule.num_microbatches and not self._is_forward_only:
            finished, count = self._num_finished[stage], self._schedule.num_microbatches
            return f"the weight gradients of stage {stage} are not complete: {finished} of {count} microbatches"
        elif action.op is Op.REDUCE and Action(Op.STEP, stage) in self._done:
            return f"stage {stage} has made its step at action {self._done[Action(Op.STEP, stage)]}"
        return None

    def _check_end(self) -> None:
        """Nothing is missing and nothing is held."""
        end = len(self._schedule.actions[self._rank])
        for stage in self._schedule.stages_of_rank(self._rank):
            for microbatch in range(self._schedule.num_microbatches):
                self._check_finished(stage, microbatch, end)
            for op in (Op.REDUCE, Op.STEP):
                if self._schedule.has_any(op) and Action(op, stage) not in self._done:
                    fail(self._schedule, self._rank, end, f"{stage}{op.value} is missing; other stages have theirs")
            if stage in self._gathered:
                where = self._gathered[stage]
                fail(self._schedule, self._rank, where, f"leak: the parameters of stage {stage} are never released")

    def _check_finished(self, stage: int, microbatch: int, end: int) -> None:
        forward, half = (self._done.get(Action(op, stage, microbatch)) for op in (Op.F, Op.I))
        if forward is None:
            fail(self._schedule, self._rank, end, f"{stage}F{microbatch} is missing")
        elif half is not None:
            if not self._has(Op.W, stage, microbatch):
                text = f"leak: what W needs is kept to the end; {stage}W{microbatch} is missing"
                fail(self._schedule, self._rank, half, text)
        elif not self._is_forward_only and not self._has(Op.B, stage, microbatch):
            text = f"leak: its activations are kept to the end; {stage}B{microbatch} is missing"
            fail(self._schedule, self._rank, forward, text)
        if self._has_messages:
            backward = () if self._is_forward_only else (Op.SEND_B,)
            for op in (Op.SEND_F, *backward):
                send = Action(op, stage, microbatch)
                if self._is_message(send) and send not in self._done:
                    fail(self._schedule, self._rank, end, f"{send} is missing: stage {send.peer_stage} waits for it")

    def _has(self, op: Op, stage: int, microbatch: int | None) -> bool:
        return Action(op, stage, microbatch) in self._done

    def _is_message(self, action: Action) -> bool:
        """Whether the other end of a send or receive is on another rank."""
        peer = action.peer_stage
        return 0 <= peer < self._schedule.num_stages and self._schedule.rank_of_stage[peer] != self._rank


def _check_order_of_messages(schedule: Schedule) -> None:
    """Two ranks without tags on their messages tell them apart by their order alone."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)  # (from rank, to rank): sends
    received: dict[tuple[int, int], list[int]] = defaultdict(list)  # the indices of the receives
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.op in SEND_OPS:
                sent[rank, schedule.peer_rank(action)].append(action)
            elif action.op in RECV_OPS:
                received[schedule.peer_rank(action), rank].append(index)
    for (sender, receiver), sends in sent.items():
        for send, index in zip(sends, received[sender, receiver], strict=True):
            wanted = Action(Op.RECV_F if send.op is Op.SEND_F else Op.RECV_B, send.peer_stage, send.microbatch)
            if schedule.actions[receiver][index] != wanted:
                text = f"rank {sender} sends {send} here, expected {wanted}; both must have one order"
                fail(schedule, receiver, index, text)


def excerpt(schedule: Schedule, cells: Mapping[int, int]) -> str:
    """The lists around `cells` (rank: index in its list), one line per rank; an index past the end marks the end.

        rank 0  ... 0F1 >0B0<  0F2  0B1  0F3 ...
        rank 1      1F0  1F1   1B0  1F2  1B1 ...

    Ranks without a cell are shown around the first one's index. Of many ranks those around the first cell are shown.
    """
    first_rank = min(cells)
    last = max(schedule.num_ranks - _MOST_RANKS, 0)
    begin = min(max(first_rank - _MOST_RANKS // 2, 0), last)
    ranks = [rank for rank in range(schedule.num_ranks) if begin <= rank < begin + _MOST_RANKS or rank in cells]
    width = max(len(str(action)) for rank in ranks for action in (*schedule.actions[rank], "end"))
    lines = [_line(schedule, rank, cells.get(rank), cells[first_rank], width) for rank in ranks]
    if left_out := schedule.num_ranks - len(ranks):
        lines.append(f"({left_out} more ranks)")
    return "\n".join(lines)


def _line(schedule: Schedule, rank: int, cell: int | None, center: int, width: int) -> str:
    actions = schedule.actions[rank]
    center = center if cell is None else cell
    texts = []
    for index in range(center - _REACH, center + _REACH + 1):
        text = str(actions[index]) if 0 <= index < len(actions) else ""
        if index == cell:
            text = f">{text or 'end'}<"
        texts.append(f"{text:^{width + 2}}")
    before = "..." if center > _REACH and actions else "   "
    after = "..." if center + _REACH + 1 < len(actions) else ""
    return f"rank {rank:<{len(str(schedule.num_ranks - 1))}}  {before} {' '.join(texts)} {after}".rstrip()
