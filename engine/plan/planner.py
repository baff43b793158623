"""Estimates and bounds of choices for one model on one machine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

from torch import nn

from ...model import blocks as model_blocks
from ...parallel.plan import TensorPlan
from ...pipe.schedules.registry import make_schedule
from ..blueprint.blueprint import Blueprint
from ..blueprint.pipeline_plan import PipelinePlan, split_of
from ..blueprint.places import AlikePlaces
from ..config.config import Config
from .bounds import Bounds
from .choice import Choice, divisors, num_chunks, without_defaults, without_idle_folders
from .estimate import Estimate, MachineWork, StepParts
from .layered import LayeredParts
from .machine import Machine
from .pipelined import PipelineParts, ScheduleRun, recurrence_of, simulated_microbatches
from .profile import ComputePhase, Profile
from .search import Bound, Found
from .stages import Stages

Made = TypeVar("Made")


class Memo:
    """By what it is, and of what it was made."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, Hashable], Any] = {}

    def once(self, what: str, of: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` gave when it was called of this; it is called where it was not. An error is not kept."""
        key = (what, of)
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    def first(self, what: str, of: Hashable) -> Any:
        """What is known already; None where nothing is."""
        return self._made.get((what, of))


_FIRST, _SECOND = 1, 2  # rows of which a line of bounds is drawn
_LEAST_TOKENS = 512  # of a sequence on a rank: a smaller part has small products, and as many exchanges
_DEGREES = ("pipeline", "tensor", "sequence", "expert")
_WHOLE = Choice()  # nothing is split
_AT_HOME: dict[str, Any] = {
    "stage": 0, "shard_size": None, "partition": 1, "offload_optimizer": "none", "offload_param": "none"
}  # fmt: skip


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
        least_tokens: int = _LEAST_TOKENS,
    ) -> None:
        """model: on any device. make_runs: of the degrees of a blueprint. batch: as the model takes one.

        least_tokens: of a sequence on a rank, where it is chosen how many share one.
        """
        self._model, self.machine, self._batch, self._least_tokens = model, machine, batch, least_tokens
        # An optimizer that is passed to initialize is not known here: most are Adam, and none has more states.
        self._assumed = {} if base.get("optimizer") else {"optimizer": {"type": "adamw", "params": {}}}
        self._base = {**base, **self._assumed}
        self._make_runs, self._alike, self._memo = make_runs, AlikePlaces(), Memo()
        self._known: dict[str, Any] = {}  # of the model, whatever is chosen
        self._first = self._undivided(_WHOLE)
        self._known = {name: getattr(self._first, name) for name in ("units", "dtypes", "optimizer")}

    @cached_property
    def num_blocks(self) -> int:
        """As many as a pipeline can have stages."""
        return len(model_blocks.find_blocks(self._model))

    def config(self, choice: Choice) -> dict[str, Any]:
        """A config file, with what is not the default."""
        values = without_defaults(without_idle_folders(choice.applied(self._base, self.machine.num_devices)))
        for key in self._assumed:
            values.pop(key)
        return values

    # -- estimates ------------------------------------------------------------------------------------------------

    def estimate(self, choice: Choice) -> Estimate:
        """Raises ValueError where the model cannot be trained so."""
        return self._memo.once("estimate", choice, lambda: self._estimated(choice))

    def found(self, choice: Choice, number: int) -> Found[Choice, Estimate]:
        """For `search`."""
        value = self.estimate(choice)
        fits = not value.missing(self.machine)
        return Found(choice, value, value.seconds_per_sample, value.peak_bytes, fits, number)

    def _estimated(self, choice: Choice) -> Estimate:
        config, states = self._resolved(choice), choice.states()
        if self._is_layered:
            in_layers = self._memo.once("layers", states, lambda: LayeredParts(self._of_states(choice), self.machine))
            profile = self.profile(choice.rows, choice.every, degrees=choice)
            return in_layers.estimate(config, Stages(in_layers.split, profile, self._work(profile)))
        if choice.pipeline == 1:
            parts = self._memo.once("step", states, lambda: self._step_parts(choice))
            return parts.estimate(config, self.profile(choice.rows, choice.every, parts.is_direct, choice))
        of_stages = self._memo.once("pipeline", states, lambda: PipelineParts(self._of_states(choice), self.machine))
        key = (choice.degrees, choice.schedule, choice.chunks, choice.rows, choice.every)
        profile = self.profile(choice.rows, choice.every, degrees=choice)
        stages = self._memo.once("stages", key, lambda: Stages(of_stages.split, profile, self._work(profile)))
        run = self._memo.once("schedule's run", (*key, choice.accumulation), lambda: self._run(choice, stages))
        return of_stages.estimate(config, stages, run)

    def _step_parts(self, choice: Choice) -> StepParts:
        where, what = "parts of where all but states rests", replace(choice.states(), offload_optimizer="none")
        made = StepParts(self._of_states(choice), self.machine, like=self._memo.first(where, what))
        self._memo.once(where, what, lambda: made)
        return made

    def _work(self, profile: Profile) -> MachineWork:
        return MachineWork(profile, self.machine, self._first.route)

    def _run(self, choice: Choice, stages: Stages) -> ScheduleRun:
        """What the schedule takes; it depends on neither stage nor offload."""
        count = simulated_microbatches(choice.pipeline, choice.accumulation)
        recurrence = self._memo.once(
            "recurrence",
            (choice.pipeline, choice.schedule, choice.chunks, count),
            lambda: recurrence_of(make_schedule(choice.schedule, choice.pipeline, count, choice.chunks)),
        )
        return ScheduleRun.of(recurrence, stages.costs(stages.send_seconds(self.machine)), choice.accumulation)

    def _of_states(self, choice: Choice) -> Blueprint:
        """With as few microbatches as have the same memory."""
        return self._blueprint(choice.states())

    def _resolved(self, choice: Choice) -> Config:
        """Made of one that was checked: a choice is valid where its space is."""
        config = Config.load(choice.applied(self._base, self.machine.num_devices))
        return config.resolve(self.machine.num_devices)

    @property
    def _is_layered(self) -> bool:
        return bool((self._base.get("zero_optimization") or {}).get("layered_gradient_accumulation"))

    def _blueprint(self, choice: Choice) -> Blueprint:
        config = self._resolved(choice)
        split = None
        if choice.pipeline > 1 or self._is_layered:
            key = (choice.pipeline, choice.schedule, choice.chunks)
            split = self._memo.once("plan of stages", key, lambda: self._stage_plan(choice, config))
        return Blueprint.of(
            config,
            self._model,
            self.machine.num_devices,
            device=self.machine.device,
            num_hosts=self.machine.num_hosts,
            split=split,
            tensor=None if choice.tensor == 1 else self._tensor_plan(choice.tensor, config),
            alike=self._alike,
            **self._known,
        )

    def _tensor_plan(self, degree: int, config: Config) -> TensorPlan:
        plan, has_parts = config.tensor_parallel.plan, config.parallel.tensor_sequence
        return self._memo.once("tensor", degree, lambda: TensorPlan.of(self._model, degree, plan, has_parts))

    def _stage_plan(self, choice: Choice, config: Config) -> PipelinePlan:
        num_stages = choice.pipeline * num_chunks(choice)
        split = self._memo.once("split", num_stages, lambda: split_of(config, self._model, None))
        return PipelinePlan.of(config, self._model, split)

    def profile(self, rows: int, every: int, is_direct: bool = False, degrees: Choice = _WHOLE) -> Profile:
        """Of a microbatch, run on the meta device. degrees: a choice that has those of layers and sequences."""
        split, num_stages = replace(degrees.degrees, pipeline=1), 1
        if (self._base.get("parallel") or {}).get("tensor_sequence") and min(degrees.pipeline, degrees.tensor) > 1:
            # Parts of tokens are whole between stages.
            split, num_stages = replace(degrees.states(), **_AT_HOME), degrees.pipeline * num_chunks(degrees)
        of_run = (replace(split.degrees, pipeline=1), num_stages)

        def made() -> Profile:
            runs = self._memo.once("runs", of_run, lambda: self._make_runs(self._blueprint(split)))
            return runs.profile(self._batch, rows, every, is_direct)

        return self._memo.once("profile", (*of_run, rows, every, is_direct), made)

    # -- degrees --------------------------------------------------------------------------------------------------

    def can_split(self, degrees: Choice) -> bool:
        """For `Space`."""
        if degrees.sequence > 1 and self.profile(_FIRST, 0).tokens // degrees.sequence < self._least_tokens:
            return False
        return self.fault(degrees) is None

    def fault(self, degrees: Choice) -> str | None:
        """Why layers, sequences and experts cannot be split so, or why that is not planned; None where they can."""
        fault = self._fault_of_config(Choice(*(min(getattr(degrees, name), 2) for name in _DEGREES)))
        return fault or self._fault_of_model(replace(degrees.degrees, pipeline=1))

    def refusal(self, choice: Choice) -> str | None:
        """Why the model cannot be trained so, whatever fits."""
        return _fault(lambda: self.estimate(choice))

    def _fault_of_config(self, some: Choice) -> str | None:
        """What does not go together, whatever the degrees are."""
        ranks = some.ranks_of_sample * some.expert
        several = replace(some, accumulation=some.pipeline)
        load = partial(Config.load, several.applied(self._base, ranks))
        return self._memo.once("fault of the config", several, lambda: _fault(load))

    def _fault_of_model(self, split: Choice) -> str | None:
        if split == _WHOLE:
            return None

        def found() -> str | None:
            # Heads that a number of ranks does not divide are not divided by more: the model is not run for each. Of a
            # tensor degree that is not so: several ranks may have the same head of keys.
            smaller = {replace(split, sequence=one) for one in divisors(split.sequence)[:-1]}
            smaller |= {replace(split, tensor=1), replace(split, expert=1)} - {split}
            of_smaller = next((fault for one in smaller if (fault := self._fault_of_model(one))), None)
            return of_smaller or _fault(lambda: self.profile(_FIRST, 0, degrees=split))

        return self._memo.once("fault of the model", split, found)

    # -- bounds ---------------------------------------------------------------------------------------------------

    def bound(self, choice: Choice) -> Bound:
        """What a choice takes at least: nothing is known of padding, of waiting, and of how even stages are."""
        key = choice.tensor, choice.sequence, choice.expert
        bounds = self._memo.once("bounds", key, lambda: self._bounds_of(replace(choice.degrees, pipeline=1)))
        return bounds.of(choice)

    def _bounds_of(self, split: Choice) -> Bounds:
        """Of choices with these degrees of layers and sequences."""
        names = [name for name, _ in model_blocks.find_blocks(self._model)]
        whole_sequences = replace(split, sequence=1)

        def line(rows: int, every: int) -> Profile:
            """A profile that says no more than a run would."""
            if rows <= _SECOND or split.sequence > 1:
                return self.profile(rows, every, degrees=split)
            one, other = (self.profile(count, every, degrees=split) for count in (_FIRST, _SECOND))
            return one.extended(other, rows)

        def beside(frees_parameters: bool) -> Sequence[tuple[int, str, ComputePhase]]:
            key = (whole_sequences, frees_parameters)
            return self._memo.once("moments", key, lambda: self._moments(whole_sequences, frees_parameters))

        return Bounds(self.machine, self._undivided(whole_sequences), line, names, beside)

    def _undivided(self, split: Choice) -> Blueprint:
        """In which nothing is divided over data-parallel ranks."""
        return self._memo.once("undivided", split, lambda: self._blueprint(split))

    def _moments(self, split: Choice, frees_parameters: bool) -> Sequence[tuple[int, str, ComputePhase]]:
        """Of groups without padding, so that it is no more than where they are divided otherwise."""
        parts = StepParts(self._of_states(replace(split, stage=3 if frees_parameters else 0)), self.machine)
        groups = parts.blueprint.places[0].groups
        share = sum(one.layout.numel for one in groups) / sum(one.layout.padded_numel for one in groups)
        moments = parts.order.moments
        return [(int((one.gathered_bytes + one.staged_bytes) * share), one.part, one.stretch) for one in moments]


def _fault(tried: Callable[[], object]) -> str | None:
    """In the words of the error."""
    try:
        tried()
    except ValueError as error:
        return str(error)
    return None
