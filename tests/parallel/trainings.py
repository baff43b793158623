"""Trainings that ranks share, beside those of one process."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD as torch_sgd
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, assert_close, settings, train_all, train_plainly
from tests.parallel import models_of_others as others

# A loss of transformers is computed in float32; for the same reason the optimizer is one that is linear.
TOLERANCE = 1e-6
SGD: dict[str, Any] = {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}}
TENSOR: dict[str, Any] = {"parallel": {"tensor": 2}}
PARTS: dict[str, Any] = {"parallel": {"tensor": 2, "tensor_sequence": True}}  # nine tokens, which two do not divide
EXPERT: dict[str, Any] = {"parallel": {"expert": 2}}
SOCKETS: dict[str, Any] = {"communication": {"transport": "sockets"}}
AGAIN: dict[str, Any] = {"activation_checkpointing": {"every": 1}}
Row = tuple[Case, int, dict[str, Any]]  # with its stage, data-parallel ranks, config


def case_of(build: Callable[[], nn.Module], stage: int = 0, batch: Any = others.tokens, accumulation: int = 1) -> Case:
    return Case(build, batch, stage, accumulation, clip=0.5, steps=2, config={"optimizer": SGD})


@cache
def expected_of(build: Callable[[], nn.Module], batch: Any, accumulation: int, clip: float, size: int) -> Outcome:
    """In one process, by torch alone."""
    case = Case(build, batch, 0, accumulation, steps=2, clip=clip)
    return train_plainly(case, size, partial(torch_sgd, lr=0.1, momentum=0.9), num_parts=accumulation)


def check(ranks: RankPool, num_ranks: int, rows: Sequence[Row], tolerance: float = TOLERANCE) -> None:
    """They train as one process does: losses, norms, and parameters in the end."""
    cases = [case.at(case.stage, config=config) for case, _, config in rows]
    outcomes = ranks(num_ranks, train_all, cases, timeout=240)[0]
    for (case, size, _), split, outcome in zip(rows, cases, outcomes, strict=True):
        expected = expected_of(case.build, case.batch, case.accumulation, case.clip, size)
        assert_close(outcome, expected, tolerance, tolerance, str(split))


def values_after(engine: lowtide.Engine, batch: Any, evaluated: Any = None) -> dict[str, Tensor]:
    """Loss and norm of a step, the loss of an evaluation, and the values in the end; it closes the engine."""
    done = engine.train_step(batch)
    found = {"loss": done.loss, "norm": done.grad_norm}
    if evaluated is not None:
        found["evaluated"] = engine.eval_step(evaluated)
    found |= engine.state_dict()
    engine.close()
    return {key: value.detach().clone() for key, value in found.items()}


def apart(found: dict[str, Tensor], right: dict[str, Tensor], relative: float = 1e-6) -> list[str]:
    """What is not the same but for rounding."""
    wrong = []
    for key, value in found.items():
        error, norm = (value - right[key]).norm(), right[key].norm()
        if error > relative * norm + 2e-7:
            wrong.append(f"{key}: {error:.1e} of {norm:.1e}")
    return wrong


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation has made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor) and not one.is_meta and not func.is_view:
                self.numel = max(self.numel, one.numel())
        return made


class Mixer(nn.Module):
    """A block whose split layers are its own, with dropout between and beside them."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 64), nn.Linear(64, 8)
        self.inner, self.outer = nn.Dropout(rate), nn.Dropout(rate)

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        result: Tensor = x + self.outer(self.down(self.inner(self.up(self.norm(x)) + 100)) + 100)
        return result


class Stacked(nn.Module):
    """Blocks first to last, on (rows, tokens, 8)."""

    def __init__(
        self, *blocks: nn.Module, between: Any = None, before: Any = None, first: int = 0, last: int = 2
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.before, self.between = before or (lambda x: x), between or (lambda x: x)
        self.ran = slice(first, last)

    def forward(self, x: Tensor) -> Tensor:
        beside, x = x + 1, self.before(x)
        for block in self.blocks[self.ran]:
            x = self.between(block(x, beside))
        return x.square().mean()


class Penalized(Stacked):
    """With the slope at its input in the loss."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            loss = super().forward(x)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + slope.square().sum()


def penalized() -> nn.Module:
    return Penalized(Mixer(), Mixer()).double()


def vectors(step: int, rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 6, 8, generator=torch.Generator().manual_seed(step)).double(),)


def dropping(rate: float = 0.5) -> Any:
    return Stacked(Mixer(rate), Mixer(rate))


def mixed(length: int = 6, rows: int = 2) -> Tensor:
    """A batch of blocks in a stack."""
    return torch.randn(rows, length, 8, generator=torch.Generator().manual_seed(1))


def split_config(parallel: dict[str, Any] = TENSOR["parallel"], **more: Any) -> dict[str, Any]:
    return settings(optimizer={"type": "sgd"}, parallel=parallel, **more)
