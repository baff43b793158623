"""Schedules of F, B, I and W: a pure function for each, from ranks, microbatches and chunks (stages on each rank).

p is the number of ranks, m of microbatches, v of chunks. `registry.py` has the functions by their names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from .schedule import Action, Op, Schedule

_Visit = tuple[int, int]  # (stage, microbatch)
_Phase = tuple[int, str]  # (how often, pattern of ops and chunks)


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: one stage a rank, every microbatch in flight at once.

    Bubble: (p - 1) / (m + p - 1) of the total. Activations: those of m microbatches on every rank.
    Source: arXiv 1811.06965.
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


# -- some forwards first, then one forward and one backward by turns --------------------------------------------------


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage a rank; rank r has at most p - r microbatches in flight.

    Bubble: (p - 1) / (m + p - 1) of the total, as GPipe. Source: PipeDream-Flush, arXiv 2006.09503.
    """
    return _looped("1f1b", num_ranks, [num_microbatches], chunks=1, actions_per_hop=1)


def interleaved(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """`chunks` stages a rank, placed in turns: stage c * p + r on rank r. Any number of microbatches.

    Bubble: (p - 1) / (v * m) of the time without one, where m is a multiple of p; messages are v times as many.
    Source: Megatron-LM, arXiv 2104.04473, section 2.2.
    """
    # Two forwards more for each rank before the last: the way of a microbatch there, and of its gradient back.
    round_sizes = _even_rounds(num_ranks, num_microbatches)
    return _looped("interleaved", num_ranks, round_sizes, chunks, actions_per_hop=2)


def zb_h1(num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B with split backwards: the next rank waits for I alone, and rank r does W r microbatches late.

    Bubble: (p - 1) * (F + I - W) in time at one chunk, with no more activations than 1F1B has on its first rank. More
    chunks are placed as those of `interleaved`: v of them have 1 / v of the bubble at the same memory.
    Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.
    """
    num_full, rest = divmod(num_microbatches, num_ranks)
    round_sizes = [num_ranks] * num_full + [rest] * (rest > 0)  # the least memory
    if num_full == 0 or 0 < 2 * rest < num_ranks:  # so few are left over that the last round would cost time
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
    """Rank r warms up with `actions_per_hop` forwards for each rank behind it, and with those of a round and chunk.

    round_sizes: how many microbatches pass all stages of a rank together, where a rank has several.
    """
    num_stages = num_ranks * chunks
    actions = []
    for rank in range(num_ranks):
        forwards, backwards = _visits(range(rank, num_stages, num_ranks), round_sizes)
        warmup = (chunks - 1) * round_sizes[0] + actions_per_hop * (num_ranks - 1 - rank)
        actions.append(_by_turns(forwards, backwards, warmup, late=rank if splits_backward else None))
    return _schedule(name, sum(round_sizes), [*range(num_ranks)] * chunks, actions)


def _by_turns(forwards: list[_Visit], backwards: list[_Visit], warmup: int, late: int | None) -> list[Action]:
    """`warmup` forwards, then a forward and a backward by turns, then the backwards that are left.

    late: None for B; for I, each W comes when so many more I have been done.
    """
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
    """Round sizes of at least `num_ranks`, as even as can be, the larger ones first: 4 ranks, 10 microbatches: 5, 5.

    With p in a round, the second stage of a rank can take the first microbatch when its first stage has done the last.
    Fewer than p make every rank wait in each round, so what is left over goes into the others.
    """
    num_rounds = max(1, num_microbatches // num_ranks)
    least, num_larger = divmod(num_microbatches, num_rounds)
    return [least + (index < num_larger) for index in range(num_rounds)]


def _visits(stages: Sequence[int], round_sizes: Sequence[int]) -> tuple[list[_Visit], list[_Visit]]:
    """The (stage, microbatch) of a rank's forwards and of its backwards, each in order: round by round, stage by stage.

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


# -- two stages a rank, placed as a V: written as phases --------------------------------------------------------------


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages a rank, placed as a V, so that the loss is on rank 0, where the first backward starts at once.

    Where F, I and W take the same time and m >= 2p - 1, no rank waits between its first and its last action.
    Activations: 2p of half-size stages on every rank, as 1F1B has on its first.
    Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6; arXiv 2405.15362 for V placements.
    """
    # The phases are those of a full pipeline: of fewer microbatches, what would come later is left out.
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
            (num_full, "W1"),  # those that are left
            (num_full, "W0"),
        ]

    return _v_shaped("zb-v", num_ranks, num_microbatches, phases)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe cut in half, so that one copy of the parameters is enough: two stages a rank, as a V; needs m >= 2p.

    Forwards and whole backwards of the two chunks come in pairs, so that one's messages go while the other
    computes; halves of the backward are used only where a rank would wait. Activations: 2p + 1 of half-size stages
    on every rank.
    Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.1, and the V form published with its code,
    github.com/deepseek-ai/DualPipe.
    """

    def phases(rank: int) -> list[_Phase]:
        after = num_ranks - rank - 1  # ranks further down the V
        # rank + 1 pairs of backwards, the second half of them split; an even rank changes in the middle of a pair.
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
    """Stages r and 2p - 1 - r on rank r, without microbatches of `num_microbatches` and above."""
    down = [*range(num_ranks)]
    lists = [_in_phases((rank, 2 * num_ranks - 1 - rank), phases_of_rank(rank)) for rank in down]
    actions = [[action for action in row if (action.microbatch or 0) < num_microbatches] for row in lists]
    return _schedule(name, num_microbatches, down + down[::-1], actions)


def _in_phases(stages: tuple[int, int], phases: Sequence[_Phase]) -> list[Action]:
    """One rank's list, from words such as `F0` and `I1`: op and chunk.

    Chunk 0 is the stage on the way down the V, chunk 1 that on the way up. Each word takes the next microbatch of its
    op on that chunk. `W` takes the oldest I whose weights are not done, `W0` and `W1` that of a chunk; a W for which no
    I is left is passed over.
    """
    actions: list[Action] = []
    next_forward, next_backward = [0, 0], [0, 0]  # by chunk
    late: deque[tuple[int, int]] = deque()  # (chunk, microbatch) of each I that W has not followed
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


# -- layer by layer on one rank ---------------------------------------------------------------------------------------


def layered(num_stages: int, num_microbatches: int, ahead: Sequence[bool] | None = None) -> Schedule:
    """Every microbatch goes through a stage before any goes through the next, all on one rank, microbatch 0 first.

    With each gather and reduction. ahead: (num_stages,) whether a stage is gathered while the one before it computes,
    or after it. None: parameters stay where they are.

        F    0.0 0.1 0.2  1.0 1.1 1.2  2.0 2.1 2.2
        B                                           2.0 2.1 2.2  1.0 1.1 1.2  0.0 0.1 0.2
        full 000000000000 1111111111   222222222222222222222222  1111111111   00000000000      (and the next one, ahead)

    A stage is gathered twice, the last one once, and reduced once. Gradients of a stage add up in the order of the
    microbatches, as where one microbatch follows the other.
    Source: layered gradient accumulation, arXiv 2106.02679; vertical scheduling, arXiv 2512.17570 (GreedySnake).
    """
    forward = _pass(Op.F, range(num_stages), num_microbatches, ahead)
    backward = _pass(Op.B, range(num_stages - 1, -1, -1), num_microbatches, ahead)
    if ahead is not None:  # the last stage stays gathered between its two passes
        forward, backward = forward[:-1], backward[1:]
    return _schedule("layered", num_microbatches, [0] * num_stages, [[*forward, *backward]])


def layered_evaluation(num_stages: int, ahead: Sequence[bool] | None = None) -> Schedule:
    """One microbatch forward through all stages."""
    return _schedule("layered, evaluation", 1, [0] * num_stages, [_pass(Op.F, range(num_stages), 1, ahead)])


def _pass(op: Op, stages: Sequence[int], num_microbatches: int, ahead: Sequence[bool] | None) -> list[Action]:
    """Through all stages, each gathered before it and released behind it."""
    row = [] if ahead is None else [Action(Op.GATHER, stages[0])]
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        gather = [] if ahead is None or following is None else [Action(Op.GATHER, following)]
        is_ahead = following is not None and ahead is not None and ahead[following]
        row += gather if is_ahead else []
        row += [Action(op, stage, microbatch) for microbatch in range(num_microbatches)]
        row += [Action(Op.REDUCE, stage)] if op is Op.B else []
        row += [] if ahead is None else [Action(Op.RELEASE, stage)]
        row += [] if is_ahead else gather
    return row
