"""The optimizer step of CPU shards as one C++ pass over memory; `cpu_optimizer.cpp` says how it computes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from ..optimizers.optimizer import MAX_COEFFICIENTS, Optimizer
from .cpu_build import NATIVE, load_library, made_as_wanted
from .optimizer_states import step_seed
from .shard_update import ShardUpdate
from .weight_rounding import step_key

SOURCE = Path(__file__).with_suffix(".cpp")
_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4, torch.uint8: 4}


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
    """The built library."""

    def __init__(self, flags: Sequence[str] = NATIVE) -> None:
        """flags: which instructions the compiler may use. Raises BuildError."""
        library = load_library(SOURCE, flags)
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
        """As `optimizer_step.update_runs`, for what it `serves`; the gradient is only read."""
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
