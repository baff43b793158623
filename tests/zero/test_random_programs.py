"""Ranks that call blocks in any number and order train together: random programs, each rank with its own calls.

LOWTIDE_PROGRAMS=1000 pytest tests/zero/test_random_programs.py
"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.comm import Pending
from lowtide.zero.group import ShardedGroup
from tests.kit.ranks import RankPool

WIDTH = 4
LR = 0.1
NUM_PROGRAMS = int(os.environ.get("LOWTIDE_PROGRAMS", "40"))
Calls = tuple[tuple[str, tuple[int, ...]], ...]  # (how, blocks) one behind the other


class Model(nn.Module):
    """Makes the calls that it is told to make."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_blocks))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, calls: Calls) -> Tensor:
        x = self.first(x)
        for how, numbers in calls:
            run = partial(self._run, numbers)
            if how == "plain" or not torch.is_grad_enabled():
                x = run(x)
            elif how == "no_grad":
                with torch.no_grad():
                    x = x + run(x.detach())
            else:
                x = checkpoint(run, x, use_reentrant=how == "reentrant")
        result: Tensor = self.last(x).square().mean()
        return result

    def _run(self, numbers: Sequence[int], x: Tensor) -> Tensor:
        for number in numbers:
            x = x + self.blocks[number](x)
        return x


@dataclass(frozen=True)
class Microbatch:
    """before, after: calls under no_grad. forwards: calls, and whether the loss is differentiated."""

    before: tuple[Calls, ...]
    forwards: tuple[tuple[Calls, bool], ...]
    after: tuple[Calls, ...]


@dataclass(frozen=True)
class Program:
    """What the ranks run: `steps[step][rank]` are the microbatches."""

    seed: int
    num_blocks: int
    zero: dict[str, Any]
    every: int
    accumulation: int
    steps: tuple[tuple[tuple[Microbatch, ...], ...], ...]


def random_program(seed: int, world_size: int) -> Program:
    choose = random.Random(seed)
    num_blocks = choose.randint(1, 4)
    accumulation = choose.choice([1, 1, 2])
    hows = choose.choice([("plain",), ("plain", "no_grad"), ("plain", "checkpoint"), ("reentrant",)])

    def calls() -> Calls:
        found = []
        for _ in range(choose.choice([0, 1, 1, 2, 3])):
            how = choose.choice(hows)
            longest = 5 if how == "plain" else 3
            found.append((how, tuple(choose.choices(range(num_blocks), k=choose.randint(0, longest)))))
        return tuple(found)

    def microbatch() -> Microbatch:
        before, after = (tuple(calls() for _ in range(choose.choice([0, 0, 0, 1, 2]))) for _ in range(2))
        kept = [True] + [choose.random() < 0.5 for _ in range(choose.choice([0, 0, 1, 2]))]
        choose.shuffle(kept)
        return Microbatch(before, tuple((calls(), one) for one in kept), after)

    def step() -> tuple[tuple[Microbatch, ...], ...]:
        if choose.random() < 0.2:  # all ranks alike
            return (tuple(microbatch() for _ in range(accumulation)),) * world_size
        return tuple(tuple(microbatch() for _ in range(accumulation)) for _ in range(world_size))

    zero = {"stage": 3} | choose.choice([{}, {"stage3_prefetch_bucket_size": 0}, {"stage3_prefetch_bucket_size": 30}])
    every = choose.choice([0, 0, 1]) if hows == ("plain",) else 0
    return Program(seed, num_blocks, zero, every, accumulation, tuple(step() for _ in range(2)))


def data(*numbers: int) -> Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(hash(numbers)))


def build(program: Program) -> Model:
    torch.manual_seed(program.seed)
    return Model(program.num_blocks).double()


@torch.no_grad()
def evaluate(engine: lowtide.Engine, x: Tensor, forwards: Sequence[Calls]) -> None:
    for calls in forwards:
        engine(x, calls)


def train(program: Program) -> dict[str, Tensor]:
    config = {
        "gradient_accumulation_steps": program.accumulation,
        "optimizer": {"type": "sgd", "params": {"lr": LR}},
        "zero_optimization": program.zero,
        "activation_checkpointing": {"every": program.every},
        "communication": {"transport": "sockets", "timeout_seconds": 10},
        "steps_per_print": 0,
    }
    engine = lowtide.initialize(build(program), config)
    rank = dist.get_rank()
    for number, step in enumerate(program.steps):
        for position, microbatch in enumerate(step[rank]):
            x = data(number, rank, position)
            evaluate(engine, x, microbatch.before)
            losses = [(engine(x, calls), is_kept) for calls, is_kept in microbatch.forwards]
            engine.backward(torch.stack([loss for loss, is_kept in losses if is_kept]).sum())
            evaluate(engine, x, microbatch.after)
        engine.step()
    state: dict[str, Tensor] = engine.state_dict()
    engine.close()
    return state


def train_all(programs: Sequence[Program]) -> list[dict[str, Tensor]]:
    found = []
    for program in programs:
        try:
            found.append(train(program))
        except Exception as error:
            error.add_note(f"program {program}")
            raise
    return found


def train_plainly(program: Program, world_size: int) -> dict[str, Tensor]:
    model = build(program)
    for number, step in enumerate(program.steps):
        model.zero_grad()
        for rank in range(world_size):
            for position, microbatch in enumerate(step[rank]):
                for calls, is_kept in microbatch.forwards:
                    if is_kept:
                        loss = model(data(number, rank, position), calls)
                        (loss / (world_size * program.accumulation)).backward()
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.sub_(LR * param.grad)
    return model.state_dict()


def engine_of(model: nn.Module, **zero: Any) -> lowtide.Engine:
    config = {
        "optimizer": {"type": "sgd", "params": {"lr": LR}},
        "zero_optimization": {"stage": 3} | zero,
        "communication": {"transport": "sockets", "timeout_seconds": 10},
        "steps_per_print": 0,
    }
    return lowtide.initialize(model.double(), config)


def gathers_of(calls: Calls) -> list[int]:
    """Gathers in each of three microbatches of the same calls on all ranks."""
    engine = engine_of(Model(3))
    count = 0

    def counted(self: ShardedGroup) -> Pending:
        nonlocal count
        count += 1
        return exchange(self)

    exchange, found = ShardedGroup._exchange, []
    with mock.patch.object(ShardedGroup, "_exchange", counted):
        for _ in range(3):
            count = 0
            engine.train_step(iter([{"x": data(0), "calls": calls}]))
            found.append(count)
    engine.close()
    return found


def test_a_block_that_is_called_again_at_once_stays(ranks: RankPool) -> None:
    """Five gathers of blocks: three in the forward, the first two in the backward. And one of what is beside them."""
    for found in ranks(2, gathers_of, (("plain", (0,) * 4 + (1,) * 4 + (2,) * 4),)):
        assert found[1:] == [6, 6]


def forward_alone() -> float:
    engine = engine_of(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
    with engine.gathered(), torch.no_grad():
        if dist.get_rank() == 0:
            engine(data(0))
    engine.backward(engine(data(0)).square().mean())
    norm = engine.step().grad_norm.item()
    engine.close()
    return norm


def test_a_forward_on_one_rank_alone_while_all_is_gathered(ranks: RankPool) -> None:
    first, second = ranks(2, forward_alone)
    assert first == second > 0


def update_several_together() -> str:
    engine = engine_of(Model(3), update_in_backward=True, stage3_prefetch_bucket_size=0)
    try:
        engine.train_step(iter([{"x": data(0), "calls": (("checkpoint", (0, 1, 2)),)}]))
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_units_that_a_checkpoint_needs_together_are_not_updated_one_by_one(ranks: RankPool) -> None:
    for text in ranks(2, update_several_together):
        assert text.startswith("unit 'blocks.2' is updated in the backward: expected all its gradients before")
        assert text.endswith("or switch update_in_backward or offload_optimizer.overlap off")


@pytest.mark.parametrize(("world_size", "share"), [(2, 0.8), (4, 0.2)])
def test_ranks_with_any_calls_train_as_one_process(ranks: RankPool, world_size: int, share: float) -> None:
    programs = [random_program(seed, world_size) for seed in range(int(NUM_PROGRAMS * share))]
    for first in range(0, len(programs), 100):
        some = programs[first : first + 100]
        for program, found in zip(some, ranks(world_size, train_all, some)[0], strict=True):
            for name, value in train_plainly(program, world_size).items():
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=f"{program}: {{}}".format)
