"""How a model is divided over a pipeline, and what is done in which order: before memory is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..comm import World
from ..pipe.schedules.action import Op
from ..pipe.schedules.costs import Costs
from ..pipe.schedules.passes import complete
from ..pipe.schedules.schedule import Schedule
from ..pipe.split.split import SplitPlan, plan_split
from ..zero.domain import Copies
from ..zero.policy import ZeroPolicy
from ..zero.unit import Unit
from ..zero.units import UnitPlan
from .archive.named_state import Whole
from .axes import PIPE
from .batch import call, loss_of
from .config.config import Config
from .config.parallel import schedule_of

LossFn = Callable[[Any, Any], Tensor] | None
_TIED = "(tied {})"


@dataclass(frozen=True)
class PipelinePlan:
    """Which place of a pipeline has which stages, and which of the model's units, as seen from one place."""

    schedule: Schedule  # F, B, I and W
    split: SplitPlan
    numel: tuple[int, ...]  # parameter elements of each stage
    whole: Whole
    frees_parameters: bool
    budget: int | None  # of parameter elements that are full at a time
    place: int = 0  # on the pipe axis

    @classmethod
    def of(cls, config: Config, module: nn.Module, split: SplitPlan | None) -> PipelinePlan:
        """split: None: made here. Raises ValueError for a model that cannot be split so."""
        assert config.gradient_accumulation_steps is not None
        schedule = schedule_of(config.parallel, config.pipeline, config.gradient_accumulation_steps)
        split = split or split_of(config, module, None, None)
        params = dict(module.named_parameters())
        plan = cls(
            schedule=schedule,
            split=split,
            numel=tuple(sum(params[name].numel() for name in names) for names in split.parameters),
            whole=Whole(params, tuple(module.state_dict(keep_vars=True))),
            frees_parameters=ZeroPolicy.from_stage(config.zero_optimization.stage).frees_parameters,
            budget=config.zero_optimization.stage3_max_live_parameters,
        )
        if plan.frees_parameters:
            _check_budget(plan.numel, plan.budget)
        return plan

    def at(self, place: int) -> PipelinePlan:
        """As seen from another place."""
        return replace(self, place=place)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this place."""
        return self.schedule.stages_of_rank(self.place)

    def members(self, units: Sequence[Unit], stage: int) -> list[Unit]:
        """Those of this place's units of which the stage needs parameters."""
        names = set(self.split.parameters[stage])
        return [unit for unit in units if any(names & {*group.names} for group in unit.groups)]

    def completed(self, schedule: Schedule) -> Schedule:
        """A schedule of this pipeline with its messages, reductions, and gathers where parameters are freed."""
        costs = replace(Costs.uniform(schedule.num_stages), parameter_bytes=tuple(map(float, self.numel)))
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

    def own_units(self, units: Sequence[UnitPlan]) -> list[UnitPlan]:
        """The units of the whole model as far as this place has them; each parameter of several places alone in one."""
        tied = self.places_of_tied
        own = {name for stage in self.stages for name in self.split.parameters[stage]}
        found = [
            replace(unit, params=tuple((name, p) for name, p in unit.params if name in own and name not in tied))
            for unit in units
        ]
        root = units[0].module
        params = {name: param for unit in units for name, param in unit.params}
        shared = [
            UnitPlan(_TIED.format(name), root, ((name, params[name]),), (Copies(PIPE, places),))
            for name, places in tied.items()
            if name in own
        ]
        return [found[0], *shared, *(unit for unit in found[1:] if unit.params)]


def agreed_split(
    world: World, config: Config, module: nn.Module, sample_batch: Any, loss_fn: LossFn
) -> SplitPlan | None:
    """Rank 0's split, on every rank; None without a pipeline. Raises ValueError for a model that cannot be split so."""
    if config.parallel.pipeline == 1:
        return None
    split: SplitPlan | None = None
    failure = None
    if world.rank == 0:  # it alone: two measurements would not be the same
        try:
            split = split_of(config, module, sample_batch, loss_fn)
        except Exception as error:  # of the model's forward too
            failure = error
    split, text = world.broadcast_object((split, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    if text is not None:
        raise ValueError(text)
    return split


def split_of(config: Config, module: nn.Module, sample_batch: Any, loss_fn: LossFn) -> SplitPlan:
    """Which stage has which blocks. sample_batch: of the model's own loss; None: the model is not run."""
    sample = None
    has_values = all(param.untyped_storage().nbytes() >= param.nbytes for param in module.parameters())
    if config.pipeline.balance == "time" and not has_values:
        raise ValueError(
            'pipeline.balance: "time" needs a constructed model to measure, found a callable that builds one, which no '
            'rank ever holds as a whole; pass the model, or set "parameters" or a list of numbers of blocks'
        )
    if sample_batch is not None:

        def sample(model: nn.Module) -> Any:
            return loss_of(call(model, sample_batch), sample_batch, loss_fn)

    assert config.gradient_accumulation_steps is not None
    num_stages = schedule_of(config.parallel, config.pipeline, config.gradient_accumulation_steps).num_stages
    return plan_split(module, num_stages, config.pipeline.balance, sample)


def _check_budget(numel: Sequence[int], budget: int | None) -> None:
    stage = max(range(len(numel)), key=numel.__getitem__)
    if budget is not None and numel[stage] > budget:
        raise ValueError(
            f"zero_optimization.stage3_max_live_parameters: expected at least the {numel[stage]} parameters of "
            f"pipeline stage {stage}, which is gathered as a whole, found {budget}; raise it, or split the model over "
            "more stages"
        )
