"""A checkpoint goes on at another stage and number of ranks: every precision, kind of parameter and optimizer.

Two features of each kind beside each other: `tests/laws`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine import saving
from tests.engine.saving import Continuation, Trip, engine_for, run_steps
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, differences
from tests.zero import test_special_parameters as special
from tests.zero.test_unused_parameters import Branches, batch

GPT = Case(models.short_gpt, models.token_batch, 3, clip=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


# -- what is saved ---------------------------------------------------------------------------------------------------

BF16 = {"bf16": {"enabled": True}}
# The first steps overflow, and a scale lasts for two steps: nothing about it is as it was at the start.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}}
STATIC = {"fp16": {"enabled": True, "loss_scale": 128}}
HYBRID = {"zero_optimization": {"shard_size": 2}}


def groups_with_other_states(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Only the weights have a momentum; only the rest, which begins somewhere in a shard, is centered."""
    weights = [param for param in params if param.dim() > 1]
    others = [param for param in params if param.dim() < 2]
    groups = [{"params": weights, "lr": 2e-3, "momentum": 0.5}, {"params": others, "centered": True}]
    return torch.optim.RMSprop(groups, lr=1e-3)


class CountsInItsGroup(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(group["count"])
        return super().step(closure)


class Buffers(models.Mlp):
    """Of all shapes: strided, empty, without dimensions, integer, not saved; the forward counts in them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("strided", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("part", torch.arange(10.0)[::3])
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("low", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            for name in ("strided", "part", "count", "low", "cache"):
                self.get_buffer(name).add_(1)
            flags = self.get_buffer("flags")
            flags[int(self.get_buffer("count")) % 5] ^= True
        return super().forward(x, y) * (1 + 0.1 * self.get_buffer("strided")[0, 0] + 0.1 * self.get_buffer("part")[1])


KINDS = [special.TiedAcrossUnits, special.Empty, special.TwoDtypes]  # frozen and unused ones: tests/laws


def to(stage: int, case: Case, steps_before: int = 2, **options: Any) -> Trip:
    return Trip(case, case.at(stage), options, steps_before)


NO_CONFIG = {"optimizer": None}
BRANCHES = Case(Branches, partial(batch, 1), 3, config=NO_CONFIG)  # some parameters are first used after the load
TRIPS = {
    "fp16": to(1, GPT.at(3, config=FP16), steps_before=8),
    "Buffers": to(0, Case(Buffers, models.vector_batch, 3)),
    "TwoDtypes by torch": to(
        3, Case(special.TwoDtypes, models.vector_batch_float64, 2, config=NO_CONFIG), optimizer=torch.optim.RMSprop
    ),
    **{
        kind.__name__: to(loaded, Case(kind, models.vector_batch_float64, saved))
        for kind, (saved, loaded) in zip(KINDS, [(2, 3), (3, 1), (3, 0)], strict=True)
    },
    "a state without a step": to(
        1, GPT.at(3, config=NO_CONFIG), optimizer=partial(torch.optim.SGD, lr=1e-2, momentum=0.8, maximize=True)
    ),
    "a unit that a backward did not update": to(
        1,
        BRANCHES.at(0, config={"zero_optimization": {"update_in_backward": True}}),
        optimizer=torch.optim.NAdam,
    ),
    "a count of the group": to(2, BRANCHES, 3, optimizer=CountsInItsGroup),
    "other states": to(2, BRANCHES, optimizer=groups_with_other_states),
}


@pytest.fixture(scope="module")
def before(ranks: RankPool, folder: Path) -> dict[str, Continuation]:
    """What went on without a break on two ranks."""
    outcomes = ranks(2, saving.save_trips, list(TRIPS.values()), folder, 2, timeout=240)[0]
    return dict(zip(TRIPS, outcomes, strict=True))


def test_each_goes_on_to_the_same_bits_at_another_stage(
    ranks: RankPool, folder: Path, before: dict[str, Continuation]
) -> None:
    outcomes = ranks(2, saving.load_trips, list(TRIPS.values()), folder, 2, timeout=240)[0]
    for (name, one), other in zip(before.items(), outcomes, strict=True):
        assert other.differences(one) == [], name
    scales = before["fp16"].scales
    assert scales[0] < 2.0**24 and len(set(scales)) > 1  # it had come down, and still moves


def test_what_is_saved_of_each(before: dict[str, Continuation]) -> None:
    def dtypes(name: str, prefix: str) -> set[torch.dtype]:
        return {value.dtype for key, value in before[name].restored.items() if key.startswith(prefix)}

    def states(name: str, param: str) -> set[str]:
        names = before[name].restored
        return {key.rpartition(".")[2] for key in names if key.startswith(f"state.{param}.")}

    for name in ("TwoDtypes", "TwoDtypes by torch"):
        assert dtypes(name, "state.layers.0.weight.") == {torch.float64}
        assert dtypes(name, "state.layers.0.bias.") == {torch.float32}
    assert states("other states", "branches.1.0.weight") == {"square_avg", "momentum_buffer"}
    assert states("other states", "branches.1.0.bias") == {"square_avg", "grad_avg"}
    tied = set(before["TiedAcrossUnits"].restored)
    assert len({"layers.0.weight", "layers.2.weight"} & tied) == len({"layers.1.bias", "first.bias"} & tied) == 1
    buffers = before["Buffers"].restored
    assert buffers["strided"].tolist() == [[2, 5], [3, 6], [4, 7]] and buffers["part"].tolist() == [2, 5, 8, 11]
    assert buffers["count"].item() == 2 and buffers["empty"].shape == (0, 3)
    assert buffers["flags"].tolist() == [False, True, True, False, False]
    assert "cache" not in buffers


# -- between kinds ---------------------------------------------------------------------------------------------------


def test_replicas_of_shards_write_one_checkpoint_and_read_any(ranks: RankPool, tmp_path: Path) -> None:
    """That fewer ranks go on is asked in `tests/zero/test_any_ranks.py`."""
    hybrid, plain = GPT.at(3, config=HYBRID), GPT.at(2)
    trips = [Trip(hybrid, plain), Trip(plain, hybrid)]
    before = ranks(4, saving.save_trips, trips, tmp_path, 4)[0]
    assert len(list((tmp_path / "trip0").glob("*.distcp"))) == 4
    for one, first, second in zip(trips, before, ranks(4, saving.load_trips, trips, tmp_path, 4)[0], strict=True):
        assert second.state_differences(first) == [], one
        assert second.losses == pytest.approx(first.losses, rel=1e-5), one


def test_precisions_continue_each_other(ranks: RankPool, tmp_path: Path) -> None:
    """Of float32 and bf16, master weights and states are float32 in both."""
    wide = Case(models.short_gpt_float64, models.token_batch, clip=0.5)
    half = GPT.at(2, config=BF16)
    trips = [Trip(GPT, half), Trip(half.at(3), GPT.at(1)), Trip(wide, GPT), Trip(GPT, wide)]
    before, after = (ranks(2, go, trips, tmp_path, 2)[0] for go in (saving.save_trips, saving.load_trips))
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        assert other.losses == pytest.approx(one.losses, rel=1e-2 if number < 2 else 1e-5)
        assert other.losses != one.losses
        narrow = [{name: value.float() for name, value in found.restored.items()} for found in (one, other)]
        assert differences(*narrow) == []


@pytest.mark.parametrize(
    ("saved", "loaded", "scale"), [({}, None, 512.0), (BF16, None, 512.0), (STATIC, None, 512.0), (FP16, STATIC, 128.0)]
)
def test_a_loss_scale_is_the_configs_where_it_is_static_or_none_was_saved(
    tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any] | None, scale: float
) -> None:
    case = Case(models.mlp, models.vector_batch, config=saved)
    saving.save_trips([Trip(case, case)], tmp_path, 1)
    loaded = loaded or {"bf16": None, "fp16": {"enabled": True, "initial_scale_power": 9}}
    with engine_for(case.at(0, config=loaded), 1) as engine:
        engine.load_checkpoint(tmp_path)
        assert run_steps(engine, case, 2, 1).scales == [scale]
