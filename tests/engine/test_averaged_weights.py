"""`engine.ema` keeps the averages of torch's AveragedModel, shows them in the place of weights, and saves them."""

import logging
import math
from collections.abc import Iterator
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
from lowtide.zero.averages import Averages
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import (
    Case,
    adamw,
    differences,
    one_thread,
    rank_and_world,
    refusal,
    share_of,
    take_step,
    trained,
)
from tests.zero.test_special_parameters import ReadFromOutside

DECAY = 0.8
CASE = Case(models.short_gpt_float64, models.token_batch, clip=0.5, steps=3)
MLP = Case(models.mlp, models.vector_batch)
BF16 = {"bf16": {"enabled": True}}
Averaged = tuple[list[dict[str, Tensor]], float, dict[str, Tensor]]


def averages_of(engine: Engine) -> dict[str, Tensor]:
    with engine.ema_weights():
        return engine.state_dict()


def bits_of(engine: Engine) -> list[Tensor]:
    """Master weights, states and what is computed with, as this rank has them."""
    engine.full(next(iter(dict(engine.named_parameters()))))  # what is on its way has come
    named = engine._archive.named
    chunk_views = [*named.weights(), *named.states(), *named.weights(rounded=True)]
    return [chunk_view.values.clone() for chunk_view in chunk_views]


def train_and_average(case: Case) -> Averaged:
    """The averages at the beginning and after each step, the loss that they give, and the weights in the end."""
    with trained(case, 0) as engine:
        engine.ema(DECAY)
        seen: list[dict[str, Tensor]] = []
        for step in range(case.steps + 1):
            before = bits_of(engine)
            with engine.ema_weights():
                seen.append(engine.state_dict())
                loss = engine.eval_step(share_of(case.global_batch(0, engine.data_size))).item()
            assert all(map(torch.equal, bits_of(engine), before))
            if step < case.steps:
                take_step(engine, case, step)
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


def assert_averages(found: Averaged, expected: Averaged, tolerance: float) -> None:
    torch.testing.assert_close([*found[0], found[2]], [*expected[0], expected[2]], rtol=tolerance, atol=tolerance)
    assert found[1] == pytest.approx(expected[1], rel=10 * tolerance)


@pytest.mark.parametrize(("world_size", "transport", "stages"), [(1, "auto", (0,)), (2, "sockets", (2, 3))])
def test_averages_are_those_of_torch(ranks: RankPool, world_size: int, transport: str, stages: tuple[int, ...]) -> None:
    cases = [CASE.at(stage, config={"communication": {"transport": transport}}) for stage in stages]
    expected = averaged_by_torch(CASE, world_size)
    for found in ranks(world_size, average_all, cases)[0]:
        assert_averages(found, expected, 1e-9)


def average(old: Tensor, new: Tensor) -> Tensor:
    return old.lerp(new, 1 - DECAY)


def average_masters(case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
    """A shown average in float32, torch's formula of the master weights, and rank 0's average in the state_dict."""
    with trained(case, 0) as engine:
        name = next(name for name, _ in engine.named_parameters() if name.endswith(("up.weight", "first.weight")))
        masters = []
        engine.ema(DECAY)
        for step in range(4):
            take_step(engine, case, step)
            masters.append(engine.full(name))
        with engine.ema_weights():
            shown = engine.full(name)
            return shown, reduce(average, masters), engine.state_dict().get(name)


@on_ranks(2)
def test_master_weights_are_averaged_where_there_are_any() -> None:
    case = Case(models.short_gpt, models.token_batch, config=BF16)
    for stage in (0, 2, 3):
        shown, expected, rounded = average_masters(case.at(stage))
        assert shown.dtype == torch.float32 and torch.equal(shown, expected)
        assert rank_and_world()[0] or (rounded is not None and torch.equal(rounded, shown.bfloat16()))


@pytest.mark.parametrize("precision", [BF16, {}], ids=["bf16", "fp32"])
def test_a_delayed_update_is_averaged_when_it_is_made(precision: dict[str, Any]) -> None:
    """The averages are those of the weights that the updates have made, whenever they are taken over."""
    delayed = {"offload_optimizer": {"device": "cpu", "overlap": "delayed", "delay_after_steps": 1}}
    shown, expected, _ = average_masters(MLP.at(2, config={"zero_optimization": delayed, **precision}))
    assert torch.equal(shown, expected)


def test_they_are_the_same_wherever_weights_and_states_rest(tmp_path: Path) -> None:
    file = {"device": "nvme", "nvme_path": str(tmp_path)}
    offloads: list[dict[str, Any]] = [
        {"offload_optimizer": file, "offload_param": file},
        {"offload_optimizer": {**file, "ratio": 0.5}},
        {"offload_optimizer": {**file, "overlap": "speculative"}},
    ]
    case = Case(models.short_gpt, models.token_batch, 3, clip=1.0, config=BF16)
    plain = train_and_average(case)
    for offload in offloads:
        found = train_and_average(case.at(3, config={"zero_optimization": offload}))
        assert found[1] == plain[1]
        assert [differences(ours, theirs) for ours, theirs in zip(found[0], plain[0], strict=True)] == [[]] * 4


def test_an_update_in_the_backward_is_averaged() -> None:
    case = Case(models.mlp, models.vector_batch, stage=2)
    in_backward = case.at(2, config={"zero_optimization": {"update_in_backward": True}})
    assert_averages(train_and_average(in_backward), train_and_average(case), 1e-7)


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


def go_on(case: Case, folder: Path, has_averages: bool, loads: bool) -> list[dict[str, Tensor]]:
    """Averages, or weights, after three steps, with a checkpoint there or from it; and after two steps more."""
    with trained(case, 0) as engine:
        if has_averages:
            engine.ema(DECAY)
        look = averages_of if has_averages else Engine.state_dict
        if loads:
            with torch.no_grad(), engine.gathered(modify=True):
                for param in engine.module.parameters():
                    param.fill_(7.0)
            engine.load_checkpoint(folder)
        else:
            for step in range(3):
                take_step(engine, case, step)
            engine.save_checkpoint(folder)
        found = [look(engine)]
        if has_averages and not loads:
            with engine.ema_weights():
                engine.export(folder / "plain", dtype="fp32")
        for step in (3, 4):
            take_step(engine, case, step)
        return [*found, look(engine)]


@pytest.mark.parametrize(("saved", "stage", "world_size"), [(2, 0, 1), (0, 3, 2)])
def test_a_checkpoint_goes_on_elsewhere(
    ranks: RankPool, tmp_path: Path, saved: int, stage: int, world_size: int
) -> None:
    """Saved by two ranks at another stage, with as many rows a batch; while training goes on."""
    case = Case(models.short_gpt, batch_of_four, config={"checkpoint": {"async": True}})
    _, expected = ranks(2, go_on, case.at(saved), tmp_path, True, False)[0]
    other = case.at(stage, config={"train_micro_batch_size_per_gpu": 4 // world_size})
    loaded, later = ranks(world_size, go_on, other, tmp_path, True, True)[0]
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert differences({name: loaded[name] for name in plain}, plain) == []
    torch.testing.assert_close(later, expected, rtol=1e-4, atol=1e-5)
    export_source(CheckpointFolder(tmp_path).open().averaged_weights, tmp_path / "from checkpoint", dtype=torch.float32)
    assert differences(load_file(tmp_path / "from checkpoint" / "model.safetensors"), plain) == []


def batch_of_four(step: int, rows: int) -> tuple[Tensor, ...]:
    """The global batch of two ranks with two rows each, at any number of ranks."""
    return models.token_batch(step, 4)


def test_a_checkpoint_with_averages_and_an_engine_without_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go_on(MLP, tmp_path / "with", True, False)
    saved = go_on(MLP, tmp_path / "without", False, False)
    with caplog.at_level(logging.WARNING, "lowtide"):
        weights = go_on(MLP, tmp_path / "with", False, True)
    assert "the checkpoint has moving averages of the weights, but they were not loaded, and the next" in caplog.text
    assert list(map(differences, weights, saved)) == [[], []]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "lowtide"):
        averages = go_on(MLP, tmp_path / "without", True, True)
    assert "the checkpoint has no moving averages of the weights: they restart from the loaded weights" in caplog.text
    assert differences(averages[0], saved[0]) == []
    with pytest.raises(ValueError, match="expected moving averages, found none"):
        _ = CheckpointFolder(tmp_path / "without").open().averaged_weights


# -- what cannot be ------------------------------------------------------------------------------------------------


def test_what_is_no_average_is_refused_and_memory_is_counted() -> None:
    with trained(MLP, 0) as engine:
        before = engine.memory().optimizer_bytes
        text = refusal(engine.ema_weights().__enter__)
        assert "ema_weights(): expected averages, found none; call engine.ema(decay)" in text
        assert "engine.ema(): expected a decay from 0 to 1, found 1.5" in refusal(engine.ema, 1.5)
        engine.ema(0.9)
        text = refusal(engine.ema, 0.99)
        assert "expected one call, found another: averages with decay 0.9 are kept" in text
        numel = sum(shard.group.layout.shard_numel for shard in engine.optimizer.shards)
        assert engine.memory().optimizer_bytes == before + 4 * numel


CHANGES: dict[str, Any] = {
    "backward": lambda engine: engine.train_step(models.vector_batch(0, 2)),
    "engine.save_checkpoint()": lambda engine: engine.save_checkpoint("nowhere"),
    "engine.close()": lambda engine: engine.close(),
    "a change of the weights": lambda engine: engine.gathered(modify=True).__enter__(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_weights_are_not_changed_while_averages_are_shown(what: str) -> None:
    with trained(MLP, 0) as engine:
        engine.ema(0.9)
        engine.backward(engine(*models.vector_batch(0, 2)))
        with engine.ema_weights():
            for name, call in {what: CHANGES[what], "engine.step()": Engine.step}.items():
                if what != "backward" or name == what:  # which forgets the step
                    assert refusal(call, engine, kind=StateError) == (
                        f"{name}: expected the weights of the training, found averages in their place, because the "
                        "call is inside of `with engine.ema_weights():`, which is for evaluation and export; call it "
                        "afterwards"
                    )
        engine.train_step(models.vector_batch(0, 2))


@on_ranks(2)
def test_a_backward_is_refused_whose_kept_weights_were_exchanged() -> None:
    """A weight that is read outside of its unit is not gathered again, unless ranks share its memory."""
    for transport in ("shared_memory", "sockets"):
        config = {"communication": {"transport": transport}}
        with trained(Case(ReadFromOutside, models.vector_batch_float64, 3, config=config), 1) as engine:
            engine.ema(DECAY)
            loss = engine(*models.vector_batch_float64(0, 2))
            with engine.ema_weights():
                pass
            if transport == "sockets":
                assert "modified by an inplace operation" in refusal(engine.backward, loss, kind=RuntimeError)
            else:
                engine.backward(loss)
                assert not engine.step().skipped


def test_an_error_inside_puts_the_weights_back() -> None:
    with trained(MLP, 0) as engine:
        engine.ema(0.9)
        for step in range(2):
            engine.train_step(models.vector_batch(step, 2))
        before = engine.state_dict()
        with pytest.raises(KeyError), engine.ema_weights():
            assert not torch.equal(engine.state_dict()["last.bias"], before["last.bias"])
            raise KeyError
        assert differences(engine.state_dict(), before) == []


def test_weights_that_were_exchanged_in_part_are_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Averages._pairs

    def first(self: Averages, changes: bool) -> Iterator[tuple[Tensor, Tensor]]:
        yield next(real(self, changes))
        raise KeyboardInterrupt

    with trained(MLP, 0) as engine:
        engine.ema(0.9)
        engine.train_step(models.vector_batch(0, 2))
        engine.save_checkpoint(tmp_path)
        before = engine.state_dict()
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch, engine.ema_weights():
            patch.setattr(Averages, "_pairs", first)
        text = refusal(engine.train_step, models.vector_batch(1, 2), kind=StateError)
        assert "so some weights may be averages; continue from a checkpoint (engine.load_checkpoint)" in text
        engine.load_checkpoint(tmp_path)
        assert differences(engine.state_dict(), before) == []
        engine.train_step(models.vector_batch(1, 2))
