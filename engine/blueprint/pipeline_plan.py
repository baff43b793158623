"""Divides a model over a pipeline and orders its work, before memory is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...comm import World
from ...pipe.schedules.costs import Costs
from ...pipe.schedules.generators import layered, layered_evaluation
from ...pipe.schedules.passes import complete
from ...pipe.schedules.schedule import Action, Op, Schedule
from ...pipe.split.blocks import find_blocks
from ...pipe.split.split import SplitPlan, plan_split
from ...zero.plan import GroupPlan, UnitPlan
from ...zero.policy import ZeroPolicy
from ...zero.scheduled_units import reduction_order
from ...zero.sharding_spec import Replicas
from ...zero.unit import Unit
from ..archive.named_state import UnsplitModel
from ..config.config import Config
from ..config.parallel import schedule_of
from ..config.zero import ZeroConfig
from .axes import PIPE

Sample = Callable[[nn.Module], Any]
Groups = tuple[GroupPlan, ...]
_TIED = "(tied {})"


@dataclass(frozen=True)
class PipelinePlan:
    """The stages of each pipeline place and their units, as seen from a single place.

    With layered accumulation this is the only place, and each block is a stage.
    """

    schedule: Schedule  # F, B, I and W; layered: all actions
    split: SplitPlan
    numel: tuple[int, ...]  # parameter elements of each stage
    whole: UnsplitModel
    frees_parameters: bool
    budget: int | None  # largest number of gathered parameter elements
    ahead: tuple[bool, ...] | None = None  # layered with freed parameters: see `layered`
    is_layered: bool = False
    place: int = 0  # on the pipe axis

    @classmethod
    def of(cls, config: Config, module: nn.Module, split: SplitPlan | None) -> PipelinePlan:
        """Plan the pipeline. split: None: made here. Raises ValueError for a model that cannot be split."""
        assert config.gradient_accumulation_steps is not None
        split = split or split_of(config, module, None)
        params = dict(module.named_parameters())
        is_layered = config.zero_optimization.layered_gradient_accumulation
        plan = cls(
            is_layered=is_layered,
            schedule=layered(split.num_stages, config.gradient_accumulation_steps)
            if is_layered
            else schedule_of(config.parallel, config.pipeline, config.gradient_accumulation_steps),
            split=split,
            numel=tuple(sum(params[name].numel() for name in names) for names in split.parameters),
            whole=UnsplitModel(params, tuple(module.state_dict(keep_vars=True))),
            frees_parameters=False,
            budget=None,
        )
        return plan.for_stage(config)

    def for_stage(self, config: Config) -> PipelinePlan:
        """Return the same stages and schedule for the ZeRO stage of another config. Raises ValueError as `of`."""
        zero = config.zero_optimization
        frees_parameters = ZeroPolicy.from_stage(zero.stage).frees_parameters
        if self.is_layered:
            ahead = _gathered_ahead(self.numel, zero) if frees_parameters else None
            schedule = layered(self.schedule.num_stages, self.schedule.num_microbatches, ahead)
            return replace(self, frees_parameters=frees_parameters, ahead=ahead, schedule=schedule)
        if frees_parameters:
            _check_budget(self.numel, zero.stage3_max_live_parameters)
        return replace(self, frees_parameters=frees_parameters, budget=zero.stage3_max_live_parameters)

    def at(self, place: int) -> PipelinePlan:
        """Return the plan as seen from another place."""
        return replace(self, place=place)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this place."""
        return self.schedule.stages_of_rank(self.place)

    def in_layers(self, units: Sequence[tuple[UnitPlan, Groups]]) -> list[tuple[UnitPlan, Groups]]:
        """Return units with their groups in the order of their reduction, for layered accumulation."""
        names = [{name for group in groups for name, _ in group.params} for _, groups in units]
        stages = [
            [number for number, found in enumerate(names) if found & set(of_stage)]
            for of_stage in self.split.parameters
        ]
        return [units[number] for number in reduction_order(range(len(units)), dict(enumerate(stages)))]

    def members(self, units: Sequence[Unit], stage: int) -> list[Unit]:
        """Return the units of this place with parameters of a stage."""
        names = set(self.split.parameters[stage])
        return [unit for unit in units if any(names & {*group.layout.names} for group in unit.groups)]

    @property
    def training(self) -> Schedule:
        """All actions of every rank in a training step."""
        return self._completed(self.schedule)

    @property
    def evaluation(self) -> Schedule:
        """All actions of every rank for a forward of a single microbatch."""
        if self.is_layered:
            return layered_evaluation(self.schedule.num_stages, self.ahead)
        forwards = tuple(
            tuple(Action(Op.F, stage, 0) for stage in self.schedule.stages_of_rank(rank))
            for rank in range(self.schedule.num_ranks)
        )
        name = f"{self.schedule.name}, evaluation"
        return self._completed(replace(self.schedule, name=name, num_microbatches=1, actions=forwards))

    def _completed(self, schedule: Schedule) -> Schedule:
        """Add messages, reductions, and gathers if parameters are freed."""
        if self.is_layered:
            return schedule
        # Equal times for all stages: each rank makes these lists, and they must agree, so nothing measured enters.
        costs = replace(Costs.uniform(schedule.num_stages), parameter_bytes=tuple(map(float, self.numel)))
        # A schedule from a file may have gathers already.
        gathers = self.frees_parameters and not schedule.has_any(Op.GATHER)
        return complete(schedule, costs, gathers=gathers, budget=self.budget)

    @property
    def places_of_tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that stages of several places use -> these places."""
        places = {
            name: tuple(sorted({self.schedule.rank_of_stage[stage] for stage in stages}))
            for name, stages in self.split.tied.items()
        }
        return {name: found for name, found in places.items() if len(found) > 1}

    def units_by_place(self, units: Sequence[UnitPlan]) -> list[tuple[UnitPlan, ...]]:
        """Divide the units of the model over the places. A parameter of several places becomes a unit of each."""
        tied, root = self.places_of_tied, units[0].module
        params = {name: param for unit in units for name, param in unit.params}
        owners = {
            name: self.schedule.rank_of_stage[stage]
            for stage, names in enumerate(self.split.parameters)
            for name in names
            if name not in tied
        }
        shared = [
            # The root module: no module of a stage is alone in reading a tied parameter.
            UnitPlan(_TIED.format(name), root, ((name, params[name]),), (Replicas(PIPE, places),))
            for name, places in tied.items()
        ]
        found = []
        for place in range(self.schedule.num_ranks):
            # Each place has a root unit, perhaps without parameters: the root comes first in `ScheduledUnits`.
            found.append([replace(units[0], params=())])
            found[place] += [unit for unit in shared if place in unit.copies[0].places]
        for number, unit in enumerate(units):
            of_places: dict[int, list[tuple[str, nn.Parameter]]] = {}
            for name, param in unit.params:
                if name in owners:
                    of_places.setdefault(owners[name], []).append((name, param))
            for place, own in of_places.items():
                part = replace(unit, params=tuple(own))
                if number:
                    found[place].append(part)
                else:
                    found[place][0] = part
        return list(map(tuple, found))


def agreed_split(world: World, config: Config, module: nn.Module, sample: Sample | None) -> SplitPlan | None:
    """Return rank 0's split on every rank, or None without stages. Raises ValueError if the model cannot be split."""
    if not config.has_stages:
        return None
    split: SplitPlan | None = None
    failure = None
    if world.rank == 0:  # only rank 0: two measurements would differ
        try:
            split = split_of(config, module, sample)
        except Exception as error:  # also errors of the model's forward
            failure = error
    split, text = world.broadcast_object((split, None if failure is None else str(failure)))
    # Rank 0 raises the error itself, with its traceback. All further ranks have only its text.
    if failure is not None:
        raise failure
    if text is not None:
        raise ValueError(text)
    return split


def split_of(config: Config, module: nn.Module, sample: Sample | None) -> SplitPlan:
    """Divide the blocks over stages. sample: runs the model with a batch; None: the model does not run."""
    # A deferred parameter is a single element that is expanded to a shape: see `deferred.py`.
    has_values = all(param.untyped_storage().nbytes() >= param.nbytes for param in module.parameters())
    if config.zero_optimization.layered_gradient_accumulation:
        try:
            return plan_split(module, len(find_blocks(module)), sample=sample)
        except ValueError as error:
            raise ValueError(
                "zero_optimization.layered_gradient_accumulation: expected a model that splits into a stage for each "
                f"block, found: {error}"
            ) from error
    if config.pipeline.balance == "time" and not has_values:
        raise ValueError(
            'pipeline.balance: "time" needs a constructed model to measure, found a callable that builds the model; '
            'pass the model, or set "parameters" or a list of numbers of blocks'
        )
    assert config.gradient_accumulation_steps is not None
    num_stages = schedule_of(config.parallel, config.pipeline, config.gradient_accumulation_steps).num_stages
    return plan_split(module, num_stages, config.pipeline.balance, sample)


def _gathered_ahead(numel: Sequence[int], zero: ZeroConfig) -> tuple[bool, ...]:
    """Return for each stage whether it fits in memory during the computation of another. A given bucket always fits."""
    if zero.stage3_prefetch_bucket_size == 0:
        return (False,) * len(numel)
    live = zero.stage3_max_live_parameters if zero.offloads_parameters else None
    return tuple(live is None or one <= live for one in numel)


def _check_budget(numel: Sequence[int], budget: int | None) -> None:
    stage = max(range(len(numel)), key=numel.__getitem__)
    if budget is not None and numel[stage] > budget:
        raise ValueError(
            f"zero_optimization.stage3_max_live_parameters: expected at least {numel[stage]}, the parameters of "
            f"pipeline stage {stage}, found {budget}; raise it, or split the model over more stages"
        )
