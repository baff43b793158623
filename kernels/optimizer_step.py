"""One optimizer step on a flat shard: unscale, clip, update and cast in one pass over memory.

Two tiers behind one function. On the CPU, a C++ kernel (`cpu_optimizer.py`) reads and writes each element once. Where
there is no compiler, on other devices and for float64, torch's fused kernels run chunk by chunk: each chunk is small
enough to stay in the cache between unscaling, update and cast. The second tier is also the specification of the first.
Both are elementwise (8-bit states: blockwise): what they do to an element does not depend on where it lies, so a shard
may be any piece of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cpu_optimizer import cpu_kernel
from .optimizer_states import StoredState, new_state, other_noise, rounding_noise, stored_states

CHUNK_NUMEL = 1 << 18  # 1 MiB of float32 a stream: weight, gradient and two moments fit into a second-level cache


@dataclass(frozen=True)
class UpdateRule:
    """An elementwise optimizer.

    apply(weight, gradient, states, step, options): updates weight and states in place; step counts from 1.
    states: the name and the start value of each state; options with the key named there, if any, start it instead.
    """

    name: str
    states: tuple[str, ...]
    apply: Callable[[Tensor, Tensor, Sequence[Tensor], Tensor, Mapping[str, Any]], None]
    start_option: str | None = None  # the option that gives the states' start value, else 0

    def new_states(
        self, master: Tensor, options: Mapping[str, Any], state_dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        """The states before the first step, by name, in the order that `update_runs` takes them.

        master: (n,); state_dtype: float32 (states then have the dtype of master), bfloat16, or int8: each state is then
        a payload of bytes, (n,), and "<name>.scale", (ceil(n / 256),) float32. Raises ValueError for other dtypes.
        """
        start = float(options[self.start_option]) if self.start_option else 0.0
        states: dict[str, Tensor] = {}
        for name in self.states:
            states |= new_state(name, master, start, state_dtype)
        return states


def update_shard(
    rule: UpdateRule,
    master: Tensor,
    gradient: Tensor,
    states: Sequence[Tensor],
    step: int,
    options: Mapping[str, Any],
    gradient_scale: float,
    out: Tensor | None,
) -> None:
    """master, states = rule(master, gradient_scale * gradient); out = master in the dtype of out.

    master: (n,) float32 or wider; gradient: (n,) any float dtype, used up; states: as `UpdateRule.new_states` orders
    them; out: (n,) or None where the parameters are the master weights themselves.
    """
    update_runs(rule, master, gradient, states, step, [(master.numel(), options)], gradient_scale, out)


def update_runs(
    rule: UpdateRule,
    master: Tensor,
    gradient: Tensor,
    states: Sequence[Tensor],
    step: int,
    runs: Sequence[tuple[int, Mapping[str, Any]]],
    gradient_scale: float,
    out: Tensor | None,
) -> None:
    """As `update_shard`, where stretches of the shard have options of their own.

    runs: (end, options) of each stretch, ascending; the last ends at n. 8-bit states lie in blocks of 256 elements from
    the start of the tensors, whatever stretches there are, so a shard with such states is updated as a whole, or cut
    where a block begins.
    """
    if not master.numel():
        return
    stored = stored_states(states)
    assert len(stored) == len(rule.states), (rule.name, len(stored))
    assert runs[-1][0] == master.numel(), (runs[-1][0], master.numel())
    kernel = cpu_kernel() if master.device.type == "cpu" else None
    if kernel is not None and kernel.serves(rule.name, master, gradient, stored, out):
        kernel.update(rule.name, master, gradient, stored, step, runs, gradient_scale, out)
        return
    step_tensor = torch.tensor(float(step), device=master.device)
    starts = [0, *(end for end, _ in runs)]
    for first in range(0, master.numel(), CHUNK_NUMEL):
        last = min(first + CHUNK_NUMEL, master.numel())
        inside = [
            (max(start, first) - first, min(end, last) - first, options)
            for start, (end, options) in zip(starts, runs, strict=False)
            if start < last and end > first
        ]
        parts = [state.part(first, last) for state in stored]
        _update_chunk(rule, master[first:last], gradient[first:last], parts, step_tensor, inside, gradient_scale)
        if out is not None:
            out[first:last].copy_(master[first:last])


def _update_chunk(
    rule: UpdateRule,
    weight: Tensor,
    gradient: Tensor,
    states: Sequence[StoredState],
    step: Tensor,
    runs: Sequence[tuple[int, int, Mapping[str, Any]]],
    gradient_scale: float,
) -> None:
    """runs: (start, end, options) within the chunk."""
    if gradient.dtype != weight.dtype:
        gradient = gradient.to(weight.dtype)
    if gradient_scale != 1.0:
        gradient.mul_(gradient_scale)
    is_narrow = any(state.is_narrow for state in states)
    noise = rounding_noise(gradient, weight, int(step)) if is_narrow else None
    wide = [state.widened() for state in states]
    for start, end, options in runs:
        part = slice(start, end)
        rule.apply(weight[part], gradient[part], [state[part] for state in wide], step, options)
    if noise is None:
        return
    for state, values in zip(states, wide, strict=True):
        state.narrow(values, noise)
        noise = other_noise(noise)


def _adam(decoupled: bool) -> Callable[[Tensor, Tensor, Sequence[Tensor], Tensor, Mapping[str, Any]], None]:
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def apply(
        weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Mapping[str, Any]
    ) -> None:
        beta1, beta2 = options["betas"]
        fused(
            [weight],
            [gradient],
            [states[0]],
            [states[1]],
            [],
            [step],
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            amsgrad=False,
            maximize=False,
        )

    return apply


def _sgd(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Mapping[str, Any]) -> None:
    is_first = int(step) == 1
    torch._fused_sgd_(
        [weight],
        [gradient],
        list(states) if options["momentum"] else [],
        weight_decay=options["weight_decay"],
        momentum=options["momentum"],
        lr=options["lr"],
        dampening=options["dampening"],
        nesterov=options["nesterov"],
        maximize=False,
        is_first_step=is_first,
    )


def _adagrad(
    weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Mapping[str, Any]
) -> None:
    torch._fused_adagrad_(
        [weight],
        [gradient],
        [states[0]],
        [step],
        lr=options["lr"],
        lr_decay=options["lr_decay"],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=False,
    )


def _lion(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Mapping[str, Any]) -> None:
    """w -= lr * (sign(beta1 m + (1 - beta1) g) + decay w);  m = beta2 m + (1 - beta2) g.

    Source: Lion, arXiv 2302.06675, program 1.
    """
    beta1, beta2 = options["betas"]
    momentum = states[0]
    weight.mul_(1 - options["lr"] * options["weight_decay"])
    weight.add_(torch.lerp(gradient, momentum, beta1).sign_(), alpha=-options["lr"])
    momentum.lerp_(gradient, 1 - beta2)


_MOMENTS = ("exp_avg", "exp_avg_sq")
RULES: Mapping[str, UpdateRule] = {
    "adamw": UpdateRule("adamw", _MOMENTS, _adam(decoupled=True)),
    "adam": UpdateRule("adam", _MOMENTS, _adam(decoupled=False)),
    "sgd": UpdateRule("sgd", ("momentum_buffer",), _sgd),
    "lion": UpdateRule("lion", ("exp_avg",), _lion),
    "adagrad": UpdateRule("adagrad", ("sum",), _adagrad, start_option="initial_accumulator_value"),
}
