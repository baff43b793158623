"""An engine's optimizer and schedule as the loops of Hugging Face call them, and the states of an Accelerator.

What accelerate saves beside the engines is as it was, and there is a checkpoint of each engine.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import MODEL_NAME

from ..engine.engine import Engine
from ..engine.step.features import StepResult

_Base: Any = object  # what the mixin stands before


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate has no types
    """`step` is the engine's: norm, clipping, update of the shards. Schedulers act on its `param_groups`.

    Acts, as AcceleratedOptimizer does, at the end of an accumulation alone.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer | None) -> None:
        """optimizer: the one that the engine was made with; None: the config's."""
        super().__init__(engine.optimizer if optimizer is None else optimizer, device_placement=False)
        self.engine = engine
        self.last: StepResult | None = None
        """What the last step has given."""
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        """Raises ValueError for a closure: the gradients of a step are those of its backwards."""
        if closure is not None:
            raise ValueError("optimizer.step(): expected no closure, found one; call backward before it")
        if self.gradient_state.sync_gradients:
            self.last = self.engine.step()
            self._is_overflow = self.last.skipped

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self.gradient_state.sync_gradients:
            self.engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Of the options alone. Raises StateError once there are states, which no rank has as a whole."""
        found: dict[str, Any] = self.engine.optimizer.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.engine.optimizer.load_state_dict(state_dict)


class EngineSchedule:
    """The schedule of the config, to be looked at: the engine follows it by itself, and keeps it in its checkpoints."""

    def __init__(self, optimizer: EngineOptimizer) -> None:
        self.optimizer = optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def get_last_lr(self) -> list[float]:
        """That of the last step; before the first one, that of the first."""
        last = self.optimizer.last
        return [self.optimizer.engine.lr if last is None else float(last.lr)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing."""


@contextmanager
def same_random_state() -> Iterator[None]:
    """Python's, numpy's and torch's generators are at its end where they were at its beginning."""
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)


class SavedStates(_Base):  # type: ignore[misc]  # mypy knows nothing of that class
    """Before accelerate.Accelerator in the bases of a class: `save_state` and `load_state` know the engines."""

    engines: list[Engine]
    _models: list[Any]
    _optimizers: list[Any]

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """As accelerate's; of each engine a checkpoint below the folder, which loads at any number of ranks."""
        with self._engines_aside(self._save_model_state_pre_hook, lambda models: (models, [])):
            folder: str = super().save_state(output_dir, safe_serialization, **kwargs)
        for tag, engine in self._tags():
            engine.save_checkpoint(folder, tag)
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """As accelerate's, of what `save_state` has saved."""
        folder = self._newest_state() if input_dir is None else os.path.expanduser(input_dir)
        with same_random_state():  # which are restored below, each rank's own
            for tag, engine in self._tags():
                engine.load_checkpoint(folder, tag)
        with self._engines_aside(self._load_model_state_pre_hook, lambda models: (models,)):
            super().load_state(folder, load_kwargs, **kwargs)

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _tags(self) -> list[tuple[str, Engine]]:
        """Names of the checkpoints of engines that train, in the order in which they were prepared."""
        trained = [engine for engine in self.engines if engine.optimizer.param_groups]
        return [(MODEL_NAME if not index else f"{MODEL_NAME}_{index}", one) for index, one in enumerate(trained)]

    def _newest_state(self) -> str:
        naming = self.project_configuration
        if not naming.automatic_checkpoint_naming:
            raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
        folders = list(Path(naming.project_dir, "checkpoints").glob("checkpoint_*"))
        return str(max(folders, key=lambda folder: int(folder.name.rpartition("_")[2])))

    @contextmanager
    def _engines_aside(
        self, hooks: dict[Any, Callable[..., None]], shown: Callable[[list[Any]], Any]
    ) -> Iterator[None]:
        """Accelerate saves and loads all but engines; the caller's hooks see the engines."""
        models, optimizers, kept = self._models, self._optimizers, dict(hooks)
        self._models = [one for one in models if not isinstance(one, Engine)]
        self._optimizers = [one for one in optimizers if not isinstance(one, EngineOptimizer)]
        for key, hook in kept.items():
            hooks[key] = partial(_call_hook, hook, shown(list(models)))
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
            hooks.update(kept)


def _call_hook(hook: Callable[..., None], shown: Sequence[Any], *args: Any) -> None:
    """A hook of `save_state` (models, weights, folder) or `load_state` (models, folder)."""
    hook(*shown, args[-1])
