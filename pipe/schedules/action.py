"""What one rank does at one moment of a pipeline: an op on a stage, for a microbatch. Written `2F0`."""

from __future__ import annotations

import difflib
import enum
import re
from dataclasses import dataclass

from .errors import ScheduleError

_TEXT = re.compile(r"(\d+)([A-Za-z_]+?)(\d*)")


class Op(enum.Enum):
    """What is done, and what memory is held from then on.

    | op      | of a microbatch | does | memory |
    |---------|-----|-------------------------------------------------|------------------------------------------|
    | F       | yes | forward of the stage                            | its activations are held from here       |
    | B       | yes | backward, gradients of input and of weights     | the activations are freed                |
    | I       | yes | the half of the backward that gives the input's gradient | what W needs is held, the rest freed |
    | W       | yes | the half that gives the weights' gradients      | the rest is freed                        |
    | SEND_F  | yes | starts to send the stage's output to the next stage | the output is held until it is sent  |
    | RECV_F  | yes | starts to receive the stage's input from the stage before | a buffer is held from here     |
    | SEND_B  | yes | starts to send the input's gradient to the stage before | as SEND_F                        |
    | RECV_B  | yes | starts to receive the output's gradient from the next stage | as RECV_F                    |
    | GATHER  | no  | makes the stage's full parameters               | they are held from here                  |
    | RELEASE | no  | frees the stage's full parameters               | the shards are left                      |
    | REDUCE  | no  | sums the stage's gradients over its data-parallel ranks | full gradients may be freed      |
    | STEP    | no  | updates the stage's parameters                  |                                          |
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
STAGE_OPS = (Op.GATHER, Op.RELEASE, Op.REDUCE, Op.STEP)  # of a stage as a whole: without a microbatch

# How far the other end of a message is from the stage that the action names.
_PEER_OFFSETS = {Op.SEND_F: 1, Op.RECV_F: -1, Op.SEND_B: -1, Op.RECV_B: 1}


@dataclass(frozen=True, slots=True)
class Action:
    """One op on `stage` for `microbatch`, which is None for the ops of a whole stage (`STAGE_OPS`).

    A send or receive names the stage of the rank that does it: `1SEND_F0` is received as `2RECV_F0`.
    """

    op: Op
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"

    @property
    def peer_stage(self) -> int:
        """The stage at the other end of a send or receive."""
        return self.stage + _PEER_OFFSETS[self.op]

    @classmethod
    def parse(cls, text: str, line: int = 1, column: int = 1) -> Action:
        """The action that `text` names, as `str` writes it; `line` and `column` (from 1) are for the error alone."""
        where = f"line {line}, column {column}"
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(f'{where}: expected an action such as "2F0" (stage, op, microbatch), found "{text}"')
        stage, name, microbatch = match.groups()
        op = Op.__members__.get(name)
        if op is None:
            close = difflib.get_close_matches(name.upper(), Op.__members__, n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"the ops are {', '.join(Op.__members__)}"
            raise ScheduleError(f'{where}: unknown op "{name}" in "{text}"; {hint}')
        if op in STAGE_OPS and microbatch:
            raise ScheduleError(
                f'{where}: {name} is of a whole stage and takes no microbatch, expected "{stage}{name}", found "{text}"'
            )
        if op not in STAGE_OPS and not microbatch:
            raise ScheduleError(f'{where}: {name} needs a microbatch, expected "{text}0" or the like, found "{text}"')
        return cls(op, int(stage), int(microbatch) if microbatch else None)
