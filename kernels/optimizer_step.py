"""One optimizer step on a flat shard: unscale, clip, update and cast in one pass over memory.

Three tiers behind one function. On a GPU, a Triton kernel (`triton/optimizer_step.py`), and on the CPU, a C++ kernel
(`CpuKernel`), read and write each element once. Where there is neither, and for float64, torch's fused kernels
run chunk by chunk: each chunk is small enough to stay in the cache between unscaling, update and cast. That tier is the
specification of the others. All are elementwise (8-bit states: blockwise): what they do to an element does not depend
on where it lies, so a shard may be any piece of the model.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ..optimizers.optimizer import MAX_COEFFICIENTS, Optimizer, Options
from .cpu_build import NATIVE, load_library, made_as_wanted
from .dispatch import Backend, triton_form, uses_triton
from .optimizer_states import STATE_BLOCK_NUMEL, StoredState, other_noise, rounding_noise, step_seed, stored_states
from .weight_rounding import Rounding, rounded_weights, split_weights, step_key, with_remainder

KERNEL = "optimizer_step"
CHUNK_NUMEL = 1 << 18  # 1 MiB of float32 a stream: weight, gradient and two moments fit into a second-level cache
LAUNCH_NUMEL = 1 << 26  # elements: half a millisecond, and what follows an update (the others get it) begins so soon
# As cpu_optimizer.cpp has them.
_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4, torch.uint8: 4}


@dataclass(slots=True, eq=False)
class ShardUpdate:
    """A shard, and what its update needs; see `update_runs`. No runs: there is nothing of a parameter in it.

    A shard may keep its own from step to step, and put the gradient, runs and steps of the next one in their place.
    """

    master: Tensor
    gradient: Tensor
    states: Sequence[StoredState]
    runs: Sequence[tuple[int, Options]]
    steps: Sequence[int]
    out: Tensor | None
    rounding: Rounding | None = None  # of master weights in bfloat16: at random
    remainder: Tensor | None = None  # (n,) what master weights in bfloat16 lack: bfloat16, or int8 beside a rounding
    numel: int = field(init=False)
    kind: Hashable = field(init=False)
    """Shards that agree in it can be updated by one launch, or none of them can."""

    def __post_init__(self) -> None:
        self.numel = self.master.numel()
        of_tensors = [(tensor.dtype, tensor.is_contiguous()) for tensor in self.tensors]
        is_absent = [one is None for one in (self.out, self.rounding, self.remainder)]
        self.kind = (self.master.device, *is_absent, *of_tensors)

    @property
    def is_used(self) -> bool:
        """Whether there is anything to update."""
        return bool(self.runs) and self.numel > 0

    @property
    def tensors(self) -> list[Tensor]:
        found: list[Tensor | None] = [self.master, self.gradient, self.out, self.remainder]
        for state in self.states:
            found += state.payload, state.scale
        return [tensor for tensor in found if tensor is not None]

    def part(self, start: int, end: int) -> ShardUpdate:
        """The tensors of elements start to end, start a multiple of 256; with the runs of the whole."""
        return replace(
            self,
            master=self.master[start:end],
            gradient=self.gradient[start:end],
            states=[state.part(start, end) for state in self.states],
            out=None if self.out is None else self.out[start:end],
            rounding=None if self.rounding is None else self.rounding.at(start),
            remainder=None if self.remainder is None else self.remainder[start:end],
        )

    def check(self) -> None:
        """Raises ValueError where the tensors, the runs and the steps do not fit together."""
        numel, shape = self.numel, self.master.shape
        if len(shape) != 1 or not self.master.is_floating_point():
            raise ValueError(f"{KERNEL}: expected floating-point master (n,), found {tuple(shape)} {self.master.dtype}")
        for name, tensor in (("gradient", self.gradient), ("out", self.out)):
            if tensor is not None and (tensor.shape != shape or not tensor.is_floating_point()):
                raise ValueError(
                    f"{KERNEL}: expected floating-point {name} ({numel},) like master, found {tuple(tensor.shape)} "
                    f"{tensor.dtype}"
                )
        remainder, expected = self.remainder, torch.bfloat16 if self.rounding is None else torch.int8
        if remainder is not None and (remainder.shape != shape or remainder.dtype != expected):
            raise ValueError(
                f"{KERNEL}: expected remainder ({numel},) {expected} like master, found {tuple(remainder.shape)} "
                f"{remainder.dtype}"
            )
        for index, state in enumerate(self.states):
            num_blocks = -(-numel // STATE_BLOCK_NUMEL)
            if state.payload.shape != shape or (state.scale is not None and state.scale.shape != (num_blocks,)):
                scale = None if state.scale is None else tuple(state.scale.shape)
                raise ValueError(
                    f"{KERNEL}: expected state {index} ({numel},) like master, and the scale of an 8-bit state "
                    f"({num_blocks},); found {tuple(state.payload.shape)}, scale {scale}"
                )
        ends = [0, *(end for end, _ in self.runs)]
        if self.runs and (ends[-1] != numel or ends != sorted(ends)):
            raise ValueError(f"{KERNEL}: expected ends of runs that ascend to {numel}, found {ends[1:]}")
        if len(self.steps) != len(self.runs):
            raise ValueError(f"{KERNEL}: expected a step of each of the {len(self.runs)} runs, found {len(self.steps)}")


def update_shard(
    optimizer: Optimizer,
    master: Tensor,
    gradient: Tensor,
    states: Sequence[Tensor],
    step: int,
    options: Options,
    gradient_scale: float | Tensor,
    out: Tensor | None,
    *,
    skip: Tensor | None = None,
    rounding: Rounding | None = None,
    remainder: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """master, states = optimizer(master, gradient_scale * gradient); out = master in the dtype of out.

    master: (n,) any float dtype; gradient: (n,) any float dtype, used up; states: as `new_states` orders them;
    out: (n,) or None where the parameters are the master weights themselves.
    rounding, remainder: of master weights in bfloat16, which are rounded at random, or have a second part, (n,)
    bfloat16, or both, and that part is int8; without either to the nearest. See `weight_rounding.py`.
    gradient_scale, skip: tensors of one element, on the device of master, which are read there, so that the host need
    not wait; where skip is not 0, nothing changes.
    Raises ValueError where tensors do not fit together, or the backend is not possible.
    """
    runs = [(master.numel(), options)]
    update_runs(
        optimizer, master, gradient, states, step, runs, gradient_scale, out,
        skip=skip, rounding=rounding, remainder=remainder, backend=backend,
    )  # fmt: skip


def update_runs(
    optimizer: Optimizer,
    master: Tensor,
    gradient: Tensor,
    states: Sequence[Tensor],
    step: int,
    runs: Sequence[tuple[int, Options]],
    gradient_scale: float | Tensor,
    out: Tensor | None,
    *,
    steps: Sequence[int] = (),
    skip: Tensor | None = None,
    rounding: Rounding | None = None,
    remainder: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """As `update_shard`, where stretches of the shard have options of their own.

    runs: (end, options) of each stretch, ascending; the last ends at n. steps: of each stretch, where they differ: how
    often it was updated, with this time; 0: its gradient is zero, and it stays as it is. 8-bit states lie in blocks of
    256 elements from the start of the tensors, whatever stretches there are, so a shard with such states is updated as
    a whole, or cut where a block begins. A GPU's kernel gets what steps and options come to as numbers: captured into
    a CUDA graph, it would repeat this step.
    """
    of_runs = steps or [step] * len(runs)
    shard = ShardUpdate(master, gradient, stored_states(states), runs, of_runs, out, rounding, remainder)
    shard.check()
    assert len(shard.states) <= len(optimizer.states), (optimizer.name, len(shard.states))
    _check_scalar("gradient_scale", gradient_scale, master)
    _check_scalar("skip", skip, master)
    update_shards(optimizer, [shard], step, gradient_scale, skip=skip, backend=backend)


def update_shards(
    optimizer: Optimizer,
    shards: Sequence[ShardUpdate],
    step: int,
    gradient_scale: float | Tensor,
    *,
    skip: Tensor | None = None,
    backend: Backend = "auto",
    on_updated: Callable[[int], None] = lambda number: None,
) -> None:
    """As `update_runs`, of many shards: on a GPU those of a kind in one launch, as far as it has 64M elements.

    Whether the tensors of a shard fit together is not looked at: each step comes here with those that it was made with.
    on_updated: told the number of each shard that was updated, in an order that follows from kinds and lengths alone.
    """
    serves: dict[Hashable, bool] = {}
    waiting: dict[Hashable, list[int]] = {}
    num_waiting: dict[Hashable, int] = {}  # elements

    def launch(kind: Hashable) -> None:
        numbers = waiting.pop(kind)
        if used := [shards[number] for number in numbers if shards[number].is_used]:
            triton_form("optimizer_step").update(optimizer, used, step, gradient_scale, skip)
        for number in numbers:
            on_updated(number)

    for number, shard in enumerate(shards):
        kind = shard.kind
        if kind not in serves:
            serves[kind] = _triton_serves(backend, optimizer, shard)
        if not serves[kind]:
            if shard.is_used:
                _update_alone(optimizer, shard, step, gradient_scale, skip, backend)
            on_updated(number)
            continue
        if kind not in waiting:
            waiting[kind], num_waiting[kind] = [], 0
        waiting[kind].append(number)
        num_waiting[kind] += shard.numel
        if num_waiting[kind] >= LAUNCH_NUMEL:
            launch(kind)
    for kind in list(waiting):
        launch(kind)


def _update_alone(
    optimizer: Optimizer,
    shard: ShardUpdate,
    step: int,
    gradient_scale: float | Tensor,
    skip: Tensor | None,
    backend: Backend,
) -> None:
    """On the CPU, or by torch."""
    if skip is not None and skip.device.type == "cpu":
        if bool(skip):
            return
        skip = None
    kernel = cpu_kernel() if shard.master.device.type == "cpu" and backend != "reference" else None
    if kernel is not None and kernel.serves(optimizer, shard):
        kernel.update(optimizer, shard, step, float(gradient_scale))
        return
    _update_by_torch(optimizer, shard, step, gradient_scale, skip)


def _triton_serves(backend: Backend, optimizer: Optimizer, shard: ShardUpdate) -> bool:
    """Raises ValueError where the backend must be Triton's and cannot."""
    tensors = shard.tensors
    if not uses_triton(backend, KERNEL, *tensors):
        return False
    if optimizer.coefficients is None:
        problem = f'the optimizer "{optimizer.name}", which has no kernel'
    elif not all(map(Tensor.is_contiguous, tensors)):
        problem = "tensors with gaps between their elements"
    elif torch.float16 in [state.payload.dtype for state in shard.states]:
        problem = "states of torch.float16"
    else:
        return True
    if backend == "triton":
        raise ValueError(f'{KERNEL}: backend "triton" does not take {problem}; use "auto"')
    return False


def _check_scalar(name: str, value: float | Tensor | None, master: Tensor) -> None:
    if isinstance(value, Tensor) and (value.numel() != 1 or value.device != master.device):
        raise ValueError(
            f"{KERNEL}: expected {name} of one element on {master.device}, where master is, found "
            f"{tuple(value.shape)} on {value.device}"
        )


def _update_by_torch(
    optimizer: Optimizer, shard: ShardUpdate, step: int, gradient_scale: float | Tensor, skip: Tensor | None
) -> None:
    """skip: on another device than the CPU, where the host would wait for it."""
    # Where torch keeps no step, a formula asks for it on the host, if at all.
    device = shard.master.device if optimizer.keeps_step else torch.device("cpu")
    step_tensors = {one: torch.full((), float(one), device=device) for one in shard.steps if one}
    starts = [0, *(end for end, _ in shard.runs)]
    for first in range(0, shard.numel, CHUNK_NUMEL):
        last = min(first + CHUNK_NUMEL, shard.numel)
        inside = [
            (max(start, first) - first, min(end, last) - first, options, step_tensors[of_run])
            for start, (end, options), of_run in zip(starts, shard.runs, shard.steps, strict=False)
            if start < last and end > first and of_run
        ]
        chunk = shard.part(first, last)
        changed = [tensor for tensor in chunk.tensors if skip is not None and tensor is not chunk.gradient]
        old = [tensor.clone() for tensor in changed]
        _update_chunk(optimizer, chunk, step, inside, gradient_scale)
        if skip is not None:
            for tensor, before in zip(changed, old, strict=True):
                tensor.copy_(torch.where(skip != 0, before, tensor))


def _update_chunk(
    optimizer: Optimizer,
    chunk: ShardUpdate,
    step: int,
    runs: Sequence[tuple[int, int, Options, Tensor]],
    gradient_scale: float | Tensor,
) -> None:
    """runs: (start, end, options, step) within the chunk."""
    if chunk.remainder is not None:
        weight = with_remainder(chunk.master, chunk.remainder)
    else:
        weight = chunk.master.to(torch.promote_types(chunk.master.dtype, torch.float32))  # itself, where it is wide
    before = weight if chunk.remainder is None else weight.clone()
    gradient = chunk.gradient.to(weight.dtype)
    if isinstance(gradient_scale, Tensor):
        gradient = gradient * gradient_scale.reshape(()).to(gradient.dtype)
    elif gradient_scale != 1.0:
        gradient = gradient * gradient_scale
    noise = None
    if chunk.rounding is not None:
        noise = chunk.rounding.noise(chunk.numel, step, weight.device)
    elif any(state.is_narrow for state in chunk.states):
        noise = rounding_noise(gradient, weight, step)
    wide = [state.widened() for state in chunk.states]
    for start, end, options, of_run in runs:
        part = slice(start, end)
        optimizer.apply(weight[part], gradient[part], [state[part] for state in wide], of_run, options)
    _store_weight(chunk, weight, before, noise)
    if noise is not None:
        for state, values in zip(chunk.states, wide, strict=True):
            if state.is_narrow:
                state.narrow(values, noise)
            noise = other_noise(noise)


def _store_weight(chunk: ShardUpdate, weight: Tensor, before: Tensor, noise: Tensor | None) -> None:
    """weight: (n,) the updated master weights, those of the chunk itself where these are wide. before: as they were."""
    if noise is not None and chunk.rounding is not None and chunk.remainder is not None:
        for place, part in zip((chunk.master, chunk.remainder), split_weights(weight, noise), strict=True):
            place.copy_(part)
    elif noise is not None and chunk.rounding is not None:
        chunk.master.copy_(rounded_weights(weight, noise))
    elif chunk.remainder is not None:  # what has not changed stays as it is: a sum between two values has two forms
        nearest = torch.where(weight == before, chunk.master, weight.to(chunk.master.dtype))
        chunk.remainder.copy_(torch.where(weight == before, chunk.remainder, weight - nearest))
        chunk.master.copy_(nearest)
    elif weight is not chunk.master:
        chunk.master.copy_(weight)
    if chunk.out is not None:
        chunk.out.copy_(chunk.master)


# -- on the CPU, by C++ -----------------------------------------------------------------------------------------------


class _Job(ctypes.Structure):
    """The struct of the same name in cpu_optimizer.cpp."""

    _fields_ = (
        ("master", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("states", ctypes.c_void_p * 2),
        ("scales", ctypes.c_void_p * 2),
        ("remainder", ctypes.c_void_p),
        ("run_ends", ctypes.POINTER(ctypes.c_int64)),
        ("coefficients", ctypes.POINTER(ctypes.c_float)),
        ("n", ctypes.c_int64),
        ("next_task", ctypes.c_int64),
        ("first", ctypes.c_uint64),
        ("rule", ctypes.c_int32),
        ("master_kind", ctypes.c_int32),
        ("gradient_kind", ctypes.c_int32),
        ("out_kind", ctypes.c_int32),
        ("state_kind", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("is_drawn", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("key", ctypes.c_uint32 * 2),
        ("gradient_scale", ctypes.c_float),
    )


class CpuKernel:
    """The C++ form, one pass over memory; `cpu_optimizer.cpp` says how it computes."""

    def __init__(self, flags: Sequence[str] = NATIVE) -> None:
        """flags: which instructions the compiler may use. Raises BuildError."""
        library = load_library(Path(__file__).with_name("cpu_optimizer.cpp"), flags)
        self._step = library.lowtide_optimizer_step
        self._step.argtypes = [ctypes.POINTER(_Job)]
        self._step.restype = None
        library.lowtide_rule.argtypes = [ctypes.c_char_p, ctypes.c_int32]
        library.lowtide_rule.restype = ctypes.c_int32
        self._rule = functools.cache(lambda name, num_states: int(library.lowtide_rule(name.encode(), num_states)))

    def serves(self, optimizer: Optimizer, shard: ShardUpdate) -> bool:
        """Whether this kernel has the optimizer for such tensors: all contiguous, on the CPU.

        Master weights are float32; or bfloat16, where it is said how these are rounded.
        """
        master, out = shard.master, shard.out
        if optimizer.coefficients is None or self._rule(optimizer.name, len(shard.states)) < 0:
            return False
        if shard.rounding is not None or shard.remainder is not None:
            if master.dtype != torch.bfloat16 or out is not None:
                return False
        elif master.dtype != torch.float32:
            return False
        beside = shard.remainder if out is None else out
        tensors = [master, shard.gradient, *(state.payload for state in shard.states)]
        tensors += [] if beside is None else [beside]
        return (
            all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
            and shard.gradient.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and all(
                state.payload.dtype in (torch.float32, torch.bfloat16) or state.scale is not None
                for state in shard.states
            )
            and (out is None or out.dtype in (torch.bfloat16, torch.float16))
        )

    def update(self, optimizer: Optimizer, shard: ShardUpdate, step: int, gradient_scale: float) -> None:
        """As `update_runs`, for what it `serves`; the gradient is only read."""
        master, gradient, states, out = shard.master, shard.gradient, shard.states, shard.out
        runs, steps, rounding, remainder = shard.runs, shard.steps, shard.rounding, shard.remainder
        ends = (ctypes.c_int64 * len(runs))(*(end for end, _ in runs))
        values = (ctypes.c_float * (MAX_COEFFICIENTS * len(runs)))()
        for index, ((_, options), step_of_run) in enumerate(zip(runs, steps, strict=True)):
            of_run = optimizer.coefficients_at(options, step_of_run)
            values[index * MAX_COEFFICIENTS : index * MAX_COEFFICIENTS + len(of_run)] = list(of_run)
        job = _Job(
            master=master.data_ptr(),
            gradient=gradient.data_ptr(),
            out=None if out is None else out.data_ptr(),
            states=(ctypes.c_void_p * 2)(*(state.payload.data_ptr() for state in states)),
            scales=(ctypes.c_void_p * 2)(*(None if s.scale is None else s.scale.data_ptr() for s in states)),
            remainder=None if remainder is None else remainder.data_ptr(),
            run_ends=ends,
            coefficients=values,
            n=master.numel(),
            rule=self._rule(optimizer.name, len(states)),
            master_kind=_KINDS[master.dtype],
            gradient_kind=_KINDS[gradient.dtype],
            out_kind=0 if out is None else _KINDS[out.dtype],
            state_kind=_KINDS[states[0].payload.dtype] if states else 0,
            threads=torch.get_num_threads(),
            seed=step_seed(step),
            gradient_scale=gradient_scale,
        )
        if rounding is not None:
            job.is_drawn, job.first = 1, rounding.first
            job.key[0], job.key[1] = step_key(rounding.seed, step)
        self._step(ctypes.byref(job))
        for tensor in (master, *([] if out is None else [out])):  # a graph that saved them must not use them now
            torch.autograd.graph.increment_version(tensor)


@functools.cache
def cpu_kernel() -> CpuKernel | None:
    """The kernel of this process, or None where torch's kernels do the work; the log says which, and why.

    LOWTIDE_CPU_KERNEL: "native" (the default) uses what this processor can do, "portable" what all of its family can,
    "torch" builds nothing. Raises ValueError for anything else.
    """
    return made_as_wanted(CpuKernel, "CPU optimizer", "one C++ pass a shard", "torch's kernels, chunk by chunk")
