"""What all ranks must know of a step before they update: one small exact sum."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm import Mesh
from ..zero.exact_sum import NUM_LIMBS, from_limbs, to_limbs
from ..zero.gradient import GroupGradient
from ..zero.plan import Role
from .errors import NonFiniteGradientError


@dataclass(frozen=True)
class StepSums:
    """The same on every rank."""

    loss: float  # mean over microbatches and data-parallel ranks; NaN where any rank's is not finite
    loss_dtype: torch.dtype  # float64 where the model's is, else float32
    square_norm: float  # sum of squared gradients as they were reduced
    num_bad: int  # groups with a non-finite gradient
    events: tuple[int, ...]  # on how many ranks each of the events has happened
    unused: frozenset[int] = frozenset()  # identities of the parameters that got no gradient on any rank


class Uses:
    """Which parameters of an optimizer got a gradient in a step: a count of ranks for each, many counts in a word.

    word     | parameter 0 | parameter 1 | ... |      as many bits for each as the number of ranks has
    """

    def __init__(
        self, param_groups: Sequence[Mapping[str, Any]], gradients: Sequence[GroupGradient], num_ranks: int
    ) -> None:
        """param_groups: of the whole model, on all ranks alike. gradients: of this rank."""
        self._params = [id(param) for group in param_groups for param in group["params"]]
        place_of = {param: place for place, param in enumerate(self._params)}
        updated = [one for one in gradients if one.group.role is Role.UPDATED]
        self._places = [(one, [place_of[id(param)] for param in one.group.params]) for one in updated]
        self._num_bits = num_ranks.bit_length()
        self._per_word = 63 // self._num_bits
        self._shifts = torch.arange(self._per_word) * self._num_bits
        self._all = self._packed({place for _, places in self._places for place in places})

    def packed(self) -> Tensor:
        """What this rank has used, (words,) int64."""
        unused = [
            place
            for gradient, places in self._places
            if len(gradient.used) < len(places)
            for index, place in enumerate(places)
            if index not in gradient.used
        ]
        return self._all - self._packed(unused) if unused else self._all

    def unused(self, total: Tensor) -> frozenset[int]:
        """total: the sum of `packed` over all ranks. Returns identities of parameters."""
        counts = total[:, None] >> self._shifts & (1 << self._num_bits) - 1
        places = (counts.view(-1)[: len(self._params)] == 0).nonzero().view(-1).tolist()
        return frozenset(self._params[place] for place in places)

    def _packed(self, places: Collection[int]) -> Tensor:
        words = [0] * -(-len(self._params) // self._per_word)
        for place in places:
            words[place // self._per_word] |= 1 << place % self._per_word * self._num_bits
        return torch.tensor(words, dtype=torch.int64)


def sum_step(
    mesh: Mesh,
    gradients: Sequence[GroupGradient],
    losses: Sequence[Tensor],
    events: Sequence[bool],
    what: str,
    uses: Uses | None = None,
) -> StepSums:
    """losses: () of each microbatch; none where a rank lacks a pipeline's last stage. A collective, and a barrier."""
    device = mesh.world.device
    found = torch.zeros(NUM_LIMBS + 1, dtype=torch.int64, device=device)
    for gradient in gradients:
        gradient.settle()
        found += gradient.inspection.found
    mean = torch.stack([loss.double() for loss in losses]).mean() if losses else torch.zeros((), dtype=torch.float64)
    is_wide = any(loss.dtype == torch.float64 for loss in losses)
    is_finite = bool(torch.isfinite(mean))
    loss = limbs_of(mean if is_finite else torch.zeros_like(mean))
    counts = torch.tensor([not is_finite, is_wide, *events], dtype=torch.int64)
    parts = [found, loss, counts] if uses is None else [found, loss, counts, uses.packed()]
    total = mesh.sum_small(torch.cat([part.to(device) for part in parts]), what).cpu()
    found, loss, counts, *used = total.split([len(part) for part in parts])
    num_infinite, num_wide, *counted = counts.tolist()
    mean_loss = from_limbs(loss) / mesh.data_size if not num_infinite else math.nan
    dtype = torch.float64 if num_wide else torch.float32
    unused = uses.unused(*used) if uses is not None else frozenset[int]()
    return StepSums(mean_loss, dtype, from_limbs(found[:-1]), int(found[-1]), tuple(counted), unused)


def limbs_of(value: Tensor) -> Tensor:
    """A finite float64 scalar of either sign as limbs."""
    limbs = to_limbs(value.abs().reshape(1))
    return limbs if value >= 0 else -limbs


def non_finite_error(mesh: Mesh, gradients: Sequence[GroupGradient], step: int, outcome: str) -> NonFiniteGradientError:
    """Names the parameter and the rank. A collective."""
    own = [gradient.non_finite for gradient in gradients if gradient.non_finite is not None]
    found = [item for items in mesh.world.gather_objects(own) for item in items]
    first = next((item for item in found if item.rank is not None), found[0])
    producer = f"rank {first.rank}" if first.rank is not None else "the sum over ranks"
    others = sorted({item.parameter for item in found} - {first.parameter})
    return NonFiniteGradientError(
        f"step {step}: expected finite gradients, found {first.what} in the gradient of "
        f"'{first.parameter}' on {producer}"
        + (f" (also in {len(others)} more parameters)" if others else "")
        + f". {outcome} Look at that rank's batch and at the learning rate; "
        "torch.autograd.set_detect_anomaly(True) finds the operation."
    )
