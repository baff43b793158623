"""Compares a kernel with float64, and times it beside its peers on a GPU.

[Note: GPU time]
What is measured is the time between two events on the stream. Before the first one, the inputs are restored, a buffer
larger than the second-level cache is read (so that the cache holds none of the inputs, and nothing that must still be
written), and the GPU is kept waiting, so that the host is ahead with its launches and its own time does not show. That
time, of the Python code up to the last launch, is measured too: a step whose kernels are shorter is bound by the host.

[Note: long sums]
A product adds the K terms of an element one after the other in float32. Each sum is rounded, by ulp / sqrt(12) on
average. If the sum is large from a random term on, as that of dhidden is from the term of the label, K / 2 roundings
count: ulp sqrt(K / 24). Five times that, which one element in 2 million exceeds, is sqrt(K) ulp. Measured, in ulps of
the largest element: a loop on a CPU is off by 83 at K = 32,000 (sqrt: 179) and 133 at 128,256 (358), of 2e4 elements;
an H100 by about 100 and 220, of 8e6 and 3e7. Torch's form has the same product, as long. tf32 is off by 1,000 and more.

[Note: loss scale]
float16 has no number below 6e-8. The gradient of a mean loss by a logit is about 1 / (rows x classes), 1e-9 for 8,192 x
128,256: with a gradient of one from above all but the labels' are zero, in torch's form too, and dhidden is off by 1.2
times what is allowed. Nobody trains so: a loss of float16 gets a loss scale, with which it is 0.06 times.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from _harness import Contender, Result, Row
from _kernel_cases import FLOAT32_ROUNDING, Case, Draw, Form, Pass, Size, Tensors, dtype_text, size_text
from torch import Tensor

WARMUP_ROUNDS = 3
FLUSHED_CACHES = 4  # caches' worth of bytes are read to empty one
WAIT_MICROSECONDS = 1000.0  # at least; else twice what the host took
CYCLES_PER_MICROSECOND = 2000  # of a fast clock: a slower one waits longer
LOSS_SCALE = 2.0**12  # of float16, see [Note: loss scale]
FLOAT32_STEPS = 32  # roundings in float32 that a result may have seen, of the size of the largest element


class Problem:
    """A case of one size and dtype: its inputs, and gradients that come from above."""

    def __init__(self, case: Case, size: Size, dtype: torch.dtype, draw: Draw) -> None:
        self.case, self.size, self.dtype = case, size, dtype
        self.pristine = case.draw(size, dtype, draw)
        self.working = {name: tensor.clone() for name, tensor in self.pristine.items()}
        results = case.forms["lowtide"](self.restored(with_gradient=False))
        self.moved = case.moved(self.pristine, results)
        self.upstream = {name: torch.ones_like(results[name]) for name in case.results_with_gradient}
        for tensor in self.upstream.values():
            if tensor.dim():
                tensor.copy_(draw.normal(*tensor.shape))
            elif dtype == torch.float16:  # any other loss keeps its gradient of one
                tensor.fill_(LOSS_SCALE)
        self.pristine_upstream = {name: tensor.clone() for name, tensor in self.upstream.items()}

    def restored(self, with_gradient: bool) -> Tensors:
        """The inputs as they were drawn, leaves of a new graph."""
        for name, tensor in self.working.items():
            tensor.copy_(self.pristine[name])
        detached = {name: tensor.detach() for name, tensor in self.working.items()}
        for name in self.case.inputs_with_gradient if with_gradient else ():
            detached[name].requires_grad_()
        return detached

    def gradients(self, results: Tensors, inputs: Tensors) -> Tensors:
        """Of the inputs that have one, in their dtypes or, of float64 results, in float64."""
        names = self.case.inputs_with_gradient
        upstream = [self.upstream[name].to(results[name].dtype) for name in self.upstream]
        outputs = [results[name] for name in self.upstream]
        found = torch.autograd.grad(outputs, [inputs[name] for name in names], upstream)
        return {f"d{name}": gradient for name, gradient in zip(names, found, strict=True)}

    def prepared(self, form: Form, which: Pass) -> Callable[[], object]:
        """What a pass does, with all that comes before it done."""
        trains = which != "forward" or "backward" in self.case.passes
        inputs = self.restored(trains and bool(self.case.inputs_with_gradient))
        for name, tensor in self.upstream.items():
            tensor.copy_(self.pristine_upstream[name])
        if which == "forward":
            return lambda: form(inputs)
        if which == "both":
            return lambda: self.gradients(form(inputs), inputs)
        results = form(inputs)
        return lambda: self.gradients(results, inputs)


class Checker:
    """The results of a problem in float64, and how far others are off."""

    def __init__(self, problem: Problem) -> None:
        self.problem, case = problem, problem.case
        inputs = self._widened()
        for name in case.inputs_with_gradient:
            inputs[name].requires_grad_()
        self.exact = case.exact(inputs)
        if case.inputs_with_gradient:
            gradients = problem.gradients(self.exact, inputs)
            self.exact = {name: tensor.detach() for name, tensor in (self.exact | gradients).items()}
        self.allowed = case.allowed(self._widened())

    def _widened(self) -> Tensors:
        return {
            name: tensor.double() if tensor.is_floating_point() else tensor.clone()
            for name, tensor in self.problem.pristine.items()
        }

    def errors(self, form: Form, poisoned: bool = False) -> dict[str, float]:
        """Of each result and gradient the largest error, over what it may be: at most 1 where it is right.

        An element may be off by one rounding to its dtype, by FLOAT32_STEPS roundings in float32 of the size of the
        largest element (by more for `Case.summed_dims`, see [Note: long sums]), and by what the case allows.
        poisoned: results are written to memory full of NaN.
        """
        problem, case = self.problem, self.problem.case
        with poisoned_memory() if poisoned else nullcontext():
            inputs = problem.restored(bool(case.inputs_with_gradient))
            results = form(inputs)
            found = case.read({name: tensor.detach() for name, tensor in results.items()})
            if case.inputs_with_gradient:
                found |= problem.gradients(results, inputs)
        return {name: self._error(name, found[name], exact) for name, exact in self.exact.items()}

    def _error(self, name: str, found: Tensor, exact: Tensor) -> float:
        if found.shape != exact.shape:
            return float("inf")
        if not found.is_floating_point():
            return 0.0 if torch.equal(found, exact) else float("inf")
        info, rounding = torch.finfo(found.dtype), torch.finfo(self.problem.dtype).eps
        case = self.problem.case
        terms = self.problem.size[case.summed_dims[name]] if name in case.summed_dims else 0
        steps = FLOAT32_STEPS + math.sqrt(terms)
        relative = case.inner_roundings * rounding + steps * FLOAT32_ROUNDING
        bound = exact.abs().mul_(info.eps).add_(relative * exact.abs().max() + info.smallest_normal * info.eps)
        if name in self.allowed:
            bound += self.allowed[name]
        return float(found.double().sub_(exact).abs_().div_(bound).nan_to_num_(nan=float("inf")).max())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that torch.empty gives is full of NaN: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operations that have no deterministic form
            yield
    finally:
        torch.use_deterministic_algorithms(False)


class Clock:
    """Times work on the current GPU, see [Note: GPU time]."""

    def __init__(self) -> None:
        cache_bytes = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)
        numel = max(FLUSHED_CACHES * cache_bytes, 256 * 2**20) // 4
        self._buffer = torch.ones(numel, device="cuda")
        self._sum = torch.empty((), device="cuda")

    def run(self, work: Callable[[], object], wait_microseconds: float = WAIT_MICROSECONDS) -> tuple[float, float]:
        """Seconds of the GPU, which waits first, and microseconds of the host."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.sum(self._buffer, dim=0, out=self._sum)
        torch.cuda._sleep(int(wait_microseconds * CYCLES_PER_MICROSECOND))
        start.record()
        started = time.perf_counter()
        work()
        host = time.perf_counter() - started
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, host * 1e6

    def copy_bandwidth(self, num_bytes: int = 2**30, rounds: int = 20) -> float:
        """Bytes read plus bytes written a second by torch's copy within the GPU's memory, median."""
        source = torch.ones(num_bytes // 4, device="cuda")
        to = torch.empty_like(source)
        found = [self.run(lambda: to.copy_(source))[0] for _ in range(rounds + WARMUP_ROUNDS)]
        return 2 * num_bytes / statistics.median(found[WARMUP_ROUNDS:])


def time_pass(problem: Problem, which: Pass, forms: Mapping[str, Form], clock: Clock, rounds: int) -> list[Row]:
    """Return a row for each contender. Rounds each run every one once and begin with another; one that fails stops.

    more: "host us", and "bytes" that a pass must move, None where it is not bound by memory.
    """
    case = problem.case
    what = f"{case.name} {size_text(problem.size)} {dtype_text(problem.dtype)} {which}"
    rows = [Row(Contender(f"{what} {kind}", f"{what} {kind}", kind, peer=what)) for kind in forms]
    waits: dict[str, float] = {}
    for row in rows:
        kind = row.contender.kind
        try:
            host = [clock.run(problem.prepared(forms[kind], which))[1] for _ in range(WARMUP_ROUNDS)]
            waits[kind] = max(WAIT_MICROSECONDS, 2 * host[-1])
        except Exception as error:
            row.failure = f"{type(error).__name__}: {error}"
    running = [row for row in rows if row.failure is None]
    for number in range(rounds if running else 0):
        first = number % len(running)
        for row in running[first:] + running[:first]:
            kind = row.contender.kind
            seconds, microseconds = clock.run(problem.prepared(forms[kind], which), waits[kind])
            row.timed[number] = Result([], [seconds], more={"host us": microseconds, "bytes": problem.moved.get(which)})
    return rows
