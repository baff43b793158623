"""One optimizer step on a flat shard: unscale, clip, update and cast in one pass over memory.

Three tiers behind one function. On a GPU, a Triton kernel (`triton/optimizer_step.py`), and on the CPU, a C++ kernel
(`cpu_optimizer.py`), read and write each element once. Where there is neither, and for float64, torch's fused kernels
run chunk by chunk: each chunk is small enough to stay in the cache between unscaling, update and cast. That tier is the
specification of the others. All are elementwise (8-bit states: blockwise): what they do to an element does not depend
on where it lies, so a shard may be any piece of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache

import torch
from torch import Tensor

from ..optimizers.optimizer import Optimizer, Options
from .cpu_optimizer import cpu_kernel
from .dispatch import Backend, uses_triton
from .optimizer_states import other_noise, rounding_noise, stored_states
from .shard_update import KERNEL, ShardUpdate
from .weight_rounding import Rounding, rounded_weights, split_weights, with_remainder

CHUNK_NUMEL = 1 << 18  # 1 MiB of float32 a stream: weight, gradient and two moments fit into a second-level cache
LAUNCH_NUMEL = 1 << 26  # elements: half a millisecond, and what follows an update (the others get it) begins so soon


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
            _triton_form()(optimizer, used, step, gradient_scale, skip)
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


@cache
def _triton_form() -> Callable[..., None]:
    """Looked up once: a step would pay for each `import` that it comes to."""
    from .triton.optimizer_step import update

    return update


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
