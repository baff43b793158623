"""DualPipe-V: DualPipe cut in half, so that one copy of the parameters is enough.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.1, and the V form published with its code,
github.com/deepseek-ai/DualPipe.
"""

from .schedule import Schedule
from .v_phases import VPhases, v_placement


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages a rank, placed as a V; needs m >= 2p.

    Forwards and whole backwards of the two chunks come in pairs, so that one's messages go while the other
    computes; halves of the backward are used only where a rank would wait. Activations: 2p + 1 of half-size stages
    on every rank.
    """
    actions = []
    for rank in range(num_ranks):
        after = num_ranks - rank - 1  # ranks further down the V
        phases = VPhases(rank, num_ranks)
        phases.repeat(2 * after, "F0")
        phases.repeat(rank + 1, "F0 F1")
        phases.repeat(after, "I1 W F1")
        phases.repeat(num_microbatches - 2 * num_ranks + rank + 1, "F0 B1 F1 B0")
        phases.repeat(after, "B1 F1 B0")
        # rank + 1 pairs of backwards, the second half of them split; an even rank changes in the middle of a pair.
        whole = (rank + 1) // 2
        phases.repeat(whole, "B1 B0")
        if rank % 2 == 0:
            phases.repeat(1, "B1 I0")
        phases.repeat(whole, "I1 I0")
        phases.repeat(after, "W I0")
        phases.repeat(rank + 1, "W")
        actions.append(phases.actions(num_microbatches))
    return v_placement("dualpipe-v", num_ranks, num_microbatches, actions)
