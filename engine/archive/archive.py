"""Values, weights and checkpoints of an engine, behind a single object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
from .frozen import Frozen
from .full_values import FullValues
from .named_state import NamedState, UnsplitModel
from .parameter_values import ParameterValues


class Archive:
    """Full values, plain weights and checkpoints of an engine. Each method is a collective, between steps."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        module: nn.Module,
        units: Sequence[Unit],
        optimizer: ShardedOptimizer,
        whole: UnsplitModel,
        earlier: Frozen | None,
        note_exact: Callable[[], None],
    ) -> None:
        """units: of this rank. whole: describes the whole model; `module` may be a part. earlier: as of `Frozen`.

        note_exact: as of `FullValues`.
        """
        self.named = NamedState(module, units, optimizer, mesh, whole)
        self.frozen = Frozen(self.named, earlier)
        self.values = FullValues(module, units, optimizer, mesh, self.frozen.note_changed, note_exact)
        self.parameters = ParameterValues(self.named, self.frozen.note_changed)
        self.checkpoints = Checkpointer(config, self.named, self.frozen)

    def state_dict(self) -> dict[str, Tensor]:
        """See `Engine.state_dict`."""
        return self.values.state_dict(self.named.whole.names)

    def load_state_dict(self, given: Mapping[str, Any], strict: bool) -> None:
        """See `Engine.load_state_dict`."""
        self.frozen.note_loaded(weights.load_state_dict(self.named, self.values, given, strict))

    def swap(self, averages: Averages, shown: bool) -> None:
        """Swap averages and weights on all ranks, and compute all copies again.

        shown: whether the averages are now the weights.
        """
        self.named.mesh.fence("the end of what reads the weights")
        with torch.no_grad():
            averages.swap(shown)
        self.named.publish(ends_graphs=False)

    def load_weights(self, path: str | os.PathLike[str], strict: bool) -> None:
        """See `Engine.load_weights`."""
        self.frozen.note_loaded(weights.load_weights(self.named, path, strict))
