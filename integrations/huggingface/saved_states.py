"""States of an Accelerator with engines: what accelerate saves beside them, and a checkpoint of each engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import MODEL_NAME

from ..engine.engine import Engine
from .engine_optimizer import EngineOptimizer
from .random_state import same_random_state

_Base: Any = object  # what the mixin stands before


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
