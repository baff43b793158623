"""Ranks that run different blocks train together: a block that some left out counts there with a gradient of zero, and
one that all left out stays as it was."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from tests.kit.ranks import RankPool

NUM_BLOCKS = 5
WIDTH = 12
STEPS = 3
LR, MOMENTUM = 0.2, 0.9
ROUTES = ["shared_memory", "sockets"]
Plan = tuple[int, ...]  # the blocks that a forward runs, in that order


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Router(nn.Module):
    """Runs the blocks that it is told to run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        x = self.first(x)
        for index in plan:
            x = self.blocks[index](x)
        result: Tensor = self.last(x).square().mean()
        return result


@dataclass(frozen=True)
class Case:
    """What runs where, and with which settings."""

    name: str
    plan: str
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    checkpoint_every: int = 0
    same_on_all_ranks: bool = False
    timeout_seconds: float = 20


def plan_of(case: Case, step: int, rank: int, microbatch: int) -> Plan:
    """The blocks that `rank` runs."""
    everything = tuple(range(NUM_BLOCKS))
    rank = 0 if case.same_on_all_ranks else rank
    generator = random.Random(f"{step} {rank} {microbatch}")
    plans = {
        "all": everything,
        "random": tuple(index for index in everything if generator.random() < 0.5),
        "one left out": tuple(index for index in everything if index != generator.randrange(NUM_BLOCKS)),
        "early exit": everything[: generator.randint(0, NUM_BLOCKS)],
        "late start": everything[generator.randint(0, NUM_BLOCKS) :],
        "twice": (0, 1, 1, 2, 0, 3, 4, 4),
        "reversed": everything[::-1],
        "shuffled": tuple(generator.sample(everything, generator.randint(1, NUM_BLOCKS))),
        "rank 0 without the last": everything[:-1] if rank == 0 else everything,
        "rank 0 without the first": everything[1:] if rank == 0 else everything,
        "rank 0 without any": () if rank == 0 else everything,
        "only rank 0": everything if rank == 0 else (),
        "nobody the last": everything[:-1],
        "anything": tuple(generator.choices(everything, k=generator.randint(0, 8))),
    }
    return plans[case.plan]


PLANS = [
    *("all", "random", "one left out", "early exit", "late start", "twice", "reversed", "shuffled"),
    *("rank 0 without the last", "rank 0 without the first", "rank 0 without any", "only rank 0", "nobody the last"),
    "anything",
]
CASES = [
    *(Case(plan, plan) for plan in PLANS),
    *(Case(f"{plan}, no prefetch", plan, zero={"stage3_prefetch_bucket_size": 0}) for plan in ("random", "anything")),
    Case("short prefetch", "anything", zero={"stage3_prefetch_bucket_size": 5000}),
    Case("accumulated", "random", accumulation=3),
    Case("recomputed", "anything", checkpoint_every=1),
    *(
        Case(f"{plan} at stage {stage}", plan, 2, zero={"stage": stage})
        for stage, plan in ((0, "anything"), (1, "random"), (2, "anything"))
    ),
    Case("all alike", "anything", same_on_all_ranks=True),
]


def data(step: int, rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + microbatch)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def build() -> Router:
    torch.manual_seed(0)
    return Router().double()


def train(case: Case, transport: str) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient norms and final parameters, by lowtide."""
    config = {
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": {"type": "sgd", "params": {"lr": LR, "momentum": MOMENTUM}},
        "zero_optimization": {"stage": 3} | case.zero,
        "activation_checkpointing": {"every": case.checkpoint_every},
        "communication": {"transport": transport, "timeout_seconds": case.timeout_seconds},
        "steps_per_print": 0,
    }
    engine = lowtide.initialize(build(), config)
    rank = dist.get_rank()

    def batches(step: int) -> Iterator[dict[str, Any]]:
        for microbatch in range(case.accumulation):
            yield {"x": data(step, rank, microbatch), "plan": plan_of(case, step, rank, microbatch)}

    norms = [engine.train_step(batches(step)).grad_norm.item() for step in range(STEPS)]
    state = engine.state_dict()
    engine.close()
    return norms, state


def train_all(cases: Sequence[Case], transport: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train(case, transport) for case in cases]


def _added(total: Tensor | None, new: Tensor | None) -> Tensor | None:
    return total if new is None else new if total is None else total + new


def train_plainly(case: Case, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process: gradients are the mean over ranks and microbatches, zero where a block did not run.

    A block that did not run at all has none, and momentum does not move it.
    """
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    norms = []
    for step in range(STEPS):
        sums: list[Tensor | None] = [None for _ in model.parameters()]
        for rank in range(world_size):
            for microbatch in range(case.accumulation):
                loss = model(data(step, rank, microbatch), plan_of(case, step, rank, microbatch))
                found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
                sums = [_added(total, new) for total, new in zip(sums, found, strict=True)]
        for param, total in zip(model.parameters(), sums, strict=True):
            param.grad = None if total is None else total / (world_size * case.accumulation)
        norms.append(
            torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm().item()
        )
        optimizer.step()
    return norms, model.state_dict()


@pytest.mark.parametrize(
    ("transport", "world_size", "cases"),
    [
        ("sockets", 2, CASES),
        ("shared_memory", 2, CASES[::4]),
        ("sockets", 4, CASES[1::8]),
    ],
    ids=["sockets", "shared memory", "sockets of 4"],
)
def test_skipped_blocks_count_as_zero_gradients(
    ranks: RankPool, transport: str, world_size: int, cases: list[Case]
) -> None:
    found = ranks(world_size, train_all, cases, transport)[0]
    for case, (norms, state) in zip(cases, found, strict=True):
        expected_norms, expected = train_plainly(case, world_size)
        torch.testing.assert_close(norms, expected_norms, rtol=1e-10, atol=1e-12, msg=f"{case.name}: {{}}".format)
        for name, value in expected.items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-9, atol=1e-12, msg=f"{case.name}, {name}: {{}}".format
            )


def test_the_ranks_of_these_cases_really_differ() -> None:
    differing = ("random", "early exit", "late start", "shuffled", "anything")
    for case in CASES:
        plans = {plan_of(case, step, rank, 0) for rank in range(2) for step in range(1)}
        assert case.same_on_all_ranks or case.plan not in differing or len(plans) == 2, case.name
