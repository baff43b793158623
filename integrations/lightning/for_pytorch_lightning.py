"""The strategy and precision classes for the package `pytorch_lightning`."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.core import saving
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from .checkpoints import read_folders_in
from .settings import EnginePrecision
from .strategy import EngineStrategy


class PytorchLightningPrecision(EnginePrecision, Precision):  # type: ignore[misc]  # the mixin is for two packages
    """The precision plugin for `pytorch_lightning`: see `EnginePrecision`."""


class PytorchLightningStrategy(EngineStrategy, DDPStrategy):  # type: ignore[misc]  # the mixin is for two packages
    """The strategy for `pytorch_lightning`: see `EngineStrategy`."""

    precision_class = PytorchLightningPrecision

    @staticmethod
    def registry() -> Any:
        return StrategyRegistry


read_folders_in(saving)

# `lowtide.lightning` takes these names from either package's module.
LowtidePrecision, LowtideStrategy = PytorchLightningPrecision, PytorchLightningStrategy
