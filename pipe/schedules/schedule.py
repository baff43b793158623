"""Pipeline schedules as data: a list of actions for each rank (`Schedule`), which a text file can hold.

An `Action` is an op on a stage for a microbatch: `2F0` is stage 2, forward, microbatch 0.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

_ACTION = re.compile(r"(\d+)([A-Za-z_]+?)(\d*)")
_KEYS = ("name", "ranks", "stages", "microbatches", "rank of stage")
_RANK_KEY = re.compile(r"rank\s+(\d+)")


class ScheduleError(ValueError):
    """A schedule cannot be made, read or run.

    The text has the place (line and column, or rank and action), and shows the rank's list with the action marked
    `>2F0<`.
    """


class Op(enum.Enum):
    """The operation of an action.

    | op      | of a microbatch | does                                               | memory                          |
    |---------|-----|----------------------------------------------------------------|---------------------------------|
    | F       | yes | forward of the stage                                           | holds activations from here     |
    | B       | yes | backward: gradients of input and weights                       | frees the activations           |
    | I       | yes | half of the backward: gradient of the input                    | keeps only the tensors for W    |
    | W       | yes | half of the backward: gradients of the weights                 | frees the tensors for W         |
    | SEND_F  | yes | starts to send the stage's output to the next stage            | holds the output until sent     |
    | RECV_F  | yes | starts to receive the stage's input from the previous stage    | holds a buffer from here        |
    | SEND_B  | yes | starts to send the input's gradient to the previous stage      | as SEND_F                       |
    | RECV_B  | yes | starts to receive the output's gradient from the next stage    | as RECV_F                       |
    | GATHER  | no  | makes the stage's full parameters                              | holds them from here            |
    | RELEASE | no  | frees the stage's full parameters                              | the shards remain               |
    | REDUCE  | no  | sums the stage's gradients over its data-parallel ranks        | full gradients may be freed     |
    | STEP    | no  | updates the stage's parameters                                 |                                 |
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 (the letter that the field uses)
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    GATHER = "GATHER"
    RELEASE = "RELEASE"
    REDUCE = "REDUCE"
    STEP = "STEP"


COMPUTE_OPS = (Op.F, Op.B, Op.I, Op.W)
BACKWARD_OPS = (Op.B, Op.I, Op.W)
SEND_OPS = (Op.SEND_F, Op.SEND_B)
RECV_OPS = (Op.RECV_F, Op.RECV_B)
STAGE_OPS = (Op.GATHER, Op.RELEASE, Op.REDUCE, Op.STEP)  # without a microbatch

# Peer stage of a message, relative to the stage of the action.
_PEER_OFFSETS = {Op.SEND_F: 1, Op.RECV_F: -1, Op.SEND_B: -1, Op.RECV_B: 1}


@dataclass(frozen=True, slots=True)
class Action:
    """An op on `stage` for `microbatch`, which is None for the ops of a whole stage (`STAGE_OPS`).

    A send or receive names a stage of its rank: `1SEND_F0` is received as `2RECV_F0`.
    """

    op: Op
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"

    @property
    def peer_stage(self) -> int:
        """The stage at the remote end of a send or receive."""
        return self.stage + _PEER_OFFSETS[self.op]

    @classmethod
    def parse(cls, text: str, line: int = 1, column: int = 1) -> Action:
        """Parse an action from the form that `str` writes. line, column: from 1, for the error text."""
        where = f"line {line}, column {column}"
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(f'{where}: expected an action like "2F0" (stage, op, microbatch), found "{text}"')
        stage, name, microbatch = match.groups()
        op = Op.__members__.get(name)
        if op is None:
            close = difflib.get_close_matches(name.upper(), Op.__members__, n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"the ops are {', '.join(Op.__members__)}"
            raise ScheduleError(f'{where}: unknown op "{name}" in "{text}"; {hint}')
        if op in STAGE_OPS and microbatch:
            raise ScheduleError(f'{where}: {name} takes no microbatch, expected "{stage}{name}", found "{text}"')
        if op not in STAGE_OPS and not microbatch:
            raise ScheduleError(f'{where}: {name} needs a microbatch, expected for example "{text}0", found "{text}"')
        return cls(op, int(stage), int(microbatch) if microbatch else None)


@dataclass(frozen=True)
class Schedule:
    """A list of actions for each rank. A rank does its actions in order, and waits only for messages.

    Stage 0 takes the batch, the last stage computes the loss, and stage s sends to stage s + 1. A rank can have several
    stages. Two placements are usual:

        looped, 2 chunks, 4 ranks         V, 2 chunks, 4 ranks
        rank   0  1  2  3                 rank   0  1  2  3
        stage  0  1  2  3                 stage  0  1  2  3
               4  5  6  7                        7  6  5  4

    Schedules from `registry` have only F, B, I and W. `passes` adds messages, gathers and reductions.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    rank_of_stage: tuple[int, ...]  # (num_stages,)
    actions: tuple[tuple[Action, ...], ...]  # by rank

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages on `rank`, ascending."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def crosses(self, stage: int) -> bool:
        """Tell if the next stage is on a different rank; False for the last stage."""
        return stage + 1 < self.num_stages and self.rank_of_stage[stage] != self.rank_of_stage[stage + 1]

    def peer_rank(self, action: Action) -> int:
        """Return the rank at the remote end of a send or receive."""
        return self.rank_of_stage[action.peer_stage]

    def has_any(self, *ops: Op) -> bool:
        """Tell if the schedule contains any of `ops`."""
        return not self._ops.isdisjoint(ops)

    @cached_property
    def _ops(self) -> frozenset[Op]:
        return frozenset(action.op for actions in self.actions for action in actions)

    @property
    def has_messages(self) -> bool:
        """True if the lists contain sends and receives. Without them, messages are implied."""
        return self.has_any(*SEND_OPS, *RECV_OPS)

    @property
    def is_forward_only(self) -> bool:
        """True if there is no backward, so that no activations are held: for evaluation."""
        return not self.has_any(*BACKWARD_OPS)

    def replace_actions(self, actions: Iterable[Iterable[Action]]) -> Schedule:
        """Return this schedule with new lists, by rank."""
        return dataclasses.replace(self, actions=tuple(map(tuple, actions)))

    def to_text(self) -> str:
        """Write the schedule as text: five header lines, then a line for each rank. `from_text` reads it."""
        lines = [
            f"name: {self.name}",
            f"ranks: {self.num_ranks}",
            f"stages: {self.num_stages}",
            f"microbatches: {self.num_microbatches}",
            f"rank of stage: {' '.join(map(str, self.rank_of_stage))}",
        ]
        lines += [f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.actions)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Read a schedule from text.

        The five header lines come first, in any order. A rank's actions can take several lines that begin with
        `rank N:`. A `#` begins a comment. Raises ScheduleError with line and column. `simulate` tells if it can run.
        """
        header: dict[str, _Value] = {}
        rows: list[tuple[int, _Value]] = []  # (rank, actions)
        for line, content in enumerate(text.splitlines(), start=1):
            content = content.partition("#")[0]
            if content.strip():
                _read_line(content, line, header, rows)
        if missing := [key for key in _KEYS if key not in header]:
            raise ScheduleError(f'line 1: expected a line "{missing[0]}: ..." at the top of the schedule, found none')
        num_ranks, num_stages, num_microbatches = (
            _read_count(key, header[key]) for key in ("ranks", "stages", "microbatches")
        )
        rank_of_stage = _read_rank_of_stage(header["rank of stage"], num_ranks, num_stages)
        actions: list[list[Action]] = [[] for _ in range(num_ranks)]
        for rank, (row, line, column) in rows:
            if rank >= num_ranks:
                raise ScheduleError(
                    f"line {line}: expected a rank below {num_ranks} (ranks: {num_ranks}), found {rank}"
                )
            for word, word_column in _words(row, column):
                action = Action.parse(word, line, word_column)
                _check_range(action, num_stages, num_microbatches, f'line {line}, column {word_column}: "{word}"')
                actions[rank].append(action)
        name = header["name"][0].strip()
        return cls(name, num_ranks, num_stages, num_microbatches, rank_of_stage, tuple(map(tuple, actions)))


_Value = tuple[str, int, int]  # text after "key:", line, column


def _read_line(content: str, line: int, header: dict[str, _Value], rows: list[tuple[int, _Value]]) -> None:
    """Read a line "key: value" into the header, or into the rows of ranks."""
    key, colon, value = content.partition(":")
    # Columns count from 1, and the value begins behind the colon.
    column = len(key) + 2
    key = " ".join(key.split())
    if not colon:
        raise ScheduleError(f'line {line}: expected "key: value", found "{content.strip()}"')
    if match := _RANK_KEY.fullmatch(key):
        rows.append((int(match[1]), (value, line, column)))
    elif key not in _KEYS:
        close = difflib.get_close_matches(key, _KEYS, n=1)
        hint = f'did you mean "{close[0]}"?' if close else f"the keys are {', '.join(_KEYS)} and rank N"
        raise ScheduleError(f'line {line}: unknown key "{key}"; {hint}')
    elif key in header:
        raise ScheduleError(f'line {line}: "{key}" is already on line {header[key][1]}')
    else:
        header[key] = (value, line, column)


def _read_count(key: str, value: _Value) -> int:
    text, line = value[0].strip(), value[1]
    if not text.isdecimal() or int(text) < 1:
        raise ScheduleError(f'line {line}: expected a whole number of {key}, at least 1, found "{text}"')
    return int(text)


def _read_rank_of_stage(value: _Value, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    text, line, column = value
    ranks = []
    for word, word_column in _words(text, column):
        if not word.isdecimal() or int(word) >= num_ranks:
            raise ScheduleError(
                f"line {line}, column {word_column}: expected a rank below {num_ranks} (ranks: {num_ranks}), "
                f'found "{word}"'
            )
        ranks.append(int(word))
    if len(ranks) != num_stages:
        raise ScheduleError(
            f"line {line}: expected the rank of each of {num_stages} stages (stages: {num_stages}), "
            f"found {len(ranks)} ranks"
        )
    return tuple(ranks)


def _words(text: str, column: int) -> Iterator[tuple[str, int]]:
    """Iterate over (word, its column). column: of the begin of `text`."""
    return ((match[0], column + match.start()) for match in re.finditer(r"\S+", text))


def _check_range(action: Action, num_stages: int, num_microbatches: int, where: str) -> None:
    if action.stage >= num_stages:
        raise ScheduleError(f"{where}: expected a stage below {num_stages}, found {action.stage}")
    if action.microbatch is not None and action.microbatch >= num_microbatches:
        raise ScheduleError(f"{where}: expected a microbatch below {num_microbatches}, found {action.microbatch}")
