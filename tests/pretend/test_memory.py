"""What an engine takes of a device is what its blueprint says, to the byte, and what is named here."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import getclosurevars, isfunction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.engine.blueprint.blueprint import Blueprint, Timing
from lowtide.engine.blueprint.footprint import Footprint, MemoryPhase, bytes_of
from lowtide.engine.blueprint.offload import Placement
from lowtide.engine.config.config import Config
from lowtide.kernels import optimizer_step
from lowtide.kernels.exact_sum import NUM_LIMBS, value_of
from lowtide.offload import FileStore, HostPool, OldVersion, round_up
from lowtide.zero.layout import BLOCK_NUMEL
from lowtide.zero.plan import GroupPlan
from lowtide.zero.versions import UpdateThread
from tests.engine.test_blueprint import BF16, FP32, config_of, frozen_gpt as gpt, reductions_watched
from tests.kernels.exact import to_limbs
from tests.kit import models
from tests.kit.grids import pairs
from tests.kit.ranks import RankPool, on_device
from tests.kit.training import settings
from tests.pretend.group import register

FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 4}}
PAGE = FileStore.alignment_bytes
HOST = {"device": "cpu"}
FILE = {"device": "nvme"}


@dataclass(frozen=True)
class Case:
    """A training. zero: more of the section `zero_optimization`; more: other sections."""

    model: str
    stage: int
    dtypes: dict[str, Any]
    accumulation: int
    zero: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)


Found = dict[str, tuple[int, int, int]]  # bytes said, that there are, and how many more there may be


chain = partial(models.linear_chain, 64, 6)  # gradients of a block are more than its activations


def allocated() -> int:
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def collected() -> int:
    gc.collect(), gc.collect()  # an engine has cycles; some go through nodes of the graph
    return allocated()


def blueprint_of(build: Any, config: dict[str, Any], num_ranks: int) -> Blueprint:
    with torch.device("meta"):
        model = build()
    return Blueprint.of(Config.load(config).resolve(num_ranks), model, num_ranks, device="pretend")


def said_of(blueprint: Blueprint, rank: int, moment: MemoryPhase) -> int:
    said = bytes_of(blueprint, rank, moment)
    return said.parameters + said.gradients + said.optimizer


def trained_groups(blueprint: Blueprint) -> list[GroupPlan]:
    """Of all places of a pipeline."""
    return [group for plan in blueprint.places for group in plan.trained]


def small_bytes(blueprint: Blueprint, moment: MemoryPhase) -> int:
    """The most that there is beside model states, of which all but the last terms are 0.3 % of a model at most."""
    groups = [group for plan in blueprint.places for group in plan.groups]
    stand_ins = sum(group.dtype.itemsize for group in groups)  # a NaN for parameters that were released
    # Up to 6 elements of each, to tell a change by `.data`: as they were remembered; as they are, and what differs.
    sampled = 6 * sum(len(one.params) * one.dtype.itemsize for one in groups)
    if moment is MemoryPhase.BETWEEN_STEPS:
        return stand_ins + sampled + in_background(blueprint)
    trained = trained_groups(blueprint)
    blocks = sum(group.layout.padded_numel // BLOCK_NUMEL for group in trained)
    sums = 8 * blocks + 2 * len(trained)  # squares by block, and whether all is finite
    # One of a gradient that was used up, in which a value may be found that is not finite.
    kept = (8 + 4 * BLOCK_NUMEL) * len(trained) * (blueprint.timing is Timing.IN_BACKWARD)
    return stand_ins + 4 * sampled + sums + kept + in_background(blueprint)


def in_background(blueprint: Blueprint) -> int:
    """Gradients that a delayed update on the device may still have."""
    if blueprint.timing is not Timing.DELAYED:
        return 0
    trained = trained_groups(blueprint)
    on_host = blueprint.offload_plan.updated_apart(trained)
    here = [one for one in trained if one.name not in on_host]
    return sum(one.layout.shard_numel * one.accumulation_dtype.itemsize for one in here)


def in_a_sum(blueprint: Blueprint) -> int:
    """What the exact sum of a step takes while it is made: words of 8 bytes for each block, and limbs."""
    blocks = sum(group.layout.padded_numel // BLOCK_NUMEL for group in trained_groups(blueprint))
    return 16 * 8 * blocks + 6 * 8 * NUM_LIMBS


def bytes_in_host_memory() -> int:
    """That engines have taken for what is not on the device: buffers of pools, and copies of what is only tried."""
    versions = [one.restore for one in gc.get_objects() if type(one) is OldVersion]
    copies = [getclosurevars(one).nonlocals.get("old") for one in versions if isfunction(one)]
    tried = sum(one.nbytes for one in copies if isinstance(one, Tensor) and one.device.type == "cpu")
    return tried + sum(one.bytes_in_use for one in gc.get_objects() if type(one) is HostPool)


def bytes_in_files() -> int:
    stores = [one for one in gc.get_objects() if type(one) is FileStore]
    return sum(os.fstat(one._file._descriptor).st_size for one in stores)


def passing(blueprint: Blueprint, rank: int) -> int:
    """Of host memory, buffers through which bytes only pass: of each kind, what comes, is used, and leaves."""
    offload_plan, plan, footprint = (
        blueprint.offload_plan,
        blueprint.places[blueprint.place_of(rank)],
        Footprint(blueprint, rank),
    )
    gradients = [one.layout.shard_numel * one.accumulation_dtype.itemsize for one in plan.trained]
    kinds = [gradients, [one.shard_bytes for one in plan.trained]] if offload_plan.updates_on_host else []
    if offload_plan.parameters is Placement.FILE:
        kinds.append([one.shard_bytes for one in plan.groups])
    if offload_plan.states is Placement.FILE:
        kinds.append([nbytes for one in plan.updated for nbytes in footprint.chunks(one)])
    return sum(round_up(nbytes, PAGE) for sizes in kinds for nbytes in sorted(sizes)[-3:])


def on_its_way(blueprint: Blueprint) -> int:
    """A message of gradients and its sum, beside the gradients of the unit that are there."""
    trained = trained_groups(blueprint)
    sums = [group.layout.shard_numel * group.accumulation_dtype.itemsize for group in trained]
    messages = [group.layout.padded_numel * group.reduce_dtype.itemsize for group in trained]
    sends = blueprint.parallel_dims.num_ranks > 1
    return max(messages) * sends + max(sums) * (sends or blueprint.offload_plan.updates_on_host)


class Peak:
    """The most bytes that there are, but for what a kernel's reference form takes while it runs.

    On a GPU the update is one kernel, which takes nothing.
    """

    def __init__(self, before: int) -> None:
        self._before = before
        self._most = 0

    def read(self) -> int:
        return max(self._most, torch.accelerator.max_memory_allocated() - self._before)

    @contextmanager
    def without_kernels(self) -> Iterator[None]:
        """Begins, and leaves them out meanwhile."""
        self._most = 0
        torch.accelerator.reset_peak_memory_stats()
        plain = optimizer_step._update_by_torch

        def update(*args: Any) -> None:
            self._most = self.read()
            plain(*args)
            torch.accelerator.reset_peak_memory_stats()

        with patch.object(optimizer_step, "_update_by_torch", update):
            yield


def activations(model: nn.Module, batch: tuple[Tensor, ...], dtype: torch.dtype) -> int:
    """The most that plain torch has beside parameters in a forward and backward whose gradients are dropped."""
    model, own = model.to("pretend", dtype), [one.to("pretend") for one in batch]
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    before = allocated()
    torch.accelerator.reset_peak_memory_stats()
    model(*own).backward()
    return torch.accelerator.max_memory_allocated() - before


def train(case: Case, rank: int, num_ranks: int) -> Found:
    """What there is at each moment, and the most in a step and in its update, beside what its blueprint says."""
    register()
    torch.manual_seed(0)
    build, make_batch = MODELS[case.model]
    batches = [make_batch(step, 2) for step in range(case.accumulation)]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(next(iter(case.dtypes), ""), torch.float32)
    working = activations(build(), batches[0], dtype) + sum(one.nbytes for one in batches[0])
    config = config_of(case.stage, case.accumulation, "auto", zero=case.zero, **case.dtypes, **case.more)
    blueprint = blueprint_of(build, config, num_ranks)
    value_of(to_limbs(torch.zeros(1, dtype=torch.float64, device="pretend")))  # its units stay with the process
    before = collected()
    engine = lowtide.initialize(build(), {**config, "kernels": {"fuse_modules": False}})
    found: Found = {}

    def look(moment: MemoryPhase) -> None:
        wait_for_updates()
        there, said = allocated() - before, said_of(blueprint, rank, moment)
        leaving = bytes_of(blueprint, rank).staging * (moment is not MemoryPhase.BETWEEN_STEPS)
        found[moment.value] = said, there, small_bytes(blueprint, moment) + leaving
        outside = bytes_of(blueprint, rank, moment)
        found[f"{moment.value}, in host memory"] = outside.host, bytes_in_host_memory(), passing(blueprint, rank)
        found[f"{moment.value}, in files"] = outside.file, bytes_in_files(), 0

    run = run_pipeline if blueprint.pipeline is not None else run_step
    for _ in range(2 + (blueprint.timing is Timing.DELAYED)):  # states are there, and an update in the background
        most, in_update = run(engine, batches, Peak(before), look)
        look(MemoryPhase.BETWEEN_STEPS)
    moments = list(MemoryPhase) if len(batches) > 1 else [MemoryPhase.BETWEEN_STEPS, MemoryPhase.REDUCED]
    said = max(bytes_of(blueprint, rank, moment).model for moment in moments)
    more = small_bytes(blueprint, MemoryPhase.REDUCED) + in_a_sum(blueprint)
    in_flight = len(batches) if blueprint.pipeline is not None else 1
    found["the most"] = said, most, in_flight * working + on_its_way(blueprint) + more
    said = max(said_of(blueprint, rank, moment) for moment in (MemoryPhase.BETWEEN_STEPS, MemoryPhase.REDUCED))
    found["the most in the update"] = said, in_update or said, more + bytes_of(blueprint, rank).staging
    engine.close()
    del engine
    found["after it"] = before, collected(), 0
    return found


def wait_for_updates() -> None:
    """For those in the background: what they take on the way comes and goes, and what they keep must be there."""
    for one in gc.get_objects():
        if type(one) is UpdateThread:
            one.wait()


Batches = list[tuple[Tensor, ...]]
Look = Callable[[MemoryPhase], None]


def run_step(engine: lowtide.Engine, batches: Batches, peak: Peak, look: Look) -> tuple[int, int]:
    """The most in forwards and backwards, and in the update."""
    most = 0
    for number, batch in enumerate(batches, 1):
        with peak.without_kernels():
            engine.backward(engine(*batch))
        most = max(most, peak.read())
        look(MemoryPhase.REDUCED if number == len(batches) else MemoryPhase.ACCUMULATING)
        with peak.without_kernels():
            engine.step()
    return most, peak.read()


def run_pipeline(engine: lowtide.Engine, batches: Batches, peak: Peak, look: Look) -> tuple[int, int]:
    """As `run_step`, of a step that is one call: 0 for the update, which is in the first."""

    def look_between(moment: MemoryPhase) -> None:
        if moment is MemoryPhase.REDUCED:  # before it there are activations
            look(moment)

    with peak.without_kernels(), reductions_watched(look_between):
        engine.train_step(tuple(torch.cat(parts) for parts in zip(*batches, strict=True)))
    return peak.read(), 0


def train_all(cases: list[Case]) -> list[str]:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wrong = []
    for case in cases:
        for what, (said, there, more) in train(case, rank, num_ranks).items():
            may_be_less = what in ("the most", "after it")  # what was there before a first engine may go
            if not (may_be_less or said <= there) or there > said + more:
                wrong.append(f"rank {rank}, {case}, {what}: said {said}, there are {there}, {said + more} at most")
    return wrong


MODELS: dict[str, Any] = {
    "gpt": (gpt, models.token_batch),
    "chain": (chain, lambda step, rows: (torch.randn(rows, 64),)),
}
OFFLOADS: list[dict[str, Any]] = [{}, {"offload_optimizer": HOST}]
PARAMS_TOO: dict[str, Any] = {"offload_optimizer": HOST, "offload_param": HOST}
GRID = [  # number of ranks, and the case
    *((size, Case("gpt", *row)) for size, *row in pairs((1, 2), range(4), (FP32, BF16), (1, 2), OFFLOADS)),
    *((3 - at, Case("chain", at, FP32, at, OFFLOADS[1])) for at in (1, 2)),
    *((n, Case("gpt", 3, dtypes, n, PARAMS_TOO)) for n, dtypes in ((1, FP32), (2, BF16))),
    (2, Case("chain", 3, FP32, 1, PARAMS_TOO)),
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_device_has_what_the_blueprint_says(pretend_ranks: RankPool, world_size: int) -> None:
    cases = [case for size, case in GRID if size == world_size]
    assert_held(pretend_ranks(world_size, train_all, cases, process_group=False))


def other_cases(folder: Path) -> Iterator[Case]:
    yield Case("gpt", 0, FP16, 1, {})
    yield Case("gpt", 3, FP16, 2, {})
    file = {**FILE, "nvme_path": str(folder)}
    yield Case("gpt", 1, FP32, 2, {"offload_optimizer": file})
    yield Case("gpt", 2, BF16, 1, {"offload_optimizer": {**file, "ratio": 0.5}})
    yield Case("gpt", 3, BF16, 2, {"offload_optimizer": file, "offload_param": file})
    overlaps: list[dict[str, Any]] = [{"overlap": "speculative"}, {"overlap": "delayed", "delay_after_steps": 1}]
    for overlap, home, other in zip(overlaps, (HOST, file), (file, HOST), strict=True):
        yield Case("gpt", 1, FP32, 1, {"offload_optimizer": {**home, **overlap}})
        yield Case("gpt", 3, BF16, 2, {"offload_optimizer": {**other, **overlap, "ratio": 0.5}})
    yield Case("gpt", 3, FP32, 1, {"update_in_backward": True})


def pipelined_cases() -> Iterator[Case]:
    for stage in (0, 1, 3):
        schedule, dtypes = (("1f1b", FP32), ("zb-v", BF16))[stage % 2]
        more = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": schedule}}
        yield Case("gpt", stage, dtypes, 4, {"offload_optimizer": HOST} if stage == 1 else {}, more)


@pytest.mark.parametrize("world_size", [1, 2])
def test_so_it_has_with_other_homes_and_times_of_the_update(
    pretend_ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    cases = list(other_cases(tmp_path))
    assert_held(pretend_ranks(world_size, train_all, cases[world_size - 1 :: 2], process_group=False))


def test_so_has_a_stage_of_a_pipeline(pretend_ranks: RankPool) -> None:
    assert_held(pretend_ranks(2, train_all, list(pipelined_cases()), process_group=False))


def assert_held(by_rank: list[list[str]]) -> None:
    wrong = [text for texts in by_rank for text in texts]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("stage", "more"),
    [(0, BF16), (3, FP32), (2, {"optimizer": {"type": "adamw", "params": {"lr": 1e-3, "state_dtype": "int8"}}})],
)
@on_device(2)
def test_a_checkpoint_in_the_background_takes_what_is_said(stage: int, more: dict[str, Any], tmp_path: Path) -> None:
    register()
    wide = partial(models.linear_chain, 512, 2)  # little of it is padding
    config = settings(stage, train_micro_batch_size_per_gpu=2, checkpoint={"async": True}, **more)
    with lowtide.initialize(wide(), config) as engine:
        engine.train_step((torch.ones(2, 512),))
        engine.save_checkpoint(tmp_path)
        said = Footprint(blueprint_of(wide, config, 2), engine.rank).snapshot()
        pool = engine._archive.checkpoints._pool
    assert pool is not None and pool.peak_bytes == pytest.approx(said, rel=0.02)


@on_device(2)
def test_a_recorded_step_has_the_peak_of_the_allocator() -> None:
    """What its allocator counts is what the report says."""
    register()
    collected()  # engines of tests before, which the allocator counts too
    config = settings(3, train_micro_batch_size_per_gpu=8)
    with lowtide.initialize(models.TinyGPT(width=64, layers=3), config) as engine:
        for number in range(2):
            engine.train_step(models.token_batch(number, 8))
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        with engine.record_memory():
            engine.train_step(models.token_batch(2, 8))
        report = engine.memory_report()
        assert report.peak_bytes == pytest.approx(report.allocator_bytes, rel=0.1) and before, vars(report)
        assert any(moment.startswith("backward of blocks.0") for moment, _ in report.samples)
