"""What a launch of each fused layer costs the host, beside the operators of torch that it replaces (`host_time.py`).

The last row has the gradients of a block of 100 small parameters: the engine's hooks beside plain accumulation.

Tensors are a few elements on the CPU, and a stand-in that does nothing takes the place of the compiled kernels: what is
left is Python, autograd and allocations. The CPU computes torch's operators, and no driver starts a kernel.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before kernels are defined: then they are chosen on the CPU too

import torch
from _kernel_cases import CASES, Draw
from torch import Tensor, nn

import lowtide

KERNELS = ("rms_norm", "add_rms_norm", "swiglu", "geglu", "rotary_embedding", "cross_entropy")
FORMS = ("lowtide", "torch")
PASSES = ("forward", "backward")
CALLS = 8  # of a form in a row: few, so that some rows of calls run undisturbed


def nothing(*args: object) -> None:
    """Stand in for the launcher that a driver compiles."""


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Let launches find a compiled kernel that does nothing."""
    compiled = SimpleNamespace(run=nothing, function=None, packed_metadata=None)
    with (
        mock.patch("lowtide.kernels.triton.launch.launch", lambda *args, **kwargs: compiled),
        mock.patch("torch._C._cuda_getDevice", lambda: -1, create=True),
        mock.patch("torch._C._cuda_getCurrentRawStream", abs, create=True),
    ):
        yield


Work = tuple[Callable[[], list[Tensor]], Callable[[list[Tensor]], None]]
"""A forward, and the backward of its results."""


def works() -> dict[str, dict[str, Work]]:
    """Return the passes of each kernel's forms."""
    found: dict[str, dict[str, Work]] = {}
    for name in KERNELS:
        case = CASES[name]
        tensors = case.draw(case.tiny, torch.float32, Draw("cpu", torch.Generator().manual_seed(0)))
        for key in case.inputs_with_gradient:
            tensors[key].requires_grad_()
        found[name] = {form: _work(case, form, tensors) for form in FORMS}
    config = {"optimizer": {"type": "sgd", "params": {"lr": 0.0}}, "gradient_accumulation_steps": 1 << 30}
    engine = lowtide.initialize(Product(), config | {"zero_optimization": {"stage": 0}, "steps_per_print": 0})
    found["100 gradients"] = {"lowtide": _accumulation(engine), "torch": _accumulation(Product())}
    return found


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(100))

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = x * factor
        return x.sum()


def _accumulation(model: Callable[[Tensor], Tensor]) -> Work:
    x = torch.ones(4)
    return lambda: [model(x)], lambda results: results[0].backward()


def _work(case: Any, form: str, tensors: dict[str, Tensor]) -> Work:
    leaves = [tensors[key] for key in case.inputs_with_gradient]

    def forward() -> list[Tensor]:
        results = case.forms[form](tensors)
        return [results[key] for key in case.results_with_gradient]

    gradients = [torch.ones_like(result) for result in forward()]

    def backward(results: list[Tensor]) -> None:
        torch.autograd.grad(results, leaves, gradients)

    return forward, backward


def python_calls(action: Callable[[], object]) -> int:
    """Return how many functions of Python are called."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls - 1  # of the action itself


def measure(num_rounds: int) -> dict[str, dict[str, float]]:
    """Return a row for each kernel: microseconds and calls of both forms. The forms take turns; the least counts."""
    torch.set_num_threads(1)
    with without_kernels():
        return {name: _row(forms, num_rounds) for name, forms in works().items()}


def _row(forms: dict[str, Work], num_rounds: int) -> dict[str, float]:
    least = {(which, form): float("inf") for which in PASSES for form in forms}
    for _ in range(num_rounds):
        gc.collect(0)
        for form, (forward, backward) in forms.items():
            start = time.perf_counter()
            made = [forward() for _ in range(CALLS)]
            middle = time.perf_counter()
            for results in made:
                backward(results)
            for which, taken in zip(PASSES, (middle - start, time.perf_counter() - middle), strict=True):
                least[which, form] = min(least[which, form], 1e6 * taken / CALLS)
    row: dict[str, float] = {}
    for which in PASSES:
        ours, of_torch = least[which, "lowtide"], least[which, "torch"]
        row |= {which: ours, f"torch {which}": of_torch, f"x {which}": ours / of_torch}
    for form, (forward, backward) in forms.items():
        results = forward()
        row[f"{form} calls"] = python_calls(forward) + python_calls(partial(backward, results))
    return row
