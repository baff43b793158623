"""Check the rules that each rank's list of actions must keep (`check_rules`). The simulator finds deadlocks."""

from collections import defaultdict
from collections.abc import Mapping

from .schedule import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op, Schedule, ScheduleError

_REACH = 4  # actions on each side of the marked action in an excerpt
_MAX_RANKS = 16  # in an excerpt


def check_rules(schedule: Schedule) -> None:
    """Raise ScheduleError, with the failing action marked in its list, unless all rules hold.

    - Every action names a stage of its rank and an existing microbatch.
    - Each stage does each microbatch once: F, then B or I and W; or F alone, in all stages.
    - If there are messages, each needed message is there once, sent after it is made and received before it is used.
      Two ranks send and receive in the same order.
    - If there are gathers, a stage computes only while it is gathered, and is released at the end.
    - REDUCE and STEP come once, after the stage's last backward.
    """
    # First, since the other checks index these tuples.
    _check_shape(schedule)
    for rank in range(schedule.num_ranks):
        _RankCheck(schedule, rank).run()
    if schedule.has_messages:
        _check_order_of_messages(schedule)


def fail(schedule: Schedule, rank: int, index: int, message: str) -> None:
    """Raise an error about the action at `index` of the rank's list, or about its end if `index` is past it."""
    actions = schedule.actions[rank]
    what = f"action {index} ({actions[index]})" if index < len(actions) else "end of its list"
    picture = excerpt(schedule, {rank: index})
    raise ScheduleError(f"schedule {schedule.name}, rank {rank}, {what}: {message}\n{picture}")


def _check_shape(schedule: Schedule) -> None:
    """Raise ScheduleError unless counts agree with lengths, and every rank has a stage."""
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
                f"expected a rank below {schedule.num_ranks}"
            )
    idle = set(range(schedule.num_ranks)) - set(schedule.rank_of_stage)
    if idle:
        raise ScheduleError(
            f"schedule {schedule.name}: rank {min(idle)} has no stage; place a stage on it, or use fewer ranks"
        )


class _RankCheck:
    """Checks the list of a rank in order, and remembers the actions so far."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._schedule = schedule
        self._rank = rank
        self._has_messages = schedule.has_messages
        self._has_gathers = schedule.has_any(Op.GATHER, Op.RELEASE)
        self._is_forward_only = schedule.is_forward_only
        self._done: dict[Action, int] = {}  # index of each action so far
        self._gathered: dict[int, int] = {}  # gathered stage -> index of its GATHER
        self._num_finished: dict[int, int] = defaultdict(int)  # stage -> number of B and W so far

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
        """Return the rule that `action` breaks here, or None."""
        schedule, stage, microbatch = self._schedule, action.stage, action.microbatch
        if not 0 <= stage < schedule.num_stages:
            return f"expected a stage below {schedule.num_stages}, found {stage}"
        if schedule.rank_of_stage[stage] != self._rank:
            return f"stage {stage} is on rank {schedule.rank_of_stage[stage]}"
        if microbatch is not None and not 0 <= microbatch < schedule.num_microbatches:
            return f"expected a microbatch below {schedule.num_microbatches}, found {microbatch}"
        # A stage may be gathered several times, if the budget does not hold all stages of the rank.
        if action in self._done and action.op not in (Op.GATHER, Op.RELEASE):
            return f"it is already done at action {self._done[action]}"
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
            twin = Op.I if action.op is Op.B else Op.B
            if self._has(twin, stage, microbatch):
                return f"{stage}{twin.value}{microbatch} has done this backward; B stands for I and W"
        if action.op is Op.W and not self._has(Op.I, stage, microbatch):
            return f"the weight half comes before the input half, {stage}I{microbatch}"
        if self._has_gathers and stage not in self._gathered:
            return f"the parameters of stage {stage} are not gathered; put {stage}GATHER before"
        # W uses no message: its I has kept the gradient.
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
                return f"stage {stage} is the {'first' if stage == 0 else 'last'} stage and has no neighbour there"
            return f"stage {peer} is on this rank too and needs no message"
        if action.op is Op.RECV_B and self._is_forward_only:
            return "this schedule has no backward"
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
        """Raise an error if an action is missing, or if memory is held at the end."""
        end = len(self._schedule.actions[self._rank])
        for stage in self._schedule.stages_of_rank(self._rank):
            for microbatch in range(self._schedule.num_microbatches):
                self._check_finished(stage, microbatch, end)
            for op in (Op.REDUCE, Op.STEP):
                if self._schedule.has_any(op) and Action(op, stage) not in self._done:
                    fail(self._schedule, self._rank, end, f"{stage}{op.value} is missing, and a stage has {op.value}")
            if stage in self._gathered:
                text = f"leak: the parameters of stage {stage} are never released"
                fail(self._schedule, self._rank, self._gathered[stage], text)

    def _check_finished(self, stage: int, microbatch: int, end: int) -> None:
        forward, half = (self._done.get(Action(op, stage, microbatch)) for op in (Op.F, Op.I))
        if forward is None:
            fail(self._schedule, self._rank, end, f"{stage}F{microbatch} is missing")
        elif half is not None:
            if not self._has(Op.W, stage, microbatch):
                text = f"leak: the tensors for W are held to the end; {stage}W{microbatch} is missing"
                fail(self._schedule, self._rank, half, text)
        elif not self._is_forward_only and not self._has(Op.B, stage, microbatch):
            text = f"leak: its activations are held to the end; {stage}B{microbatch} is missing"
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
        """Tell if the peer stage of a send or receive exists and is on a different rank."""
        peer = action.peer_stage
        return 0 <= peer < self._schedule.num_stages and self._schedule.rank_of_stage[peer] != self._rank


def _check_order_of_messages(schedule: Schedule) -> None:
    """Raise ScheduleError unless sends and receives match in order: messages without tags are matched by order."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)  # (sender, receiver) -> sends
    received: dict[tuple[int, int], list[int]] = defaultdict(list)  # (sender, receiver) -> indices of the receives
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.op in SEND_OPS:
                sent[rank, schedule.peer_rank(action)].append(action)
            elif action.op in RECV_OPS:
                received[schedule.peer_rank(action), rank].append(index)
    for (sender, receiver), sends in sent.items():
        # `_RankCheck` has found each message once at both ends, so the lists have the same length.
        for send, index in zip(sends, received[sender, receiver], strict=True):
            wanted = Action(Op.RECV_F if send.op is Op.SEND_F else Op.RECV_B, send.peer_stage, send.microbatch)
            if schedule.actions[receiver][index] != wanted:
                text = f"rank {sender} sends {send} here, expected {wanted}; sends and receives must be in equal order"
                fail(schedule, receiver, index, text)


def excerpt(schedule: Schedule, cells: Mapping[int, int]) -> str:
    """Show the lists around the marked `cells` (rank -> index in its list), a line per rank.

        rank 0  ... 0F1 >0B0<  0F2  0B1  0F3 ...
        rank 1      1F0  1F1   1B0  1F2  1B1 ...

    An index past the end marks the end. Ranks without a cell are shown around the index of the first cell. With many
    ranks, only ranks near the first cell and ranks with a cell are shown.
    """
    first_rank = min(cells)
    last = max(schedule.num_ranks - _MAX_RANKS, 0)
    begin = min(max(first_rank - _MAX_RANKS // 2, 0), last)
    ranks = [rank for rank in range(schedule.num_ranks) if begin <= rank < begin + _MAX_RANKS or rank in cells]
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
