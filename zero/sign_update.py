"""The update by an optimizer whose ranks tell each other signs of their momenta, and not gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..optimizers.onebit import direction
from ..optimizers.optimizer import Options, Signs
from .fused_update import FusedUpdate, ScalarStates, Terms
from .layout import Piece
from .low_rank import LOW_RANK_ERROR
from .shard_state import ShardState, StatePart
from .sign_mean import SignLayout, SignMean

WORKER_ERROR, SERVER_ERROR = "worker_error", "server_error"
"""Among the states of a checkpoint, the first with the number of the rank that has it."""
AXIS = ("replica",)
Parameters = list[tuple[int, slice, Options]]
"""(index in its group, where in the shard, options) of parameters."""


@dataclass
class Memory:
    """What a group keeps beside its states."""

    mean: SignMean
    moved: Tensor | None = None
    """(padded_numel,): momenta times learning rates of the steps since the ranks have met, where they do not meet in
    each step."""
    met_at: Tensor | None = None
    """(padded_numel,): the parameters then, where no master weights are these."""
    lr_sums: dict[int, float] = field(default_factory=dict)
    """Of those steps, by index of a parameter that was used in any; empty where the ranks have just met."""
    coefficients: dict[int, list[float]] = field(default_factory=dict)
    """Index of a parameter -> of 1-bit LAMB: the running mean of its scale, and the last factor beside it."""

    def held(self) -> Iterator[Tensor]:
        tensors = (self.mean.worker_error, self.mean.server_error, self.moved, self.met_at)
        return (one for one in tensors if one is not None)


@dataclass(frozen=True)
class SignUpdate(FusedUpdate):
    """States are whole on each rank, which all have the same of them but for what `Memory` holds.

    | a step that           | gradient    | momentum                           | second moment |
    |-----------------------|-------------|------------------------------------|---------------|
    | sums gradients        | of all      | updated with it                    | updated       |
    | meets                 | of the rank | updated with it, mean of the signs | stays         |
    | does neither (0/1)    | of the rank | updated with it, on the rank alone | stays         |

    All of it is in the update, when all ranks know that a step counts: what a signs' error remembers is of no gradient
    that was thrown away.
    """

    waits_for_norm = True

    def takes(self, options: Options) -> bool:
        return super().takes(options) and set(self.options) <= set(options)

    @property
    def signs(self) -> Signs:
        assert self.optimizer.signs is not None
        return self.optimizer.signs

    def sums_gradients(self, step: int) -> bool:
        return self.signs.sums_gradients(self.options, step)

    def update(
        self, shard: ShardState, parts: Callable[[], Iterable[StatePart]], gradient: Tensor, terms: Terms
    ) -> None:
        self.make_states(shard, {}, {})
        memory, weight, is_summed = self._memories[id(shard)], shard.master, self.sums_gradients(terms.step)
        used = _parameters(shard, terms.options, {i for i, p in enumerate(shard.group.params) if terms.step_of(id(p))})
        gradient = gradient.to(weight.dtype).mul_(terms.gradient_scale)
        if not is_summed:
            gradient.mul_(memory.mean.exchange.size)
        if self.signs.is_scaled:
            self._step_scaled(shard, memory, gradient, used, is_summed)
        elif is_summed:
            for _, where, options in used:
                own = [state[where] for state in shard.memory.states.values()]
                self.optimizer.apply(weight[where], gradient[where], own, torch.tensor(terms.step), options)
        elif self.signs.sums_steps:
            self._step_alone(shard, memory, gradient, used)
            if self.signs.meets(self.options, terms.step):
                self._meet(shard, memory, terms.options)
        else:
            mean = self._mean_momentum(shard, memory, gradient, used)
            momentum, squares = shard.memory.states.values()
            for _, where, options in used:
                momentum[where] = mean[where]
                step = direction(weight[where], mean[where], squares[where], options)
                weight[where].add_(step, alpha=-float(options["lr"]))
        if shard.form.is_mixed and not memory.lr_sums:
            shard.group.shard.copy_(weight)

    def update_together(
        self, due: Iterable[tuple[ShardState, Tensor]], terms: Terms, on_updated: Callable[[ShardState], None]
    ) -> None:
        for shard, gradient in due:
            self.update(shard, shard.as_parts, gradient, terms)
            on_updated(shard)

    def is_apart(self, shard: ShardState) -> bool:
        """Whether ranks have other parameters than each other."""
        memory = self._memories.get(id(shard))
        return memory is not None and bool(memory.lr_sums)

    def meet(self, shard: ShardState, options: Sequence[Options]) -> None:
        """All ranks have the same parameters from now on. A collective, where they have not."""
        if self.is_apart(shard):
            self._meet(shard, self._memories[id(shard)], options)

    # -- momenta --------------------------------------------------------------------------------------------------

    def _mean_momentum(self, shard: ShardState, memory: Memory, gradient: Tensor, used: Parameters) -> Tensor:
        """(padded_numel,): of all ranks, each with its own gradient."""
        momentum = next(iter(shard.memory.states.values())).clone()
        for _, where, options in used:
            momentum[where].lerp_(gradient[where], 1 - options["betas"][0])
        return memory.mean.mean(momentum, _others(shard, {index for index, _, _ in used}))

    def _step_alone(self, shard: ShardState, memory: Memory, gradient: Tensor, used: Parameters) -> None:
        """u = u + lr m, of this rank; w = w of the meeting - u / (sqrt(v) + eps)."""
        (momentum, squares), moved = shard.memory.states.values(), memory.moved
        assert moved is not None
        if not memory.lr_sums and memory.met_at is not None:
            memory.met_at.copy_(shard.master)
        began = shard.master if memory.met_at is None else memory.met_at
        for index, where, options in used:
            momentum[where].lerp_(gradient[where], 1 - options["betas"][0])
            moved[where].add_(momentum[where], alpha=float(options["lr"]))
            memory.lr_sums[index] = memory.lr_sums.get(index, 0.0) + float(options["lr"])
            step = direction(began[where], moved[where], squares[where], options, decays=False)
            shard.group.shard[where] = began[where] - step

    def _meet(self, shard: ShardState, memory: Memory, options_of: Sequence[Options]) -> None:
        """Parameters of the last meeting, less what all ranks have moved since; momenta are the mean of that."""
        (momentum, squares), weight, moved = shard.memory.states.values(), shard.master, memory.moved
        exchange, lr_sums = memory.mean.exchange, memory.lr_sums
        assert moved is not None
        if memory.met_at is not None:
            weight.copy_(memory.met_at)
        if any(lr_sums.values()):
            mean = memory.mean.mean(moved.clone(), _others(shard, lr_sums))
        else:  # nothing has moved: momenta go as they are
            mean = exchange.sum(momentum, f"momenta of {shard.group.plan.name}") / exchange.size
        for index, where, options in _parameters(shard, options_of, lr_sums):
            lr_sum = lr_sums[index]
            momentum[where] = mean[where] / lr_sum if lr_sum else mean[where]
            if lr_sum:
                step = direction(weight[where], mean[where], squares[where], options, decays=False)
                weight[where].mul_(1 - lr_sum * options["weight_decay"]).sub_(step)
        moved.zero_()
        lr_sums.clear()
        if shard.form.is_mixed:
            shard.group.shard.copy_(weight)

    # -- 1-bit LAMB -----------------------------------------------------------------------------------------------

    def _step_scaled(
        self, shard: ShardState, memory: Memory, gradient: Tensor, used: Parameters, is_summed: bool
    ) -> None:
        mean = None if is_summed else self._mean_momentum(shard, memory, gradient, used)
        for index, where, options in used:
            own = [state[where] for state in shard.memory.states.values()]
            known = memory.coefficients.setdefault(index, [0.0, 1.0])
            if mean is None:
                step, scale = _warm_lamb(shard.master[where], gradient[where], own, known, options)
            else:
                step, scale = _later_lamb(shard.master[where], mean[where], own, known, options)
            shard.master[where].add_(step, alpha=-float(options["lr"]) * scale)

    # -- what is kept ---------------------------------------------------------------------------------------------

    @cached_property
    def _memories(self) -> dict[int, Memory]:
        """By identity of the shard."""
        return {}

    def make_states(
        self, shard: ShardState, dtypes: Mapping[str, Mapping[str, torch.dtype]], scalars: ScalarStates
    ) -> None:
        shard.memory.make()
        if id(shard) not in self._memories:
            self._memories[id(shard)] = self._new_memory(shard)
        for index, name in enumerate(shard.group.layout.names):
            kept = scalars.get(name) or {}
            if "coefficients" in kept:
                self._memories[id(shard)].coefficients[index] = list(map(float, kept["coefficients"]))

    def _new_memory(self, shard: ShardState) -> Memory:
        group, device = shard.group, shard.group.shard.device
        exchange, dtype = group.axes.exchange_along(AXIS), shard.form.master_dtype
        layout = SignLayout.of(group.layout, exchange.size, dtype)
        memory = Memory(SignMean(layout, exchange, self.signs.scale, group.plan.name).to(device))
        if self.signs.sums_steps:
            memory.moved = torch.zeros(group.layout.padded_numel, dtype=dtype, device=device)
            memory.met_at = None if shard.form.is_mixed else torch.zeros_like(memory.moved)
        return memory

    def forget_states(self, shard: ShardState) -> None:
        shard.memory.forget()
        self._memories.pop(id(shard), None)

    def held(self, shard: ShardState) -> Iterator[Tensor]:
        yield from super().held(shard)
        if id(shard) in self._memories:
            yield from self._memories[id(shard)].held()

    def scalar_states(self, shard: ShardState) -> ScalarStates:
        memory = self._memories.get(id(shard))
        found = {} if memory is None else memory.coefficients
        return {shard.group.layout.names[index]: {"coefficients": list(values)} for index, values in found.items()}

    def rank_states(self, shard: ShardState) -> Iterator[tuple[Piece, str, Tensor]]:
        """(piece, name, values) of what this rank alone has: the errors."""
        memory = self._memories.get(id(shard))
        if memory is None or not memory.mean.worker_error.numel():
            return
        mean, place = memory.mean, memory.mean.exchange.place
        region = mean.layout.regions[place]
        for piece in shard.group.pieces:
            low, high = piece.offset_in_shard, piece.offset_in_shard + piece.numel
            yield piece, f"{WORKER_ERROR}_{place}", mean.worker_error[low:high]
        for index, low, high in mean.layout.stretches[place]:
            offset = region.start + low - shard.group.layout.slots[index].offset_in_flat
            yield Piece(index, offset, region.start + low, high - low), SERVER_ERROR, mean.server_error[low:high]

    def rank_state_names(self, shard: ShardState) -> list[str]:
        """Of all ranks."""
        size = shard.group.axes.replicas.size
        return [*(f"{WORKER_ERROR}_{place}" for place in range(size)), SERVER_ERROR] if size > 1 else []


def is_rank_state(name: str) -> bool:
    """Whether a state of that name is of one rank, and of no use to another number of them."""
    return name == SERVER_ERROR or name.startswith((f"{WORKER_ERROR}_", f"{LOW_RANK_ERROR}_"))


def extra_numel(signs: Signs, layout: SignLayout, place: int, is_mixed: bool) -> int:
    """Elements, of the dtype of the master weights, that a group keeps beside its states."""
    whole = layout.regions[-1].stop
    return layout.error_numel(place) + (whole * (1 if is_mixed else 2) if signs.sums_steps else 0)


def _warm_lamb(
    weight: Tensor, gradient: Tensor, states: Sequence[Tensor], known: list[float], options: Options
) -> tuple[Tensor, float]:
    """(step, its scale), as LAMB has it."""
    beta1, beta2 = options["betas"]
    mean, squares, fresh = states
    mean.lerp_(gradient, 1 - beta1)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    fresh.copy_(squares)
    step = direction(weight, mean, squares, options)
    norms = float(weight.norm()), float(step.norm())
    scale = min(max(norms[0] / norms[1], options["min_coeff"]), options["max_coeff"]) if all(norms) else 1.0
    if scale != 1.0:  # as of a parameter that is zero yet
        known[0] = options["coeff_beta"] * known[0] + (1 - options["coeff_beta"]) * scale
    return step, scale


def _later_lamb(
    weight: Tensor, mean: Tensor, states: Sequence[Tensor], known: list[float], options: Options
) -> tuple[Tensor, float]:
    """(step, its scale): the mean one of the warm-up, times by how much the second moment has changed since."""
    (beta1, beta2), eps = options["betas"], options["eps"]
    before, squares, fresh = states
    gradient = (mean - before * beta1) / (1 - beta1)
    before.copy_(mean)
    fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    plain = direction(weight, mean, squares, options, decays=False)
    step = direction(weight, mean, squares, options)
    factor = float(((squares.sqrt() + eps) / (fresh.sqrt() + eps)).max())
    if options["weight_decay"]:
        norm = float(step.norm())
        share = min(1.0, float(plain.norm()) / norm) if norm else 1.0
        factor = factor * share + (1 - share)
    last, threshold = known[1], options["factor_threshold"]
    factor = min(max(factor, options["factor_min"]), options["factor_max"])
    known[1] = factor = min(max(factor, last * (1 - threshold)), last * (1 + threshold))
    return step, known[0] * factor


def _parameters(shard: ShardState, options: Sequence[Options], indices: Collection[int]) -> Parameters:
    """Where those parameters of the shard are, of these indices, and with which options."""
    return [
        (
            piece.index,
            slice(piece.offset_in_shard, piece.offset_in_shard + piece.numel),
            options[shard.runs.options_index(piece.index)],
        )
        for piece in shard.group.pieces
        if piece.index in indices
    ]


def _others(shard: ShardState, indices: Collection[int]) -> frozenset[int]:
    return frozenset(range(len(shard.group.params))).difference(indices)
