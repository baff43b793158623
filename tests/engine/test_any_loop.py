"""Loops of people's own train as in plain torch: `loss.backward()`, in any number, of any graph through an engine."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.engine.step.steps import NO_BACKWARD, NO_GRADIENT
from lowtide.zero.sequence import StateError
from tests.engine.loops import LOOPS, OPTIMIZER, PAST_THE_FACTOR, Loop, batch, name_of, net, run, run_plainly
from tests.kit.ranks import RankPool
from tests.kit.training import differences, refusal

CHOSEN = {  # for loops that take turns; of two ranks, every second loop is on each transport
    "solo": ("all in files", "speculating", "predivided"),
    "shared_memory": ("stage 3", "stage 1", "stage 3", "each rank its own shards"),
    "sockets": ("stage 0", "stage 2", "stage 3"),
}


def config_of(transport: str, folder: Path, number: int, loop: str) -> tuple[str, dict[str, Any]]:
    """What the loop of this number is run with, and its name."""
    files = {"device": "nvme", "nvme_path": str(folder)}
    sections: dict[str, dict[str, Any]] = {
        **{f"stage {stage}": {"stage": stage} for stage in range(4)},
        "all in files": {"stage": 3, "offload_optimizer": files, "offload_param": files},
        "speculating": {"stage": 1, "offload_optimizer": {**files, "overlap": "speculative"}},
        "predivided": {"stage": 3},
        "each rank its own shards": {"stage": 2, "shard_size": 1},
    }
    kind = CHOSEN[transport][number % len(CHOSEN[transport])]
    # Between its backwards `methods_twice` would see what is tried.
    if (kind, loop) == ("speculating", "methods_twice") or (kind == "predivided" and loop in PAST_THE_FACTOR):
        kind = "all in files"
    config: dict[str, Any] = {"zero_optimization": sections[kind]}
    if kind == "predivided":
        config["gradient_predivide_factor"] = 4.0
    if transport != "solo":
        config["communication"] = {"transport": transport}
    return kind, config


def loops_of(transport: str) -> tuple[Loop, ...]:
    return LOOPS if transport == "solo" else LOOPS[transport == "sockets" :: 2]


def run_all(transport: str, folder: Path) -> list[tuple[str, list[dict[str, Tensor]]]]:
    """Of each loop: with what it is run, and the states."""
    found = []
    for number, loop in enumerate(loops_of(transport)):
        kind, config = config_of(transport, folder, number, name_of(loop))
        found.append((kind, run(loop, config)))
    return found


@pytest.mark.parametrize("transport", ["solo", "shared_memory", "sockets"])
def test_every_loop_trains_as_in_plain_torch(ranks: RankPool, transport: str, tmp_path: Path) -> None:
    world_size = 1 if transport == "solo" else 2
    found = ranks(world_size, run_all, transport, tmp_path)[0]
    for loop, (kind, states) in zip(loops_of(transport), found, strict=True):
        what = f"{name_of(loop)}, {kind}: {{}}".format
        torch.testing.assert_close(states, run_plainly(loop, world_size), rtol=1e-5, atol=1e-6, msg=what)


def engine_for(stage: int = 0, bf16: bool = False, **zero: Any) -> lowtide.Engine:
    torch.manual_seed(0)
    config = {"optimizer": OPTIMIZER, "bf16": {"enabled": bf16}, "zero_optimization": {"stage": stage, **zero}}
    return lowtide.initialize(net(), config)


def loss_of(engine: lowtide.Engine, step: int = 0) -> Tensor:
    loss: Tensor = engine(batch(step, engine.rank)).square().mean()
    return loss


@pytest.mark.parametrize("stage", [0, 3])
def test_a_graph_from_before_a_step_is_refused_as_in_torch(stage: int) -> None:
    with engine_for(stage) as engine:
        loss = loss_of(engine)
        loss.backward(retain_graph=True)
        engine.step()
        assert "modified by an inplace operation" in refusal(loss.backward, kind=RuntimeError)


def fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_that_fails_ends_its_step_and_the_next_one_counts(stage: int) -> None:
    states = []
    for fails in (False, True):
        with engine_for(stage) as engine:
            for again in (False, True) if fails else ():  # with what was heard of the first one still there
                loss = loss_of(engine, step=5)
                hook = engine.module.get_parameter("2.weight").register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    loss.backward(retain_graph=again)
                hook.remove()
                if again:
                    loss.backward()
                    engine.zero_grad()
            loss_of(engine).backward()
            engine.step()
            states.append(engine.state_dict())
    assert differences(*states) == []


def test_the_loss_of_a_step_is_known_where_the_engine_was_told_it() -> None:
    with engine_for() as engine:
        loss = loss_of(engine)
        engine.scale(loss).backward()
        assert engine.step().loss == loss
        loss_of(engine).backward()
        assert engine.step().loss is None


def unused_steps(stage: int, timing: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """What is said of steps that have no gradient on any rank, and which parameters those of rank 0 alone change."""
    other = torch.ones((), requires_grad=True)
    with engine_for(stage, **timing) as engine:
        before, errors = engine.state_dict(), []
        for is_detached in (False, True, False):
            if is_detached:
                engine.backward(loss_of(engine).detach() * other)
            errors.append(refusal(engine.step, kind=StateError))
        assert engine.global_step == 0
        loss = loss_of(engine)
        engine.backward(loss if engine.rank == 0 else loss.detach() * other)
        engine.step()
        return errors, differences(before, engine.state_dict()), list(before)


@pytest.mark.parametrize("timing", [{}, {"update_in_backward": True}], ids=["after the norm", "in the backward"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_without_gradients_is_an_error(ranks: RankPool, stage: int, timing: dict[str, Any]) -> None:
    (errors, names, all_names), (others, _, _) = ranks(2, unused_steps, stage, timing)
    assert errors == others == [NO_BACKWARD, NO_GRADIENT, NO_BACKWARD]
    assert "call engine.backward(loss)" in NO_BACKWARD and "was the output of the model detached" in NO_GRADIENT
    assert names == all_names


def test_no_sync_adds_to_the_step_of_the_next_backward() -> None:
    states = []
    for by_hand in (False, True):
        with engine_for() as engine:
            for step in range(3):
                if by_hand:
                    with engine.no_sync():
                        loss_of(engine, step).backward()
                    assert engine.step() is engine.step()  # nothing happens
                    loss_of(engine, step + 1).backward()
                else:
                    (loss_of(engine, step) + loss_of(engine, step + 1)).backward()
                engine.step()
            states.append(engine.state_dict())
    torch.testing.assert_close(*states, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("stage", "bf16"), [(0, True), (1, False), (2, True), (3, False)])
def test_gradients_that_are_cleared_before_another_backward_are_forgotten(stage: int, bf16: bool) -> None:
    """After a whole backward, as what a generator's loss leaves in a critic, and in the middle of accumulation."""
    states = []
    for clears in (False, True):
        with engine_for(stage, bf16) as engine:
            for is_whole in (True, False) if clears else ():
                with nullcontext() if is_whole else engine.no_sync():
                    loss_of(engine, step=5).backward()
                engine.module.zero_grad(set_to_none=is_whole)
            for step in range(2):
                with engine.accumulate(last=step == 1):
                    loss_of(engine, step).backward()
            engine.step()
            states.append(engine.state_dict())
    assert differences(*states) == []


def test_what_an_update_in_backward_cannot_take_in_or_back_is_refused() -> None:
    asks: dict[str, Any] = {
        "another backward": lambda engine: loss_of(engine).backward(),
        "engine.zero_grad()": lambda engine: engine.zero_grad(),
    }
    for what, ask in asks.items():
        with engine_for(1, update_in_backward=True) as engine:
            loss_of(engine).backward()
            text = refusal(ask, engine, kind=StateError)
            assert "after the last backward of a step, " in text and f", found {what}; put" in text


def test_a_backward_in_another_call_of_its_engine_is_refused() -> None:
    with engine_for() as engine, engine.gathered(modify=True):
        loss = engine.module(batch(0, 0)).sum()
        words = "loss.backward(): expected no call in progress, found engine.gathered(modify=True)"
        assert words in refusal(loss.backward, kind=StateError)
