"""Sections of a config as objects: what scripts import from `deepspeed.runtime.zero.config` and `precision_config`."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar

from ..engine.config.config import Config
from ..engine.config.sections import BF16Config, FP16Config
from .config import GETTERS, DeepSpeedConfig

DeepSpeedFP16Config = FP16Config
DeepSpeedBF16Config = BF16Config


class ZeroStageEnum(IntEnum):
    """Values of `stage`."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroOffloadParamConfig:
    """`offload_param`: its keys are attributes, with DeepSpeed's defaults. Raises ConfigError."""

    section: ClassVar[str] = "offload_param"
    defaults: ClassVar[dict[str, Any]] = {"buffer_count": 5, "buffer_size": int(1e8), "max_in_cpu": int(1e9)}

    def __init__(self, **values: Any) -> None:
        checked = getattr(Config.load({"zero_optimization": {self.section: values}}).zero_optimization, self.section)
        self.__dict__.update({**self.defaults, **values, **checked.model_dump()})


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedZeroOffloadParamConfig):
    """`offload_optimizer`, likewise."""

    section = "offload_optimizer"
    defaults: ClassVar[dict[str, Any]] = {
        "buffer_count": 4,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
    }

    @property
    def pipeline(self) -> bool:
        return bool(self.__dict__["pipeline_read"] or self.__dict__["pipeline_write"])


class DeepSpeedZeroConfig:
    """`zero_optimization`: what an engine tells as `zero_...()` is an attribute here. Raises ConfigError."""

    def __init__(self, **values: Any) -> None:
        self._config = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": values}, world_size=1)
        self.stage = self._config.stage
        self.offload_param = self._offload(DeepSpeedZeroOffloadParamConfig)
        self.offload_optimizer = self._offload(DeepSpeedZeroOffloadOptimizerConfig)

    def _offload(self, kind: type[DeepSpeedZeroOffloadParamConfig]) -> Any:
        """None where neither the section nor its older switch stands in the config."""
        written = self._config.section("zero_optimization", kind.section)
        checked = getattr(self._config.checked.zero_optimization, kind.section)
        if written is None and checked.device == "none":
            return None
        return kind(**(checked.model_dump() if written is None else written))

    def __getattr__(self, name: str) -> Any:
        plain = name.removeprefix("stage3_").removeprefix("zero_")
        if name == "_config" or f"zero_{plain}" not in GETTERS:
            raise AttributeError(f"DeepSpeedZeroConfig has no attribute '{name}'")
        return GETTERS[f"zero_{plain}"](self._config)
