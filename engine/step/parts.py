"""The parts of an engine."""

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
"""batch -> (peak bytes by kind, peak bytes of the total). Raises ValueError if it cannot be predicted."""


@dataclass
class Parts:
    """The parts that `initialize` has made from a model and a config. Features of a step read them."""

    config: Config
    mesh: Mesh
    module: nn.Module
    runner: Runner
    optimizer: ShardedOptimizer
    added_groups: AddedParameterGroups
    activations: ActivationOffload | None  # moves the activations of the whole model
    learning_rates: LearningRates
    steps: Steps
    patches: ModelPatches  # all changes to the module, for undoing
    close_last: Sequence[Callable[[], None]]
    blueprint: Blueprint
    memory_prediction: Prediction | str  # for a memory report; or why it cannot be predicted
    model_flops: ModelFlops | None  # of the whole model, if monitors are on
    samples_per_step: int | None  # of all ranks; None: the config has no batch size, and that of `config` is a default
    trial: StepFeature | None  # of `lowtide tune`: it ends the script after some steps
    archive: Archive = field(init=False)  # the engine's; a new archive after each added group of parameters
    save: weakref.WeakMethod[Callable[[str], str]] = field(init=False)  # Engine.save_checkpoint
