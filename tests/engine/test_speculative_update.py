"""Updates that begin before it is known whether they count have the bits of the plain step."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lowtide.engine.step import step_update
from lowtide.engine.step.step_sums import Clipping, NonFiniteGradientError, SummedStep
from lowtide.kernels.exact_sum import NUM_LIMBS
from lowtide.zero.versions import ParameterVersions
from tests.kernels.exact import to_limbs
from tests.kit import models
from tests.kit.models import FEATURES, Explodes, mlp, tiny_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import (
    Case,
    assert_alike,
    differences,
    rank_and_world,
    refusal,
    start,
    take_step,
    train,
    train_all,
)
from tests.zero.test_float16 import overflowing_batch


def speculative(case: Case, folder: Path, place: str, overlap: str = "speculative", **changes: Any) -> Case:
    section = {"device": place, "nvme_path": str(folder), "overlap": overlap, **changes}
    zero = {**case.config.get("zero_optimization", {}), "offload_optimizer": section}
    return case.at(case.stage, config={"zero_optimization": zero})


@on_ranks(2)
def test_it_is_bitwise_the_plain_step(tmp_path: Path) -> None:
    """Where some of the steps are clipped; all or none are in tests/laws."""
    case = Case(tiny_gpt, token_batch, accumulation=2, steps=4)
    norms = sorted(train(case.at(1)).norms)
    between = (norms[1] + norms[2]) / 2
    for plain, place in ((case.at(3), "cpu"), (case.at(0, config={"bf16": {"enabled": True}}), "nvme")):
        clipped = plain.at(plain.stage, clip=between)
        outcomes = train_all([clipped, speculative(clipped, tmp_path, place)])
        assert_alike(outcomes, clipped)
        assert 0 < sum(norm > between for norm in outcomes[0].norms) < 4


@on_ranks(2)
def test_an_update_in_the_backward_takes_the_shard_that_is_there(tmp_path: Path) -> None:
    """Each block's is loaded for the forward and for the backward, the last one's once, and none for its update."""
    zero = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    case = Case(tiny_gpt, token_batch, stage=3, config={"zero_optimization": zero})
    found: list[str] = []
    with start(speculative(case, tmp_path, "nvme")) as engine:
        take_step(engine, case, 0)
        shard_store = engine.optimizer._placements.shard_store
        assert shard_store is not None
        load = shard_store._store.load

        def noted(key: str, out: Tensor) -> Any:
            found.append(key)
            return load(key, out)

        shard_store._store.load = noted  # type: ignore[method-assign]  # to see its calls
        take_step(engine, case, 1)
    assert [sum(f"blocks.{index} " in name for name in found) for index in range(3)] == [2, 2, 1], found


@on_ranks(2)
def test_a_float16_overflow_leaves_everything_as_it_was(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}
    case = Case(mlp, vector_batch, 3, steps=8, config={"fp16": fp16})
    plain, found = train_all([case, speculative(case, tmp_path, "nvme")])
    assert found.differences(plain) == [] and 0 < sum(found.skipped) < 8


def rows_of(step: int, rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(step)),)


def test_an_interrupted_roll_back_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    case = Case(mlp, vector_batch, clip=1e-3)
    whole = train(case)
    with start(speculative(case, tmp_path, "cpu")) as engine:
        monkeypatch.setattr(ParameterVersions, "put", interrupt)
        with pytest.raises(KeyboardInterrupt):
            take_step(engine, case, 0)
        assert [take_step(engine, case, step).loss.item() for step in range(case.steps)] == whole.losses


@on_ranks(2)
def test_a_bad_gradient_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """In an evaluation, and after the step that follows; an update that is delayed stays under way."""
    case = Case(Explodes, rows_of)
    cases = [speculative(case.at(1), tmp_path, "cpu")]
    cases += [speculative(case.at(s, config={"bf16": {"enabled": True}}), tmp_path, "nvme") for s in (1, 3)]
    cases += [speculative(case.at(1), tmp_path, "nvme", "delayed", delay_after_steps=0)]
    for case in cases:
        states, evaluated = [], []
        for has_bad_step in (False, True):
            with start(case) as engine:
                model: Any = engine.module
                for step in (0, 1):
                    take_step(engine, case, step)
                evaluated.append(engine.eval_step(case.share(engine, 2)))
                if has_bad_step:
                    model.factor = 2.0
                    with pytest.raises(NonFiniteGradientError, match="No parameter was updated"):
                        take_step(engine, case, 2)
                    model.factor = 0.0
                    evaluated.append(engine.eval_step(case.share(engine, 2)))
                take_step(engine, case, 2)
                states.append(engine.state_dict())
        assert differences(*states) == [] and evaluated.count(evaluated[0]) == 3, case


@pytest.mark.parametrize("overlap", ["none", "speculative"])
@on_ranks(2)
def test_a_load_in_the_middle_of_a_step_is_whole(tmp_path: Path, overlap: str) -> None:
    """In its middle no save is possible, and weights are full."""
    case = Case(mlp, vector_batch, stage=3, config={"communication": {"transport": "sockets"}})
    with start(speculative(case, tmp_path, "nvme", overlap)) as engine:
        batch = case.share(engine, 0)
        engine.train_step(batch)
        engine.save_checkpoint(tmp_path / "at")
        losses = []
        for _ in range(2):
            engine.backward(engine(*batch))
            words = "save_checkpoint: expected a call between steps, found 1 of 1 microbatches"
            assert words in refusal(engine.save_checkpoint, tmp_path / "at")
            engine.load_checkpoint(tmp_path / "at")
            losses.append(engine.train_step(batch).loss.item())
            engine(*batch)  # the rest and the last block stay full for a backward that never comes
            engine.load_checkpoint(tmp_path / "at")
            losses.append(engine.eval_step(batch).item())
    assert losses == losses[:2] * 2


WAITED_FOR = patch.object(step_update, "_is_waited_for", lambda device: True)  # the CPU is taken for such a device


class LacksGradients(models.Mlp):
    """A layer is not used on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(7, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        rank, world_size = rank_and_world()
        return nn.functional.mse_loss(self.last(self.layers(self.own(x) if rank < world_size - 1 else x)), y)


class LacksMore(LacksGradients):
    """Another layer is used on none."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(7, 7)


def overflowing(build: Any, stage: int, transport: str = "auto") -> Case:
    config = {"fp16": {"enabled": True, "initial_scale_power": 3}, "communication": {"transport": transport}}
    return Case(build, overflowing_batch, stage, clip=0.3 if build is not models.mlp else 0.0, config=config)


CASES = [
    overflowing(models.mlp, 3),
    overflowing(LacksGradients, 1, "shared_memory"),
    overflowing(LacksGradients, 2, "sockets"),
    overflowing(LacksMore, 2, "sockets"),
]


@on_ranks(2)
def test_it_gives_the_same_bits() -> None:
    """Where a rank has no gradient of a layer when a step overflows. Plain steps of a device: tests/pretend."""
    for case in CASES:
        plain = train(case)
        with WAITED_FOR:
            started = train(case)
        assert plain.differences(started) == [] and (plain.scales, plain.skipped) == (started.scales, started.skipped)
        assert any(plain.skipped)


class OfRank0(nn.Module):
    """The second layer gets a gradient on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return (self.sometimes(x) if rank_and_world()[0] == 0 else x).square().mean()


def overflow_where_one_rank_waits(stage: int) -> tuple[list[bool], int, Tensor]:
    config = {
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "communication": {"transport": "native", "timeout_seconds": 20},  # as of a device
    }
    with WAITED_FOR, start(Case(OfRank0, models.vector_batch, stage, clip=0.1, config=config)) as engine:
        batches = [torch.full((2, 4), value) for value in (1.0, 60000.0, 1.0)]
        skipped = [engine.train_step((batch,)).skipped for batch in batches]
        return skipped, engine.optimizer.num_steps, engine.full("sometimes.weight")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_has_to_wait_goes_with_one_that_does_not(ranks: RankPool, stage: int) -> None:
    (skipped, num_steps, value), other = ranks(2, overflow_where_one_rank_waits, stage)
    assert (skipped, num_steps) == ([False, True, False], 2) == other[:2]
    assert torch.equal(value, other[2])


@pytest.mark.parametrize("norm", [0.0, 0.25, 0.2999999, 0.5, 2.0**100])
@pytest.mark.parametrize("clipping", [Clipping(0.3), Clipping(0.3, is_by_hand=True), Clipping(fixed=0.5), Clipping()])
def test_a_factor_is_the_same_where_its_norm_is(clipping: Clipping, norm: float) -> None:
    total = torch.zeros(2 * NUM_LIMBS + 5, dtype=torch.int64)
    total[:NUM_LIMBS] = to_limbs(torch.tensor([norm**2], dtype=torch.float64))
    factor, skip = SummedStep(total, 0, None, (), 1, 0).factor_and_skip(clipping, 0.5)
    assert factor.item() == pytest.approx(clipping.factor(norm / 2) / 2, rel=1e-15) and skip.item() == 0
