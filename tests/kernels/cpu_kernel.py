"""What the tests of the optimizer step share: rules with options, tiers, data, and a shard that any tier updates."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.kernels.cpu_build import BuildError, find_compiler
from lowtide.kernels.dispatch import Backend
from lowtide.kernels.optimizer_states import StoredState, new_states, stored_states
from lowtide.kernels.optimizer_step import CpuKernel, ShardUpdate, update_shards
from lowtide.optimizers import OPTIMIZERS
from lowtide.optimizers.optimizer import Optimizer

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": False}
ADAGRAD: dict[str, Any] = {
    "lr": 0.1,
    "lr_decay": 0.01,
    "weight_decay": 0.01,
    "initial_accumulator_value": 0.2,
    "eps": 1e-8,
}
LION: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}

CASES: dict[str, tuple[Optimizer, dict[str, Any]]] = {
    "adamw": (OPTIMIZERS["adamw"], ADAM),
    "adam": (OPTIMIZERS["adam"], ADAM),
    "sgd": (OPTIMIZERS["sgd"], SGD | {"momentum": 0.0}),
    "sgd with momentum": (OPTIMIZERS["sgd"], SGD),
    "sgd with dampening": (OPTIMIZERS["sgd"], SGD | {"dampening": 0.3}),
    "sgd with nesterov": (OPTIMIZERS["sgd"], SGD | {"nesterov": True}),
    "adagrad": (OPTIMIZERS["adagrad"], ADAGRAD),
    "lion": (OPTIMIZERS["lion"], LION),
}


def _has_compiler() -> bool:
    try:
        return bool(find_compiler())
    except BuildError:
        return False


TIERS: tuple[Backend, ...] = ("auto", "reference", "triton")  # "auto": the C++ kernel, where there is a compiler
Tier = Backend | CpuKernel
needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="there is no C++ compiler")
STATE_DTYPES = [torch.float32, torch.bfloat16, torch.int8]
MARGIN = 300  # elements behind each tensor, which no tier may touch
UNTOUCHED = 77


class Shard:
    """The tensors of one shard. offset: elements before the first one in memory, so that addresses are odd."""

    def __init__(
        self,
        rule: Optimizer,
        options: dict[str, Any],
        weight: Tensor,
        state_dtype: torch.dtype = torch.float32,
        out_dtype: torch.dtype | None = None,
        offset: int = 0,
    ) -> None:
        self.rule = rule
        self.options = options
        self.offset = offset
        self.places: list[Tensor] = []
        self.master = self.moved(weight)
        self.states = {name: self.moved(t) for name, t in new_states(rule, weight, options, state_dtype).items()}
        self.out = None if out_dtype is None else self.moved(torch.full_like(weight, torch.nan, dtype=out_dtype))

    def moved(self, tensor: Tensor) -> Tensor:
        """A copy, `offset` elements behind the start of its memory, and MARGIN before the end."""
        end = self.offset + tensor.numel()
        self.places.append(torch.full((end + MARGIN,), UNTOUCHED, dtype=tensor.dtype))
        return self.places[-1][self.offset : end].copy_(tensor)

    @property
    def stored(self) -> list[StoredState]:
        return stored_states(list(self.states.values()))

    def update(
        self,
        tier: Tier,
        gradient: Tensor,
        step: int,
        scale: float | Tensor = 1.0,
        cuts: Sequence[int] = (),
        runs: Sequence[tuple[int, dict[str, Any]]] = (),
        steps: Sequence[int] = (),
        skip: Tensor | None = None,
    ) -> None:
        """One step, in a call for each stretch that ends at `cuts`. Nothing beside the shard is written."""
        start = 0
        for end in [*cuts, self.master.numel()]:
            part = slice(start, end)
            states = [state.part(start, end) for state in self.stored]
            out = None if self.out is None else self.out[part]
            of_part = runs or [(end - start, self.options)]
            used = gradient[part] if isinstance(tier, CpuKernel) else gradient[part].clone()
            update = ShardUpdate(self.master[part], used, states, of_part, steps or [step] * len(of_part), out)
            update.check()
            if isinstance(tier, CpuKernel):
                assert tier.serves(self.rule, update)
                tier.update(self.rule, update, step, float(scale))
            else:
                update_shards(self.rule, [update], step, scale, skip=skip, backend=tier)
            start = end
        assert all((place[-MARGIN:] == UNTOUCHED).all() for place in self.places)

    def tensors(self) -> dict[str, Tensor]:
        """Everything a step writes."""
        return {"master": self.master, **self.states, **({} if self.out is None else {"out": self.out})}


def in_turn() -> Iterator[tuple[str, Optimizer, dict[str, Any], torch.dtype]]:
    """Name, rule, options, and one of the dtypes of states."""
    for number, (name, (rule, options)) in enumerate(CASES.items()):
        yield name, rule, options, STATE_DTYPES[number % len(STATE_DTYPES)]


def start_values(numel: int, steps: int = 4) -> tuple[Tensor, list[Tensor]]:
    """Weights, and the gradient of each step; gradients are of the sizes that training has, 1e-4 to 10."""
    generator = torch.Generator().manual_seed(numel)
    weight = torch.randn(numel, generator=generator)
    size = 10 ** (torch.rand(numel, generator=generator) * 5 - 4)
    return weight, [torch.randn(numel, generator=generator) * size for _ in range(steps)]


def trained(
    tier: Tier,
    name: str,
    state_dtype: torch.dtype,
    numel: int,
    steps: int = 4,
    offset: int = 0,
    cuts: tuple[int, ...] = (),
    out_dtype: torch.dtype = torch.bfloat16,
) -> Shard:
    """A shard after some steps with gradients in bfloat16 and a scale."""
    weight, gradients = start_values(numel, steps)
    shard = Shard(*CASES[name], weight, state_dtype, out_dtype, offset)
    for step, gradient in enumerate(gradients, start=1):
        shard.update(tier, shard.moved(gradient.bfloat16()), step, scale=1 / 3, cuts=cuts)
    return shard


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, so that -0 is not 0 and a NaN equals itself."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        different = int((bits(one) != bits(other)).sum())
        assert not different, f"tensor {index}: {different} of {one.numel()} elements differ"


def assert_same_bits(found: Shard, expected: Shard) -> None:
    assert_same(list(found.tensors().values()), list(expected.tensors().values()))
