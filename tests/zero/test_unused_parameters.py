"""What no rank has used in a step stays as it was, and its optimizer counts no step: as in torch, for a gradient that
is None."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import lowtide
from lowtide.engine.step.step_sums import Uses
from lowtide.watch.log import logger
from lowtide.zero.plan import Role
from tests.kit.ranks import RankPool
from tests.zero.apart import apart

WIDTH = 20
STEPS = 5
ADAMW: dict[str, Any] = {"type": "adamw", "params": {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}}
CPU = {"device": "cpu"}
FP16 = {"enabled": True, "initial_scale_power": 4}
SGD: dict[str, Any] = {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}}


class Branches(nn.Module):
    """Runs the branches that it is told to run. The shards of a branch begin and end inside of its parameters."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 51), nn.Linear(51, WIDTH)) for _ in range(4))
        self.beside = nn.Parameter(torch.randn(WIDTH, 60))  # in the unit of the rest
        self.lonely = nn.Parameter(torch.randn(7, 9))
        self.to(dtype)

    def forward(self, x: Tensor, plan: tuple[int, ...]) -> Tensor:
        x = torch.tanh(self.first(x))
        for index in plan:
            x = x + (torch.tanh(x @ self.beside) @ self.beside.T if index == 4 else self.branches[index](x))
        result: Tensor = x.square().mean()
        return result


# By step: what rank 0 and rank 1 run, in the first microbatch, and in the last or only one.
PLANS: list[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = [
    (((0, 1), (1,)), ((0, 2), (2,))),  # nobody branch 3, nor what is beside
    (((0,), (0,)), ((), (3,))),  # branch 3 in the last microbatch of rank 1 alone
    (((), ()), ((), ())),
    (((1, 3), (0, 4)), ((4,), (1,))),
    (((2,), (4,)), ((0, 1), (2,))),
]


def batch(step: int, rank: int, microbatch: int, accumulation: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + microbatch)
    plan = PLANS[step][rank % 2][microbatch == accumulation - 1]
    return {"x": torch.randn(3, WIDTH, generator=generator).to(dtype), "plan": plan}


@dataclass(frozen=True)
class Case:
    """One training; `config` is beside what all have."""

    stage: int = 0
    accumulation: int = 1
    optimizer: Any = field(default_factory=lambda: ADAMW)
    dtype: torch.dtype = torch.float64
    transport: str = "auto"
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    own: Callable[[Any], torch.optim.Optimizer] | None = None  # an optimizer of the caller's

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if "bf16" in self.config else self.dtype

    def engine(self) -> lowtide.Engine:
        torch.manual_seed(0)
        values = {
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "communication": {"transport": self.transport},
            "steps_per_print": 0,
            **({} if self.own else {"optimizer": self.optimizer}),
            **self.config,
        }
        return lowtide.initialize(Branches(self.dtype), values, optimizer=self.own)

    def batches(self, step: int, rank: int) -> Iterator[dict[str, Any]]:
        for microbatch in range(self.accumulation):
            yield batch(step, rank, microbatch, self.accumulation, self.compute_dtype)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def train(case: Case, folder: Path | None = None, restart_after: int = STEPS) -> dict[str, Tensor]:
    """The parameters at the end. folder: where a second engine goes on from, after so many steps."""
    engine = case.engine()
    for step in range(STEPS):
        if step == restart_after:
            engine.save_checkpoint(str(folder))
            engine.close()
            engine = case.engine()
            engine.load_checkpoint(str(folder))
        engine.train_step(case.batches(step, rank()))
    state = engine.state_dict()
    engine.close()
    return state


def train_all(cases: list[Case]) -> list[dict[str, Tensor]]:
    return [train(case) for case in cases]


def train_plainly(case: Case, world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Branches(case.dtype)
    if case.own:
        optimizer = case.own(model.parameters())
    else:
        kinds: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        optimizer = kinds[case.optimizer["type"]](model.parameters(), **case.optimizer["params"])
    for step in range(STEPS):
        optimizer.zero_grad()
        for one in range(world_size):
            for values in case.batches(step, one):
                (model(**values) / (world_size * case.accumulation)).backward()
        optimizer.step()
    return model.state_dict()


def check(found: list[dict[str, Tensor]], cases: list[Case], world_size: int) -> None:
    for state, case in zip(found, cases, strict=True):
        tolerance = 1e-9 if case.dtype == torch.float64 else 2e-5
        for name, value in train_plainly(case, world_size).items():
            torch.testing.assert_close(
                state[name], value, rtol=tolerance, atol=tolerance, msg=partial("{}, {}: {}".format, case, name)
            )


FORMS = [(2, ADAMW, torch.float64), (1, ADAMW, torch.float32), (2, SGD, torch.float32)]


def grid(first: int = 0, **zero: Any) -> list[Case]:
    """Every stage; forms and transports in turn."""
    transports = ("shared_memory", "sockets")
    return [
        Case(stage, accumulation, optimizer, dtype, transports[(stage + first) % 2], zero)
        for stage, (accumulation, optimizer, dtype) in enumerate([*FORMS, *FORMS][first:][:4])
    ]


def test_it_trains_as_torch_alone_does(ranks: RankPool) -> None:
    cases = [replace(case, transport="auto") for case in grid()]
    check(ranks(1, train_all, cases)[0], cases, 1)


def test_ranks_agree_on_what_nobody_used(ranks: RankPool) -> None:
    cases = [*grid(0), *grid(1)]
    check(ranks(2, train_all, cases)[0], cases, 2)


def test_updates_before_the_norm_are_known(ranks: RankPool, tmp_path: Path) -> None:
    """In the backward a rank waits with what it has not used; a speculative update is taken back."""
    place = {"device": "nvme", "nvme_path": str(tmp_path), "overlap": "speculative"}
    cases = [replace(case, accumulation=1) for case in grid(1, update_in_backward=True)[1::2]]
    cases += grid(0, offload_optimizer=place)[::2]
    check(ranks(2, train_all, cases)[0], cases, 2)


def test_states_that_rest_elsewhere(ranks: RankPool, tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    cases = [
        *(Case(stage, 2, dtype=torch.float32, zero={"offload_optimizer": nvme}) for stage in (0, 2, 3)),
        *(Case(3, 2, SGD, torch.float32, zero={"offload_optimizer": one, "offload_param": one}) for one in (nvme, CPU)),
    ]
    check(ranks(2, train_all, cases)[0], cases, 2)


def test_hybrid_and_secondary_partitions(ranks: RankPool) -> None:
    """The second pair of ranks does what the first one does."""
    cases = [
        Case(3, 2, zero={"shard_size": 2}),
        Case(3, 2, zero={"zero_hpz_partition_size": 2}, transport="sockets"),
        Case(1, 1, zero={"shard_size": 2, "update_in_backward": True}),
    ]
    check(ranks(4, train_all, cases)[0], cases, 4)


def train_both_ways(cases: list[Case]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """In memory; and with states on the host and the model on a device that is not there."""
    return [(train(case), apart(train, replace(case, zero={"offload_optimizer": CPU}))) for case in cases]


def test_an_update_on_the_host(ranks: RankPool) -> None:
    cases = [
        Case(stage, 2, dtype=torch.float32, transport="native", config=config)
        for stage, config in ((0, {}), (3, {"bf16": {"enabled": True}}))
    ]
    for plain, moved in ranks(2, train_both_ways, cases)[0]:
        assert all(torch.equal(value, moved[name]) for name, value in plain.items())


OWN: list[Callable[[Any], torch.optim.Optimizer]] = [
    partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, weight_decay=0.1),
    partial(torch.optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    partial(torch.optim.Rprop, lr=0.01),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
]


def test_optimizers_of_the_callers_own(ranks: RankPool) -> None:
    cases = [Case((3, 0)[number % 2], 1 + number % 2, own=own) for number, own in enumerate(OWN)]
    check(ranks(2, train_all, cases)[0], cases, 2)


def restart_all(cases: list[Case], folder: Path, after: int) -> list[dict[str, Tensor]]:
    return [train(case, folder / str(index), after) for index, case in enumerate(cases)]


@pytest.mark.parametrize("after", [1, 3])
def test_a_checkpoint_knows_how_often_each_was_updated(ranks: RankPool, tmp_path: Path, after: int) -> None:
    ours = [Case(stage, 2, optimizer, torch.float32) for stage, optimizer in ((0, ADAMW), (3, SGD))]
    theirs = [Case(3 * (number % 2), 2, own=own) for number, own in enumerate(OWN[:2])]
    cases = [ours[after > 1], theirs[after > 1]]
    check(ranks(2, restart_all, cases, tmp_path, after)[0], cases, 2)


class OwnAdamW(torch.optim.AdamW):
    """No rule is known to do the same."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("second", [OwnAdamW, torch.optim.AdamW])
def test_the_steps_of_the_callers_own_optimizer_are_known_after_a_load(tmp_path: Path, second: Any) -> None:
    first_case, second_case = (
        Case(3, 2, own=partial(kind, **ADAMW["params"]), dtype=torch.float64) for kind in (OwnAdamW, second)
    )
    engine = first_case.engine()
    for step in range(3):
        engine.train_step(first_case.batches(step, 0))
    engine.save_checkpoint(tmp_path)
    engine.close()
    engine = second_case.engine()
    engine.load_checkpoint(tmp_path)
    assert [
        engine.optimizer.by_parameter.missed_steps(engine.module.get_parameter(n)) for n in ("lonely", "beside")
    ] == [3, 3]
    for step in range(3, STEPS):
        engine.train_step(second_case.batches(step, 0))
    check([engine.state_dict()], [first_case], 1)
    engine.close()


class Parts(nn.Module):
    """Some of three vectors that lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.linspace(-1, 1, 5, dtype=torch.float64) + part for part in range(3))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        return sum(((self.parts[part] - x).square().sum() for part in used), x.sum().requires_grad_())


def test_what_was_left_out_once_has_steps_of_its_own_for_good(tmp_path: Path) -> None:
    """Also where the part beside it is left out again: an engine that is loaded counts on as torch does."""
    x, config = torch.zeros(5, dtype=torch.float64), {"steps_per_print": 0}
    plans, make = [(0,), (0, 2), (0, 1, 2), (0, 1, 2)], partial(OwnAdamW, lr=0.1)
    plain = Parts()
    optimizer = make(plain.parameters())
    engine = lowtide.initialize(Parts(), config, optimizer=make)
    for step, used in enumerate(plans):
        if step == 3:
            engine.save_checkpoint(tmp_path)
            engine.close()
            engine = lowtide.initialize(Parts(), config, optimizer=make)
            engine.load_checkpoint(tmp_path)
        engine.train_step({"x": x, "used": used})
        optimizer.zero_grad()
        plain(x, used).backward()
        optimizer.step()
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-12, atol=1e-12)
    engine.close()


def test_other_readers_find_the_steps_of_each(tmp_path: Path) -> None:
    case = Case(3, 2)
    train(case, tmp_path, restart_after=3)
    dcp_to_torch_save(tmp_path / "global_step3", tmp_path / "plain.pt")
    states = torch.load(tmp_path / "plain.pt", weights_only=True)["optim"]["state"]
    found = {name: int(state["step"]) for name, state in states.items() if not name.endswith("bias")}
    names = ("first", *(f"branches.{index}.0" for index in range(4)))
    assert [found[f"{name}.weight"] for name in names] == [3, 2, 1, 0, 0] and found["lonely"] == 0


def changes_of(case: Case) -> list[list[str]]:
    """After each step, of which parameters the values have changed."""
    engine = case.engine()
    before, found = engine.state_dict(), []
    for step in range(STEPS):
        engine.train_step(case.batches(step, rank()))
        now = engine.state_dict()
        found.append([name for name, value in now.items() if not torch.equal(value, before[name])])
        before = now
    engine.close()
    return found


def changes_of_all(cases: list[Case]) -> list[list[list[str]]]:
    return [changes_of(case) for case in cases]


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8"])
def test_not_a_bit_of_it_moves(ranks: RankPool, state_dtype: str) -> None:
    optimizer = {"type": "adamw", "params": {**ADAMW["params"], "state_dtype": state_dtype}}
    cases = [
        Case(stage, 2, optimizer, torch.float32, config=config)
        for stage, config in ((0, {"bf16": {"enabled": True}}), (3, {}))
    ]
    for found in ranks(2, changes_of_all, cases)[0]:
        for step, names in enumerate(found):
            used = {index for of_rank in PLANS[step] for plan in of_rank for index in plan}
            branches = {int(name.split(".")[1]) for name in names if name.startswith("branches")}
            assert branches == used - {4} and ("beside" in names) == (4 in used) and "lonely" not in names


def test_a_delayed_update(ranks: RankPool) -> None:
    """What a step changes are the parameters that the step before has used."""
    delayed = {"offload_optimizer": {**CPU, "overlap": "delayed", "delay_after_steps": 0}}
    cases = [Case(stage, 2, dtype=torch.float32, zero=delayed, config={"bf16": {"enabled": True}}) for stage in (0, 3)]
    for found in ranks(2, changes_of_all, cases)[0]:
        assert all("lonely" not in names for names in found)


@pytest.mark.parametrize("before", [(), (0, 1, 2)])
def test_a_step_that_uses_nothing_moves_nothing(before: tuple[int, ...]) -> None:
    """before: what the step before it has used."""
    engine = lowtide.initialize(Parts(), {"optimizer": ADAMW, "steps_per_print": 0})
    x = torch.ones(5, dtype=torch.float64)
    engine.train_step({"x": x, "used": before})
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    result = engine.train_step({"x": x, "used": ()})
    assert result.grad_norm == 0 and all(torch.equal(value, state[name]) for name, value in engine.state_dict().items())
    engine.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 700])
def test_counts_of_many_ranks_share_a_word(num_ranks: int) -> None:
    params = [nn.Parameter(torch.zeros(())) for _ in range(100)]
    gradient: Any = SimpleNamespace(
        group=SimpleNamespace(params=params, plan=SimpleNamespace(role=Role.UPDATED)), used=set(range(100))
    )
    uses = Uses([{"params": params[50:]}, {"params": params[:50]}], [gradient], num_ranks)
    total = [word * (num_ranks - 1) for word in uses.words()]
    gradient.used = set(range(100)) - {3, 99}
    total = [word + own for word, own in zip(total, uses.words(), strict=True)]
    assert uses.unused(total) == (set() if num_ranks > 1 else {id(params[3]), id(params[99])})
    assert uses.unused([word * num_ranks for word in uses.words()]) == {id(params[3]), id(params[99])}


# -- what the log says of it ------------------------------------------------------------------------------------------


def unused_lines(zero: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Of a rank that runs branch 0, while the last rank runs branch 1 in one step of 19."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = Branches(torch.float32)
        model.branches[3].requires_grad_(False)
        config = {"optimizer": ADAMW, "steps_per_print": 0, "zero_optimization": zero, **config}
        with lowtide.initialize(model, config) as engine:
            is_last = engine.rank == engine.world_size - 1
            for step in range(45):
                plan = (0, 1) if is_last and step % 19 == 5 else (0,)
                engine.train_step({"x": torch.ones(2, WIDTH), "plan": plan})
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [line for line in lines if "got no gradient" in line]


@pytest.mark.parametrize(
    ("zero", "config"),
    [({"stage": 0}, {}), ({"stage": 3}, {"communication": {"transport": "sockets"}}), ({"stage": 2}, {"fp16": FP16})],
)
def test_what_nobody_used_is_named_once(ranks: RankPool, zero: dict[str, Any], config: dict[str, Any]) -> None:
    (line,), *others = ranks(2, unused_lines, zero, config)
    branch = WIDTH * 51 + 51 + 51 * WIDTH + WIDTH
    share = (63 + 60 * WIDTH + branch) / (63 + 60 * WIDTH + 3 * branch + WIDTH * (WIDTH + 1))
    assert line == (
        "model: beside, lonely, branches.2 got no gradient in 20 steps: if that is intended, requires_grad_(False) "
        f"before lowtide.initialize saves {100 * share:.0f} % of all gradients and optimizer states"
    )
    assert others == [[]]
