"""Optimizer step on flat shards: unscale, clip, update and cast in a single pass over memory (`update_shards`).

It has three tiers. A Triton kernel on a GPU (`triton/optimizer_step.py`) and a C++ kernel on the CPU (`CpuKernel`) read
and write each element once. Otherwise, and for float64, torch's fused kernels run chunk by chunk; a chunk stays in the
cache between unscaling, update and cast. The torch tier is the specification. All tiers are elementwise (8-bit states:
blockwise), so the result for an element does not depend on its position, and a shard may be any part of the model.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..optimizers.optimizer import MAX_COEFFICIENTS, Optimizer, Options
from .cpu_build import NATIVE, load_library, made_as_wanted
from .dispatch import Backend, triton_form, uses_triton
from .optimizer_states import STATE_BLOCK_NUMEL, StoredState, other_noise, rounding_noise, step_seed, stored_states
from .weight_rounding import Rounding, rounded_weights, split_weights, step_key, with_remainder

KERNEL = "optimizer_step"
CPU_FORMS = "a C++ pass per shard", "torch's kernels, chunk by chunk"  # with `CpuKernel`, and without it
CHUNK_NUMEL = 1 << 18  # 1 MiB of float32 per tensor: weight, gradient and two moments fit into a second-level cache
_DEVICE_CHUNK_NUMEL = 1 << 22  # an operation on 16 MiB takes a device longer than its launch takes the host
LAUNCH_NUMEL = 1 << 26  # half a millisecond: then the updated shards can be sent, beside the next launch
# `Kind` in cpu_optimizer.cpp.
# int8 and uint8 are a kind: the C++ kernel knows by rule and index which states have a sign.
_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4, torch.uint8: 4}


@dataclass(slots=True, eq=False)
class ShardUpdate:
    """A shard with the inputs of its update, as in `update_runs`. A shard without a parameter has no runs.

    The object can be used again in the next step, with a new gradient, runs and steps.
    """

    master: Tensor
    gradient: Tensor
    states: Sequence[StoredState]
    runs: Sequence[tuple[int, Options]]
    steps: Sequence[int]
    out: Tensor | None
    rounding: Rounding | None = None  # random rounding of master weights in bfloat16
    remainder: Tensor | None = None  # (n,) low bits of master weights in bfloat16: bfloat16, or int8 with a rounding
    numel: int = field(init=False)
    kind: Hashable = field(init=False)
    """Shards of the same kind can share a launch, if Triton can update them at all."""

    def __post_init__(self) -> None:
        self.numel = self.master.numel()
        of_tensors = [(tensor.dtype, tensor.is_contiguous()) for tensor in self.tensors]
        is_absent = [option is None for option in (self.out, self.rounding, self.remainder)]
        self.kind = (self.master.device, *is_absent, *of_tensors)

    @property
    def is_used(self) -> bool:
        """True if the shard has elements of a parameter."""
        return bool(self.runs) and self.numel > 0

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the shard."""
        found: list[Tensor | None] = [self.master, self.gradient, self.out, self.remainder]
        for state in self.states:
            found += state.payload, state.scale
        return [tensor for tensor in found if tensor is not None]

    def part(self, start: int, end: int) -> ShardUpdate:
        """Return the part with elements start to end, with all runs of the shard. start is a multiple of 256."""
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
        """Raise ValueError unless tensors, runs and steps fit together."""
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
            raise ValueError(f"{KERNEL}: expected a step for each of {len(self.runs)} runs, found {len(self.steps)}")


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
    """Update a shard: master, states = optimizer(master, gradient_scale * gradient); out = master in the dtype of out.

    master, gradient: (n,) of any float dtype; the gradient is overwritten. states: in the order of `new_states`.
    out: (n,), or None if the parameters are the master weights.
    rounding, remainder: for master weights in bfloat16, see `weight_rounding.py`. With rounding they are rounded at
    random. remainder: their low bits, (n,) bfloat16, or int8 with rounding. Without both, they are rounded to nearest.
    gradient_scale, skip: may be tensors with a single element on the device of master, so that the host does not wait.
    If skip is not 0, nothing changes.
    Raises ValueError if tensors do not fit together, or the backend is not possible.
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
    """Update a shard as `update_shard` does, with different options for runs of elements.

    runs: (end, options) of each run, ascending; the last end is n. steps: number of updates of each run, with this
    update, if they differ; a run with step 0 does not change.
    8-bit states are stored in blocks of 256 elements from the start of the tensors. So a shard with 8-bit states may be
    cut only at the begin of a block. A CUDA graph of it would repeat this step: see `UpdateLaunches`.
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
    on_updated: Callable[[int], None] | None = None,
    launcher: Callable[..., None] | None = None,
) -> None:
    """Update many shards as `update_runs` does. On a GPU, a launch updates shards of a kind, up to 64M elements.

    The tensors are not checked: `ShardUpdate.check` does so once. on_updated: called with the index of each updated
    shard, in an order that depends on kinds and lengths alone. launcher: called in the place of Triton's launches.
    """
    serves: dict[Hashable, bool] = {}
    waiting: dict[Hashable, list[int]] = {}
    num_waiting: dict[Hashable, int] = {}  # elements

    def launch(kind: Hashable) -> None:
        numbers = waiting.pop(kind)
        if used := [shards[number] for number in numbers if shards[number].is_used]:
            (launcher or triton_form("optimizer_step").update)(optimizer, used, step, gradient_scale, skip)
        if on_updated is not None:
            for number in numbers:
                on_updated(number)

    for number, shard in enumerate(shards):
        kind = shard.kind
        # The answer depends on device, dtypes and contiguity, which are equal in a kind.
        if kind not in serves:
            serves[kind] = _triton_serves(backend, optimizer, shard)
        if not serves[kind]:
            if shard.is_used:
                _update_alone(optimizer, shard, step, gradient_scale, skip, backend)
            if on_updated is not None:
                on_updated(number)
            continue
        if kind not in waiting:
            waiting[kind], num_waiting[kind] = [], 0
        waiting[kind].append(number)
        num_waiting[kind] += shard.numel
        if num_waiting[kind] >= LAUNCH_NUMEL:
            launch(kind)
    # on_updated starts collectives. Kinds and lengths are equal on all ranks, and so is this order.
    for kind in list(waiting):
        launch(kind)


class UpdateLaunches:
    """The launches of `update_shards`, in a form that a graph of the device can hold.

    A graph repeats `run`. What changes from step to step lies in one tensor on the device, which `fill` writes before.
    """

    def __init__(self, optimizer: Optimizer, shards: Sequence[ShardUpdate], step: int, backend: Backend) -> None:
        """shards: that Triton updates, see `are_launched`; none of their parameters is unused in any step."""
        self._order: list[Any] = []  # launches, and indices of the shards that are updated then
        self._shards = shards
        self._triton = triton_form("optimizer_step")
        offsets: dict[Hashable, int] = {}
        end = 0

        def add(optimizer: Optimizer, used: list[ShardUpdate], step: int, *_: object) -> None:
            nonlocal end
            # Not merged: options that are equal in this step may differ in a later step.
            one = self._triton.UpdateLaunch(optimizer, used, step, merges_equal=False)
            numel = len(one.numbers_at(step)) // 4
            # Launches with the same options and the same seed read the same numbers.
            key = (one.sources, used[0].rounding and used[0].rounding.seed)
            is_new = key not in offsets
            low = offsets.setdefault(key, end)
            end += numel if is_new else 0
            self._order.append((one, slice(low, low + numel), is_new))

        update_shards(
            optimizer, shards, step, 1.0, backend=backend, launcher=add, on_updated=self._order.append
        )  # fmt: skip
        self._numbers = torch.zeros(end, dtype=torch.int32, device=shards[0].master.device)

    def fill(self, step: int) -> None:
        """Copy the numbers of a step, with the options as they are now, to the device, without a wait."""
        launches = (one for one in self._order if not isinstance(one, int))
        values = b"".join(one.numbers_at(step) for one, _, is_new in launches if is_new)
        on_host = torch.frombuffer(bytearray(values), dtype=torch.int32)
        self._numbers.copy_(self._triton.pinned(on_host, self._numbers.device), non_blocking=True)

    def run(self, gradient_scale: Tensor, skip: Tensor, on_updated: Callable[[int], None]) -> None:
        """Launch all. gradient_scale, skip: (1,) on the device. on_updated: as in `update_shards`."""
        for one in self._order:
            if isinstance(one, int):
                on_updated(one)
            else:
                one[0].start(self._numbers[one[1]], gradient_scale, skip)

    def note_changes(self) -> None:
        """Tell autograd that a replay has changed the weights."""
        changed = [tensor for shard in self._shards for tensor in (shard.master, shard.out) if tensor is not None]
        torch.autograd.graph.increment_version(changed)


def are_launched(optimizer: Optimizer, shards: Sequence[ShardUpdate], backend: Backend) -> bool:
    """Return whether Triton updates all of these shards."""
    return bool(shards) and all(_triton_serves(backend, optimizer, shard) for shard in shards)


def _update_alone(
    optimizer: Optimizer,
    shard: ShardUpdate,
    step: int,
    gradient_scale: float | Tensor,
    skip: Tensor | None,
    backend: Backend,
) -> None:
    """Update a shard on the CPU, or by torch."""
    if skip is not None and skip.device.type == "cpu":  # the host reads it without a wait
        if bool(skip):
            return
        skip = None
    kernel = cpu_kernel() if shard.master.device.type == "cpu" and backend != "reference" else None
    if kernel is not None and kernel.serves(optimizer, shard):
        kernel.update(optimizer, shard, step, float(gradient_scale))
        return
    _update_by_torch(optimizer, shard, step, gradient_scale, skip)


def _triton_serves(backend: Backend, optimizer: Optimizer, shard: ShardUpdate) -> bool:
    """Tell if Triton can update the shard. Raises ValueError if not, and the backend is "triton"."""
    tensors = shard.tensors
    if not uses_triton(backend, KERNEL, *tensors):
        return False
    if optimizer.coefficients is None:
        problem = f'the optimizer "{optimizer.name}" without a kernel'
    elif not all(map(Tensor.is_contiguous, tensors)):
        problem = "non-contiguous tensors"
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
            f"{KERNEL}: expected {name} with a single element on {master.device}, the device of master, found "
            f"{tuple(value.shape)} on {value.device}"
        )


def chunk_numel(device_type: str) -> int:
    """Return the elements that torch's operations work on at a time, so that their results take little memory."""
    return CHUNK_NUMEL if device_type == "cpu" else _DEVICE_CHUNK_NUMEL


def _update_by_torch(
    optimizer: Optimizer, shard: ShardUpdate, step: int, gradient_scale: float | Tensor, skip: Tensor | None
) -> None:
    """Update a shard chunk by chunk with torch. skip: on a device, so that the host does not wait for it."""
    # If torch's optimizer stores no step, its formula reads the step on the host, if at all.
    device = shard.master.device if optimizer.keeps_step else torch.device("cpu")
    # A run with step 0 has no tensor, and is left out below: it does not change.
    step_tensors = {number: torch.full((), float(number), device=device) for number in shard.steps if number}
    starts = [0, *(end for end, _ in shard.runs)]
    most = chunk_numel(shard.master.device.type)
    for first in range(0, shard.numel, most):
        last = min(first + most, shard.numel)
        inside = [
            (max(start, first) - first, min(end, last) - first, options, step_tensors[of_run])
            for start, (end, options), of_run in zip(starts, shard.runs, shard.steps, strict=False)
            if start < last and end > first and of_run
        ]
        chunk = shard.part(first, last)
        # torch's kernels take no flag: update always, and then select the old values on the device.
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
    """Update a chunk. runs: (start, end, options, step) within the chunk."""
    if chunk.remainder is not None:
        weight = with_remainder(chunk.master, chunk.remainder)
    else:
        weight = chunk.master.to(torch.promote_types(chunk.master.dtype, torch.float32))  # itself if it is wide
    # Without a remainder `_store_weight` does not compare, and no clone is needed.
    before = weight if chunk.remainder is None else weight.clone()
    gradient = chunk.gradient.to(weight.dtype)
    if isinstance(gradient_scale, Tensor):
        gradient = gradient * gradient_scale.reshape(()).to(gradient.dtype)
    elif gradient_scale != 1.0:
        gradient = gradient * gradient_scale
    # Drawn before the update: the bits of states are a hash of the gradient and the weight as they were.
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
    """Store the updated weights, (n,), which are chunk.master itself if it is wide. before: weights before the step."""
    if noise is not None and chunk.rounding is not None and chunk.remainder is not None:
        for place, part in zip((chunk.master, chunk.remainder), split_weights(weight, noise), strict=True):
            place.copy_(part)
    elif noise is not None and chunk.rounding is not None:
        chunk.master.copy_(rounded_weights(weight, noise))
    elif chunk.remainder is not None:  # an unchanged weight must keep its bits: a sum has two forms at a tie
        nearest = torch.where(weight == before, chunk.master, weight.to(chunk.master.dtype))
        chunk.remainder.copy_(torch.where(weight == before, chunk.remainder, weight - nearest))
        chunk.master.copy_(nearest)
    elif weight is not chunk.master:
        chunk.master.copy_(weight)
    if chunk.out is not None:
        chunk.out.copy_(chunk.master)


# -- the C++ kernel on the CPU ----------------------------------------------------------------------------------------


class _Job(ctypes.Structure):
    """`struct Job` of cpu_optimizer.cpp."""

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
    """The C++ kernel of `cpu_optimizer.cpp`: a single pass over memory."""

    def __init__(self, flags: Sequence[str] = NATIVE) -> None:
        """Build or load the library. flags: compiler flags for instructions. Raises BuildError."""
        library = load_library(Path(__file__).with_name("cpu_optimizer.cpp"), flags)
        self._step = library.lowtide_optimizer_step
        self._step.argtypes = [ctypes.POINTER(_Job)]
        self._step.restype = None
        library.lowtide_rule.argtypes = [ctypes.c_char_p, ctypes.c_int32]
        library.lowtide_rule.restype = ctypes.c_int32
        self._rule = functools.cache(lambda name, num_states: int(library.lowtide_rule(name.encode(), num_states)))

    def serves(self, optimizer: Optimizer, shard: ShardUpdate) -> bool:
        """Tell if the kernel has this optimizer and takes these tensors: contiguous, on the CPU.

        Master weights are float32, or bfloat16 with a rounding or a remainder.
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
        tensors = [master, shard.gradient] if beside is None else [master, shard.gradient, beside]
        for state in shard.states:
            if state.scale is None and state.payload.dtype not in (torch.float32, torch.bfloat16):
                return False
            tensors.append(state.payload)
        for tensor in tensors:
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                return False
        # A float32 `out` would equal the master weights, so it is left to torch.
        narrow = (torch.bfloat16, torch.float16)
        return shard.gradient.dtype in (torch.float32, *narrow) and (out is None or out.dtype in narrow)

    def update(self, optimizer: Optimizer, shard: ShardUpdate, step: int, gradient_scale: float) -> None:
        """Update a shard that the kernel `serves`. The gradient does not change."""
        master, gradient, states, out = shard.master, shard.gradient, shard.states, shard.out
        runs, steps, rounding, remainder = shard.runs, shard.steps, shard.rounding, shard.remainder
        ends = (ctypes.c_int64 * len(runs))()
        values = (ctypes.c_float * (MAX_COEFFICIENTS * len(runs)))()
        for index, ((end, options), step_of_run) in enumerate(zip(runs, steps, strict=True)):
            ends[index] = end
            of_run = optimizer.coefficients_at(options, step_of_run)
            values[index * MAX_COEFFICIENTS : index * MAX_COEFFICIENTS + len(of_run)] = list(of_run)
        payloads, scales = (ctypes.c_void_p * 2)(), (ctypes.c_void_p * 2)()
        for index, state in enumerate(states):
            payloads[index] = state.payload.data_ptr()
            scales[index] = None if state.scale is None else state.scale.data_ptr()
        # The job has addresses alone. Tensors and arrays live in this frame until the call returns.
        job = _Job(
            master=master.data_ptr(),
            gradient=gradient.data_ptr(),
            out=None if out is None else out.data_ptr(),
            states=payloads,
            scales=scales,
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
            gradient_scale=gradient_scale,
        )
        # All states of a shard are narrow or none is: they follow the option state_dtype.
        if states and states[0].payload.dtype != torch.float32:
            job.seed = step_seed(step)
        if rounding is not None:
            job.is_drawn, job.first = 1, rounding.first
            job.key[0], job.key[1] = step_key(rounding.seed, step)
        # ctypes releases the GIL, so other threads of Python run beside the update.
        self._step(ctypes.byref(job))
        for tensor in (master, *([] if out is None else [out])):  # a graph that saved them must raise an error
            torch.autograd.graph.increment_version(tensor)


@functools.cache
def cpu_kernel() -> CpuKernel | None:
    """Return the C++ kernel of this process, or None if torch must do the work. The log has the reason.

    LOWTIDE_CPU_KERNEL: "native" (default) uses all instructions of this processor, "portable" those of its family,
    "torch" builds nothing. Raises ValueError for any other value.
    """
    return made_as_wanted(CpuKernel, "CPU optimizer", *CPU_FORMS)
