"""What a training is beside its steps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import Mesh
from ...zero.averages import Averages
from ...zero.optimizer import ShardedOptimizer
from ...zero.unit import Unit
from ..config.config import Config
from . import weights
from .checkpoint import Checkpointer
from .full_values import FullValues
from .named_state import NamedState, Whole
from .parameter_values import ParameterValues


class Archive:
    """Full values, plain weights and checkpoints of an engine. Every method is a collective, between steps."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        module: nn.Module,
        units: Sequence[Unit],
        optimizer: ShardedOptimizer,
        whole: Whole,
    ) -> None:
        """units: of this rank. whole: what `module` is, or has a part of."""
        self.values = FullValues(module, units, optimizer, mesh)
        self.named = NamedState(module, units, optimizer, mesh, whole)
        self.parameters = ParameterValues(units, optimizer, mesh, self.named)
        self.checkpoints = Checkpointer(config, mesh, module, optimizer, self.named)
        self._module = module
        self._mesh = mesh
        self._world = mesh.world

    def state_dict(self) -> dict[str, Tensor]:
        """See `Engine.state_dict`."""
        return self.values.state_dict(self.named.whole.names)

    def export(self, folder: str | os.PathLike[str], dtype: str | torch.dtype | None, shard_bytes: int | str) -> None:
        """See `Engine.export`."""
        weights.export(self._module, self.named, self._world, folder, dtype, shard_bytes)

    def load_state_dict(self, given: Mapping[str, Any], strict: bool) -> None:
        """See `Engine.load_state_dict`."""
        weights.load_state_dict(self.named, self.values, self._world, given, strict)

    def swap(self, averages: Averages) -> None:
        """Averages and weights change places, on all ranks, with all that is computed of the weights."""
        self._mesh.fence("the end of what reads the weights")
        with torch.no_grad():
            averages.swap()
        self.named.publish()

    def load_weights(self, path: str | os.PathLike[str], strict: bool) -> None:
        """See `Engine.load_weights`."""
        weights.load_weights(self.named, self._world, path, strict)
