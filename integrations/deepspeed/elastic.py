"""What scripts import as `deepspeed.elasticity`: the batch that the section `elasticity` of a config chooses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..engine.config.batch import elastic_batch, legal_sizes
from ..engine.config.config import Config
from ..engine.config.errors import ConfigError, Fault


class ElasticityError(ValueError):
    """The name by which scripts catch errors of elasticity."""


class ElasticityConfigError(ElasticityError):
    """The section is off, or has a fault."""


class ElasticityIncompatibleWorldSize(ElasticityError):  # DeepSpeed's name
    """So many ranks cannot train with the batch."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the section is on."""
    return (ds_config.get("elasticity") or {}).get("enabled", False) in (True, "true")


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """(global batch, the numbers of data-parallel ranks that divide it), and a rank's microbatch where it is known.

    world_size: ranks; 0: those of WORLD_SIZE for version 0.2, not known for 0.1. The microbatch is returned with a
    world_size, and with return_microbatch. target_deepspeed_version has no effect. Raises ElasticityConfigError, and
    ElasticityIncompatibleWorldSize for ranks that do not divide the batch (version 0.1) or that it is too small for.
    """
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError('elasticity: expected a section with "enabled": true, found none that is on')
    given = ds_config["elasticity"]
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
                "compute_elastic_config: expected a world_size, or WORLD_SIZE in the environment, for version 0.2 and "
                "for the microbatch, found neither"
            )
        return batch, list(sizes)
    size = ranks // section.model_parallel_size
    found = elastic_batch(section, size)
    if isinstance(found, Fault):
        raise ElasticityIncompatibleWorldSize(str(found))
    triple = found.train, list(sizes) if size in sizes else [size], found.micro
    return triple if world_size or return_microbatch else triple[:2]
