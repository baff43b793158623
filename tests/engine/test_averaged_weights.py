"""`engine.ema` keeps the averages of torch's AveragedModel, shows them in the place of weights, and saves them."""

import logging
import math
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowtide
from lowtide import Engine
from lowtide.checkpoint.export import export_source
from lowtide.checkpoint.folder import CheckpointFolder
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, adamw, one_thread

DECAY = 0.8
CASE = Case(models.short_gpt_float64, models.token_batch, clip=0.5, steps=3)
BF16 = {"bf16": {"enabled": True}}
Averaged = tuple[list[dict[str, Tensor]], float, dict[str, Tensor]]


def batch_of(engine: Engine, case: Case, step: int) -> tuple[Tensor, ...]:
    batch = case.global_batch(step, engine.data_size)
    return tuple(tensor.chunk(engine.data_size)[engine.data_rank] for tensor in batch)


def bits_of(engine: Engine) -> list[Tensor]:
    """Master weights, states and what is computed with, as this rank has them."""
    engine.full(next(iter(dict(engine.named_parameters()))))  # what is on its way has come
    named = engine._archive.named
    chunk_views = [*named.weights(), *named.states(), *named.weights(rounded=True)]
    return [chunk_view.values.clone() for chunk_view in chunk_views]


def train_and_average(case: Case) -> Averaged:
    """The averages at the beginning and after each step, the loss that they give, and the weights in the end."""
    torch.manual_seed(0)
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        engine.ema(DECAY)
        seen: list[dict[str, Tensor]] = []
        for step in range(case.steps + 1):
            before = bits_of(engine)
            with engine.ema_weights():
                seen.append(engine.state_dict())
                loss = engine.eval_step(batch_of(engine, case, 0)).item()
            assert all(map(torch.equal, bits_of(engine), before))
            if step < case.steps:
                engine.train_step(batch_of(engine, case, step))
        return seen, loss, engine.state_dict()


def average_all(cases: list[Case]) -> list[Averaged]:
    return [train_and_average(case) for case in cases]


@one_thread()
def averaged_by_torch(case: Case, world_size: int) -> Averaged:
    torch.manual_seed(0)
    model = case.build()
    optimizer = adamw(model.parameters())
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    seen = []
    for step in range(case.steps + 1):
        seen.append({name: value.clone() for name, value in averaged.module.state_dict().items()})
        if step < case.steps:
            optimizer.zero_grad()
            model(*case.global_batch(step, world_size)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), case.clip or math.inf)
            optimizer.step()
            averaged.update_parameters(model)
    with torch.no_grad():
        loss = averaged(*case.global_batch(0, world_size)).item()
    return seen, loss, dict(model.state_dict())


def assert_averages(found: Averaged, expected: Averaged, tolerance: float, what: object) -> None:
    for ours, theirs in zip([*found[0], found[2]], [*expected[0], expected[2]], strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(
                ours[name], value, rtol=tolerance, atol=tolerance, msg=f"{what} {name}: {{}}".format
            )
    assert found[1] == pytest.approx(expected[1], rel=10 * tolerance)


@pytest.mark.parametrize(
    ("world_size", "transport", "stages"), [(1, "auto", (0, 3)), (2, "shared_memory", (1, 3)), (2, "sockets", (0, 2))]
)
def test_averages_are_those_of_torch(ranks: RankPool, world_size: int, transport: str, stages: tuple[int, ...]) -> None:
    cases = [CASE.at(stage, config={"communication": {"transport": transport}}) for stage in stages]
    expected = averaged_by_torch(CASE, world_size)
    for case, found in zip(cases, ranks(world_size, average_all, cases)[0], strict=True):
        assert_averages(found, expected, 1e-9, f"stage {case.stage}")


def test_averages_of_float32_agree_too() -> None:
    case = Case(models.short_gpt, models.token_batch, steps=4)
    with one_thread():
        assert_averages(train_and_average(case), averaged_by_torch(case, 1), 1e-5, "float32")


def average(old: Tensor, new: Tensor) -> Tensor:
    return old.lerp(new, 1 - DECAY)


def average_masters(stages: tuple[int, ...]) -> list[list[Tensor]]:
    """Each shown average in float32, its rounded copy, and what torch's formula makes of the master weights."""
    found = []
    for stage in stages:
        torch.manual_seed(0)
        case = Case(models.short_gpt, models.token_batch, stage, config=BF16)
        with lowtide.initialize(case.build(), case.as_config()) as engine:
            masters = []
            engine.ema(DECAY)
            for step in range(4):
                engine.train_step(batch_of(engine, case, step))
                masters.append(engine.full("blocks.0.up.weight"))
            with engine.ema_weights():
                shown, state = engine.full("blocks.0.up.weight"), engine.state_dict()
                found.append([shown, reduce(average, masters), state.get("blocks.0.up.weight", shown.bfloat16())])
    return found


def test_master_weights_are_averaged_where_there_are_any(ranks: RankPool) -> None:
    for shown, expected, rounded in ranks(2, average_masters, (0, 2, 3))[0]:
        assert shown.dtype == torch.float32 and torch.equal(shown, expected)
        assert torch.equal(rounded, shown.bfloat16())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_they_are_the_same_wherever_weights_and_states_rest(ranks: RankPool, tmp_path: Path, precision: str) -> None:
    file = {"device": "nvme", "nvme_path": str(tmp_path)}
    offloads: list[dict[str, Any]] = [
        {},
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": file, "offload_param": file},
        {"offload_optimizer": {**file, "ratio": 0.5}},
        {"offload_optimizer": {**file, "overlap": "speculative"}},
    ]
    offloads = offloads if precision == "bf16" else offloads[::2]
    case = Case(models.short_gpt, models.token_batch, clip=1.0, config=BF16 if precision == "bf16" else {})
    cases = [case.at(3, config={"zero_optimization": offload}) for offload in offloads]
    plain, *others = ranks(2, average_all, cases)[0]
    for found in others:
        assert found[1] == plain[1]
        for ours, theirs in zip(found[0], plain[0], strict=True):
            assert [name for name, value in theirs.items() if not torch.equal(ours[name], value)] == []


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_delayed_update_is_averaged_when_it_is_made(precision: str) -> None:
    """The averages are those of the weights that the updates have made, whenever they are taken over."""
    delayed = {"offload_optimizer": {"device": "cpu", "overlap": "delayed", "delay_after_steps": 1}}
    config = {"zero_optimization": delayed, **(BF16 if precision == "bf16" else {})}
    case = Case(models.mlp, models.vector_batch, stage=2, config=config)
    torch.manual_seed(0)
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        masters = []
        engine.ema(DECAY)
        for step in range(4):
            engine.train_step(case.global_batch(step, 1))
            masters.append(engine.full("first.weight"))
        with engine.ema_weights():
            assert torch.equal(engine.full("first.weight"), reduce(average, masters))


def test_an_update_in_the_backward_is_averaged() -> None:
    in_backward = {"zero_optimization": {"update_in_backward": True}}
    case = Case(models.mlp, models.vector_batch, stage=2, steps=3)
    expected = train_and_average(case)
    assert_averages(train_and_average(case.at(2, config=in_backward)), expected, 1e-7, "in backward")


def test_a_skipped_step_is_not_averaged() -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 4}, "optimizer": {"type": "sgd", "params": {"lr": 0.1}}}
    with lowtide.initialize(models.Explodes(), {"steps_per_print": 0, **config}) as engine:
        engine.ema(0.5)
        weights = []
        for factor in (0.0, 2.0, 0.0):
            engine.module.__dict__["factor"] = factor
            is_skipped = engine.train_step(torch.ones(1, models.FEATURES)).skipped
            weights.append(engine.full("layers.0.weight"))
            assert is_skipped == (factor == 2.0)
        with engine.ema_weights():
            assert torch.equal(engine.full("layers.0.weight"), weights[0].lerp(weights[2], 0.5))


# -- saving --------------------------------------------------------------------------------------------------------


def save(case: Case, folder: Path, has_averages: bool) -> dict[str, Tensor]:
    """Three steps, a checkpoint, two steps more; the averages then."""
    torch.manual_seed(0)
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        if has_averages:
            engine.ema(DECAY)
        for step in range(5):
            engine.train_step(batch_of(engine, case, step))
            if step == 2:
                engine.save_checkpoint(folder)
                if has_averages:
                    with engine.ema_weights():
                        engine.export(folder / "plain", dtype="fp32")
        return averages_of(engine) if has_averages else engine.state_dict()


def averages_of(engine: Engine) -> dict[str, Tensor]:
    with engine.ema_weights():
        return engine.state_dict()


def load(case: Case, folder: Path, has_averages: bool) -> tuple[dict[str, Tensor], ...]:
    """What is loaded, and two steps later; averages, or weights."""
    torch.manual_seed(1)
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        if has_averages:
            engine.ema(DECAY)
        engine.load_checkpoint(folder)
        loaded = averages_of(engine) if has_averages else engine.state_dict()
        for step in (3, 4):
            engine.train_step(batch_of(engine, case, step))
        return loaded, averages_of(engine) if has_averages else engine.state_dict()


@pytest.mark.parametrize(("saved", "stage", "world_size"), [(2, 0, 1), (2, 3, 2), (0, 1, 1)])
def test_a_checkpoint_goes_on_elsewhere(
    ranks: RankPool, tmp_path: Path, saved: int, stage: int, world_size: int
) -> None:
    """Saved by two ranks at another stage, with as many rows a batch; while training goes on."""
    case = Case(models.short_gpt, models.token_batch, config={"checkpoint": {"async": True}})
    expected = ranks(2, save, case.at(saved), tmp_path, True)[0]
    other = case.at(stage, config={"train_micro_batch_size_per_gpu": 4 // world_size})
    other = Case(other.build, batch_of_four, other.stage, config=other.config)
    loaded, later = ranks(world_size, load, other, tmp_path, True)[0]
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert [name for name, value in plain.items() if not torch.equal(loaded[name], value)] == []
    torch.testing.assert_close(later, expected, rtol=1e-4, atol=1e-5)
    export_source(CheckpointFolder(tmp_path).open().averaged_weights, tmp_path / "from checkpoint", dtype=torch.float32)
    again = load_file(tmp_path / "from checkpoint" / "model.safetensors")
    assert [name for name, value in plain.items() if not torch.equal(again[name], value)] == []


def batch_of_four(step: int, rows: int) -> tuple[Tensor, ...]:
    """The global batch of two ranks with two rows each, at any number of ranks."""
    return models.token_batch(step, 4)


def test_a_checkpoint_with_averages_and_an_engine_without_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(models.mlp, models.vector_batch)
    save(case, tmp_path / "with", True)
    expected = save(case, tmp_path / "without", False)
    with caplog.at_level(logging.WARNING, "lowtide"):
        _, weights = load(case, tmp_path / "with", False)
    assert "the checkpoint has moving averages of the weights, but they were not loaded, and the next" in caplog.text
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    caplog.clear()
    with caplog.at_level(logging.WARNING, "lowtide"):
        loaded, _ = load(case, tmp_path / "without", True)
    assert "the checkpoint has no moving averages of the weights: they restart from the loaded weights" in caplog.text
    assert all(torch.equal(loaded[name], value) for name, value in load(case, tmp_path / "without", False)[0].items())
    with pytest.raises(ValueError, match="expected moving averages, found none"):
        _ = CheckpointFolder(tmp_path / "without").open().averaged_weights


# -- what cannot be ------------------------------------------------------------------------------------------------


def make_engine() -> Engine:
    return lowtide.initialize(models.mlp(), {**Case(models.mlp, models.vector_batch).as_config()})


def test_memory_is_counted() -> None:
    with make_engine() as engine:
        before = engine.memory().optimizer_bytes
        engine.ema()
        numel = sum(shard.group.layout.shard_numel for shard in engine.optimizer.shards)
        assert engine.memory().optimizer_bytes == before + 4 * numel


def test_what_is_no_average_is_refused() -> None:
    with make_engine() as engine:
        with pytest.raises(
            ValueError, match=r"ema_weights\(\): expected averages, found none; call engine.ema\(decay\)"
        ):
            engine.ema_weights().__enter__()
        with pytest.raises(ValueError, match=r"engine.ema\(\): expected a decay from 0 to 1, found 1.5"):
            engine.ema(1.5)
        engine.ema(0.9)
        with pytest.raises(ValueError, match=r"expected one call, found another: averages with decay 0\.9 are kept"):
            engine.ema(0.99)


def modify(engine: Engine) -> None:
    with engine.gathered(modify=True):
        pass


CHANGES: dict[str, Any] = {
    "backward": lambda engine: engine.train_step(models.vector_batch(0, 2)),
    "engine.save_checkpoint()": lambda engine: engine.save_checkpoint("nowhere"),
    "engine.close()": lambda engine: engine.close(),
    "a change of the weights": modify,
}


@pytest.mark.parametrize("what", CHANGES)
def test_weights_are_not_changed_while_averages_are_shown(what: str) -> None:
    with make_engine() as engine:
        engine.ema(0.9)
        engine.backward(engine(*models.vector_batch(0, 2)))
        with engine.ema_weights():
            for name, call in {what: CHANGES[what], "engine.step()": Engine.step}.items():
                if what != "backward" or name == what:  # which forgets the step
                    with pytest.raises(StateError) as caught:
                        call(engine)
                    assert str(caught.value) == (
                        f"{name}: expected the weights of the training, found averages in their place, because the "
                        "call is inside of `with engine.ema_weights():`, which is for evaluation and export; call it "
                        "afterwards"
                    )
        engine.train_step(models.vector_batch(0, 2))


def test_an_error_inside_puts_the_weights_back() -> None:
    with make_engine() as engine:
        engine.ema(0.9)
        for step in range(2):
            engine.train_step(models.vector_batch(step, 2))
        before = engine.state_dict()
        with pytest.raises(KeyError), engine.ema_weights():
            assert not torch.equal(engine.state_dict()["last.bias"], before["last.bias"])
            raise KeyError
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
