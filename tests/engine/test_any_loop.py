"""Loops of people's own train as in plain torch: `loss.backward()`, in any number, of any graph through an engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.engine.step.steps import NO_BACKWARD, NO_GRADIENT
from lowtide.zero.sequence import StateError
from tests.engine.loops import (
    LOOPS,
    OPTIMIZER,
    Loop,
    batch,
    blocks_after_an_error,
    blocks_called_alone,
    methods,
    methods_twice,
    net,
    run,
    run_plainly,
    weighted_by_own_gradients,
)
from tests.kit.ranks import RankPool

CHOSEN = {  # for loops that take turns; of two ranks, every second loop is on each transport
    "solo": ("all in files", "speculating"),
    "shared_memory": ("stage 3", "stage 1", "stage 3", "each rank its own shards"),
    "sockets": ("stage 0", "stage 2", "stage 3"),
}


def kinds(transport: str, folder: Path, number: int) -> dict[str, dict[str, Any]]:
    """What the loop of this number is run with."""
    files = {"device": "nvme", "nvme_path": str(folder)}
    sections: dict[str, dict[str, Any]] = {
        **{f"stage {stage}": {"stage": stage} for stage in range(4)},
        "all in files": {"stage": 3, "offload_optimizer": files, "offload_param": files},
        "speculating": {"stage": 1, "offload_optimizer": {**files, "overlap": "speculative"}},
        "each rank its own shards": {"stage": 2, "shard_size": 1},
    }
    predivided: dict[str, Any] = {"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 4.0}
    kind = CHOSEN[transport][number % len(CHOSEN[transport])]
    found = {kind: {"zero_optimization": sections[kind]}}
    return {**found, "predivided": predivided} if transport == "solo" else found


LEFT_OUT = {
    # Past what the engine has returned, which is multiplied; and gradients of its own that autograd.grad gives are too.
    "predivided": (blocks_called_alone, methods, methods_twice, blocks_after_an_error, weighted_by_own_gradients),
    # A method that reads a parameter itself, between two backwards of a step, sees what is tried in it.
    "speculating": (methods_twice,),
}


def loops_of(transport: str) -> tuple[Loop, ...]:
    return LOOPS if transport == "solo" else LOOPS[transport == "sockets" :: 2]


def run_all(transport: str, folder: Path) -> dict[tuple[str, str], list[dict[str, Tensor]]]:
    transport_of = {"communication": {"transport": transport}} if transport != "solo" else {}
    return {
        (loop.__name__, kind): run(loop, {**config, **transport_of})
        for number, loop in enumerate(loops_of(transport))
        for kind, config in kinds(transport, folder, number).items()
        if loop not in LEFT_OUT.get(kind, ())
    }


@pytest.mark.parametrize("transport", ["solo", "shared_memory", "sockets"])
def test_every_loop_trains_as_in_plain_torch(ranks: RankPool, transport: str, tmp_path: Path) -> None:
    world_size = 1 if transport == "solo" else 2
    expected = {loop.__name__: run_plainly(loop, world_size) for loop in loops_of(transport)}
    for (loop, kind), states in ranks(world_size, run_all, transport, tmp_path)[0].items():
        what = f"{loop}, {kind}"
        for found, wanted in zip(states, expected[loop], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=f"{what}: {{}}".format)


def engine_for(stage: int = 0, **zero: Any) -> lowtide.Engine:
    torch.manual_seed(0)
    return lowtide.initialize(net(), {"optimizer": OPTIMIZER, "zero_optimization": {"stage": stage, **zero}})


def loss_of(engine: lowtide.Engine, step: int = 0) -> Tensor:
    loss: Tensor = engine(batch(step, engine.rank)).square().mean()
    return loss


@pytest.mark.parametrize("stage", [0, 3])
def test_a_graph_from_before_a_step_is_refused_as_in_torch(stage: int) -> None:
    with engine_for(stage) as engine:
        loss = loss_of(engine)
        loss.backward(retain_graph=True)
        engine.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_loss_is_scaled_in_parts_and_never_twice() -> None:
    gradients = []
    for factor in (1.0, 4.0):
        torch.manual_seed(0)
        head = torch.nn.Linear(1, 2)
        with lowtide.initialize(net(), {"optimizer": OPTIMIZER, "gradient_predivide_factor": factor}) as engine:
            h = head(engine(batch(0, 0)))
            (engine.scale(h.square().mean()) + engine.scale(h.abs().mean())).backward()
            gradients.append(head.weight.grad)
            if factor != 1.0:
                with pytest.raises(StateError, match=r"expected a loss without engine.scale\(\), found a loss with it"):
                    engine.backward(engine.scale(loss_of(engine)))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_that_fails_ends_its_step_and_the_next_one_counts(stage: int) -> None:
    states = []
    for fails in (False, True):
        with engine_for(stage) as engine:
            if fails:
                for again in (False, True):  # with what was heard of the first one still there
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
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


def test_the_loss_of_a_step_is_known_where_the_engine_was_told_it() -> None:
    with engine_for() as engine:
        loss = loss_of(engine)
        engine.scale(loss).backward()
        assert engine.step().loss == loss
        loss_of(engine).backward()
        assert engine.step().loss is None


def unused_steps(stage: int, timing: dict[str, Any]) -> tuple[list[str], list[bool]]:
    """What is said of steps that have no gradient on any rank, and which parameters those of rank 0 alone change."""
    other, errors = torch.ones((), requires_grad=True), []
    with engine_for(stage, **timing) as engine:
        before = engine.state_dict()
        for is_detached in (False, True, False):
            if is_detached:
                engine.backward(loss_of(engine).detach() * other)
            with pytest.raises(StateError) as raised:
                engine.step()
            errors.append(str(raised.value))
        assert engine.global_step == 0
        loss = loss_of(engine)
        engine.backward(loss if engine.rank == 0 else loss.detach() * other)
        engine.step()
        after = engine.state_dict()
    return errors, [not torch.equal(before[name], after[name]) for name in before]


@pytest.mark.parametrize("timing", [{}, {"update_in_backward": True}], ids=["after the norm", "in the backward"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_without_gradients_is_an_error(ranks: RankPool, stage: int, timing: dict[str, Any]) -> None:
    first, second = ranks(2, unused_steps, stage, timing)
    assert first[0] == second[0] == [NO_BACKWARD, NO_GRADIENT, NO_BACKWARD]
    assert "call engine.backward(loss)" in NO_BACKWARD and "was the output of the model detached" in NO_GRADIENT
    assert first[1] and all(first[1])


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
    torch.testing.assert_close(states[0], states[1], rtol=1e-6, atol=1e-7)


def test_what_an_update_in_backward_cannot_take_in_or_back_is_refused() -> None:
    asks = {
        "another backward": lambda engine: loss_of(engine).backward(),
        r"engine.zero_grad\(\)": lambda engine: engine.zero_grad(),
    }
    for what, ask in asks.items():
        with engine_for(1, update_in_backward=True) as engine:
            loss_of(engine).backward()
            with pytest.raises(StateError, match=rf"after the last backward of a step, .*, found {what}; put"):
                ask(engine)


def test_a_backward_in_another_call_of_its_engine_is_refused() -> None:
    with engine_for() as engine, engine.gathered(modify=True):
        loss = engine.module(batch(0, 0)).sum()
        with pytest.raises(
            StateError,
            match=r"loss.backward\(\): expected no call in progress, found engine.gathered\(modify=True\)",
        ):
            loss.backward()


def test_an_output_is_not_changed_in_place_past_its_factor() -> None:
    config = {"optimizer": OPTIMIZER, "gradient_predivide_factor": 4.0}
    with lowtide.initialize(net(), config) as engine, pytest.raises(RuntimeError, match="is being modified inplace"):
        engine(batch(0, 0)).mul_(2)


def test_a_part_of_a_loss_that_was_not_scaled_is_refused() -> None:
    with lowtide.initialize(net(), {"optimizer": OPTIMIZER, "gradient_predivide_factor": 4.0}) as engine:
        loss = loss_of(engine)
        total = engine.scale(loss_of(engine)) + loss
        with pytest.raises(StateError, match=r"expected the whole loss through engine.scale\(\), found a part of it"):
            total.backward()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_clearing_in_the_middle_of_accumulation_is_as_in_torch(stage: int, bf16: bool) -> None:
    states = []
    for clears in (False, True):
        config = {"optimizer": OPTIMIZER, "bf16": {"enabled": bf16}, "zero_optimization": {"stage": stage}}
        torch.manual_seed(0)
        with lowtide.initialize(net(), config) as engine:
            if clears:
                with engine.no_sync():
                    loss_of(engine, step=5).backward()
                engine.module.zero_grad()
            for step in range(2):
                with engine.accumulate(last=step == 1):
                    loss_of(engine, step).backward()
            engine.step()
            states.append(engine.state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
