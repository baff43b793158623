"""What a pipeline takes at least, where each stage has as few blocks as any: arithmetic without a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...pipe.schedules.registry import find_kind
from .choice import Choice, num_chunks
from .estimate import MachineWork
from .profile import Profile


@dataclass(frozen=True)
class LeastBlock:
    """Of the block that takes the least; and seconds of what comes before the blocks and behind them."""

    num_blocks: int
    forward: float
    backward: float
    kept_bytes: int
    backward_bytes: int  # the most of its backward, of what its forward began with
    holding_bytes: int  # the same while it keeps its gradients
    gradient_bytes: int
    output_bytes: int
    forward_before: float
    backward_before: float
    behind: float

    @classmethod
    def of(cls, profile: Profile, work: MachineWork, blocks: Sequence[str]) -> LeastBlock:
        """blocks: their names, in order."""
        parts, names = [profile.part(name) for name in blocks], profile.names
        first, last = names.index(blocks[0]), names.index(blocks[-1])
        return cls(
            num_blocks=len(blocks),
            forward=min(map(work.forward, blocks)),
            backward=min(map(work.backward, blocks)),
            kept_bytes=min(part.kept_bytes for part in parts),
            backward_bytes=min(part.backward_peak_bytes for part in parts),
            holding_bytes=min(part.holding_peak_bytes for part in parts),
            gradient_bytes=min(part.gradient_bytes for part in parts),
            output_bytes=min(profile.part(name).output_bytes for name in names[first : last + 1]),
            forward_before=sum(map(work.forward, names[:first])),
            backward_before=sum(map(work.backward, names[:first])),
            behind=sum(work.forward(name) + work.backward(name) for name in names[last + 1 :]),
        )

    def seconds(self, choice: Choice) -> float:
        """Until a last rank is done.

        A last rank waits for the first microbatch, and others for the last one where a backward is in one piece.
        """
        kind, chunks, each = find_kind(choice.schedule), num_chunks(choice), self.forward + self.backward
        per_stage, others = self.num_blocks // (choice.pipeline * chunks), choice.pipeline - 1
        before = self.forward_before + others * per_stage * self.forward
        after = 0.0 if kind.splits_backward else self.backward_before + others * per_stage * self.backward
        of_last = chunks * per_stage * each
        fullest = choice.accumulation * -(-self.num_blocks // choice.pipeline) * each
        if kind.is_v:  # the last stage is on the first rank
            of_first = of_last + self.forward_before + self.backward_before + self.behind
            return max(before + choice.accumulation * of_last + after, choice.accumulation * of_first, fullest)
        return max(before + choice.accumulation * (of_last + self.behind) + after, fullest)

    def nbytes(self, choice: Choice, keeps_gradients: bool) -> float:
        """Of activations, messages, and, with keeps_gradients, those that a backward makes: while one computes."""
        chunks = num_chunks(choice)
        per_stage = self.num_blocks // (choice.pipeline * chunks)
        others, _ = least_held(choice)
        held = others * per_stage * self.kept_bytes + (1 + chunks) * self.output_bytes
        if not keeps_gradients:
            return held + (per_stage - 1) * self.kept_bytes + self.backward_bytes
        return held + (per_stage - 1) * max(self.kept_bytes, self.gradient_bytes) + self.holding_bytes


def least_held(choice: Choice) -> tuple[int, bool]:
    """(stages of other microbatches of which some rank holds activations in some backward, at least; whether each of
    its stages has ended a backward by then). `tests/plan/test_plan_search.py` holds it to the schedules.
    """
    ranks, count, chunks = choice.pipeline, choice.accumulation, num_chunks(choice)
    others = chunks * min(ranks, count) - 1
    is_long = count >= (2 * ranks if chunks > 1 else ranks + 1)
    if choice.schedule == "interleaved":
        return others + (ranks - 1) * is_long, is_long
    return others + (choice.schedule == "dualpipe-v"), is_long
