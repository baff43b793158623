"""What forwards are given: the microbatches of a batch, and inputs as the model computes with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...comm import World
from .batch import microbatches, prepared
from .gradient_scale import GradientScale
from .step_so_far import StepSoFar


class StepInputs:
    """Of all steps of one engine."""

    def __init__(
        self,
        world: World,
        so_far: StepSoFar,
        scale: GradientScale,
        dtype: torch.dtype | None,
        rows_per_microbatch: int | None,
    ) -> None:
        """dtype: of floating-point inputs; None: as they are. rows_per_microbatch: None: any."""
        self._world = world
        self._so_far = so_far
        self._scale = scale
        self._dtype = dtype
        self._rows_per_microbatch = rows_per_microbatch

    def microbatches_of(self, batch: Any) -> Iterator[Any]:
        """Those of this rank's share of a global batch, or drawn from an iterator. Raises ValueError."""
        found = microbatches(batch, self._so_far.accumulation, self._rows_per_microbatch)
        progress = self._world.progress
        return progress.drawn(found) if progress.is_on else found

    def prepared(self, inputs: Any) -> Any:
        """Inputs of a forward, on the device and in the compute dtype."""
        return prepared(inputs, self._world.device, self._dtype, self._scale.mark_input)
