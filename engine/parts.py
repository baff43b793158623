"""What an engine is put together from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Mesh
from ..model.ledger import Ledger
from ..offload import ActivationOffload
from ..zero.loss_scale import LossScaler
from ..zero.optimizer import ShardedOptimizer
from ..zero.scheduled_units import ScheduledUnits
from ..zero.sequence import UnitSequence
from .config.config import Config
from .learning_rates import Schedule
from .pipeline import Pipeline


@dataclass(frozen=True)
class Parts:
    """What `initialize` has made of a model and a config."""

    config: Config
    mesh: Mesh
    module: nn.Module
    sequence: UnitSequence | ScheduledUnits
    pipeline: Pipeline | None
    optimizer: ShardedOptimizer
    loss_scaler: LossScaler
    compute_dtype: torch.dtype | None
    casts_inputs: bool
    loss_fn: Callable[[Any, Any], Tensor] | None
    schedule: Schedule | None
    lr_scheduler: Any
    rows_per_microbatch: int | None
    activation_offload: ActivationOffload | None
    ledger: Ledger  # what stands on the module
    close_last: Sequence[Callable[[], None]]
