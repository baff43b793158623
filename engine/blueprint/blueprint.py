"""The blueprint of a training: all decisions that precede memory and connections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ...comm import ParallelDims, transport_for
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
from .places import AlikePlaces, Places, splits_of

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}


class Timing(Enum):
    """When a shard is updated: the gradients that exist at once, and the knowledge by then."""

    AFTER_NORM = "after norm"  # all gradients exist; the norm is known, so the update can be clipped or skipped
    IN_BACKWARD = "in backward"  # gradients of a unit exist; the update is final, without clipping
    SPECULATIVE = "speculative"  # all gradients and old values exist; the update is undone if the norm asks for it
    DELAYED = "delayed"  # gradients of two steps exist; as AFTER_NORM, but during the next step

    @classmethod
    def of(cls, config: Config) -> Timing:
        """Return the timing that the config asks for."""
        zero = config.zero_optimization
        if zero.update_in_backward:
            return cls.IN_BACKWARD
        overlap = zero.offload_optimizer.overlap if zero.offload_optimizer.is_used else "none"
        return {"none": cls.AFTER_NORM, "speculative": cls.SPECULATIVE, "delayed": cls.DELAYED}[overlap]


@dataclass(frozen=True)
class Blueprint:
    """A training before it is built: frozen, for any number of ranks, without process group or memory.

    | decision                    | attribute                                                         |
    |-----------------------------|-------------------------------------------------------------------|
    | axes, and ranks on each     | `parallel_dims`: see `parallel_dims_of`                           |
    | division over axes          | `sharding`; `policy` is the ZeRO stage                            |
    | units, groups, flat layouts | `units` of the whole model; `places`, by `place_of`, of the ranks |
    | dtypes                      | `dtypes`; each group of a place has its dtypes                    |
    | transport                   | `transport`                                                       |
    | placement                   | `offload_plan`                                                    |
    | order                       | `timing` of the updates; `pipeline.schedule` with stages          |
    | optimizer                   | `optimizer`                                                       |
    | bytes of a rank, by kind    | `footprint.bytes_of(blueprint, rank)`                             |

    `initialize` makes one and `assemble` builds it. A planner makes many, from a model on the meta device, and compares
    their bytes. The cost does not depend on the number of ranks.
    """

    config: Config  # resolved
    policy: ZeroPolicy
    parallel_dims: ParallelDims
    sharding: ShardingSpec
    dtypes: Dtypes
    units: tuple[UnitPlan, ...]
    tensor: TensorPlan | None  # layers that are split over ranks
    experts: ExpertPlan | None  # experts that are split over ranks
    pipeline: PipelinePlan | None  # as seen from its first place
    places: tuple[ModelPlan, ...]
    optimizer: OptimizerPlan
    offload_plan: OffloadPlan
    timing: Timing
    wanted_transport: str
    transport: str  # chosen for axes with several ranks; "auto" falls back to sockets if shared memory is full
    device: str  # device type of the ranks
    moves_pages: bool  # memory of released parameters moves to the next unit instead of being freed

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
        """Derive a blueprint from a resolved config and a model on any device, including meta.

        device: device type of the ranks. num_hosts: hosts of the ranks. optimizer: as in `initialize`, or planned.
        split: stages of the pipeline, perhaps with their schedule. units, tensor, dtypes: of the model. split, units,
        tensor and dtypes are planned here if None. alike: shares the plans of equal stages, for callers that only need
        bytes: see `AlikePlaces`; all places of the tensor axis then get the plan of the last, the largest.
        Raises ValueError if config, model and ranks do not fit together.
        """
        zero = config.zero_optimization
        policy, dtypes = ZeroPolicy.from_stage(zero.stage), dtypes or _dtypes(config, model)
        chosen = optimizer if isinstance(optimizer, OptimizerPlan) else OptimizerPlan.of(config, model, optimizer)
        offload_plan = OffloadPlan.of(config, device, chosen.fused is not None)
        wanted, transport = _transports(config, offload_plan, device, num_ranks, num_hosts)
        # Ranks in shared memory read each other's values in place: no message could be smaller.
        wire = _wire(config, num_ranks // num_hosts) if transport in ("sockets", "native") else PLAIN
        parallel_dims, sharding = _axes(config, policy, wire, num_ranks)
        dtypes = replace(dtypes, wire=wire)
        units = tuple(units or plan_units(model, None if zero.units == "auto" else zero.units))
        pipeline, tensor, experts = splits = splits_of(config, model, split, tensor)
        places = Places(units, *splits, chosen, dtypes, sharding, parallel_dims).plans(alike)
        # Equal places share a plan object. Each is checked once.
        chosen.check_states([group for place in {id(one): one for one in places}.values() for group in place.updated])
        return cls(
            config=config,
            policy=policy,
            parallel_dims=parallel_dims,
            sharding=sharding,
            dtypes=dtypes,
            units=units,
            tensor=tensor,
            experts=experts,
            pipeline=pipeline,
            places=places,
            optimizer=chosen,
            offload_plan=offload_plan,
            timing=Timing.of(config),
            wanted_transport=wanted,
            transport=transport,
            device=device,
            moves_pages=device == "cpu" and PagePool.is_possible(),
        )

    def place_of(self, rank: int) -> int:
        """Return the index in `places` of the part of the model that a rank has."""
        return self.parallel_dims.place(rank, (PIPE, EXPERT, TENSOR))

    def first_rank_of(self, place: int) -> int:
        """Return the first rank with the part `places[place]`."""
        parallel = self.config.parallel
        of_stage, part = divmod(place, parallel.tensor)
        stage, of_experts = divmod(of_stage, parallel.expert)
        # The inverse of `place_of`: pipe is the outermost axis, and sequence and tensor lie inside of the experts.
        first = self.parallel_dims.num_ranks // parallel.pipeline * stage
        return first + of_experts * parallel.sequence * parallel.tensor + part

    def stage_place_of(self, place: int) -> int:
        """Return the pipeline coordinate of ranks with the part `places[place]`."""
        return place // (self.config.parallel.tensor * self.config.parallel.expert)

    @property
    def ranks_of_place(self) -> int:
        """Number of ranks with the same part of the model."""
        return self.parallel_dims.num_ranks // len(self.places)

    @property
    def folds(self) -> tuple[tuple[str, ...], ...]:
        """Groups of axes that are each folded into a single axis."""
        if self.experts is None:
            return self.sharding.folds
        # Experts have a sharding without this axis. (EXPERT, TENSOR): `full_values.py` gathers experts of split layers.
        return *self.sharding.folds, *self.sharding.within((EXPERT,)).folds, (EXPERT, TENSOR)

    @property
    def inner(self) -> tuple[str, ...]:
        """Axes with several ranks on which the model exchanges while gradients are in flight."""
        # Muon's matrices, signs of momenta and thin matrices of PowerSGD move along these axes during an update.
        moves = self.optimizer.moves_matrices or self.optimizer.sends_signs or self.low_rank is not None
        moved = ((SHARD if self.policy.shards_states else REPLICA),) if moves else ()
        return self.parallel_dims.wide((*moved, EXPERT, SEQUENCE))

    @property
    def shares_gradients(self) -> bool:
        """Whether replicas in shared memory hold a single sum of their gradients.

        Not for an update in backward, since it frees gradients at once, nor for a delayed update, since it keeps them
        during the next step. Not if replicas send signs or thin matrices, since each then has a different gradient.
        """
        if self.optimizer.sends_signs or self.low_rank is not None:
            return False
        return not self.policy.shards_states and self.timing not in (Timing.IN_BACKWARD, Timing.DELAYED)

    @property
    def is_layered(self) -> bool:
        """Whether all microbatches pass a block before the next block."""
        return self.pipeline is not None and self.pipeline.is_layered

    @property
    def reduces_every_backward(self) -> bool:
        """Whether gradients are reduced in each microbatch, not once a step."""
        return self.policy.reduces_every_backward and not self.is_layered

    @property
    def low_rank(self) -> PowerSGDOptions | None:
        """PowerSGD's settings, or None if it is off."""
        wanted = self.config.communication.power_sgd
        if not wanted.rank:
            return None
        # All ranks draw the same first matrices, so without a seed they take a common number.
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
        """Elements to gather ahead of their use, within `stage3_max_live_parameters` if parameters are offloaded."""
        zero = self.config.zero_optimization
        places = {id(place): place for place in self.places}.values()
        units = (groups for place in places for _, groups in place.units)
        largest = max((sum(group.layout.padded_numel for group in groups) for groups in units), default=0)
        wanted, live = zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters
        # A unit is gathered as a whole: a bucket below the largest unit would gather nothing ahead of that unit.
        ahead = MAX_PREFETCHED * largest if wanted is None else max(wanted, largest) if wanted else 0
        return ahead if live is None or not zero.offloads_parameters else min(ahead, live)


def _dtypes(config: Config, module: nn.Module) -> Dtypes:
    compute = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None
    reduce, accumulate = _DTYPES[config.communication_data_type], _DTYPES[config.data_types.grad_accum_dtype]
    return Dtypes(compute, reduce, accumulate, frozenset(map(id, _beside_statistics(module))))


def _transports(
    config: Config, offload_plan: OffloadPlan, device: str, num_ranks: int, num_hosts: int
) -> tuple[str, str]:
    """Return the wanted transport and the transport it leads to."""
    # Shared memory would keep a copy of all parameters, but they are to rest in files.
    rests_in_pages = offload_plan.parameters is Placement.FILE and not offload_plan.is_apart and num_ranks > 1
    wanted = "sockets" if rests_in_pages else config.communication.transport
    return wanted, transport_for(wanted, device, num_ranks, num_hosts)


def _axes(config: Config, policy: ZeroPolicy, wire: Wire, num_ranks: int) -> tuple[ParallelDims, ShardingSpec]:
    """Return the axes and the sharding spec. Gradients in few bits are summed in two levels."""
    zero, in_levels = config.zero_optimization, wire.gradients is not None
    parallel_dims = parallel_dims_of(
        config.parallel, zero, policy, num_ranks, wire.ranks_of_host if in_levels else None
    )
    return parallel_dims, sharding_of(policy, parallel_dims, zero.partition_size > 1, in_levels)


def _wire(config: Config, ranks_of_host: int) -> Wire:
    """Return the bits of messages. ranks_of_host: if the config does not give it."""
    given = config.communication
    return Wire(
        weights=given.weight_bits,
        frozen=given.frozen_weight_bits,
        gradients=given.gradient_bits,
        gradients_in_host=given.gradient_bits_in_host,
        ranks_of_host=given.ranks_of_host or max(ranks_of_host, 1),
    )


def _beside_statistics(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield parameters of batch norms: torch requires the dtype of their running statistics, for any input."""
    for part in module.modules():
        if isinstance(part, _NormBase) and part.running_mean is not None:
            yield from part.parameters(recurse=False)
