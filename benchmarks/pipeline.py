"""Trains over pipelines with lowtide, torch.distributed.pipelining and DeepSpeed; measures time, memory and bubbles.

--mode work: a GPT with AdamW, the same blocks in the same stages for every contender. A round runs all of them once,
in random order, each as a fresh job; a ratio compares a schedule with torch's same one in the same round. Memory is
measured in jobs that are not timed; `_worker.py` says what is counted. A step is the schedule and the update.

--mode sleep: sleeps in place of work, so that a few cores do for many ranks. Measured makespans and bubbles stand
beside those that the simulator predicts for the same costs, and beside torch's steps with the same sleeps.

Example, both parts whole, and then a quick look at each:

    python benchmarks/pipeline.py --mode work --ranks 2 4 --json work.json
    python benchmarks/pipeline.py --mode sleep --ranks 2 4 --json sleep.json --png docs/images/pipeline_measured.png
    python benchmarks/pipeline.py --mode work --size tiny-deep --ranks 2 --rounds 1 --memory none
    python benchmarks/pipeline.py --mode sleep --ranks 2 --rounds 1 --contenders 1f1b zb-v torch-zb-v

[Note: Sleeps in place of work]
A `SleepingModel` has one linear layer a block, too small to take any time. Under `SleepingProducts` the three matrix
products of such a layer sleep: the forward, the gradient of the input, the gradient of the weight. Whoever splits a
backward, however it is done, splits it between the second and the third. So any number of ranks run on any number of
cores as if each had a processor of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _contenders import ADAMW
from _harness import (
    Column,
    Contender,
    Parser,
    Result,
    Row,
    add_job_options,
    by_name,
    check_job_options,
    compare,
    count,
    find,
    gathered,
    job_of,
    losses_column,
    mib,
    over,
    python_of,
    run_job,
)
from _model import SEED, SIZES, VOCABULARY, Block, GPTSize
from _worker import RankMemory, timed_steps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

Timeline = list[tuple[str, int, int, float, float]]
"""(op, stage, microbatch, start, end) of a rank's F, B, I and W, in seconds of a clock that all processes share."""

PIPELINE_SIZES = {
    **SIZES,
    "tiny-deep": GPTSize(num_layers=16, width=64, num_heads=4, sequence_length=32),  # 0.8M parameters
    "100M": GPTSize(num_layers=16, width=720, num_heads=12, sequence_length=128),  # 100.1M parameters
}
SLEEPING_ROWS, SLEEPING_WIDTH = 2, 3  # by the shape of a product one sees which of the three it is
_COLOURS = {
    "F": ("#4292c6", "#9ecae1"),
    "B": ("#41ab5d", "#a1d99b"),
    "I": ("#1d91a3", "#8fd1cf"),
    "W": ("#fd8d3c", "#fdd0a2"),
}


# -- contenders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Where the stages of a schedule are. chunks: on each rank; is_v: as a V."""

    chunks: int
    is_v: bool

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


def _schedule(
    name: str, kind: str, schedule: str, chunks: int, *, is_v: bool = False, peer: str | None = None
) -> Contender:
    """schedule: as the kind calls it. peer: the contender with the same schedule."""
    return Contender(name, name, kind, {"schedule": schedule, "chunks": chunks, "is_v": is_v}, peer=peer)


def placement_of(contender: Contender) -> Placement:
    return Placement(contender.options["chunks"], contender.options["is_v"])


CONTENDERS = by_name(
    _schedule("torch-gpipe", "torch", "ScheduleGPipe", 1),
    _schedule("gpipe", "lowtide", "gpipe", 1, peer="torch-gpipe"),
    _schedule("torch-1f1b", "torch", "Schedule1F1B", 1),
    _schedule("1f1b", "lowtide", "1f1b", 1, peer="torch-1f1b"),
    _schedule("torch-interleaved", "torch", "ScheduleInterleaved1F1B", 2),
    _schedule("interleaved", "lowtide", "interleaved", 2, peer="torch-interleaved"),
    _schedule("zb-h1", "lowtide", "zb-h1", 1, peer="torch-1f1b"),
    _schedule("torch-interleaved-zb", "torch", "ScheduleInterleavedZeroBubble", 2),
    _schedule("zb-h1-2", "lowtide", "zb-h1", 2, peer="torch-interleaved-zb"),
    _schedule("torch-zb-v", "torch", "ScheduleZBVZeroBubble", 2, is_v=True),
    _schedule("zb-v", "lowtide", "zb-v", 2, is_v=True, peer="torch-zb-v"),
    _schedule("torch-dualpipe-v", "torch", "ScheduleDualPipeV", 2, is_v=True),
    _schedule("dualpipe-v", "lowtide", "dualpipe-v", 2, is_v=True, peer="torch-dualpipe-v"),
    _schedule("deepspeed", "deepspeed", "1f1b", 1, peer="torch-1f1b"),
)


# -- models, each of what is before its blocks, they, and what is behind ---------------------------------------------


class Begin(nn.Module):
    """Tokens and positions: (batch, sequence) int64 -> (batch, sequence, width)."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.sequence_length, size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return out


class SleepingBlock(nn.Module):
    """(rows, width) -> the same, by way of one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SLEEPING_WIDTH, SLEEPING_WIDTH + 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out[:, :SLEEPING_WIDTH].contiguous()


class PipelineModel(nn.Module):
    """Begin, blocks and end; its output is its loss, () float32."""

    def __init__(self, begin: nn.Module, blocks: list[nn.Module], end: nn.Module) -> None:
        super().__init__()
        self.begin = begin
        self.blocks = nn.ModuleList(blocks)
        self.end = end

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.begin(tokens)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.end(x), targets)


class Part(nn.Module):
    """The blocks of one stage, and the begin or the end of the model where they belong to it."""

    def __init__(self, model: PipelineModel, blocks: range) -> None:
        super().__init__()
        self.begin = model.begin if blocks.start == 0 else nn.Identity()
        self.blocks = nn.ModuleList(model.blocks[index] for index in blocks)
        self.end = model.end if blocks.stop == len(model.blocks) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.end(x)
        return out


class SleepingProducts(TorchDispatchMode):
    """In the context the products of a `SleepingBlock` sleep. [Note: Sleeps in place of work]"""

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


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def build_model(size_name: str) -> PipelineModel:
    """Gives the GPT of that size with the same initial weights in every process."""
    torch.manual_seed(SEED)
    size = PIPELINE_SIZES[size_name]
    head = nn.Linear(size.width, VOCABULARY, bias=False)
    blocks: list[nn.Module] = [Block(size.width, size.num_heads) for _ in range(size.num_layers)]
    model = PipelineModel(Begin(size), blocks, nn.Sequential(nn.LayerNorm(size.width), head))
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model


def build_batches(size_name: str, num_steps: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Gives the batch of each step: random bytes and what follows them, both (rows, sequence) int64."""
    generator = torch.Generator().manual_seed(SEED)
    shape = num_steps, rows, PIPELINE_SIZES[size_name].sequence_length + 1
    windows = torch.randint(VOCABULARY, shape, generator=generator)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in windows]


def build_sleeping_model(num_blocks: int) -> PipelineModel:
    """Gives the model whose blocks can sleep; the same in every process."""
    torch.manual_seed(SEED)
    blocks: list[nn.Module] = [SleepingBlock() for _ in range(num_blocks)]
    return PipelineModel(nn.Embedding(VOCABULARY, SLEEPING_WIDTH), blocks, nn.Identity())


def build_sleeping_batches(num_steps: int, num_microbatches: int) -> list[tuple[Tensor, Tensor]]:
    """Gives the batch of each step: tokens and classes, both (microbatches x rows,) int64."""
    tokens = torch.arange(num_microbatches * SLEEPING_ROWS)
    return [(tokens % VOCABULARY, tokens % SLEEPING_WIDTH) for _ in range(num_steps)]


# -- how each trains: a builder a kind -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PipelineTrainer:
    """step(tokens, targets): the whole batch -> its mean loss, None where this rank does not know it.

    predicted, timeline: for lowtide alone. predicted(seconds of an F, B, I and W, seconds of a message) -> what the
    simulator says of the schedule that runs; timeline() -> of the last step.
    """

    step: Callable[[Tensor, Tensor], float | None]
    timeline: Callable[[], Timeline] | None = None
    predicted: Callable[[Mapping[str, float], float], dict[str, float]] | None = None


def build_lowtide(model: PipelineModel, contender: Contender, ranks: int, microbatches: int, rows: int) -> Any:
    """Gives lowtide as a user's script has it. rows: of a microbatch."""
    import lowtide
    from lowtide.engine.step.pipeline_runner import PipelineRunner

    placement = placement_of(contender)
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "parallel": {"pipeline": ranks},
        "pipeline": {
            "schedule": contender.options["schedule"],
            "chunks": placement.chunks,
            "microbatches": microbatches,
            "balance": placement.blocks_of_stages(ranks, len(model.blocks)),
        },
        "optimizer": {"type": "adamw", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "steps_per_print": 0,
    }
    engine = lowtide.initialize(model, config)
    pipeline = engine._runner
    assert isinstance(pipeline, PipelineRunner)
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


def build_torch(model: PipelineModel, contender: Contender, ranks: int, microbatches: int, rows: int) -> Any:
    """Gives torch.distributed.pipelining with its own schedule classes, stages cut by hand."""
    from torch.distributed import pipelining

    rank, placement = dist.get_rank(), placement_of(contender)
    num_stages = ranks * placement.chunks
    parts = {
        stage: Part(model, placement.blocks_of_stage(stage, ranks, len(model.blocks)))
        for stage in placement.stages_of_rank(rank, ranks)
    }
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

    return PipelineTrainer(step)


def build_deepspeed(model: PipelineModel, contender: Contender, ranks: int, microbatches: int, rows: int) -> Any:
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


# -- a rank ----------------------------------------------------------------------------------------------------------


def train(job: dict[str, Any]) -> dict[str, Any]:
    """On a rank: losses, seconds and the timeline of every step (warm-up too), and in memory jobs the peak.

    A step's seconds are from a barrier to this rank's end of it.
    """
    contender, microbatches, ranks = CONTENDERS[job["name"]], job["microbatches"], job["ranks"]
    num_steps = job["warmup"] + job["steps"]
    sleeps = job["sleeps"]  # seconds of a rank's share: forward, input half, weight half
    if sleeps is None:
        rows, model = job["rows"], build_model(job["size"])
        batches = build_batches(job["size"], num_steps, rows * microbatches)
    else:
        rows, model = SLEEPING_ROWS, build_sleeping_model(2 * ranks)
        batches = build_sleeping_batches(num_steps, microbatches)
    dist.init_process_group("gloo")
    message_seconds = time_of_a_message() if sleeps else 0.0
    trainer = BUILDERS[contender.kind](model, contender, ranks, microbatches, rows)
    del model
    work = SleepingProducts(*(seconds / 2 for seconds in sleeps)) if sleeps else nullcontext()  # 2 blocks a rank
    timelines: list[Timeline] = []

    def step(tokens: Tensor, targets: Tensor) -> float | None:
        with work:
            return trainer.step(tokens, targets)

    def note() -> None:
        if trainer.timeline:
            timelines.append(trainer.timeline())

    found = timed_steps(step, batches, RankMemory(job), dist.barrier, note)
    dist.barrier()
    if sleeps and trainer.predicted:
        told = {op: seconds / placement_of(contender).chunks for op, seconds in zip("FIW", sleeps, strict=True)}
        told["B"] = told["I"] + told["W"]
        timed = told | medians_by_op([action for step in timelines[job["warmup"] :] for action in step])
        found["predicted"] = trainer.predicted(told, 0.0)
        found["predicted_as_timed"] = trainer.predicted(timed, message_seconds)
    return found | {"timelines": timelines}


def time_of_a_message(count: int = 20) -> float:
    """Seconds from the send of a small tensor to its arrival at a rank that waits for it; the median, on every rank."""
    rank, took = dist.get_rank(), torch.zeros(count, dtype=torch.float64)
    for index in range(count):
        sent = torch.zeros(1, dtype=torch.float64)
        if rank == 0:
            time.sleep(0.02)
            dist.send(sent.fill_(time.perf_counter()), 1)
        elif rank == 1:
            dist.recv(sent, 0)
            took[index] = time.perf_counter() - sent  # one clock for all processes of a host
    dist.broadcast(took, 1)
    return float(took.median())


def medians_by_op(actions: Timeline) -> dict[str, float]:
    """Seconds of the actions of each kind that there are."""
    seconds: dict[str, list[float]] = {}
    for op, _, _, start, end in actions:
        seconds.setdefault(op, []).append(end - start)
    return {op: statistics.median(values) for op, values in seconds.items()}


# -- what was found --------------------------------------------------------------------------------------------------


def makespan(timeline: Sequence[Timeline]) -> float:
    """Seconds from the first start to the last end, of all ranks."""
    return max(end for row in timeline for *_, end in row) - min(start for row in timeline for *_, start, _ in row)


def bubble(timeline: Sequence[Timeline]) -> float:
    """The share of all ranks' time in which they do no action, 0 to 1."""
    busy = sum(end - start for row in timeline for *_, start, end in row)
    return 1 - busy / (makespan(timeline) * len(timeline))


def result_of(found: Sequence[Mapping[str, Any]], warmup: int) -> Result:
    """A step's seconds are from the last rank that left the barrier before it to the end of its last rank.

    more: "timelines", step by step, by rank, of lowtide alone. "predicted": makespan and bubble as the simulator has
    them for the sleeps that were asked for; "predicted_as_timed": for the medians of what rank 0's actions and a
    message took.
    """
    result, steps = gathered(found, warmup), range(warmup, len(found[0]["seconds"]))

    def last_rank(step: int) -> float:
        starts: list[float] = [one["started"][step] for one in found]
        ends: list[float] = [one["started"][step] + one["seconds"][step] for one in found]
        return max(ends) - max(starts)

    result.seconds = [last_rank(step) for step in steps]
    result.more = {
        "timelines": [[one["timelines"][step] for one in found] for step in steps if found[0]["timelines"]],
        "predicted": found[0].get("predicted"),
        "predicted_as_timed": found[0].get("predicted_as_timed"),
    }
    return result


def timeline_of(job: Result) -> list[Timeline]:
    """By rank, of the step with the median makespan (the shorter of the middle two)."""
    timelines: list[list[Timeline]] = job.more["timelines"]
    return sorted(timelines, key=makespan)[(len(timelines) - 1) // 2]


def middle_of(row: Row) -> Result:
    """The job with the median makespan (the shorter of the middle two); for lowtide alone."""
    jobs = sorted(row.timed.values(), key=lambda job: makespan(timeline_of(job)))
    return jobs[(len(jobs) - 1) // 2]


def peer_of(rows: Sequence[Row], row: Row) -> Row | None:
    """The row that this one is compared with, None where it was not run."""
    return find(rows, row.contender.peer, row.ranks)


def reference_of(rows: Sequence[Row], row: Row) -> Row:
    """Whose losses are right: a peer's if there is one, else the first row's, on as many ranks."""
    same = [one for one in rows if one.ranks == row.ranks and one.losses]
    return next((one for one in same if one.contender.kind != "lowtide"), same[0] if same else row)


def work_columns(rows: Sequence[Row]) -> list[Column]:
    """Medians, and (lowest-highest) over the rounds; "x torch" compares with torch's same schedule."""

    def peak_ratio(row: Row) -> float | None:
        peer = peer_of(rows, row)
        return over(row.peak_bytes, peer.peak_bytes if peer else None)

    return [
        Column("s/step", lambda row: row.step_seconds, ".3f", "seconds of a step"),
        Column("x torch", lambda row: row.ratios(peer_of(rows, row)), panel="step time / torch's same", line=1.0),
        Column("peak MiB", lambda row: mib(row.peak_bytes), ".0f", "peak of a rank, MiB"),
        Column("peak x torch", peak_ratio),
        losses_column(lambda row: reference_of(rows, row)),
    ]


def sleep_columns(rows: Sequence[Row]) -> list[Column]:
    """Predicted and measured, of the job with the median makespan; and torch's step over ours.

    Makespan: from the first start of F, B, I or W to the last end, of all ranks. Bubble: the share of all ranks' time
    in which they do none of these; as timed: predicted from what actions and messages really took, points: what is
    above that. Work: how much longer than told the actions themselves took. Torch's time is from a
    barrier to the end of the last rank, the update of the few parameters included, and compared with ours of the same
    kind.
    """

    def of_ours(heading: str, of: Callable[[dict[str, Any], float, float], float], form: str) -> Column:
        """of: from what the job tells, its makespan and its bubble."""

        def value(row: Row) -> float | None:
            if row.contender.kind != "lowtide" or not row.timed:
                return None
            job = middle_of(row)
            return of(job.more, makespan(timeline_of(job)), bubble(timeline_of(job)))

        return Column(heading, value, form)

    def more_work(more: dict[str, Any], length: float, share: float) -> float:
        told = more["predicted"]
        return length * (1 - share) / (told["makespan"] * (1 - told["bubble"])) - 1

    return [
        of_ours("predicted ms", lambda more, length, share: more["predicted"]["makespan"] * 1e3, ".0f"),
        of_ours("measured", lambda more, length, share: length * 1e3, ".0f"),
        of_ours("x", lambda more, length, share: length / more["predicted"]["makespan"], ".3f"),
        of_ours("bubble predicted", lambda more, length, share: more["predicted"]["bubble"], ".1%"),
        of_ours("as timed", lambda more, length, share: more["predicted_as_timed"]["bubble"], ".1%"),
        of_ours("bubble measured", lambda more, length, share: share, ".1%"),
        of_ours("points", lambda more, length, share: (share - more["predicted_as_timed"]["bubble"]) * 100, "+.1f"),
        of_ours("work", more_work, "+.1%"),
        Column("step ms", lambda row: row.step_seconds and row.step_seconds * 1e3, ".0f"),
        Column("x torch", lambda row: row.ratios(peer_of(rows, row))),
    ]


def write_timelines(rows: Sequence[Row], title: str, path: Path) -> None:
    """Writes a PNG: what each rank did when, on the most ranks of the run; dotted where the simulator sees the end."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.contender.kind == "lowtide" and row.timed]
    shown = [row for row in shown if row.ranks == max(one.ranks or 0 for one in shown)]
    ranks = shown[0].ranks or 0
    figure = Figure(figsize=(12, 1 + len(shown) * (0.6 + 0.3 * ranks)), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)
    for (axes,), row in zip(panels, shown, strict=True):
        job, placement = middle_of(row), placement_of(row.contender)
        timeline, told = timeline_of(job), job.more["predicted"]
        length, first = makespan(timeline) * 1e3, min(start for actions in timeline for *_, start, _ in actions)
        for rank, actions in enumerate(timeline):
            for op, stage, microbatch, start, end in actions:
                colour = _COLOURS[op][placement.stages_of_rank(rank, ranks).index(stage) % 2]
                left, width = (start - first) * 1e3, (end - start) * 1e3
                axes.barh(rank, width, left=left, height=0.86, color=colour, edgecolor="white", linewidth=0.5)
                axes.text(left + width / 2, rank, str(microbatch), ha="center", va="center", fontsize=6)
        axes.axvline(told["makespan"] * 1e3, color="black", linewidth=1, linestyle=":")
        axes.set_title(
            f"{row.contender.name}: {length:.0f} ms, predicted {told['makespan'] * 1e3:.0f}; "
            f"bubble {bubble(timeline):.1%}, predicted {told['bubble']:.1%}",
            loc="left",
            fontsize=9,
        )
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.set_ylim(ranks - 0.5, -0.5)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1][0].set_xlabel("ms; dotted: the end as predicted; light: a rank's second stage")
    handles = [panels[0][0].barh(0, 0, color=colours[0], label=op) for op, colours in _COLOURS.items()]
    figure.legend(handles=handles, ncols=4, loc="outside upper right", frameon=False)
    figure.suptitle(f"measured: {title}", fontsize=10)
    figure.savefig(path, dpi=110)


# -- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = Parser(__doc__)
    add_job_options(parser, CONTENDERS, memory="exact")
    add = parser.add_argument
    add("--mode", choices=["work", "sleep"], required=True, help="real training, or sleeps in place of it")
    add("--ranks", type=count(2), nargs="+", default=[2, 4], help="processes of a pipeline (default: 2 4)")
    add("--microbatches", type=count(), default=8, help="of a step (default: 8)")
    add("--warmup", type=int, default=1, help="steps before the timed ones (default: 1)")
    add("--steps", type=count(), default=3, help="timed steps of a job (default: 3)")
    add("--seed", type=int, default=0, help="of the order of the jobs (default: 0)")
    work = parser.add_argument_group("with --mode work")
    work.add_argument("--size", choices=PIPELINE_SIZES, default="100M", help="parameters of the model (default: 100M)")
    work.add_argument("--rows", type=count(), default=1, help="sequences of a microbatch (default: 1)")
    work.add_argument("--memory-steps", type=count(), default=2, help="steps of a memory job (default: 2)")
    sleep = parser.add_argument_group("with --mode sleep, whose picture shows what each rank did when")
    sleep.add_argument(
        "--milliseconds",
        type=float,
        nargs=3,
        metavar=("F", "I", "W"),
        default=[60.0, 60.0, 60.0],
        help="of the forward and the two halves of the backward of a rank's share of the model (default: 60 60 60)",
    )
    options = parser.parse_args(arguments)
    if options.warmup < 1:
        parser.error(f"--warmup: expected at least 1, the step in which shapes are learned; found {options.warmup}")
    if options.mode == "sleep":
        options.memory, options.deepspeed_python = "none", None
    default = [name for name in CONTENDERS if name != "deepspeed" or options.deepspeed_python]
    check_job_options(parser, options, CONTENDERS, default=default)
    return options


def main() -> int:
    options = parse_arguments()
    rows = [Row(contender, ranks) for ranks in options.ranks for contender in options.contenders]
    sleeps = [milliseconds / 1000 for milliseconds in options.milliseconds] if options.mode == "sleep" else None

    def run(row: Row, allocator: str | None) -> Result:
        warmup, steps = (0, options.memory_steps) if allocator else (options.warmup, options.steps)
        job = job_of(options, ranks=row.ranks, warmup=warmup, steps=steps, sleeps=sleeps)
        return result_of(
            run_job("pipeline:train", row.contender, job, python_of(row.contender, options), allocator), warmup
        )

    what = "F, I, W = {:g}, {:g}, {:g} ms".format(*options.milliseconds) if sleeps else f"GPT {options.size}, fp32"
    repeats = f"{options.rounds} round(s) of {options.steps} steps"
    title = f"{what}, {options.microbatches} microbatches, {options.threads} thread(s) a rank, {repeats}"
    tables = {title: (sleep_columns if sleeps else work_columns)(rows)}
    draw = (lambda path: write_timelines(rows, title, path)) if sleeps else None
    return compare(options, rows, run, tables, title, reference_of=lambda row: reference_of(rows, row), draw=draw)


if __name__ == "__main__":
    sys.exit(main())
