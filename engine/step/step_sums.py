"""Sum over all ranks, exactly and in a single small message, all numbers that the update of a step needs.

[Note: one wait]
    device   backward | sum | copy to the host | update, parameters to other ranks | next forward
    host                launch update, ...     | wait for the copy | launch next forward

The host reads the norm, the flags of values that are not finite, and the events of other ranks only after it has
launched the update: the kernels read the factor and `skip` on the device. It waits once, for the copy and not for the
update, and launches the next forward while the device updates. Nothing else in a step may wait: no `bool`, `item` or
mask index of a device tensor, and no copy from memory that is not pinned.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm import Mesh
from ...kernels.exact_sum import NUM_LIMBS, add_limbs, from_limbs, value_of
from ...kernels.sum_of_squares import clip_factor
from ...offload import OnHost, sent
from ...zero.gradient import GroupGradient
from ...zero.plan import Role
from ...zero.sequence import StateError


class NonFiniteGradientError(RuntimeError):
    """A gradient has an infinite value or a NaN. Names the parameter, the rank that produced it, and the step."""


_BAD, _CHANGED, _INFINITE, _WIDE, _CLEARED = range(2 * NUM_LIMBS, 2 * NUM_LIMBS + 5)
"""Places in the sum, see `SummedStep`."""


@dataclass(frozen=True)
class Clipping:
    """factor = limit / (norm + 1e-6), and at most 1."""

    limit: float = math.inf  # on the L2 norm of the step's gradients
    is_by_hand: bool = False  # torch's clip_grad_norm_ also clips norms just below the limit, within 1e-6
    fixed: float | None = None  # the factor, if the norm is no L2 norm

    def factor(self, norm: float) -> float:
        if self.fixed is not None:
            return self.fixed
        return min(1.0, self.limit / (norm + 1e-6)) if self.is_by_hand or norm > self.limit else 1.0


class StepSums(NamedTuple):
    """The same on every rank."""

    loss: float  # mean over microbatches and data-parallel ranks; NaN if a loss is not finite
    loss_dtype: torch.dtype  # float64 if the model's loss is, else float32
    square_norm: float  # of the reduced gradients, before `grad_scale`
    num_bad: int  # ranks with a non-finite gradient
    num_changed: int  # ranks that doubt the step: see `AccumulationState.note_inconsistency`
    cleared: int  # sum over ranks of the digests of cleared gradients
    events: tuple[int, ...]  # for each event, the number of ranks on which it has happened
    unused: frozenset[int] = frozenset()  # ids of the parameters without a gradient on any rank
    is_without_gradients: bool = False  # all are unused, and none was cleared


class Uses:
    """The parameters that got a gradient in a step, as a count of ranks for each. A word holds many counts.

    word     | parameter 0 | parameter 1 | ... |      bits for each: as many as the number of ranks has
    """

    def __init__(
        self, param_groups: Sequence[Mapping[str, Any]], gradients: Sequence[GroupGradient], num_ranks: int
    ) -> None:
        """param_groups: of the whole model, equal on all ranks. gradients: of this rank."""
        self._params = [id(param) for group in param_groups for param in group["params"]]
        place_of = {param: place for place, param in enumerate(self._params)}
        updated = [one for one in gradients if one.group.plan.role is Role.UPDATED]
        self._places = [(one, [place_of[id(param)] for param in one.group.params]) for one in updated]
        # A field can count to `num_ranks`, so a sum over the ranks never carries into the next field.
        self._num_bits = num_ranks.bit_length()
        self._per_word = 63 // self._num_bits  # of an int64, without the sign
        self._own = {place for _, places in self._places for place in places}
        self.all = self._packed(self._own)
        """`words` of a rank that has used all of its parameters, so that other ranks add nothing."""
        self._last: tuple[Sequence[int], frozenset[int]] = [], frozenset()  # (total, result) of the last `unused`

    def words(self) -> list[int]:
        """Return the parameters that this rank has used, packed; all words are 0 if it has used none."""
        unused = list[int]()
        for gradient, places in self._places:
            if len(gradient.used) != len(places):
                unused += [place for index, place in enumerate(places) if index not in gradient.used]
        return self._packed(self._own.difference(unused)) if unused else self.all

    def unused(self, total: Sequence[int]) -> frozenset[int]:
        """Return the ids of unused parameters. total: the sum of `words` over all ranks."""
        if total != self._last[0]:  # else the same as in the last step, which is frequent
            fields = ((total[place // self._per_word], place % self._per_word) for place in range(len(self._params)))
            is_used = [word >> index * self._num_bits & (1 << self._num_bits) - 1 for word, index in fields]
            self._last = total, frozenset(param for param, used in zip(self._params, is_used, strict=True) if not used)
        return self._last[1]

    def _packed(self, places: Collection[int]) -> list[int]:
        words = [0] * -(-len(self._params) // self._per_word)
        for place in places:
            words[place // self._per_word] |= 1 << place % self._per_word * self._num_bits
        return words


class SummedStep:
    """The sum of a step, on its way to the host. The device can read it already.

    total   limbs of squares | limbs of losses | bad, changed, infinite, wide, cleared | events | uses
    """

    def __init__(
        self,
        total: Tensor,
        num_events: int,
        uses: Uses | None,
        used: Sequence[int],
        data_size: int,
        cleared_by_all: int,
    ) -> None:
        """used: this rank's `Uses.words`. cleared_by_all: the sum of `cleared` if all ranks have cleared the same
        gradients as this rank.
        """
        self.used = used
        self._total = total
        self._num_events = num_events
        self._uses = uses
        self._data_size = data_size
        self._cleared_by_all = cleared_by_all
        self._on_host = OnHost(total)

    def factor_and_skip(self, clipping: Clipping, grad_scale: float) -> tuple[Tensor, Tensor]:
        """Return the factor of the gradients, (1,), and a flag that is not 0 if the update is skipped, (1,), on the
        device.

        grad_scale: multiplies the sum of the gradients in any case.
        """
        fixed = 1.0 if clipping.fixed is None else clipping.fixed
        known, by_hand = (_CLEARED, self._cleared_by_all), clipping.is_by_hand
        return clip_factor(self._total, _BAD, known, fixed * grad_scale, clipping.limit, clips_below=by_hand)

    def norm(self) -> Tensor:
        """Return the norm of the summed gradients, () float64 on the device; NaN if a gradient is not finite, as in
        torch.
        """
        # The limbs leave out values that are not finite, so the root alone would look like a valid norm.
        return torch.where(self._total[_BAD] == 0, value_of(self._total[:NUM_LIMBS]).sqrt(), math.nan)

    def read(self) -> StepSums:
        """Wait until the device has the sum, and return it. Does not wait for later work."""
        total = self._on_host.read().tolist()
        num_bad, num_changed, num_infinite, num_wide, cleared = total[_BAD : _CLEARED + 1]
        end = _CLEARED + 1 + self._num_events
        unused = self._uses.unused(total[end:]) if self._uses is not None else frozenset[int]()
        mean_loss = from_limbs(total[NUM_LIMBS:_BAD]) / self._data_size if not num_infinite else math.nan
        return StepSums(
            mean_loss,
            torch.float64 if num_wide else torch.float32,
            from_limbs(total[:NUM_LIMBS]),
            num_bad,
            num_changed,
            cleared,
            tuple(total[_CLEARED + 1 : end]),
            unused,
            not (cleared or any(total[end:])),
        )


def sum_step(
    mesh: Mesh,
    gradients: Sequence[GroupGradient],
    losses: Sequence[Tensor],
    events: Sequence[bool],
    what: str,
    uses: Uses | None = None,
    changed: Tensor | None = None,
    cleared: int = 0,
) -> SummedStep:
    """Sum losses, squared gradients and flags over all ranks. A collective, and a barrier.

    losses: () of each microbatch; none if a rank lacks the last stage of a pipeline. Ranks that share sequences have
    parts of the losses; ranks that split layers have equal losses. changed: () bool on the device: a parameter of this
    rank was changed behind the engine's back. cleared: a digest of the gradients that this rank's caller has cleared;
    0: none.
    """
    device = mesh.world.device
    squares, were_finite = [], []
    for gradient in gradients:
        found = gradient.stats
        if found.is_outdated:  # the caller has set, clamped or cleared the gradient
            gradient.count_again()
        squares += found.counted
        if found.was_finite is not None:
            were_finite.append(found.was_finite)
    is_wide = False
    for loss in losses:
        is_wide |= loss.dtype == torch.float64
    used = [] if uses is None else uses.words()
    known = [0] * (2 * NUM_LIMBS + 3) + [is_wide, cleared, *events, *used]
    # torch.tensor takes three times as long.
    sums = sent(torch.frombuffer(array("q", known), dtype=torch.int64), device)
    if squares:
        # If the host updates, a gradient that the caller has changed was counted again in host memory.
        here = [part if part.device.type == device.type else sent(part, device) for part in squares]
        add_limbs(sums, torch.cat(here), 0, _BAD)
    if were_finite:
        sums[_BAD] |= ~torch.stack([sent(one, device) for one in were_finite]).all()
    if changed is not None:
        sums[_CHANGED] |= changed
    # Ranks that split the same layers have the same loss: a single rank counts it.
    if losses and mesh.speaks:
        mean = losses[0].double() if len(losses) == 1 else torch.stack([loss.double() for loss in losses]).mean()
        add_limbs(sums, mean.view(1), NUM_LIMBS, _INFINITE)
    return SummedStep(mesh.sum_small(sums, what), len(events), uses, used, mesh.data_size, mesh.world.size * cleared)


def mean_over_ranks(mesh: Mesh, losses: Sequence[Tensor], num_ranks: int) -> Tensor:
    """Return the mean loss, () on the CPU, of the `num_ranks` ranks that have losses. A collective."""
    # Inside `engine.join` only `num_ranks` ranks have losses. The sum was divided by `data_size`, which is `world.size`
    # there: a join allows no splits. Outside of it the factor is 1.
    sums = sum_step(mesh, (), losses, (), "the mean of the loss").read()
    return torch.tensor(sums.loss * (mesh.world.size / num_ranks), dtype=sums.loss_dtype)


def cleared_error(mesh: Mesh, notes: str) -> StateError:
    """Return the error for ranks that have cleared different gradients. A collective."""
    everyone = mesh.world.gather_objects(notes)
    rank = next(rank for rank, found in enumerate(everyone) if found != everyone[0])
    first, other = (shorten(everyone[one], 120, placeholder=" ...") or "none" for one in (0, rank))
    return StateError(
        "zero_grad(): expected the same gradients cleared on all ranks, since each rank has a part of their sum, "
        f"found {first} on rank 0, {other} on rank {rank}. No parameter was updated"
    )


def non_finite_error(mesh: Mesh, gradients: Sequence[GroupGradient], done: int, outcome: str) -> NonFiniteGradientError:
    """Return the error that names the step, the parameter and the rank. A collective. done: steps before this step."""
    own = [gradient.non_finite for gradient in gradients if gradient.non_finite is not None]
    found = [item for items in mesh.world.gather_objects(own) for item in items]
    if not found:
        return NonFiniteGradientError(
            f"step {done + 1}: expected finite gradients, found a sum of squares that is not finite, and later only "
            f"finite values: something has written to the gradients in between. {outcome}"
        )
    # A rank whose term is bad is the cause. Without such a rank finite terms overflowed in their sum.
    first = next((item for item in found if item.rank is not None), found[0])
    producer = f"rank {first.rank}" if first.rank is not None else "the sum over ranks"
    others = sorted({item.parameter for item in found} - {first.parameter})
    return NonFiniteGradientError(
        f"step {done + 1}: expected finite gradients, found {first.what} in the gradient of "
        f"'{first.parameter}' on {producer}"
        + (f" (also in {len(others)} more parameters)" if others else "")
        + f". {outcome} Look at that rank's batch and at the learning rate; "
        "torch.autograd.set_detect_anomaly(True) finds the operation."
    )
