"""Ranks that call blocks in any number and order train together, as one process does that makes the calls of all.

A block that some ranks left out counts there with a gradient of zero, and one that all left out stays as it was.

LOWTIDE_PROGRAMS=1000 pytest tests/zero/test_random_programs.py
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from tempfile import gettempdir
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.zero.group import ShardedGroup
from lowtide.zero.plan import Role
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import differences, refusal, settings

WIDTH = 4
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
NUM_PROGRAMS = int(os.environ.get("LOWTIDE_PROGRAMS", "10"))
Calls = tuple[tuple[str, tuple[int, ...]], ...]  # (how, blocks) one behind the other


class Block(nn.Sequential):
    def forward(self, x: Tensor, is_dropped: bool = False) -> Tensor:
        return x if is_dropped else x + super().forward(x)


class Model(nn.Module):
    """Makes the calls that it is told to make. ~1 is a call of block 1 that drops it: returns its input itself."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_blocks))
        self.last = nn.Linear(WIDTH, 1)
        self.double()

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
        return self.last(x).square().mean()

    def _run(self, numbers: Sequence[int], x: Tensor) -> Tensor:
        for number in numbers:
            x = self.blocks[max(number, ~number)](x, number < 0)
        return x


@dataclass(frozen=True)
class Microbatch:
    """before, after: calls under no_grad. forwards: calls, and whether the loss is differentiated."""

    forwards: tuple[tuple[Calls, bool], ...]
    before: tuple[Calls, ...] = ()
    after: tuple[Calls, ...] = ()


@dataclass(frozen=True)
class Program:
    """What the ranks run: `steps[step][rank]` are the microbatches."""

    seed: int
    num_blocks: int
    steps: tuple[tuple[tuple[Microbatch, ...], ...], ...]
    zero: dict[str, Any] = field(default_factory=lambda: {"stage": 3})
    transport: str = "sockets"
    every: int = 0
    accumulation: int = 1


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
            found.append(
                (how, tuple(choose.choices(range(-num_blocks // 2, num_blocks), k=choose.randint(0, longest))))
            )
        return tuple(found)

    def microbatch() -> Microbatch:
        before, after = (tuple(calls() for _ in range(choose.choice([0, 0, 0, 1, 2]))) for _ in range(2))
        kept = [True] + [choose.random() < 0.5 for _ in range(choose.choice([0, 0, 1, 2]))]
        choose.shuffle(kept)
        return Microbatch(tuple((calls(), one) for one in kept), before, after)

    def step() -> tuple[tuple[Microbatch, ...], ...]:
        if choose.random() < 0.2:  # all ranks alike
            return (tuple(microbatch() for _ in range(accumulation)),) * world_size
        return tuple(tuple(microbatch() for _ in range(accumulation)) for _ in range(world_size))

    zero = choose.choice([{}, {"stage3_prefetch_bucket_size": 0}, {"stage3_prefetch_bucket_size": 30}])
    every = choose.choice([0, 0, 1]) if hows == ("plain",) else 0
    steps = tuple(step() for _ in range(2))
    stage = choose.choice([3, 3, 3, 3, 2, 1, 0])
    transport = choose.choice(["sockets", "sockets", "sockets", "shared_memory"])
    return Program(seed, num_blocks, steps, {"stage": stage, **zero}, transport, every, accumulation)


ALL = tuple(range(5))
PLANS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [  # of rank 0 and rank 1
    ((0, 1, 1, 2, 0, 3, 4, 4),) * 2,
    (ALL[::-1], ALL),
    (ALL[:-1], ALL),
    (ALL[1:], ALL),
    ((), ALL),
    (ALL, ()),
    (ALL, (0, 1, 2, 3, 0)),  # rank 1 gathers again while block 4 is full on rank 0
    (ALL[:2], ALL[3:]),  # nobody block 2
]


def planned_program(number: int, transport: str) -> Program:
    """Each plan in the second of three steps: momentum must not move what nobody ran in it.

    Over sockets a rank's shards are in a file.
    """

    def step(blocks_of_ranks: Sequence[tuple[int, ...]]) -> tuple[tuple[Microbatch, ...], ...]:
        return tuple((Microbatch((((("plain", blocks),), True),)),) for blocks in blocks_of_ranks)

    steps = (step((ALL, ALL)), step(PLANS[number]), step((ALL, ALL)))
    place = {"offload_param": {"device": "nvme", "nvme_path": gettempdir()}} if transport == "sockets" else {}
    return Program(number, len(ALL), steps, {"stage": 3, **place}, transport)


def data(*numbers: int) -> Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(hash(numbers)))


def config_of(transport: str = "sockets", **config: Any) -> dict[str, Any]:
    return settings(
        3,
        train_micro_batch_size_per_gpu=None,
        optimizer={"type": "sgd", "params": SGD},
        communication={"transport": transport, "timeout_seconds": 10},
        **config,
    )


def train(program: Program) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient norms, and the parameters in the end."""
    torch.manual_seed(program.seed)
    config = config_of(
        program.transport,
        gradient_accumulation_steps=program.accumulation,
        zero_optimization=program.zero,
        activation_checkpointing={"every": program.every},
    )
    norms = []
    with lowtide.initialize(Model(program.num_blocks), config) as engine:

        def evaluate(x: Tensor, forwards: Sequence[Calls]) -> None:
            with torch.no_grad():
                for calls in forwards:
                    engine(x, calls)

        for number, step in enumerate(program.steps):
            for position, microbatch in enumerate(step[engine.rank]):
                x = data(number, engine.rank, position)
                evaluate(x, microbatch.before)
                losses = [(engine(x, calls), is_kept) for calls, is_kept in microbatch.forwards]
                engine.backward(torch.stack([loss for loss, is_kept in losses if is_kept]).sum())
                evaluate(x, microbatch.after)
            norms.append(engine.step().grad_norm.item())
        return norms, engine.state_dict()


def train_all(programs: Sequence[Program]) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for program in programs:
        try:
            found.append(train(program))
        except Exception as error:
            error.add_note(f"program {program}")
            raise
    return found


def train_plainly(program: Program) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(program.seed)
    model = Model(program.num_blocks)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    norms = []
    for number, step in enumerate(program.steps):
        optimizer.zero_grad()
        for rank, microbatches in enumerate(step):
            for position, microbatch in enumerate(microbatches):
                for calls, is_kept in microbatch.forwards:
                    if is_kept:
                        loss = model(data(number, rank, position), calls)
                        (loss / (len(step) * program.accumulation)).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optimizer.step()
    return norms, model.state_dict()


@pytest.mark.parametrize(("world_size", "share"), [(2, 0.8), (4, 0.2)])
def test_ranks_with_any_calls_train_as_one_process(ranks: RankPool, world_size: int, share: float) -> None:
    programs = [random_program(seed, world_size) for seed in range(int(NUM_PROGRAMS * share))]
    if world_size == 2:
        programs += [planned_program(at, ("sockets", "shared_memory")[at % 2]) for at in range(len(PLANS))]
    for first in range(0, len(programs), 100):
        some = programs[first : first + 100]
        for program, (norms, state) in zip(some, ranks(world_size, train_all, some)[0], strict=True):
            expected_norms, expected = train_plainly(program)
            torch.testing.assert_close(norms, expected_norms, rtol=1e-6, atol=1e-12, msg=f"{program}: {{}}".format)
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=f"{program}: {{}}".format)


def batch_of(calls: Calls) -> Iterator[dict[str, Any]]:
    return iter([{"x": data(0), "calls": calls}])


@on_ranks(2)
def test_a_block_that_is_called_again_at_once_stays() -> None:
    """Five gathers of blocks: three in the forward, the first two in the backward. And one of what is beside them."""
    calls, found = (("plain", (0,) * 4 + (1,) * 4 + (2,) * 4),), list[int]()
    exchange = ShardedGroup._exchange
    with (
        mock.patch.object(ShardedGroup, "_exchange", autospec=True, side_effect=exchange) as gathers,
        lowtide.initialize(Model(3), config_of()) as engine,
    ):
        for _ in range(3):
            gathers.reset_mock()
            engine.train_step(batch_of(calls))
            found.append(gathers.call_count)
    assert found[1:] == [6, 6]


@on_ranks(2)
def test_ranks_evaluate_with_any_calls() -> None:
    with lowtide.initialize(Model(3), config_of()) as engine, torch.no_grad():
        for numbers in ((0, 1, 2), (0, 1, 2, 0, 1)), ((2, 0), ()):
            calls = tuple((("plain", one),) for one in numbers)
            expected = torch.stack([engine.eval_step({"x": data(0), "calls": one}) for one in calls]).mean()
            found = engine.eval_step({"x": data(0), "calls": calls[engine.rank]})
            torch.testing.assert_close(found, expected)
            with torch.enable_grad():
                engine.backward(engine(data(0), calls[0]))
            asked: list[Callable[[], object]] = [
                partial(engine.agree, False),
                partial(engine.full, "first.bias"),
                partial(engine.gradient, "first.bias"),
                partial(engine.clip_grad_norm_, 1.0),
            ]
            for ask in asked:
                for _ in range(1 + engine.rank):
                    engine(data(0), calls[engine.rank])
                ask()
            engine.zero_grad()


@pytest.mark.parametrize("dropping", [(0, ~1, ~0, 2), (~0, 0, 2)])
@on_ranks(2)
def test_a_dropped_block_is_not_updated_in_the_backward(dropping: tuple[int, ...]) -> None:
    states = []
    for numbers in (dropping, (0, 2)):
        torch.manual_seed(0)
        with lowtide.initialize(Model(3), config_of(zero_optimization={"update_in_backward": True})) as engine:
            engine.train_step(batch_of((("plain", numbers),)))
            states.append(engine.state_dict())
    assert differences(*states) == []


@on_ranks(2)
def test_units_that_a_checkpoint_needs_together_are_not_updated_one_by_one() -> None:
    config = config_of(zero_optimization={"update_in_backward": True, "stage3_prefetch_bucket_size": 0})
    with lowtide.initialize(Model(3), config) as engine:
        text = refusal(engine.train_step, batch_of((("checkpoint", (0, 1, 2)),)), kind=RuntimeError)
    assert text.startswith("unit 'blocks.2' is updated in the backward: expected all its gradients before")
    assert text.endswith("or switch update_in_backward or offload_optimizer.overlap off")


@on_ranks(2)
def test_a_rank_sends_a_full_group_of_a_unit_that_it_lacks() -> None:
    model = Model(2)
    model.get_parameter("blocks.1.0.weight").requires_grad_(False)
    with lowtide.initialize(model, config_of()) as engine:
        frozen = next(group for group in engine._runner.passes.units[-1].groups if group.plan.role is Role.FROZEN)
        frozen.gather()
        if engine.rank == 0:
            frozen.release()
        calls = (("plain", (0, 1)),)
        losses = [float(engine.train_step(batch_of(calls)).loss) for _ in range(2)]
        assert losses[1] < losses[0]
