"""A pipeline takes as long as its schedule says, and holds what it needs no longer than it needs it."""

import time
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.schedule import COMPUTE_OPS, Action, Op
from lowtide.pipe.schedules.simulator import simulate
from lowtide.pipe.split.carried import Carried
from lowtide.pipe.stage import Call, Stage
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks, slowness
from tests.kit.training import settings
from tests.pipe.pipelines import SCHEDULES, deep_gpt

RANKS, MICROBATCHES, BLOCKS = 2, 4, 4
SECONDS = 0.08  # of each of F, I and W of a rank's share, on an idle machine
LONGEST = 8.0  # times that, so that what a busy machine adds stays small beside them
# A pipeline that sends the gradient only after W takes 1.2 times as long with zb-v; one that overlaps nothing, twice.
BOUND = 1.15
TRIES = 3  # on a machine that does other things too
ROWS, WIDTH, VOCAB = 2, 3, 16  # by the shape of a product one sees which of a layer's three it is


def engine_of(model: nn.Module, schedule: str, **pipeline: Any) -> Any:
    section = {"schedule": schedule, "chunks": SCHEDULES[schedule], "microbatches": MICROBATCHES, **pipeline}
    optimizer = {"type": "sgd", "params": {"lr": 1e-3}}
    return lowtide.initialize(model, settings(parallel={"pipeline": RANKS}, pipeline=section, optimizer=optimizer))


class SleepingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH + 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (ROWS, WIDTH)
        # Not the view itself, which would keep what it is a part of; nor what a later op would save.
        return x + self.linear(x)[:, :WIDTH]


class SleepingModel(nn.Module):
    """Its matrix products sleep: a pipeline of any number of ranks takes as long as if each had a processor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(SleepingBlock() for _ in range(BLOCKS))

    def forward(self, tokens: Tensor, classes: Tensor) -> Tensor:  # (ROWS,) both
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(x, classes)


class SleepingProducts(TorchDispatchMode):
    """In the context each product of a block sleeps so long: its forward and both halves of its backward, however a
    backward is split."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            time.sleep(self._seconds)
        return out


def intervals_of_steps(schedule: str, seconds: float) -> tuple[list[tuple[float, float]], float]:
    """(first start, last end) of each step on this rank, by a clock that all ranks share; the simulated makespan."""
    num_stages = RANKS * SCHEDULES[schedule]
    engine = engine_of(SleepingModel(), schedule, balance=[BLOCKS // num_stages] * num_stages)
    times: list[tuple[float, float]] = []

    def note(action: Action, start: float, end: float) -> None:
        if action.op in COMPUTE_OPS:
            times.append((start, end))

    steps, tokens = [], torch.arange(MICROBATCHES * ROWS)
    for number in range(1 + TRIES):  # the first learns the shapes
        engine._runner.executor.on_action = note
        times.clear()
        with SleepingProducts(seconds * RANKS / BLOCKS if number else 0.0):
            engine.train_step((tokens % VOCAB, tokens % WIDTH))
        steps.append((times[0][0], times[-1][1]))
    each = seconds / SCHEDULES[schedule]
    costs = Costs.uniform(num_stages, forward=each, input_backward=each, weight_backward=each)
    simulated = simulate(engine._runner.schedule, costs).makespan
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


Memory = dict[tuple[str, int], list[list[StorageWeakRef]]]  # by kind and stage: of microbatch after microbatch


def watch(stage: Stage, buffers: Memory) -> None:
    """Notes the memory of what comes into a stage and of what it gives."""
    original = stage.run

    def run(call: Call, received: Carried | None = None, form: Hashable = None) -> Any:
        output = original(call, received, form)
        for kind, carried in (("input", received), ("output", output)):
            tensors = carried.tensors if isinstance(carried, Carried) else ()
            buffers[kind, stage.index].append([StorageWeakRef(tensor.untyped_storage()) for tensor in tensors])
        return output

    stage.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "dualpipe-v"])
@on_ranks(RANKS)
def test_what_a_backward_needed_is_freed_by_it(schedule: str) -> None:
    engine = engine_of(deep_gpt(), schedule)
    executor = engine._runner.executor
    buffers: Memory = defaultdict(list)
    for stage in executor._stages.values():
        watch(stage, buffers)
    found: list[str] = []
    checks: Counter[str] = Counter()
    most_held = 0

    def look(action: Action, start: float, end: float) -> None:
        nonlocal most_held
        most_held = max(most_held, len(executor._run.graphs))
        if action.op not in (Op.B, Op.I):
            return
        assert action.microbatch is not None
        for kind in ("input", "output"):
            memories = buffers[kind, action.stage][action.microbatch]
            checks[kind] += len(memories)
            found.extend(f"{kind} of {action}" for memory in memories if not memory.expired())

    executor.on_action = look
    engine.train_step(models.token_batch(0, ROWS * MICROBATCHES))
    complete, rank = engine._runner.schedule, engine.rank
    engine.close()
    assert not found
    own = complete.stages_of_rank(rank)
    assert checks["input"] == MICROBATCHES * sum(stage > 0 for stage in own)
    assert checks["output"] == MICROBATCHES * sum(stage + 1 < complete.num_stages for stage in own)
    assert most_held == simulate(complete).peaks[rank].in_flight


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@on_ranks(RANKS)
def test_gradients_add_up_in_the_shard_where_nobody_else_has_a_part(schedule: str) -> None:
    """At every action of a step but the last ones."""
    engine = engine_of(deep_gpt(), schedule)
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
    assert found and all(found)
