"""A blueprint says before anything is built what a training takes; what is built takes exactly that."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.comm import ParallelDims
from lowtide.comm.shared_memory import SharedMemoryTransport
from lowtide.comm.shared_segment import Gather, map_together
from lowtide.comm.sockets import SocketTransport
from lowtide.engine.blueprint.axes import TENSOR, parallel_dims_of, sharding_of
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.blueprint.footprint import MemoryPhase, bytes_of, shared_bytes
from lowtide.engine.blueprint.optimizer_plan import OptimizerChoice
from lowtide.engine.config.config import Config
from lowtide.engine.config.parallel import ParallelConfig
from lowtide.engine.config.zero import ZeroConfig
from lowtide.zero.group import ShardedGroup
from lowtide.zero.policy import ZeroPolicy
from lowtide.zero.scheduled_units import ScheduledUnits
from lowtide.zero.sharding_spec import ShardingSpec
from tests.kit import models
from tests.kit.features import case_of, feature_sets, num_ranks
from tests.kit.ranks import RankPool
from tests.kit.training import rank_and_world, refusal, settings
from tests.parallel.test_expert_routing import Experts

FP32: dict[str, Any] = {}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
STEPS = 3  # until the largest gradient has been in each of the buffers that take turns

Found = dict[str, int]  # bytes by kind, some at several moments


def frozen_gpt(layers: int = 5) -> nn.Module:
    """On every rank the number of trained groups has no factor of 3, so that each buffer of three gets the largest."""
    model = models.TinyGPT(width=6, layers=layers, tied=True)
    model.blocks[layers - 2].requires_grad_(False)
    return model


class RoutedBlock(models.Block):
    """With experts behind it, to which tokens go by their places."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.experts = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x).flatten(0, 1)
        index = (torch.arange(len(rows)) % self.experts.num_experts).view(-1, 1)
        made: Tensor = rows + self.experts(rows, index, torch.ones(len(rows), 1, dtype=rows.dtype))
        return made.view_as(x)


def routed_gpt() -> nn.Module:
    """As of `frozen_gpt`: five groups, and four of experts."""
    model = models.TinyGPT(width=6)
    model.blocks = nn.ModuleList(RoutedBlock(6) for _ in range(4))
    return model


def model_of(config: dict[str, Any]) -> nn.Module:
    parallel = config.get("parallel", {})
    return routed_gpt() if "expert" in parallel else frozen_gpt(5 if "pipeline" in parallel else 4)


def config_of(stage: int, accumulation: int = 1, transport: str = "sockets", **more: Any) -> dict[str, Any]:
    own = {"gradient_accumulation_steps": accumulation, "communication": {"transport": transport}}
    return settings(stage, **{**own, "zero_optimization": more.pop("zero", {}), **more})


def blueprint_of(config: dict[str, Any], num_ranks: int, optimizer: OptimizerChoice = None) -> Blueprint:
    """Of a model on the meta device."""
    with torch.device("meta"):
        model = model_of(config)
    return Blueprint.of(Config.load(config).resolve(num_ranks), model, num_ranks, optimizer=optimizer)


# -- what is said, and what is there ----------------------------------------------------------------------------------


def said_of(config: dict[str, Any], rank: int, num_ranks: int, optimizer: OptimizerChoice = None) -> Found:
    blueprint = blueprint_of(config, num_ranks, optimizer)
    found: Found = {}
    for moment in MemoryPhase:
        values = asdict(bytes_of(blueprint, rank, moment))
        found |= {f"{kind} {moment.value}": values.pop(kind) for kind in ("gradients", "optimizer")}
        found |= values
    return {**found, "shared": shared_bytes(blueprint)}


def there_is(config: dict[str, Any], optimizer: OptimizerChoice = None) -> Found:
    """The same, as an engine has it that trains on this rank. Shared memory: of the axes on which this rank is 0."""
    peak, mapped, found = [0], [0], Found()
    torch.manual_seed(0)
    with shared_memory_counted(mapped):
        engine = lowtide.initialize(model_of(config), config, optimizer=optimizer)

    def look(moment: MemoryPhase) -> None:
        memory = engine.memory()
        found[f"gradients {moment.value}"] = memory.gradient_bytes
        found[f"optimizer {moment.value}"] = memory.optimizer_bytes

    with parameters_watched(engine, peak), reductions_watched(look):
        for step in range(STEPS):
            peak[0] = 0  # in the first step, what has just been filled is still on its way to its home
            train(engine, step, look)
            look(MemoryPhase.BETWEEN_STEPS)
    found["parameters"] = engine.memory().parameter_bytes
    found["gathered"] = peak[0] - found["parameters"] if peak[0] else 0
    found |= bytes_outside(engine)
    engine.close()
    return {**found, "shared": mapped[0]}


def train(engine: lowtide.Engine, step: int, look: Any) -> None:
    accumulation = engine.config.gradient_accumulation_steps or 1
    rows = 2 * engine.data_size * accumulation
    batch = [one.chunk(engine.data_size)[engine.data_rank] for one in models.token_batch(step, rows)]
    if engine.config.has_stages:
        engine.train_step(tuple(batch))
        return
    for number, part in enumerate(zip(*(one.chunk(accumulation) for one in batch), strict=True), 1):
        engine.backward(engine(*part))
        look(MemoryPhase.REDUCED if number == accumulation else MemoryPhase.ACCUMULATING)
        engine.step()


def bytes_outside(engine: lowtide.Engine) -> Found:
    """In files, in host memory that is not the model's, and on the way to other ranks."""
    placements = engine.optimizer._placements
    stores: list[Any] = [one._store for one in (placements.offloaded, placements.shard_store) if one and one._store]
    files = [os.fstat(store._file._descriptor).st_size for store in stores if hasattr(store, "_file")]
    pools = [store.pool for store in stores if hasattr(store, "pool")]
    pools += [placements.offloaded._pool] if placements.offloaded._buffers else []
    return {"file": sum(files), "host": sum(pool.bytes_in_use for pool in pools), "staging": staging_bytes(engine)}


def staging_bytes(engine: lowtide.Engine) -> int:
    """Of this rank's slots, in shared memory or of its own, with what comes to them."""
    memory: list[Tensor] = []
    for transport in {id(axis.transport): axis.transport for axis in engine._mesh._lines.values()}.values():
        if isinstance(transport, SharedMemoryTransport):
            memory += [slots[transport.rank] for slots in transport._slots]
        elif isinstance(transport, SocketTransport):
            memory += transport._scratch.values()
    return sum(one.nbytes for one in memory)


@contextmanager
def shared_memory_counted(mapped: list[int]) -> Iterator[None]:
    def count(nbytes: int, purpose: str, rank: int, ranks: Sequence[int], gather: Gather) -> Any:
        mapped[0] += nbytes if rank == 0 else 0
        return map_together(nbytes, purpose, rank, ranks, gather)

    with patch("lowtide.comm.shared_memory.map_together", count):
        yield


@contextmanager
def parameters_watched(engine: lowtide.Engine, peak: list[int]) -> Iterator[None]:
    plain = ShardedGroup.start_gather

    def gather(self: ShardedGroup) -> None:
        plain(self)
        if self.frees_memory:
            peak[0] = max(peak[0], engine.memory().parameter_bytes)

    with patch.object(ShardedGroup, "start_gather", gather):
        yield


@contextmanager
def reductions_watched(look: Any) -> Iterator[None]:
    """Of a pipeline, whose step is one call."""
    collect, end_backward = ScheduledUnits.collect, ScheduledUnits.end_backward

    def after_collect(self: ScheduledUnits, stage: int) -> None:
        collect(self, stage)
        look(MemoryPhase.ACCUMULATING)

    def after_end(self: ScheduledUnits) -> None:
        end_backward(self)
        look(MemoryPhase.REDUCED)

    with (
        patch.object(ScheduledUnits, "collect", after_collect),
        patch.object(ScheduledUnits, "end_backward", after_end),
    ):
        yield


def compare(cases: dict[str, dict[str, Any]], optimizer: OptimizerChoice = None) -> list[tuple[str, Found, Found]]:
    """(case, said, there) of each case, on one rank."""
    found = []
    for name, config in cases.items():
        there = there_is(config, optimizer)
        said = said_of(config, *rank_and_world(), optimizer)
        found.append((name, {kind: said[kind] for kind in there}, there))
    return found


def assert_equal(by_rank: list[list[tuple[str, Found, Found]]]) -> None:
    wrong = []
    for results in zip(*by_rank, strict=True):
        shared = sum(there.pop("shared") for _, _, there in results)
        for rank, (name, said, there) in enumerate(results):
            there["shared"] = shared
            kinds = [kind for kind in there if said[kind] != there[kind]]
            wrong += [f"{name}, rank {rank}, {kind}: said {said[kind]}, there are {there[kind]}" for kind in kinds]
    assert not wrong, "\n".join(wrong)


# -- the law ----------------------------------------------------------------------------------------------------------


# Features that change only numbers, or whose bytes are others than those of `frozen_gpt`: tests/laws has these.
WITHOUT = (
    *("clipping", "warm-up", "sums of gradients", "units by name"),
    *("fused modules", "compiled blocks", "tiles of the loss", "power sgd", "split layers"),
)


def cases_of(size: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Sets of the registry for so many ranks, with their files in the folder.

    Each has a feature that no set before it has. What each two features take between steps is asked by tests/laws.
    """
    seen, found = set[str](), dict[str, Any]()
    for names in sorted(feature_sets(*WITHOUT), key=num_ranks):
        if not {*names} <= seen:
            seen |= {*names}
            found |= {", ".join(names): case_of(names).as_config()} if num_ranks(names) == size else {}
    return {name: json.loads(json.dumps(config).replace("offloaded", str(folder))) for name, config in found.items()}


def in_few_bits(**more: Any) -> dict[str, Any]:
    """The section, for four ranks that stand for two hosts."""
    return {"transport": "sockets", "gradient_bits": 4, "ranks_of_host": 2, **more}


def others_of_four_ranks() -> dict[str, dict[str, Any]]:
    """Weights in few bits, of ranks that stand for two hosts; experts."""
    expert: dict[str, Any] = {"parallel": {"expert": 2}}
    return {
        "quantized hpZ": config_of(
            3,
            zero={"zero_hpz_partition_size": 2},
            communication=in_few_bits(weight_bits=4, frozen_weight_bits=8),
            **BF16,
        ),
        "experts 3": config_of(3, 2, "shared_memory", **expert),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_said_is_what_is_there(ranks: RankPool, tmp_path: Path, size: int) -> None:
    assert_equal(ranks(size, compare, cases_of(size, tmp_path), timeout=240))


def test_so_it_is_with_experts_and_weights_of_few_bits(ranks: RankPool) -> None:
    """With states in the memory of the host of a device: `tests/pretend/test_memory.py`."""
    assert_equal(ranks(4, compare, others_of_four_ranks()))


@pytest.mark.parametrize(
    ("device", "num_hosts", "wanted", "transport"),
    [
        ("cpu", 1, "auto", "shared_memory"),
        ("cpu", 2, "auto", "sockets"),
        ("cpu", 2, "native", "native"),
        ("cuda", 1, "auto", "native"),
        ("cpu", 2, "shared_memory", 'expected all ranks on one host for "shared_memory", found 2 hosts'),
        ("cuda", 1, "sockets", '"sockets" is for CPU ranks. On cuda use "auto".'),
    ],
)
def test_a_transport_is_chosen_or_refused(device: str, num_hosts: int, wanted: str, transport: str) -> None:
    config = Config.load(config_of(2, transport=wanted)).resolve(4)
    if " " in transport:
        text = refusal(Blueprint.of, config, frozen_gpt(), 4, device=device, num_hosts=num_hosts)
        assert f"communication.transport: {transport}" in text
        return
    blueprint = Blueprint.of(config, frozen_gpt(), 4, device=device, num_hosts=num_hosts)
    assert blueprint.transport == transport and (shared_bytes(blueprint) > 0) == (transport == "shared_memory")


def test_many_ranks_cost_no_more_than_few() -> None:
    config = {**config_of(3, 4, zero={"shard_size": 64}, **BF16), "parallel": {"pipeline": 2}}
    with torch.device("meta"):
        model = frozen_gpt()
    started = time.process_time()
    blueprint = Blueprint.of(Config.load(config).resolve(16_384), model, 16_384)
    first, last = bytes_of(blueprint, 0), bytes_of(blueprint, 16_383)
    assert time.process_time() - started < 1
    assert str(blueprint.parallel_dims).startswith("pipe(2) x replica(128) x secondary(1) x shard(64) x ")
    # Four trained groups at each place, of which a rank has the least that there is: a block of 1024 elements.
    assert first.optimizer == last.optimizer == 4 * 12 * 1024 and first.gradients == last.gradients == 4 * 4 * 1024
    assert first.parameters == 4 * 2 * 1024 and last.parameters == first.parameters + 2 * 1024, "the frozen block"


ONE = dict.fromkeys(("pipe", "replica", "secondary", "shard", "expert", "sequence", "tensor"), 1)


def axes_of(num_ranks: int, stage: int, degrees: dict[str, int], **zero: Any) -> tuple[ParallelDims, ShardingSpec]:
    policy = ZeroPolicy.from_stage(stage)
    config = ZeroConfig.model_validate({"stage": stage, **zero})
    parallel_dims = parallel_dims_of(ParallelConfig.model_validate(degrees), config, policy, num_ranks)
    return parallel_dims, sharding_of(policy, parallel_dims)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("zero", [{}, {"shard_size": 2}], ids=str)
@pytest.mark.parametrize(
    "degrees", [{}, {"tensor": 2}, {"sequence": 2}, {"expert": 2}, {"pipeline": 2, "tensor": 2, "sequence": 2}], ids=str
)
def test_the_axes_have_all_ranks(stage: int, zero: dict[str, int], degrees: dict[str, int]) -> None:
    parallel_dims, sharding = axes_of(16, stage, degrees, **(zero if stage else {}))
    assert parallel_dims.num_ranks == 16
    assert parallel_dims.size(parallel_dims.data) == 16 // prod(
        degrees.get(key, 1) for key in ("pipeline", "tensor", "sequence")
    )
    assert parallel_dims.size((*sharding.states, *sharding.replicas)) == parallel_dims.size(sharding.summed)
    assert set(sharding.summed) == {*parallel_dims.data, *parallel_dims.parts} and TENSOR not in sharding.states
    assert sharding.states[: len(sharding.parameters)] == sharding.parameters


def test_ranks_that_exchange_most_are_next_to_each_other() -> None:
    parallel_dims, sharding = axes_of(16, 3, {"pipeline": 2, "tensor": 2, "sequence": 2})
    assert parallel_dims.ranks(5, ("tensor",)) == (4, 5)
    assert parallel_dims.ranks(5, ("sequence",)) == (5, 7)
    assert parallel_dims.ranks(5, parallel_dims.data) == (1, 5)
    assert parallel_dims.ranks(5, sharding.states) == (1, 3, 5, 7), "states are divided over parts of sequences too"
    assert parallel_dims.ranks(5, ("pipe",)) == (5, 13)


def test_experts_lie_on_data_parallel_ranks() -> None:
    parallel_dims, sharding = axes_of(8, 3, {"expert": 2}, shard_size=4)
    assert dict(parallel_dims.sizes) == {**ONE, "replica": 2, "shard": 2, "expert": 2}
    assert parallel_dims.size(sharding.states) == 4 and parallel_dims.size(parallel_dims.data) == 8
    parallel_dims, sharding = axes_of(8, 0, {"expert": 2})
    assert dict(parallel_dims.sizes) == {**ONE, "replica": 4, "expert": 2} and not sharding.states
