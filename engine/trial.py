"""A process of `lowtide tune`: it runs a few steps of the user's script with another config.

[Note: how a script comes to the config of a trial] The script is not changed. LOWTIDE_TRIAL in its environment names a
request file. The first call of `initialize` with an optimizer uses its config instead of the script's. Replacing the
path among the script's arguments would miss configs that a script makes itself, or changes after reading; every script
calls `initialize`. The variable is then removed from the environment, so further engines of the script are not
affected.

    {"task": "plan"}     rank 0 plans with the script's model, and writes the best plans
    {"task": "measure"}  some steps are timed; then the script is ended, as by SystemExit

A trial leaves nothing behind: it saves and exports nothing, and its config has no section that writes.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from ..comm import World
from ..watch.log import logger
from .config.batch import BATCH_KEYS
from .config.config import Config
from .config.read import read
from .config.translate import filled
from .planner import planner
from .step.batch import described, made, of_whole
from .step.features import StepFeature, StepResult
from .step.parts import Parts

VARIABLE = "LOWTIDE_TRIAL"
_WRITERS = ("tensorboard", "wandb", "csv_monitor", "profile", "flops_profiler", "comms_logger")
_NEVER_IN_A_TRIAL = ("checkpoint", "memory_report", *_WRITERS)
# And not the first step, which makes the optimizer's states.
_RECORDED = 2  # a step that is not timed


@dataclass(frozen=True)
class TrialRequest:
    """The task of a trial. config: laid over the script's config, or (is_whole) replaces it.

    warmup, steps: number of steps that are not timed, and timed. batch: a microbatch from `described`; None: unknown.
    """

    task: str
    config: Mapping[str, Any]
    result: str
    is_whole: bool = False
    warmup: int = 3
    steps: int = 10
    num_plans: int = 10
    batch: Any = None
    sequence: int | None = None

    def write(self, path: Path) -> None:
        _write(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> TrialRequest:
        """Read a request. Raise OSError, ValueError or TypeError if the file is no request."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass
class Trial(StepFeature):
    """A trial in this process."""

    request: TrialRequest
    config: dict[str, Any] = field(default_factory=dict)  # of the training, with sections that a trial drops
    batch: Any = None  # the first microbatch in training mode, from `described`
    _is_of_training: bool = False
    _num_sharers: int = 1  # ranks that share a sequence
    _ends: list[float] = field(default_factory=list)  # of steps, by time.monotonic()
    _world: World | None = None
    _samples: int = 0
    _is_written: bool = False

    @classmethod
    def asked(cls, config: Any, optimizer: Any, fill: Mapping[str, object] | None = None) -> Trial | None:
        """Return the trial, if this call of `initialize` is a trial. config, optimizer, fill: passed by the script.

        Raises ValueError if the variable names no request file.
        """
        path = os.environ.get(VARIABLE)
        # An engine without an optimizer (a teacher) is not the training that is tuned.
        if path is None or (optimizer is None and Config.load(config, fill=fill).optimizer is None):
            return None
        try:
            request = TrialRequest.read(Path(path))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"{VARIABLE}: expected a file of `lowtide tune` that every host sees, found {path} ({error}). To train "
                "as usual, remove the variable from the environment"
            ) from error
        del os.environ[VARIABLE]
        return cls(request)

    def taken(self, source: Any, fill: Mapping[str, object] | None = None) -> Config:
        """Return the config of this process, which replaces the script's. Raise ConfigError."""
        given = self.request.config
        config = dict(given) if self.request.is_whole else laid_over(given, _plain(source))
        self.config = filled(config, fill, Config)[0] if fill else config
        return Config.load(self._trained)

    @property
    def _trained(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.config.items() if key not in _NEVER_IN_A_TRIAL}
        if self.request.task == "plan" or self.request.warmup <= _RECORDED:
            return kept
        return {**kept, "memory_report": {"folder": str(Path(self.request.result).parent), "step": _RECORDED}}

    @property
    def note(self) -> str:
        return f"trial of `lowtide tune`: in the place of the script's config stands {json.dumps(self._trained)}"

    # -- a plan ---------------------------------------------------------------------------------------------------

    def plan(
        self,
        config: Config,
        model: nn.Module | Callable[[], nn.Module],
        world: World,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        sample_batch: Any,
    ) -> None:
        """Write the best plans, or why there are none, and end the script. A collective."""
        # A collective, so all ranks ask it before rank 0 plans alone.
        num_hosts = world.num_hosts
        if world.rank == 0:
            try:
                found = self._planned(config, model, world, num_hosts, loss_fn, sample_batch)
            except Exception as error:  # the model's forward may raise anything
                traceback.print_exc()
                found = {"failure": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}
            _write(Path(self.request.result), found)
        # The other ranks wait here while rank 0 plans, so that all ranks end together.
        world.broadcast_object(None)
        raise SystemExit(0)

    def _planned(
        self,
        config: Config,
        model: nn.Module | Callable[[], nn.Module],
        world: World,
        num_hosts: int,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        sample_batch: Any,
    ) -> dict[str, Any]:
        wanted = self.request
        batch = made(wanted.batch) if wanted.batch is not None else sample_batch
        config = self._with_batch(config, world.size)
        found: dict[str, Any] = planner().plans_of_trial(
            model, config, world, num_hosts, loss_fn, batch, wanted.sequence, wanted.num_plans
        )
        kept = {key: self.config[key] for key in _NEVER_IN_A_TRIAL if key in self.config}
        for one in found["best"]:
            # A trial drops sections that write. The configs that it proposes are for the user, so they have them again.
            one["config"] |= kept
        if found["given"] is not None:
            found["given"]["config"] = self.config
        return found

    def _with_batch(self, config: Config, world_size: int) -> Config:
        """Return the config with the samples of a step, which tuning must not change."""
        if config.planned_keys or config.train_micro_batch_size_per_gpu is None:
            return config
        resolved = config.resolve(world_size)
        return Config.load({**self._trained, "train_batch_size": resolved.train_batch_size})

    # -- steps ----------------------------------------------------------------------------------------------------

    def watch(self, world: World, module: nn.Module, samples: int, num_sharers: int) -> Callable[[], None]:
        """Prepare for the first step. samples: per step, over all ranks. num_sharers: ranks that share a sequence.

        Returns a function that removes the hook from the module.
        """
        self._world, self._samples, self._num_sharers = world, samples, num_sharers
        handle = module.register_forward_pre_hook(self._see, with_kwargs=True, prepend=True)
        atexit.register(self._finish)  # a script may have fewer steps
        return handle.remove

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The first forward may be a check in eval mode with a few tokens: see `step/self_checks.py`.
        is_better = self.batch is None or (module.training and not self._is_of_training)
        if is_better and not (args and kwargs):
            self._is_of_training = module.training
            self.batch = of_whole(described(kwargs or args), self._num_sharers)
            if self._world is not None and not self._world.rank:  # known even if this step fails
                _write(Path(self.request.result), {"num_steps": 0, "batch": self.batch})

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return cast(Self | None, parts.trial)

    def after_step(self, step: int, result: StepResult) -> None:
        """Note the time of the step. The last step of the trial raises SystemExit."""
        is_last = len(self._ends) == self.request.warmup + self.request.steps - 1
        # Only at the end: a wait in each step would measure a slower training than the user's.
        if is_last and self._world is not None and self._world.device.type != "cpu":
            torch.accelerator.synchronize(self._world.device)
        self._ends.append(time.monotonic())
        if is_last:
            self._finish()
            logger.info("trial of `lowtide tune`: %d steps are done, leaving", len(self._ends))
            raise SystemExit(0)

    def forbids_files(self, what: str) -> bool:
        """Forbid all files: a trial must not overwrite the weights of a training."""
        if self._world is not None and not self._world.rank:
            logger.info("trial of `lowtide tune`: no %s is written", what)
        return True

    def _finish(self) -> None:
        """Write the measured times, once."""
        assert self._world is not None
        # The end of the last untimed step is the beginning of the first timed step. Of the first step no beginning is
        # known.
        timed = self._ends[max(self.request.warmup, 1) - 1 :]
        if self._is_written or self._world.rank:
            return
        self._is_written = True
        seconds = [after - before for before, after in itertools.pairwise(timed)]
        _write(
            Path(self.request.result),
            {
                "step_seconds": statistics.median(seconds) if seconds else None,
                "steps": seconds,
                "num_steps": len(self._ends),
                "samples": self._samples,
                "world_size": self._world.size,
                "batch": self.batch,
                "config": self.config,
            },
        )


def _write(path: Path, values: Mapping[str, Any]) -> None:
    # `lowtide tune` never reads half a file: the name comes with the rename.
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def _plain(source: Any) -> dict[str, Any]:
    """Return the script's config as a file would have it."""
    return dict(planner().without_defaults(source.as_dict()) if isinstance(source, Config) else read(source)[0])


def laid_over(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `own` with the keys of `config` in place of its keys, recursively.

    The three batch sizes belong together, so all come from the same config; so do an optimizer and a scheduler.
    """
    kept = dict(own)
    if any(config.get(key) is not None for key in BATCH_KEYS):
        # The three sizes are an equation: two of one config and the third of another need not fit.
        kept = {key: value for key, value in kept.items() if key not in BATCH_KEYS}
    merged = dict(kept)
    for key, value in config.items():
        before = merged.get(key)
        # Parameters of two types of optimizer do not mix.
        is_whole = key in ("optimizer", "scheduler")
        both = isinstance(value, Mapping) and isinstance(before, Mapping)
        merged[key] = laid_over(value, before) if both and not is_whole else value  # type: ignore[arg-type]  # both
    return merged
