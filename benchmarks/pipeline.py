"""Trains over pipelines with lowtide, torch.distributed.pipelining and DeepSpeed; measures time, memory and bubbles.

--mode work: a GPT with AdamW, the same blocks in the same stages for every contender. A ratio compares a schedule with
torch's same one in the same round. A step is the schedule and the update.

--mode sleep: sleeps in place of work, so that a few cores do for many ranks, beside what the simulator predicts. In
`SleepingBlock`s the three matrix products of a linear layer sleep: the forward, the gradient of the input, the gradient
of the weight. Whoever splits a backward splits it between the second and the third.

Example, both parts whole, and then a quick look at each:

    python benchmarks/pipeline.py --mode work --ranks 2 4 --json work.json
    python benchmarks/pipeline.py --mode sleep --ranks 2 4 --json sleep.json --png docs/images/pipeline_measured.png
    python benchmarks/pipeline.py --mode work --size tiny-deep --ranks 2 --rounds 1 --memory none
    python benchmarks/pipeline.py --mode sleep --ranks 2 --rounds 1 --contenders 1f1b zb-v torch-zb-v
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from _contenders import ADAMW, deepspeed_config, lowtide_config
from _harness import (
    Column,
    Contender,
    JobParser,
    Result,
    Row,
    by_name,
    compare,
    count,
    gathered,
    peer_of,
    run_job,
    step_columns,
)
from _model import SEED, VOCABULARY, GPTSize, Model, build_batches, build_model, loss_of
from _worker import PeakSampler, timed_steps
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from lowtide.pipe.schedules.simulator import Simulation

Timeline = list[tuple[str, int, int, float, float]]
"""(op, stage, microbatch, start, end) of a rank's F, B, I and W, in milliseconds of a clock that processes share."""

SIZES = {
    "tiny-deep": GPTSize(num_layers=16, width=64, num_heads=4, sequence_length=32),  # 0.8M parameters
    "100M": GPTSize(num_layers=16, width=720, num_heads=12, sequence_length=128),  # 100.1M parameters
}
SLEEPING_ROWS, SLEEPING_WIDTH = 2, 3  # by the shape of a product one sees which of the three it is


# -- contenders ------------------------------------------------------------------------------------------------------


def _schedule(
    name: str, kind: str, schedule: str, chunks: int, peer: str | None = None, is_v: bool = False
) -> Contender:
    """schedule: as the kind calls it. chunks: stages of a rank, as a V or in a circle. peer: the same by torch."""
    return Contender(name, name, kind, {"schedule": schedule, "chunks": chunks, "is_v": is_v}, peer=peer)


CONTENDERS = by_name(
    _schedule("torch-gpipe", "torch", "ScheduleGPipe", 1),
    _schedule("gpipe", "lowtide", "gpipe", 1, "torch-gpipe"),
    _schedule("torch-1f1b", "torch", "Schedule1F1B", 1),
    _schedule("1f1b", "lowtide", "1f1b", 1, "torch-1f1b"),
    _schedule("torch-interleaved", "torch", "ScheduleInterleaved1F1B", 2),
    _schedule("interleaved", "lowtide", "interleaved", 2, "torch-interleaved"),
    _schedule("zb-h1", "lowtide", "zb-h1", 1, "torch-1f1b"),
    _schedule("torch-interleaved-zb", "torch", "ScheduleInterleavedZeroBubble", 2),
    _schedule("zb-h1-2", "lowtide", "zb-h1", 2, "torch-interleaved-zb"),
    _schedule("torch-zb-v", "torch", "ScheduleZBVZeroBubble", 2, is_v=True),
    _schedule("zb-v", "lowtide", "zb-v", 2, "torch-zb-v", is_v=True),
    _schedule("torch-dualpipe-v", "torch", "ScheduleDualPipeV", 2, is_v=True),
    _schedule("dualpipe-v", "lowtide", "dualpipe-v", 2, "torch-dualpipe-v", is_v=True),
    _schedule("deepspeed", "deepspeed", "1f1b", 1, "torch-1f1b"),
)


def stages_of_rank(contender: Contender, rank: int, ranks: int) -> list[int]:
    """Return the stages of a rank, ascending."""
    if contender.options["is_v"]:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + chunk * ranks for chunk in range(contender.options["chunks"])]


def blocks_of_stages(contender: Contender, ranks: int, num_blocks: int) -> list[range]:
    """Return the blocks of each stage. The first stages have one more where they cannot all have as many."""
    num_stages = ranks * contender.options["chunks"]
    least, more = divmod(num_blocks, num_stages)
    starts = [stage * least + min(stage, more) for stage in range(num_stages + 1)]
    return [range(*ends) for ends in pairwise(starts)]


# -- models, each of what is before its blocks, they, and what is behind ---------------------------------------------


class SleepingBlock(nn.Module):
    """(rows, width) -> the same, by way of one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SLEEPING_WIDTH, SLEEPING_WIDTH + 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out[:, :SLEEPING_WIDTH].contiguous()


class SleepingProducts(TorchDispatchMode):
    """In the context the products of a `SleepingBlock` sleep."""

    def __init__(self, forward: float, input_half: float, weight_half: float) -> None:
        """Seconds of each of the three products of one block."""
        super().__init__()
        self._seconds = {
            (SLEEPING_ROWS, SLEEPING_WIDTH + 1): forward,
            (SLEEPING_ROWS, SLEEPING_WIDTH): input_half,
            (SLEEPING_WIDTH, SLEEPING_WIDTH + 1): weight_half,
            (SLEEPING_WIDTH + 1, SLEEPING_WIDTH): weight_half,
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            time.sleep(self._seconds[tuple(out.shape)])
        return out


def stage_of(model: Model, blocks: range) -> nn.Sequential:
    """Return the blocks of one stage, with the begin or the end of the model if they belong to it."""
    first = [model.begin] if blocks.start == 0 else []
    last = [model.end] if blocks.stop == len(model.blocks) else []
    return nn.Sequential(*first, *(model.blocks[index] for index in blocks), *last)


def build_sleeping(num_blocks: int, num_steps: int, rows: int) -> tuple[Model, list[tuple[Tensor, Tensor]]]:
    """Build the model whose blocks can sleep, the same in every process, and the batch of each step."""
    torch.manual_seed(SEED)
    blocks = [SleepingBlock() for _ in range(num_blocks)]
    tokens = torch.arange(rows)
    batches = [(tokens % VOCABULARY, tokens % SLEEPING_WIDTH) for _ in range(num_steps)]
    return Model(nn.Embedding(VOCABULARY, SLEEPING_WIDTH), blocks, nn.Identity()), batches


# -- how each trains: a builder a kind -------------------------------------------------------------------------------


Step = Callable[[Tensor, Tensor], float | None]
"""Trains on the whole batch and returns its mean loss, None where this rank does not know it."""


def build_lowtide(
    model: Model, contender: Contender, ranks: int, microbatches: int, rows: int, timeline: Timeline
) -> Step:
    """Give lowtide as a user's script has it. rows: of a microbatch. timeline: gets what this rank does."""
    import lowtide
    from lowtide.engine.step.pipeline_runner import PipelineRunner
    from lowtide.pipe.schedules.schedule import COMPUTE_OPS

    config = lowtide_config(
        train_micro_batch_size_per_gpu=rows,
        parallel={"pipeline": ranks},
        pipeline={
            "schedule": contender.options["schedule"],
            "chunks": contender.options["chunks"],
            "microbatches": microbatches,
            "balance": [len(blocks) for blocks in blocks_of_stages(contender, ranks, len(model.blocks))],
        },
    )
    engine = lowtide.initialize(model, config)
    pipeline = engine._runner
    assert isinstance(pipeline, PipelineRunner)

    def note(action: Any, start: float, end: float) -> None:
        if action.op in COMPUTE_OPS:
            timeline.append((action.op.value, action.stage, action.microbatch, start * 1e3, end * 1e3))

    pipeline.executor.on_action = note
    return lambda tokens, targets: float(engine.train_step((tokens, targets)).loss)


def build_torch(model: Model, contender: Contender, ranks: int, microbatches: int, *_: Any) -> Step:
    """Gives torch.distributed.pipelining with its own schedule classes, stages cut by hand."""
    from torch.distributed import pipelining

    blocks = blocks_of_stages(contender, ranks, len(model.blocks))
    num_stages = len(blocks)
    parts = {stage: stage_of(model, blocks[stage]) for stage in stages_of_rank(contender, dist.get_rank(), ranks)}
    stages = [pipelining.PipelineStage(part, stage, num_stages, torch.device("cpu")) for stage, part in parts.items()]
    takes_one = contender.options["schedule"] in ("ScheduleGPipe", "Schedule1F1B")
    kind = getattr(pipelining, contender.options["schedule"])
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

    return step


def build_deepspeed(model: Model, _: Contender, ranks: int, microbatches: int, rows: int, *__: Any) -> Step:
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
    optimizer = AdamW([param for param in module.parameters() if param.requires_grad], fused=True, **ADAMW)
    config = deepspeed_config(rows, microbatches)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)

    def step(tokens: Tensor, targets: Tensor) -> float:
        batches = zip(tokens.split(rows), targets.split(rows), strict=True)
        return float(engine.train_batch(batches))

    return step


BUILDERS: dict[str, Callable[..., Step]] = {
    "lowtide": build_lowtide,
    "torch": build_torch,
    "deepspeed": build_deepspeed,
}


# -- a rank ----------------------------------------------------------------------------------------------------------


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Return losses, and seconds and timelines of the timed steps, and in memory jobs the peak.

    A step's seconds are from a barrier to this rank's end of it.
    """
    contender, microbatches, ranks = CONTENDERS[job["name"]], job["microbatches"], job["ranks"]
    num_steps, sleeps = job["warmup"] + job["steps"], job["sleeps"]
    if sleeps is None:
        rows, size = 1, SIZES[job["size"]]
        model, batches = build_model(size), build_batches(size, num_steps, microbatches)
    else:
        rows = SLEEPING_ROWS
        model, batches = build_sleeping(2 * ranks, num_steps, rows * microbatches)
    dist.init_process_group("gloo")
    timeline: Timeline = []
    train_batch = BUILDERS[contender.kind](model, contender, ranks, microbatches, rows, timeline)
    del model
    work = SleepingProducts(*(seconds / 2 for seconds in sleeps)) if sleeps else nullcontext()  # 2 blocks a rank
    timelines: list[Timeline] = []

    def step(tokens: Tensor, targets: Tensor) -> float | None:
        with work:
            return train_batch(tokens, targets)

    def note() -> None:
        timelines.append(timeline.copy())
        timeline.clear()

    memory, warmup = PeakSampler(job["allocator"] is not None), job["warmup"]
    found = timed_steps(step, batches, warmup, memory, dist.barrier, note)
    dist.barrier()
    return found | {"timelines": timelines[warmup:]}


# -- what was found --------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, sleeps: list[float] | None, row: Row, allocator: str | None) -> Result:
    """Run one job. more: "timelines", of lowtide alone, step by step, by rank."""
    found = run_job("pipeline:train", options, row, allocator, sleeps=sleeps)
    result = gathered(found)
    result.more["timelines"] = list(zip(*(one["timelines"] for one in found), strict=True))
    return result


def predicted(row: Row, options: argparse.Namespace) -> Simulation:
    """Return what the simulator says of the sleeps that were asked for, in milliseconds."""
    from lowtide.pipe.schedules.costs import Costs
    from lowtide.pipe.schedules.registry import make_schedule
    from lowtide.pipe.schedules.simulator import simulate

    chunks = row.contender.options["chunks"]
    f, i, w = (milliseconds / chunks for milliseconds in options.milliseconds)
    schedule = make_schedule(row.contender.options["schedule"], row.ranks or 0, options.microbatches, chunks)
    costs = Costs.uniform(schedule.num_stages, forward=f, backward=i + w, input_backward=i, weight_backward=w)
    return simulate(schedule, costs)


def measured(row: Row, options: argparse.Namespace) -> Simulation:
    """Return the step with the median makespan (the shorter of the middle two) as the simulator gives it."""
    from lowtide.pipe.schedules.schedule import Action, Op
    from lowtide.pipe.schedules.simulator import TimeSlot

    told, found = predicted(row, options), []
    for step in (step for job in row.timed.values() for step in job.more["timelines"]):
        first = min(start for actions in step for *_, start, _ in actions)
        timeline = [
            tuple(TimeSlot(Action(Op(op), *at), start - first, end - first, 0) for op, *at, start, end in actions)
            for actions in step
        ]
        found.append(replace(told, timeline=tuple(timeline)))
    return sorted(found, key=lambda one: one.makespan)[(len(found) - 1) // 2]


def work_columns(rows: Sequence[Row], _: argparse.Namespace) -> list[Column]:
    """ "torch" is torch's same schedule."""
    return step_columns(rows, "torch")


def sleep_columns(rows: Sequence[Row], options: argparse.Namespace) -> list[Column]:
    """Predicted and measured, of the step with the median makespan; and torch's step over ours.

    Makespan: from the first start of F, B, I or W to the last end, of all ranks. Torch's time is from a barrier to the
    end of the last rank, the update of the few parameters included, and compared with ours of the same kind.
    """

    def of_ours(heading: str, of: Callable[[Row], float], form: str) -> Column:
        return Column(heading, lambda row: of(row) if row.contender.kind == "lowtide" and row.timed else None, form)

    return [
        of_ours("predicted ms", lambda row: predicted(row, options).makespan, ".0f"),
        of_ours("measured", lambda row: measured(row, options).makespan, ".0f"),
        of_ours("bubble predicted", lambda row: predicted(row, options).bubble, ".1%"),
        of_ours("bubble measured", lambda row: measured(row, options).bubble, ".1%"),
        Column("step ms", lambda row: row.step_seconds and row.step_seconds * 1e3, ".0f"),
        Column("x torch", lambda row: row.ratios(peer_of(rows, row))),
    ]


def write_timelines(options: argparse.Namespace, title: str, rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: what each rank did when, on the most ranks of the run; dotted where the simulator sees the end."""
    from matplotlib.figure import Figure

    from lowtide.pipe.schedules.grid import draw

    shown = [row for row in rows if row.contender.kind == "lowtide" and row.timed]
    shown = [row for row in shown if row.ranks == max(one.ranks or 0 for one in shown)]
    figure = Figure(figsize=(12, 1 + len(shown) * (0.6 + 0.3 * (shown[0].ranks or 0))), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)
    for (axes,), row in zip(panels, shown, strict=True):
        found, told = measured(row, options), predicted(row, options)
        draw(axes, found)
        axes.axvline(told.makespan, color="black", linewidth=1, linestyle=":")
        times = f"{found.makespan:.0f} ms, predicted {told.makespan:.0f}"
        bubbles = f"bubble {found.bubble:.1%}, predicted {told.bubble:.1%}"
        axes.set_title(f"{row.contender.name}: {times}; {bubbles}", loc="left", fontsize=9)
    panels[-1][0].set_xlabel("ms; dotted: the end as predicted; light: a rank's second stage")
    figure.legend(*panels[0][0].get_legend_handles_labels(), ncols=4, loc="outside upper right", frameon=False)
    figure.suptitle(f"measured: {title}", fontsize=10)
    figure.savefig(path, dpi=110)


# -- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the checked command line; end the program with a message if it is not legal."""
    parser = JobParser(__doc__, CONTENDERS, memory="exact", steps=(1, 3))
    add = parser.add_argument
    add("--mode", choices=["work", "sleep"], required=True, help="real training, or sleeps in place of it")
    add("--ranks", type=count(2), nargs="+", default=[2, 4], help="processes of a pipeline (default: 2 4)")
    add("--microbatches", type=count(), default=8, help="of a step (default: 8)")
    add("--size", choices=SIZES, default="100M", help="parameters of the model that works (default: 100M)")
    add(
        "--milliseconds",
        type=float,
        nargs=3,
        metavar=("F", "I", "W"),
        default=[60.0, 60.0, 60.0],
        help="that the forward and the halves of the backward of a rank's share of the model sleep (default: 60 60 60)",
    )
    options = parser.parse_args(arguments)
    if options.warmup < 1:
        parser.error(f"--warmup: expected at least 1, the step in which shapes are learned; found {options.warmup}")
    if options.mode == "sleep":
        options.memory, options.deepspeed_python = "none", None
    default = [name for name in CONTENDERS if name != "deepspeed" or options.deepspeed_python]
    return parser.check(options, default)


def main() -> int:
    options = parse_arguments()
    sleeps = [milliseconds / 1000 for milliseconds in options.milliseconds] if options.mode == "sleep" else None
    what = "F, I, W = {:g}, {:g}, {:g} ms".format(*options.milliseconds) if sleeps else f"GPT {options.size}, fp32"
    repeats = f"{options.rounds} round(s) of {options.steps} steps"
    title = f"{what}, {options.microbatches} microbatches, {options.threads} thread(s) a rank, {repeats}"
    columns = sleep_columns if sleeps else work_columns
    return compare(
        options,
        title,
        partial(run, options, sleeps),
        lambda rows: {title: columns(rows, options)},
        judges=True,
        draw=partial(write_timelines, options, title) if sleeps else None,
    )


if __name__ == "__main__":
    sys.exit(main())
