"""What an engine is put together from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...comm import Mesh
from ...model.patches import ModelPatches
from ...offload import ActivationOffload
from ...zero.optimizer import ShardedOptimizer
from ..archive.archive import Archive
from ..blueprint.blueprint import Blueprint
from ..config.config import Config
from ..model.model_flops import ModelFlops
from .added_groups import AddedParameterGroups
from .features import StepFeature
from .learning_rates import LearningRates
from .runner import Runner
from .steps import Steps

Prediction = Callable[[Any], tuple[Mapping[str, int], int]]
"""From a batch to the peak of each kind of bytes, and of their total. Raises ValueError where there is none."""


@dataclass
class Parts:
    """What `initialize` has made of a model and a config, and what features of a step look at."""

    config: Config
    mesh: Mesh
    module: nn.Module
    runner: Runner
    optimizer: ShardedOptimizer
    added_groups: AddedParameterGroups
    activations: ActivationOffload | None  # what moves those of the whole model
    learning_rates: LearningRates
    steps: Steps
    patches: ModelPatches  # what stands on the module
    close_last: Sequence[Callable[[], None]]
    blueprint: Blueprint
    memory_prediction: Prediction | str  # of a memory report; or why there is none
    model_flops: ModelFlops | None  # of the whole model, where monitors are on
    trial: StepFeature | None  # of `lowtide tune`, which ends the script after some steps
    archive: Archive = field(init=False)  # the engine's, of the groups of parameters that there are now
    save: weakref.WeakMethod[Callable[[str], str]] = field(init=False)  # the engine's save_checkpoint
