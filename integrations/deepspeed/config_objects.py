"""Config sections as objects: names of `deepspeed.runtime.zero.config` and `precision_config`.

Also `deepspeed.elasticity`: the batch size that the section `elasticity` chooses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, ClassVar

from ..engine.config.batch import elastic_batch, legal_sizes
from ..engine.config.config import Config
from ..engine.config.errors import ConfigError, Fault
from ..engine.config.sections import BF16Config, FP16Config
from .config import GETTERS, DeepSpeedConfig

DeepSpeedFP16Config = FP16Config
DeepSpeedBF16Config = BF16Config


ZeroStageEnum = IntEnum(
    "ZeroStageEnum", {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
)
"""Values of `stage`."""


class DeepSpeedZeroOffloadParamConfig:
    """The section `offload_param`, with its keys as attributes and DeepSpeed's defaults. Raises ConfigError."""

    section: ClassVar[str] = "offload_param"
    defaults: ClassVar[dict[str, Any]] = {"buffer_count": 5, "buffer_size": int(1e8), "max_in_cpu": int(1e9)}

    def __init__(self, **values: Any) -> None:
        checked = getattr(Config.load({"zero_optimization": {self.section: values}}).zero_optimization, self.section)
        self.__dict__.update({**self.defaults, **values, **checked.model_dump()})


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedZeroOffloadParamConfig):
    """The section `offload_optimizer`, likewise. Raises ConfigError."""

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
    """The section `zero_optimization`. Each `zero_...()` of an engine is an attribute here. Raises ConfigError."""

    def __init__(self, **values: Any) -> None:
        # A section alone has no batch size, and a config needs a batch size.
        self._config = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": values}, world_size=1)
        self.stage = self._config.stage
        self.offload_param = self._offload(DeepSpeedZeroOffloadParamConfig)
        self.offload_optimizer = self._offload(DeepSpeedZeroOffloadOptimizerConfig)

    def _offload(self, kind: type[DeepSpeedZeroOffloadParamConfig]) -> Any:
        """Return the section as an object, None if neither the section nor its older switch is in the config."""
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


class ElasticityError(ValueError):
    """Scripts catch errors of elasticity by this name."""


class ElasticityConfigError(ElasticityError):
    """The section is off, or has a fault."""


class ElasticityIncompatibleWorldSize(ElasticityError):  # DeepSpeed's name
    """This number of ranks cannot train with the batch size."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return whether the section is on."""
    return (ds_config.get("elasticity") or {}).get("enabled", False) in (True, "true")


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """Return (global batch, data-parallel sizes that divide it), and the microbatch of a rank if it is known.

    world_size: 0: WORLD_SIZE of the environment for version 0.2, unknown for version 0.1. The microbatch is returned
    if world_size or return_microbatch is given. target_deepspeed_version has no effect.
    Raises ElasticityConfigError, and ElasticityIncompatibleWorldSize if the batch does not fit the ranks.
    """
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError('elasticity: expected a section with "enabled": true, found none')
    given = ds_config["elasticity"]
    # lowtide takes this number from `parallel`, and refuses a section that contradicts it.
    shared = given.get("model_parallel_size", 1)
    try:
        section = Config.load({"elasticity": given, "parallel": {"tensor": shared}}).elasticity
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from error
    batch, sizes = legal_sizes(section)
    ranks = world_size or (int(os.environ.get("WORLD_SIZE", "0")) if section.version == 0.2 else 0)
    if not ranks:
        if section.version == 0.2 or return_microbatch:
            raise ElasticityConfigError(
                "compute_elastic_config: expected world_size, or WORLD_SIZE in the environment, for version 0.2 and "
                "for the microbatch, found neither"
            )
        return batch, list(sizes)
    size = ranks // section.model_parallel_size
    found = elastic_batch(section, size)
    if isinstance(found, Fault):
        raise ElasticityIncompatibleWorldSize(str(found))
    triple = found.train, list(sizes) if size in sizes else [size], found.micro
    return triple if world_size or return_microbatch else triple[:2]


def __getattr__(name: str) -> Any:
    """Return Accelerate's `HfDeepSpeedConfig`: the class of transformers needs the package deepspeed.

    It reads the config (`get_value`, `is_zero3`, `is_offload`). `from_pretrained` ignores it: docs/deepspeed.md
    describes models that no rank holds as a whole.
    """
    if name != "HfDeepSpeedConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    return HfDeepSpeedConfig
