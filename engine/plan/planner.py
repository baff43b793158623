"""Estimates and bounds of choices, for a model on a machine. Every intermediate result is made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

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
from .pipelined import PipelineParts, ScheduleRun, fast_simulation_of, simulated_microbatches
from .profile import ComputePhase, Profile
from .search import Bound, Found
from .stages import Stages

Made = TypeVar("Made")


_FIRST, _SECOND = 1, 2  # rows of the two runs that bounds extrapolate
_LEAST_TOKENS = 512  # of a sequence on a rank: shorter parts have small products, and as many collectives
_DEGREES = ("pipeline", "tensor", "sequence", "expert")
_WHOLE = Choice()  # nothing is split
_AT_HOME: dict[str, Any] = {
    "stage": 0, "shard_size": None, "partition": 1, "offload_optimizer": "none", "offload_param": "none"
}  # fmt: skip


Profiler = Callable[[Any, int, int, bool], Profile]
"""Profiles a microbatch: see `MetaRun.profile`."""


class Planner:
    """Estimates and bounds choices. base: the config as in a file; a choice overrides its keys."""

    def __init__(
        self,
        model: nn.Module,
        base: Mapping[str, Any],
        machine: Machine,
        make_profiler: Callable[[Blueprint], Profiler],
        batch: Any,
        least_tokens: int = _LEAST_TOKENS,
    ) -> None:
        """Take the model on any device, and a batch of it.

        make_profiler: a blueprint -> a function that profiles microbatches. least_tokens: shortest part of a sequence
        on a rank, if the sequence degree is chosen.
        """
        self._model, self.machine, self._batch, self._least_tokens = model, machine, batch, least_tokens
        # An optimizer object passed to initialize is unknown here: most are Adam, and none has more states.
        self._assumed = {} if base.get("optimizer") else {"optimizer": {"type": "adamw", "params": {}}}
        self._base = {**base, **self._assumed}
        self._make_profiler, self._alike = make_profiler, AlikePlaces()
        self._made: dict[tuple[str, Hashable], Any] = {}
        self._known: dict[str, Any] = {}  # parts of a blueprint that depend on the model alone
        self._first = self._undivided(_WHOLE)
        self._known = {name: getattr(self._first, name) for name in ("units", "dtypes", "optimizer")}
        # The largest number of pipeline stages. A model without a list of blocks, or with blocks that are no units, is
        # a single stage.
        blocks = {name for name, _ in model_blocks.find_blocks(model)}
        self.num_blocks = len(blocks) if blocks and blocks <= {unit.name for unit in self._first.units} else 1

    def _once(self, what: str, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the result of the first call with `what` and `key`. Errors are not kept."""
        if (what, key) not in self._made:
            self._made[what, key] = make()
        made: Made = self._made[what, key]
        return made

    def config(self, choice: Choice) -> dict[str, Any]:
        """Return the config file of a choice, without default values."""
        values = without_defaults(without_idle_folders(choice.applied(self._base, self.machine.num_devices)))
        for key in self._assumed:
            values.pop(key)
        return values

    # -- estimates ------------------------------------------------------------------------------------------------

    def estimate(self, choice: Choice) -> Estimate:
        """Estimate a choice. Raises ValueError if the model cannot be trained so."""
        return self._once("estimate", choice, lambda: self._estimated(choice))

    def found(self, choice: Choice, number: int) -> Found[Choice, Estimate]:
        """Estimate a choice for `search`."""
        value = self.estimate(choice)
        fits = not value.missing(self.machine)
        return Found(choice, value, value.seconds_per_sample, value.peak_bytes, fits, number)

    def _estimated(self, choice: Choice) -> Estimate:
        config, states = self._resolved(choice), choice.without_batch()
        # Layer-by-layer accumulation has stages of a pipeline with a single rank, and the parts below do not apply.
        if self._is_layered:
            in_layers = self._once("layers", states, lambda: LayeredParts(self._of_states(choice), self.machine))
            profile = self.profile(choice.rows, choice.every, degrees=choice)
            return in_layers.estimate(config, Stages(in_layers.split, profile, self._work(profile)))
        if choice.pipeline == 1:
            parts = self._once("step", states, lambda: self._step_parts(choice))
            return parts.estimate(config, self.profile(choice.rows, choice.every, parts.is_direct, choice))
        of_stages = self._once("pipeline", states, lambda: PipelineParts(self._of_states(choice), self.machine))
        key = (choice.degrees, choice.schedule, choice.chunks, choice.rows, choice.every)
        profile = self.profile(choice.rows, choice.every, degrees=choice)
        stages = self._once("stages", key, lambda: Stages(of_stages.split, profile, self._work(profile)))
        run = self._once("schedule's run", (*key, choice.accumulation), lambda: self._run(choice, stages))
        return of_stages.estimate(config, stages, run)

    def _step_parts(self, choice: Choice) -> StepParts:
        # The order of collectives does not depend on the optimizer's offload.
        key = ("parts, whatever the optimizer's offload", replace(choice.without_batch(), offload_optimizer="none"))
        made = StepParts(self._of_states(choice), self.machine, like=self._made.get(key))
        self._once(*key, lambda: made)
        return made

    def _work(self, profile: Profile) -> MachineWork:
        return MachineWork(profile, self.machine, self._first.transport)

    def _run(self, choice: Choice, stages: Stages) -> ScheduleRun:
        """Simulate the schedule; the result depends neither on the ZeRO stage nor on the offload."""
        count = simulated_microbatches(choice.schedule, choice.pipeline, choice.accumulation)
        simulation = self._once(
            "simulation",
            (choice.pipeline, choice.schedule, choice.chunks, count),
            lambda: fast_simulation_of(make_schedule(choice.schedule, choice.pipeline, count, choice.chunks)),
        )
        return ScheduleRun.of(simulation, stages.costs(stages.send_seconds(self.machine)), choice.accumulation)

    def _of_states(self, choice: Choice) -> Blueprint:
        """Return the blueprint with the fewest microbatches that has the same memory."""
        return self._blueprint(choice.without_batch())

    def _resolved(self, choice: Choice) -> Config:
        """Load and resolve the config of a choice, which is valid if its space is."""
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
            split = self._once("plan of stages", key, lambda: self._stage_plan(choice, config))
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
        return self._once("tensor", degree, lambda: TensorPlan.of(self._model, degree, plan, has_parts))

    def _stage_plan(self, choice: Choice, config: Config) -> PipelinePlan:
        num_stages = choice.pipeline * num_chunks(choice)
        split = self._once("split", num_stages, lambda: split_of(config, self._model, None))
        return PipelinePlan.of(config, self._model, split)

    def profile(self, rows: int, every: int, is_direct: bool = False, degrees: Choice = _WHOLE) -> Profile:
        """Profile a microbatch on the meta device. degrees: a choice with the degrees of layers and sequences."""
        split, num_stages = replace(degrees.degrees, pipeline=1), 1
        if (self._base.get("parallel") or {}).get("tensor_sequence") and min(degrees.pipeline, degrees.tensor) > 1:
            # Between stages, sequence-parallel activations are gathered.
            split, num_stages = replace(degrees.without_batch(), **_AT_HOME), degrees.pipeline * num_chunks(degrees)
        of_run = (replace(split.degrees, pipeline=1), num_stages)

        def made() -> Profile:
            profiler = self._once("profiler", of_run, lambda: self._make_profiler(self._blueprint(split)))
            return profiler(self._batch, rows, every, is_direct)

        return self._once("profile", (*of_run, rows, every, is_direct), made)

    # -- degrees --------------------------------------------------------------------------------------------------

    def can_split(self, degrees: Choice) -> bool:
        """Return whether the model can be trained with these degrees, for `Space`."""
        if degrees.sequence > 1 and self.profile(_FIRST, 0).tokens // degrees.sequence < self._least_tokens:
            return False
        return self.fault(degrees) is None

    def fault(self, degrees: Choice) -> str | None:
        """Return why layers, sequences or experts cannot be split like this, or None if they can."""
        fault = self._fault_of_config(Choice(*(min(getattr(degrees, name), 2) for name in _DEGREES)))
        return fault or self._fault_of_model(replace(degrees.degrees, pipeline=1))

    def refusal(self, choice: Choice) -> str | None:
        """Return why the model cannot be trained so, regardless of memory; None if it can."""
        return _fault(lambda: self.estimate(choice))

    def agrees(self, choice: Choice) -> bool:
        """Return whether the config's other keys allow these states, with or without a pipeline and accumulation."""
        zero = choice.stage, choice.shard_size is None, choice.partition, choice.offload_optimizer, choice.offload_param
        key = choice.pipeline == 1, choice.accumulation == 1, *zero
        fault = self._once("fault of the states", key, lambda: _fault(lambda: self._resolved(choice)))
        return fault is None and (not self._has_budget or self._fault_of_stages(choice) is None)

    @property
    def _has_budget(self) -> bool:
        return (self._base.get("zero_optimization") or {}).get("stage3_max_live_parameters") is not None

    def _fault_of_stages(self, choice: Choice) -> str | None:
        """Return why the budget of gathered parameters forbids these pipeline stages at this ZeRO stage, or None."""
        if choice.pipeline == 1 or choice.stage < 3:
            return None
        key = choice.pipeline, choice.schedule, choice.chunks
        return self._once("fault of the stages", key, lambda: _fault(lambda: self._of_states(choice)))

    def _fault_of_config(self, some: Choice) -> str | None:
        """Return the settings that conflict, whatever the degrees are."""
        ranks = some.ranks_of_sample * some.expert
        several = replace(some, accumulation=some.pipeline)
        load = partial(Config.load, several.applied(self._base, ranks))
        return self._once("fault of the config", several, lambda: _fault(load))

    def _fault_of_model(self, split: Choice) -> str | None:
        if split == _WHOLE:
            return None

        def found() -> str | None:
            # If a sequence degree does not divide the heads, its multiples do not either, so the model need not run
            # for them. This does not hold for a tensor degree, because ranks may share a head of keys.
            smaller = {replace(split, sequence=degree) for degree in divisors(split.sequence)[:-1]}
            smaller |= {replace(split, tensor=1), replace(split, expert=1)} - {split}
            of_smaller = next((fault for each in smaller if (fault := self._fault_of_model(each))), None)
            return of_smaller or _fault(lambda: self.profile(_FIRST, 0, degrees=split))

        return self._once("fault of the model", split, found)

    # -- bounds ---------------------------------------------------------------------------------------------------

    def bound(self, choice: Choice) -> Bound:
        """Return a lower bound of a choice, without padding, waiting and uneven stages."""
        key = choice.tensor, choice.sequence, choice.expert
        bounds = self._once("bounds", key, lambda: self._bounds_of(replace(choice.degrees, pipeline=1)))
        return bounds.of(choice)

    def _bounds_of(self, split: Choice) -> Bounds:
        """Make the bounds of choices with these degrees of layers and sequences."""
        names = [name for name, _ in model_blocks.find_blocks(self._model)]
        whole_sequences = replace(split, sequence=1)

        def line(rows: int, every: int) -> Profile:
            """Return a profile that is at most that of a run."""
            # Parts of a sequence may differ in more than the rows, so no line through two runs is below a third.
            if rows <= _SECOND or split.sequence > 1:
                return self.profile(rows, every, degrees=split)
            first, second = (self.profile(count, every, degrees=split) for count in (_FIRST, _SECOND))
            return first.extended(second, rows)

        def beside(frees_parameters: bool) -> Sequence[tuple[int, str, ComputePhase]]:
            key = (whole_sequences, frees_parameters)
            return self._once("moments", key, lambda: self._moments(whole_sequences, frees_parameters))

        return Bounds(self.machine, self._undivided(whole_sequences), line, names, beside)

    def _undivided(self, split: Choice) -> Blueprint:
        """Return the blueprint in which nothing is sharded over data-parallel ranks."""
        return self._once("undivided", split, lambda: self._blueprint(split))

    def _moments(self, split: Choice, frees_parameters: bool) -> Sequence[tuple[int, str, ComputePhase]]:
        """Return the moments of groups without padding, so that they bound every sharding."""
        parts = StepParts(self._of_states(replace(split, stage=3 if frees_parameters else 0)), self.machine)
        groups = parts.blueprint.places[0].groups
        share = sum(group.layout.numel for group in groups) / sum(group.layout.padded_numel for group in groups)
        return [
            (int((gathered + staged) * share), part, phase) for part, phase, gathered, staged, _ in parts.order.moments
        ]


def _fault(tried: Callable[[], object]) -> str | None:
    """Return the text of the ValueError that a call raises, or None."""
    try:
        tried()
    except ValueError as error:
        return str(error)
    return None
