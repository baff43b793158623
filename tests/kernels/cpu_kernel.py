"""What the tests of the CPU optimizer share: rules with options, data, and one run of some steps."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.kernels.cpu_build import BuildError, find_compiler
from lowtide.kernels.optimizer_states import new_states, stored_states
from lowtide.kernels.optimizer_step import CpuKernel, ShardUpdate
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


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="there is no C++ compiler")
STATE_DTYPES = [torch.float32, torch.bfloat16, torch.int8]


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
        self.master = self.moved(weight)
        self.states = {name: self.moved(t) for name, t in new_states(rule, weight, options, state_dtype).items()}
        self.out = None if out_dtype is None else self.moved(torch.full_like(weight, torch.nan, dtype=out_dtype))

    def moved(self, tensor: Tensor) -> Tensor:
        """A copy, `offset` elements behind the start of its memory."""
        place = torch.zeros(tensor.numel() + self.offset, dtype=tensor.dtype)[self.offset :]
        return place.copy_(tensor)

    def update(
        self,
        kernel: CpuKernel,
        gradient: Tensor,
        step: int,
        scale: float = 1.0,
        cuts: Sequence[int] = (),
        runs: Sequence[tuple[int, dict[str, Any]]] = (),
    ) -> None:
        """One step by the C++ kernel, in a call for each stretch that ends at `cuts`."""
        stored = stored_states(list(self.states.values()))
        start = 0
        for end in [*cuts, self.master.numel()]:
            part = slice(start, end)
            states = [state.part(start, end) for state in stored]
            out = None if self.out is None else self.out[part]
            of_part, steps = runs or [(end - start, self.options)], [step] * max(len(runs), 1)
            update = ShardUpdate(self.master[part], gradient[part], states, of_part, steps, out)
            assert kernel.serves(self.rule, update)
            kernel.update(self.rule, update, step, scale)
            start = end

    def tensors(self) -> dict[str, Tensor]:
        """Everything a step writes."""
        return {"master": self.master, **self.states, **({} if self.out is None else {"out": self.out})}


def start_values(numel: int, steps: int = 4) -> tuple[Tensor, list[Tensor]]:
    """Weights, and the gradient of each step; gradients are of the sizes that training has, 1e-4 to 10."""
    generator = torch.Generator().manual_seed(numel)
    weight = torch.randn(numel, generator=generator)
    size = 10 ** (torch.rand(numel, generator=generator) * 5 - 4)
    return weight, [torch.randn(numel, generator=generator) * size for _ in range(steps)]


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, so that -0 is not 0 and a NaN equals itself."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(found: Shard, expected: Shard) -> None:
    for name, tensor in expected.tensors().items():
        different = int((bits(found.tensors()[name]) != bits(tensor)).sum())
        assert not different, f"{name}: {different} of {tensor.numel()} elements differ"
