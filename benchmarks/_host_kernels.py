"""What a launch of each fused layer costs the host, beside the operators of torch that it replaces (`host_time.py`).

Tensors are a few elements on the CPU, and a stand-in that does nothing takes the place of the compiled kernels: what is
left is Python, autograd and allocations. The CPU computes torch's operators, and no driver starts a kernel.
"""

from __future__ import annotations

import contextlib
import cProfile
import os
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before kernels are defined: then they are chosen on the CPU too

import torch
from _kernel_cases import CASES, Case, Draw
from torch import Tensor

KERNELS = ("rms_norm", "add_rms_norm", "swiglu", "geglu", "rotary_embedding", "cross_entropy")
FORMS = ("lowtide", "torch")


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Let launches find a compiled kernel that does nothing."""
    compiled = SimpleNamespace(run=lambda *args: None, function=None, packed_metadata=None)
    with (
        mock.patch("lowtide.kernels.triton.launch.launch", lambda *args, **kwargs: compiled),
        mock.patch("torch._C._cuda_getDevice", lambda: -1, create=True),
        mock.patch("torch._C._cuda_getCurrentRawStream", abs, create=True),
    ):
        yield


def steps() -> dict[str, list[Callable[[], object]]]:
    """Return of each kernel the forwards of both forms, and their backwards."""
    found: dict[str, list[Callable[[], object]]] = {}
    for name in KERNELS:
        case = CASES[name]
        tensors = case.draw(case.tiny, torch.float32, Draw("cpu", torch.Generator().manual_seed(0)))
        for key in case.inputs_with_gradient:
            tensors[key].requires_grad_()
        forwards = [partial(forward, case, form, tensors) for form in FORMS]
        found[name] = [*forwards, *(backward(case, forward, tensors) for forward in forwards)]
    return found


def forward(case: Case, form: str, tensors: dict[str, Tensor]) -> list[Tensor]:
    results = case.forms[form](tensors)
    return [results[key] for key in case.results_with_gradient]


def backward(case: Case, forward: Callable[[], list[Tensor]], tensors: dict[str, Tensor]) -> Callable[[], object]:
    """Return the backward of one forward, which can be repeated."""
    results, leaves = forward(), [tensors[key] for key in case.inputs_with_gradient]
    gradients = [torch.ones_like(result) for result in results]
    return partial(torch.autograd.grad, results, leaves, gradients, retain_graph=True)


def python_calls(action: Callable[[], object]) -> int:
    """Return how many functions of Python are called."""
    profile = cProfile.Profile(builtins=False)
    profile.runcall(action)
    return sum(entry.callcount for entry in profile.getstats()) - 1  # of the action itself


def row_of_kernel(steps: list[Callable[[], object]], milliseconds: list[float]) -> dict[str, float]:
    """Return microseconds of both passes and forms, ours over torch's, and calls in Python. Of `steps`."""
    row: dict[str, float] = {}
    for which, (ours, of_torch) in {"forward": milliseconds[:2], "backward": milliseconds[2:]}.items():
        row |= {which: 1e3 * ours, f"torch {which}": 1e3 * of_torch, f"x {which}": ours / of_torch}
    for number, form in enumerate(FORMS):
        row[f"{form} calls"] = sum(map(python_calls, steps[number::2]))
    return row
