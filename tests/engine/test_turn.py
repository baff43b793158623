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
from tests.kit.training import refusal, settings

BATCH = torch.ones(2, 4)


def enter_gathered(engine: Engine) -> None:
    with engine.gathered():
        pass


CALLS: dict[str, Callable[[Engine], Any]] = {
    "engine.train_step()": lambda engine: engine.train_step(BATCH),
    "engine(...)": lambda engine: engine(BATCH),
    "engine.backward()": lambda engine: engine.backward(torch.ones((), requires_grad=True)),
    "engine.step()": Engine.step,
    "engine.eval_step()": lambda engine: engine.eval_step(BATCH),
    "engine.state_dict()": Engine.state_dict,
    "engine.full()": lambda engine: engine.full("weight"),
    "engine.set_full()": lambda engine: engine.set_full("weight", torch.zeros(2, 4)),
    "engine.local()": lambda engine: engine.local("weight"),
    "engine.set_local()": lambda engine: engine.set_local("weight", torch.zeros(8)),
    "engine.gradient()": lambda engine: engine.gradient("weight"),
    "engine.clip_grad_norm_()": lambda engine: engine.clip_grad_norm_(1.0),
    "engine.load_state_dict()": lambda engine: engine.load_state_dict({}),
    "engine.ema()": Engine.ema,
    "engine.export()": lambda engine: engine.export("nowhere"),
    "engine.load_weights()": lambda engine: engine.load_weights("nowhere"),
    "engine.save_checkpoint()": lambda engine: engine.save_checkpoint("nowhere"),
    "engine.load_checkpoint()": lambda engine: engine.load_checkpoint("nowhere"),
    "engine.gathered() (zero.GatheredParameters in lowtide.deepspeed)": enter_gathered,
    "engine.close()": Engine.close,
}


def make_engine() -> Engine:
    return lowtide.initialize(nn.Linear(4, 2), settings(3), loss_fn=lambda output, batch: output.square().mean())


def test_a_closed_engine_makes_no_call() -> None:
    engine = make_engine()
    engine.close()
    engine.close()
    for what, call in CALLS.items():
        if what != "engine.close()":
            text = refusal(call, engine, kind=StateError)
            assert text.startswith(
                f"{what}: expected an open engine, found a closed engine (engine.close(), destroy() in"
            )


@pytest.mark.parametrize("what", [what for what in CALLS if "gathered" not in what])
def test_a_hook_cannot_make_a_call_of_the_engine(what: str) -> None:
    with make_engine() as engine:
        weight = engine.module.get_parameter("weight")
        for register in (engine.module.register_forward_hook, weight.register_post_accumulate_grad_hook):
            handle = register(lambda *unused: CALLS[what](engine) and None)
            text = refusal(engine.train_step, BATCH, kind=StateError)
            handle.remove()
            assert text.startswith(f"{what}: expected no call in progress, found engine.train_step(): ")
            assert text.endswith("or a signal handler; call it when engine.train_step() has returned")
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


def test_two_threads_cannot_be_in_an_engine_at_once() -> None:
    is_inside, may_go_on = threading.Event(), threading.Event()

    def stop(*unused: Any) -> None:
        is_inside.set()
        assert may_go_on.wait(20)

    with make_engine() as engine:
        handle = engine.module.register_forward_hook(stop)
        thread = threading.Thread(target=engine.train_step, args=(BATCH,), name="trainer")
        thread.start()
        assert is_inside.wait(20)
        texts = {what: refusal(call, engine, kind=StateError) for what, call in CALLS.items()}
        may_go_on.set()
        thread.join()
        handle.remove()
        assert engine.global_step == 1 and engine.train_step(BATCH).loss.isfinite()
    for what, text in texts.items():
        assert text == (
            f"{what}: an engine belongs to a single thread at a time: expected it free for thread 'MainThread', found "
            "thread 'trainer' in engine.train_step(); make all calls in the same thread, or hold a lock from the "
            "forward to the end of the step"
        )
