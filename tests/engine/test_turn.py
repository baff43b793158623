"""An engine makes one call at a time, for one thread, until it is closed; anything else is an error that says so."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Engine
from lowtide.zero.sequence import StateError

BATCH = torch.ones(2, 4)
CALLS: dict[str, Callable[[Engine], Any]] = {
    "engine.train_step()": lambda engine: engine.train_step(BATCH),
    "engine(...)": lambda engine: engine(BATCH),
    "engine.backward()": lambda engine: engine.backward(torch.ones((), requires_grad=True)),
    "engine.step()": lambda engine: engine.step(),
    "engine.eval_step()": lambda engine: engine.eval_step(BATCH),
    "engine.state_dict()": lambda engine: engine.state_dict(),
    "engine.full()": lambda engine: engine.full("weight"),
    "engine.set_full()": lambda engine: engine.set_full("weight", torch.zeros(2, 4)),
    "engine.local()": lambda engine: engine.local("weight"),
    "engine.set_local()": lambda engine: engine.set_local("weight", torch.zeros(8)),
    "engine.gradient()": lambda engine: engine.gradient("weight"),
    "engine.clip_grad_norm_()": lambda engine: engine.clip_grad_norm_(1.0),
    "engine.load_state_dict()": lambda engine: engine.load_state_dict({}),
    "engine.ema()": lambda engine: engine.ema(),
    "engine.export()": lambda engine: engine.export("nowhere"),
    "engine.load_weights()": lambda engine: engine.load_weights("nowhere"),
    "engine.save_checkpoint()": lambda engine: engine.save_checkpoint("nowhere"),
    "engine.load_checkpoint()": lambda engine: engine.load_checkpoint("nowhere"),
}
GATHERED = "engine.gathered() (zero.GatheredParameters in lowtide.deepspeed)"
CONFIG: dict[str, Any] = {"optimizer": {"type": "sgd"}, "zero_optimization": {"stage": 3}, "steps_per_print": 0}


def make_engine() -> Engine:
    return lowtide.initialize(nn.Linear(4, 2), CONFIG, loss_fn=lambda output, batch: output.square().mean())


@pytest.fixture(scope="module")
def closed() -> Engine:
    engine = make_engine()
    engine.close()
    engine.close()
    return engine


def enter_gathered(engine: Engine) -> None:
    with engine.gathered():
        pass


@pytest.mark.parametrize("what", [*CALLS, GATHERED])
def test_a_closed_engine_makes_no_call(closed: Engine, what: str) -> None:
    with pytest.raises(StateError) as caught:
        (CALLS | {GATHERED: enter_gathered})[what](closed)
    assert str(caught.value).startswith(
        f"{what}: expected an open engine, found a closed engine (engine.close(), destroy() in"
    )


@pytest.mark.parametrize("what", [*CALLS, "engine.close()"])
def test_a_hook_cannot_make_a_call_of_the_engine(what: str) -> None:
    with make_engine() as engine:
        call = (CALLS | {"engine.close()": Engine.close})[what]
        weight = engine.module.get_parameter("weight")
        for register in (engine.module.register_forward_hook, weight.register_post_accumulate_grad_hook):
            handle = register(lambda *unused: call(engine) and None)
            with pytest.raises(StateError) as caught:
                engine.train_step(BATCH)
            handle.remove()
            assert str(caught.value).startswith(f"{what}: expected no call in progress, found engine.train_step(): ")
            assert str(caught.value).endswith("or a signal handler; call it when engine.train_step() has returned")
        assert engine.train_step(BATCH).loss.isfinite()


def test_a_hook_may_read_full_values() -> None:
    seen: list[Tensor] = []
    with make_engine() as engine:
        weight = engine.module.get_parameter("weight")

        def read(*unused: Any) -> None:
            with engine.gathered(weight):
                seen.append(weight.detach().clone())

        engine.module.register_forward_pre_hook(read)
        engine.eval_step(BATCH)
    assert seen[0].shape == (2, 4)


@pytest.mark.parametrize("what", [*CALLS, GATHERED, "engine.close()"])
def test_two_threads_cannot_be_in_an_engine_at_once(what: str) -> None:
    is_inside, may_go_on = threading.Event(), threading.Event()

    def stop(*unused: Any) -> None:
        is_inside.set()
        assert may_go_on.wait(20)

    with make_engine() as engine:
        handle = engine.module.register_forward_hook(stop)
        thread = threading.Thread(target=engine.train_step, args=(BATCH,), name="trainer")
        thread.start()
        assert is_inside.wait(20)
        with pytest.raises(StateError) as caught:
            (CALLS | {GATHERED: enter_gathered, "engine.close()": Engine.close})[what](engine)
        may_go_on.set()
        thread.join()
        handle.remove()
        assert str(caught.value) == (
            f"{what}: an engine belongs to a single thread at a time: expected it free for thread 'MainThread', found "
            "thread 'trainer' in engine.train_step(); make all calls in the same thread, or hold a lock from the "
            "forward to the end of the step"
        )
        assert engine.global_step == 1 and engine.train_step(BATCH).loss.isfinite()
