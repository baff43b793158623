"""Tied, frozen, empty, 0-dimensional, integer, strided parameters and buffers of all kinds come back."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowtide.checkpoint.files import CheckpointError
from tests.engine.saving import (
    Trip,
    engine_for,
    load_and_go_on,
    load_trips,
    run_steps,
    save_and_go_on,
    save_trips,
    spoil,
)
from tests.kit.models import Mlp, mlp, tied_gpt, token_batch, vector_batch, vector_batch_float64
from tests.kit.ranks import RankPool
from tests.kit.training import Case
from tests.zero.test_special_parameters import (
    Detached,
    Empty,
    Frozen,
    Integer,
    Normalized,
    NotContiguous,
    OneElement,
    SharedModule,
    TiedAcrossUnits,
    TwoDtypes,
    Unused,
)

STAGES = [(3, 0), (0, 3), (2, 3), (3, 1)]
KINDS = [  # those that differ in what is saved
    Unused,
    Frozen,
    TiedAcrossUnits,
    SharedModule,
    Empty,
    OneElement,
    Integer,
    NotContiguous,
    TwoDtypes,
    Detached,
    Normalized,
]
TRIPS = [
    Trip(Case(kind, vector_batch_float64, saved), Case(kind, vector_batch_float64, loaded))
    for kind, (saved, loaded) in zip(KINDS, STAGES * 3, strict=False)
] + [Trip(Case(tied_gpt, token_batch, 3), Case(tied_gpt, token_batch, 2))]


class Buffers(Mlp):
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


def test_every_kind_comes_back_to_the_last_bit(ranks: RankPool, tmp_path: Path) -> None:
    before = ranks(2, save_trips, TRIPS, tmp_path, 2)[0]
    after = ranks(2, load_trips, TRIPS, tmp_path, 2)[0]
    for trip, one, other in zip(TRIPS, before, after, strict=True):
        assert other.differences(one) == [], trip.saved.build


def test_every_kind_comes_back_before_its_first_step(ranks: RankPool, tmp_path: Path) -> None:
    """On one rank, every second of them."""
    trips = [Trip(trip.saved, trip.loaded, steps_before=0) for trip in TRIPS[::2]]
    before = ranks(1, save_trips, trips, tmp_path, 1)[0]
    after = ranks(1, load_trips, trips, tmp_path, 1)[0]
    for trip, one, other in zip(trips, before, after, strict=True):
        assert other.differences(one) == [], trip.saved.build
        assert not any(name.startswith("state.") for name in one.restored)


@pytest.mark.parametrize("world_size", [1, 2])
def test_buffers_come_back(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    case = Case(Buffers, vector_batch, 3)
    before = ranks(world_size, save_and_go_on, case, tmp_path, world_size, "a")[0]
    after = ranks(world_size, load_and_go_on, case.at(0), tmp_path, world_size, "a")[0]
    assert after.differences(before) == []
    restored = before.restored
    assert restored["strided"].tolist() == [[2, 5], [3, 6], [4, 7]] and restored["part"].tolist() == [2, 5, 8, 11]
    assert restored["count"].tolist() == 2 and restored["empty"].shape == (0, 3)
    assert restored["flags"].tolist() == [False, True, True, False, False]
    assert "cache" not in restored


def test_tied_parameters_are_written_once(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(TiedAcrossUnits, vector_batch_float64, 3)
    restored = ranks(2, save_and_go_on, case, tmp_path, 2, "a")[0].restored
    assert len({"layers.0.weight", "layers.2.weight"} & set(restored)) == 1
    assert len({"layers.1.bias", "first.bias"} & set(restored)) == 1


def test_a_trained_engine_goes_back(tmp_path: Path) -> None:
    """Loaded in the middle of another training, not into a fresh engine."""
    case = Case(Normalized, vector_batch_float64, 3)
    expected = save_and_go_on(case, tmp_path, 1, "a")
    engine = engine_for(case, 1)
    run_steps(engine, case, 7, 1)
    for _ in range(2):
        engine.load_checkpoint(tmp_path)
        found = run_steps(engine, case, 2, 2)
        assert found.losses == expected.losses
    engine.close()


def go_back_while_trained(case: Case, folder: Path) -> list[list[float]]:
    engine = engine_for(case, 2)
    run_steps(engine, case, 0, 1)
    engine.save_checkpoint(folder)
    losses = [run_steps(engine, case, 1, 2).losses]
    spoil(engine)
    engine.load_checkpoint(folder)
    losses.append(run_steps(engine, case, 1, 2).losses)
    engine.close()
    return losses


@pytest.mark.parametrize(("stage", "transport"), [(0, "sockets"), (3, "shared_memory")])
def test_a_training_goes_back_to_its_own_checkpoint(
    ranks: RankPool, tmp_path: Path, stage: int, transport: str
) -> None:
    case = Case(tied_gpt, token_batch, stage, config={"communication": {"transport": transport}})
    first, second = ranks(2, go_back_while_trained, case, tmp_path)[0]
    assert first == second


class Unfrozen(Frozen):
    def change(self) -> None: ...


def test_parameters_that_were_frozen_then_are_named(tmp_path: Path) -> None:
    save_and_go_on(Case(Frozen, vector_batch_float64), tmp_path, 1, "a")
    with engine_for(Case(Unfrozen, vector_batch_float64), 1) as engine, pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(tmp_path)
    for name in ("first.bias", "layers.0.weight", "layers.0.bias", "layers.2.weight"):
        assert f"'{name}' has no optimizer state in it (exp_avg, exp_avg_sq): it was not trained then" in str(
            caught.value
        )
    assert "'layers.1.weight'" not in str(caught.value)


def test_parameters_may_be_frozen_after_a_checkpoint(tmp_path: Path) -> None:
    save_and_go_on(Case(Unfrozen, vector_batch_float64), tmp_path, 1, "a")
    engine = engine_for(Case(Frozen, vector_batch_float64), 1)
    engine.load_checkpoint(tmp_path)
    before = engine.module.get_parameter("layers.0.weight").detach().clone()
    run_steps(engine, Case(Frozen, vector_batch_float64), 2, 2)
    assert torch.equal(engine.module.get_parameter("layers.0.weight"), before)
    engine.close()


class Wider(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(7, 3, bias=False)
        self.first = nn.Linear(5, 7, bias=False)
        self.first.weight = nn.Parameter(torch.zeros(8, 5))
        self.extra = nn.Parameter(torch.zeros(2))


def test_every_difference_to_another_model_is_listed(tmp_path: Path) -> None:
    save_and_go_on(Case(mlp, vector_batch), tmp_path, 1, "a")
    with engine_for(Case(Wider, vector_batch), 1) as engine:
        before = engine.state_dict()
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(tmp_path)
        for words in (
            "/a does not fit: 'extra' is not in it",
            "'first.bias' is not in the model",
            "'last.bias' is not in the model",
            "'first.weight' has shape (7, 5) in it, (8, 5) in the model",
            "Nothing was changed.",
        ):
            assert words in str(caught.value)
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
