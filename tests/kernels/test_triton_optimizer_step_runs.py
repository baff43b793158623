"""Stretches with options of their own, in one launch of the Triton optimizer step."""

from itertools import pairwise

import pytest
import torch

from lowtide.kernels.optimizer_states import new_states, stored_states
from lowtide.kernels.optimizer_step import ShardUpdate, UpdateLaunches, update_runs, update_shard, update_shards
from lowtide.kernels.triton import optimizer_step
from lowtide.kernels.triton.launch import recorded_launches
from lowtide.kernels.triton.optimizer_step import OptionChunks, run_table
from lowtide.kernels.weight_rounding import Rounding
from lowtide.optimizers import OPTIMIZERS
from tests.kernels.cpu_kernel import CASES

NUMEL = 3000
ENDS = (3, 1000, 1024, 1025, 1300, 2048, NUMEL)  # several in a tile, at its edges, and across them


@pytest.mark.parametrize("name", ["adamw", "adagrad", "sgd with momentum"])
def test_each_stretch_is_updated_as_if_alone(name: str, generator: torch.Generator) -> None:
    rule, options = CASES[name]
    weight, gradient = (torch.randn(NUMEL, generator=generator) for _ in range(2))
    rates = [0.01 * (index % 3 + 1) for index in range(len(ENDS))]
    runs = [(end, options | {"lr": lr}) for end, lr in zip(ENDS, rates, strict=True)]
    master, alone = weight.clone(), weight.clone()
    states = [torch.rand(NUMEL, generator=generator) for _ in new_states(rule, weight, options)]
    states_alone = [state.clone() for state in states]
    update_runs(rule, master, gradient, states, 2, runs, 0.5, None, backend="triton")
    for (start, end), (_, of_run) in zip(pairwise((0, *ENDS)), runs, strict=True):
        parts = [state[start:end] for state in states_alone]
        update_shard(rule, alone[start:end], gradient[start:end], parts, 2, of_run, 0.5, None, backend="triton")
    assert torch.equal(master, alone)
    for state, other in zip(states, states_alone, strict=True):
        assert torch.equal(state, other)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8], ids=str)
def test_many_shards_are_updated_as_if_alone(state_dtype: torch.dtype, generator: torch.Generator) -> None:
    rule, options = CASES["adamw"]
    updates, expected = [], []
    for numel in (1, 1024, 0, 3000, 257):  # in two dtypes of their own, each a launch
        weight, gradient = (torch.randn(numel, generator=generator) for _ in range(2))
        dtype = torch.float16 if numel == 1024 else torch.float32
        runs = [(numel // 2, options), (numel, options | {"lr": 0.5})]
        shards = []
        for _ in range(2):
            states = list(new_states(rule, weight, options, state_dtype).values())
            shards.append((weight.clone(), gradient.to(dtype), states, torch.zeros(numel, dtype=torch.float16)))
        master, of_shard, states, out = shards[0]
        updates.append(ShardUpdate(master, of_shard, stored_states(states), runs, [3, 3], out))
        expected.append(shards[1])
    order: list[int] = []
    update_shards(rule, updates, 3, 0.5, backend="triton", on_updated=order.append)
    assert sorted(order) == [0, 1, 2, 3, 4]
    for update, (master, gradient, states, out) in zip(updates, expected, strict=True):
        update_runs(rule, master, gradient, states, 3, update.runs, 0.5, out, backend="triton")
        for found, wanted in zip(update.tensors, (master, gradient, out, *states), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("form", ["fp32", "8 bits", "drawn", "split"])
def test_repeated_launches_make_the_steps_that_follow(form: str, generator: torch.Generator) -> None:
    rule, options = CASES["adamw"]
    groups = [dict(options), options | {"lr": 0.5}]
    state_dtype = torch.int8 if form == "8 bits" else torch.float32
    rounding = Rounding(7, 2**40) if form in ("drawn", "split") else None
    shards: list[list[ShardUpdate]] = [[], []]
    for numel in (300, 2500):
        weight = torch.randn(numel, generator=generator).to(torch.bfloat16 if rounding else torch.float32)
        gradient = torch.randn(numel, generator=generator)
        runs = [(numel // 3, groups[0]), (numel, groups[1])]
        for part in shards:
            states = stored_states([s.clone() for s in new_states(rule, weight.float(), options, state_dtype).values()])
            rest = torch.zeros(numel, dtype=torch.int8) if form == "split" else None
            part.append(ShardUpdate(weight.clone(), gradient, states, runs, [2, 2], None, rounding, rest))
    factor, skip, order = torch.ones(1), torch.zeros(1), list[int]()
    launches = UpdateLaunches(rule, shards[0], 2, "triton")
    for step, lr in ((2, 0.1), (3, 0.0), (5, 0.5)):  # equal rates of both groups, too
        groups[0]["lr"] = lr
        factor.fill_(step / 4)
        skip.fill_(step == 3)
        launches.fill(step)
        launches.run(factor, skip, order.append)
        for shard in shards[1]:
            shard.steps = [step, step]
        update_shards(rule, shards[1], step, step / 4, skip=skip, backend="triton")
        for one, other in zip(*shards, strict=True):
            assert all(torch.equal(found, wanted) for found, wanted in zip(one.tensors, other.tensors, strict=True))
    assert order == [0, 1] * 3


def test_a_launch_has_a_kind_and_so_many_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, options = CASES["adamw"]
    monkeypatch.setattr("lowtide.kernels.optimizer_step.LAUNCH_NUMEL", 2000)
    order: list[int] = []
    numels = (900, 10, 900, 900, 20, 30)
    updates = []
    for numel in numels:
        master, out = torch.zeros(numel), torch.zeros(numel) if numel < 100 else None
        states = stored_states(list(new_states(rule, master, options).values()))
        updates.append(ShardUpdate(master, master.clone(), states, [(numel, options)], [1], out))
    with recorded_launches() as launches:
        update_shards(rule, updates, 1, 1.0, backend="triton", on_updated=order.append)
    assert [len(launch.args["SHARDS_ptr"]) for launch in launches] == [3, 3]
    assert order == [0, 2, 3, 1, 4, 5]


def test_stretches_that_agree_are_one() -> None:
    options = CASES["adamw"][1]
    other, twin = options | {"lr": 0.5}, dict(options)
    coefficients = OPTIMIZERS["adamw"].coefficients
    assert coefficients is not None
    runs = [(0, other), (10, options), (20, twin), (20, other), (30, other), (40, options)]
    found = OptionChunks.of(runs, [3] * len(runs), coefficients)
    assert found.ends == (20, 30, 40) and found.choices == (0, 1, 0)
    assert found.coefficients == (coefficients(options, 3), coefficients(other, 3))


def test_one_set_of_options_needs_no_table() -> None:
    rule, options = CASES["adamw"]
    master = torch.empty(5000, device="meta")
    states = list(new_states(rule, master, options).values())
    for runs, has_table in (
        ([(10, options), (5000, dict(options))], False),
        ([(10, options), (5000, options | {"lr": 1.0})], True),
    ):
        with recorded_launches() as launches:
            shard = ShardUpdate(master, master, stored_states(states), runs, [1, 1], None)
            optimizer_step.update(rule, [shard], 1, 1.0, None)
        assert [launch.grid for launch in launches] == [(5,)]
        assert (launches[0].args["ENDS_ptr"] is not None) == has_table
        assert not launches[0].enable_fp_fusion  # the bits of the other tiers: products are rounded


def test_each_program_knows_its_stretches() -> None:
    ends, choices, first_runs = run_table((100, 200, 256, 700, 1000), (0, 1, 0, 2, 1), 256, torch.device("cpu"), 0)
    assert first_runs.tolist() == [0, 3, 3, 4, 4]  # programs begin at 0, 256, 512 and 768; the last stretch is 4
    assert ends.tolist() == [100, 200, 256, 700, 1000] and choices.tolist() == [0, 1, 0, 2, 1]
    assert first_runs.dtype == choices.dtype == torch.int32 and ends.dtype == torch.int64


def test_the_table_of_a_shard_is_made_once() -> None:
    device = torch.device("cpu")
    assert run_table((5, 9), (0, 1), 256, device, 0) is run_table((5, 9), (0, 1), 256, device, 0)
    assert run_table((5, 9), (0, 1), 256, device, 0) is not run_table((5, 9), (0, 1), 256, device, 1)
