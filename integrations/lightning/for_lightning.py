"""The strategy and precision classes for the package `lightning`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.core import saving
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from .checkpoints import read_folders_in
from .settings import EnginePrecision
from .strategy import EngineStrategy


class LowtidePrecision(EnginePrecision, Precision):  # type: ignore[misc]  # the mixin is for two packages
    """The precision plugin for `lightning`: see `EnginePrecision`."""


class LowtideStrategy(EngineStrategy, DDPStrategy):  # type: ignore[misc]  # the mixin is for two packages
    """The strategy for `lightning`: see `EngineStrategy`."""

    precision_class = LowtidePrecision

    @staticmethod
    def registry() -> Any:
        return StrategyRegistry


read_folders_in(saving)
