"""Estimates and bounds of choices for one model on one machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

from torch import nn

from ...model import blocks as model_blocks
from ...pipe.schedules.recurrence import Recurrence
from ...pipe.schedules.registry import make_schedule
from ...pipe.split.split import SplitPlan
from ...zero.units import UnitPlan
from ..blueprint import Blueprint
from ..config.config import Config
from ..pipeline_plan import PipelinePlan, split_of
from .bounds import Bounds
from .choice import Choice, num_chunks, without_defaults
from .estimate import Estimate, StepParts, Work
from .machine import Machine
from .pipelined import PipelineParts, Run, Stages, recurrence_of, send_seconds, simulated_microbatches
from .profile import Profile
from .search import Bound, Found

Made = TypeVar("Made")

_FIRST, _SECOND = 1, 2  # rows of which a line of bounds is drawn


class Runs(Protocol):
    """What gives a microbatch's profile: see `MetaRun.profile`."""

    def profile(self, batch: Any, rows: int, every: int, is_direct: bool = False) -> Profile: ...


class Planner:
    """What choices take. base: the config as a file has it, without what is chosen."""

    def __init__(
        self,
        model: nn.Module,
        base: Mapping[str, Any],
        machine: Machine,
        make_runs: Callable[[Blueprint], Runs],
        batch: Any,
    ) -> None:
        """model: on any device. make_runs: from any blueprint of the model. batch: as the model takes one."""
        self._model, self.machine, self._batch = model, machine, batch
        # An optimizer that is passed to initialize is not known here: most are Adam, and none has more states.
        self._assumed = {} if base.get("optimizer") else {"optimizer": {"type": "adamw", "params": {}}}
        self._base = {**base, **self._assumed}
        self._splits: dict[int, SplitPlan] = {}
        self._stage_plans: dict[tuple[Any, ...], PipelinePlan] = {}
        self._profiles: dict[tuple[int, int, bool], Profile] = {}
        self._steps: dict[Choice, StepParts] = {}
        self._pipelines: dict[Choice, PipelineParts] = {}
        self._stages: dict[tuple[Any, ...], Stages] = {}
        self._recurrences: dict[tuple[Any, ...], Recurrence] = {}
        self._runs_of: dict[tuple[Any, ...], Run] = {}
        self._estimates: dict[Choice, Estimate] = {}
        self._first = self._blueprint(Choice(), None)
        self._runs = make_runs(self._first)

    @cached_property
    def num_blocks(self) -> int:
        """As many as a pipeline can have stages."""
        return len(model_blocks.find_blocks(self._model))

    def config(self, choice: Choice) -> dict[str, Any]:
        """A config file, with what is not the default."""
        values = without_defaults(choice.applied(self._base, self.machine.num_devices))
        for key in self._assumed:
            values.pop(key)
        return values

    # -- estimates ------------------------------------------------------------------------------------------------

    def estimate(self, choice: Choice) -> Estimate:
        """Raises ValueError where the model cannot be trained so."""
        if choice not in self._estimates:
            self._estimates[choice] = self._estimated(choice)
        return self._estimates[choice]

    def found(self, choice: Choice, number: int) -> Found[Choice, Estimate]:
        """For `search`."""
        value = self.estimate(choice)
        fits = not value.missing(self.machine)
        return Found(choice, value, value.seconds_per_sample, value.peak_bytes, fits, number)

    def _estimated(self, choice: Choice) -> Estimate:
        config = self._resolved(choice)
        if choice.pipeline == 1:
            parts = self._cached(self._steps, choice.states(), lambda: StepParts(self._of_states(choice), self.machine))
            return parts.estimate(config, self.profile(choice.rows, choice.every, parts.is_direct))
        of_stages = self._cached(
            self._pipelines, choice.states(), lambda: PipelineParts(self._of_states(choice), self.machine)
        )
        key = (choice.pipeline, choice.schedule, choice.chunks, choice.rows, choice.every)
        profile = self.profile(choice.rows, choice.every)
        stages = self._cached(self._stages, key, lambda: Stages(of_stages.split, profile, Work(profile, self.machine)))
        run = self._cached(self._runs_of, (*key, choice.accumulation), lambda: self._run(choice, stages))
        return of_stages.estimate(config, stages, run)

    def _run(self, choice: Choice, stages: Stages) -> Run:
        """What the schedule takes; it depends on neither stage nor offload."""
        count = simulated_microbatches(choice.pipeline, choice.accumulation)
        recurrence = self._cached(
            self._recurrences,
            (choice.pipeline, choice.schedule, choice.chunks, count),
            lambda: recurrence_of(make_schedule(choice.schedule, choice.pipeline, count, choice.chunks)),
        )
        return Run.of(recurrence, stages.costs(send_seconds(stages, self.machine)), choice.accumulation)

    def _step_parts(self, choice: Choice) -> StepParts:
        return StepParts(self._of_states(choice), self.machine)

    @staticmethod
    def _cached(known: dict[Any, Made], key: Any, make: Callable[[], Made]) -> Made:
        if key not in known:
            known[key] = make()
        return known[key]

    def _of_states(self, choice: Choice) -> Blueprint:
        """With as few microbatches as have the same memory."""
        return self._blueprint(choice.states(), self._first.units)

    def _resolved(self, choice: Choice) -> Config:
        """Made of one that was checked: a choice is valid where its space is."""
        return Config.load(choice.applied(self._base, self.machine.num_devices)).resolve(self.machine.num_devices)

    def _blueprint(self, choice: Choice, units: Sequence[UnitPlan] | None) -> Blueprint:
        config = self._resolved(choice)
        split = None
        if choice.pipeline > 1:
            key = (choice.pipeline, choice.schedule, choice.chunks)
            split = self._cached(self._stage_plans, key, lambda: self._stage_plan(choice, config))
        return Blueprint.of(
            config,
            self._model,
            self.machine.num_devices,
            device=self.machine.device,
            num_hosts=self.machine.num_hosts,
            split=split,
            units=units,
        )

    def _stage_plan(self, choice: Choice, config: Config) -> PipelinePlan:
        num_stages = choice.pipeline * num_chunks(choice)
        split = self._cached(self._splits, num_stages, lambda: split_of(config, self._model, None, None))
        return PipelinePlan.of(config, self._model, split)

    def profile(self, rows: int, every: int, is_direct: bool = False) -> Profile:
        """Of a microbatch, run on the meta device."""
        key = (rows, every, is_direct)
        if key not in self._profiles:
            self._profiles[key] = self._runs.profile(self._batch, rows, every, is_direct)
        return self._profiles[key]

    # -- bounds ---------------------------------------------------------------------------------------------------

    def bound(self, choice: Choice) -> Bound:
        """What a choice takes at least: nothing is known of padding, of waiting, and of how even stages are."""
        return self._bounds.of(choice)

    @cached_property
    def _bounds(self) -> Bounds:
        names = [name for name, _ in model_blocks.find_blocks(self._model)]
        return Bounds(self.machine, self._first, self._line, names, self._beside)

    def _beside(self, frees_parameters: bool) -> Sequence[tuple[int, str, bool]]:
        """Of groups without padding, so that it is no more than where they are divided otherwise."""
        parts = self._step_parts(Choice(stage=3 if frees_parameters else 0))
        groups = parts.blueprint.places[0].groups
        share = sum(one.layout.numel for one in groups) / sum(one.layout.padded_numel for one in groups)
        moments = parts.order.moments
        return [(int((one.gathered_bytes + one.staged_bytes) * share), one.part, one.is_backward) for one in moments]

    def _line(self, rows: int, every: int) -> Profile:
        """A profile that says no more than a run would."""
        if rows <= _SECOND:
            return self.profile(rows, every)
        return self.profile(_FIRST, every).extended(self.profile(_SECOND, every), rows)
