"""What a config makes of a model on so many ranks: all that is decided before memory is taken and ranks connected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ...comm import ParallelDims, route_for
from ...offload import PagePool
from ...parallel.experts import ExpertPlan
from ...parallel.plan import TensorPlan
from ...pipe.split.split import SplitPlan
from ...zero.gather_ring import MAX_PREFETCHED
from ...zero.plan import PLAIN, Dtypes, ModelPlan, UnitPlan, Wire, plan_units
from ...zero.policy import ZeroPolicy
from ...zero.powersgd import PowerSGDOptions
from ...zero.sharding_spec import ShardingSpec
from ..config.config import Config
from .axes import EXPERT, PIPE, REPLICA, SEQUENCE, SHARD, TENSOR, parallel_dims_of, sharding_of
from .offload import OffloadPlan, Placement
from .optimizer_plan import OptimizerChoice, OptimizerPlan
from .pipeline_plan import PipelinePlan
from .places import AlikePlaces, Places, Splits

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}


class Timing(Enum):
    """Which gradients are held at once, and what is known when a shard is updated."""

    AFTER_NORM = "after norm"  # all gradients; the norm is known, so the update can be clipped or left out
    IN_BACKWARD = "in backward"  # those of a unit, final; nothing can be clipped
    SPECULATIVE = "speculative"  # all gradients, and old values; taken back where the norm asks for it
    DELAYED = "delayed"  # those of two steps; as AFTER_NORM, but made and taken over while the next step computes

    @classmethod
    def of(cls, config: Config) -> Timing:
        """What the config asks for."""
        zero = config.zero_optimization
        if zero.update_in_backward:
            return cls.IN_BACKWARD
        overlap = zero.offload_optimizer.overlap if zero.offload_optimizer.is_used else "none"
        return {"none": cls.AFTER_NORM, "speculative": cls.SPECULATIVE, "delayed": cls.DELAYED}[overlap]


@dataclass(frozen=True)
class Blueprint:
    """A training before it is built: frozen, of any number of ranks, without process group or memory.

    | what                         | where                                                                        |
    |------------------------------|------------------------------------------------------------------------------|
    | axes, and ranks on each      | `parallel_dims`: see `parallel_dims_of`                                          |
    | what is divided over which   | `sharding`; `policy` is the ZeRO stage                                         |
    | units, groups, flat layouts  | `units` of the whole model; `places`, by `place_of`, what ranks have of them |
    | dtypes                       | `dtypes`; each group of a place has its own                                  |
    | how bytes move               | `route`                                                                      |
    | where they rest              | `offload_plan`
    |
    | what is done when            | `timing` of the updates; `pipeline.schedule`, where there are stages         |
    | the optimizer                | `optimizer`                                                                  |
    | bytes of a rank, by kind     | `footprint.bytes_of(blueprint, rank)`                                        |

    `initialize` makes one and `assemble` builds it. A planner makes many, of a model on the meta device, and compares
    their bytes: what it costs does not depend on the number of ranks.
    """

    config: Config  # resolved
    policy: ZeroPolicy
    parallel_dims: ParallelDims
    sharding: ShardingSpec
    dtypes: Dtypes
    units: tuple[UnitPlan, ...]
    tensor: TensorPlan | None  # which layers are split over ranks
    experts: ExpertPlan | None  # which have experts that are
    pipeline: PipelinePlan | None  # as its first place sees it
    places: tuple[ModelPlan, ...]
    optimizer: OptimizerPlan
    offload_plan: OffloadPlan
    timing: Timing
    wanted_route: str
    route: str  # what that comes to, of axes with several ranks; "auto" takes sockets where a rank finds no room
    device: str  # the type of the ranks' own
    moves_pages: bool  # memory of released parameters goes to the next unit, and is not given back

    @classmethod
    def of(
        cls,
        config: Config,
        model: nn.Module,
        num_ranks: int,
        *,
        device: str = "cpu",
        num_hosts: int = 1,
        optimizer: OptimizerChoice | OptimizerPlan = None,
        split: SplitPlan | PipelinePlan | None = None,
        units: Sequence[UnitPlan] | None = None,
        tensor: TensorPlan | None = None,
        dtypes: Dtypes | None = None,
        alike: AlikePlaces | None = None,
    ) -> Blueprint:
        """config: as `Config.resolve` gives it for these ranks. model: on any device, the meta device too.

        device: the type of the ranks' own, "cpu", "cuda" or another. num_hosts: that the ranks are on. optimizer: as
        `initialize` takes it, or planned. split: of the pipeline's stages, or with its schedule, where that is known;
        None: planned here, from the model's code. units, tensor, dtypes: of the model, where they are known; None:
        planned here. alike: for who asks for bytes alone: see `AlikePlaces`; all places of the tensor axis have
        what its last one has, the most.
        Raises ValueError where config, model and ranks do not fit together.
        """
        zero = config.zero_optimization
        policy, dtypes = ZeroPolicy.from_stage(zero.stage), dtypes or _dtypes(config, model)
        chosen = optimizer if isinstance(optimizer, OptimizerPlan) else OptimizerPlan.of(config, model, optimizer)
        offload_plan = OffloadPlan.of(config, device, chosen.fused is not None)
        wanted, route = _routes(config, offload_plan, device, num_ranks, num_hosts)
        wire = _wire(config, num_ranks // num_hosts) if route in ("sockets", "native") else PLAIN
        parallel_dims, sharding = _axes(config, policy, wire, num_ranks)
        dtypes = replace(dtypes, wire=wire)
        units = tuple(units or plan_units(model, None if zero.units == "auto" else zero.units))
        splits = Splits.of(config, model, split, tensor)
        places = Places(units, splits, chosen, dtypes, sharding, parallel_dims).plans(alike)
        chosen.check_states([group for place in {id(one): one for one in places}.values() for group in place.updated])
        return cls(
            config=config,
            policy=policy,
            parallel_dims=parallel_dims,
            sharding=sharding,
            dtypes=dtypes,
            units=units,
            tensor=splits.tensor,
            experts=splits.experts,
            pipeline=splits.pipeline,
            places=places,
            optimizer=chosen,
            offload_plan=offload_plan,
            timing=Timing.of(config),
            wanted_route=wanted,
            route=route,
            device=device,
            moves_pages=device == "cpu" and PagePool.is_possible(),
        )

    def place_of(self, rank: int) -> int:
        """Which part of the model a rank has, of all that are different: it is `places[...]`."""
        return self.parallel_dims.place(rank, (PIPE, EXPERT, TENSOR))

    def first_rank_of(self, place: int) -> int:
        """The first rank that has the part `places[place]`."""
        parallel = self.config.parallel
        of_stage, part = divmod(place, parallel.tensor)
        stage, of_experts = divmod(of_stage, parallel.expert)
        first = self.parallel_dims.num_ranks // parallel.pipeline * stage
        return first + of_experts * parallel.sequence * parallel.tensor + part

    def stage_place_of(self, place: int) -> int:
        """The place in the pipeline of ranks with the part `places[place]`."""
        return place // (self.config.parallel.tensor * self.config.parallel.expert)

    @property
    def ranks_of_place(self) -> int:
        """How many ranks have the same part of the model."""
        return self.parallel_dims.num_ranks // len(self.places)

    @property
    def folds(self) -> tuple[tuple[str, ...], ...]:
        """Axes that are taken together."""
        if self.experts is None:
            return self.sharding.folds
        return *self.sharding.folds, *self.sharding.within((EXPERT,)).folds, (EXPERT, TENSOR)

    @property
    def inner(self) -> tuple[str, ...]:
        """Axes with several ranks on which models exchange while gradients are on their way."""
        # Directions go along these to who makes whole matrices of them, and signs and
        # thin matrices to who adds them up.
        moves = self.optimizer.moves_matrices or self.optimizer.sends_signs or self.low_rank is not None
        moved = ((SHARD if self.policy.shards_states else REPLICA),) if moves else ()
        return self.parallel_dims.wide((*moved, EXPERT, SEQUENCE))

    @property
    def shares_gradients(self) -> bool:
        """Whether replicas that share memory have one sum of their gradients.

        Not of an update in backward, which gives them back at once, nor of a delayed one, beside which the next lie;
        and not where each updates with its own, or makes the sum of thin matrices.
        """
        if self.optimizer.sends_signs or self.low_rank is not None:
            return False
        return not self.policy.shards_states and self.timing not in (Timing.IN_BACKWARD, Timing.DELAYED)

    @property
    def is_layered(self) -> bool:
        """Whether all microbatches go through a block before the next block."""
        return self.pipeline is not None and self.pipeline.is_layered

    @property
    def reduces_every_backward(self) -> bool:
        """Whether gradients of each microbatch are reduced, and not those of a step."""
        return self.policy.reduces_every_backward and not self.is_layered

    @property
    def low_rank(self) -> PowerSGDOptions | None:
        """How gradients go between ranks, if as thin matrices."""
        wanted = self.config.communication.power_sgd
        if not wanted.rank:
            return None
        seed = self.config.seed or 0
        return PowerSGDOptions(
            wanted.rank,
            wanted.start_step,
            wanted.min_compression_rate,
            wanted.error_feedback,
            wanted.warm_start,
            seed,
        )

    @property
    def prefetch_numel(self) -> int:
        """Elements gathered ahead of their use; with offloaded parameters within the budget of live ones."""
        zero = self.config.zero_optimization
        places = {id(place): place for place in self.places}.values()
        units = (groups for place in places for _, groups in place.units)
        largest = max((sum(group.layout.padded_numel for group in groups) for groups in units), default=0)
        wanted, live = zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters
        ahead = MAX_PREFETCHED * largest if wanted is None else max(wanted, largest) if wanted else 0
        return ahead if live is None or not zero.offloads_parameters else min(ahead, live)


def _dtypes(config: Config, module: nn.Module) -> Dtypes:
    compute = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None
    reduce, accumulate = _DTYPES[config.communication_data_type], _DTYPES[config.data_types.grad_accum_dtype]
    return Dtypes(compute, reduce, accumulate, frozenset(map(id, _beside_statistics(module))))


def _routes(config: Config, offload_plan: OffloadPlan, device: str, num_ranks: int, num_hosts: int) -> tuple[str, str]:
    """What is wanted of `route_for`, and what that comes to."""
    rests_in_pages = offload_plan.parameters is Placement.FILE and not offload_plan.is_apart and num_ranks > 1
    wanted = "sockets" if rests_in_pages else config.communication.route
    return wanted, route_for(wanted, device, num_ranks, num_hosts)


def _axes(config: Config, policy: ZeroPolicy, wire: Wire, num_ranks: int) -> tuple[ParallelDims, ShardingSpec]:
    """Gradients are summed in two levels where they are sent in fewer bits."""
    zero, in_levels = config.zero_optimization, wire.gradients is not None
    parallel_dims = parallel_dims_of(
        config.parallel, zero, policy, num_ranks, wire.ranks_of_host if in_levels else None
    )
    return parallel_dims, sharding_of(policy, parallel_dims, zero.partition_size > 1, in_levels)


def _wire(config: Config, ranks_of_host: int) -> Wire:
    """ranks_of_host: where the config does not say it."""
    given = config.communication
    return Wire(
        weights=given.weight_bits,
        frozen=given.frozen_weight_bits,
        gradients=given.gradient_bits,
        gradients_in_host=given.gradient_bits_in_host,
        ranks_of_host=given.ranks_of_host or max(ranks_of_host, 1),
    )


def _beside_statistics(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of batch norms: torch takes them in the type of the running statistics alone, whatever the input's."""
    for part in module.modules():
        if isinstance(part, _NormBase) and part.running_mean is not None:
            yield from part.parameters(recurse=False)
