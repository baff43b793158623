"""Who is compared over pipelines: a table of data. How each one trains is in `_pipeline_trainers.py`."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate


@dataclass(frozen=True)
class PipelineContender:
    """A schedule of lowtide or of a peer. peer: the contender with the same schedule that it is compared with."""

    name: str
    kind: str  # "lowtide", "torch" or "deepspeed"
    schedule: str  # as the kind calls it
    chunks: int  # stages on each rank
    is_v: bool = False  # stages are placed as a V
    peer: str | None = None

    def stages_of_rank(self, rank: int, ranks: int) -> list[int]:
        """The stages of a rank, ascending."""
        if self.is_v:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + chunk * ranks for chunk in range(self.chunks)]

    def blocks_of_stage(self, stage: int, ranks: int, num_blocks: int) -> range:
        """The blocks of a stage. The first stages have one more where they cannot all have as many."""
        counts = self.blocks_of_stages(ranks, num_blocks)
        ends = list(accumulate(counts))
        return range(ends[stage] - counts[stage], ends[stage])

    def blocks_of_stages(self, ranks: int, num_blocks: int) -> list[int]:
        """How many blocks each stage has."""
        least, more = divmod(num_blocks, ranks * self.chunks)
        return [least + (stage < more) for stage in range(ranks * self.chunks)]


CONTENDERS = {
    contender.name: contender
    for contender in [
        PipelineContender("torch-gpipe", "torch", "ScheduleGPipe", 1),
        PipelineContender("gpipe", "lowtide", "gpipe", 1, peer="torch-gpipe"),
        PipelineContender("torch-1f1b", "torch", "Schedule1F1B", 1),
        PipelineContender("1f1b", "lowtide", "1f1b", 1, peer="torch-1f1b"),
        PipelineContender("torch-interleaved", "torch", "ScheduleInterleaved1F1B", 2),
        PipelineContender("interleaved", "lowtide", "interleaved", 2, peer="torch-interleaved"),
        PipelineContender("zb-h1", "lowtide", "zb-h1", 1, peer="torch-1f1b"),
        PipelineContender("torch-interleaved-zb", "torch", "ScheduleInterleavedZeroBubble", 2),
        PipelineContender("zb-h1-2", "lowtide", "zb-h1", 2, peer="torch-interleaved-zb"),
        PipelineContender("torch-zb-v", "torch", "ScheduleZBVZeroBubble", 2, is_v=True),
        PipelineContender("zb-v", "lowtide", "zb-v", 2, is_v=True, peer="torch-zb-v"),
        PipelineContender("torch-dualpipe-v", "torch", "ScheduleDualPipeV", 2, is_v=True),
        PipelineContender("dualpipe-v", "lowtide", "dualpipe-v", 2, is_v=True, peer="torch-dualpipe-v"),
        PipelineContender("deepspeed", "deepspeed", "1f1b", 1, peer="torch-1f1b"),
    ]
}


def choose(patterns: list[str] | None, *, with_deepspeed: bool) -> list[PipelineContender]:
    """Gives the contenders to run: all that can run here, or those whose names fit a pattern such as `torch-*`.

    Raises ValueError for a pattern that fits none, and for DeepSpeed without an interpreter that has it.
    """
    chosen = set()
    for pattern in patterns or ["*"]:
        fits = {name for name in CONTENDERS if fnmatchcase(name, pattern)}
        if not fits:
            raise ValueError(f"--contenders: expected one of {', '.join(CONTENDERS)}; found {pattern!r}")
        chosen |= fits
    if not with_deepspeed:
        if patterns and "deepspeed" in patterns:
            raise ValueError(
                "--contenders: deepspeed needs an interpreter that has it; name it with --deepspeed-python"
            )
        chosen.discard("deepspeed")
    return [contender for name, contender in CONTENDERS.items() if name in chosen]
