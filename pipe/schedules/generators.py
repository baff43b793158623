"""Generate schedules of F, B, I and W: a pure function of ranks, microbatches and chunks (stages per rank) for each.

p is the number of ranks, m of microbatches, v of chunks. `registry.py` finds the functions by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from .schedule import Action, Op, Schedule

_Visit = tuple[int, int]  # (stage, microbatch)
_Phase = tuple[int, str]  # (number of repetitions, pattern of ops and chunks)


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Run all forwards, then all backwards, with a stage per rank and all microbatches in flight.

    Bubble: (p - 1) / (m + p - 1) of the total. Activations: m microbatches on every rank. Source: arXiv 1811.06965.
    """
    microbatches = range(num_microbatches)
    actions = [
        [Action(op, rank, microbatch) for op in (Op.F, Op.B) for microbatch in microbatches]
        for rank in range(num_ranks)
    ]
    return _schedule("gpipe", num_microbatches, range(num_ranks), actions)


def _schedule(
    name: str, num_microbatches: int, rank_of_stage: Sequence[int], actions: Sequence[Sequence[Action]]
) -> Schedule:
    return Schedule(
        name=name,
        num_ranks=len(actions),
        num_stages=len(rank_of_stage),
        num_microbatches=num_microbatches,
        rank_of_stage=tuple(rank_of_stage),
        actions=tuple(map(tuple, actions)),
    )


# -- warm-up forwards, then forwards and backwards in turns -----------------------------------------------------------


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Alternate forwards and backwards, with a stage per rank. Rank r has at most p - r microbatches in flight.

    Bubble: (p - 1) / (m + p - 1) of the total, as GPipe. Source: PipeDream-Flush, arXiv 2006.09503.
    """
    return _looped("1f1b", num_ranks, [num_microbatches], chunks=1, actions_per_hop=1)


def interleaved(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Alternate forwards and backwards of `chunks` stages per rank: stage c * p + r on rank r. Takes any m.

    Bubble: (p - 1) / (v * m) of the compute time if p divides m. Sends v times as many messages as 1F1B.
    Source: Megatron-LM, arXiv 2104.04473, section 2.2.
    """
    # Two more forwards per later rank: the way of a microbatch to the last rank, and of its gradient back.
    round_sizes = _even_rounds(num_ranks, num_microbatches)
    return _looped("interleaved", num_ranks, round_sizes, chunks, actions_per_hop=2)


def zb_h1(num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """Run 1F1B with split backwards: the previous rank waits for I alone, and rank r does W r microbatches later.

    Bubble: (p - 1) * (F + I - W) in time with a chunk per rank, at the activations of 1F1B's first rank. v chunks are
    placed as in `interleaved`, and have 1 / v of the bubble at the same memory.
    Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.
    """
    num_full, rest = divmod(num_microbatches, num_ranks)
    round_sizes = [num_ranks] * num_full + [rest] * (rest > 0)  # takes the least memory
    if num_full == 0 or 0 < 2 * rest < num_ranks:  # a last round of so few microbatches would cost time
        round_sizes = _even_rounds(num_ranks, num_microbatches)
    return _looped("zb-h1", num_ranks, round_sizes, chunks, actions_per_hop=1, splits_backward=True)


def _looped(
    name: str,
    num_ranks: int,
    round_sizes: Sequence[int],
    chunks: int,
    actions_per_hop: int,
    splits_backward: bool = False,
) -> Schedule:
    """Make a schedule whose stage c * p + r is on rank r.

    Rank r warms up with `actions_per_hop` forwards per later rank, and a round of forwards per chunk except the last.
    round_sizes: numbers of microbatches that pass all stages of a rank together.
    """
    num_stages = num_ranks * chunks
    actions = []
    for rank in range(num_ranks):
        forwards, backwards = _visits(range(rank, num_stages, num_ranks), round_sizes)
        warmup = (chunks - 1) * round_sizes[0] + actions_per_hop * (num_ranks - 1 - rank)
        actions.append(_by_turns(forwards, backwards, warmup, late=rank if splits_backward else None))
    return _schedule(name, sum(round_sizes), [*range(num_ranks)] * chunks, actions)


def _by_turns(forwards: list[_Visit], backwards: list[_Visit], warmup: int, late: int | None) -> list[Action]:
    """Order `warmup` forwards, then a forward and a backward in turns, then the remaining backwards.

    late: the number of I between an I and its W, or None for whole backwards (B).
    """
    # With few microbatches the warm-up has all forwards.
    warmup = min(warmup, len(forwards))
    actions = [Action(Op.F, *visit) for visit in forwards[:warmup]]
    for index, visit in enumerate(backwards):
        if warmup + index < len(forwards):
            actions.append(Action(Op.F, *forwards[warmup + index]))
        actions.append(Action(Op.B if late is None else Op.I, *visit))
        if late is not None and index >= late:
            actions.append(Action(Op.W, *backwards[index - late]))
    if late is not None:
        actions += [Action(Op.W, *visit) for visit in backwards[max(0, len(backwards) - late) :]]
    return actions


def _even_rounds(num_ranks: int, num_microbatches: int) -> list[int]:
    """Choose round sizes of at least p, as even as possible, larger sizes first: 4 ranks, 10 microbatches: 5, 5.

    With p microbatches in a round, the second stage of a rank can start the first microbatch when the first stage has
    finished the last. With fewer than p, every rank waits in each round.
    """
    num_rounds = max(1, num_microbatches // num_ranks)
    least, num_larger = divmod(num_microbatches, num_rounds)
    return [least + (index < num_larger) for index in range(num_rounds)]


def _visits(stages: Sequence[int], round_sizes: Sequence[int]) -> tuple[list[_Visit], list[_Visit]]:
    """List (stage, microbatch) of a rank's forwards and of its backwards: round by round, stage by stage.

    Stages 1 and 3, rounds 2 and 2: forwards 1,0 1,1 3,0 3,1 1,2 1,3 3,2 3,3; backwards 3,0 3,1 1,0 1,1 3,2 3,3 ...
    """
    forwards: list[_Visit] = []
    backwards: list[_Visit] = []
    first = 0
    for size in round_sizes:
        microbatches = range(first, first + size)
        forwards += [(stage, microbatch) for stage in stages for microbatch in microbatches]
        backwards += [(stage, microbatch) for stage in reversed(stages) for microbatch in microbatches]
        first += size
    return forwards, backwards


# -- two stages per rank, placed as a V: written as phases ------------------------------------------------------------


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Split backwards, with two stages per rank placed as a V: the loss is on rank 0, where backward starts at once.

    If F, I and W take the same time and m >= 2p - 1, no rank waits between its first and its last action.
    Activations: 2p half-size stages on every rank, as much as 1F1B on its first rank.
    Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6; arXiv 2405.15362 for V placements.
    """
    # The phases of a full pipeline: `_v_shaped` drops the actions of microbatches from m on.
    num_full = max(num_microbatches, 2 * num_ranks - 1)

    def phases(rank: int) -> list[_Phase]:
        return [
            (2 * (num_ranks - rank) - 1, "F0"),
            (rank, "F1 F0"),
            (num_ranks - rank, "F1 I1 W1"),
            (num_full - 2 * num_ranks + rank + 1, "F0 I0 W0 F1 I1 W1"),
            (num_ranks - rank - 1, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (num_ranks - rank, "I0 W0"),
            (num_full, "W1"),  # all that remain
            (num_full, "W0"),
        ]

    return _v_shaped("zb-v", num_ranks, num_microbatches, phases)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Run DualPipe in its V form: two stages per rank and a single copy of the parameters. Needs m >= 2p.

    A forward and a whole backward of the two chunks come in pairs: the messages of a chunk travel while the rank
    computes on the second chunk. Backwards are split only at places where a rank would wait. Activations: 2p + 1
    half-size stages on every rank.
    Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.1, and github.com/deepseek-ai/DualPipe for the V form.
    """

    def phases(rank: int) -> list[_Phase]:
        after = num_ranks - rank - 1  # number of later ranks
        # Of rank + 1 pairs of backwards the second half is split. An even rank changes in the middle of a pair.
        whole = (rank + 1) // 2
        return [
            (2 * after, "F0"),
            (rank + 1, "F0 F1"),
            (after, "I1 W F1"),
            (num_microbatches - 2 * num_ranks + rank + 1, "F0 B1 F1 B0"),
            (after, "B1 F1 B0"),
            (whole, "B1 B0"),
            ((rank + 1) % 2, "B1 I0"),
            (whole, "I1 I0"),
            (after, "W I0"),
            (rank + 1, "W"),
        ]

    return _v_shaped("dualpipe-v", num_ranks, num_microbatches, phases)


def _v_shaped(
    name: str, num_ranks: int, num_microbatches: int, phases_of_rank: Callable[[int], list[_Phase]]
) -> Schedule:
    """Make a schedule with stages r and 2p - 1 - r on rank r, without actions of microbatches from m on."""
    down = [*range(num_ranks)]
    lists = [_in_phases((rank, 2 * num_ranks - 1 - rank), phases_of_rank(rank)) for rank in down]
    actions = [[action for action in row if (action.microbatch or 0) < num_microbatches] for row in lists]
    return _schedule(name, num_microbatches, down + down[::-1], actions)


def _in_phases(stages: tuple[int, int], phases: Sequence[_Phase]) -> list[Action]:
    """Make a rank's list from words such as `F0` and `I1`: op and chunk.

    Chunk 0 is the stage on the way down the V, chunk 1 the stage on the way up. Each word takes the next microbatch of
    its op and chunk. `W` takes the oldest I without a W, `W0` and `W1` the oldest of that chunk. A W without an I is
    skipped.
    """
    actions: list[Action] = []
    next_forward, next_backward = [0, 0], [0, 0]  # by chunk
    late: deque[tuple[int, int]] = deque()  # (chunk, microbatch) of each I without a W
    for word in (word for count, pattern in phases for _ in range(count) for word in pattern.split()):
        op = Op[word[0]]
        if op is Op.W:
            waiting = next((half for half in late if word in ("W", f"W{half[0]}")), None)
            if waiting is None:
                continue
            late.remove(waiting)
            chunk, microbatch = waiting
        else:
            chunk = int(word[1])
            counters = next_forward if op is Op.F else next_backward
            microbatch = counters[chunk]
            counters[chunk] += 1
        if op is Op.I:
            late.append((chunk, microbatch))
        actions.append(Action(op, stages[chunk], microbatch))
    return actions


# -- layer by layer on a single rank ----------------------------------------------------------------------------------


def layered(num_stages: int, num_microbatches: int, ahead: Sequence[bool] | None = None) -> Schedule:
    """Run all microbatches through a stage before the next stage, on a single rank, with gathers and reductions.

    ahead: (num_stages,) True to gather a stage while its predecessor computes, False to gather it after. None: no
    gathers, because parameters stay where they are.

        F    0.0 0.1 0.2  1.0 1.1 1.2  2.0 2.1 2.2
        B                                           2.0 2.1 2.2  1.0 1.1 1.2  0.0 0.1 0.2
        full 000000000000 1111111111   222222222222222222222222  1111111111   00000000000      (and the next, ahead)

    A stage is gathered twice, the last stage once. A stage is reduced once. Gradients of a stage add up in the order
    of the microbatches, as without this schedule.
    Source: layered gradient accumulation, arXiv 2106.02679; vertical scheduling, arXiv 2512.17570 (GreedySnake).
    """
    forward = _pass(Op.F, range(num_stages), num_microbatches, ahead)
    backward = _pass(Op.B, range(num_stages - 1, -1, -1), num_microbatches, ahead)
    if ahead is not None:  # the last stage stays gathered between its two passes
        forward, backward = forward[:-1], backward[1:]
    return _schedule("layered", num_microbatches, [0] * num_stages, [[*forward, *backward]])


def layered_evaluation(num_stages: int, ahead: Sequence[bool] | None = None) -> Schedule:
    """Run a microbatch forward through all stages on a single rank."""
    return _schedule("layered, evaluation", 1, [0] * num_stages, [_pass(Op.F, range(num_stages), 1, ahead)])


def _pass(op: Op, stages: Sequence[int], num_microbatches: int, ahead: Sequence[bool] | None) -> list[Action]:
    """List the actions of all stages in order, each with its gather before and its release after."""
    row = [] if ahead is None else [Action(Op.GATHER, stages[0])]
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        gather = [] if ahead is None or following is None else [Action(Op.GATHER, following)]
        is_ahead = following is not None and ahead is not None and ahead[following]
        row += gather if is_ahead else []
        row += [Action(op, stage, microbatch) for microbatch in range(num_microbatches)]
        # Before RELEASE, which keeps an offloaded shard in memory if it sees that the update of the stage follows.
        row += [Action(Op.REDUCE, stage)] if op is Op.B else []
        row += [] if ahead is None else [Action(Op.RELEASE, stage)]
        row += [] if is_ahead else gather
    return row
