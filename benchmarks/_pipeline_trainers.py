"""How each contender trains over a pipeline: a builder a kind, from a whole model to a `PipelineTrainer`.

Every contender has the same blocks in the same stages, and AdamW: the peers torch's fused one, lowtide its own. A step
is the schedule and the update. Peers are called as their documentation advises. It needs torch alone, but for lowtide
and DeepSpeed where they are called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from _pipeline_contenders import PipelineContender
from _pipeline_models import Part, PipelineModel, loss_of
from _trainers import ADAMW
from torch import Tensor
from torch.optim import AdamW

Timeline = list[tuple[str, int, int, float, float]]
"""(op, stage, microbatch, start, end) of a rank's F, B, I and W, in seconds of a clock that all processes share."""


@dataclass(frozen=True)
class PipelineTrainer:
    """step(tokens, targets): the whole batch -> its mean loss, None where this rank does not know it.

    predicted, timeline: for lowtide alone. predicted(seconds of an F, B, I and W, seconds of a message) -> what the
    simulator says of the schedule that runs; timeline() -> of the last step.
    """

    step: Callable[[Tensor, Tensor], float | None]
    timeline: Callable[[], Timeline] | None = None
    predicted: Callable[[Mapping[str, float], float], dict[str, float]] | None = None


def build_lowtide(model: PipelineModel, contender: PipelineContender, ranks: int, microbatches: int, rows: int) -> Any:
    """Gives lowtide as a user's script has it. rows: of a microbatch."""
    import lowtide
    from lowtide.engine.pipeline import Pipeline

    config = {
        "train_micro_batch_size_per_gpu": rows,
        "parallel": {"pipeline": ranks},
        "pipeline": {
            "schedule": contender.schedule,
            "chunks": contender.chunks,
            "microbatches": microbatches,
            "balance": contender.blocks_of_stages(ranks, len(model.blocks)),
        },
        "optimizer": {"type": "adamw", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "steps_per_print": 0,
    }
    engine = lowtide.initialize(model, config)
    pipeline = engine._driver
    assert isinstance(pipeline, Pipeline)
    found: Timeline = []

    def note(action: Any, start: float, end: float) -> None:
        if action.op.value in ("F", "B", "I", "W"):
            found.append((action.op.value, action.stage, action.microbatch, start, end))

    pipeline.executor.on_action = note

    def step(tokens: Tensor, targets: Tensor) -> float:
        found.clear()
        return float(engine.train_step((tokens, targets)).loss)

    def predicted(seconds: Mapping[str, float], message_seconds: float) -> dict[str, float]:
        from lowtide.pipe.schedules.costs import Costs
        from lowtide.pipe.schedules.simulator import simulate

        costs = Costs.uniform(
            pipeline.schedule.num_stages,
            forward=seconds["F"],
            backward=seconds["B"],
            input_backward=seconds["I"],
            weight_backward=seconds["W"],
            send=message_seconds,
        )
        simulation = simulate(pipeline.schedule, costs)
        return {"makespan": simulation.makespan, "bubble": simulation.bubble}

    return PipelineTrainer(step, lambda: list(found), predicted)


def build_torch(model: PipelineModel, contender: PipelineContender, ranks: int, microbatches: int, rows: int) -> Any:
    """Gives torch.distributed.pipelining with its own schedule classes, stages cut by hand."""
    import torch.distributed as dist
    from torch.distributed import pipelining

    rank, num_stages = dist.get_rank(), ranks * contender.chunks
    parts = {
        stage: Part(model, contender.blocks_of_stage(stage, ranks, len(model.blocks)))
        for stage in contender.stages_of_rank(rank, ranks)
    }
    stages = [pipelining.PipelineStage(part, stage, num_stages, torch.device("cpu")) for stage, part in parts.items()]
    takes_one = contender.schedule in ("ScheduleGPipe", "Schedule1F1B")
    kind = getattr(pipelining, contender.schedule)
    schedule = kind(stages[0] if takes_one else stages, n_microbatches=microbatches, loss_fn=loss_of)
    optimizer = AdamW((param for part in parts.values() for param in part.parameters()), fused=True, **ADAMW)

    def step(tokens: Tensor, targets: Tensor) -> float | None:
        losses: list[Tensor] = []
        is_last = num_stages - 1 in parts
        schedule.step(
            *([tokens] if 0 in parts else []),
            target=targets if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if is_last else None

    return PipelineTrainer(step)


def build_deepspeed(
    model: PipelineModel, contender: PipelineContender, ranks: int, microbatches: int, rows: int
) -> Any:
    """Gives DeepSpeed's PipelineModule on the CPU accelerator, its stages balanced by blocks."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # type: ignore[import-not-found, unused-ignore]
    from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found, unused-ignore]

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    module = PipelineModule(
        layers=[model.begin, *model.blocks, model.end],
        num_stages=ranks,
        loss_fn=loss_of,
        partition_method=f"type:{type(model.blocks[0]).__name__}",
    )
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": microbatches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
    }
    optimizer = AdamW([param for param in module.parameters() if param.requires_grad], fused=True, **ADAMW)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)

    def step(tokens: Tensor, targets: Tensor) -> float:
        batches = zip(tokens.split(rows), targets.split(rows), strict=True)
        return float(engine.train_batch(batches))

    return PipelineTrainer(step)


BUILDERS: dict[str, Callable[..., PipelineTrainer]] = {
    "lowtide": build_lowtide,
    "torch": build_torch,
    "deepspeed": build_deepspeed,
}
