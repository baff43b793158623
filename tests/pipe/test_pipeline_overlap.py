"""A pipeline takes as long as its schedule says, and holds what it needs no longer than it needs it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import lowtide
from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.schedule import COMPUTE_OPS, Action, Op, Schedule
from lowtide.pipe.schedules.simulator import simulate
from lowtide.pipe.split.carried import Carried
from lowtide.pipe.stage import Call, Stage
from tests.kit import models
from tests.kit.ranks import RankPool, slowness
from tests.pipe.pipelines import SCHEDULES, deep_gpt
from tests.pipe.sleeping import ROWS, SleepingModel, SleepingProducts, sleeping_batch

RANKS, MICROBATCHES, BLOCKS = 2, 4, 4
SECONDS = 0.08  # of each of F, I and W of a rank's share, on an idle machine
LONGEST = 8.0  # times that, so that what a busy machine adds stays small beside them
# A pipeline that sends the gradient only after W takes 1.2 times as long with zb-v; one that overlaps nothing, twice.
BOUND = 1.15
TRIES = 3  # on a machine that does other things too


def engine_of(model: nn.Module, schedule: str, rows: int, **pipeline: Any) -> Any:
    section = {"schedule": schedule, "chunks": SCHEDULES[schedule], "microbatches": MICROBATCHES, **pipeline}
    return lowtide.initialize(
        model,
        {
            "train_micro_batch_size_per_gpu": rows,
            "steps_per_print": 0,
            "optimizer": {"type": "sgd", "params": {"lr": 1e-3}},
            "parallel": {"pipeline": RANKS},
            "pipeline": section,
        },
    )


def intervals_of_steps(schedule: str, seconds: float) -> tuple[list[tuple[float, float]], float]:
    """(first start, last end) of each step on this rank, by a clock that all ranks share; the simulated makespan."""
    chunks = SCHEDULES[schedule]
    each_has = BLOCKS // (RANKS * chunks)
    engine = engine_of(SleepingModel(BLOCKS), schedule, ROWS, balance=[each_has] * RANKS * chunks)
    pipeline = engine._runner
    times: list[tuple[float, float]] = []

    def note(action: Action, start: float, end: float) -> None:
        if action.op in COMPUTE_OPS:
            times.append((start, end))

    steps = []
    seconds_of_block = seconds * RANKS / BLOCKS
    for number in range(1 + TRIES):  # the first learns the shapes
        pipeline.executor.on_action = note
        times.clear()
        with SleepingProducts(*[seconds_of_block if number else 0.0] * 3):
            engine.train_step(sleeping_batch(MICROBATCHES))
        steps.append((times[0][0], times[-1][1]))
    each = seconds / chunks
    costs = Costs.uniform(RANKS * chunks, forward=each, input_backward=each, weight_backward=each)
    simulated = simulate(pipeline.schedule, costs).makespan
    engine.close()
    return steps[1:], simulated


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_a_step_takes_as_long_as_simulated(ranks: RankPool, schedule: str) -> None:
    by_rank = ranks(RANKS, intervals_of_steps, schedule, SECONDS * min(LONGEST, slowness() ** 2))
    measured = [
        max(end for _, end in step) - min(start for start, _ in step)
        for step in zip(*(steps for steps, _ in by_rank), strict=True)
    ]
    simulated = by_rank[0][1]
    assert 1 <= min(measured) / simulated <= BOUND, (measured, simulated)


@dataclass
class Buffers:
    """The memory of what came into each stage and of what it gave, by stage: microbatch after microbatch."""

    received: dict[int, list[list[StorageWeakRef]]] = field(default_factory=dict)
    given: dict[int, list[list[StorageWeakRef]]] = field(default_factory=dict)

    def watch(self, stage: Stage) -> None:
        original = stage.run

        def run(call: Call, received: Carried | None = None) -> Any:
            output = original(call, received)
            into = received.tensors if received is not None else ()
            given = output.tensors if isinstance(output, Carried) else ()
            self.received.setdefault(stage.index, []).append(_memory_of(into))
            self.given.setdefault(stage.index, []).append(_memory_of(given))
            return output

        stage.run = run  # type: ignore[method-assign]


def _memory_of(tensors: tuple[Tensor, ...]) -> list[StorageWeakRef]:
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def what_is_held_too_long(schedule: str) -> tuple[list[str], dict[str, int], int, Schedule]:
    """Complaints; the number of each kind of checks; the most graphs that were held at once; the schedule."""
    engine = engine_of(deep_gpt(), schedule, 2)
    executor = engine._runner.executor
    buffers = Buffers()
    for stage in executor._stages.values():
        buffers.watch(stage)
    found: list[str] = []
    checks: Counter[str] = Counter()
    most_held = 0

    def look(action: Action, start: float, end: float) -> None:
        nonlocal most_held
        most_held = max(most_held, len(executor._run.graphs))
        if action.op not in (Op.B, Op.I):
            return
        assert action.microbatch is not None
        for what, of in (("input", buffers.received), ("output", buffers.given)):
            for memory in of[action.stage][action.microbatch]:
                checks[what] += 1
                if not memory.expired():
                    found.append(f"{what} of stage {action.stage}, microbatch {action.microbatch}, after {action}")

    executor.on_action = look
    engine.train_step(models.token_batch(0, 2 * MICROBATCHES))
    complete = engine._runner.schedule
    engine.close()
    return found, dict(checks), most_held, complete


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_backward_needed_is_freed_by_it(ranks: RankPool, schedule: str) -> None:
    for rank, (found, checks, most_held, complete) in enumerate(ranks(RANKS, what_is_held_too_long, schedule)):
        assert not found
        own = complete.stages_of_rank(rank)
        assert checks.get("input", 0) == MICROBATCHES * sum(stage > 0 for stage in own)
        assert checks.get("output", 0) == MICROBATCHES * sum(stage + 1 < complete.num_stages for stage in own)
        assert most_held == simulate(complete).peaks[rank].in_flight


def storages_of_gradients(schedule: str) -> list[bool]:
    """Whether each parameter's gradient lay in its shard, at every action of a step but the last ones."""
    engine = engine_of(deep_gpt(), schedule, ROWS)
    found: list[bool] = []

    def note(action: Action, start: float, end: float) -> None:
        if action.op not in COMPUTE_OPS:
            return
        shards = [gradient.shard for gradient in engine._steps.gradients if gradient.shard is not None]
        assert engine.memory().gradient_bytes == sum(shard.nbytes for shard in shards)
        for gradient in engine._steps.gradients:
            for param in gradient.group.params:
                if param.grad is not None:
                    assert gradient.shard is not None
                    found.append(param.grad.untyped_storage().data_ptr() == gradient.shard.untyped_storage().data_ptr())

    engine._runner.executor.on_action = note
    engine.train_step(models.token_batch(0, ROWS * MICROBATCHES))
    engine.close()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_gradients_add_up_in_the_shard_where_nobody_else_has_a_part(ranks: RankPool, schedule: str) -> None:
    for found in ranks(RANKS, storages_of_gradients, schedule):
        assert found and all(found)
