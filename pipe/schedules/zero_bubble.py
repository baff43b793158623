"""ZB-H1 and ZB-V: the backward in two halves, so that weight gradients fill the time in which a rank would wait.

Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, sections 2 and 6; arXiv 2405.15362 for V placements.
"""

from .action import Action, Op
from .rounds import even_rounds, full_rounds, visits
from .schedule import Schedule
from .v_phases import VPhases, v_placement


def zb_h1(num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B with split backwards: the next rank waits for I alone, and rank r does W r microbatches late.

    Bubble: (p - 1) * (F + I - W) in time at one chunk, with no more activations than 1F1B has on its first rank. More
    chunks are placed as those of `interleaved`: v of them have 1 / v of the bubble at the same memory.
    """
    num_stages = num_ranks * chunks
    round_sizes = _round_sizes(num_ranks, num_microbatches)
    actions = []
    for rank in range(num_ranks):
        forwards, backwards = visits(range(rank, num_stages, num_ranks), round_sizes)
        warmup = (chunks - 1) * round_sizes[0] + num_ranks - 1 - rank
        actions.append(_late_weights(forwards, backwards, min(warmup, len(forwards)), late=rank))
    return Schedule(
        name="zb-h1",
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        rank_of_stage=tuple(range(num_ranks)) * chunks,
        actions=tuple(actions),
    )


def _round_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Full rounds, for their memory, unless so few microbatches are left over that the last round would cost time."""
    if num_microbatches < num_ranks or 0 < 2 * (num_microbatches % num_ranks) < num_ranks:
        return even_rounds(num_ranks, num_microbatches)
    return full_rounds(num_ranks, num_microbatches)


def _late_weights(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], warmup: int, late: int
) -> tuple[Action, ...]:
    """As 1F1B with I for B; each W comes when `late` more I have been done."""
    actions = [Action(Op.F, *visit) for visit in forwards[:warmup]]
    for index, visit in enumerate(backwards):
        if warmup + index < len(forwards):
            actions.append(Action(Op.F, *forwards[warmup + index]))
        actions.append(Action(Op.I, *visit))
        if index >= late:
            actions.append(Action(Op.W, *backwards[index - late]))
    actions += [Action(Op.W, *visit) for visit in backwards[max(0, len(backwards) - late) :]]
    return tuple(actions)


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages a rank, placed as a V, so that the loss is on rank 0, where the first backward starts at once.

    Where F, I and W take the same time and m >= 2p - 1, no rank waits between its first and its last action.
    Activations: 2p of half-size stages on every rank, as 1F1B has on its first.
    """
    # The phases are those of a full pipeline: of fewer microbatches, what would come later is left out.
    num_full = max(num_microbatches, 2 * num_ranks - 1)
    actions = []
    for rank in range(num_ranks):
        phases = VPhases(rank, num_ranks)
        phases.repeat(2 * (num_ranks - rank) - 1, "F0")
        phases.repeat(rank, "F1 F0")
        phases.repeat(num_ranks - rank, "F1 I1 W1")
        phases.repeat(num_full - 2 * num_ranks + rank + 1, "F0 I0 W0 F1 I1 W1")
        phases.repeat(num_ranks - rank - 1, "I0 W0 F1 I1 W1")
        phases.repeat(rank, "I0 I1")
        phases.repeat(num_ranks - rank, "I0 W0")
        phases.append_late_weights()
        actions.append(phases.actions(num_microbatches))
    return v_placement("zb-v", num_ranks, num_microbatches, actions)
