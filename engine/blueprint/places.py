"""The plan of each place: a pipeline stage, with a part of its experts and layers (`Places`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ...comm import ParallelDims
from ...parallel.experts import ExpertPlan
from ...parallel.plan import TensorPlan
from ...pipe.split.split import SplitPlan
from ...zero.plan import Dtypes, ModelPlan, ParallelShard, ShardCounts, UnitPlan
from ...zero.sharding_spec import Replicas, ShardingSpec
from ..config.config import Config
from .axes import EXPERT, TENSOR
from .optimizer_plan import OptimizerPlan
from .pipeline_plan import PipelinePlan

_Units = tuple[UnitPlan, ...]


def splits_of(
    config: Config, model: nn.Module, split: SplitPlan | PipelinePlan | None, tensor: TensorPlan | None
) -> tuple[PipelinePlan | None, TensorPlan | None, ExpertPlan | None]:
    """Plan the stages, split layers and split experts that the config asks for; None: not split.

    split, tensor: as in `Blueprint.of`. Raises ValueError for a model that cannot be split.
    """
    pipeline = None
    if config.has_stages:
        known = split if isinstance(split, PipelinePlan) else PipelinePlan.of(config, model, split)
        pipeline = known.for_stage(config)
    parallel = config.parallel
    if parallel.tensor > 1 and tensor is None:
        tensor = TensorPlan.of(model, parallel.tensor, config.tensor_parallel.plan, parallel.tensor_sequence)
    return pipeline, tensor, ExpertPlan.of(model, parallel.expert) if parallel.expert > 1 else None


def shares_of(tensor: TensorPlan | None, experts: ExpertPlan | None, place_on: Callable[[str], int]) -> ShardCounts:
    """Return a function from a parameter to its share on a rank. place_on: name of an axis -> the rank's coordinate."""

    def share(param: nn.Parameter) -> ParallelShard:
        found = ParallelShard.all_of(param)
        if tensor is not None:
            tensor_shard, places = tensor.tensor_shard(param, place_on(TENSOR))
            # A parameter beside split layers is whole on several ranks. Each computes all of its gradient.
            found = ParallelShard(tensor_shard, (Replicas(TENSOR, places, are_added=False),) if len(places) > 1 else ())
        rows = None if experts is None else experts.rows(param, place_on(EXPERT))
        if rows is None:
            return found
        # Experts are stacked along dimension 0.
        return replace(found, tensor_shard=found.tensor_shard.cut(0, *rows), partitioned=(EXPERT,))

    return share


@dataclass(frozen=True)
class Places:
    """The inputs of the plans of places."""

    units: _Units
    pipeline: PipelinePlan | None  # as seen from its first place
    tensor: TensorPlan | None
    experts: ExpertPlan | None
    optimizer: OptimizerPlan
    dtypes: Dtypes
    sharding: ShardingSpec
    parallel_dims: ParallelDims

    @property
    def degrees(self) -> tuple[int, int]:
        """Number of ranks that share the layers, and that share the experts."""
        return 1 if self.tensor is None else self.tensor.degree, 1 if self.experts is None else self.experts.degree

    def plans(self, alike: AlikePlaces | None = None) -> tuple[ModelPlan, ...]:
        """Return the plan of each place, by stage, then part of the experts, then part of the layers.

        alike: each stage has a single plan, for the last and largest part of the layers.
        """
        num_parts, num_experts = self.degrees
        if alike is not None:
            # Repeated, so that `Blueprint.place_of` finds a plan for every place.
            return tuple(one for one in alike.plans(self) for _ in range(num_experts * num_parts))
        return tuple(
            self.plan(own, of_experts, part)
            for own in self.units_by_stage()
            for of_experts in range(num_experts)
            for part in range(num_parts)
        )

    def units_by_stage(self) -> Sequence[_Units]:
        """Return the units of each pipeline place."""
        return [self.units] if self.pipeline is None else self.pipeline.units_by_place(self.units)

    def plan(self, own: _Units, of_experts: int, part: int) -> ModelPlan:
        """Return the plan of ranks with these units."""
        shares, optimizer = self._shares(of_experts, part), self.optimizer
        return ModelPlan.of(
            own, self.dtypes, self.sharding, self.parallel_dims, optimizer.role_of, shares, optimizer.is_matrix
        )

    def kinds(self) -> Callable[[nn.Parameter], Hashable]:
        """Return a function from a parameter to all that decides on its plan, in a place with the last part."""
        share_of = self._shares(0, self.degrees[0] - 1)

        def kind(param: nn.Parameter) -> Hashable:
            optimizer = self.optimizer
            dtypes, role = (param.dtype, self.dtypes.of(param)), optimizer.role_of(param)
            return tuple(param.shape), dtypes, role, share_of(param), optimizer.is_matrix(param)

        return kind

    def _shares(self, of_experts: int, part: int) -> ShardCounts:
        return shares_of(self.tensor, self.experts, {EXPERT: of_experts, TENSOR: part}.__getitem__)


class AlikePlaces:
    """A cache of plans for callers that only need bytes and ask often: equal stages share a plan.

    It serves a single model, and configs that differ in degrees, division and placement. Two stages are equal if their
    units have parameters of the same shapes, dtypes, roles and shares, in the same order. The shared plan has the names
    of the first.
    """

    def __init__(self) -> None:
        self._stages: dict[Hashable, list[_Units]] = {}
        self._plans: dict[Hashable, tuple[ModelPlan, ...]] = {}

    def plans(self, places: Places) -> tuple[ModelPlan, ...]:
        """Return the plans by stage, for the last part of the layers."""
        # Units of stages and kinds of parameters depend on nothing else.
        stages = places.degrees, None if places.pipeline is None else places.pipeline.schedule.rank_of_stage
        key = stages, places.sharding, places.parallel_dims
        if key not in self._plans:
            # The division does not decide on equal stages: a search compares them once for all divisions.
            if stages not in self._stages:
                self._stages[stages] = _first_ones(places.units_by_stage(), places.kinds())
            different = {id(units): units for units in self._stages[stages]}
            last = places.degrees[0] - 1
            made = {number: places.plan(units, 0, last) for number, units in different.items()}
            self._plans[key] = tuple(made[id(units)] for units in self._stages[stages])
        return self._plans[key]


def _first_ones(stages: Sequence[_Units], kind_of: Callable[[nn.Parameter], Hashable]) -> list[_Units]:
    """Return for each stage the units of the first equal stage."""
    kinds: dict[int, Hashable] = {}
    numbers: dict[Hashable, int] = {}  # kind -> number, so that each kind is hashed once

    def kind(param: nn.Parameter) -> Hashable:
        if id(param) not in kinds:
            kinds[id(param)] = numbers.setdefault(kind_of(param), len(numbers))
        return kinds[id(param)]

    known: dict[Hashable, _Units] = {}
    return [
        known.setdefault(tuple((one.copies, tuple(kind(param) for _, param in one.params)) for one in units), units)
        for units in stages
    ]
