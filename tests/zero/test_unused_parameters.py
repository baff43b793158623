"""What no rank has used in a step stays as it was, and its optimizer counts no step: as in torch, for a gradient that
is None."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import lowtide
from lowtide.engine.step.step_sums import Uses
from lowtide.zero.plan import Role
from lowtide.zero.torch_update import TorchUpdate
from tests.kit.ranks import RankPool
from tests.kit.training import (
    ROWS,
    Case,
    Outcome,
    assert_close,
    logged,
    settings,
    take_step,
    train_all,
    train_plainly,
    trained,
)

WIDTH = 20
STEPS = 5
ADAMW: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}
TWINS: dict[str, Any] = {"adamw": partial(torch.optim.AdamW, **ADAMW), "sgd": partial(torch.optim.SGD, **SGD)}
CPU = {"device": "cpu"}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


class Branches(nn.Module):
    """Runs the branches that it is told to run. The shards of a branch begin and end inside of its parameters."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 51), nn.Linear(51, WIDTH)) for _ in range(4))
        self.beside = nn.Parameter(torch.randn(WIDTH, 60))  # in the unit of the rest
        self.lonely = nn.Parameter(torch.randn(7, 9))
        self.to(dtype)

    def forward(self, x: Tensor, plans: Tensor) -> Tensor:  # (rows, WIDTH), (rows, 5): alike in all rows
        x = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        for index in plans[0].nonzero().flatten().tolist():
            x = x + (torch.tanh(x @ self.beside) @ self.beside.T if index == 4 else self.branches[index](x))
        return x.square().mean()


# By step: what rank 0 and rank 1 run, in the first microbatch, and in the last or only one.
PLANS: list[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = [
    (((0, 1), (1,)), ((0, 2), (2,))),  # nobody branch 3, nor what is beside
    (((0,), (0,)), ((), (3,))),  # branch 3 in the last microbatch of rank 1 alone
    (((), ()), ((), ())),
    (((1, 3), (0, 4)), ((4,), (1,))),
    (((2,), (4,)), ((0, 1), (2,))),
]


def batch(accumulation: int, step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of the first rank's microbatches, then of the next one's."""
    plans = torch.zeros(rows, 5, dtype=torch.bool)
    for part, its_rows in enumerate(plans.split(ROWS)):
        rank, microbatch = divmod(part, accumulation)
        its_rows[:, list(PLANS[step][rank % 2][microbatch == accumulation - 1])] = True
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64), plans


def case_of(
    stage: int,
    accumulation: int = 1,
    kind: str | None = "adamw",
    dtype: torch.dtype = torch.float64,
    **config: Any,
) -> Case:
    """kind: None for an optimizer of the caller's own."""
    config["optimizer"] = kind and {"type": kind, "params": {"adamw": ADAMW, "sgd": SGD}[kind]}
    return Case(partial(Branches, dtype), partial(batch, accumulation), stage, accumulation, STEPS, config=config)


def plainly(case: Case, world_size: int, own: Any = None) -> tuple[Outcome, float]:
    """By torch alone; and the tolerance."""
    make = own or TWINS[case.config["optimizer"]["type"]]
    expected = train_plainly(case, world_size, make, num_parts=world_size * case.accumulation)
    return expected, 1e-9 if expected.state["lonely"].dtype == torch.float64 else 2e-5


def check(ranks: RankPool, world_size: int, cases: Sequence[Case], own: Any = None) -> None:
    """own: the caller's optimizer."""
    for case, outcome in zip(cases, ranks(world_size, train_all, cases, optimizer=own)[0], strict=True):
        expected, tolerance = plainly(case, world_size, own)
        assert_close(outcome, expected, tolerance, tolerance, str(case))


FORMS = [(2, "adamw", torch.float64), (1, "adamw", torch.float32), (2, "sgd", torch.float32)]


def forms(folder: Path) -> dict[int, list[Case]]:
    """By number of ranks: kinds, dtypes, transports, places of states and times of the update, in turn.

    In the backward a rank waits with what it has not used; a speculative update is taken back. The second pair of four
    ranks does what the first one does.
    """
    transports: list[dict[str, Any]] = [{"communication": {"transport": name}} for name in ("shared_memory", "sockets")]
    grid: list[Any] = [case_of(stage, *FORMS[stage % 3], **transports[stage % 2]) for stage in range(4)]
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    speculative, float32 = {"offload_optimizer": {**nvme, "overlap": "speculative"}}, torch.float32
    return {
        1: [case_of(stage, *FORMS[stage % 3]) for stage in (0, 3)],
        2: [
            *grid,
            case_of(1, 1, "sgd", zero_optimization={"update_in_backward": True}),
            case_of(3, 1, zero_optimization={"update_in_backward": True}),
            *(case.at(case.stage, config={"zero_optimization": speculative}) for case in grid[::2]),
            case_of(3, 2, "sgd", float32, zero_optimization={"offload_optimizer": nvme, "offload_param": nvme}),
        ],
        4: [
            case_of(3, 2, zero_optimization={"zero_hpz_partition_size": 2}, **transports[1]),
            case_of(1, 1, zero_optimization={"shard_size": 2, "update_in_backward": True}),
        ],
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_it_trains_as_torch_alone_does(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    check(ranks, world_size, forms(tmp_path)[world_size])


class OwnAdamW(torch.optim.AdamW):
    """No rule is known to do the same."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


OWN: list[Any] = [
    partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, weight_decay=0.1),
    partial(torch.optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
]


@pytest.mark.parametrize(("number", "own"), list(enumerate(OWN)))
def test_optimizers_of_the_callers_own(ranks: RankPool, number: int, own: Any) -> None:
    check(ranks, 2, [case_of((3, 0)[number % 2], 1 + number % 2, None)], own)


def restart(case: Case, folder: Path, after: int, first: Any = None, second: Any = None) -> dict[str, Tensor]:
    """The parameters where a second engine goes on from the first one. first, second: the caller's optimizers."""
    with trained(case, after, optimizer=first) as engine:
        engine.save_checkpoint(folder)
    with trained(case, 0, optimizer=second) as engine:
        engine.load_checkpoint(folder)
        if first:
            assert engine.optimizer.counts.missed[id(engine.module.get_parameter("lonely"))] == after
        for step in range(after, STEPS):
            take_step(engine, case, step)
        return engine.state_dict()


@pytest.mark.parametrize(
    ("stage", "kind", "after", "first", "second"),
    [
        (0, "adamw", 1, None, None),
        (3, "sgd", 3, None, None),
        (3, None, 3, OWN[1], OWN[1]),
        (3, None, 3, partial(OwnAdamW, **ADAMW), TWINS["adamw"]),
    ],
)
def test_a_checkpoint_knows_how_often_each_was_updated(
    ranks: RankPool, tmp_path: Path, stage: int, kind: str | None, after: int, first: Any, second: Any
) -> None:
    case = case_of(stage, 2, kind, torch.float32 if kind else torch.float64)
    state = ranks(2, restart, case, tmp_path, after, first, second)[0]
    expected, tolerance = plainly(case, 2, first)
    torch.testing.assert_close(state, expected.state, rtol=tolerance, atol=tolerance)


def test_a_checkpoint_has_states_of_what_no_update_in_the_backward_has_reached(ranks: RankPool, tmp_path: Path) -> None:
    """With a class of torch it is asked in tests/engine/test_checkpoint_topologies.py."""
    case = case_of(2, 1, "sgd", zero_optimization={"update_in_backward": True})
    state = ranks(2, restart, case, tmp_path, 1)[0]
    expected, tolerance = plainly(case, 2)
    torch.testing.assert_close(state, expected.state, rtol=tolerance, atol=tolerance)


class Parts(nn.Module):
    """Some of three vectors that lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.linspace(-1, 1, 5, dtype=torch.float64) + part for part in range(3))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        return sum(((self.parts[part] - x).square().sum() for part in used), x.sum().requires_grad_())


def test_what_was_left_out_once_has_steps_of_its_own_for_good(tmp_path: Path) -> None:
    """Also where the part beside it is left out again: an engine that is loaded counts on as torch does."""
    x, make = torch.zeros(5, dtype=torch.float64), partial(OwnAdamW, lr=0.1)
    config = settings(optimizer=None, train_micro_batch_size_per_gpu=None)
    plain = Parts()
    optimizer = make(plain.parameters())
    engine = lowtide.initialize(Parts(), config, optimizer=make)
    for step, used in enumerate([(0,), (0, 2), (0, 1, 2), (0, 1, 2)]):
        if step == 3:
            update = engine.optimizer._update
            assert isinstance(update, TorchUpdate)
            runs = [flat.run for inner in update._inner.values() for flat in inner.flats]
            assert all(run.start < run.end for run in runs)  # empty ones would become more in each step
            engine.save_checkpoint(tmp_path)
            engine.close()
            engine = lowtide.initialize(Parts(), config, optimizer=make)
            engine.load_checkpoint(tmp_path)
        engine.train_step({"x": x, "used": used})
        optimizer.zero_grad()
        plain(x, used).backward()
        optimizer.step()
    torch.testing.assert_close(engine.state_dict(), dict(plain.state_dict()), rtol=1e-12, atol=1e-12)
    engine.close()


@pytest.mark.parametrize("before", [(), (0, 1, 2)])
def test_a_step_that_uses_nothing_moves_nothing(before: tuple[int, ...]) -> None:
    """before: what the step before it has used."""
    x = torch.ones(5, dtype=torch.float64)
    with lowtide.initialize(Parts(), settings(train_micro_batch_size_per_gpu=None)) as engine:
        engine.train_step({"x": x, "used": before})
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        assert engine.train_step({"x": x, "used": ()}).grad_norm == 0
        assert all(torch.equal(value, state[name]) for name, value in engine.state_dict().items())


def test_other_readers_find_the_steps_of_each(tmp_path: Path) -> None:
    with trained(case_of(3, 2), 3) as engine:
        engine.save_checkpoint(tmp_path)
    dcp_to_torch_save(tmp_path / "global_step3", tmp_path / "plain.pt")
    states = torch.load(tmp_path / "plain.pt", weights_only=True)["optim"]["state"]
    found = {name: int(state["step"]) for name, state in states.items() if not name.endswith("bias")}
    names = ("first", *(f"branches.{index}.0" for index in range(4)))
    assert [found[f"{name}.weight"] for name in names] == [3, 2, 1, 0, 0] and found["lonely"] == 0


def changes_of(cases: Sequence[Case]) -> list[list[list[str]]]:
    """After each step, of which parameters the values have changed."""
    results = []
    for case in cases:
        with trained(case, 0) as engine:
            before, found = engine.state_dict(), []
            for step in range(STEPS):
                take_step(engine, case, step)
                now = engine.state_dict()
                found.append([name for name, value in now.items() if not torch.equal(value, before[name])])
                before = now
        results.append(found)
    return results


def test_not_a_bit_of_it_moves(ranks: RankPool) -> None:
    """A delayed step changes what the step before has used; and no step what nobody uses."""
    late = {"offload_optimizer": {**CPU, "overlap": "delayed", "delay_after_steps": 0}}
    forms: list[tuple[str, int, dict[str, Any]]] = [("fp32", 0, BF16), ("bf16", 3, {}), ("int8", 0, BF16)]
    cases = [
        case_of(stage, 2, "adamw", torch.float32, **config).at(
            stage, config={"optimizer": {"type": "adamw", "params": {**ADAMW, "state_dtype": state_dtype}}}
        )
        for state_dtype, stage, config in forms
    ]
    delayed = [case_of(3, 2, "adamw", torch.float32, zero_optimization=late, **BF16)]
    for case, found in zip([*cases, *delayed], ranks(2, changes_of, [*cases, *delayed])[0], strict=True):
        for step, names in enumerate(found):
            used = {index for of_rank in PLANS[step] for plan in of_rank for index in plan}
            branches = {int(name.split(".")[1]) for name in names if name.startswith("branches")}
            assert "lonely" not in names
            assert case in delayed or (branches == used - {4} and ("beside" in names) == (4 in used))


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 700])
def test_counts_of_many_ranks_share_a_word(num_ranks: int) -> None:
    params = [nn.Parameter(torch.zeros(())) for _ in range(100)]
    plan = SimpleNamespace(role=Role.UPDATED)
    gradient: Any = SimpleNamespace(group=SimpleNamespace(params=params, plan=plan), used=set(range(100)))
    uses = Uses([{"params": params[50:]}, {"params": params[:50]}], [gradient], num_ranks)
    total = [word * (num_ranks - 1) for word in uses.words()]
    gradient.used = set(range(100)) - {3, 99}
    total = [word + own for word, own in zip(total, uses.words(), strict=True)]
    assert uses.unused(total) == (set() if num_ranks > 1 else {id(params[3]), id(params[99])})
    assert uses.unused([word * num_ranks for word in uses.words()]) == {id(params[3]), id(params[99])}


def unused_lines(config: dict[str, Any]) -> list[str]:
    """Of a rank that runs branch 0, while the last rank runs branch 1 in one step of 19."""
    model = Branches(torch.float32)
    model.branches[3].requires_grad_(False)
    with logged() as lines, lowtide.initialize(model, config) as engine:
        for step in range(45):
            plans = torch.zeros(ROWS, 5, dtype=torch.bool)
            plans[:, 0] = True
            plans[:, 1] = engine.rank == engine.world_size - 1 and step % 19 == 5
            engine.train_step((torch.ones(ROWS, WIDTH), plans))
    return [line for line in lines if "got no gradient" in line]


@pytest.mark.parametrize(
    "config",
    [
        settings(3, communication={"transport": "sockets"}),
        settings(2, fp16={"enabled": True, "initial_scale_power": 4}),
    ],
)
def test_what_nobody_used_is_named_once(ranks: RankPool, config: dict[str, Any]) -> None:
    (line,), *others = ranks(2, unused_lines, config)
    branch = WIDTH * 51 + 51 + 51 * WIDTH + WIDTH
    share = (63 + 60 * WIDTH + branch) / (63 + 60 * WIDTH + 3 * branch + WIDTH * (WIDTH + 1))
    assert line == (
        "model: beside, lonely, branches.2 got no gradient in 20 steps: if that is intended, requires_grad_(False) "
        f"before lowtide.initialize saves {100 * share:.0f} % of all gradients and optimizer states"
    )
    assert others == [[]]
