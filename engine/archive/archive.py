"""Values, weights and checkpoints of an engine, behind a single object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.export import DEFAULT_SHARD_BYTES
from ...comm import Mesh
from ...zero.averages import Averages
from ...zero.optimizer import ShardedOptimizer
from ...zero.unit import Unit
from ..config.config import Config
from . import weights
from .checkpoint import Checkpointer
from .frozen import Frozen, FrozenValues
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
        frozen: FrozenValues,
        note_exact: Callable[[], None],
    ) -> None:
        """units: of this rank. whole: describes the model of which `module` is a part. frozen: kept by the engine.

        note_exact: as of `FullValues`.
        """
        self.values = FullValues(module, units, optimizer, mesh, frozen.note_changed, note_exact)
        self.named = NamedState(module, units, optimizer, mesh, whole)
        self.parameters = ParameterValues(self.named, frozen.note_changed)
        self.checkpoints = Checkpointer(config, self.named, Frozen(self.named, frozen))
        self.frozen = frozen

    def state_dict(self) -> dict[str, Tensor]:
        """See `Engine.state_dict`."""
        return self.values.state_dict(self.named.whole.names)

    def export(self, folder: str | os.PathLike[str], dtype: str | torch.dtype | None, shard_bytes: int | str) -> None:
        """See `Engine.export`."""
        weights.export(self.named, folder, dtype, shard_bytes)

    def export_adapters(
        self, folder: str | os.PathLike[str], dtype: str | torch.dtype | None, shard_bytes: int | str
    ) -> None:
        """See `Engine.export`."""
        if shard_bytes != DEFAULT_SHARD_BYTES:
            raise ValueError(
                f"engine.export(adapters_only=True): expected no shard_bytes, found {shard_bytes!r}, since PEFT reads "
                "a single file; leave it out"
            )
        weights.export_adapters(self.named, folder, dtype)

    def export_merged(
        self, folder: str | os.PathLike[str], dtype: str | torch.dtype | None, shard_bytes: int | str
    ) -> None:
        """See `Engine.export`."""
        # parallel.tensor needs no check: each rank merges its part: A or B is split like the weight.
        split = [name for name in ("pipe", "expert") if self.named.mesh.axes[name].size > 1]
        if split:
            raise ValueError(
                f"engine.export(merged=True): expected ranks with whole layers, found layers split by parallel."
                f"{'pipeline' if split[0] == 'pipe' else split[0]}; export adapters_only, and merge in a single process"
            )
        weights.export_merged(self.named, self.values, folder, dtype, shard_bytes)

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
        self.named.publish()

    def load_weights(self, path: str | os.PathLike[str], strict: bool) -> None:
        """See `Engine.load_weights`."""
        self.frozen.note_loaded(weights.load_weights(self.named, path, strict))
