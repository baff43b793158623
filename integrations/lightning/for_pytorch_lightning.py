"""The classes for the package `pytorch_lightning`."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.core import saving
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from .checkpoints import read_folders_in
from .settings import EnginePrecision
from .strategy import EngineStrategy


class PytorchLightningPrecision(EnginePrecision, Precision):  # type: ignore[misc]  # the mixin is for two packages
    """See `EnginePrecision`."""


class PytorchLightningStrategy(EngineStrategy, DDPStrategy):  # type: ignore[misc]  # the mixin is for two packages
    """See `EngineStrategy`."""

    precision_class = PytorchLightningPrecision
    package = "pytorch_lightning"

    @staticmethod
    def registry() -> Any:
        return StrategyRegistry


read_folders_in(saving)

# The names that `lowtide.lightning` asks each of its two packages for.
LowtidePrecision, LowtideStrategy = PytorchLightningPrecision, PytorchLightningStrategy
