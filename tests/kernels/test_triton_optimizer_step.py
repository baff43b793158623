"""The Triton optimizer step: how it rounds, its launches, and what it refuses.

What it computes is asked with the other tiers, in test_optimizer_step.py, and its bits in test_weight_rounding.py.
"""

from dataclasses import replace

import numpy
import pytest
import torch

from lowtide.kernels.optimizer_states import new_states, stored_states
from lowtide.kernels.optimizer_step import ShardUpdate, UpdateLaunches, update_runs, update_shard, update_shards
from lowtide.kernels.triton import optimizer_step
from lowtide.kernels.triton.optimizer_step import run_table
from lowtide.kernels.weight_rounding import Rounding
from lowtide.optimizers import OPTIMIZERS
from tests.kernels.cpu_kernel import CASES, assert_same
from tests.kernels.exact import DTYPES
from tests.kernels.recording import recorded_launches
from tests.kit.training import refusal

MOMENTUM = {"momentum": 1.0, "dampening": 0.0, "nesterov": False, "lr": 0.0, "weight_decay": 0.0}


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("name", ["sgd with momentum", "adagrad"])
def test_states_of_any_size_are_rounded_alike(name: str, state_dtype: torch.dtype, generator: torch.Generator) -> None:
    """Denormal values, values that are too large, and ones that are not finite; each in blocks with others."""
    rule, options = CASES[name]
    options = options | (MOMENTUM if name != "adagrad" else {"weight_decay": 0.0, "initial_accumulator_value": 0.0})
    gradient = torch.randn(8 * 256, generator=generator).view(8, 256)
    decades = torch.tensor([0, 3, 10, 18, -18, -30, -38, -44]).view(8, 1)
    gradient *= 10.0 ** (decades * torch.rand(8, 256, generator=generator))
    gradient[1, 7], gradient[2, 8], gradient[3, 9] = torch.inf, torch.nan, 2.0**126
    gradient[gradient == 0.0] = 1.0  # -0 may become 0
    gradient[0, :200] = 0.0
    weight = torch.randn(gradient.numel(), generator=generator)
    results = []
    for backend in ("triton", "reference"):
        states = list(new_states(rule, weight, options, state_dtype).values())
        with numpy.errstate(all="ignore"):  # Triton's interpreter computes with numpy
            update_shard(rule, weight.clone(), gradient.flatten(), states, 1, options, 1.0, None, backend=backend)
        results.append(states)
    found, expected = ([state.widened() for state in stored_states(states)] for states in results)
    assert expected[0].isnan().any() and expected[0].isfinite().any()
    assert torch.equal(found[0].isnan(), expected[0].isnan())
    assert_same([found[0].nan_to_num(0.0)], [expected[0].nan_to_num(0.0)])


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("master_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_weights_are_those_of_wide_ones_rounded(
    master_dtype: torch.dtype, out_dtype: torch.dtype, generator: torch.Generator
) -> None:
    rule, options = CASES["adamw"]
    weight, gradient = (torch.randn(1100, generator=generator) for _ in range(2))
    weight, out, info = weight.to(master_dtype), torch.empty(1100, dtype=out_dtype), torch.finfo(master_dtype)
    found, exact = weight.clone(), weight.double()
    for master, place, backend in ((found, out, "triton"), (exact, None, "reference")):
        states = list(new_states(rule, master, options).values())
        update_shard(rule, master, gradient.to(master.dtype), states, 1, options, 1.0, place, backend=backend)  # type: ignore[arg-type]
        assert all(state.dtype == torch.promote_types(master.dtype, torch.float32) for state in states)
    assert ((found.double() - exact).abs() <= 1.01 * info.eps * exact.abs() + info.smallest_normal).all()
    info = torch.finfo(out_dtype)
    assert ((out.double() - found.double()).abs() <= info.eps * found.double().abs() + info.smallest_normal).all()


# -- launches --------------------------------------------------------------------------------------------------------


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


def test_the_table_of_a_shard_is_made_once() -> None:
    device = torch.device("cpu")
    assert run_table((5, 9), (0, 1), 256, device, 0) is run_table((5, 9), (0, 1), 256, device, 0)
    assert run_table((5, 9), (0, 1), 256, device, 0) is not run_table((5, 9), (0, 1), 256, device, 1)


# -- errors ----------------------------------------------------------------------------------------------------------


def test_what_triton_does_not_take_is_an_error() -> None:
    mine = replace(OPTIMIZERS["sgd"], title="Mine", coefficients=None)
    momentum, options = CASES["sgd with momentum"]
    ones, wide = torch.ones(3), torch.ones(6)[::2]
    for rule, master, states, what in (
        (mine, ones, [], 'the optimizer "mine" without a kernel'),
        (momentum, wide, [ones], "non-contiguous tensors"),
        (momentum, ones, [ones.half()], "states of torch.float16"),
    ):
        text = refusal(update_shard, rule, master, ones, states, 1, options, 1.0, None, backend="triton")
        assert text == f'optimizer_step: backend "triton" does not take {what}; use "auto"'
    master = torch.ones(3)
    update_shard(mine, master, torch.ones(3), [], 1, CASES["sgd"][1], 1.0, None)
    assert (master < 1).all()
